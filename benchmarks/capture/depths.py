"""Models that people use, with all of their layers or blocks, of narrow widths: little of it is arithmetic.

Timing them is left to ``times``, inputs to ``inputs``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .inputs import Recipe, make
from .trial import Subject, seed

__all__ = ["DEEP", "Deep", "build_deep"]

_HEADS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_GROUPED = {**_HEADS, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0}


_PLAINLY = Recipe()


@dataclasses.dataclass(frozen=True)
class Deep:
    """A model class of transformers, with what its config has beside its defaults."""

    title: str
    task: str
    class_name: str
    options: dict[str, Any]
    recipe: Recipe = _PLAINLY

    @property
    def name(self) -> str:
        return f"deep/{self.title}"


DEEP = (
    Deep("GPT-2, 12 layers", "causal", "GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "vocab_size": 128}),
    Deep("Llama, 16 layers", "causal", "LlamaForCausalLM", {**_GROUPED, "num_hidden_layers": 16}),
    Deep("Llama, 32 layers", "causal", "LlamaForCausalLM", {**_GROUPED, "num_hidden_layers": 32}),
    Deep("Qwen3, 28 layers", "causal", "Qwen3ForCausalLM", {**_GROUPED, "num_hidden_layers": 28}),
    Deep(
        "Mixtral, 8 layers of 8 experts",
        "causal",
        "MixtralForCausalLM",
        {**_GROUPED, "num_hidden_layers": 8, "num_local_experts": 8},
    ),
    Deep("BERT, 12 layers", "masked", "BertForMaskedLM", {**_HEADS, "vocab_size": 128}),
    Deep(
        "T5, 6 and 6 layers",
        "seq2seq",
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 6, "vocab_size": 128},
        Recipe(cache=False),
    ),
    Deep(
        "ViT, 12 layers", "image", "ViTForImageClassification", {**_HEADS, "image_size": 32, "patch_size": 8}
    ),
    Deep(
        "Whisper base, 6 and 6 layers",
        "speech",
        "WhisperForConditionalGeneration",
        {
            "d_model": 64,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "vocab_size": 128,
            "max_source_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "num_mel_bins": 16,
        },
        Recipe(audio="mel-time"),
    ),
    Deep(
        "ResNet-50, 16 blocks",
        "image",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 64], "depths": [3, 4, 6, 3]},
    ),
    Deep(
        "ConvNeXt tiny, 18 blocks",
        "image",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 32, 64], "depths": [3, 3, 9, 3]},
    ),
)


def build_deep(deep: Deep) -> Subject:
    """The model in evaluation mode, with inputs by rule."""
    import transformers

    seed()
    cls = getattr(transformers, deep.class_name)
    model = cls(cls.config_class(**deep.options)).eval()
    return Subject(
        model, lambda sizes: ((), make(model, deep.task, sizes, deep.recipe)), "deep", str(deep.recipe)
    )
