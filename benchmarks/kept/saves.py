"""How fast a run is saved and loaded, beside ``torch.save`` and ``torch.distributed.checkpoint``.

All write and read the same bytes, flushed to the disk, in turns; and how long training stands still while a
save is written in the background.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import autopipe

__all__ = ["measure", "stall"]

WIDTH, DEPTH, ROUNDS = 2048, 8, 3


def _made(width: int, depth: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    x = torch.randn(8, width)
    runtime = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2).runtime(F.mse_loss)
    optimizer = torch.optim.AdamW(runtime.parameters(), 1e-4)
    runtime.step(x, target=x)
    optimizer.step()
    return model, runtime, optimizer


def _flushed(path: pathlib.Path) -> None:
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def measure(root: pathlib.Path | None = None) -> dict[str, Any]:
    """Median seconds, and MiB/s, of saving and loading weights with Adam's state."""
    model, runtime, optimizer = _made(WIDTH, DEPTH)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="autopipe-saves-", dir=root))
    warnings.simplefilter("ignore")

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def plain_load() -> None:
        found = torch.load(folder / "plain", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    def dcp_load() -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder / "dcp")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    turns: dict[str, Callable[[], object]] = {
        "ours, save": lambda: runtime.save(folder / "ours", optimizer=optimizer),
        "torch.save": lambda: (torch.save(state(), folder / "plain"), _flushed(folder / "plain")),
        "dcp.save": lambda: (dcp.save(state(), checkpoint_id=folder / "dcp"), _flushed(folder / "dcp")),
        "ours, load": lambda: runtime.load(folder / "ours", optimizer=optimizer),
        "torch.load": plain_load,
        "dcp.load": dcp_load,
    }
    try:
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(ROUNDS):
            for name, turn in turns.items():
                if name == "dcp.save":
                    shutil.rmtree(folder / "dcp", ignore_errors=True)
                began_s = time.perf_counter()
                turn()
                seconds[name].append(time.perf_counter() - began_s)
        n_bytes = sum(p.stat().st_size for p in (folder / "ours").iterdir())
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "mib": round(n_bytes / 2**20),
        "seconds": medians,
        "mib_per_s": {name: n_bytes / 2**20 / s for name, s in medians.items()},
    }


def stall(root: pathlib.Path | None = None) -> dict[str, float]:
    """Seconds that ``save`` keeps training standing, written at once and in the background, and a step's."""
    _, runtime, optimizer = _made(WIDTH, DEPTH)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="autopipe-saves-", dir=root))
    x = torch.randn(8, WIDTH)
    found: dict[str, list[float]] = {"step": [], "at once": [], "background": [], "step meanwhile": []}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        made = work()
        found[name].append(time.perf_counter() - began_s)
        return made

    try:
        for _ in range(ROUNDS):
            timed("step", lambda: runtime.step(x, target=x))
            timed("at once", lambda: runtime.save(folder / "c", optimizer=optimizer))
            kept = {"optimizer": optimizer, "background": True}
            save = timed("background", lambda kept=kept: runtime.save(folder / "c", **kept))
            while not save.is_done:
                timed("step meanwhile", lambda: runtime.step(x, target=x))
            save.wait()
    finally:
        shutil.rmtree(folder)
    return {name: statistics.median(seconds) for name, seconds in found.items() if seconds}
