"""Reads of values where no function mode looks: in kernels of operators, and in threads that code starts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["UnseenReads"]

_READS = (
    "__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "item", "numpy", "tolist",
)  # fmt: skip
"""Methods of tensors that give Python what they hold."""


class UnseenReads:
    """Within it ``tell()`` is called at each read that this thread makes :attr:`inside`, or others make.

    It may be entered once. Methods of torch's tensors are others meanwhile, in all threads.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell, self._owner = tell, threading.get_ident()
        self.inside = False
        self._own: dict[str, Any] = {}

    def __enter__(self) -> UnseenReads:
        for name in _READS:
            if name in vars(torch.Tensor):
                self._own[name] = vars(torch.Tensor)[name]
            setattr(torch.Tensor, name, self._told(getattr(torch.Tensor, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for name in _READS:
            if name in self._own:
                setattr(torch.Tensor, name, self._own[name])
            else:
                delattr(torch.Tensor, name)

    def _told(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            if self.inside or threading.get_ident() != self._owner:
                self._tell()
            return original(*args, **kwargs)

        return read
