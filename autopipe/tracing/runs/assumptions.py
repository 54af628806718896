"""What a recording assumes: the state that the model's own code may have read, and whether it is still so.

Whether a change matters is left to ``captured``, which records again and compares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ..calls import regions
from ..calls.call import Call, Recording
from ..code.leaves import lies_in_leaf
from ..inputs.free_numbers import is_number
from ..inputs.held_numbers import owner_of
from ..members import modules_in, registered, submodule
from ..record.replaced_buffers import HeldBuffer
from ..state import global_hooks
from ..state.quick_check import addresses
from ..state.reach import Reached, reached
from ..state.readers import Change, Content, Kind, are_same, is_same, is_switched, readers
from ..values.reads import Flag

__all__ = ["Assumptions", "Attribute", "assumptions_of"]

_MODES = (True, False)
_MOST_KNOWN = 4
"""How many states are remembered beside the recorded one that made no difference."""


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


class Assumptions:
    """The state of the modules whose own code was recorded: asked for at each call, so that it must be cheap.

    Attributes and hooks of those modules, what they hold directly, the weights ``taken``, by name, of others,
    the objects, closures and globals that their code reaches, the ``functions`` of torch that it calls, by
    module and name; of every parameter its dtype and whether it takes a gradient; and each one's mode beside
    the model's. Where the code asked for ``dtypes``, the autocast that the model is called under; what else
    it asked of torch, of the process and of leaves, the ``flags``. What the attributes ``filled``, by path
    and name, hold is none of it: each call sets them first, or hooks of leaves do. What calls in one
    mode leave in attributes ``carried``, with that mode, those in the other go by; ``called`` are the modes
    in which there were calls. ``switched`` are the modules that calls leave in a mode of their own: by
    training flag, path and that mode. What calls of the model itself put in the place of buffers that it has
    ``replaced``, by name, is taken for what they hold. Rows take places of the ``tables`` by their number,
    so that what was found of rows holds for what is in these. ``found`` is what was reached before the model
    was recorded. The numbers that attributes have ``held``, by path and name, are inputs of each call.
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
        carried: Collection[tuple[bool, str]] = (),
        switched: Collection[tuple[bool, str, bool]] = (),
        replaced: Collection[str] = (),
        tables: Collection[str] = (),
        found: Reached | None = None,
        held: Collection[tuple[str, str]] = (),
    ) -> None:
        self.model, self.dtypes, self.carried = model, dtypes, carried
        self.filled = frozenset((*filled, *held))
        self.called: set[bool] = set()
        self.held, self.switched = frozenset(held), frozenset(switched)
        self.otherwise: dict[int, tuple[Any, ...]] = {}
        self.taken, self.functions, self.replaced, self.tables = taken, functions, replaced, tables
        self.flags = {mode: dict(flags) for mode in _MODES}
        self.casts = {mode: {_casts()} for mode in _MODES}
        self.opened = [(path, m) for path, m in modules_in(model) if is_open(path)]
        if found is None or not found.is_still(is_open):
            found = reached(model, is_open)
        self._contents = [(name, content, content()) for name in tables for content in [Content(model, name)]]
        told = model, self.opened, taken, functions
        self._readers_but = functools.partial(readers, *told, beside=found, is_open=is_open)
        self.readers = [*self._readers_but(self.filled)]
        modes = tuple(m.training for _, m in self.opened)
        training = model.training
        # a form is recorded in the modes the model was given in, where the model was in that form's
        self.modes = {training: {modes}, not training: {(not training,) * len(modes)}}
        for flag, known in self.modes.items():
            left = {path: mode for f, path, mode in self.switched if f is flag}
            begun = [zip(self.opened, each, strict=True) for each in known]
            known |= {tuple(left.get(path, mode) for (path, _), mode in each) for each in begun}
        self.others: dict[bool, list[dict[int, tuple[Any, ...]]]] = {}
        self._take()
        self.by_size: tuple[dict[int, tuple[Any, ...]], set[Any]] = {}, set()
        self.n_in_a_row = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied or pickled with its model: what the copy's code reaches is looked for anew."""
        if changed := [*self.changed(), *self.rewritten()]:
            shown = ", ".join(map(str, changed))
            raise InputError(
                f"{type(self.model).__name__} cannot be copied now: {shown} changed after the capture; "
                "call it once, which checks whether that matters, put it back, or capture again"
            )
        opened = frozenset(path for path, _ in self.opened)
        how = self.taken, self.modes, self.dtypes, self.flags, self.casts, self.functions
        left = self.filled, self.carried, self.switched, self.replaced, self.tables, self.called
        return _copied, (self.model, opened, *how, *left)

    def begin(self) -> None:
        """A call begins in the mode that the model is in.

        Raises :class:`InputError` where it goes by what calls in the other mode leave: stages leave nothing.
        """
        global_hooks.tell()
        training = self.model.training
        before = not training
        names = sorted(name for mode, name in self.carried if mode is before)
        if names and before in self.called:
            then, now = ("training", "evaluation") if before else ("evaluation", "training")
            raise InputError(
                f"{type(self.model).__name__}: in {now} its forward reads what a call in {then} leaves in "
                f"{', '.join(names)}, which stages do not set; let each call set what it reads, or "
                f"return it, or capture the model anew for {now}"
            )
        self.called.add(training)
        for flag, path, mode in self.switched:
            if flag is training:
                submodule(self.model, path).training = mode

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Calls within it follow none and leave nothing, as what they do to the model is put back."""
        before, self.called = self.called, set()
        try:
            yield
        finally:
            self.called = before

    def changed(self) -> list[Change]:
        """What is not as it was; empty as a rule."""
        for buffer in self._buffers:
            buffer.take_in()
        found = self._differing()
        out = []
        if found and not self._is_tolerated(found):
            out = [self.readers[i].change(now, self.values[i]) for i, now in found.items()]
        modes = tuple([m.training for _, m in self.opened])
        if modes not in self.modes[self.model.training]:
            root = self.model.training
            path = next((p for p, m in self.opened if p and m.training != root), "")
            out.append(Change(f"the mode of {path or type(self.model).__name__}", Kind.STATE))
        flags = self.flags[self.model.training]
        flagged = (Change(n, _kind_of(ask)) for n, (ask, answer) in flags.items() if ask() != answer)
        out += [*flagged, *self._cast_anew()]
        self.n_in_a_row = self.n_in_a_row if out else 0
        return out

    def rewritten(self) -> list[str]:
        """The tables by which rows are taken that hold something else than when the model was recorded."""
        return [f"what {name} holds" for name, content, before in self._contents if content() != before]

    def changed_attributes(self, n_changes: int) -> list[Attribute]:
        """The attributes that are not as they were; empty where others of the ``n_changes`` are."""
        found = self._differing()
        modules = {place: self.readers[place].module for place in found}
        if len(found) != n_changes or self._is_tolerated(found):
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
                if not (name in before and name in now and is_same(now[name], before[name]))
            ]
        return out

    def changed_numbers(self) -> dict[str, Any]:
        """By path and name, numbers in attributes as they were where they are others; flags are none."""
        paths = {id(module): path for path, module in self.opened}
        out = {}
        for place in self._differing():
            if (module := self.readers[place].module) is None:
                continue
            now, before = self.readers[place].fields, zip(self.names[place], self.values[place], strict=True)
            for name, was in before:
                value = now.get(name)
                if is_number(value) and type(was) is type(value) and was != value:
                    out[".".join(filter(None, (paths[id(module)], name)))] = was
        return out

    @property
    def is_otherwise(self) -> bool:
        """Whether in the present state, as far as it is held, the model is known to be another."""
        found = self._differing()
        return bool(found) and _are_all_same(self.otherwise, found)

    def know_otherwise(self) -> None:
        """The model is another in the present state."""
        self.otherwise = self._differing()

    def is_known_at(self, sizes: Any) -> bool:
        """Whether the present attributes were said to make no difference at these sizes of the inputs."""
        known, at = self.by_size
        return sizes in at and _are_all_same(known, self._differing())

    def tolerate_at(self, sizes: Any) -> None:
        """The present attributes make no difference at these sizes of the inputs."""
        known, at = self.by_size
        found = self._differing()
        self.by_size = found, {sizes, *(at if _are_all_same(known, found) else ())}

    def _cast_anew(self) -> list[Change]:
        """The autocast and default dtype in force, where they are new and matter."""
        if not self.dtypes or (now := _casts()) in self.casts[self.model.training]:
            return []
        shown = ", ".join(f"{device} to {dtype}" for device, enabled, dtype, _ in now[0] if enabled) or "off"
        return [Change(f"autocast ({shown}; default dtype {now[1]})", Kind.STATE)]

    def accept(self) -> None:
        """Take the present state for the one that was recorded."""
        self._take()
        self._accept_surroundings(_MODES)

    def asks_too(self, dtypes: bool, flags: Mapping[str, Flag], forms: Iterable[Recording]) -> None:
        """Hold the state to what another recording of the same model asked for, too; ``forms`` are all."""
        self.dtypes = self.dtypes or dtypes
        self.flags = {mode: {**flags, **known} for mode, known in self.flags.items()}
        if (filled := filled_in(forms) | self.held) != self.filled:
            self.filled, self.readers = filled, [*self._readers_but(filled)]
            self._take()

    def tolerate(self, *, in_both_modes: bool) -> None:
        """The present state makes no difference: as good as the one that was recorded, to which it is held.

        Plain numbers and texts are remembered beside those recorded, which a caller may switch between; so is
        all that makes none in the model's mode alone, as a threshold of evaluation does in training.
        """
        found = self._differing()
        modes = _MODES if in_both_modes else (self.model.training,)
        if in_both_modes and not all(is_switched(now, self.values[i]) for i, now in found.items()):
            self._take()
        elif found:
            self.others.update({m: [found, *self.others[m][: _MOST_KNOWN - 1]] for m in modes})
        self.n_in_a_row += 1
        self._accept_surroundings(modes)

    def _is_tolerated(self, found: Mapping[int, tuple[Any, ...]]) -> bool:
        """Whether what differs was said to make no difference in the model's mode."""
        return any(_are_all_same(found, other) for other in self.others[self.model.training])

    def _accept_surroundings(self, modes: Iterable[bool]) -> None:
        for mode in modes:
            self.casts[mode].add(_casts())
            self.flags[mode] = {name: (ask, ask()) for name, (ask, _) in self.flags[mode].items()}
        self.modes[self.model.training].add(tuple(m.training for _, m in self.opened))

    def _take(self) -> None:
        """Hold the state from now on to what it is."""
        named = [(registered(self.model, p), n) for p, _, n in (r.rpartition(".") for r in self.replaced)]
        self._buffers = [HeldBuffer(m, n, b) for m, n in named if (b := m._buffers.get(n)) is not None]
        self.values = [reader.read() for reader in self.readers]
        self._told = [*map(len, self.values)], [*itertools.chain.from_iterable(self.values)]
        self.names = [() if r.module is None else tuple(r.fields) for r in self.readers]
        self.others = {mode: [] for mode in _MODES}

    def _differing(self) -> dict[int, tuple[Any, ...]]:
        """What the readers read that is not as it was, by their place."""
        read = [reader.read() for reader in self.readers]
        sizes, values = self._told
        if [*map(len, read)] == sizes and all(map(operator.is_, itertools.chain.from_iterable(read), values)):
            return {}
        pairs = enumerate(zip(read, self.values, strict=True))
        return {place: now for place, (now, before) in pairs if not are_same(now, before)}


def _kind_of(ask: Callable[[], Any]) -> Kind:
    """What kind of change another answer to a question is."""
    is_of_inference = isinstance(ask, functools.partial) and ask.func is torch.is_inference_mode_enabled
    return Kind.INFERENCE if is_of_inference else Kind.STATE


def _casts() -> tuple[Any, torch.dtype]:
    return regions.ambient()[1], torch.get_default_dtype()


def _copied(
    model: nn.Module,
    opened: frozenset[str],
    taken: Collection[str],
    modes: dict[bool, set[tuple[bool, ...]]],
    dtypes: bool,
    flags: dict[bool, dict[str, Flag]],
    casts: dict[bool, set[Any]],
    functions: Sequence[tuple[str, str]],
    filled: Collection[tuple[str, str]],
    carried: Collection[tuple[bool, str]],
    switched: Collection[tuple[bool, str, bool]],
    replaced: Collection[str],
    tables: Collection[str],
    called: set[bool],
) -> Assumptions:
    left = filled, carried, switched, replaced, tables
    made = Assumptions(model, opened.__contains__, taken, dtypes, {}, functions, *left)
    made.modes, made.flags, made.casts, made.called = modes, flags, casts, called
    return made


def _are_all_same(now: Mapping[int, tuple[Any, ...]], before: Mapping[int, tuple[Any, ...]]) -> bool:
    return now.keys() == before.keys() and all(are_same(now[i], before[i]) for i in before)


def assumptions_of(
    model: nn.Module,
    forms: Mapping[bool, Sequence[Recording]],
    constants: Mapping[str, Any],
    dtypes: bool,
    flags: Mapping[str, Flag],
    found: Reached,
    tables: Collection[str],
    held: Collection[str] = (),
) -> Assumptions:
    """What the recordings of a model may have read of it; ``constants`` are theirs by name.

    ``found`` is what was reached from the model before it was recorded, ``tables`` those of which rows take
    places by number. What the attributes ``held`` hold, by path and name, are inputs of each call.
    """
    calls = [c for fs in forms.values() for f in fs for c in f.calls]
    taken = {c.target for c in calls if c.op == "get_attr" and isinstance(c.value, (torch.Tensor, nn.Module))}
    written = {name for c in calls for name in c.mutated}  # and read in the stage of the layer that does it
    swapped = frozenset[str]().union(*(f.swapped for fs in forms.values() for f in fs))
    leaves = _leaves(calls) - swapped
    named = sorted(taken - {*constants, *written, ""})

    @functools.cache
    def is_open(path: str) -> bool:
        """Whether a module lies in no leaf, so that its state was read while the model was recorded."""
        return not lies_in_leaf(path, leaves.__contains__)

    carried = frozenset[tuple[bool, str]]().union(*(f.carried for fs in forms.values() for f in fs))
    switched = frozenset[tuple[bool, str, bool]]().union(*(f.modes for fs in forms.values() for f in fs))
    used = _functions_of_torch(calls)
    filled = filled_in(f for fs in forms.values() for f in fs)
    replaced = frozenset[str]().union(*(f.replaced for fs in forms.values() for f in fs))
    # what the model itself writes there is no change of a user's
    left = filled, carried, switched, replaced, [*filter(lambda t: t not in {*written, *replaced}, tables)]
    return Assumptions(model, is_open, named, dtypes, flags, used, *left, found, [*map(owner_of, held)])


def filled_in(forms: Iterable[Recording]) -> frozenset[tuple[str, str]]:
    """The attributes whose earlier content no form goes by: hooks of leaves fill them, or all forms do."""
    given = [*forms]
    by_hooks = frozenset[tuple[str, str]]().union(*(f.filled for f in given))
    return by_hooks | frozenset.intersection(*(f.set_first for f in given))


def _functions_of_torch(calls: Sequence[Call]) -> list[tuple[str, str]]:
    """The modules and names under which code has the functions that it calls, and others may put theirs."""
    targets = {id(c.target) for c in calls if c.op == "call_function"}
    found: list[tuple[str, str]] = []
    for space in (torch.__name__, torch.nn.functional.__name__):
        names = _names_by_id(space)
        found += sorted((space, name) for target in targets & names.keys() for name in names[target])
    return found


def _names_by_id(space: str) -> dict[int, list[str]]:
    """The names that a module has for each thing, by its id: of thousands few are called."""
    known = vars(sys.modules[space])
    now = addresses([*known]), addresses([*known.values()])  # of what lies there it is told, whatever it is
    if _named.get(space, (None,))[0] != now:
        by_id: dict[int, list[str]] = {}
        for name, value in known.items():
            by_id.setdefault(id(value), []).append(name)
        _named[space] = now, by_id
    return _named[space][1]


_named: dict[str, tuple[tuple[bytes, bytes], dict[int, list[str]]]] = {}
"""By a module's name, what :func:`_names_by_id` told, and where then lay what it had under which names."""


def _leaves(calls: Sequence[Call]) -> frozenset[str]:
    """The modules whose own code is not recorded: called whole, or handed whole to a function."""
    called = {c.target for c in calls if c.op == "call_module"}
    handed = {c.target for c in calls if c.op == "get_attr" and isinstance(c.value, nn.Module)}
    own = {c.path for c in calls if c.op != "call_module"}
    return frozenset(called | {p for p in handed if not any(f"{o}.".startswith(f"{p}.") for o in own)})
