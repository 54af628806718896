"""One model of the walk: build it small, run it eagerly, capture and cut it, and compare everything.

The same for torch.export with torch.distributed.pipelining is left to ``export``; which models, and in
which processes, to ``zoo`` and ``workers``.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopipe.hardware import Cluster
from autopipe.stages import build as build_stages
from autopipe.stages.verify import run_stages
from autopipe.tracing import capture
from tests.zoo.cut import uniform_plan
from tests.zoo.observe import difference, fingerprint, flat, observe, seed

from .configs import RUNGS, Rung, shrink, walk
from .inputs import EXAMPLE, OTHER_BATCH, OTHER_LENGTH, Recipe, Sizes, make, recipes
from .zoo import Entry, config_of, own_case

__all__ = ["N_STAGES", "NoSubject", "Subject", "build", "try_autopipe"]

N_STAGES = 4
MAX_PARAMETERS = 120_000_000
MAX_BUILD_S = 15.0
"""Processor time after which no milder rules are tried."""
Report = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that runs eagerly, in evaluation mode, and its inputs at given sizes."""

    model: nn.Module
    inputs: Callable[[Sizes], tuple[tuple[Any, ...], dict[str, Any]]]
    rung: str
    how: str = ""


class NoSubject(Exception):
    """The model does not run eagerly under any rule."""


def build(entry: Entry) -> Subject:
    """The entry's model on the first rung of the ladder on which it runs. Raises :class:`NoSubject`."""
    if entry.task == "own":
        seed()
        model, inputs = own_case(entry.model_type)
        return Subject(model.eval(), lambda sizes: inputs(sizes.batch, sizes.length), "own")
    problems: list[str] = []
    for rung in RUNGS:
        if time.process_time() > MAX_BUILD_S:
            problems.append(f"{rung.name}: not tried, {MAX_BUILD_S:g} s of processor time are over")
            break
        try:
            model = _model(entry, rung)
        except Exception as error:
            problems.append(f"{rung.name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        recipe = _recipe(model, entry.task, problems, rung.name)
        if recipe is not None:
            return _subject(model, entry.task, recipe, rung.name)
    raise NoSubject("\n".join(dict.fromkeys(problems)))


def _subject(model: nn.Module, task: str, recipe: Recipe, rung: str) -> Subject:
    return Subject(model, lambda sizes: ((), make(model, task, sizes, recipe)), rung, str(recipe))


def _model(entry: Entry, rung: Rung) -> nn.Module:
    import transformers

    cls = getattr(transformers, entry.class_name)
    config = _config(entry, rung)
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in cls(config).parameters())
    if n_parameters > MAX_PARAMETERS:
        raise ValueError(f"{n_parameters / 1e6:.0f} million parameters")
    seed()
    return cls(_config(entry, rung)).eval()


def _config(entry: Entry, rung: Rung) -> Any:
    config = shrink(config_of(entry), rung)
    for _, part in walk(config):
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0
    return config


def _recipe(model: nn.Module, task: str, problems: list[str], rung: str) -> Recipe | None:
    for recipe in recipes(model):
        for _ in range(3):
            try:
                with torch.no_grad():
                    for training in (False, True):
                        model.train(training)(**make(model, task, EXAMPLE, recipe))
                return recipe
            except Exception as error:
                text = f"{rung}, {recipe}: {type(error).__name__}: {str(error)[:200]}"
                found = re.search(r"okens?[^\d]{0,30}(\d+)[^\d]{1,40}features?[^\d]{0,30}(\d+)", str(error))
                wanted = int(found[2]) // EXAMPLE.batch if found else 0
                if not wanted or wanted == recipe.n_media_tokens:
                    problems.append(text)
                    break
                recipe = dataclasses.replace(recipe, n_media_tokens=wanted)
            finally:
                model.eval()
    return None


def try_autopipe(subject: Subject, report: Report) -> None:
    """Captures, cuts in 4, compares with the model in both modes and at other sizes; reports as it goes."""
    model = subject.model
    args, kwargs = subject.inputs(EXAMPLE)
    before = fingerprint(model)
    start = time.perf_counter()
    captured = capture(model, args, kwargs)
    seconds = time.perf_counter() - start
    after = fingerprint(model)
    changed = [k for k in before if before[k] != after[k]]
    n_leaves = sum(op.kind == "module" for op in captured.ops.ops)
    report({"captured": True, "seconds": seconds, "nodes": len(captured.ops.ops), "leaves": n_leaves})
    report({"changed": ", ".join(changed)})
    captured.module.graph.lint()
    report({"graph": compare(subject, lambda args, kwargs: captured(*args, **kwargs))})
    stages = build_stages(captured, uniform_plan(captured.ops, N_STAGES, Cluster.uniform(N_STAGES)))
    report({"n_stages": len(stages), "is_cut": len(stages) >= min(N_STAGES, n_blocks(model))})

    def run(args: Any, kwargs: Any) -> Any:
        return captured.assemble(run_stages(captured, stages, args, kwargs))

    report(compare(subject, run))


def n_blocks(model: nn.Module) -> int:
    """How many modules with parameters of their own the model has: what it can be cut into at most."""
    return max(1, sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules()))


def compare(
    subject: Subject,
    run: Callable[..., Any],
    modes: tuple[bool, ...] = (False, True),
    *,
    is_flat: bool = False,
) -> dict[str, Any]:
    """Parity of ``run(args, kwargs)`` with the model: at the example, another batch, another length.

    ``is_flat``: outputs come without their structure and are compared in order.
    """
    out: dict[str, Any] = {}
    for name, sizes in (("parity", EXAMPLE), ("batch", OTHER_BATCH), ("length", OTHER_LENGTH)):
        problems = [
            p
            for p in (_compare_at(subject, run, sizes, training, is_flat) for training in modes)
            if p != "refused"
        ]
        out[name] = None if not problems else not any(problems)
        if any(problems):
            out[f"{name}_problem"] = next(p for p in problems if p)
    return out


def _compare_at(
    subject: Subject, run: Callable[..., Any], sizes: Sizes, training: bool, is_flat: bool
) -> str:
    """What differs, in words; "" for nothing; "refused" where the model itself does not run."""
    model = subject.model.train(training)
    mode = "train" if training else "eval"
    try:
        args, kwargs = subject.inputs(sizes)
        expected = observe(model, lambda: model(*args, **kwargs))
        if difference(expected, observe(model, lambda: model(*args, **kwargs))):
            return "refused"
    except Exception:
        return "refused"
    finally:
        model.eval()
    try:
        model.train(training)
        got = observe(model, lambda: run(args, kwargs))
        problem = difference(flat(expected), flat(got)) if is_flat else difference(expected, got)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        model.eval()
    return problem and f"{mode}: {problem}"
