"""A run whose ranks are killed at random times and which goes on each time, on as many ranks or others.

Every loss it ever computes is held against that of a run in one process that nothing disturbs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import random
import signal
import tempfile
import time
from collections.abc import Iterator

import torch

from .faults import KINDS, Ranks
from .rank import told
from .work import Trainer

__all__ = ["Soaked", "soak", "undisturbed"]

STALL_LIMIT_S = 10.0
GIVEN_UP_S = 120.0
RANKS = (1, 2, 3, 4)
EVERY = 3
"""Steps between saves."""
EXACT = 1e-10


@dataclasses.dataclass
class Soaked:
    """What a soak came to: counts, and the largest difference of a loss, in fp64."""

    n_starts: int = 0
    n_kills: int = 0
    n_steps: int = 0
    n_losses: int = 0
    worst: float = 0.0
    slowest_end_s: float = 0.0


def undisturbed() -> Iterator[float]:
    """The loss of each step of a run in one process."""
    trainer = Trainer(2, dtype=torch.float64)
    while True:
        yield trainer.train(1)[0]


def _train(folder: pathlib.Path, n_stages: int) -> None:
    """One rank's part of one start: go on from the last save until killed."""
    trainer = Trainer(n_stages, dtype=torch.float64, stall_limit_s=STALL_LIMIT_S)
    runtime, kept = trainer.runtime, trainer.kept
    done = runtime.resume(folder / "run", **kept)
    with (folder / "losses").open("a") as out:
        for n in itertools.count(done + 1):
            loss = trainer.train(1)[0]
            if runtime.rank == 0:
                out.write(json.dumps([n, loss]) + "\n")
                out.flush()
            if n % EVERY == 0:
                runtime.save(folder / "run", keep_last=2, background=n % (2 * EVERY) == 0, **kept)


def soak(length_s: float, seed: int = 0) -> Soaked:
    """Train for so long. Raises ``AssertionError`` where a loss is not the undisturbed run's."""
    draw, found = random.Random(seed), Soaked()
    with tempfile.TemporaryDirectory(prefix="autopipe-soak-") as name:
        folder = pathlib.Path(name)
        until_s = time.monotonic() + length_s
        while time.monotonic() < until_s:
            n_ranks = draw.choice(RANKS)
            ranks = Ranks(n_ranks, lambda n=n_ranks: told(lambda: _train(folder, n), _ended(folder)))
            found.n_starts += 1
            _meet(ranks, n_ranks, draw, found, folder)
        wanted, known = undisturbed(), list[float]()
        for line in (folder / "losses").read_text().splitlines():
            n, loss = json.loads(line)
            while len(known) < n:
                known.append(next(wanted))
            found.worst = max(found.worst, abs(loss - known[n - 1]))
            found.n_losses += 1
            found.n_steps = max(found.n_steps, n)
    assert found.worst < EXACT, f"a loss differs by {found.worst}"
    return found


def _ended(folder: pathlib.Path) -> pathlib.Path:
    """Where this rank writes what it ended with."""
    return folder / f"ended-{os.environ['RANK']}"


def _meet(ranks: Ranks, n_ranks: int, draw: random.Random, found: Soaked, folder: pathlib.Path) -> None:
    """Kill or stop one of the ranks after a while; the others must end by themselves, and not before."""
    time.sleep(draw.uniform(0.5, 6.0))
    victim = draw.randrange(n_ranks)
    fault = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))
    os.kill(ranks.pids[victim], fault)
    began_s = time.monotonic()
    others = [rank for rank in range(n_ranks) if rank != victim]
    while not ranks.has_ended(others) and time.monotonic() < began_s + GIVEN_UP_S:
        time.sleep(0.02)
    ended_s = time.monotonic() - began_s
    stacks = ranks.stacks(others)
    ranks.end()
    assert not stacks, "\n".join([f"{GIVEN_UP_S} s after {fault!r} met {victim} of {n_ranks}:", *stacks])
    for path in folder.glob("ended-*"):
        end = json.loads(path.read_text())
        path.unlink()
        assert end["kind"] in KINDS, f"{path.name} with {end['kind']}: {end['text']}"
        assert end["at_s"] > began_s, f"{path.name} before {fault!r} met rank {victim}: {end['text']}"
    found.n_kills += 1
    found.slowest_end_s = max(found.slowest_end_s, round(ended_s, 1))
