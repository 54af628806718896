"""How each thing that a model's own code may have read is read again, and whether it is what it was.

What was recorded of them is left to ``assumptions``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...torch_private import UnseenByFunctions, is_transformed
from ..inputs.held_numbers import place_inside
from ..members import OF_COMPILED, registered
from . import global_hooks
from .cells import Cell, content
from .global_names import come_to
from .quick_check import tells_equality
from .reach import HOOKS, Reached

__all__ = [
    "Change",
    "Content",
    "Kind",
    "Reader",
    "are_same",
    "is_same",
    "is_switched",
    "read_beside",
    "readers",
]

Read = Callable[[], tuple[Any, ...]]
_SIMPLE = (int, float, str, bytes, bool, type(None), tuple)
_HELD = ("_parameters", "_buffers", "_modules")


class Kind(enum.Enum):
    """What a change is one of: by that it is judged, whatever it is called."""

    STATE = enum.auto()
    """Whether it matters, another recording shows."""
    WEIGHTS = enum.auto()
    """Other tensors or layers in the places of those that stages hold: no recording shows that."""
    INFERENCE = enum.auto()
    """Inference mode, in which nothing is recorded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Something that is not as it was; prints as the name by which people are told."""

    name: str
    kind: Kind

    def __str__(self) -> str:
        return self.name


class Reader(NamedTuple):
    """A group of values by name, how to read them, and the module whose attributes they are, if any's."""

    name: str
    read: Read
    kind: Kind = Kind.STATE
    module: nn.Module | None = None
    filled: frozenset[str] = frozenset()

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of the module by name, without those that are ``filled`` in each call."""
        return {} if self.module is None else _attributes(vars(self.module), self.filled)

    def change(self, now: tuple[Any, ...], before: tuple[Any, ...]) -> Change:
        """That ``now`` is otherwise than ``before``; of attributes, with the first that is."""
        fields = self.fields
        if not len(fields) == len(now) == len(before):
            return Change(self.name, self.kind)
        field = next(k for k, a, b in zip(fields, now, before, strict=True) if not is_same(a, b))
        return Change(f"{self.name}.{field}", self.kind)


def readers(
    model: nn.Module,
    opened: Collection[tuple[str, nn.Module]],
    taken: Iterable[str],
    functions: Iterable[tuple[str, str]],
    filled: Collection[tuple[str, str]],
    beside: Reached,
    is_open: Callable[[str], bool],
) -> Iterator[Reader]:
    """A reader of each group: of ``opened`` modules, by path; of the weights ``taken`` of others, by name.

    Of torch's ``functions``, by module and name; of what is reached ``beside`` attributes of open modules.
    What is ``filled`` in each call, by path and name, is not read.
    """
    yield from _of_modules(model, opened, taken, filled)
    called = functools.partial(_at, [(vars(sys.modules[module]), name) for module, name in functions])
    yield Reader("a function of torch", called)
    without = {id(vars(registered(model, path)).get(name)) for path, name in filled}
    inside = [place_inside(model, f"{path}.{name}".lstrip(".")) for path, name in filled if "[" in name]
    is_open = functools.cache(is_open)
    for path, name, read in read_beside(beside, without, inside):
        if is_open(path):
            yield Reader(name, read)


def _of_modules(
    model: nn.Module,
    opened: Iterable[tuple[str, nn.Module]],
    taken: Iterable[str],
    filled: Collection[tuple[str, str]],
) -> Iterator[Reader]:
    """What is read of the modules themselves."""
    for path, module in opened:
        shown, held = path or type(model).__name__, vars(module)
        without = frozenset(name for at, name in filled if at == path)
        values = functools.partial(_attribute_values, held, without)
        yield Reader(f"the attributes of {shown}", values, module=module, filled=without)
        yield Reader(f"the hooks of {shown}", functools.partial(_values_in, held, HOOKS))
        yield Reader(f"what {shown} holds", functools.partial(_registered_in, held, without), Kind.WEIGHTS)
    layers = functools.partial(_at, _places(model, taken))
    yield Reader("what its own code takes of layers", layers, Kind.WEIGHTS)
    yield Reader("dtype or requires_grad of a parameter", functools.partial(_kinds, model))
    yield Reader("the hooks on all modules", global_hooks.others)
    yield Reader("the class of a module", functools.partial(_classes, tuple(m for _, m in opened)))


class Content:
    """Reads a checksum of what a tensor holds; where it holds nothing, that of before."""

    def __init__(self, model: nn.Module, name: str) -> None:
        owner, _, self._name = name.rpartition(".")
        self._module, self._last = registered(model, owner), (0,)

    def __call__(self) -> tuple[int]:
        held = vars(self._module)
        tensor = next((h[self._name] for h in (held, *(held[k] for k in _HELD)) if self._name in h), None)
        if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor and not tensor.is_meta:
            found = zlib.crc32(tensor.detach().cpu().numpy().tobytes())
            if found != self._last[0]:
                self._last = (found,)
        return self._last


def _classes(modules: tuple[nn.Module, ...]) -> tuple[Any, ...]:
    return tuple(map(type, modules))


def _attribute_values(held: Mapping[str, Any], without: frozenset[str]) -> tuple[Any, ...]:
    return tuple(_attributes(held, without).values())


def _values_in(held: Mapping[str, Mapping[Any, Any]], names: Iterable[str]) -> tuple[Any, ...]:
    return tuple([v for k in names for v in held[k].values()])


def _registered_in(held: Mapping[str, Mapping[Any, Any]], without: frozenset[str]) -> tuple[Any, ...]:
    """The parameters, buffers and modules of a module, but for buffers ``without`` which it is read."""
    if without.isdisjoint(held["_buffers"]):
        return _values_in(held, _HELD)
    buffers = (v for name, v in held["_buffers"].items() if name not in without)
    return *held["_parameters"].values(), *buffers, *held["_modules"].values()


def _kinds(model: nn.Module) -> tuple[Any, ...]:
    """Dtype and ``requires_grad`` of every parameter, without the names that ``parameters()`` makes."""
    out: list[Any] = []
    ahead, seen = [model], {model}
    with UnseenByFunctions():  # weights that another rank trains would each answer at length
        while ahead:
            module = ahead.pop()
            for p in module._parameters.values():
                if p is not None:
                    out += p.dtype, p.requires_grad
            inside = [m for m in module._modules.values() if m is not None and m not in seen]
            seen.update(inside)
            ahead += inside
    return tuple(out)


def _attributes(held: Mapping[str, Any], without: frozenset[str]) -> dict[str, Any]:
    return {k: v for k, v in held.items() if k not in OF_COMPILED and k not in without}


def read_beside(
    found: Reached, filled: Collection[int], without: Collection[tuple[Any, Any]] = ()
) -> Iterator[tuple[str, str, Read]]:
    """What reads each place that was ``found``, by path and name; not those with ids that are ``filled``.

    Of some containers it does ``without`` what they hold under a key.
    """
    for path, name, known, names in found.files:
        yield path, f"a global of {name}", functools.partial(_picked, known, tuple(sorted(names)))
    for path, name, holder in found.holders:
        if id(holder) not in filled:
            keys = frozenset(key for held, key in without if held is holder)
            yield path, name, functools.partial(_items, holder, keys)
    for path, name, cell in found.cells:
        if _is_value(content(cell)):
            yield path, name, functools.partial(_content, cell)
    helpers = [known[k] for _, _, known, names in found.files for k in names]
    codes = [h.__code__ for h in helpers if isinstance(h, types.FunctionType)]
    run = come_to(codes, [cls for _, _, cls in found.classes])
    for path, name, cls in found.classes:
        held = vars(cls).items()
        asked = tuple(k for k, v in held if k in run or (not k.startswith("__") and _is_value(v)))
        yield path, f"an attribute of class {name}", functools.partial(_of_class, vars(cls), asked)


def _picked(held: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(map(held.get, names))


def _of_class(held: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a class has under these names, and how many there are of all: code may look for one more."""
    return *map(held.get, names), len(held)


def _items(container: Any, without: frozenset[Any] = frozenset()) -> tuple[Any, ...]:
    if not without:
        return tuple(container.values() if isinstance(container, dict) else container)
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return tuple([v for k, v in items if k not in without])


def _content(cell: Cell) -> tuple[Any, ...]:
    return (content(cell),)


def _is_value(value: Any) -> bool:
    """Whether a value is more than code: what is callable, a module or a descriptor is not."""
    return not (callable(value) or isinstance(value, types.ModuleType) or hasattr(type(value), "__get__"))


def _at(places: Sequence[tuple[Mapping[str, Any], str]]) -> tuple[Any, ...]:
    return tuple([held.get(name) for held, name in places])


def _places(model: nn.Module, taken: Iterable[str]) -> list[tuple[Mapping[str, Any], str]]:
    """Where a model registers what has these names."""
    out = []
    for target in taken:
        owner, _, name = target.rpartition(".")
        held = vars(registered(model, owner))
        out += [(held[kind], name) for kind in _HELD if name in held.get(kind, ())]
    return out


def are_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether each value of a group stands for the one in its place."""
    return len(now) == len(before) and all(map(is_same, now, before))


def is_same(now: Any, before: Any) -> bool:
    """Whether one value stands for the other: it, an equal number or text, or its move to another device."""
    if now is before or hasattr(now, "to_local"):  # shards of the same weights
        return True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        if is_transformed(now) or is_transformed(before):
            return False
        return now.device != before.device or now.untyped_storage()._cdata == before.untyped_storage()._cdata
    if type(now) is not type(before):
        return False
    if tells_equality(now) and tells_equality(before):
        return bool(now == before)
    return isinstance(now, tuple) and are_same(now, before)


def is_switched(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether only plain values have taken the place of others."""
    pairs = [p for p in zip(now, before, strict=False) if not is_same(*p)]
    return len(now) == len(before) and all(isinstance(v, (*_SIMPLE, torch.dtype)) for p in pairs for v in p)
