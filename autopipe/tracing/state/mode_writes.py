"""Weights that code out of sight writes to, a model's own ``train()`` or a layer run whole: told ahead.

Keeping what they hold and putting it back is left to ``state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...torch_private import HiddenMode, TorchDispatchMode, pytree
from ..calls.functions import HANDING, storages

__all__ = ["BeforeWrites"]


class BeforeWrites(TorchDispatchMode):
    """Inside, ``keep`` is given each of the ``weights`` with its name and content ahead of its first write.

    And ahead of where its memory is handed to code outside of torch, such as numpy, which may write to it. Of
    one that has got other memory, at the end, with what it held before.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], keep: Callable[[str, Tensor, Tensor], None]
    ) -> None:
        super().__init__()
        self._keep = keep
        self._left = {name: (weight, weight.detach()) for name, weight in weights}
        self._handing = _Handing(self._tell_of)

    def __enter__(self) -> Any:
        self._handing.__enter__()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            given = pytree.tree_leaves((args, kwargs))
            self._tell_of([leaf for leaf in given if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._handing.__exit__(*error)
        self._tell(name for name, (weight, held) in self._left.items() if storages(weight) != storages(held))

    def _tell_of(self, tensors: Iterable[Tensor]) -> None:
        places = frozenset[int]().union(*map(storages, tensors))
        self._tell(name for name, (_, held) in self._left.items() if storages(held) & places)

    def _tell(self, names: Iterator[str]) -> None:
        for name in [*names]:
            self._keep(name, *self._left.pop(name))


class _Handing(HiddenMode):
    """Inside, ``tell`` is given the tensors whose memory is about to be handed out of torch."""

    def __init__(self, tell: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HANDING:
            self._tell(args[:1])
        return func(*args, **(kwargs or {}))
