"""How long a capture takes beside ``torch.export``: processor time, sizes fixed in both and free in both.

``python -m benchmarks.capture.times [--n 24]`` takes models of the walk, as small as the walk makes them, in
its order by hash, prints a line for each and writes ``times.json``; with ``--deep`` the models of ``depths``,
which have all their layers, and ``times_deep.json``. Whether captures are right is left to the walk.

Recording is what it takes to make the graphs and their guards: runs that record, and runs of the graph at
other sizes for their formulas. The referee is what runs the model or the graph to judge that: on other data,
beside the model at other sizes, on rows in other places, for values, gradients and what is left behind.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from torch.export import Dim, export
from torch.utils import _pytree as pytree

import autopipe
from autopipe.tracing import forms
from autopipe.tracing.referee.referee import Referee
from autopipe.tracing.sizes.trials import Explorer

from . import workers
from .depths import DEEP, Deep, build_deep
from .export import switch_caches_off
from .inputs import EXAMPLE
from .summary import environment
from .trial import Subject, build
from .zoo import Entry, by_hash, entries

HERE = pathlib.Path(__file__).parent
ROUNDS = 3
LIMIT_S = 180.0
"""Of processor time, for one model."""
COLUMNS = {
    "fixed": "sizes fixed in both",
    "free": "sizes free in both",
    "mixed": "free in autopipe, fixed in torch.export",
}


JUDGES: tuple[tuple[Any, str], ...] = (
    (Referee, "fault"),
    (Explorer, "differs"),
    (Explorer, "judge"),
    (Explorer, "check_example"),
    (Explorer, "_answered"),
    (Explorer, "_does_harm"),
    (forms, "with_rows_of_the_example"),
    (forms, "with_rows"),
    (forms.CaptureForms, "_ask_rows"),
    (importlib.import_module("autopipe.tracing.capture"), "confirm"),
)
"""What judges recordings; some of them ask others."""


class Refereed:
    """The processor seconds ``spent_s`` that captures spend on judging recordings; ``is_within``: in one."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.is_within = False
        self._judges = [(place, name, getattr(place, name)) for place, name in JUDGES]

    def __enter__(self) -> Refereed:
        for place, name, judge in self._judges:
            setattr(place, name, self._timed(judge))
        return self

    def __exit__(self, *_: object) -> None:
        for place, name, judge in self._judges:
            setattr(place, name, judge)

    def _timed(self, judge: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(judge)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.is_within:
                return judge(*args, **kwargs)
            self.is_within, start = True, time.process_time()
            try:
                return judge(*args, **kwargs)
            finally:
                self.spent_s += time.process_time() - start
                self.is_within = False

        return timed


def main() -> None:
    """Time the models and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture.times")
    parser.add_argument("--n", type=int, default=24, help="how many models are tried")
    parser.add_argument("--deep", action="store_true", help="models with all their layers instead")
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    options = parser.parse_args()
    path = options.json or HERE / ("times_deep.json" if options.deep else "times.json")
    logging.disable(logging.WARNING)
    workers.prepare()
    walked = sorted((e for e in entries() if e.task != "own"), key=by_hash)[: options.n]
    chosen: tuple[Entry | Deep, ...] = DEEP if options.deep else tuple(walked)
    found = {}
    for entry, times in workers.run(_trial, chosen, n_jobs=1, limit_s=LIMIT_S):
        if "died" in times:
            print(f"{entry.name}: left out, {times['died'][:80]!r}", flush=True)
            continue
        found[entry.name] = times
        shares = "  ".join(f"{k} {v['with']:.3f} {v['without']:.3f}" for k, v in _ratios(times).items())
        print(f"{entry.name:60} {shares}", flush=True)
        path.write_text(json.dumps({"environment": environment(), "models": found}, indent=1) + "\n")
    print(table_of_each(found) if options.deep else table(found))


def table(found: dict[str, dict[str, float]]) -> str:
    """The README's table of medians: capture over ``torch.export``, with the referee and recording alone."""
    ratios = [_ratios(times) for times in found.values()]
    lines = ["| capture over `torch.export` | with the referee | recording alone |", "|---|--:|--:|"]
    for key, title in COLUMNS.items():
        cells = [f"{statistics.median(r[key][how] for r in ratios):.3f}" for how in ("with", "without")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_each(found: dict[str, dict[str, float]]) -> str:
    """The README's table of single models: seconds of ``torch.export`` and capture, and their ratios."""
    heads = "| model | sizes | `torch.export`, s | capture, s | ratio | recording alone |"
    lines = [heads, "|---|---|--:|--:|--:|--:|"]
    for name, times in found.items():
        for key in ("fixed", "free"):
            ratio, seconds = _ratios(times)[key], (times[f"theirs {key}"], times[f"ours {key}"])
            cells = (*(f"{s:.2f}" for s in seconds), f"{ratio['with']:.3f}", f"{ratio['without']:.3f}")
            lines.append(f"| {name.partition('/')[2]} | {key} | {' | '.join(cells)} |")
    return "\n".join((*lines, "", table(found)))


def _ratios(times: dict[str, float]) -> dict[str, dict[str, float]]:
    pairs = {"fixed": ("fixed", "fixed"), "free": ("free", "free"), "mixed": ("free", "fixed")}
    return {
        key: {
            "with": times[f"ours {ours}"] / times[f"theirs {theirs}"],
            "without": (times[f"ours {ours}"] - times[f"refereed {ours}"]) / times[f"theirs {theirs}"],
        }
        for key, (ours, theirs) in pairs.items()
    }


def _trial(entry: Entry | Deep, report: Callable[[dict[str, Any]], None]) -> None:
    """What a process does with one model."""
    report(_times(build_deep(entry) if isinstance(entry, Deep) else build(entry)))


def _times(subject: Subject) -> dict[str, float]:
    """Seconds of processor time, the least of some rounds in which all take turns."""
    model = subject.model
    switch_caches_off(model)
    args, kwargs = subject.inputs(EXAMPLE)
    free = pytree.tree_map(lambda x: dict.fromkeys(range(x.ndim), Dim.AUTO), kwargs)
    assert not args
    fixed = functools.partial(autopipe.capture, dynamic=False)
    rounds = []
    for _ in range(ROUNDS):
        times = {
            "theirs fixed": _spent(lambda: export(model.eval(), (), kwargs)),
            "theirs free": _spent(lambda: export(model.eval(), (), kwargs, dynamic_shapes=free)),
        }
        for key, capture in (("fixed", fixed), ("free", autopipe.capture)):
            with Refereed() as refereed:
                spent_s = _spent(functools.partial(capture, model.train(), (), kwargs))
            times |= {f"ours {key}": spent_s, f"refereed {key}": refereed.spent_s}
        rounds.append(times)
    least = {key: min(r[key] for r in rounds) for key in rounds[0]}
    for key in ("fixed", "free"):  # of the round that was the shortest
        shortest = min(rounds, key=lambda r: r[f"ours {key}"])
        least[f"refereed {key}"] = shortest[f"refereed {key}"]
    return least


def _spent(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
