"""Modules that code imports while a model is recorded, and that look at torch then: they see it as it is.

What they would see instead is left to ``patches``.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["imported_outside"]


@contextlib.contextmanager
def imported_outside(surroundings: Callable[[], AbstractContextManager[None]], name: str) -> Iterator[None]:
    """Within it the module of this name, if it is imported for the first time, is so in ``surroundings``."""
    if name in sys.modules:
        yield
        return
    finder = _Finder(surroundings, name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and has its code run in some surroundings."""

    def __init__(self, surroundings: Callable[[], AbstractContextManager[None]], name: str) -> None:
        self.surroundings, self.name = surroundings, name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with self.surroundings():
                run(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
