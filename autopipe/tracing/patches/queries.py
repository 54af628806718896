"""Questions of a model's code to torch and to the process, noted, since their answers may change.

Holding them against later answers is left to ``assumptions``, putting the patches on to ``patches``.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from ..record.recorder import Recorder
from .route import Route

__all__ = ["ASKED"]

Maker = Callable[[Route, Any], Any]


def _is_grad_enabled(route: Route, original: Any) -> Any:
    def is_grad_enabled() -> bool:
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            recorder.reads.asks_for_grad_mode()
        return bool(original())

    return is_grad_enabled


def _cast(route: Route, original: Any) -> Any:
    """A question about autocast."""

    def ask(*args: Any) -> Any:
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            recorder.reads.dtypes = True
        return original(*args)

    return ask


def _asked(name: str) -> Maker:
    """A question to torch or to the process, whose answer is watched from then on."""

    def make(route: Route, original: Any) -> Any:
        def ask(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            recorder = route.active
            if recorder is not None and recorder.at.is_own_code():
                shown = f"{name}({', '.join(map(repr, args))})"
                recorder.reads.flags[shown] = functools.partial(original, *args, **kwargs), result
            return result

        return ask

    return make


def _flag(route: Route, original: Any) -> Any:
    """A flag of torch's backends is being read, as ``torch.backends.cudnn.benchmark``."""

    def __get__(self: Any, owner: Any, kind: Any = None) -> Any:
        result = original(self, owner, kind)
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            name = next((n for n, flag in vars(type(owner)).items() if flag is self), "flag")
            recorder.reads.flags[f"{owner.__name__}.{name}"] = self.getter, result
        return result

    return __get__


def _matmul_flag(route: Route, original: Any) -> Any:
    """A flag of cuBLAS is being read, as ``torch.backends.cuda.matmul.allow_tf32``."""

    def __getattr__(self: Any, name: str) -> Any:
        result = original(self, name)
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            read = functools.partial(original, self, name)
            recorder.reads.flags[f"torch.backends.cuda.matmul.{name}"] = read, result
        return result

    return __getattr__


def _variable(route: Route, original: Any) -> Any:
    """An environment variable is being read, whether it is set or not."""

    def __getitem__(self: Any, key: str) -> Any:
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            read = functools.partial(os.environ.get, key)
            with recorder.at.hushed:
                recorder.reads.flags[f"the environment variable {key}"] = read, read()
        return original(self, key)

    return __getitem__


def _opened(route: Route, original: Any) -> Any:
    """A file is being opened: what is read of it is watched, what is written each call must write."""

    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None or isinstance(file, int) or not recorder.at.is_own_code():
            return original(file, mode, *args, **kwargs)
        path = os.fspath(file)
        _watch(recorder, path)
        if set(mode) & _WRITING:
            why = f"{recorder.at.source()}: a forward writes to the file {os.fsdecode(path)}"
            recorder.at.keep_whole(why, recorder.at.running())
        return original(file, mode, *args, **kwargs)

    return open


def _looked_at(route: Route, original: Any) -> Any:
    """A file is asked for: whether it is there, how large, how old."""

    def stat(path: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is not None and not isinstance(path, int) and recorder.at.is_own_code():
            _watch(recorder, os.fspath(path))
        return original(path, **kwargs)

    return stat


def _watch(recorder: Recorder, path: str | bytes) -> None:
    """Hold what is there now against what is there later."""
    with recorder.at.hushed:
        read = functools.partial(_stamp, path)
        recorder.reads.flags[f"the file {os.fsdecode(path)}"] = read, read()


_stat = os.stat


def _stamp(path: str | bytes) -> tuple[int, int] | None:
    """By what a file's content is told from another: its size and when it was written; None if it is not."""
    try:
        found = _stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


_WRITING = frozenset("wax+")
_CASTS = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled")
_FLAGS = (
    "get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_float32_matmul_precision", "is_anomaly_enabled",
    "is_inference_mode_enabled", "get_num_threads", "initial_seed",
)  # fmt: skip
_BACKENDS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_PROCESS_GROUPS = ("is_initialized",) if torch.distributed.is_available() else ()
ASKED: tuple[tuple[Any, str, Maker], ...] = (
    (torch, "is_grad_enabled", _is_grad_enabled),
    *((torch, name, _cast) for name in _CASTS),
    *((torch, name, _asked(f"torch.{name}")) for name in _FLAGS),
    *((torch.backends.cuda, name, _asked(f"torch.backends.cuda.{name}")) for name in _BACKENDS),
    *((torch.distributed, name, _asked(f"torch.distributed.{name}")) for name in _PROCESS_GROUPS),
    (torch.backends.ContextProp, "__get__", _flag),
    (type(torch.backends.cuda.matmul), "__getattr__", _matmul_flag),
    (type(os.environ), "__getitem__", _variable),
    (builtins, "open", _opened),
    (io, "open", _opened),
    (os, "stat", _looked_at),
)
"""(owner, name, what makes of a route and the original what stands there) of each question."""
