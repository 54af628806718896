"""Which layer inside of one it is that asks how many rows there are, and all that it does of them.

Where it does the same in another mode, or beside a mask, it need not be run on each number of rows again.
Noticing that code asks is left to ``row_counts``, running it on each number to ``among_many``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...torch_private import CALL_HOOK, Unwatched
from ..calls.functions import tensors
from ..calls.sharing import outline
from ..members import modules_in
from .results import ROUNDED, is_close
from .row_counts import RowCounts, is_looked_into, without_counts

__all__ = ["AskingLayers", "Doing", "ResultsWithin"]

_Within = tuple[str, ...]
"""The paths of the layers that are running, the innermost last."""


class Doing(NamedTuple):
    """What the layer at a ``path`` does, and the ``axis`` along which rows lie in the one tensor it gives."""

    path: str
    axis: int
    done: tuple[Any, ...]


class ResultsWithin:
    """Within it a ``layer`` shows what it gives, with rows along an ``axis``, as what it is in runs."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        self._layer, self._axis, self.last = layer, axis, torch.empty(0, device="cpu")

    def __enter__(self) -> ResultsWithin:
        self._handle = self._layer.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _keep(self, layer: nn.Module, args: Any, result: Any) -> None:
        self.last = result.detach()

    def is_same(self, two: Tensor, n: int) -> bool:
        """Whether the last result was of ``n`` rows what it was of ``two``, in turn."""
        rows = torch.arange(n, device=two.device) % 2
        placed = two.unflatten(self._axis, (2, -1)).index_select(self._axis, rows)
        placed = placed.flatten(self._axis, self._axis + 1)
        return placed.shape == self.last.shape and is_close(placed, self.last, ROUNDED)


class AskingLayers(RowCounts):
    """Within it what the layers inside of a ``layer`` do is noted, as that runs once on ``n`` rows."""

    def __init__(self, n: int, layer: nn.Module) -> None:
        super().__init__(n)
        inner = [(path, module) for path, module in modules_in(layer) if path]
        self._is_told = not any(
            isinstance(m, torch.jit.ScriptModule) or CALL_HOOK in vars(m) for _, m in inner
        )
        self._inner = inner if self._is_told else []
        self._within: _Within = ()
        self._asking: list[_Within] = []
        self._axes: dict[str, int | None] = {}
        self._done: dict[str, list[Any]] = {}
        self._made = WeakTensorKeyDictionary()  # within what each tensor was

    @property
    def doing(self) -> Doing | None:
        """What the innermost layer does in which all is asked; None where that is unknown.

        It is where code asks for the number itself, comes to it by how many tensors there are, reads values,
        or runs a layer twice, where several layers ask, and where anything but one tensor of rows leaves it.
        """
        levels = zip(*self._asking, strict=False)
        inner = [each[0] for each in itertools.takewhile(lambda each: len({*each}) == 1, levels)]
        if not inner or self.reads or not self._is_told or (axis := self._axes.get(inner[-1])) is None:
            return None
        return Doing(inner[-1], axis, tuple(self._done[inner[-1]]))

    def __enter__(self) -> AskingLayers:
        for path, module in self._inner:
            vars(module)[CALL_HOOK] = functools.partial(self._run, path, module)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_told &= error[0] is None
        for _, module in self._inner:
            del vars(module)[CALL_HOOK]

    def ask(self) -> Any:
        """Note that code asks for a number, by which it may do anything."""
        self._is_told = False
        return super().ask()

    def _run(self, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What a layer gives, whose path is among those that are running meanwhile."""
        self._is_told &= path not in self._done
        with Unwatched():
            given = without_counts((args, kwargs))
            done = self._done[path] = [outline(given)]
            self._meet(given)
            before = [(weakref.ref(t), t._version) for t in self._made]
        self._within = (*self._within, path)
        try:
            result = module._call_impl(*args, **kwargs)
        finally:
            self._within = self._within[:-1]
        with Unwatched():
            done.append(outline(without_counts(result)))
            made = (
                result
                if isinstance(result, Tensor) and result.is_floating_point()
                else torch.empty(0, device="cpu")
            )
            axes = [axis for axis, size in enumerate(made.shape) if size and size % self.n == 0]
            self._axes[path] = axes[0] if len(axes) == 1 else None
            self._is_told &= all((t := at()) is None or t._version == version for at, version in before)
            for tensor in tensors(result):
                self._made[tensor] = self._within
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, before, self.asks = without_counts((args, kwargs or {})), self.asks, False
        self._is_told &= is_looked_into(func, types, *given)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except Exception:
            self._is_told = False  # code may go by that
            raise
        if self.asks:
            self._asking.append(self._within)
            self._is_told &= isinstance(result, Tensor)
        self.asks |= before
        self._meet(given)
        made = tensors(result)
        for tensor in made:
            self._made.setdefault(tensor, self._within)
        for path in self._within if made or result is None else ():
            self._done[path].append((func, outline(given), outline(without_counts(result))))
        return result

    def _meet(self, given: Any) -> None:
        """Look at the tensors that something is given: whether a layer made them that has ended."""
        for tensor in tensors(given):
            within = self._made.setdefault(tensor, ())
            self._is_told &= self._within[: len(within)] == within
