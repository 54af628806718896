"""The model as it was: mode, buffers, attributes, what its code reaches, random state; all put back.

What follows from a forward that changes Python state is left to ``session``, finding what it may change
beside the model to ``reach``.
"""

from __future__ import annotations

import _random
import collections
import contextlib
import ctypes
import functools
import operator
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ... import accelerator
from ...torch_private import unwatched
from ..inputs.contents import are_equal_tensors
from ..members import OF_ALL, buffers_in, modules_in, parameters_in, registered
from .cells import content, place
from .iterators import Spent
from .mode_writes import BeforeWrites
from .quick_check import SIMPLE, Glance, Seen, is_data, put_on, told_apart
from .reach import Reached, reached, saved, state_of
from .turns import in_turn

__all__ = [
    "Snapshot",
    "draw_alike",
    "generators",
    "note_written",
    "preserved",
    "seed",
    "switch",
    "written_in",
]

_INTERNAL = OF_ALL - {"_buffers", "_forward_hooks", "_forward_pre_hooks"}
_PLAIN = frozenset({list, dict, set, collections.OrderedDict})
"""Kinds of containers that hold nothing where they are false."""
_NO_TENSORS = frozenset({*SIMPLE, tuple, *_PLAIN})
_EMPTY = object()
_NOTHING: dict[Any, Any] = {}
"""What a container that is empty holds."""
LENGTH_OF = "the length of "
"""What :meth:`Snapshot.numbers` calls the length of a container, ahead of its name."""
SMALL = 1 << 16
"""Parameters of at most so many elements are put back where a forward writes to them behind torch's back."""
_WRITTEN: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Parameters of models, by name, that are put back though they are larger: recorded code writes to them."""


class Snapshot:
    """A model's attributes and buffers at one moment, and what its code reaches from them.

    What several modules reach is said to be of one whose path ``is_first``, if there is such. Iterators that
    the model holds are put aside where it ``holds_back``.
    """

    def __init__(
        self,
        model: nn.Module,
        is_first: Callable[[str], bool] = lambda path: True,
        *,
        holds_back: bool = False,
    ) -> None:
        self.model, self.training = model, model.training
        self.reached = reached(model, is_first)
        self.spent = Spent(model, self.reached) if holds_back else None
        self.modules = [(path, m, _Held(vars(m))) for path, m in modules_in(model)]
        self.weights = [p for _, p in parameters_in(model)]
        self._names = {id(p): n for n, p in parameters_in(model)}
        self._taking = [p.requires_grad for p in self.weights]
        # a scripted module keeps its mode where its attributes do not show it
        self.scripted = [(m, m.training) for _, m, _ in self.modules if isinstance(m, torch.jit.ScriptModule)]
        self.beside = _Beside(self.reached)
        buffers = (b for _, b in buffers_in(model))
        small = (t for t in (*self.weights, *(t for _, _, t in self.reached.tensors)) if _is_small(t))
        written = (registered(model, name) for name in _WRITTEN.get(model, ()))
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        for tensor in (t for t in (*buffers, *small, *written) if not _is_absent(t)):
            self.keep(tensor)
        self.switches_plainly = all(_switches_plainly(m) for _, m, _ in self.modules)
        self.generators = [saved(g) for _, _, g in self.reached.generators]
        self.seeded = saved(torch.default_generator)
        self.devices = [d for d in {t.device for t in self.weights} if accelerator.is_async(d)]
        containers = (c for _, m, held in self.modules for c in (vars(m), *(v for _, v, _ in held.contents)))
        self.glance = self.beside.glance([*containers], [*self.tensors.values()])
        self._switches_flags_alone: bool | None = None
        self.begun: dict[bool, Seen] = {}
        self.moved: set[bool] = set()
        """The modes in which some run was seen to leave anything otherwise, as a run after it began."""
        self.modes_begun: dict[bool, dict[int, bool]] = {}
        """By the model's mode, those of its modules, by their ids, where a run begins in it."""
        if not self.scripted:
            self._note_begun(self.training)

    def start(self, training: bool, seen: Seen | None = None) -> None:
        """Put everything back, and the model in a mode: quickly where little has changed.

        All is as it was ``seen`` to be where that was just now, and unchanged.
        """
        is_known = training in self.begun and (self.switches_plainly or self.model.training == training)
        with unwatched():  # whoever looks at what a run asks of tensors is told nothing of this
            self._put_back(training if is_known else self.training, seen)
        self.seeded()  # as it was found, whatever seeds comparisons have set since
        if self.model.training != training:
            self._switch(training)
        if not self.scripted and training not in self.begun:
            self._note_begun(training)

    def _switch(self, training: bool) -> None:
        """Put the model in a mode; what its own code writes to for that is put back, whatever its size."""
        if self.switches_plainly:
            switch(self.model, training)
            return
        with self.before_writes(m for _, m, _ in self.modules):
            switch(self.model, training)

    def before_writes(self, modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        """Within it, weights of these modules that nothing wrote to so far are put back once code does."""
        held = (p for m in modules for p in m._parameters.values() if id(p) not in self.tensors)
        own = (p for p in held if p is not None and id(p) in self._names)
        weights = [(self._names[id(p)], p) for p in own if not _is_absent(p)]
        return BeforeWrites(weights, self._include) if weights else contextlib.nullcontext()

    def _note_begun(self, training: bool) -> None:
        """Note where runs begin in a mode: put back as seen where its tensors are those found."""
        self.modes_begun[training] = {id(m): m.training for _, m, _ in self.modules}
        if not self.glance.written():
            self.begun[training] = self.glance.seen()

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing is other than where a run in either mode starts."""
        return self.seen_unchanged() is not None

    def seen_unchanged(self) -> Seen | None:
        """What is seen where nothing is other than where a run in either mode starts; None elsewhere."""
        seen = self.glance.seen()
        is_same = any(map(seen.is_same, self.begun.values()))
        return seen if is_same and self.glance.is_kept() and not self.generators else None

    @property
    def switches_flags_alone(self) -> bool:
        """Whether runs that started in both modes did so with other ``training`` flags and all else alike."""
        if self._switches_flags_alone is None and len(self.begun) == 2:
            self._switches_flags_alone = self.glance.keys_apart(*self.begun.values()) <= {"training"}
        return bool(self._switches_flags_alone)

    def is_as(self, seen: Seen) -> bool:
        """Whether all that code can count in, but arrays, holds what it held at another moment."""
        return self.glance.seen().is_same(seen)

    def end(self) -> None:
        """Put everything back: quickly where little has changed."""
        self._put_back(self.training)

    def _put_back(self, training: bool, seen: Seen | None = None) -> None:
        """Put everything back to where a run in a mode starts, if it is known, or as it was found."""
        then, is_kept = self.begun.get(training), seen is not None or self.glance.is_kept_but_tensors()
        now = seen or self.glance.seen()
        written = [] if seen is not None or not is_kept else [*self.glance.written()]
        ran = self.begun.get(self.model.training)
        if written or ran is None or not (is_kept and now.is_same(ran)):
            self.moved.add(self.model.training)
        if then is None or not is_kept or not self.glance.put(now, then):
            self.restore()
            return
        self._put_back_generators()
        self._put_back_gradients()
        self._put_back_tensors(written)

    def _put_back_generators(self) -> None:
        for put_back in self.generators:
            put_back()

    def _put_back_gradients(self) -> None:
        if [*map(_takes_gradients, self.weights)] == self._taking:
            return
        for weight, takes in zip(self.weights, self._taking, strict=True):
            if weight.requires_grad is not takes:
                weight.requires_grad_(takes)

    def _put_back_tensors(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Let tensors hold what their copies do, in the memory that they had: other memory may be others'."""
        pairs = [*pairs]
        with torch.no_grad() if pairs else contextlib.nullcontext():
            for tensor, value in pairs:
                if not _lies_in(self._memory[id(tensor)], tensor):
                    tensor.data = self._memory[id(tensor)]
                if not are_equal_tensors(tensor, value):
                    tensor.data.copy_(value)

    def restore(self) -> None:
        """Put everything back, the same objects with the same content."""
        self.glance.forget()
        for _, module, before in self.modules:
            before.restore(vars(module))
        for module, training in self.scripted:
            module.training = training
        self.beside.restore()
        self._put_back_generators()
        self._put_back_gradients()
        self._put_back_tensors(self.tensors.values())

    def include(self, names: Iterable[str]) -> None:
        """Put these parameters back too, which nothing has written to so far; later snapshots do likewise."""
        for name in names:
            parameter = registered(self.model, name)
            self._include(name, parameter, parameter)

    def _include(self, name: str, parameter: torch.Tensor, held: torch.Tensor) -> None:
        note_written(self.model, [name])
        if id(parameter) not in self.tensors and not _is_absent(parameter):
            self.keep(parameter, held)
            self.glance.include(*self.tensors[id(parameter)])

    def keep(self, tensor: torch.Tensor, held: torch.Tensor | None = None) -> None:
        """Put this tensor back too, in the memory that it has, or had if it ``held`` that."""
        held = (tensor if held is None else held).detach()
        self.tensors[id(tensor)], self._memory[id(tensor)] = (tensor, held.clone()), held

    def tensors_held(self) -> Iterator[torch.Tensor]:
        """Every tensor in an attribute of a module or in a container there."""
        for _, _, held in self.modules:
            inner = (i for _, _, c in held.contents if c for i in (c.values() if isinstance(c, dict) else c))
            unlike = (v for v in (*held.values.values(), *inner) if type(v) not in _NO_TENSORS)
            yield from (v for v in unlike if isinstance(v, torch.Tensor))
        yield from (t for _, _, t in self.reached.tensors)

    def changes(self) -> list[tuple[str, str]]:
        """(module path, name) of each attribute or registered buffer replaced, added or removed since."""
        out = []
        for path, module, before in self.modules:
            out += [(path, k) for k in before.differing(vars(module)) if k not in _INTERNAL]
        return out

    def replaced(self, path: str) -> list[str]:
        """The buffers of the module at ``path`` that are not those it had."""
        held = next(held for p, _, held in self.modules if p == path)
        kept = ((v, then) for name, v, then in held.contents if name == "_buffers" and isinstance(v, dict))
        now, then = next(kept)
        names = [n for n in {**then, **now} if now.get(n) is not then.get(n)]
        return [f"{path}.{name}".lstrip(".") for name in names]

    def made(self) -> Iterator[tuple[str, str, bool]]:
        """(module path, name, whether it is new) of each parameter, or module with some, that code put in."""
        for path, _, before in self.modules:
            for name, value, is_new in before.put_in():
                held = value.parameters() if isinstance(value, nn.Module) else [value]
                if any(isinstance(p, nn.Parameter) for p in held):
                    yield path, name, is_new

    def changed_beside(self) -> list[tuple[str, str]]:
        """(module path, name) of all else that code changed: objects, closures, generators, globals."""
        drawn = [
            (path, name)
            for (path, name, generator), put_back in zip(
                self.reached.generators, self.generators, strict=True
            )
            if _is_drawn(generator, put_back)
        ]
        written = [
            (path, name)
            for path, name, tensor in self.reached.tensors
            if id(tensor) in self.tensors and not are_equal_tensors(*self.tensors[id(tensor)])
        ]
        return drawn + written + self.beside.changes()

    def put_on_classes(self) -> list[tuple[str, str, type, dict[str, Any]]]:
        """The data that code has put on classes under new names: path, name, class and data by name."""
        return [*self.beside.put_on_classes()]

    def keep_on_classes(self, put: Sequence[tuple[str, str, type, dict[str, Any]]]) -> None:
        """Leave such data where it was put, as a memo that is the same whenever it is made."""
        for _, _, cls, new in put:
            self.beside.keep(cls, new)
            self.glance.know(vars(cls), frozenset(new))

    def numbers(self) -> dict[tuple[str, str], Any]:
        """Every plain number and text that code can count in, by module path and name."""
        out = {(p, k): v for p, m, _ in self.modules for k, v in vars(m).items() if isinstance(v, SIMPLE)}
        return out | self.beside.numbers()


def note_written(model: nn.Module, names: Iterable[str]) -> None:
    """Recorded code of a model writes to these parameters, which snapshots put back whatever their size."""
    _WRITTEN.setdefault(model, set()).update(names)


def written_in(model: nn.Module) -> tuple[str, ...]:
    """What :func:`note_written` was told of a model."""
    return tuple(sorted(_WRITTEN.get(model, ())))


_takes_gradients = operator.attrgetter("requires_grad")


def _switches_plainly(module: nn.Module) -> bool:
    """Whether a module's change of mode sets its ``training`` flag, and does nothing else."""
    is_own = "train" in vars(module) or type(module).train is not nn.Module.train
    return not is_own and type(module).__setattr__ is nn.Module.__setattr__


def _lies_in(memory: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is what it was when this was made of it: its memory, in the same form."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    is_laid_alike = tensor.shape == memory.shape and tensor.stride() == memory.stride()
    is_there = not is_plain or tensor.data_ptr() == memory.data_ptr()
    return is_there and is_laid_alike and tensor.dtype is memory.dtype


def _is_drawn(generator: Any, put_back: Callable[[], None]) -> bool:
    """Whether a generator has moved from where ``put_back`` puts it; it is left there."""
    now = state_of(generator)
    put_back()
    return bool(state_of(generator) != now)


def _is_small(tensor: torch.Tensor) -> bool:
    return not _is_absent(tensor) and tensor.numel() <= SMALL


def _is_absent(tensor: torch.Tensor) -> bool:
    """Whether there is no content to keep: on meta, not there yet in a lazy module, or laid out otherwise."""
    return torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided


class _Held:
    """An object's attributes at one moment, and what the containers among them held."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.values = dict(attributes)
        self.contents = [
            (k, v, _content(v) if v or type(v) not in _PLAIN else _NOTHING)  # as hooks of every module
            for k, v in attributes.items()
            if issubclass(type(v), (dict, list, set))
        ]

    def restore(self, now: dict[str, Any]) -> None:
        for _, value, held in self.contents:
            if value or held:
                _refill(value, held)
        if not _same(now, self.values):
            now.clear()
            now.update(self.values)

    def put_in(self) -> Iterator[tuple[str, Any, bool]]:
        """What was registered since as a parameter or module: name, value, and whether none was there."""
        for kind, held, before in self.contents:
            if kind in ("_parameters", "_modules") and isinstance(held, dict):
                found = [(n, v) for n, v in held.items() if before.get(n) is not v]
                yield from ((n, v, before.get(n) is None) for n, v in found)

    def differing(self, now: dict[str, Any]) -> list[str]:
        """The attributes that have come, gone or changed; plain numbers and text by value."""
        out = [
            k
            for k, value, content in self.contents
            if (value or content) and value is now.get(k) and not _same(value, content)
        ]
        if _same(now, self.values):
            return out
        out += [k for k, v in self.values.items() if k not in now or not (now[k] is v or _equals(v, now[k]))]
        return out + [k for k in now if k not in self.values]


class _Beside:
    """What was reached beside the modules' own attributes, at one moment."""

    def __init__(self, found: Reached) -> None:
        self.holders = [(p, n, h, _content(h)) for p, n, h in found.holders]
        self.files = [(p, n, known, {k: known[k] for k in names}) for p, n, known, names in found.files]
        self.classes = [
            (p, n, c, {k: v for k, v in vars(c).items() if is_data(v)}, frozenset(vars(c)))
            for p, n, c in found.classes
        ]
        filled = ((p, n, c, content(c, _EMPTY)) for p, n, c in found.cells)
        self.cells = [each for each in filled if each[3] is not _EMPTY and is_data(each[3])]

    def glance(
        self, containers: Sequence[Any], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Glance:
        """One at all of this, and more containers and tensors."""
        named: list[tuple[Mapping[str, Any], Iterable[str], frozenset[str] | None]] = [
            (k, names, None) for _, _, k, names in self.files
        ]
        named += [(vars(cls), names, known) for _, _, cls, names, known in self.classes]
        holders, cells = [h for _, _, h, _ in self.holders], [c for _, _, c, _ in self.cells]
        return Glance([*containers, *holders], named, cells, copies)

    def restore(self) -> None:
        for _, _, holder, before in self.holders:
            _refill(holder, before)
        for _, _, known, before in self.files:
            if not all(map(operator.is_, map(known.get, before), before.values())):
                known.update({k: v for k, v in before.items() if known.get(k, v) is not v})
        for _, _, cls, held, names in self.classes:
            for key in put_on(vars(cls), names):
                delattr(cls, key)
            for key, value in held.items():
                if vars(cls).get(key, value) is not value:
                    setattr(cls, key, value)
        for _, _, cell, before in self.cells:
            if _is_replaced(before, content(cell, _EMPTY)):
                cell.cell_contents = before

    def restorers(self) -> Iterator[tuple[Any, Callable[[], None]]]:
        """Of each place that holds something else what tells it from others, and what puts it back.

        That is the same for another snapshot, of another model, that the place is of too.
        """
        for _, _, now, before in self.holders:
            if (now or before) and not _same(now, before):
                yield id(now), functools.partial(_refill, now, before)
        for _, _, known, before in self.files:
            for k, v in before.items():
                if _is_replaced(v, known.get(k, v)):
                    yield (id(known), k), functools.partial(known.__setitem__, k, v)
        for _, _, cls, before, _ in self.classes:
            for k, v in before.items():
                if _is_replaced(v, vars(cls).get(k, v)):
                    yield (id(cls), k), functools.partial(setattr, cls, k, v)
        for _, _, cell, before in self.cells:
            if _is_replaced(before, content(cell, _EMPTY)):
                yield place(cell), functools.partial(setattr, cell, "cell_contents", before)

    def changes(self) -> list[tuple[str, str]]:
        out = [(p, n) for p, n, now, before in self.holders if (now or before) and not _same(now, before)]
        out += [
            (path, f"{k} of {name}")
            for path, name, known, before in self.files
            for k, v in before.items()
            if _is_replaced(v, known.get(k, v))
        ]
        out += [
            (path, f"{name}.{k}")
            for path, name, cls, before, _ in self.classes
            for k, v in before.items()
            if _is_replaced(v, vars(cls).get(k, v))
        ]
        out += [(path, f"{name}.{k}") for path, name, _, new in self.put_on_classes() for k in new]
        return out + [(p, n) for p, n, cell, v in self.cells if _is_replaced(v, content(cell, _EMPTY))]

    def put_on_classes(self) -> Iterator[tuple[str, str, type, dict[str, Any]]]:
        """What classes hold that they did not: path, name, class and data by name."""
        found = ((p, n, cls, put_on(vars(cls), known)) for p, n, cls, _, known in self.classes)
        return (each for each in found if each[3])

    def keep(self, cls: type, new: dict[str, Any]) -> None:
        """Let a class have held this from the start."""
        for key, value in new.items():
            setattr(cls, key, value)
        self.classes = [
            (p, n, c, {**held, **new}, known.union(new)) if c is cls else (p, n, c, held, known)
            for p, n, c, held, known in self.classes
        ]

    def numbers(self) -> dict[tuple[str, str], Any]:
        out = {}
        for path, name, holder, _ in self.holders:
            items = dict.items(holder) if isinstance(holder, dict) else enumerate(holder)
            out.update({(path, f"{name}.{k}"): v for k, v in items if isinstance(v, SIMPLE)})
            out[path, f"{LENGTH_OF}{name}"] = len(holder)
        for path, name, known, before in self.files:
            asked = {k: known.get(k) for k in before}
            out.update({(path, f"{name}.{k}"): v for k, v in asked.items() if isinstance(v, SIMPLE)})
        for path, name, cls, before, _ in self.classes:
            asked = {k: vars(cls).get(k) for k, v in before.items() if isinstance(v, (*SIMPLE, tuple))}
            out.update({(path, f"{name}.{k}"): told_apart(v) for k, v in asked.items()})
        for path, name, _, new in self.put_on_classes():
            out.update({(path, f"{name}.{k}"): v for k, v in new.items() if isinstance(v, SIMPLE)})
        out.update({(p, n): told_apart(content(c)) for p, n, c, v in self.cells if isinstance(v, SIMPLE)})
        return out


def _is_replaced(before: Any, after: Any) -> bool:
    return after is not before and not (_equals(before, after) and type(before) is type(after))


def _refill(container: Any, content: Any) -> None:
    """Put the content of a mutable container back."""
    if _same(container, content):
        return
    kind = _kind(container)
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, content)


def _kind(container: Any) -> Any:
    """The class whose methods reach a container's content: one of its own may make something of it."""
    kinds = collections.OrderedDict, dict, list, set, collections.deque
    return next(kind for kind in kinds if isinstance(container, kind))


def _content(container: Any) -> Any:
    """What a container holds, in a plain one."""
    if type(container) is dict:
        return container.copy()
    return dict(dict.items(container)) if isinstance(container, dict) else _kind(container).copy(container)


def _equals(before: Any, after: Any) -> bool:
    return isinstance(after, SIMPLE) and type(before) is not bool and bool(after == before)


def _same(a: Any, b: Any) -> bool:
    """Whether two containers of one kind hold the same objects."""
    if isinstance(a, dict):
        return dict.keys(a) == dict.keys(b) and all(map(operator.is_, dict.values(a), dict.values(b)))
    if isinstance(a, (list, collections.deque)):
        return len(a) == len(b) and all(map(operator.is_, a, b))
    return bool(a == b)


@contextlib.contextmanager
def preserved(
    model: nn.Module, is_first: Callable[[str], bool] = lambda path: True, *, holds_back: bool = False
) -> Iterator[Snapshot]:
    """Whatever happens inside, leave ``model`` and the random generators as they were; other threads wait.

    Where it ``holds_back``, who takes from an iterator that the model holds is told, as what is taken cannot
    be put back; elsewhere they stay in their places, since a captured model takes nothing from them.
    """
    with in_turn():
        snapshot = Snapshot(model, is_first, holds_back=holds_back)
        python, numpy = random.getstate(), np.random.get_state()
        gradients = [(p, p.grad) for p in snapshot.weights]
        kind = snapshot.devices[0].type if snapshot.devices else "cpu"
        with torch.random.fork_rng(devices=snapshot.devices, device_type=kind):
            try:
                for parameter, _ in gradients:
                    parameter.grad = None
                yield snapshot
            finally:
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                snapshot.end()
                if snapshot.spent is not None:
                    snapshot.spent.put_back()
                random.setstate(python)
                np.random.set_state(numpy)


def switch(model: nn.Module, training: bool) -> None:
    """Put a model in a mode, where it has modes at all: an exported program has not."""
    with contextlib.suppress(NotImplementedError):
        model.train(training)


_DRAWS_ALL_ONES = 0x12DD9BB3
"""The word of its state of which a Mersenne Twister makes 32 ones."""
_N_ALIKE, _N_OTHER = 600, 24
"""How many words of its state are alike; others behind them, so that what draws until a number fits ends."""


_N_WORDS = _N_ALIKE + _N_OTHER + 1
"""A Mersenne Twister's words, and the place of the next."""


def seed(device: torch.device) -> None:
    """Put torch's generators that a model on ``device`` draws from, Python's and numpy's in one fixed state.

    ``torch.manual_seed`` would do for torch's, but formats a traceback each time where CUDA is not in use.
    """
    torch.default_generator.manual_seed(0)
    own = accelerator.default_generator(device)
    if own is not None and own is not torch.default_generator:
        own.manual_seed(0)
    if generators() not in _SEEDED:
        random.seed(0)
        np.random.seed(0)
        _SEEDED[:] = [generators()]


_SEEDED: list[tuple[Any, ...]] = []
"""The state in which Python's and numpy's generators were last seeded: as most runs leave them."""


def draw_alike(*, greatest: bool) -> None:
    """Let Python's and numpy's global generators give their least or their greatest number many times."""
    others = random.Random(0)
    words = [_DRAWS_ALL_ONES if greatest else 0] * _N_ALIKE
    words += [others.getrandbits(32) for _ in range(_N_OTHER)]
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))


def generators(device: torch.device | None = None) -> tuple[Any, ...]:
    """The state of Python's and numpy's global generators, and of torch's on ``device``."""
    outside = _pythons_state(), _numpys_state()
    if device is None:
        return outside
    own = torch.default_generator.get_state().numpy().tobytes()
    there = accelerator.default_generator(device)
    if there is not None and there is not torch.default_generator:
        own += there.get_state().numpy().tobytes()
    return (*outside, own)


_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]  # whose method the function is
_HEAD_BYTES = object.__basicsize__
"""Ahead of what an object of C's own keeps."""


def _pythons_state() -> tuple[bytes, float | None]:
    """The same of Python's, and the number it keeps of two that it has made."""
    n_bytes = _random.Random.__basicsize__ - _HEAD_BYTES
    return ctypes.string_at(id(_PYTHONS) + _HEAD_BYTES, n_bytes), _PYTHONS.gauss_next


def _numpys_state() -> bytes:
    """The words of numpy's global generator and its place in them, read where they lie: many ask for it."""
    source: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs lack it
    if not isinstance(source, np.random.MT19937):
        return str(source.state).encode()
    return ctypes.string_at(source.ctypes.state_address, ctypes.sizeof(ctypes.c_uint32) * _N_WORDS)
