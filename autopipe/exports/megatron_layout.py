"""Megatron-LM's pipeline layout strings, to and from splits of a model that is a chain of alike blocks.

Splitting by what a layout says is left to ``api``, which takes the pins made here.

A layout lists the stages between bars: ``E`` the embedding, ``t`` a transformer block, ``L`` the head and
loss, ``t*3`` or ``(tt|)*4`` for repeats, as in ``Et*3|(tt|)*4t*2L``. Source: Megatron-LM,
``megatron/core/transformer/pipeline_parallel_layer_layout.py``.
"""

from __future__ import annotations

import collections
import itertools
import re

from ..errors import InputError
from ..graph import OpGraph
from ..plans import Plan

__all__ = ["from_megatron_layout", "to_megatron_layout"]

MOST_SYMBOLS = 1 << 16


def to_megatron_layout(graph: OpGraph, plan: Plan) -> str:
    """The plan's cut as a layout. Raises :class:`InputError` where it is none of whole blocks in order.

    >>> to_megatron_layout(pipe.graph.ops, pipe.plan)  # doctest: +SKIP
    'Et*6|t*8|t*8|t*2L'
    """
    stem, blocks = _blocks(graph)
    held: dict[int, set[int]] = collections.defaultdict(set)
    for stage in plan.stages:
        for op in (graph.by_name[name] for name in stage.ops if name in graph.by_name):
            block = _block_of(op.module_path, stem)
            if block is not None:
                held[block].add(stage.index)
    torn = sorted(block for block, stages in held.items() if len(stages) > 1)
    if torn:
        raise InputError(
            f"{stem}.{torn[0]} is cut between stages {' and '.join(map(str, sorted(held[torn[0]])))}, and a "
            f"layout has whole blocks only; split with together or pin={{'{stem}.{torn[0]}': ...}}"
        )
    of = [min(held[block]) for block in sorted(blocks)]
    if of != sorted(of):
        raise InputError(
            f"the blocks of {stem} do not lie on the stages in their order; a layout cannot say it"
        )
    counts = [of.count(stage.index) for stage in plan.stages]
    words = [f"t*{n}" if n > 1 else "t" * n for n in counts]
    words[0], words[-1] = f"E{words[0]}", f"{words[-1]}L"
    return "|".join(words)


def from_megatron_layout(layout: str, graph: OpGraph) -> dict[str, int]:
    """The stage of every block, as ``pin`` of :func:`autopipe.split` takes it. Raises :class:`InputError`.

    The number of stages is one more than the bars; what is before the first block and after the last goes
    where the solver finds it best, as Megatron's ``E`` and ``L`` do with the first and last stage.
    """
    stages = _expanded(layout).split("|")
    stem, blocks = _blocks(graph)
    wrong = sorted({c for stage in stages for c in stage} - set("EtL"))
    if wrong:
        raise InputError(f"the layout has {wrong[0]!r}, which is none of E, t and L: {layout[:80]}")
    text = "".join(stages)
    if not re.fullmatch("E?t*L?", text):
        raise InputError(f"a layout has E at most once and first, and L at most once and last: {layout[:80]}")
    if text.count("t") != len(blocks):
        raise InputError(
            f"the layout has {text.count('t')} blocks, and {stem} of the model has {len(blocks)}; write as "
            "many t"
        )
    of = itertools.chain.from_iterable([i] * stage.count("t") for i, stage in enumerate(stages))
    return {f"{stem}.{block}": stage for block, stage in zip(sorted(blocks), of, strict=True)}


def _expanded(layout: str) -> str:
    """The layout without repeats, commas and spaces."""
    text = re.sub(r"[\s,]", "", layout)
    pattern = re.compile(r"(?:\(([^()]*)\)|([A-Za-z]))\*(\d{1,6})")
    while found := pattern.search(text):
        repeated = (found[1] if found[1] is not None else found[2]) * int(found[3])
        text = text[: found.start()] + repeated + text[found.end() :]
        if len(text) > MOST_SYMBOLS:
            raise InputError(f"the layout repeats to more than {MOST_SYMBOLS} symbols: {layout[:80]}")
    if set(text) & set("()*"):
        raise InputError(f"the layout's brackets or repeats do not fit: {layout[:80]}")
    return text


def _blocks(graph: OpGraph) -> tuple[str, set[int]]:
    """The module list with the most numbered children, and their numbers."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    for op in graph.compute:
        parts = op.module_path.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal() and i:
                found[".".join(parts[:i])].add(int(part))
                break
    if not found:
        raise InputError(
            f"{graph.model} has no numbered list of blocks that a layout could speak of; pin its modules"
        )
    stem = max(found, key=lambda s: (len(found[s]), s))
    return stem, found[stem]


def _block_of(path: str, stem: str) -> int | None:
    rest = path.removeprefix(f"{stem}.")
    head = rest.split(".")[0]
    return int(head) if rest != path and head.isdecimal() else None
