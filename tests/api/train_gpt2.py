"""Run on every rank: ten optimizer steps of a pipelined GPT-2, held against a plain loop on rank 0.

Arguments: schedule, dtype, optimizer, costs. Prints the largest parameter difference.
"""

import copy
import sys

import torch
import torch.distributed as dist

import autopipe

VOCABULARY = 5_003
"""The tied weight of so many rows is still the model's largest."""


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=4,
        n_embd=32,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).to(dtype)


def make_optimizer(name: str, parameters) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def main(schedule: str, dtype_name: str, optimizer_name: str, costs: str) -> None:
    dist.init_process_group("gloo")
    model = make_model(getattr(torch, dtype_name))
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    # the last two batches are smaller, and not a multiple of the microbatches
    batches = [torch.randint(0, VOCABULARY, (8 if i < 8 else 5, 16)) for i in range(10)]
    example = {"input_ids": batches[0], "labels": batches[0]}
    pipe = autopipe.split(
        model,
        dist.get_world_size(),
        kwargs=example,
        n_microbatches=4,
        schedule=schedule,
        costs=costs,
        pin={"transformer.wte": 0, "lm_head": -1},  # tied over ranks, whatever this machine's costs are now
    )
    runtime = pipe.runtime()
    optimizer = make_optimizer(optimizer_name, runtime.parameters())
    losses = []
    for ids in batches:
        losses.append(float(runtime.step(input_ids=ids, labels=ids).loss))
        optimizer.step()
        optimizer.zero_grad()
    merged = pipe.merge().state_dict()

    optimizer = make_optimizer(optimizer_name, plain.parameters())
    for ids, ours in zip(batches, losses, strict=True):
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(float(loss) - ours) < 1e-4, (float(loss), ours)
    worst = max(float((merged[k] - v).abs().max()) for k, v in plain.state_dict().items())
    tied = [t for t in pipe.plan.ties if t.mode == "sync"]
    print(f"ties {len(tied)} worst {worst!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
