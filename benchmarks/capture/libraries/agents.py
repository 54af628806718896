"""Models that decide, rank, predict from tables, and are finetuned or made private, of other libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, rows, sequence, tokens

__all__: list[str] = []

add("mlp", "torchrl.modules", lambda m: m.MLP(in_features=8, out_features=4, depth=3, num_cells=16), rows(8))
add("conv", "torchrl.modules", lambda m: nn.Sequential(m.ConvNet(in_features=3, num_cells=[8, 8, 8]), nn.Flatten(), nn.LazyLinear(4)), fixed_image())
add("noisy", "torchrl.modules", lambda m: nn.Sequential(m.NoisyLinear(8, 16), nn.ReLU(), m.NoisyLinear(16, 16), nn.ReLU(), m.NoisyLinear(16, 4)), rows(8))
add("gru", "torchrl.modules", lambda m: nn.Sequential(nn.Linear(8, 16), m.GRU(16, 16, num_layers=2, batch_first=True)), sequence(8))
add("world", "torchrl.modules", lambda m: m.ObsEncoder(channels=8, num_layers=4, in_channels=3), fixed_image())
add("keys", "tensordict.nn", lambda m: m.TensorDictSequential(m.TensorDictModule(nn.Linear(8, 16), ["x"], ["h"]), m.TensorDictModule(nn.Tanh(), ["h"], ["h"]), m.TensorDictModule(nn.Linear(16, 16), ["h"], ["g"]), m.TensorDictModule(nn.Bilinear(16, 16, 4), ["h", "g"], ["y"])), rows(8))
add("recurrent", "sb3_contrib.ppo_recurrent.policies", lambda m: _Recurrent(m.RecurrentActorCriticPolicy(_box(8), _box(2), lambda progress: 1e-3, lstm_hidden_size=16)), rows(8))
add("quantiles", "sb3_contrib.qrdqn.policies", lambda m: m.QRDQNPolicy(_box(8), importlib.import_module("gymnasium.spaces").Discrete(3), lambda progress: 1e-3, n_quantiles=10).quantile_net, rows(8))
add("critics", "sb3_contrib.tqc.policies", lambda m: m.TQCPolicy(_box(8), _box(2), lambda progress: 1e-3, n_quantiles=5).critic, lambda b, n: (torch.randn(b, 8), torch.randn(b, 2)))

for name, kind in {"din": "DIN", "deep_fm": "DeepFM", "dcn": "DCN", "wide_deep": "WideDeep"}.items():
    add(name, "torch_rechub.models.ranking", lambda m, k=kind: _ranked(m, k), lambda b, n: (_clicks(b),))
add("mmoe", "torch_rechub.models.multi_task", lambda m: m.MMOE(_fields(), ["classification", "regression"], 4, {"dims": [16]}, [{"dims": [8]}, {"dims": [8]}]), lambda b, n: (_clicks(b),))
add("ple", "torch_rechub.models.multi_task", lambda m: m.PLE(_fields(), ["classification", "classification"], 2, 2, 1, {"dims": [16]}, [{"dims": [8]}, {"dims": [8]}]), lambda b, n: (_clicks(b),))

add("mlp", "torchtuples.practical", lambda m: m.MLPVanilla(8, [16, 16], 2, batch_norm=True, dropout=0.1), rows(8))
add("mixed", "torchtuples.practical", lambda m: m.MixedInputMLP(8, [4, 5], [3, 3], [16, 16], 2), lambda b, n: (torch.randn(b, 8), torch.stack([torch.randint(4, (b,)), torch.randint(5, (b,))], 1)))
for name, more in {"FTTransformer": {"num_layers": 3}, "ResNet": {"num_layers": 3}, "ExcelFormer": {"num_cols": 3, "num_heads": 4, "num_layers": 2}, "MLP": {"num_layers": 3, "normalization": "batch_norm"}, "TabNet": {"num_layers": 2, "split_feat_channels": 8, "split_attn_channels": 8, "gamma": 1.2}, "Trompt": {"num_prompts": 4, "num_layers": 2}}.items():
    add(name, "torch_frame.nn", lambda m, n=name, o=more: _Frame(n, getattr(m, n), o), lambda b, n: (torch.randn(b, 3), torch.randint(4, (b, 2))))

GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 64}
for name, kind, more in [
    ("lora", "LoraConfig", {"r": 4, "lora_dropout": 0.1, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    ("dora", "LoraConfig", {"r": 4, "use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("vera", "VeraConfig", {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("ia3", "IA3Config", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"], "fan_in_fan_out": True}),
    ("prefix", "PrefixTuningConfig", {"num_virtual_tokens": 4}),
    ("prompt", "PromptTuningConfig", {"num_virtual_tokens": 4}),
    ("p_tuning", "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
]:
    add(name, "peft", lambda m, k=kind, o=more: m.get_peft_model(_gpt2(), getattr(m, k)(task_type="CAUSAL_LM", **o)), tokens())
for name, kind in {"loha": "LoHaConfig", "lokr": "LoKrConfig", "oft": "OFTConfig", "boft": "BOFTConfig", "adalora": "AdaLoraConfig"}.items():
    add(name, "peft", lambda m, k=kind: m.get_peft_model(_mlp(), getattr(m, k)(target_modules=["0", "2"], **({"boft_block_size": 4} if k == "BOFTConfig" else {"oft_block_size": 4, "r": 0} if k == "OFTConfig" else {"r": 4, "total_step": 10, "tinit": 0, "tfinal": 0} if k == "AdaLoraConfig" else {"r": 4}))), rows(8))
add("lstm", "opacus.layers", lambda m: _Last(m.DPLSTM(8, 16, num_layers=2, batch_first=True)), sequence(8))
add("attention", "opacus.layers", lambda m: _Itself(m.DPMultiheadAttention(16, 4)), lambda b, n: (torch.randn(n, b, 16),))
add("words", "sentence_transformers", lambda m: _sentences(m), lambda b, n: ({"input_ids": torch.randint(1, 64, (b, n)), "attention_mask": torch.ones(b, n, dtype=torch.long)},))
add("translation", "torchkge.models", lambda m: m.TransEModel(16, 20, 4, "L2"), lambda b, n: tuple(torch.randint(k, (b,)) for k in (20, 20, 4, 20, 20)))
add("distmult", "torchkge.models", lambda m: m.DistMultModel(16, 20, 4), lambda b, n: tuple(torch.randint(k, (b,)) for k in (20, 20, 4, 20, 20)))
add("quantised", "optimum.quanto", lambda m: _quantised(m), rows(16))


def _box(n: int) -> Any:
    return importlib.import_module("gymnasium.spaces").Box(-1.0, 1.0, (n,))


class _Recurrent(nn.Module):
    """A policy with a state of its own, from zero."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.states = importlib.import_module("sb3_contrib.common.recurrent.type_aliases").RNNStates

    def forward(self, seen: torch.Tensor) -> Any:
        zeros = (torch.zeros(1, seen.shape[0], 16), torch.zeros(1, seen.shape[0], 16))
        actions, values, likelihoods, _ = self.policy(seen, self.states(zeros, zeros), torch.zeros(seen.shape[0]), deterministic=True)
        return actions, values, likelihoods


def _fields() -> list[Any]:
    of = importlib.import_module("torch_rechub.basic.features")
    return [of.SparseFeature("item", 20, 8), of.SparseFeature("user", 10, 8), of.DenseFeature("age")]


def _past() -> list[Any]:
    of = importlib.import_module("torch_rechub.basic.features")
    return [of.SequenceFeature("past", 20, 8, pooling="concat", shared_with="item")]


def _clicks(b: int) -> dict[str, torch.Tensor]:
    return {"item": torch.randint(20, (b,)), "user": torch.randint(10, (b,)), "age": torch.rand(b), "past": torch.randint(20, (b, 6))}


def _ranked(models: Any, kind: str) -> nn.Module:
    fields = _fields()
    if kind == "DIN":
        return models.DIN(fields[:2], _past(), fields[:1], {"dims": [16]}, {"dims": [8]})
    if kind == "DCN":
        return models.DCN(fields, 2, {"dims": [16, 8]})
    return getattr(models, kind)(fields, fields[:2], {"dims": [16, 8], "dropout": 0.1})


class _Frame(nn.Module):
    """A model of columns by kind, as tensors."""

    def __init__(self, name: str, kind: Any, more: dict[str, Any]) -> None:
        super().__init__()
        library = importlib.import_module("torch_frame")
        of = importlib.import_module("torch_frame.data.stats").StatType
        self.frame = library.TensorFrame
        self.kinds = {library.numerical: ["a", "b", "c"]} | ({} if name == "ExcelFormer" else {library.categorical: ["d", "e"]})
        numbers = {of.MEAN: 0.0, of.STD: 1.0, of.QUANTILES: [-2.0, -1.0, 0.0, 1.0, 2.0]}
        stats = dict.fromkeys("abc", numbers) | {c: {of.COUNT: ([0, 1, 2, 3], [4, 3, 2, 1])} for c in "de"}
        width = {"in_channels": 16} if name == "ExcelFormer" else {"channels": 16} if name != "TabNet" else {}
        self.model = kind(**width, out_channels=2, col_stats=stats, col_names_dict=self.kinds, **more)

    def forward(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self.model(self.frame(dict(zip(self.kinds, (numbers, kinds), strict=False)), self.kinds))


def _gpt2() -> nn.Module:
    library = importlib.import_module("transformers")
    return library.GPT2LMHeadModel(library.GPT2Config(**GPT2))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class _Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0][:, -1])


class _Itself(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x, x, x)[0])


def _sentences(library: Any) -> nn.Module:
    parts = importlib.import_module("sentence_transformers.models")
    bert = importlib.import_module("transformers")

    class Words(nn.Module):
        """The first part of a pipeline of them: it reads the features and writes its own beside them."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = bert.BertModel(bert.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64))

        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            out = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            features["token_embeddings"] = out.last_hidden_state
            return features

    return library.SentenceTransformer(modules=[Words(), parts.Pooling(32, pooling_mode="mean"), parts.Dense(32, 16), parts.Normalize()], device="cpu")


def _quantised(library: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    library.quantize(model, weights=library.qint8)
    return model
