"""A call's arguments: named after the model's signature, flattened, checked against those captured.

Which sizes may change is left to ``dims``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import InputError
from .contents import SIMPLE, contents
from .free_numbers import FreeNumber, as_tensor, freed, is_number, like, plainly_given
from .held_numbers import HELD, divided
from .names import Namer
from .structure import Spec, flatten, hides_tensors, paths, unflatten

__all__ = ["Inputs", "ListedRows", "arguments", "shown", "signature"]


@dataclasses.dataclass(frozen=True, slots=True)
class ListedRows:
    """A list among the arguments, as ``shown``, with an entry for each row; ``names`` are its inputs."""

    shown: str
    n_rows: int
    names: frozenset[str]

    def __str__(self) -> str:
        words = f"{self.shown} holds {self.n_rows} entries, and only tensors are cut into rows"
        return f"{words}: put them into one, filled up to one size"


def arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by parameter name of ``model.forward``, those equal to their default left out.

    What numbers in attributes are given beside them come last.

    Raises :class:`InputError` where they do not fit the signature.
    """
    own, held = divided(kwargs)
    expected = signature(model.forward)
    try:
        bound = expected.bind(*args, **own)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward does not take these arguments: {error}; it takes {expected}"
        ) from error
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = expected.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for key in out.keys() & value.keys():
                raise InputError(
                    f"{type(model).__name__}.forward takes {key!r} by position alone and another by that "
                    "name, which are one name to a pipeline; name one of them otherwise"
                )
            out.update(value)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            out.update({f"{name}[{i}]": v for i, v in enumerate(value)})
        elif not _is_default(value, parameter.default):
            out[name] = value
    return {**out, HELD: held} if held else out


def _lists(spec: Spec, names: Sequence[str | None], at: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Those inside of what lies ``at`` a place, whose leaves have these names."""
    left = iter(names)
    for key, child in zip(spec.keys, spec.children, strict=False):
        own = list(itertools.islice(left, child.n_leaves))
        place = f"{at}[{key!r}]" if at else str(key)
        if child.kind == "sequence":
            rest = iter(own)
            parts = ([*itertools.islice(rest, part.n_leaves)] for part in child.children)
            entries = [[name for name in part if name is not None] for part in parts]
            if entries and all(entries):
                yield place, entries
        yield from _lists(child, own, place)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(default, SIMPLE) and _same(value, default))


def signature(forward: Any) -> inspect.Signature:
    """The signature of a bound method, which takes long to find, found once per function."""
    if not inspect.ismethod(forward):
        return inspect.signature(forward)
    return _of_method(forward.__func__)


@functools.lru_cache(maxsize=64)
def _of_method(function: Any) -> inspect.Signature:
    whole = inspect.signature(function)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The structure of the arguments a model was captured with.

    Attributes
    ----------
    names: per leaf, the placeholder name of a tensor, or None for a constant.
    shown: per leaf, how a person would write it (``batch["mask"]``).
    spec: of the dict of arguments by name.
    constants: leaf index → the value it had.
    numbers: leaf index → a plain number that may vary, as it was at capture.
    dtypes: leaf index → dtype of a tensor.
    shapes: leaf index → shape of a tensor at capture.
    contents: leaf index → what an object among the constants held, which its owner may change.
    is_apart: whether the model tells one tensor in two places from two that are equal.
    n_positional: how many arguments came by position.
    """

    model: str
    names: tuple[str | None, ...]
    shown: tuple[str, ...]
    spec: Spec
    constants: dict[int, Any]
    dtypes: dict[int, torch.dtype]
    shapes: dict[int, tuple[int, ...]]
    contents: dict[int, Any] = dataclasses.field(default_factory=dict)
    is_apart: bool = False
    n_positional: int = 0
    numbers: dict[int, FreeNumber] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], taken: Iterable[str] = ()
    ) -> tuple[Inputs, dict[str, Any]]:
        """The structure of a call's arguments, and its tensors by placeholder name, none of those ``taken``.

        Raises :class:`InputError` for arguments that hold tensors where they cannot be followed.
        """
        leaves, spec = flatten(arguments(model, args, kwargs))
        trails = paths(spec)
        for trail, leaf in zip(trails, leaves, strict=True):
            if hides_tensors(leaf):
                raise InputError(
                    f"{type(model).__name__}: argument {shown(trail)} is a {type(leaf).__name__}, whose "
                    "tensors cannot be followed; pass them in a tuple, a list, a dict or a dataclass"
                )
        named = Namer(taken)
        numbers = {i: v for i, v in enumerate(leaves) if isinstance(v, FreeNumber)}
        leaves = [as_tensor(v) if i in numbers else v for i, v in enumerate(leaves)]
        names = tuple(
            named("_".join(str(key) for _, key in trail)) if isinstance(leaf, torch.Tensor) else None
            for trail, leaf in zip(trails, leaves, strict=True)
        )
        tensors = {i: v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)}
        inputs = cls(
            model=type(model).__name__,
            names=names,
            shown=tuple(map(shown, trails)),
            spec=spec,
            constants={i: v for i, v in enumerate(leaves) if i not in tensors},
            dtypes={i: t.dtype for i, t in tensors.items()},
            shapes={i: tuple(t.shape) for i, t in tensors.items()},
            contents={i: held for i, v in enumerate(leaves) if (held := contents(v)) is not None},
            n_positional=len(args),
            numbers=numbers,
        )
        return inputs, {n: v for n, v in zip(names, leaves, strict=True) if n is not None}

    def bind(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a call's arguments by placeholder name.

        Raises :class:`InputError` naming every argument that differs from what was captured in structure,
        constant value, dtype or number of dims.
        """
        given = arguments(model, args, kwargs)
        leaves, spec = flatten(given)
        if spec != self.spec:
            raise InputError(self._structure_message(given))
        faults = [f for i, leaf in enumerate(leaves) for f in self._faults(i, leaf)]
        faults = faults or (self._given_twice(leaves) if self.is_apart else [])
        if faults:
            raise InputError(f"{self.model}: " + "; ".join(faults))
        leaves = [as_tensor(v) if i in self.numbers else v for i, v in enumerate(leaves)]
        return {n: v for n, v in zip(self.names, leaves, strict=True) if n is not None}

    @property
    def held(self) -> tuple[str, ...]:
        """By path and name, the attributes whose numbers are inputs."""
        places = zip(self.spec.keys, self.spec.children, strict=True)
        return next((child.keys for key, child in places if key == HELD), ())

    @property
    def values_held(self) -> dict[str, list[Any]]:
        """Of each attribute that is ``held`` the numbers that are known."""
        first = len(self.names) - len(self.held)  # they come last
        return {name: self._values_met(first + n) for n, name in enumerate(self.held)}

    @property
    def counts(self) -> dict[str, str]:
        """By path and name, the attributes that are ``held`` and that calls set, and the inputs they are."""
        first = len(self.names) - len(self.held)  # they come last
        places = ((name, first + n) for n, name in enumerate(self.held))
        return {
            name: str(self.names[i]) for name, i in places if i in self.numbers and self.numbers[i].is_set
        }

    @property
    def names_of_numbers(self) -> frozenset[str]:
        """The inputs that are plain numbers to a caller."""
        return frozenset(name for i, name in enumerate(self.names) if name is not None and i in self.numbers)

    def as_before(self) -> dict[str, torch.Tensor]:
        """By input the plain numbers that may vary, as they have been at another time."""
        return {str(self.names[i]): as_tensor(number.before) for i, number in self.numbers.items()}

    @property
    def lists(self) -> tuple[tuple[str, list[list[str]]], ...]:
        """The lists and tuples of entries that all hold tensors, as shown, with these by entry."""
        return tuple(_lists(self.spec, self.names, ""))

    def with_free_numbers(self, others: Sequence[Inputs]) -> Inputs:
        """The same, in which plain numbers are free that are other ones, or free, in the ``others``."""
        free: dict[int, FreeNumber] = {}
        for i, value in self.constants.items():
            places = [(o, o.shown.index(self.shown[i])) for o in others if self.shown[i] in o.shown]
            known = [v for other, j in places for v in other._values_met(j)]
            unlike = [v for v in known if type(v) is type(value) and v != value]
            if is_number(value) and unlike:
                free[i] = freed(value, unlike[0])
        return dataclasses.replace(self, constants=self.constants | free) if free else self

    def _values_met(self, i: int) -> list[Any]:
        """The plain values that are known of a place."""
        if (number := self.numbers.get(i)) is None:
            return [self.constants.get(i)]
        return [plainly_given(number), number.before]

    def is_unlike(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call that fits the signature is another in its structure or plain values."""
        try:
            leaves, spec = flatten(arguments(model, args, kwargs))
        except InputError:
            return False
        return spec != self.spec or any(self._is_other(i, leaf) for i, leaf in enumerate(leaves))

    def only_other_value(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The one place where a call has another plain value, as a person would write it; or ""."""
        leaves, spec = flatten(arguments(model, args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if self._is_other(i, leaf)] if spec == self.spec else []
        is_plain = len(places) == 1 and isinstance(leaves[places[0]], SIMPLE) and places[0] in self.constants
        return self.shown[places[0]] if is_plain else ""

    def _is_other(self, i: int, leaf: Any) -> bool:
        """Whether a value is plain where there was another or a tensor, or a tensor where there was none."""
        if isinstance(leaf, torch.Tensor):
            return i in self.constants
        if i in self.numbers:
            return isinstance(leaf, SIMPLE) and type(leaf) is not type(plainly_given(self.numbers[i]))
        known = self.constants.get(i)
        return (
            isinstance(leaf, SIMPLE)
            and isinstance(known, SIMPLE)
            and not (i in self.constants and _same(leaf, known))
        )

    def _given_twice(self, leaves: Sequence[Any]) -> list[str]:
        """Tensors that are one, or lie in the same place, as the parts of one do that was divided."""
        seen: dict[Any, str] = {}
        for i in self.shapes.keys() - self.numbers.keys():
            tensor = leaves[i]
            is_plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
            kind = tensor.shape, tensor.dtype
            place = (tensor.data_ptr(), tensor.stride(), *kind) if is_plain else id(tensor)
            if place in seen:
                return [
                    f"arguments {seen[place]} and {self.shown[i]} are one tensor, which the model tells from "
                    "two that are equal and stages cannot; give it a copy of its own for each: x.clone()"
                ]
            seen[place] = self.shown[i]
        return []

    def _faults(self, i: int, leaf: Any) -> list[str]:
        shown = self.shown[i]
        if i in self.constants:
            return (
                []
                if self._is_constant(i, leaf)
                else [f"argument {shown} {_turned(self.constants[i], leaf)}; {_remedy(leaf)}"]
            )
        if i in self.numbers:
            was = plainly_given(self.numbers[i])
            return [] if type(leaf) is type(was) else [f"argument {shown} {_turned(was, leaf)}"]
        if not isinstance(leaf, torch.Tensor):
            return [
                f"argument {shown} was a tensor when captured and is {_short(leaf)} now; "
                "capture again with it"
            ]
        if leaf.is_nested:
            return [
                f"argument {shown} is a nested tensor, captured with shape {list(self.shapes[i])}; fill its "
                "rows up to one length (to_padded_tensor)"
            ]
        if leaf.dtype != self.dtypes[i]:
            return [
                f"argument {shown} is {leaf.dtype}, captured with {self.dtypes[i]}; convert it with "
                f".to({self.dtypes[i]})"
            ]
        if leaf.dim() != len(self.shapes[i]):
            return [
                f"argument {shown} has shape {list(leaf.shape)}, captured with {len(self.shapes[i])} dims "
                f"({list(self.shapes[i])}); capture again with an example of as many"
            ]
        return []

    def _is_constant(self, i: int, leaf: Any) -> bool:
        """Whether a value is the one at capture, and holds what that held."""
        is_same = isinstance(leaf, np.ndarray) or _same(leaf, self.constants[i])
        return is_same and contents(leaf) == self.contents.get(i)

    def _structure_message(self, given: dict[str, Any]) -> str:
        captured = set(self.spec.keys)
        missing, extra = sorted(captured - set(given)), sorted(set(given) - captured)
        said = [f"missing {', '.join(missing)}"] * bool(missing)
        said += [f"not captured with {', '.join(extra)}"] * bool(extra)
        if not said:
            nested = {
                name: child
                for name, child in zip(self.spec.keys, self.spec.children, strict=True)
                if flatten(given[name])[1] != child
            }
            said = [f"argument {n} has another structure than when captured" for n in nested] or [
                "another order"
            ]
            whole = [n for n, child in nested.items() if child.kind == "leaf"]
            if whole and isinstance(given[whole[0]], (tuple, list, dict)):
                kind = type(given[whole[0]]).__name__
                said.append(f"it is a {kind}: give what a loader's batch holds as an argument each")
        return (
            f"{self.model} was captured with arguments ({', '.join(self.spec.keys)}), this call differs: "
            f"{'; '.join(said)}; capture again with the arguments you will call it with"
        )

    def rebuild(self, model: nn.Module, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors in the captured structure."""
        leaves = [self.constants[i] if n is None else tensors[n] for i, n in enumerate(self.names)]
        for i, number in self.numbers.items():
            if isinstance(leaves[i], torch.Tensor):
                leaves[i] = like(number, leaves[i].item(), number.before)
        given = unflatten(self.spec, leaves)
        parameters = list(signature(model.forward).parameters.values())
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        rest = [n for n in given if re.fullmatch(rf"{variadic}\[\d+\]", n)]
        # hooks and exported programs tell arguments by position and by name apart
        first = _by_position(parameters, given, self.n_positional, has_rest=bool(rest))
        args = [given.pop(p.name, p.default) for p in first]
        return (*args, *(given.pop(n) for n in rest)), given


def _by_position(
    parameters: Sequence[inspect.Parameter], given: Mapping[str, Any], n_first: int, *, has_rest: bool
) -> Sequence[inspect.Parameter]:
    """The parameters to pass by position: the first so many, and all before what can come in no other way."""
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if has_rest:
        return places
    first = list(itertools.takewhile(lambda p: p.name in given, places[:n_first]))
    only = [i for i, p in enumerate(places) if p.kind is p.POSITIONAL_ONLY and p.name in given]
    return places[: max(len(first), *(i + 1 for i in only), 0)]


def shown(trail: Any) -> str:
    """The steps to a piece of the arguments as a person would write them: ``batch["mask"]``."""
    (_, first), *rest = trail
    if first == HELD:
        return f"self.{rest[0][1]}"
    return str(first) + "".join(f"[{k!r}]" if kind == "item" else f".{k}" for kind, k in rest)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False


def _turned(before: Any, now: Any) -> str:
    """How an argument that is no tensor is other than when captured, in words."""
    if before is now:
        return f"is the {type(now).__name__} that it was when captured, and holds something else now"
    was, is_now = _short(before), _short(now)
    if was == is_now:
        return f"is another {type(now).__name__} than when captured"
    return f"was {was} when captured and is {is_now} now"


def _remedy(value: Any) -> str:
    """What to do about an argument that stays as it was captured."""
    is_array = isinstance(value, np.ndarray)
    return f"{'give it as a tensor, whose values may vary, or ' if is_array else ''}capture again with it"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
