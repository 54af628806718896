"""Transformers models with random weights, of any width and depth, and batches with and without masks.

Comparing and timing them is left to ``calls``, ``paired`` and ``ranks``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "MASKS", "Case"]

MASKS = ("none", "ones", "ragged")
VOCABULARY = 128
Given = dict[str, Any]

# what one setting is called by in a configuration: width, inner width, layers, heads
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_GPT2 = ("n_embd", "n_inner", "n_layer", "n_head")
_T5 = ("d_model", "d_ff", "num_layers", "num_heads")
_TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "pad_token_id": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A class of transformers, what its configuration calls its sizes, and what else is set in it.

    ``batch(rows, length, mask)`` makes arguments; ``more(width, heads)`` what follows from the sizes.
    """

    model: str
    config: str
    batch: Callable[[int, int, str], Given]
    fixed: Mapping[str, Any]
    names: tuple[str, str, str, str] = _NAMES
    more: Callable[[int, int], Given] = lambda width, heads: {}
    masks: tuple[str, ...] = MASKS

    def make(self, width: int, n_layers: int) -> nn.Module:
        """The model, with heads of 64, or four where it is narrow; no dropout."""
        import transformers

        heads = max(4, width // 64)
        sizes = dict(zip(self.names, (width, 2 * width, n_layers, heads), strict=True))
        config = getattr(transformers, self.config)(**{**sizes, **self.fixed, **self.more(width, heads)})
        for name in vars(config):
            if name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate")):
                setattr(config, name, 0.0)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model


def _mask(rows: int, length: int, kind: str) -> Given:
    """No mask, one of ones, or one that leaves out more positions at the end of each further row."""
    if kind == "none":
        return {}
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows if kind == "ragged" else 0):
        mask[row, length - (row + 1) * length // (2 * rows + 2) :] = 0
    return {"attention_mask": mask}


def _tokens(rows: int, length: int, kind: str) -> Given:
    ids = torch.randint(3, VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": ids, **_mask(rows, length, kind)}


def _pair(rows: int, length: int, kind: str) -> Given:
    return {**_tokens(rows, length, kind), "labels": torch.randint(3, VOCABULARY, (rows, length // 4))}


def _image(rows: int, length: int, kind: str) -> Given:
    """1,024 patches, whatever the length."""
    return {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(0, 4, (rows,))}


def _speech(rows: int, length: int, kind: str) -> Given:
    """1,024 positions after the convolutions, whatever the length."""
    labels = torch.randint(3, VOCABULARY, (rows, 64))
    return {"input_features": torch.randn(rows, 16, 2048), "labels": labels}


def _grouped(width: int, heads: int) -> Given:
    return {"num_key_value_heads": heads // 2, "head_dim": width // heads}


def _decoder(name: str, config: str = "", **fixed: Any) -> Case:
    """A causal model with two heads to each of keys and values."""
    return Case(f"{name}ForCausalLM", config or f"{name}Config", _tokens, {**_TOKENS, **fixed}, more=_grouped)


_SPEECH = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 16,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

CASES: dict[str, Case] = {
    "Llama": _decoder("Llama"),
    "GPT-2": Case(
        "GPT2LMHeadModel", "GPT2Config", _tokens, {"vocab_size": VOCABULARY, "n_positions": 4096}, _GPT2
    ),
    "Qwen3": _decoder("Qwen3"),
    "Gemma3": _decoder(
        "Gemma3",
        "Gemma3TextConfig",
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "BERT": Case("BertForMaskedLM", "BertConfig", _tokens, _TOKENS),
    "T5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        _pair,
        {"vocab_size": VOCABULARY, "decoder_start_token_id": 0},
        _T5,
        lambda width, heads: {"d_kv": width // heads},
    ),
    "ViT": Case(
        "ViTForImageClassification",
        "ViTConfig",
        _image,
        {"image_size": 64, "patch_size": 2, "num_labels": 4},
        masks=("none",),
    ),
    "Whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _speech,
        _SPEECH,
        ("d_model", "encoder_ffn_dim", "encoder_layers", "encoder_attention_heads"),
        lambda width, heads: {
            "decoder_ffn_dim": 2 * width,
            "decoder_layers": 4,
            "decoder_attention_heads": heads,
        },
        ("none",),
    ),
}
