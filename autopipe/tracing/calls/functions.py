"""What the recorder must know of torch's functions: their kind, how to name them in code, what they touch.

Deciding what follows from it is left to ``recorder``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from ...torch_private import FUNCTION_HOMES, export_flags, set_export_flags
from ..inputs.contents import are_equal_tensors, is_whole
from ..members import buffers_in, modules_in
from .call import UNSAFE, Call, Depends
from .named import Named, nameable

__all__ = [
    "CASTING",
    "HANDING",
    "LOOKED_AT",
    "MEMORY",
    "PLACES",
    "REQUIRING",
    "SIZES",
    "TEXTS",
    "ExportFlags",
    "Versions",
    "as_call",
    "changes_itself",
    "classify",
    "holds_frozen",
    "is_any_frozen",
    "is_cut_off",
    "is_freed",
    "is_numpy_scalar",
    "is_one_number",
    "is_settled",
    "kind_of_name",
    "may_fail",
    "on_one_device",
    "plain_name",
    "selects_by_mask",
    "storages",
    "takes_numpy",
    "tensors",
    "writes_in_place",
]

Kind = Literal["state", "metadata", "read", "shape only", "data shaped", "op"]

_STATE = {"_set_grad_enabled", "set_grad_enabled", "__delete__"}
TEXTS = {"__repr__", "__str__"}
"""Questions about a tensor whose answers are texts of what it holds."""
SIZES = {"shape", "size", "numel", "nelement", "__len__", "stride", "storage_offset"}
"""Questions about a tensor whose answers are numbers made from its sizes."""
MEMORY = {"storage", "untyped_storage", "_typed_storage"}
"""Questions about a tensor whose answers hold what it holds."""
PLACES = {"data_ptr", "storage_offset", "_base", "_is_view"}
"""Questions about a tensor whose answers follow from where in memory it lies."""
REQUIRING = {"requires_grad", "grad_fn", "is_leaf", "_grad_fn", "retains_grad"}
"""Questions about a tensor whose answers follow from where gradients are asked for."""
CASTING = {"dtype", "element_size", "itemsize", "nbytes", "is_floating_point", "result_type", "can_cast"}
"""Questions whose answers autocast has a say in."""
_EFFECTS = {"register_hook", "requires_grad_", "__set__", "register_post_accumulate_grad_hook"}
_METADATA = {
    "shape", "size", "numel", "nelement", "__len__", "stride", "dim", "ndim", "ndimension", "dtype", "device",
    "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu", "is_mkldnn",
    "is_nested", "is_leaf", "requires_grad", "grad_fn", "names", "itemsize", "nbytes", "element_size",
    "is_floating_point", "is_complex", "is_contiguous", "is_tensor", "get_device", "data_ptr", "type_as_name",
    "storage_offset", "untyped_storage", "_version", "is_inference", "is_conj", "is_neg", "is_signed",
    "is_pinned", "output_nr", "_is_view", "_base", "result_type", "can_cast", "__hash__", "__repr__",
    "__str__", "__dir__", "has_names", "is_same_size", "retain_grad", "retains_grad", "name",
    "is_sparse_csr", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "is_distributed", "is_autocast_enabled",
    "broadcast_shapes", "_dispatch_keys", "grad", "sym_size", "is_xla", "is_ort",
    "_backward_hooks", "is_shared", "_grad_fn", "storage", "storage_type", "__dlpack_device__",
    "get_default_dtype",
    "_has_symbolic_sizes_strides", "__cuda_array_interface__", "typename",
}  # fmt: skip
_READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__nonzero__",
    "__long__", "numpy", "__array__", "__contains__", "equal", "allclose", "is_nonzero", "__dlpack__",
    "__format__", "_local_scalar_dense", "cpu_numpy",
}  # fmt: skip
_SHAPE_ONLY = {
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_tensor",
}  # fmt: skip
_CUT_OFF = {*_SHAPE_ONLY, "detach", "detach_", "data"}
_DATA_SHAPED = {"nonzero", "unique", "unique_consecutive", "masked_select", "argwhere", "bincount"}
_FAILING = {"cholesky", "cholesky_inverse", "inverse", "lu", "geqrf", "logdet", "slogdet"}
_OPERATORS: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, name)
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "neg",
        "invert",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "getitem",
        "setitem",
    ]
} | {"__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor}
_IN_PLACE = {
    "__setitem__", "__set__", "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__",
    "__ior__", "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__",
}  # fmt: skip
_REFLECTED = {
    f"__r{name}__": getattr(operator, name)
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
} | {"__rdiv__": operator.truediv}


def classify(func: Callable[..., Any]) -> tuple[Kind, str]:
    """What kind of function it is, and its plain name (a property's own name for its getter)."""
    name = getattr(func, "__name__", "")
    owner: Any = func
    if name == "__get__":
        owner = getattr(func, "__self__", None)
        name = getattr(owner, "__name__", name)
    kind = kind_of_name(name)
    return (kind if kind not in _BY_IDENTITY or _is_torchs_own(owner, name) else "op"), name


_BY_IDENTITY = ("metadata", "read", "state")
"""Kinds of which other functions may bear the names: ``torch.autograd.grad`` is not ``Tensor.grad``."""


def _is_torchs_own(func: Any, name: str) -> bool:
    """Whether torch itself has the function, or the tensor's property, under its name."""
    return name == "__delete__" or any(getattr(home, name, None) == func for home in FUNCTION_HOMES)


@functools.cache
def kind_of_name(name: str) -> Kind:
    """What kind of function of torch has a name."""
    sets: tuple[tuple[Kind, set[str]], ...] = (
        ("state", _STATE),
        ("metadata", _METADATA),
        ("read", _READS),
        ("shape only", _SHAPE_ONLY),
        ("data shaped", _DATA_SHAPED),
    )
    return next((kind for kind, names in sets if name in names), "op")


def as_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A torch function with encoded arguments as the call that generated code should make."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in _EFFECTS:
        target: Any = setattr if name == "__set__" else Named(_EFFECT_CALLS.get(name, func), name)
        owner = [func.__self__.__name__] if name == "__set__" else []  # type: ignore[attr-defined]
        given = (args[0], *owner, *args[1:])
        return Call("call_function", target, given, kwargs, hint=name, accessor=True, has_effect=True)
    if name == "__get__":
        name = func.__self__.__name__  # type: ignore[attr-defined]
        return Call("call_function", getattr, (args[0], name), hint=name)
    if name in _OPERATORS and not kwargs:
        return Call("call_function", _OPERATORS[name], args, hint=name.strip("_"))
    if name in _REFLECTED and len(args) == 2:
        return Call("call_function", _REFLECTED[name], (args[1], args[0]), hint=name.strip("_"))
    if _is_method(func, name) and isinstance(args[0] if args else None, Call):
        return Call("call_method", name, args, kwargs, hint=name)
    return Call("call_function", nameable(func), args, kwargs, hint=name)


def _register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """The model's hook, where a gradient will come by at all."""
    return tensor.register_hook(hook) if tensor.requires_grad else None


_EFFECT_CALLS: dict[str, Callable[..., Any]] = {"register_hook": _register_hook}


def _is_method(func: Any, name: str) -> bool:
    return name.isidentifier() and not name.startswith("__") and getattr(torch.Tensor, name, None) is func


def is_numpy_scalar(value: Any) -> bool:
    return (
        type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")
    )


def takes_numpy(actual: Any) -> bool:
    """Whether a call takes a numpy array."""
    args, kwargs = actual
    return any(type(a).__module__ == "numpy" and getattr(a, "shape", ()) for a in (*args, *kwargs.values()))


def writes_in_place(name: str, actual: Any) -> bool:
    """Whether a function's name says that it writes to its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def changes_itself(call: Call) -> bool:
    """Whether a method changes its tensor in place, be it only in how it is laid out or derived."""
    name = call.target if call.op == "call_method" else ""
    return name.endswith("_") and not name.endswith("__")


def may_fail(name: str) -> bool:
    """Whether a function of this name fails for some data: a factor of a matrix that has none."""
    return name.startswith("linalg_") or name in _FAILING


def selects_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the result's shape depends on data: indexing with a boolean tensor, one-argument ``where``."""
    if name == "where":
        return len(args) == 1
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)


def is_one_number(name: str, actual: Any) -> bool:
    """Whether a read of this name asks a tensor for one real number; a truth is none, but may be cast."""
    tensor = next(iter(actual[0]), None)
    if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
        return False
    return name in ("__int__", "__float__") or (name == "item" and tensor.dtype is not torch.bool)


def plain_name(call: Call) -> str:
    """What is called, without its module or class; empty where it has no name."""
    name: str = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "")
    return name


def is_settled(call: Call) -> bool:
    """Whether a tainted read can come out one way only: a uniform draw in [0, 1) below zero or less."""
    if len(call.args) != 1 or not isinstance(call.args[0], Call) or call.depends & ~(Depends.RANDOM) & UNSAFE:
        return False
    test = call.args[0]
    if (
        plain_name(test) not in ("lt", "__lt__", "less")
        or len(test.args) != 2
        or not isinstance(test.args[0], Call)
    ):
        return False
    draw, bound = test.args
    drawn = plain_name(draw) in ("rand", "rand_like")
    return drawn and isinstance(bound, (int, float)) and bound <= 0


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor nested in tuples, lists and dicts."""
    found: list[torch.Tensor] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in _WITHOUT:
                _gather(item, found)


_WITHOUT = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def on_one_device(actual: Any) -> Any:
    """The arguments of a call with every tensor on meta where one of them is: constants of a meta model."""
    found = tensors(actual)
    if not any(t.is_meta for t in found) or all(t.is_meta for t in found):
        return actual
    return _to_meta(actual)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.to("meta")
    if type(value) in (tuple, list):
        return type(value)(_to_meta(v) for v in value)
    if type(value) is dict:
        return {k: _to_meta(v) for k, v in value.items()}
    return value


def storages(value: Any) -> frozenset[int]:
    """The id of the memory a tensor lies in; empty for other values and tensors without storage."""
    place = _storage(value) if isinstance(value, torch.Tensor) else None
    return frozenset() if place is None else frozenset({place})


def is_freed(tensor: Any) -> bool:
    """Whether a plain tensor has given its memory back: to read it would end the process."""
    is_plain = type(tensor) is torch.Tensor and not tensor.is_meta and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> int | None:
    """The id of the memory a tensor lies in; None for one without storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def holds_frozen(value: Any) -> bool:
    """Whether a value is, or a module has, a weight that takes no gradient and could."""
    is_module = isinstance(value, nn.Module)
    held = [p for _, m in modules_in(value) for p in m._parameters.values()] if is_module else [value]
    # a class asks at length whether another's object is one of its own
    return is_any_frozen([p for p in held if type(p) is nn.Parameter or isinstance(p, nn.Parameter)])


def is_any_frozen(weights: Iterable[nn.Parameter]) -> bool:
    """Whether one of some weights takes no gradient and could."""
    frozen = (p for p in weights if not p.requires_grad)
    return not all(map(is_whole, frozen))


def is_cut_off(call: Call) -> bool:
    """Whether a function's name says that no gradient passes through what it gives."""
    return call.op != "call_module" and call.hint in _CUT_OFF


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _looked_at(tensor: torch.Tensor) -> torch.Tensor:
    """What is compared of a tensor's content: of a large one, elements all over it."""
    held = tensor.detach()
    return held if held.numel() <= LOOKED_AT else held.flatten()[:: 1 + held.numel() // LOOKED_AT]


HANDING = frozenset(
    {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.data_ptr}
)
"""Methods that hand a tensor's memory to code outside of torch."""

LOOKED_AT = 1 << 16
"""Of a tensor's elements about so many are compared at the most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """Tensors, how often each had been written to at some moment, and the memory that it lay in."""

    entries: tuple[tuple[Any, torch.Tensor, int, int | None], ...]
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @classmethod
    def of(
        cls, named: dict[Any, torch.Tensor], is_held: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> Versions:
        """``is_held`` tells of which tensors the content is looked at too: some kernels write unsaid."""
        copies = [
            (t, _looked_at(t).clone())
            for t in named.values()
            if is_held(t) and not t.is_meta and t.layout is torch.strided
        ]
        return cls(tuple([(n, t, _version(t), _storage(t)) for n, t in named.items()]), tuple(copies))

    @classmethod
    def of_buffers(cls, named: dict[Any, torch.Tensor]) -> Versions:
        """Of buffers, whose content is looked at: code writes by ``data`` or numpy, which nothing counts."""
        return cls.of(named, lambda buffer: True)

    @property
    def storages(self) -> frozenset[int]:
        return frozenset([lay for *_, lay in self.entries if lay is not None])

    @property
    def left(self) -> frozenset[int]:
        """The memory that those lay in which lie elsewhere now."""
        return frozenset([lay for _, t, _, lay in self.entries if lay is not None and _storage(t) != lay])

    @property
    def freed(self) -> frozenset[int]:
        """The memory of those that gave it back, as inputs do which a backward makes anew."""
        return frozenset([lay for _, t, _, lay in self.entries if lay is not None and is_freed(t)])

    def written(self) -> list[torch.Tensor]:
        """Those written to since, or laid elsewhere."""
        changed = self._changed_unsaid()
        return [
            t
            for _, t, version, lay in self.entries
            if _version(t) != version or id(t) in changed or _storage(t) != lay
        ]

    def changed(self, module: nn.Module, path: str, training: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of ``module`` written to or replaced since, and those that its normalisation layers update.

        Batch norm's own kernels write its statistics without counting it.
        """
        now = dict(buffers_in(module, path)) if self.entries else {}
        owners = dict(modules_in(module, path)) if self.entries else {}
        unsaid = self._changed_unsaid()
        for name, tensor, version, _ in self.entries:
            owner = owners[name.rpartition(".")[0]]
            tracks = training and owner.training and getattr(owner, "track_running_stats", False)
            is_written = _version(tensor) != version or id(tensor) in unsaid
            if now.get(name) is not tensor or is_written or tracks:
                yield name, tensor

    def _changed_unsaid(self) -> set[int]:
        """Ids of those that hold something else, as what is written by ``data`` or numpy does."""
        return {id(t) for t, before in self.copies if not are_equal_tensors(_looked_at(t), before)}


@dataclasses.dataclass(frozen=True, slots=True)
class ExportFlags:
    """What ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer."""

    exporting: bool
    compiling: bool

    @classmethod
    def read(cls) -> ExportFlags:
        return cls(*export_flags())

    def write(self) -> None:
        set_export_flags(self.exporting, self.compiling)
