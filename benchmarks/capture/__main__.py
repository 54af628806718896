"""The command: walks the zoo, prints a line per model and the summary, writes JSON.

``python -m benchmarks.capture [--only RE] [--jobs 2] [--json OUT] [--export-every N] [--resume]``
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Set
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from . import workers
from .summary import environment, line, placeless, section, summary
from .zoo import Entry, by_hash, entries


def main() -> int:
    """Runs the walk; the exit status says whether it ran, not how it came out."""
    options = _options()
    if options.report:
        _report(options.report)
        return 0
    # by hash, so that what is done so far is a fair sample of the whole at any time
    chosen = sorted((e for e in entries() if re.search(options.only, e.name)), key=by_hash)
    where = environment()
    done: dict[str, dict[str, Any]] = {}
    if options.resume and options.json.exists():
        done = json.loads(options.json.read_text())["models"]
    waiting = [e for e in chosen if e.name not in done]
    workers.prepare()
    start = time.monotonic()
    work = _trial({e.name for e in chosen[:: options.export_every]} if options.export_every else set())
    for entry, result in workers.run(work, waiting, n_jobs=options.jobs, limit_s=options.limit):
        done[entry.name] = result
        print(f"{len(done):4}/{len(chosen)} {line(entry.name, result)}", flush=True)
        if options.json:
            _write(options.json, where, done, time.monotonic() - start)
    print(summary(done))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--only", default="", metavar="RE", help="models whose task/type/class matches")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of processor time per model")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the results")
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="JSON", help="write the README's results from it"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file already holds")
    parser.add_argument(
        "--export-every", type=int, default=1, metavar="N", help="torch.export on every Nth model; 0 for none"
    )
    return parser.parse_args()


def _trial(exported: Set[str]) -> Callable[[Entry, Callable[[dict[str, Any]], None]], None]:
    """What a process does with one entry: build, autopipe, torch.export; each half reports under its name."""
    from . import export, trial

    def work(entry: Entry, report: Callable[[dict[str, Any]], None]) -> None:
        with pathlib.Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
        try:
            subject = trial.build(entry)
        except trial.NoSubject as reason:
            report({"eager": False, "why": str(reason)[:2000]})
            return
        report({"eager": True, "rung": subject.rung, "inputs": subject.how})
        halves = {"autopipe": trial.try_autopipe}
        if entry.name in exported:
            halves["export"] = export.try_export
        for name, half in halves.items():
            _guard(half, subject, name, report)

    return work


def _guard(
    half: Callable[..., None], subject: Any, name: str, report: Callable[[dict[str, Any]], None]
) -> None:
    found: dict[str, Any] = {"captured": False}

    def add(more: dict[str, Any]) -> None:
        found.update(more)
        report({name: dict(found)})

    add({})
    try:
        half(subject, add)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = "; ".join(f"{pathlib.Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
        add({"error": f"{type(error).__name__}: {str(error)[:500]}", "where": where})


def _report(source: pathlib.Path) -> None:
    """Keeps a walk's JSON beside the README and writes the README's section on it."""
    data = json.loads(source.read_text())
    here = pathlib.Path(__file__).parent
    (here / "results.json").write_text(placeless(json.dumps(data, indent=1)) + "\n")
    readme = here / "README.md"
    before, rest = readme.read_text().split("## Result\n", 1)
    after = rest[rest.index("\n## ") + 1 :]
    readme.write_text(f"{before}## Result\n\n{section(data, len(entries()))}\n\n{after}")


def _write(path: pathlib.Path, where: dict[str, str], done: dict[str, Any], seconds: float) -> None:
    out = {"environment": where, "seconds": round(seconds, 1), "models": dict(sorted(done.items()))}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(out, indent=1).replace(f"{sys.prefix}/", ""))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
