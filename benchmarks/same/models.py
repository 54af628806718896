"""Transformers models with random weights, of any width and depth, and batches with and without masks.

Comparing and timing them is left to ``calls`` and ``__main__``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "MASKS", "Case"]

MASKS = ("none", "ones", "ragged")
VOCABULARY = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """``make(width, n_layers)`` builds the model; ``batch(rows, length, mask, width)`` its arguments."""

    make: Callable[[int, int], nn.Module]
    batch: Callable[[int, int, str, int], dict[str, Any]]
    masks: tuple[str, ...] = MASKS


def _mask(rows: int, length: int, kind: str) -> torch.Tensor | None:
    """No mask, one of ones, or one that leaves out more positions at the end of each further row."""
    if kind == "none":
        return None
    mask = torch.ones(rows, length, dtype=torch.int64)
    if kind == "ragged":
        for row in range(rows):
            mask[row, length - (row + 1) * length // (2 * rows + 2) :] = 0
    return mask


def _tokens(rows: int, length: int, kind: str, width: int) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (rows, length))
    mask = _mask(rows, length, kind)
    return {"input_ids": ids, "labels": ids} | ({} if mask is None else {"attention_mask": mask})


def _pair(rows: int, length: int, kind: str, width: int) -> dict[str, Any]:
    given = _tokens(rows, length, kind, width)
    return {**given, "labels": torch.randint(3, VOCABULARY, (rows, length // 4))}


def _image(rows: int, length: int, kind: str, width: int) -> dict[str, Any]:
    side = 64  # 1,024 patches
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 4, (rows,))}


def _speech(rows: int, length: int, kind: str, width: int) -> dict[str, Any]:
    labels = torch.randint(3, VOCABULARY, (rows, 64))
    return {"input_features": torch.randn(rows, 16, 2048), "labels": labels}


def _decoder(name: str, **more: Any) -> Callable[[int, int], nn.Module]:
    """A causal model by its transformers name, with heads of 64 (16 where the width is small)."""

    def make(width: int, n_layers: int) -> nn.Module:
        import transformers

        heads = max(4, width // 64)
        suffix = "TextConfig" if name == "Gemma3" else "Config"
        config = getattr(transformers, f"{name}{suffix}")(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=n_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=width // heads,
            max_position_embeddings=4096,
            pad_token_id=0,
            **more,
        )
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return make


def _gpt2(width: int, n_layers: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=n_layers, n_head=max(4, width // 64), n_positions=4096
    )
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def _bert(width: int, n_layers: int) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=max(4, width // 64),
        intermediate_size=2 * width,
        max_position_embeddings=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def _t5(width: int, n_layers: int) -> nn.Module:
    import transformers

    heads = max(4, width // 64)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=n_layers,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit(width: int, n_layers: int) -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=max(4, width // 64),
        intermediate_size=2 * width,
        image_size=64,
        patch_size=2,
        num_labels=4,
    )
    return transformers.ViTForImageClassification(config)


def _whisper(width: int, n_layers: int) -> nn.Module:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=width,
        encoder_layers=n_layers,
        decoder_layers=n_layers,
        encoder_attention_heads=max(4, width // 64),
        decoder_attention_heads=max(4, width // 64),
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_source_positions=1024,
        max_target_positions=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    return transformers.WhisperForConditionalGeneration(config)


CASES: dict[str, Case] = {
    "Llama": Case(_decoder("Llama"), _tokens),
    "GPT-2": Case(_gpt2, _tokens),
    "Qwen3": Case(_decoder("Qwen3"), _tokens),
    "Gemma3": Case(
        _decoder("Gemma3", sliding_window=256, layer_types=["sliding_attention", "full_attention"] * 2),
        _tokens,
    ),
    "Mixtral": Case(_decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2), _tokens),
    "BERT": Case(_bert, _tokens),
    "T5": Case(_t5, _pair),
    "ViT": Case(_vit, _image, ("none",)),
    "Whisper": Case(_whisper, _speech, ("none",)),
}
