"""Where the model's own code is while it is recorded: in which module, at which line, and whether to record.

What the values there are is left to ``ledger``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import sys
import threading
import types
from collections.abc import Collection, Iterator, Mapping
from typing import NoReturn

import torch
from torch import nn

from ..calls.call import Depends
from . import checks, messages, opaque, statements
from .kept import NamesRead, kept_in
from .leaves import Policy
from .restart import CloseModule, Function, KeepFunction, Method, Statement

__all__ = ["Depth", "Position"]

_SKIPPED = (
    f"{pathlib.Path(__file__).parents[1]}{os.sep}",
    f"{pathlib.Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
    random.__file__,
)
_OUTSIDE = tuple(f"{pathlib.Path(__file__).parents[2] / room}{os.sep}" for room in ("api", "runtime"))
"""What has a model run: code behind it is none of the model's."""
_IMPORTING = "<frozen importlib"
"""Where Python's own code is that imports."""
_LAYERS = (f"{_SKIPPED[1]}nn{os.sep}", f"{_SKIPPED[1]}autograd{os.sep}functional.py")
"""Torch's own code that does as a model's would."""


class Depth:
    """How many ``with`` blocks on it are running."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *error: object) -> None:
        self.count -= 1


class Position:
    """The stack of open modules whose forward runs, and whether calls are recorded there.

    ``modules`` maps ids of the model's modules to paths; ``policy`` decides by path which stay whole. Where
    it ``is_coarse``, functions that something holds may stay whole too; statements of the modules that are
    ``taken_apart`` may.
    """

    def __init__(self, modules: Mapping[int, str], policy: Policy) -> None:
        self.modules, self.is_leaf, self.is_in_leaf = modules, policy.is_leaf, policy.is_inside_leaf
        self.stack: list[str] = []
        self.hushed, self.is_coarse = Depth(), False
        self.taken_apart: Collection[str] = {""}
        self.thread = threading.get_ident()

    @property
    def is_recorded(self) -> bool:
        """Whether calls are to be recorded now: not inside a leaf or torch function, nor on other threads."""
        return not self.hushed.count and threading.get_ident() == self.thread

    @property
    def path(self) -> str:
        """The path of the module whose forward is running."""
        return self.stack[-1] if self.stack else ""

    def source(self) -> str:
        """``file:line`` of the innermost frame of the model's code; of torch's layers where it has none."""
        frame: types.FrameType | None = sys._getframe(1)
        layer = ""
        while frame is not None and not (file := frame.f_code.co_filename).startswith(_OUTSIDE):
            if not file.startswith(_SKIPPED):
                return f"{file}:{frame.f_lineno}"
            if not layer and frame.f_code.co_name == "forward" and file.startswith(_LAYERS):
                layer = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return layer

    def is_own_code(self) -> bool:
        """Whether the code that runs now is the model's, or that of torch's layers: no other of torch's."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED[0]):
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        return not file.startswith(_SKIPPED[1]) or file.startswith(_LAYERS)

    def lines(self) -> Iterator[str]:
        """``file:line`` of those frames."""
        return (f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in self._frames())

    def _frames(self) -> Iterator[types.FrameType]:
        """The frames that are not ours, innermost first, up to a module's ``forward``."""
        frame: types.FrameType | None = sys._getframe(1)
        name = ""
        while frame is not None and name not in ("forward", "_call_impl"):
            if not frame.f_code.co_filename.startswith(_SKIPPED[0]):
                name = frame.f_code.co_name
                yield frame
            frame = frame.f_back

    def is_of_tools(self) -> bool:
        """Whether what runs now is imported, or torch's own, such as names of what it compiles: done once."""
        frames = [*self._frames()]
        if any(frame.f_code.co_filename.startswith(_IMPORTING) for frame in frames):
            return True
        files = (f.f_code.co_filename for f in frames if not _is_of_python(f))
        file = next(files, "")
        return file.startswith(_SKIPPED[1]) and not file.startswith(_LAYERS)

    def is_said(self) -> bool:
        """Whether the text that is being made only tells people: of an error, a warning, a log."""
        return any(map(messages.is_said, self._frames()))

    def is_told(self) -> bool:
        """Whether what is being computed only tells people, and that at once."""
        return any(map(messages.is_told, self._frames()))

    def keeps(self, read: NamesRead) -> str:
        """The attribute, by path, into which alone goes what is being computed, and which nothing reads."""
        return next(filter(None, (kept_in(frame, self.modules, read) for frame in self._frames())), "")

    def is_check(self, source: str) -> bool:
        """Whether a truth is asked for only to raise where it does not hold, by the model or by torch."""
        if checks.is_check(source):
            return True
        asking = next((line for line in self.lines() if not checks.hands_on(line)), "")
        return checks.is_check(asking)

    def refuse(self, depends: int, what: str, source: str) -> NoReturn:
        """Stop recording: Python reads ``what``, a value that can differ next time."""
        shown = {
            Depends.INPUT: "input data",
            Depends.RANDOM: "a random draw",
            Depends.STATE: "a parameter or buffer",
        }
        cause = " and ".join(text for flag, text in shown.items() if depends & flag) or "data"
        place = f"{source or 'unknown place'} (in {self.path or 'the model itself'})"
        why = f"{place}: Python reads the value of {what}, which depends on {cause}"
        self.keep_whole(why, self.running())

    def running(self) -> Function | Method | Statement | None:
        """The function that runs now, or else the statement of a forward that is taken apart."""
        function, path = self.innermost(), self.path
        if function is not None or path not in self.taken_apart:
            return function
        return statements.running(lambda module: self.modules.get(id(module)) == path, path)

    def innermost(self) -> Function | Method | None:
        """The plain function or method that runs now and may stay whole."""
        return opaque.innermost(self.divisible, self.holds, is_held=self.is_coarse)

    def keep_whole(self, why: str, function: Function | Method | Statement | None = None) -> NoReturn:
        """Start again with a function kept whole, that which runs now if no other, or else the module."""
        function = function or self.innermost()
        if function is not None:
            raise KeepFunction(function, self.path, why)
        raise CloseModule(self.path, why)

    def refuse_nested(self) -> NoReturn:
        """Stop recording: the code makes a nested tensor."""
        self.keep_whole(
            f"{self.source()}: makes a nested tensor, whose sizes a graph does not know; fill its rows up to "
            "one length"
        )

    def refuse_masked(self) -> NoReturn:
        """Stop recording: the code makes a masked tensor."""
        self.keep_whole(
            f"{self.source()}: makes a masked tensor, which tells torch neither values nor mask; compute "
            "with both as tensors of their own, as functions of torch.masked do"
        )

    def keep_maker(self) -> None:
        """Code runs that other code has made for sizes it settled on: what the model calls stays whole."""
        function = opaque.outermost(self.holds)
        if function is not None:
            raise KeepFunction(function, self.path, f"{self.source()}: code runs that was made for sizes")

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is one of the model's."""
        return id(module) in self.modules

    def divisible(self, module: nn.Module) -> str | None:
        """The path of the root, or an open module with open ones inside; None of what may stay whole.

        A module whose forward does not run now can be kept whole only method by method.
        """
        path = self.modules.get(id(module))
        if path is None or path not in self.stack:
            return path
        inside = (self.modules.get(id(m), "") for m in module.modules() if m is not module)
        return path if path == "" or any(p and not self.is_leaf(p) for p in inside) else None


def _is_of_python(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names
