"""Weights that other ranks train: what this process still holds of them is old, and refuses to be read.

Bringing them back is left to ``gather``.

A rank's model has every parameter, but trains only its stages'. From the first step on the others are marked
in place: the parameter stays the same object, and what needs no value of it (shapes, ``requires_grad``, an
optimizer that passes over it since it has no gradient) goes on. What would read an old value raises
:class:`StaleError`: calling the model or the pipe here, ``state_dict``, ``deepcopy``, ``verify``, a norm of
gradients of which this rank has some.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import StaleError
from ...stages import Stage
from ...stages.gradients import are_ours
from ...torch_private import UnseenByFunctions
from ..reduce.hooks import OwnHook

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = [
    "StaleTensor",
    "absent",
    "filled",
    "guard",
    "mark",
    "readable",
    "shapes_of",
    "unmark",
]

GRADIENT_READERS = ("torch.optim", "torch.amp", "torch.nn.modules", "autopipe")
"""Modules that may ask for an absent gradient: they pass over parameters without one."""

# fmt: off
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "names", "ndim", "requires_grad", "is_leaf", "is_meta", "is_cpu",
    "is_cuda", "is_sparse", "is_mps", "is_xpu", "is_quantized", "grad_fn", "grad_dtype", "retains_grad",
    "output_nr", "itemsize", "nbytes", "_backward_hooks", "_version",
)
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "__hash__",
)
# fmt: on
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS),
    getattr(Tensor.requires_grad, "__set__"),  # noqa: B009 - torch types it as a bool
    getattr(Tensor.grad, "__set__"),  # noqa: B009 - torch types it as a tensor
}

_GRADIENT = getattr(Tensor.grad, "__get__")  # noqa: B009 - torch types it as a tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Home:
    """A weight this rank does not train: its name, the first rank that does, and the model it is of."""

    tensor: Tensor
    name: str
    rank: int
    model: str


class StaleTensor(nn.Parameter):
    """A parameter or buffer that another rank trains; see the module."""

    _home: Home

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _is_harmless(func, args, sys._getframe(1).f_globals.get("__name__", "")):
            everything = (*args, *(kwargs or {}).values())
            nested = (x for a in everything for x in (a if isinstance(a, (tuple, list)) else (a,)))
            raise StaleError(_told(next(x for x in nested if isinstance(x, StaleTensor)), func))
        with UnseenByFunctions():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self._home.name} {list(self.shape)}, with rank {self._home.rank}"


def _is_harmless(func: Any, args: Sequence[Any], caller: str) -> bool:
    if func in _HARMLESS:
        return True
    if func == _GRADIENT:
        return caller.startswith(GRADIENT_READERS)
    # what is written whole is not read: load_state_dict gives all ranks the same
    return func is Tensor.copy_ and not any(isinstance(a, StaleTensor) for a in args[1:])


def _told(tensor: StaleTensor, func: Any) -> str:
    name, rank, model = tensor._home.name, tensor._home.rank, tensor._home.model
    if func == _GRADIENT:
        return (
            f"the gradient of {name} is with rank {rank}, so what is made of the gradients here is not of "
            f"the whole {model}: rt.clip_grad_norm_(max_norm) clips and returns the norm over all ranks, and "
            "rt.parameters() are this rank's own"
        )
    return (
        f"{name} is trained by rank {rank}, and this process has only an old value of it. To run the "
        f"{model}, call rt.forward(...), rt.evaluate(...) or pipe.generate(...) on every rank; to have all "
        "its weights here, pipe.merge() on every rank; to save it, rt.save(folder); for an average of "
        "weights or such, use this rank's own, rt.named_parameters(). A network that is part of two "
        "pipelines must lie on the "
        "same ranks in both (pin), or be merged between their steps"
    )


def absent(capture: Capture, own: Iterable[Stage], stages: Iterable[Stage]) -> tuple[Home, ...]:
    """The parameters, and the buffers that steps write, which no stage of ``own`` has, and where they are."""
    here = {id(t) for stage in own for t in (*stage.parameters(), *stage.buffers())}
    written = {name for op in capture.ops.compute for name in op.mutated_buffers}
    found: dict[int, Home] = {}
    for stage in stages:
        named = [*stage.named_parameters(), *((n, b) for n, b in stage.named_buffers() if n in written)]
        for name, tensor in named:
            if id(tensor) not in here:
                found.setdefault(id(tensor), Home(tensor, name, stage.rank, capture.ops.model))
    return tuple(found.values())


def mark(homes: Iterable[Home]) -> None:
    """From now on refuse reads of these."""
    for home in homes:
        tensor = home.tensor
        if tensor.__class__ is not StaleTensor:
            tensor.__dict__.update(_was=tensor.__class__, _home=home)
            tensor.__class__ = StaleTensor


def unmark(tensors: Iterable[Tensor]) -> None:
    """Let these be read again: their values are new."""
    for tensor in tensors:
        if tensor.__class__ is StaleTensor:
            del tensor.__dict__["_home"]
            tensor.__class__ = tensor.__dict__.pop("_was")


def guard(homes: Iterable[Home]) -> list[Any]:
    """Refuse gradients of these that the user's own backward makes; handles that end it.

    Until the first step values are right to read, but whoever trains by them here leaves the other ranks'
    weights as they are.
    """
    return [
        home.tensor.register_post_accumulate_grad_hook(OwnHook(_refuse, home.name, home.rank, home.model))
        for home in homes
        if home.tensor.requires_grad and home.tensor.is_leaf
    ]


def _refuse(name: str, rank: int, model: str, tensor: Tensor) -> None:
    if are_ours():
        return
    tensor.grad = None
    raise StaleError(
        f"a gradient of {name} was made here by backward(), but rank {rank} trains it, and would "
        f"not have it. To train the {model}, call rt.step(...) on every rank (or a PipelineModule of "
        "autopipe.neighbours.module, whose loss has a backward), not model(...) or pipe(...)"
    )


@contextlib.contextmanager
def readable(homes: Iterable[Home]) -> Iterator[None]:
    """Within it old values may be read: for what depends on their shapes alone."""
    marked = [home for home in homes if home.tensor.__class__ is StaleTensor]
    unmark(home.tensor for home in marked)
    try:
        yield
    finally:
        mark(marked)


@contextlib.contextmanager
def filled(capture: Capture, stages: Iterable[Stage]) -> Iterator[None]:
    """Within it weights that were released have their shapes again, and values of no meaning.

    They are alike on all ranks, and as unlike one another as weights are: with equal ones, rows that a model
    compares would look alike whatever it makes of them.
    """
    there = {id(t): (n, t) for s in stages for n, t in (*s.named_parameters(), *s.named_buffers())}
    specs = ((capture.ops.parameter.get(name), tensor) for name, tensor in there.values())
    gone = [
        (spec.name, tensor, spec.shape)
        for spec, tensor in specs
        if spec is not None and _is_gone(tensor, spec.shape)
    ]
    before = [tensor.data for _, tensor, _ in gone]
    try:
        for name, tensor, shape in gone:
            tensor.data = _stand_in(name, tensor, shape)
        yield
    finally:
        for (_, tensor, _), data in zip(gone, before, strict=True):
            tensor.data = data


def _is_gone(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    with UnseenByFunctions():
        is_whole = tensor.is_meta or hasattr(tensor, "to_local") or tuple(tensor.shape) == shape
        return not is_whole and not tensor.numel()


def _stand_in(name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What stands in for a released weight; a parameter's rows overlap: a matrix takes a vector's memory."""
    if not like.is_floating_point() and not like.is_complex():
        return torch.full(shape, like.dtype is torch.bool, dtype=like.dtype, device=like.device)
    n = sum(shape) - len(shape) + 1 if isinstance(like, nn.Parameter) else math.prod(shape)
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    drawn = torch.rand(n, generator=generator, device="cpu") + 0.5
    if len(shape) > 1:  # what scales or is a variance stays positive
        drawn = (drawn - 1.0) / math.sqrt(math.prod(shape[1:]))
    made = drawn.to(like.device, like.dtype)
    return made.as_strided(shape, [1] * len(shape)) if isinstance(like, nn.Parameter) else made.view(shape)


@contextlib.contextmanager
def shapes_of(model: nn.Module) -> Iterator[None]:
    """Within it a model's old values may be read, as :func:`readable` has it: to plan and price it."""
    tensors = (*model.parameters(), *model.buffers())
    with readable([tensor._home for tensor in tensors if isinstance(tensor, StaleTensor)]):
        yield
