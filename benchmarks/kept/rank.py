"""One rank of a training run that a fault meets: a rank is killed, stopped, raises or leaves at a moment.

Every rank writes what it was told, and when, beside the time of the fault, by the host's monotonic clock.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .work import Trainer

__all__ = ["LIMIT_S", "NOT_ON_RANK_0", "ON_RANK_0", "PLACES", "run"]

LIMIT_S = 6.0
"""``stall_limit_s``, of the runtime and of split."""

PLACES = {
    "joining the group": ("autopipe.api.agree", "_join", 1),
    "in split, before a word": ("autopipe.api.recording", "capture", 1),
    "in split, planning": ("autopipe.api.verbs", "make_plan", 1),
    "in split, measuring": ("autopipe.measure", "profile", 1),
    "in split, agreeing": ("autopipe.runtime.wire.store_messages:Talk", "gather", 1),
    "in split, deciding": ("autopipe.runtime.wire.store_messages:Talk", "settle", 2),
    "making the runtime": ("autopipe.runtime.runtime", "Engine", 1),
    "first sign to the others": ("autopipe.runtime.wire.peers", "roll_call", 1),
    "making links": ("autopipe.runtime.wire.peers", "connect", 1),
    "in the middle of links": ("autopipe.runtime.wire.host_links", "_knock", 1),
    "making communicators": ("autopipe.runtime.wire.peers", "make_group", 1),
    "after the links": ("autopipe.runtime.engine", "find_ties", 1),
    "loader": ("benchmarks.kept.work:Loader", "draw", 3),
    "first step, forward": ("autopipe.runtime.stage.worker:Worker", "forward", 1),
    "first step, backward": ("autopipe.runtime.stage.worker:Worker", "backward", 1),
    "later step, forward": ("autopipe.runtime.stage.worker:Worker", "forward", 6),
    "later step, ties": ("autopipe.runtime.reduce.ties:TieSum", "after_step", 2),
    "clipping": ("autopipe.runtime.runtime", "clip_grad_norm", 2),
    "optimizer": ("torch.optim:AdamW", "step", 2),
    "saving, collecting": ("autopipe.runtime.save_load", "collect", 1),
    "saving, writing": ("autopipe.runtime.files.safetensors_file", "_write_all", 2),
    "saving, told": ("autopipe.runtime.checkpoint.saving", "_agree", 2),
    "saving, renaming": ("autopipe.runtime.files.folder:Draft", "commit", 1),
    "saving in the background": ("autopipe.runtime.checkpoint.saving", "_write", 3),
    "loading, checking": ("autopipe.runtime.checkpoint.loading", "open_checkpoint", 1),
    "loading, reading": ("autopipe.runtime.checkpoint.loading:Checkpoint", "read", 2),
    "evaluating": ("autopipe.runtime.runtime:Runtime", "evaluate", 1),
    "report": ("autopipe.runtime.runtime:Runtime", "report", 1),
    "merging": ("autopipe.runtime.engine", "gather_weights", 1),
}
"""Moment → (module or module:class, what is called there, at which call)."""

ON_RANK_0 = frozenset(("saving, renaming", "in split, measuring"))
"""Moments that come on rank 0 alone."""
NOT_ON_RANK_0 = frozenset(("in the middle of links",))
"""Moments that never do: it knocks at nobody's door."""


def fail(fault: str, folder: pathlib.Path) -> None:
    """The fault itself, its time noted."""
    (folder / "fault").write_text(str(time.monotonic()))
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "left":
        os._exit(0)
    raise RuntimeError("out of luck")


def arrange(moment: str, fault: str, folder: pathlib.Path) -> None:
    """Have this process fail at the moment."""
    where, name, nth = PLACES[moment]
    module, _, cls = where.partition(":")
    holder: Any = importlib.import_module(module)
    holder = getattr(holder, cls) if cls else holder
    function, n_calls = getattr(holder, name), 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == nth:
            fail(fault, folder)
        return function(*args, **kwargs)

    setattr(holder, name, call)


def main(moment: str, fault: str, victim: int, folder: pathlib.Path) -> None:
    """Train, save, load, report: whatever is left of it."""
    if int(os.environ["RANK"]) == victim:
        arrange(moment, fault, folder)
    costs = "measured" if "measuring" in moment else "estimated"
    trainer = Trainer(int(os.environ["WORLD_SIZE"]), stall_limit_s=LIMIT_S, costs=costs)
    runtime, kept = trainer.runtime, trainer.kept
    for n in range(3):
        trainer.train(1, clip=1.0)
        saving = runtime.save(folder / "run", keep_last=2, background=n == 2, **kept)
    saving.wait()
    runtime.resume(folder / "run", **kept)
    x = trainer.loader.draw()
    runtime.evaluate(x, target=x)
    runtime.report()
    trainer.pipe.merge()
    dist.barrier()


def told(work: Callable[[], None], path: pathlib.Path) -> None:
    """Do ``work``; write down what it raised and when."""
    kind, text = "done", ""
    try:
        work()
    except BaseException as error:
        kind, text = type(error).__name__, "".join(traceback.format_exception_only(error)).strip()
    path.write_text(json.dumps({"kind": kind, "text": text, "at_s": time.monotonic()}))


def run(moment: str, fault: str, victim: int, folder: pathlib.Path) -> None:
    """All of this process, as one rank of a launcher's environment; it does not return."""
    told(lambda: main(moment, fault, victim, folder), folder / f"rank-{os.environ['RANK']}.json")
    time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)  # others read their cause in its store
    os._exit(0)
