"""Values for what was made on the meta device: each rank makes its own stages', by the model's own init.

Memory is left to ``setup``, values out of a checkpoint to ``checkpoint``.
"""

from __future__ import annotations

import collections
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...stages import rng
from ...torch_private import TorchDispatchMode
from ..options import Init

__all__ = ["Unfilled", "initialise"]


class Unfilled:
    """Parameters and buffers that had only shapes, until something gives them values.

    Their memory is marked, with NaN where the dtype has one, so that what writes past autograd's counters is
    noticed too.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[str, Tensor, int]] = {}

    def make(self, name: str, meta: Tensor, device: torch.device) -> Tensor:
        """Marked memory for a tensor that has none."""
        new = torch.full_like(meta, _mark(meta.dtype), device=device, requires_grad=False)
        if isinstance(meta, nn.Parameter):
            new = nn.Parameter(new, meta.requires_grad)
        if new.numel():
            self._made[id(new)] = name, new, new._version
        return new

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is one of those, and has no values yet."""
        return id(tensor) in self._made and _is_marked(*self._made[id(tensor)][1:])

    def names(self) -> dict[str, Tensor]:
        """Those that still have no values; the others are forgotten."""
        self._made = {i: made for i, made in self._made.items() if _is_marked(*made[1:])}
        return {name: tensor for name, tensor, _ in self._made.values()}

    def check(self) -> None:
        """Raise :class:`InputError` where some still have none."""
        left = self.names() if self._made else {}
        if left:
            raise InputError(
                f"{', '.join(list(left)[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''} have no "
                "values: the model was made on the meta device, and its modules have no reset_parameters or "
                "_init_weights that fills them; pass runtime(weights=a checkpoint), or weights=a function of "
                "(module, path) that fills what a module holds, or write them in place"
            )


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min if dtype.is_signed else 0


def _is_marked(tensor: Tensor, version: int) -> bool:
    if tensor._version != version:
        return False
    first, mark = tensor.detach().reshape(-1)[:1].cpu(), _mark(tensor.dtype)
    return bool(torch.isnan(first.to(torch.complex64)) if mark != mark else first == mark)


@torch.no_grad()
def initialise(
    model: nn.Module,
    unfilled: Unfilled,
    seed: int,
    device: torch.device,
    *,
    init: Init | None,
    tables_only: bool,
) -> None:
    """Give values to what this rank holds of a model that was made on the meta device.

    By ``init``; else by transformers' ``_init_weights`` of the nearest module around that has one, and by
    ``reset_parameters``. Values depend on ``seed`` and a tensor's name alone, whatever else is on this rank.
    ``tables_only`` makes those modules that hold what no checkpoint does.
    """
    pending = unfilled.names()
    if not pending:
        return
    own = {id(t) for t in pending.values()}
    devices = [device] if device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices=devices, device_type=device.type),
        _Seeded(seed, pending, device) as draws,
    ):
        for path, module, owner in list(_children_first(model)):
            held = {id(t) for t in (*module.parameters(), *module.buffers())}
            if held.isdisjoint(own) or (tables_only and not _has_tables(module, unfilled)):
                continue
            draws.place = path
            if init is not None:
                init(module, path)
            else:
                _by_itself(module, owner, unfilled)


def _by_itself(module: nn.Module, owner: Any, unfilled: Unfilled) -> None:
    held = [*module._parameters.values(), *module._buffers.values()]
    if owner is not None:
        owner._init_weights(module)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset) and any(unfilled.holds(t) for t in held):
        reset()
        if owner is not None:
            owner._init_weights(module)


def _has_tables(module: nn.Module, unfilled: Unfilled) -> bool:
    return any(unfilled.holds(module._buffers[name]) for name in module._non_persistent_buffers_set)


def _children_first(
    module: nn.Module, path: str = "", owner: Any = None
) -> Iterator[tuple[str, nn.Module, Any]]:
    """(path, module, nearest module around it, or itself, that has ``_init_weights``), as ``apply`` goes."""
    if callable(getattr(module, "_init_weights", None)):
        owner = module
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}".lstrip("."), owner)
    yield path, module, owner


class _Seeded(TorchDispatchMode):
    """Within it every draw comes from a stream of its own: that of the tensor it fills.

    What fills no parameter of ``names`` draws from the stream of ``place``, the module under way.
    """

    def __init__(self, seed: int, names: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.place = ""
        self._seed, self._device = seed, device
        self._names = {t.untyped_storage().data_ptr(): name for name, t in names.items()}
        self._counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        target = next((a for a in args if isinstance(a, Tensor)), None)
        is_meta = target is not None and target.is_meta
        if torch.Tag.nondeterministic_seeded in func.tags and not is_meta:
            name = None if target is None else self._names.get(target.untyped_storage().data_ptr())
            key = f"place {self.place}" if name is None else name
            self._counts[key] += 1
            self._start(rng.mix(rng.mix(self._seed, zlib.crc32(key.encode())), self._counts[key]))
        return func(*args, **(kwargs or {}))

    def _start(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)
