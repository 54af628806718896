"""What a model's own code may have read while it was recorded, and what of it is no longer as it was.

Whether a change matters is left to ``captured``, which records again and compares.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...torch_private import CALL_HOOK, GLOBAL_HOOKS, UnseenByFunctions
from ..calls import regions
from ..calls.call import Call, Recording
from ..calls.perform import registered
from .cells import Cell, content
from .codes import come_to, names_in
from .reach import HOOKS, Reached, reached
from .reads import Flag

__all__ = ["Attribute", "Change", "Kind", "Standing", "standing_of"]

Read = Callable[[], tuple[Any, ...]]
_SIMPLE = (int, float, str, bytes, bool, type(None), tuple)
_HELD = ("_parameters", "_buffers", "_modules")
_OF_ALL = frozenset({*vars(nn.Module()), CALL_HOOK})
_CALLED_BY_PYTHON = (
    "forward", "__call__", "__getattr__", "__getattribute__", "__setattr__", "__iter__", "__len__",
    "__getitem__", "__contains__", "__bool__", "__enter__", "__exit__",
)  # fmt: skip
_MOST_KNOWN = 4
"""How many states are remembered beside the recorded one that made no difference."""


class Kind(enum.Enum):
    """What a change is one of: by that it is judged, whatever it is called."""

    STATE = enum.auto()
    """Whether it matters, another recording shows."""
    WEIGHTS = enum.auto()
    """Other tensors or layers in the places of those that stages hold: no recording shows that."""
    INFERENCE = enum.auto()
    """Inference mode, in which nothing is recorded."""
    CAST = enum.auto()
    """The autocast or default dtype in force."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Something that is not as it was; prints as the name by which people are told."""

    name: str
    kind: Kind

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """A plain attribute of a module, and what it was ``before`` it changed: empty where it was not there."""

    module: nn.Module
    name: str
    before: tuple[Any, ...]

    def put_back(self) -> None:
        vars(self.module).pop(self.name, None)
        for value in self.before:
            vars(self.module)[self.name] = value


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
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
        field = next(k for k, a, b in zip(fields, now, before, strict=True) if not _same(a, b))
        return Change(f"{self.name}.{field}", self.kind)


class Standing:
    """The state of the modules whose own code was recorded: asked for at each call, so that it must be cheap.

    Attributes and hooks of those modules, what they hold directly, the weights ``taken``, by name, of others,
    the objects, closures and globals that their code reaches, the ``functions`` of torch that it calls, by
    module and name; of every parameter its dtype and whether it
    takes a gradient; and each one's mode beside the model's. Where the code asked for ``dtypes``, the
    autocast that the model is called under; what else it asked of torch, of the process and of leaves, the
    ``flags``. What hooks of leaves put into the attributes ``filled``, by path and name, is none of it: so
    they do in each call. ``found`` is what was reached before the model was recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        is_open: Callable[[str], bool],
        taken: Collection[str],
        dtypes: bool,
        flags: Mapping[str, Flag],
        functions: Sequence[tuple[str, str]] = (),
        filled: Collection[tuple[str, str]] = (),
        found: Reached | None = None,
    ) -> None:
        self.model, self.dtypes, self.flags, self.filled = model, dtypes, dict(flags), filled
        self.taken, self.functions = taken, functions
        self.casts = {_casts()}
        self.opened = [(path, m) for path, m in model.named_modules() if is_open(path)]
        if found is None or not found.is_still(is_open):
            found = reached(model, is_open)
        held = [vars(registered(model, path)).get(name) for path, name in filled]
        beside = _of_open(found, is_open, {*map(id, held)})
        called = functools.partial(_at, [(vars(sys.modules[module]), name) for module, name in functions])
        own = Reader("a function of torch", called)
        self.readers = [*_readers(model, self.opened, taken, filled), own, *beside]
        modes = tuple(m.training for _, m in self.opened)
        training = model.training
        # a form is recorded in the modes the model was given in, where the model was in that form's
        self.modes = {training: {modes}, not training: {(not training,) * len(modes)}}
        self.others: list[dict[int, tuple[Any, ...]]] = []
        self._take()
        self.by_size: tuple[dict[int, tuple[Any, ...]], set[Any]] = {}, set()
        self.n_in_a_row = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied or pickled with its model: what the copy's code reaches is looked for anew."""
        if changed := self.changed():
            shown = ", ".join(map(str, changed))
            raise InputError(
                f"{type(self.model).__name__} is not to be copied now: {shown} changed after the capture; "
                "call it once, which holds that against the capture, or capture again"
            )
        opened = frozenset(path for path, _ in self.opened)
        how = self.taken, self.modes, self.dtypes, self.flags, self.casts, self.functions, self.filled
        return _copied, (self.model, opened, *how)

    def changed(self) -> list[Change]:
        """What is not as it was; empty as a rule."""
        found = self._differing()
        out = [self.readers[i].change(now, self.values[i]) for i, now in found.items()]
        if any(_are_same(found, o) for o in self.others):
            out = []
        modes = tuple(m.training for _, m in self.opened)
        if modes not in self.modes[self.model.training]:
            root = self.model.training
            path = next((p for p, m in self.opened if p and m.training != root), "")
            out.append(Change(f"the mode of {path or type(self.model).__name__}", Kind.STATE))
        flagged = (Change(n, _kind_of(ask)) for n, (ask, answer) in self.flags.items() if ask() != answer)
        out += [*flagged, *self._cast_anew()]
        self.n_in_a_row = self.n_in_a_row if out else 0
        return out

    def changed_attributes(self, n_changes: int) -> list[Attribute]:
        """The attributes that are not as they were; empty where others of the ``n_changes`` are."""
        found = self._differing()
        modules = {place: self.readers[place].module for place in found}
        if len(found) != n_changes or any(_are_same(found, o) for o in self.others):
            return []
        out = []
        for place, module in modules.items():
            if module is None:
                return []
            now = self.readers[place].fields
            before = dict(zip(self.names[place], self.values[place], strict=True))
            out += [
                Attribute(module, name, (before[name],) if name in before else ())
                for name in {**before, **now}
                if not (name in before and name in now and _same(now[name], before[name]))
            ]
        return out

    def is_known_at(self, sizes: Any) -> bool:
        """Whether the present attributes were said to make no difference at these sizes of the inputs."""
        known, at = self.by_size
        return sizes in at and _are_same(known, self._differing())

    def tolerate_at(self, sizes: Any) -> None:
        """The present attributes make no difference at these sizes of the inputs."""
        known, at = self.by_size
        found = self._differing()
        self.by_size = found, {sizes, *(at if _are_same(known, found) else ())}

    def _cast_anew(self) -> list[Change]:
        """The autocast and default dtype in force, where they are new and matter."""
        if not self.dtypes or (now := _casts()) in self.casts:
            return []
        shown = ", ".join(f"{device} to {dtype}" for device, enabled, dtype, _ in now[0] if enabled) or "off"
        return [Change(f"autocast ({shown}; default dtype {now[1]})", Kind.CAST)]

    def accept(self) -> None:
        """Take the present state for the one that was recorded."""
        self._take()
        self._accept_surroundings()

    def asks_too(self, dtypes: bool, flags: Mapping[str, Flag]) -> None:
        """Hold the state to what another recording of the same model asked for, too."""
        self.dtypes, self.flags = self.dtypes or dtypes, {**flags, **self.flags}

    def tolerate(self) -> None:
        """The present state makes no difference: as good as the one that was recorded, to which it is held.

        Plain numbers and texts are remembered beside those recorded, which a caller may switch between.
        """
        found = self._differing()
        if all(_is_switched(now, self.values[i]) for i, now in found.items()):
            self.others = [found, *self.others[: _MOST_KNOWN - 1]]
        else:
            self._take()
        self.n_in_a_row += 1
        self._accept_surroundings()

    def _accept_surroundings(self) -> None:
        self.casts.add(_casts())
        self.flags = {name: (ask, ask()) for name, (ask, _) in self.flags.items()}
        self.modes[self.model.training].add(tuple(m.training for _, m in self.opened))

    def _take(self) -> None:
        """Hold the state from now on to what it is."""
        self.values = [reader.read() for reader in self.readers]
        self.names = [() if r.module is None else tuple(r.fields) for r in self.readers]
        self.others = []

    def _differing(self) -> dict[int, tuple[Any, ...]]:
        """What the readers read that is not as it was, by their place."""
        out = {}
        for place, (reader, before) in enumerate(zip(self.readers, self.values, strict=True)):
            now = reader.read()
            is_kept = len(now) == len(before) and all(map(operator.is_, now, before))
            if not is_kept and not _equal(now, before):
                out[place] = now
        return out


def _is_switched(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether only plain values have taken the place of others."""
    pairs = [p for p in zip(now, before, strict=False) if not _same(*p)]
    return len(now) == len(before) and all(isinstance(v, (*_SIMPLE, torch.dtype)) for p in pairs for v in p)


def _readers(
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
        yield Reader(f"what {shown} holds", functools.partial(_values_in, held, _HELD), Kind.WEIGHTS)
    layers = functools.partial(_at, _places(model, taken))
    yield Reader("what its own code takes of layers", layers, Kind.WEIGHTS)
    yield Reader("dtype or requires_grad of a parameter", functools.partial(_kinds, model))
    yield Reader("the hooks on all modules", _hooks_on_all)
    yield Reader("the class of a module", functools.partial(_classes, tuple(m for _, m in opened)))


def _classes(modules: tuple[nn.Module, ...]) -> tuple[Any, ...]:
    return tuple(map(type, modules))


def _hooks_on_all() -> tuple[Any, ...]:
    return tuple([hook for hooks in GLOBAL_HOOKS for hook in hooks.values()])


def _kind_of(ask: Callable[[], Any]) -> Kind:
    """What kind of change another answer to a question is."""
    is_of_inference = isinstance(ask, functools.partial) and ask.func is torch.is_inference_mode_enabled
    return Kind.INFERENCE if is_of_inference else Kind.STATE


def _attribute_values(held: Mapping[str, Any], without: frozenset[str]) -> tuple[Any, ...]:
    return tuple(_attributes(held, without).values())


def _values_in(held: Mapping[str, Mapping[Any, Any]], names: Iterable[str]) -> tuple[Any, ...]:
    return tuple([v for k in names for v in held[k].values()])


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


def _casts() -> tuple[Any, torch.dtype]:
    return regions.ambient()[1], torch.get_default_dtype()


def _attributes(held: Mapping[str, Any], without: frozenset[str]) -> dict[str, Any]:
    return {k: v for k, v in held.items() if k not in _OF_ALL and k not in without}


def _copied(
    model: nn.Module,
    opened: frozenset[str],
    taken: Collection[str],
    modes: dict[bool, set[tuple[bool, ...]]],
    dtypes: bool,
    flags: dict[str, Flag],
    casts: set[Any],
    functions: Sequence[tuple[str, str]],
    filled: Collection[tuple[str, str]],
) -> Standing:
    made = Standing(model, opened.__contains__, taken, dtypes, flags, functions, filled)
    made.modes, made.casts = modes, casts
    return made


def _of_open(found: Reached, is_open: Callable[[str], bool], filled: Collection[int]) -> list[Reader]:
    """What lies beside the attributes of open modules, each with how to read it, but for the ``filled``."""
    return [Reader(name, read) for path, name, read in _beside(found, filled) if is_open(path)]


def _beside(found: Reached, filled: Collection[int]) -> Iterator[tuple[str, str, Read]]:
    for path, name, known, names in found.files:
        yield path, f"a global of {name}", functools.partial(_picked, known, tuple(sorted(names)))
    for path, name, holder in found.holders:
        if id(holder) not in filled:
            yield path, name, functools.partial(_items, holder)
    for path, name, cell in found.cells:
        if _is_value(content(cell)):
            yield path, name, functools.partial(_content, cell)
    helpers = [known[k] for _, _, known, names in found.files for k in names]
    called = (names_in(h.__code__) for h in helpers if isinstance(h, types.FunctionType))
    start = frozenset(_CALLED_BY_PYTHON).union(*called)
    run = come_to(start, [cls for _, _, cls in found.classes])
    for path, name, cls in found.classes:
        held = vars(cls).items()
        asked = tuple(k for k, v in held if k in run or (not k.startswith("__") and _is_value(v)))
        yield path, f"an attribute of class {name}", functools.partial(_of_class, vars(cls), asked)


def _picked(held: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(map(held.get, names))


def _of_class(held: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a class has under these names, and how many there are of all: code may look for one more."""
    return *map(held.get, names), len(held)


def _items(container: Any) -> tuple[Any, ...]:
    return tuple(container.values() if isinstance(container, dict) else container)


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


def _are_same(now: Mapping[int, tuple[Any, ...]], before: Mapping[int, tuple[Any, ...]]) -> bool:
    return now.keys() == before.keys() and all(_equal(now[i], before[i]) for i in before)


def _equal(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(_same, now, before))


def _same(now: Any, before: Any) -> bool:
    """Whether one value stands for the other: it, an equal number or text, or its move to another device."""
    if now is before or hasattr(now, "to_local"):  # shards of the same weights
        return True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.device != before.device or now.untyped_storage()._cdata == before.untyped_storage()._cdata
    return isinstance(now, _SIMPLE) and type(now) is type(before) and bool(now == before)


def standing_of(
    model: nn.Module,
    forms: Mapping[bool, Sequence[Recording]],
    constants: Mapping[str, Any],
    dtypes: bool,
    flags: Mapping[str, Flag],
    found: Reached,
) -> Standing:
    """What the recordings of a model may have read of it; ``constants`` are theirs by name.

    ``found`` is what was reached from the model before it was recorded.
    """
    calls = [c for fs in forms.values() for f in fs for c in f.calls]
    taken = {c.target for c in calls if c.op == "get_attr" and isinstance(c.value, (torch.Tensor, nn.Module))}
    written = {name for c in calls for name in c.mutated}  # and read in the stage of the layer that does it
    is_open = functools.partial(_is_open, _leaves(calls))
    named = sorted(taken - {*constants, *written, ""})
    filled = frozenset[tuple[str, str]]().union(*(f.filled for fs in forms.values() for f in fs))
    return Standing(model, is_open, named, dtypes, flags, _functions_of_torch(calls), filled, found)


def _functions_of_torch(calls: Sequence[Call]) -> list[tuple[str, str]]:
    """The modules and names under which code has the functions that it calls, and others may put theirs."""
    targets = {id(c.target) for c in calls if c.op == "call_function"}
    spaces = torch.__name__, torch.nn.functional.__name__
    return [(s, name) for s in spaces for name, held in vars(sys.modules[s]).items() if id(held) in targets]


def _leaves(calls: Sequence[Call]) -> frozenset[str]:
    """The modules whose own code is not recorded: called whole, or handed whole to a function."""
    called = {c.target for c in calls if c.op == "call_module"}
    handed = {c.target for c in calls if c.op == "get_attr" and isinstance(c.value, nn.Module)}
    own = {c.path for c in calls if c.op != "call_module"}
    return frozenset(called | {p for p in handed if not any(f"{o}.".startswith(f"{p}.") for o in own)})


def _is_open(leaves: frozenset[str], path: str) -> bool:
    """Whether a module lies in no leaf, so that its state was read while the model was recorded."""
    names = path.split(".")
    return not any(".".join(names[: i + 1]) in leaves for i in range(len(names)))
