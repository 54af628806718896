"""Functions of a model's own that a call may run: of code kept whole a recording shows nothing inside.

What is looked for in them is left to ``rows``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from ...torch_private import code_of_operator, operators_named
from ..calls.call import Call, Depends, Recording, calls_in
from ..calls.functions import REQUIRING
from ..calls.kinds import is_own_number, own_numbers
from ..calls.named import Named, Setter, is_code
from ..inputs.contents import is_filled
from ..members import buffers_in, modules_in, parameters_in, submodule
from ..state.global_names import globals_in, is_foreign
from ..state.loads import attributes_stored
from .leaves import is_torchs
from .reachable import is_method, names_in, names_reached
from .scripted import SIZES, arguments_of, goes_by_values, numbers_written
from .told_numbers import told_numbers

__all__ = ["HOOKS", "OwnCode"]

HOOKS = frozenset({"register_hook", "register_prehook", "register_multi_grad_hook"})
"""Methods that put hooks on gradients of what a forward computes: they need gradients enabled."""

_TRANSFORMS = frozenset({
    "func", "functionalize", "functorch", "grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp",
    "linearize", "vjp",
})  # fmt: skip
"""Names by which code comes to transforms that derive."""
_NO_CODE = frozenset({
    bool, collections.OrderedDict, dict, float, int, list, set, str, tuple, type(None), nn.Parameter,
    torch.Tensor,
})  # fmt: skip
_MAKING = frozenset({"__init__", "__init_subclass__"})
"""Methods that make objects and classes, ahead of all calls."""
_CODE = (
    types.BuiltinMethodType, types.FunctionType, types.MethodType, staticmethod, classmethod, property, type,
    functools.partial, functools.partialmethod, functools.cached_property, torch.jit.ScriptFunction,
)  # fmt: skip
"""What is code, or may be around code that is followed."""
_SETTING = frozenset({"__dict__", "__setattr__", "delattr", "eval", "exec", "setattr", "vars"})
"""What sets attributes of any name."""
_PLAIN: tuple[Any, ...] = (float, int, range, str, type(None))
_THREADS = frozenset({"Thread", "ThreadPool", "ThreadPoolExecutor"})
_MOST_HELD, _DEEP = 1 << 10, 4
"""Longer tables are told apart by their kind and size alone, and what lies deeper by its kind."""


class OwnCode:
    """What calls run of a model's own, looked for once for each target: what modules hold is to stay.

    Attributes
    ----------
    tables_by_row: tables of whole numbers, by name, of which the code was seen to take a place for each row.
    met: what calls were seen to do for many rows, by all that this goes by but the data; see ``rows``.
    untold: the numbers of rows that these calls name and could not be told of, likewise.
    alone: the calls in whose gradients a single row is another than one of several, by a form's last call and
        the mode: name and words.
    exact_gradients: in words, what has other gradients where there are exactly so many rows, likewise; or "".
    gave: what forms gave for batches of two rows or more, and for their first row twice where that is all,
        by their last call and the mode, where they drew nothing.
    same_by_number: numbers of rows of which what asks gives the same as of two, by its code and what it does.
    alike: which layers of a form were seen to do the same, by its last call; see ``rows``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tables_by_row: dict[str, torch.Tensor] = {}
        self.met: dict[Any, list[tuple[int, int, bool]]] = {}
        self.same_by_number: dict[Any, set[int]] = {}
        self.untold: dict[Any, set[int]] = {}
        self.gave: dict[tuple[Call, bool], tuple[Mapping[str, torch.Tensor], list[Any], list[Any]]] = {}
        self.alike: dict[Call, Any] = {}
        self.alone: dict[tuple[Call, bool], list[tuple[str, str]]] = {}
        self.exact_gradients: dict[tuple[Call, bool], str] = {}
        self._within = functools.cache(self._looked_for)
        self._functions = functools.cache(self._functions_of)
        self._is_own = functools.cache(self._looks_own)
        self._names = functools.cache(self._named)
        self._by_mode = functools.cache(self._goes_by_mode)
        self._by_mode_alike: dict[Any, bool] = {}
        self._of_class = functools.cache(_made_of_class)
        self._numbers = functools.cache(self._numbered)
        self._scripted = functools.cache(self._scripts_of)

    def is_own(self, call: Call) -> bool:
        """Whether a call runs a function that stays whole, or a module with one inside that is not torch's.

        Layers of torch say themselves what they do by mode.
        """
        return self._is_own(call.op == "call_module", call.target)

    def functions(self, call: Call) -> list[tuple[types.FunctionType, Any]]:
        """Each function once, with the module that has it or nothing: what it holds, and what that names."""
        return self._functions(call.op == "call_module", call.target)

    def names(
        self, call: Call, may_run: Callable[[types.FunctionType], bool] | None = None
    ) -> frozenset[str]:
        """The names of globals and attributes that those ask for, and of the contexts that they run in.

        Of all functions, or those which ``may_run``; of all too where some run in threads, which nobody sees.
        """
        told = call.op == "call_module", call.target
        names = self._names(*told)
        if may_run is None or not _THREADS.isdisjoint(names):
            return names
        run = (names_in(f.__code__) for f, _ in self._functions(*told) if may_run(f))
        return self._contexts(*told).union(*run)

    def texts(self, call: Call) -> frozenset[str]:
        """The texts that are written in those, as names that they ask for by ``getattr``."""
        return frozenset().union(*(_texts_in(f.__code__) for f, _ in self.functions(call)))

    def may_have_backward(self, call: Call) -> bool:
        """Whether one of those is of a function with a backward that is not torch's own."""
        held = self._within(call.op == "call_module", call.target)
        return any(isinstance(h, type) and issubclass(h, torch.autograd.Function) for h, _ in held)

    def may_go_by_mode(self, call: Call, form: Recording) -> bool:
        """Whether code that stays whole, forward hooks among it, comes to name the mode, as a text too.

        It does not behind a branch on an attribute of its module's that is False, as whether to checkpoint,
        where nothing in the ``form`` sets attributes.
        """
        is_set = any(isinstance(c.target, Setter) for c in form.calls)
        return self._by_mode(call.op == "call_module", call.target, is_set)

    def may_miss_data(self, call: Call) -> bool:
        """Whether code that stays whole may tell a run without data, in the modes in which it was recorded.

        It names devices, or asks tensors about gradients.
        """
        names, codes = self.names(call), (f.__code__ for f, _ in self.functions(call))
        asked = [n.removeprefix("is_") for n in names if n.startswith("is_")]
        texts = (c for code in codes for c in _constants_in(code) if isinstance(c, str))
        return not REQUIRING.isdisjoint(names) or any(map(_is_device, itertools.chain(asked, texts)))

    def keep_met(self, form: Recording, alone: list[tuple[str, str]], exact_gradients: Iterable[str]) -> None:
        """Keep what was met of a form in the present mode: see the attributes."""
        at = form.calls[-1], self.model.training
        self.alone[at], self.exact_gradients[at] = alone, next(iter(exact_gradients), "")

    def may_hook(self, path: str) -> bool:
        """Whether code of a layer, forward hooks among it, may put hooks on gradients of its values."""
        return not HOOKS.isdisjoint(self._names(True, path))

    def may_transform(self, path: str) -> bool:
        """Whether code of a layer may call transforms of ``torch.func``."""
        return not _TRANSFORMS.isdisjoint(self._names(True, path))

    def numbers(
        self, call: Call, may_run: Callable[[types.FunctionType], bool] | None = None
    ) -> frozenset[int]:
        """The whole numbers above one that those have which ``may_run``, or that what they name holds.

        A layer's own number is none, as layers of a stack are alike.
        """
        told = call.op == "call_module", call.target
        each = (n for f, n, _ in self._numbers(*told) if may_run is None or may_run(f))
        return frozenset[int]().union(*each, *map(numbers_written, self._scripted(*told)))

    def told(self, call: Call) -> tuple[str, ...]:
        """The values that those name, in order and in words, but for a layer's own number and weights."""
        each = self._numbers(call.op == "call_module", call.target)
        return tuple(itertools.chain(*(words for *_, words in each)))

    def even(self, call: Call) -> tuple[float | None, ...]:
        """The one number that each weight and buffer of a layer holds throughout, as gates do; else None."""
        if call.op != "call_module":
            return ()
        module = submodule(self.model, call.target)
        return tuple(_throughout(t) for _, t in (*parameters_in(module), *buffers_in(module)))

    def is_scripted(self, call: Call) -> bool:
        """Whether some of those are scripted functions or layers, whose graphs no mode for functions sees."""
        return bool(self._scripted(call.op == "call_module", call.target))

    def may_ask_unseen(self, call: Call, may_run: Callable[[types.FunctionType], bool]) -> bool:
        """Whether those which ``may_run`` may ask a number unseen: in a thread, by its class or scripted."""
        scripted = self._scripted(call.op == "call_module", call.target)
        if any(asks in graph for graph in scripted for asks in SIZES):
            return True
        codes = (f.__code__ for f, _ in self.functions(call) if may_run(f))
        asked = [*map(globals_in, codes)]
        return any(names >= {"int", "type"} or not _THREADS.isdisjoint(names) for names in asked)

    def reads_unseen(self, call: Call, seen: Mapping[int, Sequence[bool]] = MappingProxyType({})) -> bool:
        """Whether scripted code that a call runs goes by values of what it is given, of all rows at once.

        Functions are given what the model holds as well, which is none of rows: the one that the call runs
        itself, and others by what was ``seen`` of their arguments: see :class:`scripted.ScriptsGiven`.
        """
        scripts = self._scripts(call.op == "call_module", call.target)
        if isinstance(call.target, Named) and [call.target.function] == scripts:
            seen = {id(s): _are_of_calls(call, s) for s in scripts}
        return any(goes_by_values(s, seen.get(id(s))) for s in scripts)

    def _functions_of(self, is_module: bool, target: Any) -> list[tuple[types.FunctionType, Any]]:
        held = self._within(is_module, target)
        return [(f, owner) for f, owner in held if isinstance(f, types.FunctionType)]

    def _looks_own(self, is_module: bool, target: Any) -> bool:
        if not is_module:
            return is_code(target)
        return not all(is_torchs(m) for _, m in modules_in(submodule(self.model, target)))

    def _goes_by_mode(self, is_module: bool, target: Any, is_set: bool) -> bool:
        if not is_module:
            return self._names_mode(is_module, target, is_set)
        inside = modules_in(submodule(self.model, target))
        alike = (*(_outline(m) for _, m in inside), is_set)
        if alike not in self._by_mode_alike:
            self._by_mode_alike[alike] = self._names_mode(is_module, target, is_set)
        return self._by_mode_alike[alike]

    def _names_mode(self, is_module: bool, target: Any, is_set: bool) -> bool:
        held = [held for held, _ in self._within(is_module, target)]
        functions = [f for f in held if isinstance(f, types.FunctionType)]
        if any("training" in _texts_in(f.__code__) for f in functions):
            return True
        asking = [f for f in functions if "training" in names_in(f.__code__)]
        if not asking or not is_module or is_set:
            return bool(asking)
        if any(not _SETTING.isdisjoint(names_in(f.__code__)) for f in functions):
            return True
        stored = frozenset().union(*(told(f.__code__) for f in functions for told in (_texts_in, _stored_in)))
        inside = [m for _, m in modules_in(submodule(self.model, target))]
        classes = {*map(type, inside)}
        having = [{cls for cls in classes if is_method(f, cls)} for f in asking]
        owners = ([m for m in inside if type(m) in each] for each in having)
        return any("training" in names_reached(*pair, stored) for pair in zip(asking, owners, strict=True))

    def _named(self, is_module: bool, target: Any) -> frozenset[str]:
        names = (names_in(f.__code__) for f, _ in self._functions(is_module, target))
        return self._contexts(is_module, target).union(*names)

    def _contexts(self, is_module: bool, target: Any) -> frozenset[str]:
        held = (held for held, _ in self._within(is_module, target))
        return frozenset(type(f.__self__).__name__ for f in held if isinstance(f, types.MethodType))

    def _numbered(
        self, is_module: bool, target: Any
    ) -> list[tuple[types.FunctionType, frozenset[int], tuple[str, ...]]]:
        held = self._within(is_module, target)
        bound = {id(m.__func__): m.__self__ for m, _ in held if isinstance(m, types.MethodType)}
        functions = ((f, bound.get(id(f), owner)) for f, owner in held if isinstance(f, types.FunctionType))
        own = own_numbers(target) if is_module else frozenset()
        given = {
            id(p.func): (*p.args, *p.keywords.values()) for p, _ in held if isinstance(p, functools.partial)
        }
        found = []
        for f, owner in functions:
            named = [*_values_named(f, owner, own), *given.get(id(f), ())]
            numbers = itertools.chain(*map(told_numbers, (*_constants_in(f.__code__), *named)))
            found.append((f, frozenset(n for n in numbers if n > 1), tuple(map(_in_words, named))))
        return found

    def _scripts_of(self, is_module: bool, target: Any) -> list[str]:
        """The graphs, in words, of scripted functions and layers."""
        return [str(script.inlined_graph) for script in self._scripts(is_module, target)]

    def _scripts(self, is_module: bool, target: Any) -> list[Any]:
        inside = modules_in(submodule(self.model, target)) if is_module else []
        held: list[Any] = [*(f for f, _ in self._within(is_module, target)), *(m for _, m in inside)]
        kinds = torch.jit.ScriptFunction, torch.jit.ScriptModule
        return [s for s in held if isinstance(s, kinds) and hasattr(s, "inlined_graph")]

    def _looked_for(self, is_module: bool, target: Any) -> list[tuple[Any, Any]]:
        if not is_module:
            run = target.code if isinstance(target, Named) else [(target, None)]
            parts = [(held, owner) for code, owner in run for held in _made_of([code])]
            return [*{id(held): (held, owner) for held, owner in reversed(parts)}.values()]
        found: dict[int, tuple[Any, Any]] = {}
        for _, module in reversed(modules_in(submodule(self.model, target))):
            cls: Any = type(module)
            for held in (*_made_of([*_held_by(module)]), *self._of_class(cls)):
                found.setdefault(id(held), (held, module))
        return [*found.values()]


def _made_of(todo: list[Any]) -> Iterator[Any]:
    """What code is made of, each once."""
    seen: dict[int, Any] = {}
    while todo:
        held = todo.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held
        yield held
        inner = [*_around(held), *(_named_by(held) if isinstance(held, types.FunctionType) else ())]
        todo += [each for each in inner if not _is_foreign(each)]


@functools.lru_cache(maxsize=1 << 12)
def _stored_in(code: types.CodeType) -> frozenset[str]:
    """The names of attributes that code sets, that within it as well."""
    inner = (_stored_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(attributes_stored(code)).union(*inner)


@functools.lru_cache(maxsize=1 << 12)
def _constants_in(code: types.CodeType) -> tuple[Any, ...]:
    """What is written in code, that within it as well."""
    inner = (_constants_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return (*code.co_consts, *itertools.chain(*inner))


@functools.lru_cache(maxsize=1 << 12)
def _texts_in(code: types.CodeType) -> frozenset[str]:
    """The texts among what is written in code, names of arguments that it gives among them."""
    rows = (held if isinstance(held, tuple) else (held,) for held in _constants_in(code))
    return frozenset(each for row in rows for each in row if isinstance(each, str))


def _throughout(tensor: torch.Tensor) -> float | None:
    """The number that all places of a plain tensor hold; most that hold others are told by their ends."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not (is_plain and tensor.is_floating_point() and tensor.numel()) or tensor.is_meta:
        return None
    first, last = (tensor.detach()[(at,) * tensor.ndim] for at in (0, -1))
    return first.item() if bool(first == last) and bool((tensor == first).all()) else None


def _are_of_calls(call: Call, function: Any) -> list[bool]:
    """Which arguments of a scripted function a call makes of more than weights and buffers, in order."""
    given = arguments_of(function, call.args, call.kwargs)
    return [any(c.depends & ~Depends.STATE for c in calls_in(value)) for value in given]


@functools.lru_cache(maxsize=1 << 12)
def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:  # torch's answer to any other text
        return False
    return True


def _values_named(function: types.FunctionType, owner: Any, own: frozenset[int]) -> Iterator[Any]:
    """What a function names: of its file, around it, of its module, and in objects such as a config there.

    Not the module's ``own`` numbers in its path, where it says which it is.
    """
    names, around = _names_and_texts(function.__code__), function.__globals__
    named = [around[name] for name in names if name in around]
    if owner is not None:
        named += [v for n, v in _attributes(owner, names) if not is_own_number(n, v, own)]
    named += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    named += [c.cell_contents for c in function.__closure__ or () if is_filled(c)]
    for value in named:
        holds = hasattr(value, "__dict__") and not (callable(value) or isinstance(value, torch.Tensor))
        is_object = isinstance(value, type) or holds
        yield from (held for _, held in _attributes(value, names)) if is_object else (value,)
        if holds and not isinstance(value, types.ModuleType):  # an object may have that for code of its own
            yield from (held for held in vars(value).values() if isinstance(held, _CODE))


def _attributes(owner: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What an object and its classes hold under some names, of which none of its code is asked."""
    own = getattr(owner, "__dict__", {})
    bases = (owner if isinstance(owner, type) else type(owner)).__mro__[:-1]  # all but object
    registered = (own.get(kind) or {} for kind in ("_buffers", "_parameters"))
    for held in (own, *registered, *map(vars, bases)):
        yield from ((name, held[name]) for name in names if name in held)


def _in_words(value: Any, depth: int = 0) -> str:
    """What a plain value, a list, a dict or a small table holds; of all else, weights among it, its kind."""
    kind = type(value).__name__
    if isinstance(value, np.generic):
        value = value.item()
    # by its type, as what stands for a number may say that it is one
    if (plain := next((p for p in _PLAIN if issubclass(type(value), p)), None)) is not None:
        return kind + plain.__repr__(value)
    if isinstance(value, (dict, frozenset, list, set, tuple)) and len(value) <= _MOST_HELD:
        items = value.items() if isinstance(value, dict) else value
        return f"{kind}({', '.join(_in_words(each, depth + 1) for each in items)})" if depth < _DEEP else kind
    if (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized)
    ):
        return f"{kind}{value.dtype}{value.tolist() if value.numel() <= _MOST_HELD else value.shape}"
    if isinstance(value, np.ndarray):
        return f"{kind}{value.dtype}{value.tolist() if value.size <= _MOST_HELD else value.shape}"
    if isinstance(value, type):
        return f"{kind}{value.__qualname__}{id(value)}"
    if isinstance(value, types.FunctionType):
        return f"{kind}{id(value.__code__)}"
    if isinstance(value, (types.BuiltinMethodType, types.MethodType)):
        return f"{kind}{value.__name__}{_in_words(value.__self__, depth + 1)}"
    if callable(value) and not isinstance(value, (*_CODE, nn.Module)):
        # what an operator is called, and what a user's object goes by
        is_torchs = is_foreign(type(value).__module__)
        return f"{kind}{value}" if is_torchs else kind + _in_words(getattr(value, "__dict__", None), depth)
    return kind


@functools.lru_cache(maxsize=1 << 12)
def _names_and_texts(code: types.CodeType) -> frozenset[str]:
    return names_in(code).union(filter(str.isidentifier, _texts_in(code)))


def _held_by(module: nn.Module) -> Iterator[Any]:
    """What a module has of its own that is code for its calls, or around such, hooks among it."""
    held = (value for value in vars(module).values() if type(value) not in _NO_CODE)
    yield from (value for value in held if issubclass(type(value), _CODE) or code_of_operator(value))
    yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    yield from (*module._backward_pre_hooks.values(), *module._backward_hooks.values())


def _outline(module: nn.Module) -> tuple[Any, ...]:
    """What tells which code a module runs, and where that branches on attributes that are False.

    Alike in layers of a stack: their class, what they hold that is code, and of all else whether it is False.
    """
    own = tuple([name if value is not False else (name,) for name, value in vars(module).items()])
    return type(module), own, *map(id, _held_by(module))


def _made_of_class(cls: type) -> list[Any]:
    """What code the calls of a class's modules are made of, but for torch's own."""
    own = [vars(base).items() for base in cls.__mro__ if not is_foreign(base.__module__)]
    return [*_made_of([value for held in own for name, value in held if name not in _MAKING])]


def _around(held: Any) -> Iterator[Any]:
    """What code something is around: a decorated function, a property, a class."""
    if isinstance(held, types.FunctionType):
        yield vars(held).get("__wrapped__")
        yield from (c.cell_contents for c in held.__closure__ or () if is_filled(c))
    elif isinstance(held, (staticmethod, classmethod, types.MethodType)):
        yield held.__func__
        yield from [of] if isinstance(of := getattr(held, "__self__", None), type) else ()
    elif isinstance(held, types.BuiltinMethodType) and isinstance(held.__self__, type):
        yield held.__self__  # as newer releases of torch have a Function's apply
    elif isinstance(held, property):
        yield from (held.fget, held.fset)
    elif isinstance(held, (functools.partial, functools.partialmethod, functools.cached_property)):
        yield held.func
    elif isinstance(held, type) and issubclass(held, torch.autograd.Function):
        yield from vars(held).values()
    else:
        yield from code_of_operator(held)


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function names of its file, and of modules that it has there."""
    names = names_in(function.__code__)
    for value in (function.__globals__.get(name) for name in names):
        yield value
        if isinstance(value, types.ModuleType) and not is_foreign(value.__name__):
            yield from (vars(value).get(name) for name in names)
    if "ops" in names:
        yield from operators_named(names)


def _is_foreign(value: Any) -> bool:
    # as the context is that a decorator of torch's enters
    is_users = isinstance(value, (types.BuiltinMethodType, types.MethodType, torch.jit.ScriptFunction))
    return not (is_users or code_of_operator(value)) and is_foreign(getattr(value, "__module__", None))
