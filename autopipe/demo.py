"""The main job: a GPT-2 with its real vocabulary, split over two processes by measured cost, and trained.

Run by ``make demo`` under torchrun. It is written as a user would write it; everything it prints is
measured in this run.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import os
import pathlib
import statistics
import sysconfig
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import autopipe

__all__ = ["Sizes", "main", "make_model", "train"]

MICROBATCHES, PARITY_STEPS = 8, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How large the model is, and how much it is trained; by default as ``make demo`` does."""

    vocabulary: int = 50_257
    layers: int = 12
    width: int = 256
    length: int = 96
    batch: int = 16
    n_files: int = 250
    steps: int = 24
    timed_steps: int = 5


def make_model(sizes: Sizes = Sizes()) -> nn.Module:
    """A Hugging Face GPT-2 from a config: tied embedding and head, loss inside; dropout off for parity."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.width // 64,
        n_positions=sizes.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def token_batches(sizes: Sizes) -> Iterator[Tensor]:
    """Endless ``[batch, length]`` token ids of the standard library's sources.

    The byte-level BPE vocabulary is trained on the same sources, so every id is of a real piece of text.
    """
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: sizes.n_files]
    length, batch = sizes.length, sizes.batch
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(f) for f in files], vocab_size=sizes.vocabulary, show_progress=False)
    ids = [i for f in files for i in tokenizer.encode(f.read_text(errors="replace")).ids]
    data = torch.tensor(ids[: len(ids) // length * length], device="cpu").view(-1, length)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0), device="cpu")
    for start in itertools.cycle(range(0, len(data) - batch + 1, batch)):
        yield data[order[start : start + batch]]


def main() -> None:
    """Split, compare with the uniform split, train, and hold the result against one process."""
    if "RANK" not in os.environ:
        raise SystemExit(
            "the demo trains on several processes; start it with make demo, or with "
            "torchrun --standalone --nproc-per-node 2 -m autopipe.demo"
        )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", help="where to train: cpu, or an accelerator's torch device"
    )
    device = torch.device(parser.parse_args().device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    dist.init_process_group("gloo")
    train(Sizes(), device)
    dist.barrier()
    dist.destroy_process_group()


def train(sizes: Sizes, device: torch.device) -> tuple[float, float] | None:
    """What :func:`main` does once it has joined the other processes; ``device`` is this rank's.

    Returns, on rank 0, how far parameters and losses are from those of one process at most.
    """
    _say(
        f"GPT-2 shape: {sizes.layers} blocks of width {sizes.width}, vocabulary {sizes.vocabulary:,}, "
        "embedding tied to head"
    )
    started = time.perf_counter()
    batches = token_batches(sizes)
    ids = next(batches)
    _say(f"text: the standard library's sources, as {list(ids.shape)} ids ({_since(started)})\n")

    model = make_model(sizes)
    plain = copy.deepcopy(model)
    pipe, uniform = _splits(model.to(device), ids.to(device))
    ours = pipe.runtime()
    _race({"measured cost": (pipe, ours), "uniform": (uniform, uniform.runtime())}, ids, sizes.timed_steps)
    seen = list(itertools.islice(batches, sizes.steps))
    losses, merged = _trained(pipe, ours, seen)
    if dist.get_rank() != 0:
        return None
    torch.set_num_threads(1)
    worst, loss_error = _apart(plain, merged, losses, seen[:PARITY_STEPS])
    _say(
        f"parity after {PARITY_STEPS} steps with one process: largest parameter difference {worst:.1e}, "
        f"largest loss difference {loss_error:.1e}"
    )
    return worst, loss_error


def _say(*lines: object) -> None:
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def _splits(model: nn.Module, ids: Tensor) -> tuple[autopipe.Pipe, autopipe.Pipe]:
    """The model split by measured cost, held against the model, and its twin split by counts of layers."""
    started = time.perf_counter()
    n_stages, example = dist.get_world_size(), {"input_ids": ids, "labels": ids}
    pipe = autopipe.split(model, n_stages, kwargs=example, n_microbatches=MICROBATCHES)
    _say(f"captured, measured and planned in {_since(started)}")
    _say(f"parity with the model: {pipe.verify(input_ids=ids[:2], labels=ids[:2])}\n")
    twin = copy.deepcopy(pipe).graph  # of a model of its own: a weight is trained by one pipeline only
    by_layers = autopipe.plan(
        twin, n_stages, n_microbatches=MICROBATCHES, balance="uniform", costs=pipe.costs
    )
    _say("SPLIT BY MEASURED COST", pipe.plan, "\nUNIFORM SPLIT, equal counts of layers", by_layers, "")
    return pipe, autopipe.Pipe(twin, by_layers)


def _race(
    splits: dict[str, tuple[autopipe.Pipe, autopipe.runtime.Runtime]], ids: Tensor, n_steps: int
) -> None:
    """Time steps of two splits in turn, after one of each, and print them beside what was predicted."""
    measured: dict[str, list[float]] = {name: [] for name in splits}
    for _ in range(n_steps + 1):
        for name, (_, runtime) in splits.items():
            measured[name].append(_timed_step(runtime, ids))
            for parameter in runtime.parameters():
                parameter.grad = None
    times = {name: statistics.median(values[1:]) for name, values in measured.items()}
    _say(f"{'split':<14} {'predicted':>10} {'measured':>10} {'error':>7} {'bubble':>7}")
    for name, (pipe, _) in splits.items():
        simulated = autopipe.simulate(pipe.plan)
        predicted, bubble = simulated.before_optimizer_s, simulated.bubble_fraction
        error = predicted / times[name] - 1
        _say(f"{name:<14} {predicted:>8.3f} s {times[name]:>8.3f} s {error:>+7.1%} {bubble:>7.1%}")
    _say(f"uniform / measured cost: {times['uniform'] / times['measured cost']:.2f}x\n")


def _trained(
    pipe: autopipe.Pipe, runtime: autopipe.runtime.Runtime, batches: list[Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of all steps, and the model's whole state after the first few."""
    optimizer = torch.optim.SGD(runtime.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    merged: dict[str, Tensor] = {}
    bar = tqdm(batches, desc="training", disable=None if dist.get_rank() == 0 else True)
    for batch in bar:
        losses.append(float(runtime.step(input_ids=batch, labels=batch).loss))
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if len(losses) == PARITY_STEPS:
            merged = {k: v.clone() for k, v in pipe.merge().state_dict().items()}
    last = len(losses) - 1
    _say("loss: " + "  ".join(f"{i}: {x:.3f}" for i, x in enumerate(losses) if i % 4 == 0 or i == last))
    return losses, merged


def _timed_step(runtime: autopipe.runtime.Runtime, ids: Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    float(runtime.step(input_ids=ids, labels=ids).loss)
    dist.barrier()
    return time.perf_counter() - started


def _apart(
    model: nn.Module, merged: dict[str, Tensor], history: list[float], batches: list[Tensor]
) -> tuple[float, float]:
    """Train the plain model on the same batches in this one process and compare every parameter and loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in tqdm(batches, desc="one process", disable=None):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    worst = max(float((state[k] - v.cpu()).abs().max()) for k, v in merged.items() if v.is_floating_point())
    return worst, max(abs(a - b) for a, b in zip(losses, history, strict=False))


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


if __name__ == "__main__":
    main()
