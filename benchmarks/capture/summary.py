"""Lines and percentages of a walk, from the results that its processes reported."""

from __future__ import annotations

import pathlib
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["environment", "line", "placeless", "section", "summary"]

SIZES = ("parity", "batch", "length")
_SIGN = {True: "yes", False: "NO", None: "-"}

COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool | None]], ...] = (
    ("captured", lambda r: r.get("captured", False)),
    ("cut", lambda r: r.get("is_cut", False)),
    ("parity", lambda r: r.get("parity", False)),
    ("batch", lambda r: r.get("batch", False)),
    ("length", lambda r: r.get("length", False)),
)
"""What is asked of each half; None where the model itself does not run at that size."""


def placeless(text: str) -> str:
    """Text without the folders of the machine that a walk ran on; what is installed is named by its package.

    >>> placeless("at /opt/env/site-packages/timm/layers/conv.py:3, asked by /srv/copy/tests/models.py:7")
    'at timm/layers/conv.py:3, asked by models.py:7'
    """
    text = re.sub(r"[\w./+-]*/site-packages/?", "", text)
    return re.sub(r"(?<![\w.:/])(?:/[\w.+-]+)+/", "", text)


def line(name: str, result: Mapping[str, Any]) -> str:
    """One model in a row of text."""
    if not result.get("eager"):
        return f"{name:72} does not run eagerly: {(result.get('died') or result.get('why', ''))[:60]!r}"
    parts = [f"{name:72}"]
    for half in ("autopipe", "export"):
        found = result.get(half)
        if found is None:
            continue
        signs = " ".join(f"{_SIGN[rule(found)]:3}" for _, rule in COLUMNS)
        parts.append(f"{half} {signs} {found.get('seconds', 0.0):6.2f} s {found.get('nodes', 0):5} nodes")
    problem = _problem(result)
    return " | ".join(parts) + (f"\n     {problem}" if problem else "")


def _problem(result: Mapping[str, Any]) -> str:
    found = result.get("autopipe", {})
    graph = found.get("graph", {})
    words = [f"graph, {k}: {graph[f'{k}_problem']}" for k in SIZES if f"{k}_problem" in graph]
    words += [found.get("error"), *(found.get(f"{k}_problem") for k in SIZES)]
    return next((w.splitlines()[0][:220] for w in words if w), result.get("died", ""))


def summary(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Percentages over the models that run eagerly, and the ratio of capture times."""
    eager = [r for r in models.values() if r.get("eager")]
    rows = [f"{len(models)} models, {len(eager)} run eagerly"]
    for half in ("autopipe", "export"):
        found = [r[half] for r in eager if half in r]
        if found:
            rows.append(f"{half:9}" + "".join(f"  {n} {_share(found, rule)}" for n, rule in COLUMNS))
    both = [r for r in eager if all("seconds" in r.get(h, {}) for h in ("autopipe", "export"))]
    if both:
        ours = statistics.median(r["autopipe"]["seconds"] for r in both)
        theirs = statistics.median(r["export"]["seconds"] for r in both)
        ratio = statistics.median(r["autopipe"]["seconds"] / r["export"]["seconds"] for r in both)
        rows.append(
            f"median capture {ours:.3f} s, torch.export {theirs:.3f} s, median ratio {ratio:.3f} "
            f"over the {len(both)} models that both capture"
        )
    return "\n".join(rows)


def _share(found: list[Mapping[str, Any]], rule: Callable[[Mapping[str, Any]], bool | None]) -> str:
    asked = [answer for answer in map(rule, found) if answer is not None]
    return f"{sum(asked)}/{len(asked)} ({100 * sum(asked) / max(1, len(asked)):.1f}%)"


def section(data: Mapping[str, Any], n_entries: int) -> str:
    """The README's section on a JSON file of results, from a walk over ``n_entries`` models, as Markdown."""
    models = data["models"]
    eager = {n: r for n, r in models.items() if r.get("eager")}
    asked = [r for r in eager.values() if "export" in r]
    halves = (
        [r.get("autopipe", {}) for r in eager.values()],
        [r.get("autopipe", {}) for r in asked],
        [r["export"] for r in asked],
    )
    rows = [
        f"| {title} | {' | '.join(_share(half, rule) for half in halves)} |"
        for title, (_, rule) in zip(_TITLES, COLUMNS, strict=True)
    ]
    commit = data["environment"]["commit"]
    walked = f"{len(models)} models"
    if len(models) < n_entries:
        walked += f" of {n_entries}, the first in an order by hash and so a fair sample"
    return "\n".join(
        [
            f"{walked}, of which {len(eager)} run eagerly under the rules; torch.export",
            f"was asked on {len(asked)} of these. `results.json` has each. Commit {commit}.",
            "",
            "| of the models that run eagerly | autopipe | autopipe, where torch.export was asked "
            "| torch.export + pipelining |",
            "|---|--:|--:|--:|",
            *rows,
            "",
            "Misses of autopipe (a size that the model itself does not take is not asked):",
            "",
            *_misses(eager),
        ]
    )


_TITLES = (
    "captured",
    "split in 4",
    "outputs, every gradient, buffers",
    "another batch size",
    "another length",
)


def _misses(eager: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each model and question with a no; the model's own file paths are cut to their names."""
    out = []
    for name, result in sorted(eager.items()):
        found = result.get("autopipe", {})
        failed = next((title for title, rule in COLUMNS if rule(found) is False), None)
        if failed:
            words = (_problem(result) or "no answer").replace("|", "/")
            words = re.sub(r"[\w.-]*(?:/[\w.-]+)+/", "", words)
            words = re.sub(r"^graph, \w+: ", "", words)
            out.append(f"- `{name}`: {failed}: {words[:170]}")
    return out or ["none"]


def environment() -> dict[str, str]:
    """What the figures depend on."""
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of this checkout; "" outside of one."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
