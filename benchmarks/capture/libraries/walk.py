"""One model of another library: built, captured, cut in 4, held against itself on other data and sizes.

Comparing is left to ``trial``; which models, and in which processes, to ``__main__``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import autopipe
from autopipe import errors
from benchmarks.capture.inputs import EXAMPLE, Sizes
from benchmarks.capture.trial import N_STAGES, SOLVE_S, Subject, compare, n_blocks
from benchmarks.capture.workers import OVER
from tests.zoo.observe import seed

from .catalogue import Case
from .training import steps

__all__ = ["ASKED", "outcome", "prepare", "tried"]

ASKED = ("parity", "data", "batch", "length", "steps")
"""What is asked of a model that is captured; True, False, or None where the model itself cannot tell."""
_OTHER_DATA = 1000
Report = Callable[[dict[str, Any]], None]


def prepare() -> None:
    """Let a torchvision for another torch be imported: models that call its compiled ops then do not run."""
    if importlib.util.find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, "nms"):
        signature = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", signature)


def tried(case: Case, report: Report) -> None:
    """Report why a model does not run by itself, or what became of it; see :func:`outcome`.

    Where there is a difference that may be rounding alone, the same is asked in double precision. Not where
    steps alone differ: microbatches that weigh wrongly are no rounding, whatever they do in double precision.
    """
    try:
        subject = _subject(case, torch.float32)
    except Exception as error:
        report({"eager": _said(error)})
        return
    found = _held(case, subject, report)
    failed = [k for k in ASKED if k != "steps" and found.get(k) is False]
    apart = [k for k in failed if not _error_in(found[f"{k}_problem"])]
    if not apart:
        return
    try:
        wide = _held(case, _subject(case, torch.float64), lambda more: None)
    except Exception:  # whatever it is: then the model takes no doubles
        return
    rounded = [k for k in apart if wide.get(k)]
    if rounded:
        report({**dict.fromkeys(rounded, True), "rounding": found[f"{rounded[0]}_problem"]})


def outcome(found: Mapping[str, Any]) -> str:
    """What became of a model, in one word.

    ``right`` in everything that was asked; ``refused`` where autopipe says so in an error of its own, but for
    a step in microbatches that it refuses, since rows may depend on one another;
    ``different`` where it did not; ``raw`` where another error came out, or the process ended before all was
    asked; ``late`` where its time did; ``eager`` where the model does not run by itself.
    """
    if "eager" in found:
        return "eager"
    if "raw" in found:
        return "raw"
    if "refused" in found:
        return "refused"
    problems = [found.get(f"{k}_problem", "") for k in ASKED if found.get(k) is False]
    raised = [_error_in(p) for p in problems]
    if any(not name for name in raised):
        return "different"
    if any(name not in errors.__all__ for name in raised):
        return "raw"
    if any(found.get(k) is False for k in ASKED if k != "steps"):
        return "refused"
    if all(key in found for key in ASKED) or ("parity" in found and "died" not in found):
        return "right"
    return "late" if found.get("died", "").startswith(OVER) else "raw"


def _error_in(problem: str) -> str:
    """The type of the error that a problem is; "" for a difference."""
    found = re.match(r"\w+: (\w+): ", problem)
    is_difference = re.match(r"\w+: (outputs?|gradient|buffer) ", problem)
    return found[1] if found and not is_difference else ""


def _subject(case: Case, dtype: torch.dtype) -> Subject:
    """The model in evaluation mode, which has run in both modes, and from one to the other and back."""
    seed()
    model = case.model().eval()
    if dtype is not torch.float32:
        model = model.to(dtype)
    subject = Subject(model, _inputs(case, dtype), "library")
    args, kwargs = subject.inputs(EXAMPLE)
    for training in (False, True, False):
        model.train(training)(*args, **kwargs)
    return subject


def _inputs(case: Case, dtype: torch.dtype, first_seed: int = 0) -> Callable[[Sizes], Any]:
    def given(sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(first_seed + sizes.batch)
        made = _to(case.inputs(sizes.batch, sizes.length), dtype)
        return ((), made) if isinstance(made, dict) else (made, {})

    return given


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {k: _to(v, dtype) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_to(v, dtype) for v in value)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _held(case: Case, subject: Subject, report: Report) -> dict[str, Any]:
    """What was found of the graph and of the stages, reported as it is found."""
    found: dict[str, Any] = {}

    def add(more: dict[str, Any]) -> None:
        found.update(more)
        report(dict(found))

    try:
        runs = _runs(subject, add)
    except autopipe.AutopipeError as error:
        add({"refused": _said(error)})
        return found
    except Exception as error:
        add({"raw": _said(error)})
        return found
    add(_joined(compare(subject, runs)))
    dtype = next((p.dtype for p in subject.model.parameters() if p.is_floating_point()), torch.float32)
    other = dataclasses.replace(subject, inputs=_inputs(case, dtype, _OTHER_DATA))
    on_other = _joined(compare(other, {"stages": runs["stages"]}))
    add({"data": on_other["parity"]})
    if "parity_problem" in on_other:
        add({"data_problem": on_other["parity_problem"]})
    is_equal, problem = steps(subject.model, runs["stages"], subject.inputs)
    add({"steps": is_equal, **({"steps_problem": problem} if problem else {})})
    return found


def _runs(subject: Subject, add: Report) -> dict[str, Callable[..., Any]]:
    """The captured graph and the stages."""
    args, kwargs = subject.inputs(EXAMPLE)
    start = time.perf_counter()
    captured = autopipe.capture(subject.model, args, kwargs)
    add({"seconds": round(time.perf_counter() - start, 3)})
    pipe = _split(subject, min(N_STAGES, n_blocks(subject.model)))
    add({"n_stages": len(pipe.stages)})
    return {"graph": captured, "stages": pipe}


def _split(subject: Subject, n_stages: int) -> autopipe.Pipe:
    """The model in so many stages, or in as many as it can be cut into."""
    args, kwargs = subject.inputs(EXAMPLE)
    try:
        return autopipe.split(
            subject.model, n_stages, args, kwargs, costs="estimated", n_microbatches=1, time_limit_s=SOLVE_S
        )
    except autopipe.InfeasibleError:
        if n_stages == 1:
            raise
        return _split(subject, n_stages - 1)


def _joined(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The answers of several runs as one: what is wrong in any is wrong."""
    out: dict[str, Any] = {}
    for answers in found.values():
        for key, value in answers.items():
            if value is False or key not in out:
                out[key] = value
    return out


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:400]}"
