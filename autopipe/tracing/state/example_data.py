"""What a model is run on: its device, copies of arguments, other data for them; whether results are equal.

Running the model is left to ``session``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...torch_private import is_in_transform
from ..inputs.contents import are_told_alike
from ..inputs.layout import copied, lying_as
from ..inputs.structure import flatten, unflatten
from ..members import buffers_in, parameters_in
from .fills import without_fills

__all__ = [
    "all_on",
    "are_close",
    "check_untransformed",
    "check_values",
    "close_to",
    "device_of",
    "doubled",
    "fresh",
    "hooks_kept_back",
    "other_data",
    "projected",
    "united",
    "without_graphs",
]

_RELATIVE = 1e-4


def without_graphs(values: Iterable[Any]) -> list[Any]:
    """The values, of which no tensor keeps what it was computed by for a backward."""
    return [v.detach() if isinstance(v, torch.Tensor) and v.grad_fn is not None else v for v in values]


def projected(outputs: Sequence[Any], wanted: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of what is ``wanted`` by a fixed projection of those outputs that have any."""
    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not roots or not wanted:
        return [None] * len(wanted)
    weights = [torch.linspace(0.5, 1.5, t.numel(), device=t.device).view(t.shape).to(t.dtype) for t in roots]
    with hooks_kept_back(wanted):
        # kept, since the state of a model may hold the graph of an earlier call
        return [*torch.autograd.grad(roots, wanted, weights, allow_unused=True, retain_graph=True)]


@contextlib.contextmanager
def hooks_kept_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it no hook on the gradients of these is called: they are no step's."""
    held = [
        (living, dict(living))
        for tensor in tensors
        for living in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        if living
    ]
    for living, _ in held:
        living.clear()  # the same object: its handles still remove from it
    try:
        yield
    finally:
        for living, kept in held:
            living.update(kept)


def device_of(model: nn.Module, *given: Any) -> torch.device:
    """Where the model is: its first parameter or buffer, else the first tensor in what it is given."""
    held: torch.Tensor | None = next(model.parameters(), None)
    held = next(model.buffers(), None) if held is None else held
    tensors = (v for v in flatten(given)[0] if isinstance(v, torch.Tensor))
    held = next(tensors, None) if held is None else held
    return torch.device("cpu") if held is None else held.device


def check_values(model: nn.Module, *given: Any) -> None:
    """Raise :class:`InputError` for nested and fake tensors, and where every new tensor is a fake one.

    And for arguments without values of a model that has some.
    """
    if any(isinstance(t, torch.Tensor) and t.is_nested for t in flatten(given)[0]):
        raise InputError(
            "an argument is a nested tensor, which has no sizes that a pipeline could go by; fill its rows "
            "up to one length (to_padded_tensor) and pass a mask"
        )
    is_meta = [t.is_meta for t in flatten(given)[0] if isinstance(t, torch.Tensor)]
    if any(is_meta) and device_of(model, *given).type != "meta":
        raise InputError(
            f"an argument is on the meta device and so without values, and {type(model).__name__} is on "
            f"{device_of(model, *given)}; give real tensors, or plan without weights: the model made on "
            "torch.device('meta') too"
        )
    held = {
        "the model's parameters": [t for _, t in (*parameters_in(model), *buffers_in(model))],
        "the arguments": flatten(given)[0],
        "the tensors that are made here": [torch.empty(0, device="cpu")],
    }
    for name, tensors in held.items():
        if any(isinstance(t, torch.Tensor) and getattr(t, "fake_mode", None) is not None for t in tensors):
            raise InputError(
                f"{name} are fake (FakeTensorMode) and have no values to record a model on; make model "
                "and arguments outside of that mode, or on torch.device('meta') to plan without weights"
            )


def check_untransformed(model: str) -> None:
    """Raise :class:`InputError` inside a transform of ``torch.func``, whose tensors hide what they hold."""
    if is_in_transform():
        raise InputError(
            f"{model} cannot be recorded inside a transform of torch.func (grad, vmap, jvp and their like); "
            "split it, and call it once with inputs of this kind and state, outside of that"
        )


@contextlib.contextmanager
def all_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Within it every parameter and buffer that is on another device has its values on this one.

    And no gradient, which stays on the other.
    """
    away = [t for t in (*model.parameters(), *model.buffers()) if t.device != device]
    kept = [(t, t.data, t.grad) for t in away if not t.is_meta and not hasattr(t, "to_local")]
    try:
        for tensor, data, _ in kept:
            tensor.grad, tensor.data = None, data.to(device)
        yield
    finally:
        for tensor, data, grad in kept:
            tensor.data = data
            tensor.grad = grad


@contextlib.contextmanager
def doubled(model: nn.Module) -> Iterator[None]:
    """Within it weights that train are twice what they are; halved they are what they were, to the bit."""
    training = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    with torch.no_grad():
        weights = [p for p in training if p.is_meta or bool((p.abs() < torch.finfo(p.dtype).max / 2).all())]
        for p in weights:
            p.mul_(2)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in weights:
                p.mul_(0.5)


def fresh(value: Any, device: torch.device, *, is_one: bool = False) -> Any:
    """The same structure with each tensor a copy of its own, on meta for a meta model.

    A tensor given twice becomes two, unless it ``is_one``; the caller's are safe from in-place writes.
    """
    leaves, spec = flatten(value)
    copies: dict[int, torch.Tensor] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            copies.setdefault(id(leaf) if is_one else place, _copy(leaf, device))
    places = enumerate(leaves)
    return unflatten(spec, [copies.get(id(v) if is_one else i, v) for i, v in places])


def are_close(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(close_to, first, second))


def other_data(given: Any) -> Any:
    """Arguments with other data: floats halved, whole numbers moved on by one place."""
    leaves, spec = flatten(given)
    return unflatten(spec, [_moved(v) if isinstance(v, torch.Tensor) else v for v in leaves])


def united(given: Any) -> Any:
    """Arguments in which tensors of one shape and dtype are one tensor."""
    leaves, spec = flatten(given)
    firsts: dict[Any, torch.Tensor] = {}
    tensors = [v if isinstance(v, torch.Tensor) else None for v in leaves]
    same = [None if t is None else firsts.setdefault((t.shape, t.dtype), t) for t in tensors]
    return unflatten(spec, [v if t is None else t for v, t in zip(leaves, same, strict=True)])


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return lying_as(tensor.detach() * 0.5, tensor).requires_grad_(tensor.requires_grad)
    return lying_as(tensor.roll(1), tensor)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = tensor.detach().to("meta").clone() if device.type == "meta" else copied(tensor)
    return new.requires_grad_(tensor.requires_grad)


def close_to(a: Any, b: Any) -> bool:
    """Equal up to rounding; values that are neither tensors nor numbers or text count as equal."""
    if not isinstance(a, torch.Tensor):
        return are_told_alike(a, b)
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_meta or torch.equal(a, b):
        return True
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    finite = a.isfinite() & b.isfinite()
    compared, _ = without_fills(a[finite], b[finite], _RELATIVE)
    scale = compared.abs().max().item() if compared.numel() else 0.0
    return torch.allclose(a, b, rtol=_RELATIVE, atol=1e-5 * scale, equal_nan=True)
