"""One model of the walk: build it small, run it eagerly, capture and split it, and compare everything.

The same for torch.export with torch.distributed.pipelining is left to ``export``; which models, and in
which processes, to ``zoo`` and ``workers``.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import autopipe
from autopipe.torch_private import pytree
from tests.zoo.observe import Observation, difference, fingerprint, flat, observe, seed

from .configs import RUNGS, Rung, shrink, walk
from .inputs import EXAMPLE, OTHER_BATCH, OTHER_LENGTH, Recipe, Sizes, make, recipes
from .zoo import Entry, config_of, own_case

__all__ = ["N_STAGES", "NoSubject", "Subject", "build", "try_autopipe"]

N_STAGES = 4
SOLVE_S = 0.1
"""Seconds that a solve may look for a proof; the plan is good without."""
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
    """Captures, splits in 4, compares with the model in both modes and at other sizes; reports as it goes.

    ``seconds`` is the time of ``autopipe.capture`` alone; ``autopipe.split`` captures once more, estimates,
    solves, and opens leaves for balance, as it does for any user.
    """
    model = subject.model
    args, kwargs = subject.inputs(EXAMPLE)
    before = fingerprint(model)
    start = time.perf_counter()
    captured = autopipe.capture(model, args, kwargs)
    seconds = time.perf_counter() - start
    after = fingerprint(model)
    changed = [k for k in before if before[k] != after[k]]
    n_leaves = sum(op.kind == "module" for op in captured.ops.ops)
    report({"captured": True, "seconds": seconds, "nodes": len(captured.ops.ops), "leaves": n_leaves})
    report({"changed": ", ".join(changed)})
    captured.module.graph.lint()
    runs: dict[str, Callable[..., Any]] = {"graph": captured}
    try:
        start = time.perf_counter()
        pipe = autopipe.split(
            model,
            min(N_STAGES, n_blocks(model)),
            args,
            kwargs,
            costs="estimated",
            n_microbatches=1,
            time_limit_s=SOLVE_S,
        )
        seconds = time.perf_counter() - start
        report({"n_stages": len(pipe.stages), "is_cut": True, "split_seconds": seconds})
        runs["stages"] = pipe
    finally:
        found = compare(subject, runs)
        report({"graph": found["graph"], **found.get("stages", {})})


def n_blocks(model: nn.Module) -> int:
    """How many modules with parameters of their own the model has: what it can be cut into at most."""
    return max(1, sum(any(p is not None for p in m._parameters.values()) for m in model.modules()))


def compare(
    subject: Subject,
    runs: Mapping[str, Callable[..., Any]],
    modes: tuple[bool, ...] = (False, True),
    *,
    is_flat: bool = False,
) -> dict[str, dict[str, Any]]:
    """Parity of each ``run(*args, **kwargs)`` with the model: at the example, another batch, another length.

    ``is_flat``: outputs come without their structure and are compared in order.
    """
    out: dict[str, dict[str, Any]] = {name: {} for name in runs}
    for asked, sizes in (("parity", EXAMPLE), ("batch", OTHER_BATCH), ("length", OTHER_LENGTH)):
        found = [_compare_at(subject, runs, sizes, training, is_flat) for training in modes]
        for name, answers in out.items():
            problems = [given[name] for given in found if given is not None]
            answers[asked] = None if not problems else not any(problems)
            if any(problems):
                answers[f"{asked}_problem"] = next(p for p in problems if p)
    return out


def _compare_at(
    subject: Subject, runs: Mapping[str, Callable[..., Any]], sizes: Sizes, training: bool, is_flat: bool
) -> dict[str, str] | None:
    """What differs in each run, in words, "" for nothing; None where the model itself does not run."""
    model = subject.model
    try:
        given = subject.inputs(sizes)
        expected = _observed(model, model, training, given)
        if difference(expected, _observed(model, model, training, given)):
            return None
    except Exception:
        return None
    problems = {}
    for name, run in runs.items():
        try:
            got = _observed(model, run, training, given)
            problem = difference(flat(expected), flat(got)) if is_flat else difference(expected, got)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        problems[name] = problem and f"{'train' if training else 'eval'}: {problem}"
    return problems


def _observed(
    model: nn.Module, run: Callable[..., Any], training: bool, given: tuple[tuple[Any, ...], dict[str, Any]]
) -> Observation:
    """What a run gives for inputs, whose dictionaries and lists are its own: a model may write to them."""
    args, kwargs = pytree.tree_map(lambda leaf: leaf, given)
    model.train(training)
    try:
        return observe(model, lambda: run(*args, **kwargs))
    finally:
        model.eval()
