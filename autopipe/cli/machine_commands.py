"""The verbs that touch machines: probe, run, doctor.

Measuring links is left to ``measure``, training to ``runtime``; the other verbs are in ``plan_commands``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..files import write_text
from ..units import n_of
from . import options as o
from .command import verb
from .output import Output, aside, note, table

__all__: list[str] = []

RUN_TIMEOUT_S = 300


@verb("measuring devices and links")
def probe(
    ranks: Annotated[int, typer.Option(help="Processes to measure between, on this machine.", min=1)] = 2,
    nics: Annotated[
        int | None,
        typer.Option(help="Network interfaces of each host, which neighbouring ranks share.", min=1),
    ] = None,
    out: o.Out = None,
) -> Output:
    """Measure the devices here, the links between ranks and how fast ranks work, for `--cluster`.

    Under torchrun it measures between the job's own ranks.
    """
    from ..api import probe as probe_ranks
    from ..arguments import whole
    from ..look import Column, Table
    from ..look.table import count, seconds, word

    if nics is not None:
        whole("--nics", nics, least=1, most=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    cluster = probe_ranks(ranks)
    if nics is not None:
        cluster = cluster.with_nics(nics)
    if out is not None:
        write_text(out, json.dumps(cluster.to_dict()))
    columns = (
        Column("source", "from", count),
        Column("destination", "to", count),
        Column("latency_s", "latency", seconds),
        Column("bandwidth", "bandwidth"),
        Column("origin", "source"),
    )
    pairs = [(a, b) for a in range(cluster.n_ranks) for b in range(cluster.n_ranks) if a != b]
    links = [(a, b, cluster.link(a, b)) for a, b in pairs]
    rows = tuple(
        (a, b, x.latency_s, f"{x.bandwidth_bytes_s / 1e9:.2f} GB/s", word(x.source)) for a, b, x in links
    )
    names = ", ".join(dict.fromkeys(d.name for d in cluster.devices))
    speed = cluster.devices[0].speed
    pace = f", in a pipeline at {speed:.1%} of the pace that costs are measured at" if speed != 1.0 else ""
    text = f"{n_of(cluster.n_ranks, 'rank')} on {names}{pace}\n\n{table(Table('Links', columns, rows))}"
    return Output(cluster.to_dict(), text)


@verb("splitting and training", spin=False)
def run(
    model: o.Model,
    making: o.Making,
    how: o.Planning,
    steps: Annotated[
        int, typer.Option(help="Training steps.", min=1, max=1_000_000, rich_help_panel=o.RUN)
    ] = 3,
    lr: Annotated[
        float, typer.Option(help="Learning rate of SGD, from 0 to 1000.", rich_help_panel=o.RUN)
    ] = 1e-3,
    publish: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Have `autopipe watch` show the steps that are written here.", rich_help_panel=o.SAY
        ),
    ] = None,
    out: o.Out = None,
) -> Output | None:
    """Split a model, check it against the original, train it some steps; predicted and measured side by side.

    All stages run in this process, 2 by default; under torchrun each rank runs its own, by default one, and
    the links between them are measured first, unless --cluster gives them. A model that computes no loss of
    its own is trained on the mean square of its outputs.
    """
    from .. import accelerator
    from ..api import probe as probe_ranks
    from ..arguments import number
    from ..errors import InputError
    from ..measure.busy_cores import pace
    from .planning import Request
    from .training import job, train

    number("--lr", lr, most=1e3)
    if making.meta:
        raise InputError("--meta makes no weights to train; leave it out, or use plan and simulate")
    with job() as n_ranks:
        how = how if how.stages is not None else dataclasses.replace(how, stages=max(2, n_ranks))
        request = Request(model, making)
        cluster = probe_ranks() if n_ranks > 1 and request.runs_here else None
        on_processor = request.source == "measured" and accelerator.current().type == "cpu"
        before_s = pace() if on_processor else 0.0
        pipe = request.split(how, cluster)
        costed_s = (before_s + pace()) / 2 if on_processor else None
        with aside():
            result = train(pipe, steps, lr, publish, costed_s)
        if out is not None:
            write_text(out, json.dumps(result.timeline))
    return Output(result.to_dict(), str(result)) if os.environ.get("RANK", "0") == "0" else None


@verb("looking around")
def doctor() -> Output:
    """Check what is installed, and that a small model is split and trained right; exit code 1 if not."""
    from ..look import Column, Table

    checks = [(name, *_checked(check)) for name, check in CHECKS.items()]
    columns = (Column("what", "what"), Column("ok", "ok"), Column("found", "found"))
    rows = tuple((name, "yes" if ok else "NO" if ok is False else "–", found) for name, ok, found in checks)
    bad = [name for name, ok, _ in checks if ok is False]
    return Output(
        [{"what": n, "ok": ok, "found": found} for n, ok, found in checks],
        table(Table("This machine", columns, rows, "– means optional and absent.")),
        f"not well: {', '.join(bad)}" if bad else "",
    )


def _checked(check: Callable[[], tuple[bool | None, str]]) -> tuple[bool | None, str]:
    try:
        return check()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}".splitlines()[0]


def _python() -> tuple[bool, str]:
    return sys.version_info >= (
        3,
        11,
    ), f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _torch() -> tuple[bool, str]:
    import torch

    wanted = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    return wanted >= (2, 11), torch.__version__


def _devices() -> tuple[bool, str]:
    import torch

    from .. import accelerator

    if not torch.accelerator.is_available():
        n = torch.get_num_threads()
        return True, f"CPU, {os.cpu_count()} cores, {n} thread{'s' if n > 1 else ''}; no GPU"
    kind, n = accelerator.current().type, torch.accelerator.device_count()
    return True, ", ".join(accelerator.name(torch.device(kind, i)) for i in range(n))


def _distributed() -> tuple[bool, str]:
    import torch.distributed as dist

    kinds = [k for k in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{k}_available")()]
    return bool(kinds), ", ".join(kinds) or "no backend"


def _extra(*packages: str) -> Callable[[], tuple[bool | None, str]]:
    def check() -> tuple[bool | None, str]:
        found = []
        for package in packages:
            try:
                found.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"no {package}")
        return (None if any(f.startswith("no ") for f in found) else True), ", ".join(found)

    return check


def _browser() -> tuple[bool | None, str]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    return (True, found) if found else (None, "none found; only the report's tests need one")


def _end_to_end() -> tuple[bool, str]:
    """A small model through ``run`` in a process of its own, so that a crash there is only a finding here."""
    here = pathlib.Path(__file__).parent / "sample.py"
    command = [sys.executable, "-m", "autopipe", "run", f"{here}:small", "--steps", "2", "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        note(done.stderr)
        return False, (done.stderr.strip().splitlines() or ["no message"])[-1]
    result: dict[str, Any] = json.loads(done.stdout)
    worst = result["worst_relative_difference"]
    return True, f"splits, trains, agrees to {worst:.0e}; {time.perf_counter() - start:.1f} s"


CHECKS: dict[str, Callable[[], tuple[bool | None, str]]] = {
    "python": _python,
    "torch": _torch,
    "devices": _devices,
    "distributed": _distributed,
    "transformers": _extra("transformers"),
    "notebooks": _extra("ipykernel", "ipywidgets", "pandas"),
    "browser": _browser,
    "end to end": _end_to_end,
}
