"""Models of tables of further packages: mambular, deeptab, pytorch_tabular, pytabkit and rtdl.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .catalogue import Inputs, add

__all__: list[str] = []

_NUMBERS = {name: {"preprocessing": "standardization", "dimension": 1, "categories": None} for name in "abcde"}
_KINDS = {name: {"preprocessing": "int", "dimension": 1, "categories": n} for name, n in (("f", 5), ("g", 3))}


class _Table(nn.Module):
    """A model of lists of columns and its loss, as its own trainer calls it."""

    def __init__(self, body: nn.Module, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, numbers: list[torch.Tensor], kinds: list[torch.Tensor], y: torch.Tensor) -> Any:
        made = self.body(numbers, kinds, [])
        if isinstance(made, tuple):
            made, penalty = made
            return {"loss": self.loss(made, y) + penalty, "made": made}
        return {"loss": self.loss(made, y), "made": made}


def _squares(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(made, y if made.dim() == 2 else y[:, None].expand_as(made))


def _columns(b: int, n: int) -> dict[str, Any]:
    return {"numbers": [torch.randn(b, 1) for _ in _NUMBERS], "kinds": [torch.randint(0, f["categories"], (b, 1)) for f in _KINDS.values()], "y": torch.randn(b, 1)}


def _lists(package: str, name: str, module: str, config: str, **options: Any) -> None:
    def build(m: Any) -> nn.Module:
        import importlib

        configs = importlib.import_module(f"{package}.configs")
        return _Table(getattr(m, name)(feature_information=(_NUMBERS, _KINDS, {}), num_classes=1, config=getattr(configs, config)(**options)), _squares)

    add(name, module, build, _columns, package)


_SMALL: dict[str, dict[str, Any]] = {
    "FTTransformer": {"d_model": 32, "n_layers": 3, "n_heads": 4, "transformer_dim_feedforward": 64},
    "MLP": {"layer_sizes": [32, 32, 16], "skip_connections": True},
    "NODE": {"num_layers": 2, "layer_dim": 16, "depth": 3},
    "ResNet": {"layer_sizes": [32, 32, 16]},
    "SAINT": {"d_model": 16, "n_layers": 2},
    "TabM": {"layer_sizes": [32, 32, 16], "ensemble_size": 4, "average_ensembles": True},
    "TabTransformer": {"d_model": 32, "n_layers": 3, "n_heads": 4, "transformer_dim_feedforward": 64},
    "TabulaRNN": {"d_model": 32, "n_layers": 2, "model_type": "GRU", "dim_feedforward": 32},
    "NDTF": {"n_ensembles": 3, "max_depth": 6},
    "ENODE": {"num_layers": 2, "layer_dim": 8, "depth": 3},
    "AutoInt": {"d_model": 32, "n_layers": 3, "n_heads": 4},
    "Mambular": {"d_model": 16, "n_layers": 2, "d_state": 8},
    "MambAttention": {"d_model": 16, "n_layers": 2, "d_state": 8, "n_heads": 4},
}
for _name, _options in _SMALL.items():
    _lists("deeptab", _name, "deeptab.architectures", f"{_name}Config", **_options)
    if _name not in ("ENODE", "TabTransformer"):
        _lists("mambular", _name, "mambular.base_models", f"Default{_name}Config", **_options)
_lists("mambular", "Trompt", "mambular.base_models", "DefaultTromptConfig", d_model=16, n_cycles=3, P=8)
_lists("mambular", "Tangos", "mambular.base_models", "DefaultTangosConfig", layer_sizes=[32, 32, 16])


# pytorch_tabular
class _Tabular(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, continuous: torch.Tensor, categorical: torch.Tensor, target: torch.Tensor) -> Any:
        made = self.body({"continuous": continuous, "categorical": categorical})
        return {"loss": F.mse_loss(made["logits"], target), **made}


def _tabular(name: str, config: str, **options: Any) -> None:
    def build(m: Any) -> nn.Module:
        from omegaconf import OmegaConf
        from pytorch_tabular.config import InferredConfig, OptimizerConfig, TrainerConfig

        inferred = InferredConfig(categorical_dim=2, continuous_dim=5, output_dim=1, categorical_cardinality=[5, 3], embedding_dims=[(5, 3), (3, 2)])
        asked = [OmegaConf.to_container(OmegaConf.structured(c)) for c in (getattr(m, config)(task="regression", **options), TrainerConfig(), OptimizerConfig())]
        return _Tabular(getattr(m, name)(config=OmegaConf.merge(*asked), inferred_config=OmegaConf.structured(inferred)))

    add(name.removesuffix("Model"), "pytorch_tabular.models", build, lambda b, n: (torch.randn(b, 5), torch.stack([torch.randint(0, 5, (b,)), torch.randint(0, 3, (b,))], 1), torch.randn(b, 1)))


_tabular("FTTransformerModel", "FTTransformerConfig", input_embed_dim=16, num_heads=4, num_attn_blocks=3)
_tabular("TabTransformerModel", "TabTransformerConfig", input_embed_dim=16, num_heads=4, num_attn_blocks=3)
_tabular("AutoIntModel", "AutoIntConfig", attn_embed_dim=16, num_heads=2, embedding_dim=8)
_tabular("CategoryEmbeddingModel", "CategoryEmbeddingModelConfig", layers="32-32-16", use_batch_norm=True)
_tabular("DANetModel", "DANetConfig", n_layers=4, abstlay_dim_1=8, k=3)
_tabular("GANDALFModel", "GANDALFConfig", gflu_stages=3)
_tabular("GatedAdditiveTreeEnsembleModel", "GatedAdditiveTreeEnsembleConfig", gflu_stages=2, num_trees=3, tree_depth=3)
_tabular("NODEModel", "NodeConfig", num_layers=2, num_trees=8, depth=3, additional_tree_output_dim=2)
_tabular("TabNetModel", "TabNetModelConfig", n_d=8, n_a=8, n_steps=2)


# pytabkit and rtdl
def _mixed(n: int) -> Inputs:
    return lambda b, _: (torch.cat([torch.randn(b, 5), torch.randint(0, 3, (b, 2)).float()], 1),)


def _indicator() -> Any:
    return torch.tensor([False] * 5 + [True] * 2)


add("resnet", "pytabkit.models.nn_models.rtdl_resnet", lambda m: m.ResNet(d_in=5, categories=[3, 3], d_embedding=4, d=32, d_hidden_factor=2.0, n_layers=3, activation="reglu", normalization="layernorm", hidden_dropout=0.1, residual_dropout=0.1, d_out=1, regression=True, categorical_indicator=_indicator()), _mixed(7))
add("ft_transformer", "pytabkit.models.nn_models.rtdl_resnet", lambda m: m.FT_Transformer(d_in=5, categories=[3, 3], token_bias=True, n_layers=3, d_token=32, n_heads=4, d_ffn_factor=1.33, attention_dropout=0.1, ffn_dropout=0.1, residual_dropout=0.0, activation="reglu", prenormalization=True, initialization="kaiming", kv_compression=None, kv_compression_sharing=None, d_out=1, regression=True, categorical_indicator=_indicator()), _mixed(7))
add("mlp_plr", "pytabkit.models.nn_models.rtdl_resnet", lambda m: m.RTDL_MLP(d_in=5, n_layers=3, d_layers=32, d_first_layer=32, d_last_layer=32, dropout=0.1, d_out=1, categories=[3, 3], d_embedding=4, regression=True, categorical_indicator=_indicator(), num_emb_type="plr"), _mixed(7))
add("ft_transformer", "rtdl", lambda m: m.FTTransformer.make_baseline(n_num_features=5, cat_cardinalities=[5, 3], d_token=32, n_blocks=3, attention_dropout=0.1, ffn_d_hidden=32, ffn_dropout=0.1, residual_dropout=0.0, d_out=1), lambda b, n: (torch.randn(b, 5), torch.stack([torch.randint(0, 5, (b,)), torch.randint(0, 3, (b,))], 1)))
add("resnet", "rtdl", lambda m: m.ResNet.make_baseline(d_in=7, n_blocks=3, d_main=32, d_hidden=48, dropout_first=0.1, dropout_second=0.0, d_out=1), lambda b, n: (torch.randn(b, 7),))
