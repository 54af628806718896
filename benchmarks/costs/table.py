"""Writes the figures of ``results.json`` into the tables of the README: ``python -m benchmarks.costs.table``.

Taking the figures is left to the other modules of this benchmark.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

from .causes import CAUSES

__all__ = ["table"]

HERE = pathlib.Path(__file__).parent
BEGIN, END = "<!-- figures: written by benchmarks.costs.table -->", "<!-- end of figures -->"

CHECKS = (
    ("sums", "sum of op costs against the whole model", "≤ 5% mean, ≤ 10% max"),
    ("stage", "stage time in a 2-process pipeline", "≤ 5% mean, ≤ 10% max"),
    ("stage, first profile", "the same, by the profile taken before anything ran", ""),
    ("step", "step time, optimizer included", "≤ 5% mean, ≤ 10% max"),
    ("step, first profile", "the same, by the profile taken before anything ran", ""),
    ("memory", "peak memory per stage", "within 5%, at most 2% under"),
    ("elsewhere, stage", "stage time of other packages' models, one profile before anything ran", ""),
    ("elsewhere, step", "their step time, likewise", "≤ 4% mean, ≤ 8% max"),
    ("elsewhere, speed-up", "their gain over the uniform split, predicted over measured", "≤ 5% max"),
    ("crowded, step", "their step time on more ranks than the machine has cores", ""),
    ("symbolic", "formulas fitted at 3 sizes, at others", "≤ 7% mean"),
    ("estimates, fitted", "estimate only, efficiency fitted to other models", "aim ≤ 15% mean (GPU)"),
    ("estimates, assumed", "estimate only, assumed efficiency", "none"),
)


def table(out: dict[str, Any]) -> str:
    """Markdown: one table over all checks, and one row per pipeline."""
    lines = ["| check | figures | mean | largest | lowest | bar |", "|---|--:|--:|--:|--:|---|"]
    for key, words, bar in CHECKS:
        if row := out["summary"].get(key):
            lines.append(
                f"| {words} | {row['n']} | {row['mean']:.1%} | {row['largest']:+.1%} "
                f"| {row['lowest']:+.1%} | {bar} |"
            )
    if "deep" in out["summary"]:
        lines.append(f"\nProfiling 96 blocks takes {out['summary']['deep']:.2f}× profiling 4 (bar: 1.5×).")
    if "pipelines" in out:
        lines += ["", "| pipeline | stages | step | memory | CPU used by others |", "|---|---|--:|---|--:|"]
        lines += [_pipeline(name, row) for name, row in out["pipelines"].items()]
    for part in [part for part in ("elsewhere", "crowded") if part in out]:
        lines += ["", f"| {part} | ranks | microbatches | stages | step | gain | CPU used by others |"]
        lines += [
            "|---|--:|--:|---|--:|--:|--:|",
            *(_elsewhere(n, row) for n, row in out[part].items()),
        ]
        lines += ["", f"| step, predicted less measured, by cause | {' | '.join(CAUSES)} |"]
        lines += ["|---|" + "--:|" * len(CAUSES), *(_causes(n, row) for n, row in out[part].items())]
        lines += [_mean_causes(list(out[part].values())), "", _leaning(list(out[part].values()))]
    if "environment" in out:
        e = out["environment"]
        lines.append(
            f"\nLast run on {e['device']}, {e['cores']} cores; torch {e['torch']}, Python {e['python']}."
        )
    disturbed = [
        f"{part} {name}"
        for part, runs in out.items()
        if part not in ("summary", "environment")
        for name, row in runs.items()
        if row["run"]["disturbed"]
    ]
    lines.append(f"\nDisturbed by other load: {', '.join(disturbed) or 'none'}.")
    return "\n".join(lines)


def _pipeline(name: str, row: dict[str, Any]) -> str:
    stages, memory = (", ".join(f"{s['error']:+.1%}" for s in row[key]) for key in ("stages", "memory"))
    return f"| {name} | {stages} | {row['step']['error']:+.1%} | {memory} | {row['run']['other_load']:.1%} |"


def _elsewhere(name: str, row: dict[str, Any]) -> str:
    stages = ", ".join(f"{s['first_error']:+.1%}" for s in row["stages"])
    shape, step = f"{row['n_ranks']} | {row['n_microbatches']}", row["step"]["first_error"]
    gain = f"{row['uniform']['error']:+.1%}" if row["n_ranks"] > 1 else "–"
    return f"| {name} | {shape} | {stages} | {step:+.1%} | {gain} | {row['run']['other_load']:.1%} |"


def _causes(name: str, row: dict[str, Any]) -> str:
    """Of the measured step; in brackets how much of it the cause is, as measured; a dash: not told."""
    measured_s = row["step"]["measured_s"]
    found = [row["causes"].get(cause) for cause in CAUSES]
    parts = (f"{c['share']:+.1%} ({c['measured_s'] / measured_s:.1%})" if c else "–" for c in found)
    return f"| {name} | {' | '.join(parts)} |"


def _mean_causes(rows: list[dict[str, Any]]) -> str:
    """As of one pipeline, on average; of what every pipeline tells."""
    parts = []
    for cause in CAUSES:
        told = [(row["causes"][cause], row["step"]["measured_s"]) for row in rows if cause in row["causes"]]
        share = statistics.fmean(c["share"] for c, _ in told)
        parts.append(f"{share:+.1%} ({statistics.fmean(c['measured_s'] / s for c, s in told):.1%})")
    return f"| **on average** | {' | '.join(parts)} |"


def _leaning(rows: list[dict[str, Any]]) -> str:
    """Whether steps are predicted too short or too long more often; also without what was disturbed."""
    groups = {"All": rows, "Not disturbed": [row for row in rows if not row["run"]["disturbed"]]}
    return " ".join(
        f"{name}: {_errors([row['step']['first_error'] for row in group])}."
        for name, group in groups.items()
        if group
    )


def _errors(found: list[float]) -> str:
    n_short = sum(e < 0 for e in found)
    return (
        f"steps {n_short} too short and {len(found) - n_short} too long, {statistics.fmean(found):+.1%} on "
        f"average, {statistics.fmean(map(abs, found)):.1%} off, {max(found, key=abs):+.1%} at worst"
    )


def main() -> None:
    """Replaces what stands between the marks of the README."""
    readme = HERE / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    figures = table(json.loads((HERE / "results.json").read_text()))
    readme.write_text(f"{head}{BEGIN}\n{figures}\n{END}{tail}")


if __name__ == "__main__":
    main()
