"""What every task's script begins with: a small GPT-2, batches, and where its result goes."""

import os
import pathlib
import sys

import torch
import transformers


def make():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=64, n_layer=4, n_head=4, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def make_encoded():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=257, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


SPEED_PROMPTS = (16, 32, 64)


def make_large():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=4096, n_positions=128, n_embd=512, n_layer=8, n_head=8, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def rows(n=32, length=24):
    ids = torch.randint(1, 257, (n, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def loader():
    return torch.utils.data.DataLoader(rows(), 8)


def prompts():
    ids = torch.stack([row["input_ids"][:8] for row in rows(6)])
    mask = torch.ones_like(ids)
    for row in range(6):
        mask[row, : row % 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}


def report(values):
    """Every rank reports the same, each to a file of its own; the last one stays."""
    own = f"{sys.argv[1]}.{os.getpid()}"
    torch.save(values, own)
    pathlib.Path(own).replace(sys.argv[1])
