"""What scripted functions and layers go by, read in their graphs: no mode for functions sees them run.

Which of them a call runs is left to ``own_code``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calls.functions import tensors
from ..members import buffers_in, parameters_in
from .told_numbers import told_numbers

__all__ = ["SIZES", "ScriptsGiven", "arguments_of", "goes_by_values", "numbers_written"]

SIZES = "aten::len", "aten::numel", "aten::size", "prim::shape"
"""What scripted code asks for sizes by."""
_VALUES = frozenset({
    "aten::Bool", "aten::Complex", "aten::Float", "aten::FloatImplicit", "aten::Int", "aten::IntImplicit",
    "aten::ScalarImplicit", "aten::allclose", "aten::equal", "aten::is_nonzero", "aten::item", "prim::tolist",
})  # fmt: skip
"""What makes a plain number or truth of a tensor."""
_FACTS = frozenset({
    *SIZES, "aten::dim", "aten::stride", "aten::storage_offset", "prim::device", "prim::dtype",
    "prim::layout", "prim::max", "prim::min",
})  # fmt: skip
"""What is known of tensors without their values."""
_COUNTS = frozenset({
    "aten::_unique", "aten::_unique2", "aten::argwhere", "aten::bincount", "aten::masked_select",
    "aten::nonzero", "aten::nonzero_numpy", "aten::unique_consecutive", "aten::unique_dim",
})  # fmt: skip
"""What gives as many things as values say, whatever else it is given; see :func:`_is_counting`."""
_TRUTHS = frozenset({
    "aten::__and__", "aten::__or__", "aten::__xor__", "aten::bitwise_and", "aten::bitwise_not",
    "aten::bitwise_or", "aten::bitwise_xor", "aten::eq", "aten::ge", "aten::gt", "aten::isclose",
    "aten::isfinite", "aten::isin", "aten::isinf", "aten::isnan", "aten::le", "aten::logical_and",
    "aten::logical_not", "aten::logical_or", "aten::logical_xor", "aten::lt", "aten::ne", "aten::signbit",
})  # fmt: skip
"""What gives truths of values."""
_OF_ITS_KIND = frozenset({
    "aten::all", "aten::any", "aten::clone", "aten::contiguous", "aten::detach", "aten::expand",
    "aten::expand_as", "aten::flatten", "aten::index", "aten::permute", "aten::reshape", "aten::select",
    "aten::slice", "aten::squeeze", "aten::transpose", "aten::unsqueeze", "aten::view",
    "prim::DictConstruct", "prim::If", "prim::ListConstruct", "prim::ListUnpack", "prim::Loop",
    "prim::TupleConstruct", "prim::TupleIndex", "prim::TupleUnpack", "prim::unchecked_cast",
})  # fmt: skip
"""What gives truths where it is given such."""
_GIVEN = frozenset({"aten::__getitem__", "prim::GetAttr", "prim::Param"})
"""What gives values that may be of any kind."""
_BOOL = 11
"""The number of the type of truths, as ops are given it."""
_HOLDS_VALUES = re.compile("Tensor|Any|__torch__")
"""What is in the name of each type that may hold tensors."""


def goes_by_values(script: Any, are_of_calls: Sequence[bool] | None = None) -> bool:
    """Whether a scripted function or layer makes plain numbers or truths of values that it is given.

    So are sizes of what has as many places as values say. Where it is known which arguments ``are_of_calls``,
    of those alone.
    """
    nodes = [*_nodes_of(script.inlined_graph)]
    given = [*script.inlined_graph.inputs()][isinstance(script, torch.jit.ScriptModule) :]
    given = [*itertools.compress(given, are_of_calls)] if are_of_calls is not None else given
    asked = {v.unique() for v in given if _holds_tensors(v)}
    carried = dict(itertools.chain(*(_carried(n) for n in nodes if n.kind() == "prim::Loop")))
    sized = [v for n in nodes if n.kind() in SIZES for v in n.inputs()]
    read = [v.node() for v in _behind(sized, carried) if _is_counting(v.node())]
    read += (n for n in nodes if n.kind() in _VALUES)
    return any(v.unique() in asked for v in _behind((v for n in read for v in n.inputs()), carried))


def arguments_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call gives a scripted function, by its arguments in order; None for what is left out."""
    names = [argument.name for argument in function.schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


class ScriptsGiven:
    """Within it what scripted functions are given is noted as Python calls them, of code kept whole as well.

    Attributes
    ----------
    are_of_calls: by the id of a function, which of its arguments were more than weights and buffers as these
        were when :meth:`begin` was called, in any of its calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.are_of_calls: dict[int, list[bool]] = {}
        self._held: dict[int, tuple[torch.Tensor, int]] = {}

    def begin(self) -> None:
        """Take weights and buffers to be as they are now."""
        held = (t for _, t in (*parameters_in(self._model), *buffers_in(self._model)))
        self._held = {id(t): (t, t._version) for t in held if not t.is_inference()}

    def __enter__(self) -> ScriptsGiven:
        cls: Any = torch.jit.ScriptFunction
        call = self._call = cls.__call__

        def noting(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(function, args, kwargs)
            return call(function, *args, **kwargs)

        cls.__call__ = noting
        return self

    def __exit__(self, *_: object) -> None:
        cls: Any = torch.jit.ScriptFunction
        cls.__call__ = self._call

    def _note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        now = [not all(map(self._is_held, tensors(v))) for v in arguments_of(function, args, kwargs)]
        before = self.are_of_calls.get(id(function), now)
        self.are_of_calls[id(function)] = [a or b for a, b in zip(before, now, strict=True)]

    def _is_held(self, tensor: torch.Tensor) -> bool:
        held, version = self._held.get(id(tensor), (None, -1))
        return held is tensor and tensor._version == version


def numbers_written(graph: str) -> frozenset[int]:
    """The whole numbers above one that are written in a scripted graph, in words."""
    numbers = itertools.chain(*map(told_numbers, re.findall(r"Constant\[value=([^\]]*)", graph)))
    return frozenset(n for n in numbers if n > 1)


def _is_counting(node: Any) -> bool:
    """Whether a node gives as many things as values say."""
    kind, given = node.kind(), [*node.inputs()]
    if kind == "aten::where":
        return len(given) == 1
    if kind == "aten::repeat_interleave":
        return len(given) < 2 or _holds_tensors(given[1])
    if kind == "aten::one_hot":
        return given[1].toIValue() in (None, -1)
    return kind in _COUNTS or (kind == "aten::index" and _may_be_truths(given[1], set()))


def _may_be_truths(value: Any, seen: set[int]) -> bool:
    """Whether a value may be truths or hold such, as a mask by which others are picked."""
    if value.unique() in seen or not _holds_tensors(value):
        return False
    seen.add(value.unique())
    node = value.node()
    if node.kind() == "aten::to":
        return _BOOL in [n for n in (v.toIValue() for v in node.inputs()) if type(n) is int]
    if node.kind() in _OF_ITS_KIND:
        inside = (v for block in node.blocks() for v in block.outputs())
        return any(_may_be_truths(v, seen) for v in (*node.inputs(), *inside))
    return node.kind() in _TRUTHS or node.kind() in _GIVEN


def _holds_tensors(value: Any) -> bool:
    return bool(_HOLDS_VALUES.search(value.type().annotation_str))


def _behind(values: Iterable[Any], carried: Mapping[int, Collection[Any]]) -> Iterator[Any]:
    """Some values of a scripted graph, and those whose values they are made of."""
    todo, seen = [*values], set[int]()
    while todo:
        value = todo.pop()
        node = value.node()
        if value.unique() in seen or node.kind() in _FACTS:
            continue
        yield value
        seen.add(value.unique())
        todo += carried.get(value.unique(), node.inputs())
        todo += (v for block in node.blocks() for v in block.outputs())


def _carried(loop: Any) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """What a loop's code is given in each turn, with what that is in the first and in later ones."""
    (block,) = loop.blocks()
    given, first, later = ([*values] for values in (block.inputs(), loop.inputs(), block.outputs()))
    # ahead of these are the turn's number, how many there are at the most, and whether another follows
    for value, *each in zip(given[1:], first[2:], later[1:], strict=True):
        yield value.unique(), tuple(each)


def _nodes_of(block: Any) -> Iterator[Any]:
    """The nodes of a scripted graph or block, those of blocks within as well."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes_of(inner)
