"""Counts what the dispatcher sees while code runs: kernels with their FLOPs and bytes, and live bytes.

What code to run is left to ``replay``; turning counts into seconds to ``estimate``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..torch_private import TorchDispatchMode, pytree, takes_functions, unsafe_view
from .flops import flops_of, has_formula
from .traffic import moved_bytes

__all__ = ["NOTHING", "UNCOUNTED", "Counter", "Kernels", "Saved", "storage_bytes", "tensors"]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """What some code asked of the device: matrix work, bytes read and written, and how many launches.

    ``flops`` are those of matrix products, convolutions and attention (:mod:`autopipe.measure.flops`);
    ``convolution_flops`` the part in convolutions; ``bytes`` those that every kernel moves
    (:mod:`autopipe.measure.traffic`), ``matrix_bytes`` the part of the kernels with FLOPs.
    """

    n: int = 0
    flops: int = 0
    bytes: int = 0
    matrix_bytes: int = 0
    dtype: str = ""
    convolution_flops: int = 0

    def __add__(self, other: Kernels) -> Kernels:
        dtype = self.dtype if self.flops >= other.flops else other.dtype or self.dtype
        return self._counted(lambda name: getattr(self, name) + getattr(other, name), dtype)

    def __sub__(self, other: Kernels) -> Kernels:
        return self._counted(lambda name: getattr(self, name) - getattr(other, name), self.dtype)

    def __floordiv__(self, n: int) -> Kernels:
        return self._counted(lambda name: getattr(self, name) // n, self.dtype)

    def _counted(self, count: Callable[[str], int], dtype: str) -> Kernels:
        return Kernels(**{name: count(name) for name in _COUNTS}, dtype=dtype)


UNCOUNTED = "have no FLOP count"
"""What the note says that tells of calls without a formula."""

_COUNTS = ("n", "flops", "bytes", "matrix_bytes", "convolution_flops")

NOTHING = Kernels()


class Counter(TorchDispatchMode):
    """While active: the kernels run so far, the bytes of storages alive that were made under it, their peak.

    ``uncounted`` has, by operator, the calls and the bytes of what has no FLOP count. An operator that takes
    functions, such as a loop, is what these run, unless it has a formula of its own.

    >>> with Counter() as counter:
    ...     y = torch.ones(4, 8) @ torch.ones(8, 2)
    >>> counter.kernels.flops, counter.live_bytes, counter.peak_bytes
    (128, 32, 224)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Kernels()
        self.uncounted: dict[str, tuple[int, int]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not has_formula(func):
            if takes_functions(func):
                return func(*map(self._counted, args), **(kwargs or {}))
            with self:  # as where nothing is differentiated ops come whole that are made of others
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False) or func in _FREE_VIEWS:
            return out
        read, made = tensors((args, kwargs)), tensors(out)
        taken = storage_bytes(read)
        self.track(t for t in made if not taken.keys() & storage_bytes((t,)))
        if func not in _FREE:
            self._count(func, args, kwargs or {}, out, read, made)
        return out

    def reset_peak(self) -> int:
        """Forgets the peak; returns the bytes alive now."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    @property
    def told(self) -> str:
        """In words, what has no FLOP count and how much of all it is; empty where all is counted."""
        if not self.uncounted:
            return ""
        calls, moved = (sum(row[i] for row in self.uncounted.values()) for i in (0, 1))
        names = sorted(self.uncounted, key=lambda name: -self.uncounted[name][1])
        listed = ", ".join(f"{name} ({self.uncounted[name][0]})" for name in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        share = moved / max(1, self.kernels.bytes)
        return (
            f"{calls / self.kernels.n:.1%} of calls, at least {share:.1%} of bytes, "
            f"{UNCOUNTED}: {listed}{more}; measure.count_flops gives one a formula"
        )

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors made outside as alive."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._track(tensor.untyped_storage())

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        n_bytes = storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            weakref.finalize(storage, self._drop, key)
        if known is None or n_bytes > known:
            self.live_bytes += n_bytes - (known or 0)
            self._alive[key] = n_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._alive.pop(key, 0)

    def _counted(self, given: Any) -> Any:
        """A function under this mode, which no operator that calls it is under; all else as given."""
        if not callable(given):
            return given

        @functools.wraps(given)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return given(*args, **kwargs)

        return run

    def _count(
        self, func: Any, args: Any, kwargs: Any, out: Any, read: list[Tensor], made: list[Tensor]
    ) -> None:
        n_bytes = moved_bytes(func, args, read, made)
        known = flops_of(func, args, kwargs, out)
        flops = known or 0
        if known is None:
            calls, moved = self.uncounted.get(str(func), (0, 0))
            self.uncounted[str(func)] = calls + 1, moved + n_bytes
        dtype = str(made[0].dtype).removeprefix("torch.") if made else ""
        convolved = flops if "convolution" in str(func) else 0
        self.kernels += Kernels(1, flops, n_bytes, n_bytes if flops else 0, dtype, convolved)


class Saved:
    """While active: the storages that autograd keeps for backward, each once.

    ``ignore`` are storages not to count, by identity: those of parameters and buffers.
    """

    def __init__(self, ignore: Iterable[int] = ()):
        self.ignore = frozenset(ignore)
        self.storages: dict[int, int] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Saved]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            yield self

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self.ignore:
            self.storages[storage._cdata] = storage.nbytes()
        return tensor


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage of some tensors, shared ones once; sparse ones have none."""
    held = (t.untyped_storage() for t in tensors if t.layout is torch.strided)
    return {storage._cdata: storage.nbytes() for storage in held}


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists and dicts; sparse ones have no storage and are left out."""
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return [t for t in leaves if t.layout is torch.strided]


_FREE_VIEWS = frozenset({torch.ops.aten.detach.default, unsafe_view})
"""Views that are not declared as such."""

_FREE = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
    }
)
"""Ops that allocate and move no data."""
