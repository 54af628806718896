"""Tiny causal language models of transformers, in the styles of several families."""

import torch
import transformers

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN = {
    "gpt2": {
        "vocab_size": 61,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
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
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
        "pad_token_id": 0,
        "dropout": 0.0,
    },
}


def make(family, seed=0, **changes):
    """A model of this family in evaluation mode, its weights large enough that tokens differ."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**OWN.get(family, SIZES), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def prompts(n=5, length=7, vocabulary=61):
    """Prompts of unequal lengths, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, vocabulary, (n, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(n):
        mask[row, : row % 4] = 0
    return ids.masked_fill(mask == 0, 0), mask
