"""Every private name of torch that autopipe uses, in one place: what to look at when torch changes.

What is done with them is left to whoever imports them; ``tests/test_torch_private.py`` holds each to what is
relied on, and that no other module reaches for one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import keyword
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch._library.autograd
import torch._library.custom_ops
import torch._meta_registrations
import torch.autograd.function
import torch.fx.graph
import torch.utils.checkpoint
from torch import Tensor, overrides
from torch._C._autograd import _get_sequence_nr as _next_number
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.autograd.graph import log as _backward_log
from torch.autograd.variable import Variable
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "APPLY_IS_C",
    "ATTRIBUTES",
    "BACKWARD",
    "CALL_HOOK",
    "CHECKPOINT",
    "CLIP",
    "COND",
    "CONTROL",
    "CUSTOM_FUNCTION",
    "DYNAMO",
    "FUNCTION_HOMES",
    "GLOBAL_HOOKS",
    "GRAD",
    "GRAD_AND_VALUE",
    "JVP",
    "LINEARIZE",
    "LOOPS",
    "TOTAL_NORM",
    "VJP",
    "VMAP",
    "HiddenMode",
    "TorchDispatchMode",
    "Unread",
    "UnseenByFunctions",
    "Unwatched",
    "backend_plugin",
    "backward",
    "code_of_operator",
    "default_store",
    "dict_version",
    "export_flags",
    "force_eager",
    "foreach_norm",
    "function_modes",
    "fx_graph",
    "grad_mode",
    "gradients",
    "is_cached_weight",
    "is_called_plainly",
    "is_in_transform",
    "is_operator",
    "is_torchs_function",
    "is_transformed",
    "newest",
    "operators_named",
    "plugin_options",
    "pop_function_mode",
    "push_function_mode",
    "pytree",
    "qualified_name",
    "release",
    "saves",
    "sequence_number",
    "set_export_flags",
    "takes_functions",
    "uncompiled",
    "unread",
    "unsafe_view",
    "unwatched",
    "weights_forgotten",
]

ATTRIBUTES = {
    "torch.nn.Module": (
        "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
        "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_non_persistent_buffers_set", "_call_impl",
    ),
    "torch.Tensor": ("_version", "_base", "_is_view", "_post_accumulate_grad_hooks"),
    "torch.UntypedStorage": ("_cdata",),
    "torch._ops.OpOverload": ("_schema",),
    "torch.ops.aten": (
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}  # fmt: skip
"""Attributes of torch's objects, by what they are of."""

P = ParamSpec("P")
R = TypeVar("R")

# ---------------------------------------------------------------- functions and modes

foreach_norm: Any = torch._foreach_norm
_ENGINE: Any = Variable._execution_engine
unsafe_view = torch.ops.aten._unsafe_view.default
"""A view that is not declared as one."""
_Made: Any = torch._library.custom_ops.CustomOpDef
_OPERATORS: Any = torch._library.custom_ops.OPDEFS
_OF_OPERATORS: tuple[Any, ...] = _Made, torch._ops.OpOverloadPacket, torch._ops.OpOverload

UnseenByFunctions = torch._C.DisableTorchFunctionSubclass
"""A context in which tensors' own ``__torch_function__`` is not asked."""
Unwatched = torch._C.DisableTorchFunction
"""A context in which no function mode is asked either."""

FUNCTION_HOMES: tuple[Any, ...] = (torch.Tensor, torch, torch._C, torch._C._VariableFunctions)
"""Where torch has its functions: what a function mode is given is an attribute of one of them."""


def function_modes() -> list[Any]:
    """The function modes that are entered, the innermost last."""
    return list(overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def pop_function_mode() -> Any:
    """Take the innermost function mode away, without leaving it."""
    return overrides._pop_mode()  # type: ignore[no-untyped-call]


def push_function_mode(mode: Any) -> None:
    """Put a function mode on top of the others, without entering it."""
    overrides._push_mode(mode)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within it no function mode is asked."""
    modes = [pop_function_mode() for _ in function_modes()]
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_function_mode(mode)


def sequence_number(node: Node) -> int:
    """When a node of a graph was made, counted in the thread that made it; leaves come behind all others."""
    return int(node._sequence_nr())


def is_cached_weight(tensor: Tensor) -> bool:
    """Whether a parametrization's weight is kept for now: see ``torch.nn.utils.parametrize.cached``."""
    return any(kept is tensor for kept in parametrize._cache.values())


@contextlib.contextmanager
def weights_forgotten() -> Iterator[None]:
    """Within it a parametrization's weight that nothing has kept yet is kept until its end alone."""
    before = {*parametrize._cache}
    try:
        yield
    finally:
        for key in parametrize._cache.keys() - before:
            del parametrize._cache[key]


def newest() -> int:
    """The number of the node of a graph that this thread makes next; later ones have larger numbers."""
    return int(_next_number())


class _Held:
    a: int


def _counting(version: Callable[[Any], int] | None) -> Callable[[Any], int] | None:
    """What tells a dict's version, if each change of it makes another one, also where it is an object's."""
    held = _Held()
    own = vars(held)

    def put(value: int) -> None:
        held.a = value

    changes: tuple[Callable[[], Any], ...] = (
        lambda: put(0), lambda: put(1), lambda: own.update(a=2), lambda: own.pop("a"), lambda: put(3),
        lambda: delattr(held, "a"), lambda: own.setdefault("a"), lambda: put(4), own.clear,
    )  # fmt: skip
    if version is None:
        return None
    for change in changes * 16:  # Python comes to know what code does, and does it otherwise from then on
        before = version(own)
        change()
        if version(own) == before:
            return None
    return version


dict_version = _counting(getattr(importlib.import_module("torch._C._dynamo.guards"), "dict_version", None))
"""Another number for a dict after each change of it; None where none tells."""

_ASKED = "has_torch_function"


class HiddenMode(overrides.TorchFunctionMode):
    """A function mode that code does not see which asks torch whether functions are overridden.

    Torch's own attention and encoder layers ask in evaluation, and give other values where a mask leaves
    places out, and in more time, if they are.
    """

    _lock = threading.Lock()
    _n_entered = 0
    _torchs = overrides.has_torch_function

    def __enter__(self) -> Any:
        with HiddenMode._lock:
            HiddenMode._n_entered += 1
            setattr(overrides, _ASKED, _has_seen_function)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with HiddenMode._lock:
            HiddenMode._n_entered -= 1
            if not HiddenMode._n_entered:
                setattr(overrides, _ASKED, HiddenMode._torchs)

    @staticmethod
    def be_forked() -> None:
        """In a child of the process, where no other thread gives back the lock."""
        HiddenMode._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HiddenMode.be_forked)


def _has_seen_function(given: Any) -> bool:
    """``has_torch_function`` as it is without hidden modes; of this thread, whoever has entered one."""
    modes = [] if torch.compiler.is_compiling() else function_modes()
    if not any(isinstance(mode, HiddenMode) for mode in modes):
        return HiddenMode._torchs(given)
    if any(not isinstance(mode, HiddenMode) for mode in modes):
        return True
    for _ in modes:
        pop_function_mode()
    try:
        return HiddenMode._torchs(given)
    finally:
        for mode in modes:
            push_function_mode(mode)


def qualified_name(function: Any) -> str:
    """The dotted name by which fx writes a function down; raises RuntimeError where there is none."""
    return torch.fx.node._get_qualified_name(function)


def is_operator(function: Any) -> bool:
    """Whether a function is an overload of an operator: ``torch.ops.aten.add.Tensor``."""
    return isinstance(function, torch._ops.OpOverload)


def takes_functions(operator: Any) -> bool:
    """Whether an operator is one over functions: a loop, a branch, attention by a function of scores."""
    return isinstance(operator, torch._ops.HigherOrderOperator)


def code_of_operator(value: Any) -> tuple[Any, ...]:
    """What an operator runs that ``torch.library.custom_op`` has made, its backward too; of others nothing.

    It may be given as what defines it, by any overload, or as the packet of these.
    """
    if not issubclass(type(value), _OF_OPERATORS):  # as most values
        return ()
    made = value if isinstance(value, _Made) else None
    if isinstance(value, torch._ops.OpOverloadPacket):
        made = _OPERATORS.get(value._qualified_op_name)
    elif is_operator(value):
        made = _OPERATORS.get(value._schema.name)
    if made is None:
        return ()
    run = (made._init_fn, *made._backend_fns.values(), made._setup_context_fn, made._backward_fn)
    return tuple(dict.fromkeys(each for each in run if each is not None))


def operators_named(names: Container[str]) -> list[Any]:
    """What defines each operator of one of the ``names`` that ``torch.library.custom_op`` has made."""
    return [made for made in [*_OPERATORS.values()] if made._name in names]


def is_torchs_function(function: type) -> bool:
    """Whether an ``autograd.Function`` is torch's own; of one made for an operator, whether its backward is.

    Of an operator on lists of tensors that is not known: it is taken for a user's.
    """
    if function.__module__ != torch._library.autograd.__name__:
        return function.__module__.startswith("torch.")
    backward: Any = vars(function)["backward"]
    backward = getattr(backward, "__func__", backward)
    held = dict(zip(backward.__code__.co_freevars, backward.__closure__ or (), strict=True))
    if "info" not in held:
        return False
    given = held["info"].cell_contents._backward_fn
    return given is None or given.__module__.startswith("torch.")


@contextlib.contextmanager
def grad_mode(is_enabled: bool) -> Iterator[None]:
    """As ``torch.set_grad_enabled``, which a recording would take for the model's own."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(is_enabled)
    try:
        yield
    finally:
        torch._C._set_grad_enabled(before)


def backward(
    roots: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge] = (),
    *,
    keeps_graph: bool = False,
) -> None:
    """``torch.autograd.backward`` of roots with a gradient for each, of their shapes.

    It looks at each pair first, for as long as a small stage's backward takes; and given tensors it hands the
    call to the innermost function mode, which is turned off meanwhile. What it ends in does neither.
    """
    # on the host what it ends in has nothing to hand to other threads, and is asked to log as a rule nothing
    is_direct = grads[0].is_cpu and not _backward_log.isEnabledFor(logging.DEBUG)
    run = _ENGINE.run_backward if is_direct else _engine_run_backward
    run(
        tuple(roots),
        tuple(grads),
        keeps_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradients(
    roots: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad``, within which function modes see what backwards written in Python call.

    None for inputs that get none. Given tensors, torch's own turns the innermost mode off meanwhile.
    """
    found: Sequence[Tensor | None] = _engine_run_backward(
        tuple(roots), tuple(grads), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


_GONE = (lambda tensor: None), (lambda nothing: None)
"""Hooks that put nothing in a saved tensor's place."""


@functools.cache
def _saved(kind: type) -> tuple[str, ...]:
    """Where an autograd node of this type has what it saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saves(node: Node) -> bool:
    """Whether an autograd node is of a kind that saves tensors."""
    return bool(_saved(type(node)))


def release(node: Node) -> None:
    """Free what an autograd node saved that will not run again, unless hooks have put it elsewhere."""
    for name in _saved(type(node)):
        found = getattr(node, name)
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            with contextlib.suppress(RuntimeError):  # a None, or one with hooks, takes none
                saved.register_hooks(*_GONE)


def export_flags() -> tuple[bool, bool]:
    """What ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer."""
    return torch.compiler._is_exporting_flag, torch.compiler._is_compiling_flag


def set_export_flags(exporting: bool, compiling: bool) -> None:
    """Let ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer so."""
    torch.compiler._is_exporting_flag, torch.compiler._is_compiling_flag = exporting, compiling


# ---------------------------------------------------------------- places that a capture patches

CALL_HOOK = "_compiled_call_impl"
"""What ``nn.Module.__call__`` calls where a module has it: the code that ``Module.compile`` makes."""

_MODULES: Any = importlib.import_module("torch.nn.modules.module")
GLOBAL_HOOKS: tuple[MutableMapping[int, Any], ...] = (
    _MODULES._global_forward_pre_hooks, _MODULES._global_forward_hooks,
    _MODULES._global_backward_pre_hooks, _MODULES._global_backward_hooks,
)  # fmt: skip
"""The hooks that run for all modules: what ``register_module_forward_hook`` and its like fill."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_called_plainly(module: torch.nn.Module) -> bool:
    """Whether calling a module comes to its class's ``forward`` and nothing else.

    Not where hooks, code that was compiled for it, or a ``forward`` of its own stand in between.
    """
    own = vars(module)
    is_hooked = any(own[name] for name in _HOOKS) or any(GLOBAL_HOOKS)
    return not is_hooked and own.get(CALL_HOOK) is None and "forward" not in own


APPLY_IS_C = isinstance(vars(torch.autograd.Function).get("apply"), types.ClassMethodDescriptorType)
"""Whether ``autograd.Function.apply`` is C's own, as from torch 2.14: where it was bound to another name
before, nobody sees it called but the function's ``forward``."""

CUSTOM_FUNCTION: Any = torch.autograd.Function if APPLY_IS_C else torch.autograd.function._SingleLevelFunction
"""Whose ``apply`` every call of ``autograd.Function.apply`` ends in."""

BACKWARD = (torch.autograd, "_engine_run_backward")
"""What ``backward`` and ``grad`` end in."""

_GENERATOR = "_checkpoint_without_reentrant_generator"
CHECKPOINT = (
    torch.utils.checkpoint,
    f"{_GENERATOR}_impl" if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl") else _GENERATOR,
)
"""The generator around what ``checkpoint(..., use_reentrant=False)`` calls; ``_impl`` from torch 2.14."""

_TRANSFORMS = importlib.import_module("torch._functorch.eager_transforms")
VMAP = (importlib.import_module("torch._functorch.apis"), "vmap_impl")
GRAD, GRAD_AND_VALUE = (_TRANSFORMS, "grad_impl"), (_TRANSFORMS, "grad_and_value_impl")
JVP, VJP = (_TRANSFORMS, "_jvp_with_argnums"), (_TRANSFORMS, "_vjp_with_argnums")
LINEARIZE = (_TRANSFORMS, "linearize")
"""What the transforms of ``torch.func`` end in, as (module, name)."""
_TRANSFORMED = importlib.import_module("torch._C._functorch")
is_transformed: Callable[[Tensor], bool] = _TRANSFORMED.is_functorch_wrapped_tensor
"""Whether a transform of ``torch.func`` has put this tensor around one, whose memory it does not show."""


def is_in_transform() -> bool:
    """Whether code runs that a transform of ``torch.func`` calls."""
    return _TRANSFORMED.peek_interpreter_stack() is not None


CONTROL: Any = importlib.import_module("torch._higher_order_ops")
"""Where branches and loops lie as functions: ``cond``, which ``torch`` has too, and the ``LOOPS``."""
LOOPS = ("while_loop", "map", "scan", "associative_scan")
COND = (importlib.import_module("torch._higher_order_ops.cond"), "cond_op")
"""What ``cond`` ends in, as (module, name). Where nothing is compiled it hands on no gradient to what its
branches take from around them, as layers."""

DYNAMO = "torch._dynamo"
"""The compiler's module, which many a function of torch imports at its first call: as it is imported it looks
at functions and classes of torch and Python, and asks that they have the parameters that it knows."""


_compiling = importlib.import_module("torch._C._dynamo.eval_frame").get_eval_frame_callback


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """As ``torch.compiler.set_stance("force_eager")``, from when it is entered and in a tenth of the time.

    Raises RuntimeError, as that does, where code is being compiled.
    """
    frames = sys.modules.get(f"{DYNAMO}.eval_frame")
    if _compiling() or not hasattr(frames, "_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    before = vars(frames)["_stance"]
    vars(frames)["_stance"] = vars(frames)["DynamoStance"]("force_eager")
    try:
        yield
    finally:
        vars(frames)["_stance"] = before


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as Python runs it, also where ``torch.compile`` has what calls it."""

    aside: Callable[P, R] | None = None

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal aside
        if aside is None and DYNAMO in sys.modules:
            aside = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return (aside or function)(*args, **kwargs)

    return called


# ---------------------------------------------------------------- what clips

CLIP = (importlib.import_module("torch.nn.utils.clip_grad"), "_clip_grads_with_norm_")
"""What ``torch.nn.utils.clip_grad_norm_`` ends in, looked up at each call; the public function that clips by
a given norm is the same function under a name of its own."""

TOTAL_NORM = (CLIP[0], "_group_tensors_by_device_and_dtype")
"""What ``torch.nn.utils.get_total_norm`` begins with, looked up at each call, whatever name its caller has it
under; other functions of the module call it too."""

# ---------------------------------------------------------------- torch.distributed


def default_store() -> Any:
    """The store that ``init_process_group`` made or was given."""
    return torch.distributed.distributed_c10d._get_default_store()


def store_of_first_group(store: Any) -> Any:
    """What :func:`default_store` is on ranks whose first group was made on ``store``."""
    return torch.distributed.PrefixStore("0/", store)  # type: ignore[attr-defined]


def backend_plugin(name: str) -> Any:
    """What a device's package registered as the process-group backend of this name; None without one."""
    return torch.distributed.Backend._plugins.get(name.upper())


def plugin_options() -> Any:
    """Empty options for a backend that takes them."""
    return torch.distributed.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]


def fx_graph(hidden: Container[str] = ()) -> torch.fx.Graph:
    """An empty graph whose code reaches modules and tensors of any name, such as ``in`` or ``lambda``.

    ``hidden`` are names under which the module that runs the code has something of its own, beside what it
    has registered. fx asks only whether a name is an identifier, which keywords are, quotes no quotation
    marks, and takes what a class has under a name for what is registered.
    """
    graph = torch.fx.Graph()
    graph.set_codegen(_CodeGen(hidden))
    return graph


class _CodeGen(torch.fx.graph.CodeGen):
    def __init__(self, hidden: Container[str]) -> None:
        super().__init__()
        self.hidden = hidden

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> Any:
        theirs = torch.fx.graph._format_target
        torch.fx.graph._format_target = functools.partial(_attribute, self.hidden)
        try:
            return super()._gen_python_code(*args, **kwargs)
        finally:
            torch.fx.graph._format_target = theirs


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """On meta: products of groups in any dtype, as torch's kernels take them; its own here takes one."""
    half = torch.bfloat16
    made = torch._meta_registrations.meta_grouped_mm(
        mat_a.to(half), mat_b.to(half), offs=offs, bias=bias, out_dtype=half
    )
    return made.to(out_dtype or mat_a.dtype)


_ON_META = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
_ON_META.impl("_grouped_mm", _grouped_mm, allow_override=True)  # type: ignore[no-untyped-call]
_FUSED_LAYER = "_transformer_encoder_layer_fwd"
if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_FUSED_LAYER}", "Meta"):  # 2.11 has none
    _ON_META.impl(_FUSED_LAYER, lambda src, *_: torch.empty_like(src))  # type: ignore[no-untyped-call]


class Unread(Tensor):
    """A tensor of a shape, a type and a device that holds nothing; nor does what ops make of it.

    Reading it raises, and so does an op that writes while it is given one.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} writes while it is given a tensor that is not to be read")
        device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))

        def bare(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

        args, kwargs = pytree.tree_map(bare, (args, kwargs or {}))
        made = func(*args, **kwargs)  # on meta, where there is no content that sizes could follow from
        return pytree.tree_map_only(Tensor, lambda t: unread(t, device), made)


def unread(like: Tensor, device: torch.device) -> Tensor:
    """A tensor as ``like``, on a device, that is not to be read."""
    made: Tensor = Tensor._make_wrapper_subclass(
        Unread, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def _attribute(hidden: Container[str], base: str, target: str) -> str:
    is_held = base == "self"  # else it is a method of a value
    for i, name in enumerate(target.split(".")):
        quoted = json.dumps(name, ensure_ascii=False)
        if is_held and (hasattr(torch.nn.Module, name) or (not i and name in hidden)):
            base = f"{base}.__getattr__({quoted})"
        elif name.isidentifier() and not keyword.iskeyword(name):
            base = f"{base}.{name}"
        else:
            base = f"getattr({base}, {quoted})"
    return base
