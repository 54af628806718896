"""Weights that a model's own ``train()`` writes to, as layers that merge adapters do: told ahead of that.

Keeping what they hold and putting it back is left to ``state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...torch_private import TorchDispatchMode, pytree

__all__ = ["BeforeWrites"]


class BeforeWrites(TorchDispatchMode):
    """Inside, ``keep`` is given each of the ``weights`` with its name and content ahead of its first write.

    Of one that has got other memory, at the end, with what it held before.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], keep: Callable[[str, Tensor, Tensor], None]
    ) -> None:
        super().__init__()
        self._keep = keep
        self._left = {name: (weight, weight.detach()) for name, weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            given = pytree.tree_leaves((args, kwargs))
            written = {_place(leaf) for leaf in given if isinstance(leaf, Tensor)}
            self._tell(name for name, (_, held) in self._left.items() if _place(held) in written)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tell(name for name, (weight, held) in self._left.items() if _place(weight) != _place(held))

    def _tell(self, names: Iterator[str]) -> None:
        for name in [*names]:
            self._keep(name, *self._left.pop(name))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
