"""The second walk: models of other libraries, as their documentation builds them, small.

``python -m benchmarks.capture.libraries [PREFIX ...] [--json OUT]`` tries each in a process of its own and
prints a line per model and the table; libraries that are not installed are named. ``--report OUT`` keeps a
walk's results and writes the README's section on them.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.capture import workers
from benchmarks.capture.summary import environment, placeless

from . import (  # noqa: F401
    agents,
    annotated,
    attentions,
    breadth,
    by_hand,
    columns,
    domains,
    fields,
    frameworks,
    further,
    gallery,
    generators,
    graphs,
    images,
    learners,
    matter,
    methods,
    newer,
    options,
    papers,
    pictures,
    pixels,
    professions,
    recipes,
    restoring,
    scenes,
    science,
    sequences,
    series,
    signals,
    stacks,
    tables,
    tutorials,
    vision,
    voices,
    workshop,
)
from .catalogue import CASES, Case, chosen
from .summary import line, section, table
from .walk import prepare, tried

HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Try the models whose names start with one of the arguments, or all; see the module."""
    asked = _options()
    if asked.report:
        _report(json.loads(asked.report.read_text()))
        return
    done: dict[str, dict[str, Any]] = {}
    if asked.resume and asked.json.exists():
        done = json.loads(asked.json.read_text())["models"]
    cases = chosen(tuple(asked.prefixes) or ("",), asked.every, done)
    where = environment()
    for case, found in _each(cases, asked.limit):
        done[case.name] = found
        print(line(case.name, found), flush=True)
        if asked.json:
            kept = {"environment": where, "models": dict(sorted(done.items()))}
            asked.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(done))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture.libraries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefixes", nargs="*", help="package or package/model")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the results")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file already holds")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth model only")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of processor time per model")
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="JSON", help="write the README's section from it"
    )
    return parser.parse_args()


def _each(cases: list[Case], limit_s: float) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case in a forked process; its library is imported before, once for all its models."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    prepare()
    workers.warm()
    for module, of_module in itertools.groupby(cases, lambda c: c.module):
        chosen = list(of_module)
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a library raises while it is imported
            said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
            yield from ((case, {"eager": said}) for case in chosen)
            continue
        finally:
            torch.set_default_dtype(torch.float32)  # neurodiffeq sets another while it is imported
        yield from workers.run(_quiet, chosen, n_jobs=1, limit_s=limit_s)


def _quiet(case: Case, report: Callable[[dict[str, Any]], None]) -> None:
    """:func:`tried`, without what a library prints."""
    with pathlib.Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    tried(case, report)


def _report(data: dict[str, Any]) -> None:
    """Keep a walk's JSON, without the machine's folders, and write the README's section on it."""
    (HERE / "results.json").write_text(placeless(json.dumps(data, indent=1)) + "\n")
    readme = HERE.parent / "README.md"
    before, rest = readme.read_text().split("## Other libraries\n", 1)
    after = rest[rest.index("\n## ") + 1 :]
    readme.write_text(f"{before}## Other libraries\n\n{section(data, len(CASES))}\n\n{after}")


if __name__ == "__main__":
    main()
