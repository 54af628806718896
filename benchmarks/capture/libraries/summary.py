"""Lines and tables of a walk over other libraries, from what its processes reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.capture.summary import placeless

from .walk import ASKED, outcome

__all__ = ["line", "section", "table"]

_SIGN = {True: "yes", False: "NO", None: "-"}
_TITLES = {
    "parity": "outputs, every gradient, buffers",
    "data": "on other data",
    "batch": "another batch size",
    "length": "another length",
    "steps": "two steps in microbatches",
}
Results = Mapping[str, Mapping[str, Any]]


def line(name: str, found: Mapping[str, Any]) -> str:
    """One model in a row of text, its problem below."""
    signs = " ".join(f"{key} {_SIGN[found.get(key)]:3}" for key in ASKED)
    problem = _problem(found)
    return f"{name:58} {outcome(found):9} {signs} {found.get('seconds', 0.0):6.2f} s" + (
        f"\n     {problem}" if problem else ""
    )


def _problem(found: Mapping[str, Any]) -> str:
    keys = ("eager", "raw", "refused", *(f"{k}_problem" for k in ASKED if found.get(k) is False), "died")
    return str(next((found[k] for k in keys if found.get(k)), ""))[:420]


def table(models: Results) -> str:
    """How many of those that run eagerly are right, question by question, as Markdown."""
    ran = {n: f for n, f in models.items() if outcome(f) != "eager"}
    became = Counter(map(outcome, ran.values()))
    n_packages = len({n.partition("/")[0] for n in ran})
    rows = [
        f"| of {len(ran)} models of {n_packages} packages | |",
        "|---|--:|",
        f"| captured | {_share([not {'raw', 'refused'} & set(f) for f in ran.values()])} |",
        *(f"| {title} | {_asked(ran, key)} |" for key, title in _TITLES.items()),
        f"| right in everything | {_share([outcome(f) == 'right' for f in ran.values()])} |",
        f"| refused in an error of autopipe's own | {became['refused']} |",
        f"| different | {became['different']} |",
        f"| another error | {became['raw']} |",
        f"| not over in time | {became['late']} |",
    ]
    return "\n".join(rows)


def _asked(ran: Results, key: str) -> str:
    return _share([f[key] for f in ran.values() if f.get(key) is not None])


def _share(answers: list[bool]) -> str:
    return f"{sum(answers)}/{len(answers)} ({100 * sum(answers) / max(1, len(answers)):.1f}%)"


def section(data: Mapping[str, Any], n_listed: int) -> str:
    """The README's section on a JSON file of results, of so many models as are listed, as Markdown."""
    models: Results = data["models"]
    missed = {n: f for n, f in models.items() if outcome(f) not in ("right", "eager")}
    unable = {n: f for n, f in models.items() if outcome(f) == "eager"}
    rounded = [n for n, f in models.items() if "rounding" in f]
    return "\n".join(
        [
            f"`libraries/` lists {n_listed} models of other packages as their documentation builds",
            "them, and some (`by_hand`, `transformers`) with the loops, losses and options that people",
            "write themselves;",
            f"{len(models)} were tried; versions are in its `requirements.txt`. Each is captured, cut in 4",
            "and compared as above, on its example, on other data of the same sizes and at other sizes; the",
            "latest also in two steps of a runtime in two microbatches, where a difference counts with a",
            "warning or without, and a refusal of the step does not.",
            "`libraries/results.json` has each. What cannot be cut in 4 is cut in as many as it can be.",
            f"Commit {data['environment']['commit']}.",
            "",
            table(models),
            "",
            *_rounding(rounded),
            "Misses:",
            "",
            *([f"- `{n}`: {outcome(f)}: {_short(f)}" for n, f in sorted(missed.items())] or ["none"]),
            "",
            "Not counted, since they do not run by themselves here:",
            "",
            *([f"- `{n}`: {_short(f)}" for n, f in sorted(unable.items())] or ["none"]),
            "",
            "Compiled ops of a torchvision for another torch are not called: models that need them do not",
            "run.",
            "",
            "```",
            'pip install -c constraints.txt -e ".[tests]"  # in a venv of its own',
            "pip install --no-deps -r benchmarks/capture/libraries/requirements.txt",
            "rm -f $VIRTUAL_ENV/lib/python3*/site-packages/torchaudio/lib/*.so  # made for another torch",
            "rm -rf $VIRTUAL_ENV/lib/python3*/site-packages/tests  # some packages install theirs",
            "python -m benchmarks.capture.libraries --json libraries.json    # or: timm torchvision",
            "python -m benchmarks.capture.libraries --report libraries.json  # results.json and this section",
            "```",
        ]
    )


def _rounding(names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(f"`{n}`" for n in sorted(names))
    return [f"Equal in double precision, and only within rounding in single: {shown}.", ""]


def _short(found: Mapping[str, Any]) -> str:
    words = placeless(_problem(found).replace("|", "/"))
    return words if len(words) <= 200 else words[:197] + "..."
