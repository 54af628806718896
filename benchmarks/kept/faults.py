"""Faults × moments: a rank of three is killed, stopped, raises or leaves; how soon do all know, and what?

Ranks are forked from this process, which has imported everything: a case takes its own time, not torch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import rank as one_rank
from .rank import LIMIT_S, NOT_ON_RANK_0, ON_RANK_0, PLACES

__all__ = ["FAULTS", "GOOD", "KINDS", "Ranks", "cases", "walk"]

FAULTS = ("killed", "stopped", "raises", "left")
GOOD = frozenset(("told", "done"))
N_RANKS = 3
GIVEN_UP_S = 90.0
MARGIN_S = 10.0


def cases() -> Iterator[tuple[str, str, int]]:
    """(moment, fault, rank it meets): of rank 0, which hosts the store, and of another one."""
    for moment in PLACES:
        for fault in FAULTS:
            for victim in (0,) if moment in ON_RANK_0 else (1,) if moment in NOT_ON_RANK_0 else (1, 0):
                yield moment, fault, victim


class Ranks:
    """Processes that do ``work`` as the ranks of one job on this host."""

    def __init__(self, n_ranks: int, work: Callable[[], object], **environment: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n_ranks)}
        self.pids = list[int]()
        self._stacks = [os.memfd_create(f"stacks of rank {rank}") for rank in range(n_ranks)]
        for rank in range(n_ranks):
            pid = os.fork()
            if pid == 0:
                os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
                os.environ.update(environment)
                nowhere = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(nowhere, fd)
                faulthandler.register(signal.SIGUSR1, self._stacks[rank])
                try:
                    work()
                finally:
                    os._exit(1)
            self.pids.append(pid)
        self._ended: set[int] = set()

    def has_ended(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks have ended."""
        for rank in ranks:
            if rank not in self._ended and os.waitpid(self.pids[rank], os.WNOHANG)[0]:
                self._ended.add(rank)
        return self._ended.issuperset(ranks)

    def stacks(self, ranks: Sequence[int]) -> list[str]:
        """Where each thread is of those of ``ranks`` that have not ended."""
        hanging = [rank for rank in ranks if not self.has_ended([rank])]
        for rank in hanging:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5 if hanging else 0.0)
        texts = [os.pread(self._stacks[rank], 1 << 20, 0).decode() for rank in hanging]
        return [f"rank {rank} is at\n{text}" for rank, text in zip(hanging, texts, strict=True)]

    def end(self) -> None:
        """End those that have not."""
        for rank, pid in enumerate(self.pids):
            if rank not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._ended.add(rank)
            os.close(self._stacks[rank])


@dataclasses.dataclass
class Case:
    """A case under way."""

    moment: str
    fault: str
    victim: int

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autopipe-faults-")
        folder = pathlib.Path(self._folder.name)
        self._ranks = Ranks(N_RANKS, lambda: one_rank.run(self.moment, self.fault, self.victim, folder))
        self._until_s = time.monotonic() + GIVEN_UP_S

    def result(self) -> dict[str, Any] | None:
        """What became of it; None while it is under way."""
        others = [r for r in range(N_RANKS) if r != self.victim]
        if not self._ranks.has_ended(others) and time.monotonic() < self._until_s:
            return None
        stacks = self._ranks.stacks(others)
        self._ranks.end()
        with self._folder:
            return self._judged(pathlib.Path(self._folder.name), others, stacks)

    def _judged(self, folder: pathlib.Path, others: Sequence[int], stacks: list[str]) -> dict[str, Any]:
        row: dict[str, Any] = {"moment": self.moment, "fault": self.fault, "rank": self.victim}
        if not (folder / "fault").exists():
            return {**row, "outcome": "never met", "seconds": None, "told": []}
        at_s = float((folder / "fault").read_text())
        paths = [folder / f"rank-{r}.json" for r in others]
        told = [json.loads(path.read_text()) for path in paths if path.exists()]
        seconds = max((t["at_s"] - at_s for t in told), default=0.0)
        kinds = {t["kind"] for t in told}
        if len(told) < len(others):
            outcome = "hangs"
        elif seconds > LIMIT_S + MARGIN_S:
            outcome = "late"
        else:
            outcome = "told" if kinds <= KINDS else "done" if kinds == {"done"} else "raw"
        texts = sorted({f"{t['kind']}: {t['text']}" for t in told})
        return {**row, "outcome": outcome, "seconds": round(seconds, 1), "told": texts + stacks}


KINDS = frozenset(("StepError", "PlanError", "StoreError", "InputError"))


def walk(chosen: Sequence[tuple[str, str, int]], n_at_once: int = 1) -> Iterator[dict[str, Any]]:
    """What became of each; stopped ranks are mostly waited for, so that several may go on at once."""
    sys.stdout.flush()
    waiting, running = [*chosen], list[Case]()
    while waiting or running:
        while waiting and len(running) < n_at_once:
            running.append(Case(*waiting.pop(0)))
        time.sleep(0.05)
        for case in [*running]:
            found = case.result()
            if found is not None:
                running.remove(case)
                yield found
