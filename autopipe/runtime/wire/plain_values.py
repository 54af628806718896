"""Plain values as JSON and back: numbers, texts, containers and torch's small types; tensors are set aside.

What carries the JSON (a message, a checkpoint) and the tensors beside it is left to the caller. Nothing that
is read can name a class of its own or run code: the kinds below are all there are.
"""

from __future__ import annotations

import base64
import collections
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Unfit", "dtype_of", "dumps", "loads", "name_of"]

MAX_DEPTH = 64
TAG = "~"


class Unfit(ValueError):
    """A value that is none of the kinds, or JSON that holds none of them; says where."""


SetAside = Callable[[Tensor, str], str]
"""Takes a tensor and its place; gives the name it is found under again."""


def dumps(value: Any, aside: SetAside | None = None) -> str:
    """``value`` as JSON. Raises :class:`Unfit` naming the place of what cannot be, such as a function."""
    return json.dumps(_encode(value, aside, "", 0), allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes, take: Callable[[str], Tensor] | None = None) -> Any:
    """The value of :func:`dumps`; ``take`` gives the tensors set aside. Raises :class:`Unfit`."""
    try:
        return _decode(json.loads(text, parse_constant=_no_constant), take)
    except Unfit:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise Unfit(f"not a plain value: {type(error).__name__}: {error}") from error


def _no_constant(text: str) -> Any:
    raise Unfit(f"{text} is no JSON number")


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {TAG: kind, "v": value}


def _encode(value: Any, aside: SetAside | None, where: str, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if depth > MAX_DEPTH:
        raise Unfit(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if type(value) is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))

    def inner(item: Any, key: Any) -> Any:
        return _encode(item, aside, f"{where}.{key}" if where else str(key), depth + 1)

    if isinstance(value, Tensor):
        if aside is None:
            raise Unfit(f"{where or 'the value'} is a tensor")
        if isinstance(value, nn.Parameter):
            return _tagged("parameter", [aside(value, where), value.requires_grad])
        return _tagged("tensor", aside(value, where))
    if isinstance(value, np.ndarray) and aside is not None and value.dtype.kind in "biufc":
        return _tagged("array", aside(torch.from_numpy(np.ascontiguousarray(value)), where))
    if isinstance(value, np.generic) and value.dtype.name in _NUMBERS:
        return _tagged("number", [value.dtype.name, inner(value.item(), "item")])
    if type(value) is list:
        return [inner(item, i) for i, item in enumerate(value)]
    for kind, (cls, parts, _) in _KINDS.items():
        if type(value) is cls:
            made = parts(value)
            return _tagged(kind, [inner(m, i) for i, m in enumerate(made)] if type(made) is list else made)
    if type(value) is collections.defaultdict and value.default_factory in _FACTORIES:
        pairs = [[inner(k, "key"), inner(v, k)] for k, v in value.items()]
        return _tagged("default", [_FACTORIES[value.default_factory], pairs])
    if isinstance(value, dict) and type(value) in _MAPPINGS:
        return _encode_mapping(value, inner)
    raise Unfit(
        f"{where or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}; only tensors, "
        "numbers, texts and containers of them are kept"
    )


def _encode_mapping(value: dict[Any, Any], inner: Callable[[Any, Any], Any]) -> Any:
    if type(value) is dict and all(type(k) is str for k in value) and TAG not in value:
        return {k: inner(v, k) for k, v in value.items()}
    pairs = [[inner(k, "key"), inner(v, k)] for k, v in value.items()]
    return _tagged(_MAPPINGS[type(value)], pairs)


def _decode(found: Any, take: Callable[[str], Tensor] | None) -> Any:
    if isinstance(found, list):
        return [_decode(item, take) for item in found]
    if not isinstance(found, dict):
        return found
    if TAG not in found:
        return {key: _decode(item, take) for key, item in found.items()}
    kind, value = found[TAG], found["v"]
    if kind in ("tensor", "array", "parameter"):
        name, trains = value if kind == "parameter" else (value, False)
        if take is None or not isinstance(name, str) or not isinstance(trains, bool):
            raise Unfit("a tensor where none can be")
        tensor = take(name)
        if kind == "parameter":
            return nn.Parameter(tensor, trains) if isinstance(tensor, Tensor) else tensor.parameter(trains)
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "number":
        return _number(value[0])(_decode(value[1], take))
    if kind == "default":
        factory = _factory(value[0])
        return collections.defaultdict(factory, [(_decode(k, take), _decode(v, take)) for k, v in value[1]])
    if kind in _KINDS:
        return _KINDS[kind][2](_decode(value, take) if isinstance(value, list) else value)
    for cls, name in _MAPPINGS.items():
        if name == kind:
            made: Any = cls()
            made.update({_decode(k, take): _decode(v, take) for k, v in value})
            return made
    raise Unfit(f"{kind!r} is no kind of value")


def name_of(dtype: torch.dtype) -> str:
    """A dtype as it is written."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a name. Raises :class:`Unfit`."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise Unfit(f"{text!r} is no dtype")
    return found


def _number(name: str) -> Callable[[Any], Any]:
    if name not in _NUMBERS:
        raise Unfit(f"{name!r} is no kind of number")
    made: Callable[[Any], Any] = np.dtype(name).type
    return made


def _factory(name: str) -> Any:
    for factory, known in _FACTORIES.items():
        if known == name:
            return factory
    raise Unfit(f"{name!r} makes no missing values")


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise Unfit(f"{text!r} is no special number")
    return float(text)


_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (type(None), repr, _float),
    "tuple": (tuple, list, tuple),
    "size": (torch.Size, list, torch.Size),
    "set": (set, lambda s: sorted(s, key=repr), set),
    "frozenset": (frozenset, lambda s: sorted(s, key=repr), frozenset),
    "deque": (type(None), list, collections.deque),
    "queue": (
        collections.deque,
        lambda d: [d.maxlen, list(d)],
        lambda v: collections.deque(v[1], v[0]),
    ),
    "slice": (slice, lambda s: [s.start, s.stop, s.step], lambda v: slice(*v)),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda v: range(*v)),
    "complex": (complex, lambda c: [c.real, c.imag], lambda v: complex(*v)),
    "bytes": (bytes, lambda b: base64.b64encode(b).decode(), lambda v: base64.b64decode(v, validate=True)),
    "dtype": (torch.dtype, name_of, dtype_of),
    "device": (torch.device, str, torch.device),
}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
}
_FACTORIES: dict[Any, str] = {
    None: "none",
    **{cls: cls.__name__ for cls in (int, float, bool, str, list, dict, set, tuple)},
}
"""What may make the missing values of a ``defaultdict``."""
_NUMBERS = frozenset(("bool", "float16", "float32", "float64", "complex64", "complex128")) | {
    f"{sign}int{n_bits}" for sign in ("", "u") for n_bits in (8, 16, 32, 64)
}
"""Numpy's scalars."""
