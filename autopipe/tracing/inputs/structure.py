"""Nested values as flat leaves and back: containers, mappings, dataclasses and objects that carry tensors.

What the leaves mean is left to ``recorder`` (values while recording) and ``arguments`` (arguments of a call).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import UserDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch

from .contents import slots, slotted

__all__ = [
    "LEAF",
    "Spec",
    "Step",
    "along",
    "attributes",
    "carries_tensors",
    "flatten",
    "hides_tensors",
    "is_leaf",
    "mapped",
    "marks",
    "paths",
    "pieces",
    "unflatten",
    "with_marks",
]

Step = tuple[Literal["item", "attr"], Any]
"""One step from a structure to a piece of it: ``("item", key)`` or ``("attr", name)``."""

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.Size, torch.nn.Module)
_MAX_DEPTH = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a nested value: what kind of container each level is, its keys and its children.

    ``kind`` is ``leaf``, ``sequence``, ``slice``, ``fields`` (a namedtuple, or a dataclass with all its
    attributes), ``mapping``, ``record`` (a mapping that is a dataclass too, such as a transformers
    ``ModelOutput``) or ``object``.
    ``factory`` makes the missing values of a ``defaultdict``. ``attributes`` are names of what an object that
    holds items has beside them; their children come last. One that ``mirrors`` has its items there instead.
    """

    kind: Literal["leaf", "sequence", "slice", "fields", "mapping", "record", "object"]
    type: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()
    factory: Any = dataclasses.field(default=None, compare=False)
    attributes: tuple[str, ...] = ()
    mirrors: bool = False

    @property
    def n_leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(c.n_leaves for c in self.children)


LEAF = Spec("leaf")


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of ``value`` in order, and the spec that :func:`unflatten` needs to put them back.

    >>> leaves, spec = flatten({"a": (1, None), "b": [2]})
    >>> leaves, unflatten(spec, leaves)
    ([1, None, 2], {'a': (1, None), 'b': [2]})
    >>> flatten([torch.Size([2, 3])])[0], flatten(slice(1, 4))[0]
    ([2, 3], [1, 4, None])
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, 0)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of each leaf in its place."""
    leaves, spec = flatten(value)
    return unflatten(spec, map(function, leaves))


def is_leaf(value: Any, depth: int = 0) -> bool:
    """Whether :func:`flatten` takes a value as it is, so that a copy of what it is in has the same."""
    return isinstance(value, torch.Tensor) or _parts(value, depth) is None


def pieces(value: Any) -> list[tuple[Any, Any]]:
    """What a container holds, by key or name; nothing for a leaf."""
    parts = _parts(value, 0)
    return [] if parts is None else list(zip((*parts[1], *parts[3]), parts[2], strict=True))


_CONTAINERS = frozenset({tuple, list, dict})


def _flatten(value: Any, leaves: list[Any], depth: int) -> Spec:
    cls = type(value)
    is_tensor = cls not in _LEAF_TYPES and cls not in _CONTAINERS and isinstance(value, torch.Tensor)
    parts = None if is_tensor else _parts(value, depth)
    if parts is None:
        leaves.append(value)
        return LEAF
    kind, keys, items, attributes = parts
    factory = value.default_factory if isinstance(value, defaultdict) else None
    children: list[Spec] = []
    for item in items:
        if type(item) in _LEAF_TYPES:
            leaves.append(item)
            children.append(LEAF)
        else:
            children.append(_flatten(item, leaves, depth + 1))
    mirrors = kind == "mapping" and _mirrors(value)
    return Spec(kind, type(value), keys, tuple(children), factory, attributes, mirrors)


def _parts(value: Any, depth: int) -> tuple[Any, tuple[Any, ...], list[Any], tuple[str, ...]] | None:
    """(kind, keys, children, names of the last children, no items) of a container; None for a leaf."""
    cls = type(value)
    if cls in (tuple, list, torch.Size):
        return "sequence", tuple(range(len(value))), list(value), ()
    if cls is dict:
        return "mapping", tuple(value), list(value.values()), ()
    if cls is slice:
        return "slice", _OF_SLICES, [value.start, value.stop, value.step], ()
    if cls in _LEAF_TYPES or isinstance(value, type):
        return None
    if isinstance(value, (dict, UserDict)):
        kind = "record" if dataclasses.is_dataclass(value) else "mapping"
        beside = _beside(value, depth)
        return kind, tuple(value), [*value.values(), *beside.values()], tuple(beside)
    if isinstance(value, list):
        beside = _beside(value, depth)
        return "sequence", tuple(range(len(value))), [*value, *beside.values()], tuple(beside)
    if isinstance(value, tuple):
        if not hasattr(value, "_fields") and not hasattr(cls, "n_sequence_fields"):
            return None
        beside = _beside(value, depth)
        return "fields", tuple(range(len(value))), [*value, *beside.values()], tuple(beside)
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        names += [n for n in getattr(value, "__dict__", ()) if n not in names and not _is_cached(cls, n)]
        return "fields", tuple(names), [getattr(value, n) for n in names], ()
    if depth < _MAX_DEPTH and carries_tensors(value, _MAX_DEPTH - depth):
        return "object", tuple(vars(value)), list(vars(value).values()), ()
    return None


def _beside(value: Any, depth: int) -> dict[str, Any]:
    """What an object that holds items has in attributes beside them; not deep, as they may lead back."""
    if _mirrors(value) or depth >= _MAX_DEPTH:
        return {}
    cls, items = type(value), {"data"} if isinstance(value, UserDict) else ()
    known = getattr(cls, "__dataclass_fields__", items)
    held = getattr(value, "__dict__", {})
    return {n: v for n, v in held.items() if n not in known and not _is_cached(cls, n)}


def attributes(value: Any) -> dict[str, Any] | None:
    """An object's attributes by name, slots among them, without items; None where it has no place for any."""
    if not any(slots(value)) and not isinstance(getattr(value, "__dict__", None), dict):
        return None
    if isinstance(value, (dict, UserDict, list, tuple)):
        held = _beside(value, 0)
    else:
        held = {n: v for n, v in getattr(value, "__dict__", {}).items() if not _is_cached(type(value), n)}
    return {**slotted(value), **held}


def _mirrors(value: Any) -> bool:
    """Whether the attributes of a dict are its items, as where ``self.__dict__ = self``."""
    return getattr(value, "__dict__", None) is value


def _is_cached(cls: type, name: str) -> bool:
    """Whether objects of a class make an attribute again where it is missing."""
    return isinstance(getattr(cls, name, None), functools.cached_property)


_LEAF_TYPES = frozenset({*_PLAIN, torch.dtype, torch.device, range, torch.nn.Parameter}) - {torch.Size}
_OF_SLICES = "start", "stop", "step"


def carries_tensors(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether an object of no known container type holds tensors in its attributes."""
    if isinstance(value, (*_PLAIN, type)) or callable(value) or depth <= 0:
        return False
    try:
        attributes = vars(value)
    except TypeError:
        return False
    return any(_holds_tensor(v, depth - 1) for v in attributes.values())


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return depth > 0 and any(_holds_tensor(v, depth - 1) for v in value)
    if isinstance(value, dict):
        return depth > 0 and any(_holds_tensor(v, depth - 1) for v in value.values())
    return carries_tensors(value, depth)


def marks(value: Any) -> list[str]:
    """Names of attributes with tensors that code has set on a tensor, where :func:`flatten` does not look."""
    if type(value) is not torch.Tensor:
        return []
    return [name for name, held in vars(value).items() if _holds_tensor(held, _MAX_DEPTH)]


@dataclasses.dataclass
class Marked:
    """A tensor, and those that code has set on it as attributes; :func:`unflatten` sets them again."""

    tensor: torch.Tensor
    marks: dict[str, Any]


def with_marks(value: Any) -> Any:
    """A result in which what code has set on its tensors lies beside these."""
    leaves, spec = flatten(value)
    found = [marks(leaf) for leaf in leaves]
    if not any(found):
        return value
    pairs = zip(leaves, found, strict=True)
    return unflatten(
        spec, [Marked(t, {n: getattr(t, n) for n in names}) if names else t for t, names in pairs]
    )


def hides_tensors(leaf: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether a leaf holds tensors where :func:`flatten` does not look: in a set, a deque or slots, say.

    >>> hides_tensors({torch.zeros(1)}), hides_tensors({1, 2}), hides_tensors(torch.zeros(1))
    (True, False, False)
    """
    if isinstance(leaf, (*_PLAIN, type)) or callable(leaf) or depth <= 0:
        return False
    if hasattr(leaf, "__dict__") and not isinstance(leaf, Collection):
        return False
    inside = (v for held in gc.get_referents(leaf) for v in flatten(held)[0])
    return any(isinstance(v, torch.Tensor) or hides_tensors(v, depth - 1) for v in inside)


def unflatten(spec: Spec, leaves: Any) -> Any:
    """The structure of ``spec`` with ``leaves`` (an iterable, in order) in its places.

    >>> leaves, spec = flatten(defaultdict(list, a=1))
    >>> unflatten(spec, leaves)["b"]
    []
    """
    iterator = iter(leaves)
    return _unflatten(spec, iterator)


def _unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    values = [_unflatten(child, leaves) for child in spec.children]
    return _BUILDERS[spec.kind](spec, values)


def _sequence(spec: Spec, values: list[Any]) -> Any:
    if spec.type is list:
        return values
    if not issubclass(spec.type, list):
        return spec.type(values)
    new = spec.type.__new__(spec.type)
    n = len(spec.keys)
    list.extend(new, values[:n])
    return _with_attributes(new, spec, values[n:])


def _with_attributes(new: Any, spec: Spec, values: list[Any]) -> Any:
    for name, value in zip(spec.attributes, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def _slice(spec: Spec, values: list[Any]) -> Any:
    return slice(*values)


def _mapping(spec: Spec, values: list[Any]) -> Any:
    if spec.type is dict:
        return dict(zip(spec.keys, values, strict=True))
    new = spec.type.__new__(spec.type)
    if isinstance(new, UserDict):
        new.data = {}
    if isinstance(new, defaultdict):
        new.default_factory = spec.factory
    if spec.mirrors:
        new.__dict__ = new
    n = len(spec.keys)
    _with_attributes(new, spec, values[n:])
    for key, value in zip(spec.keys, values[:n], strict=True):
        new[key] = value
    return new


def _record(spec: Spec, values: list[Any]) -> Any:
    n = len(spec.keys)
    new = spec.type(**dict(zip(spec.keys, values[:n], strict=True)))
    return _with_attributes(new, spec, values[n:])


def _fields(spec: Spec, values: list[Any]) -> Any:
    if spec.type is Marked and isinstance(values[0], torch.Tensor):
        tensor, held = values
        for name, mark in held.items():
            setattr(tensor, name, mark)
        return tensor
    if not issubclass(spec.type, tuple):
        return _object(spec, values)
    n = len(spec.keys)
    new = spec.type._make(values[:n]) if hasattr(spec.type, "_make") else spec.type(values[:n])
    return _with_attributes(new, spec, values[n:])


def _object(spec: Spec, values: list[Any]) -> Any:
    new = spec.type.__new__(spec.type)
    for key, value in zip(spec.keys, values, strict=True):
        object.__setattr__(new, key, value)
    return new


_BUILDERS: dict[str, Callable[[Spec, list[Any]], Any]] = {
    "sequence": _sequence,
    "slice": _slice,
    "mapping": _mapping,
    "record": _record,
    "fields": _fields,
    "object": _object,
}


def paths(spec: Spec) -> list[tuple[Step, ...]]:
    """For each leaf, the steps that lead to it.

    >>> paths(flatten((1, {"k": 2}))[1])
    [(('item', 0),), (('item', 1), ('item', 'k'))]
    """
    if spec.kind == "leaf":
        return [()]
    step: Literal["item", "attr"] = "attr"
    if spec.kind in ("sequence", "mapping", "record") or issubclass(spec.type, tuple):
        step = "item"
    steps = [*((step, key) for key in spec.keys), *(("attr", name) for name in spec.attributes)]
    return [(own, *rest) for own, child in zip(steps, spec.children, strict=True) for rest in paths(child)]


def along(spec: Spec, leaves: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each leaf, the whole and what lies at each of its steps, the leaf last: made of the leaves anew.

    >>> along(flatten((1, {"k": 2}))[1], [1, 2])
    [((1, {'k': 2}), 1), ((1, {'k': 2}), {'k': 2}, 2)]
    """
    if spec.kind == "leaf":
        return [tuple(leaves)]
    whole, rows, start = unflatten(spec, leaves), list[tuple[Any, ...]](), 0
    for child in spec.children:
        end = start + child.n_leaves
        rows += [(whole, *row) for row in along(child, leaves[start:end])]
        start = end
    return rows
