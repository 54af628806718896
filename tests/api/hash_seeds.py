"""One rank, with a hash seed of its own, of a model that builds its masks in a loop over a set.

With dropout; the loss on two ranks is that of one stage in one process. Both are forked from one process,
whose seed they have: the second starts anew with one by which the set comes in another order.
"""

# ruff: noqa: E402
import itertools
import os
import subprocess
import sys

KINDS = ("full", "sliding", "chunked", "global")
ORDER = ",".join(set(KINDS))


def order_by(seed: int) -> str:
    """How the set comes in a process with this seed."""
    words = [sys.executable, "-S", "-c", f"print(','.join(set({KINDS})))"]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.strip()


if os.environ["RANK"] == "1" and "OTHERS_ORDER" not in os.environ:
    seed = next(n for n in itertools.count(1) if order_by(n) != ORDER)
    told = {"PYTHONHASHSEED": str(seed), "OTHERS_ORDER": ORDER}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **told})
assert os.environ.get("OTHERS_ORDER") != ORDER

import torch
import torch.distributed as dist
from torch import nn

import autopipe


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, kind in enumerate(KINDS):
            self.register_buffer(kind, torch.arange(1.0, 9.0) / (i + 1))

    def forward(self, x, kind):
        return (torch.arange(x.shape[1], device=x.device)[:, None] * getattr(self, kind)).cos()


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mix, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2)

    def forward(self, x, masks, tables):
        return x + self.drop(masks[self.kind] @ self.norm(self.mix(x) * tables[self.kind]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Linear(4, 8), Rotary()
        self.blocks = nn.ModuleList(Block(kind) for kind in KINDS)

    def forward(self, x):
        h, ones, masks, tables = self.embed(x), x.new_ones(x.shape[1], x.shape[1]), {}, {}
        for kind in set(KINDS):
            masks[kind] = ones.tril(KINDS.index(kind)) / x.shape[1]
            tables[kind] = self.rotary(h, kind)
        for block in self.blocks:
            h = block(h, masks, tables)
        return h.square().mean()


def main() -> None:
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 6, 4, dtype=torch.float64)
    world = os.environ.pop("WORLD_SIZE")  # one process for now, which joins no group
    alone = autopipe.split(model, 1, (x,), costs="estimated", n_microbatches=2).runtime().step(x)
    os.environ["WORLD_SIZE"] = world
    dist.init_process_group("gloo")
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2)
    loss = float(pipe.runtime().step(x).loss)
    assert abs(loss - float(alone.loss)) < 1e-12, (loss, float(alone.loss))
    print(pipe.graph.ops.digest, f"{loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
