"""What this process recorded of its last steps, and the folder it writes them to while the job runs.

What the ranks' records tell together is left to ``simulator``.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import os
import pathlib
import time
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from ..accelerator import Later
from ..errors import InputError
from ..simulator import Ran, Recorded, Report, Watchable, make_report, plan_file, rank_file

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Publisher", "prepare", "publish", "record", "report"]

_logger = logging.getLogger(__name__)

SHOWN_STEPS = 4
"""Steps in a rank's file: enough that all ranks' have some in common, written within one step's skew."""


def record(engine: Engine, offset_s: float, *, last: int | None = None) -> Recorded:
    """The last steps of this process, on the clock that is ``offset_s`` ahead of its own.

    ``last``: only so many, and of an accelerator only those that it has done: nothing is waited for.
    """
    records = list(engine.records)
    if last is not None:
        records = [r for r in records if r[2].has_passed()][-last:]
    steps = [Ran.of(o + offset_s, clock.length_s(host_s), clock.read()) for o, host_s, clock in records]
    sizes = engine.message_bytes(records[-1][2]) if records else {}
    return Recorded(steps, list(sizes.items()), engine.peak_memory.peak_bytes())


def prepare(folder: pathlib.Path, rank: int) -> str:
    """Make the folder, and remove what an earlier job's rank wrote; why that cannot be, or nothing.

    Rank 0 also removes what ranks beyond this job's wrote, and plans.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = [rank_file(folder, rank)]
        if rank == 0:
            old += [*folder.glob("rank-*.json"), *folder.glob("plan-*.json")]
        for path in old:
            path.unlink(missing_ok=True)
        probe = folder / f".rank-{rank}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"rank {rank}: {error}"
    return ""


class Publisher:
    """Writes this rank's last steps to a folder now and then, for :func:`autopipe.simulator.watched`.

    All ranks write in the first step that begins in another ``every_s`` of rank 0's clock, so that their
    files have steps in common. A file is replaced whole. What cannot be written is told once, and training
    goes on.
    """

    def __init__(self, engine: Engine, folder: pathlib.Path, every_s: float, offset_s: float) -> None:
        self._engine, self._folder, self._every_s, self._offset_s = engine, folder, every_s, offset_s
        self._plan, self._digest, self._slot = engine.plan, "", -1
        self._coming: collections.deque[Later] = collections.deque()
        self._loss: float | None = None
        self._say_plan()

    def _say_plan(self) -> None:
        text = self._engine.plan.to_json()
        self._plan, self._digest = self._engine.plan, hashlib.sha256(text.encode()).hexdigest()[:16]
        if self._engine.rank == 0:
            self._replace(plan_file(self._folder, self._digest), text.encode())

    def after_step(self, loss: Tensor) -> None:
        """Write, where it is time to; every rank comes here after each training step."""
        origin_s, _, _ = self._engine.records[-1]
        slot = int((origin_s + self._offset_s) // self._every_s)
        if slot == self._slot:
            return
        self._slot = slot
        try:
            self._write(loss)
        except OSError as error:
            self._engine.publisher = None
            _logger.warning("training goes on, but cannot be watched any more: %s", error)

    def _write(self, loss: Tensor) -> None:
        engine = self._engine
        if engine.plan is not self._plan:
            self._say_plan()
        n_pending = sum(not clock.has_passed() for _, _, clock in engine.records)
        told = Watchable(
            plan=self._digest,
            rank=engine.rank,
            n_ranks=1 if engine.peers is None else engine.plan.n_ranks,
            step=engine.progress.n_steps - n_pending,
            at_s=time.time(),
            loss=self._latest(loss),
            recorded=record(engine, self._offset_s, last=SHOWN_STEPS),
        )
        self._replace(rank_file(self._folder, engine.rank), msgspec.json.encode(told))

    def _latest(self, loss: Tensor) -> float | None:
        """The loss of the last step written of which it is here: on an accelerator nobody waits for one."""
        self._coming.append(Later(loss))
        while self._coming and self._coming[0].has_come():
            self._loss = self._coming.popleft().read()
        return self._loss

    def _replace(self, path: pathlib.Path, data: bytes) -> None:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(data)
        aside.replace(path)


def report(engine: Engine) -> Report:
    """What the plan predicted beside what all ranks measured; every rank calls it."""
    engine.called("report", lambda: None)
    with engine.together("gathering a report", waits=False):
        offset_s = engine.peers.clock_offset_s() if engine.peers else 0.0
    mine = record(engine, offset_s)
    with engine.together("gathering a report", waits=False):
        everyone = engine.peers.gather(mine) if engine.peers else [mine]
    return make_report(engine.plan, everyone)


def publish(engine: Engine, folder: pathlib.Path, every_s: float) -> None:
    """From now on write what the last steps took to a folder; every rank calls it.

    Raises :class:`InputError` on every rank where one cannot write there.
    """
    if engine.replica:
        return
    with engine.together("publishing steps", waits=False):
        offset_s = engine.peers.clock_offset_s() if engine.peers else 0.0
        ready = prepare(folder, engine.rank)
        faults = [f for f in (engine.peers.gather(ready) if engine.peers else [ready]) if f]
    if faults:
        raise InputError(f"steps cannot be published to {folder}: {faults[0]}; give another folder")
    engine.publisher = Publisher(engine, folder, every_s, offset_s)
