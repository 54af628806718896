"""What loading and saving a model made on the meta device costs in memory, in a process of its own.

Prints a row for each dtype. A small model goes first, so that no library is loaded while memory is counted;
every weight is too large for the allocator to keep pages of.
"""

import gc
import json
import pathlib
import sys

import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.runtime import Runtime
from benchmarks.kept.large import Resident


def runtime(width, dtype, **options):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, dtype=dtype) for _ in range(3)])
    x = torch.empty(8, width, dtype=dtype, device="meta")
    made = make(model, (x,), {}, n_stages=2, n_ranks=1)
    gc.collect()  # whatever an earlier one held
    memory = Resident()
    return memory, Runtime(*made, loss_fn=F.mse_loss, device="cpu", **options)


def sums(runtime):
    """Of each weight, without a copy of it in another dtype."""
    return {name: p.detach().view(torch.uint8).sum().item() for name, p in runtime.named_parameters()}


def row(path, width, dtype):
    """In parts of the weights' own bytes: peak and rest of loading, peak of saving; and whether all came."""
    _, first = runtime(width, dtype)
    first.save(path)
    expected, own = sums(first), sum(p.nbytes for p in first.parameters())
    del first
    memory, read = runtime(width, dtype, weights=path)
    found = {"loading": memory.peak / own, "at rest": memory.grown / own, "equal": sums(read) == expected}
    gc.collect()
    memory = Resident()
    read.save(path)
    return {**found, "saving": memory.peak / own}


def main(folder):
    row(folder / "small", 64, torch.float32)
    for width, dtype in ((2944, torch.float32), (4160, torch.bfloat16)):
        print(json.dumps(row(folder / f"of {width}", width, dtype)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
