"""Tiny models of transformers that generate, in the styles of several families."""

import torch
import transformers

TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    **TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
BLOOM = {
    **TOKENS,
    "hidden_size": 32,
    "n_layer": 4,
    "n_head": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
ENCODED = {
    **TOKENS,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
OWN = {
    "gpt2": {
        **TOKENS,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen3": {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**SIZES, "sliding_window": 6},
    "gemma2": {**SIZES, "head_dim": 8, "sliding_window": 6},
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 6},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        **TOKENS,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "ffn_dim": 48,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
    },
    "bloom": BLOOM,
    "falcon": {**BLOOM, "num_hidden_layers": 4, "num_attention_heads": 4, "alibi": True},
    "gpt_neox": {**SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "t5": {
        **TOKENS,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "bart": ENCODED,
    "marian": {**ENCODED, "decoder_start_token_id": 0},
    "pegasus": {**ENCODED, "decoder_start_token_id": 0},
    "whisper": {
        **{key: value for key, value in ENCODED.items() if not key.startswith(("max_", "forced_"))},
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 48,
        "decoder_start_token_id": 3,
        "begin_suppress_tokens": None,
    },
}
ENCODERS = ("t5", "bart", "marian", "pegasus", "whisper")


def make(family, seed=0, **changes):
    """A model of this family in evaluation mode, its weights large enough that tokens differ."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**OWN.get(family, SIZES), **changes})
    kind = transformers.AutoModelForSeq2SeqLM if family in ENCODERS else transformers.AutoModelForCausalLM
    kind = transformers.AutoModelForSpeechSeq2Seq if family == "whisper" else kind
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(2 if family == "t5" else 24 if "encoder_attn" in name else 6)
    return model


def prompts(n=5, length=7, vocabulary=61):
    """Prompts of unequal lengths, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, vocabulary, (n, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(n):
        mask[row, : row % 4] = 0
    return ids.masked_fill(mask == 0, 0), mask


def sounds(n=5, n_mel=8, n_frames=20):
    """Sounds as a model of speech takes them."""
    return torch.randn(n, n_mel, n_frames, generator=torch.Generator().manual_seed(3))
