"""Models of tables, actions, codes and time series, of other libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, by_class, rows, sequence

__all__: list[str] = []

for kind, options in {
    "VectorQuantize": {"dim": 32, "codebook_size": 16}, "FSQ": {"levels": [8, 5, 5], "dim": 32},
    "LFQ": {"dim": 32, "codebook_size": 16}, "ResidualVQ": {"dim": 32, "codebook_size": 16, "num_quantizers": 3},
    "SimVQ": {"dim": 32, "codebook_size": 16}, "ResidualFSQ": {"dim": 32, "levels": [8, 5], "num_quantizers": 2},
    "RandomProjectionQuantizer": {"dim": 32, "num_codebooks": 2, "codebook_dim": 8, "codebook_size": 16},
}.items():
    add(kind, "vector_quantize_pytorch", lambda m, k=kind, o=options: nn.Sequential(nn.Linear(32, 32), getattr(m, k)(**o)), sequence())
add("tab_transformer", "tab_transformer_pytorch", lambda m: m.TabTransformer(categories=(4, 5), num_continuous=3, dim=16, dim_out=1, depth=3, heads=2), lambda b, n: (torch.randint(4, (b, 2)), torch.randn(b, 3)))
add("ft_transformer", "tab_transformer_pytorch", lambda m: m.FTTransformer(categories=(4, 5), num_continuous=3, dim=16, dim_out=1, depth=3, heads=2), lambda b, n: (torch.randint(4, (b, 2)), torch.randn(b, 3)))
by_class("rtdl_revisiting_models", rows(8), MLP={"d_in": 8, "d_out": 2, "n_blocks": 3, "d_block": 16, "dropout": 0.1}, ResNet={"d_in": 8, "d_out": 2, "n_blocks": 3, "d_block": 16, "d_hidden": 16, "d_hidden_multiplier": None, "dropout1": 0.1, "dropout2": 0.1})
add("tabm", "tabm", lambda m: m.TabM.make(n_num_features=8, d_out=2), rows(8))
add("tabnet", "pytorch_tabnet.tab_network", lambda m: m.TabNet(8, 2, group_attention_matrix=torch.eye(8)), rows(8))
add("ppo", "stable_baselines3.common.torch_layers", lambda m: m.MlpExtractor(8, [16, 16], nn.Tanh), rows(8))

FIELDS = "deepctr_torch.inputs"
for name in ["DeepFM", "DCN", "xDeepFM", "AutoInt", "WDL", "NFM", "FiBiNET", "PNN"]:
    add(name, "deepctr_torch.models", lambda m, n=name: _clicks(m, n), lambda b, n: (torch.cat([torch.randint(8, (b, 3)).float(), torch.rand(b, 2)], 1),))
add("actor_critic", "stable_baselines3.common.policies", lambda m: m.ActorCriticPolicy(_box(8), _box(2), lambda progress: 1e-3), rows(8))
add("q_network", "stable_baselines3.dqn.policies", lambda m: m.DQNPolicy(_box(8), importlib.import_module("gymnasium.spaces").Discrete(3), lambda progress: 1e-3), rows(8))
add("sac_actor", "stable_baselines3.sac.policies", lambda m: m.SACPolicy(_box(8), _box(2), lambda progress: 1e-3).actor, rows(8))
add("nature_cnn", "stable_baselines3.common.torch_layers", lambda m: m.NatureCNN(importlib.import_module("gymnasium.spaces").Box(0, 255, (3, 64, 64), "uint8"), 32), lambda b, n: (torch.rand(b, 3, 64, 64),))
add("ft_transformer", "rtdl_revisiting_models", lambda m: m.FTTransformer(n_cont_features=3, cat_cardinalities=[4, 5], d_out=2, n_blocks=3, d_block=16, attention_n_heads=4, attention_dropout=0.1, ffn_d_hidden=None, ffn_d_hidden_multiplier=2, ffn_dropout=0.1, residual_dropout=0.0), lambda b, n: (torch.randn(b, 3), torch.randint(4, (b, 2))))
add("saint", "pytorch_widedeep.models", lambda m: _wide_deep(m), lambda b, n: ({"deeptabular": torch.cat([torch.randint(4, (b, 2)).float(), torch.randn(b, 2)], 1)},))
add("ntxent", "pytorch_metric_learning.losses", lambda m: _Contrast(m.NTXentLoss()), lambda b, n: (torch.randn(4 * b, 8), torch.arange(2 * b).repeat(2)))
add("i_transformer", "iTransformer", lambda m: m.iTransformer(num_variates=6, lookback_len=32, dim=16, depth=3, heads=2, dim_head=8, pred_length=(4, 8)), lambda b, n: (torch.randn(b, 32, 6),))
add("deepar", "gluonts.torch.model.deepar.module", lambda m: m.DeepARModel(freq="h", context_length=8, prediction_length=4, hidden_size=8, num_layers=2, lags_seq=[1, 2, 3]), lambda b, n: (torch.zeros(b, 1).long(), torch.zeros(b, 1), torch.randn(b, 11, 1), torch.rand(b, 11), torch.ones(b, 11), torch.randn(b, 4, 1)))
add("gated_residual", "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules", lambda m: nn.Sequential(m.GatedResidualNetwork(8, 16, 16), m.GatedResidualNetwork(16, 16, 8), m.GateAddNorm(8, 8)), sequence(8))
add("nhits", "neuralforecast.models", lambda m: m.NHITS(h=8, input_size=32, mlp_units=[[16, 16]] * 3, max_steps=1), lambda b, n: ({"insample_y": torch.randn(b, 32, 1), "insample_mask": torch.ones(b, 32, 1), "futr_exog": None, "hist_exog": None, "stat_exog": None},))
add("patch_tst", "neuralforecast.models", lambda m: m.PatchTST(h=8, input_size=32, encoder_layers=3, n_heads=4, hidden_size=16, linear_hidden_size=32, patch_len=8, max_steps=1), lambda b, n: ({"insample_y": torch.randn(b, 32, 1), "insample_mask": torch.ones(b, 32, 1), "futr_exog": None, "hist_exog": None, "stat_exog": None},))
add("layers", "recbole.model.layers", lambda m: nn.Sequential(nn.Linear(8, 16), m.MLPLayers([16, 32, 16], dropout=0.1, bn=True), nn.Linear(16, 2)), rows(8))
add("encoder", "recbole.model.layers", lambda m: _Recommender(m.TransformerEncoder(n_layers=3, n_heads=2, hidden_size=16, inner_size=32)), lambda b, n: (torch.randint(1, 64, (b, n)),))
add("net", "tianshou.utils.net.common", lambda m: m.Net(state_shape=(8,), action_shape=(3,), hidden_sizes=(16, 16, 16), softmax=True), rows(8))


def _box(n: int) -> Any:
    return importlib.import_module("gymnasium.spaces").Box(-1.0, 1.0, (n,))


def _clicks(models: Any, name: str) -> nn.Module:
    fields = importlib.import_module(FIELDS)
    columns = [fields.SparseFeat(f"C{i}", 8, embedding_dim=4) for i in range(3)] + [fields.DenseFeat(f"I{i}", 1) for i in range(2)]
    options = {"dnn_hidden_units": (16, 16)} if name not in ("AutoInt",) else {"att_layer_num": 2, "dnn_hidden_units": (16, 16)}
    if name == "PNN":
        return models.PNN(columns, **options)
    return getattr(models, name)(columns, columns, **options)


def _wide_deep(models: Any) -> nn.Module:
    inside = models.SAINT(column_idx={"a": 0, "b": 1, "c": 2, "d": 3}, cat_embed_input=[("a", 4), ("b", 4)], continuous_cols=["c", "d"], input_dim=8, n_heads=2, n_blocks=2)
    return models.WideDeep(deeptabular=inside)


class _Contrast(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.features(x), labels)


class _Recommender(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.items, self.encoder = nn.Embedding(64, 16), encoder

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        mask = (items != 0)[:, None, None].float().log().clamp(min=-1e4)
        return self.encoder(self.items(items), mask)[-1] @ self.items.weight.T
