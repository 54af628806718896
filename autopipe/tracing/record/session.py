"""Records a model in both modes under one leaf policy, which it adjusts to what the model's Python does.

One run is left to ``recorder``, tying the two recordings together to ``modes``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError, ModelError
from ..calls.call import Recording
from ..inputs.arguments import Inputs
from ..inputs.structure import flatten, unflatten
from . import opaque, patches
from .leaves import Policy
from .recorder import Recorder
from .restart import CloseModule, Function, KeepFunction, Method, OpenLeaf, WatchLeaves
from .state import Snapshot, seed, switch

__all__ = ["Refused", "Session", "close_to", "device_of"]

_MOST_TRIES = 100
_logger = logging.getLogger("autopipe")


class Refused(ModelError):
    """The model itself fails on the example in one mode; the other mode may still work."""


class Session:
    """The runs that one capture takes. The model is left to ``snapshot`` to put back."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy,
        snapshot: Snapshot,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.policy, self.snapshot = policy, snapshot
        self.names = {id(t): n for n, t in reversed([*model.named_parameters(), *model.named_buffers()])}
        self.paths = {id(m): n for n, m in model.named_modules()}
        self.device = device_of(model, args, kwargs)
        self.known = frozenset(map(id, snapshot.tensors_held()))
        self.tried: set[tuple[str, bool]] = set()
        self.functions: dict[Function | Method, None] = {}
        self.route = patches.Route()

    def forms(self) -> dict[bool, Recording]:
        """A recording in each mode; what must stay whole or be opened is found by trying.

        Raises :class:`CaptureError` where it cannot be recorded, :class:`ModelError` where it cannot be run.
        """
        with patches.applied(self.model.modules()) as self.route:
            return self.found()

    def found(self) -> dict[bool, Recording]:
        """See :meth:`forms`."""
        for _ in range(_MOST_TRIES):
            try:
                evaluation = self.record(training=False)
                forms = {True: self.training_form(evaluation), False: evaluation}
            except (CloseModule, OpenLeaf) as restart:
                self.adjust(restart)
                continue
            except KeepFunction as found:
                self.functions[found.function] = None
                continue
            leaf = self.policy.to_open([c.target for c in forms[True].calls if c.op == "call_module"])
            if leaf is None or (leaf, False) in self.tried:
                return forms
            self.tried.add((leaf, False))
            self.policy = self.policy.with_opened([leaf])
        raise CaptureError(f"{type(self.model).__name__}: no set of leaves found in {_MOST_TRIES} recordings")

    def training_form(self, evaluation: Recording) -> Recording:
        """The recording in training mode; that of evaluation where the model refuses to train so."""
        try:
            return self.record(training=True)
        except Refused as error:
            _logger.warning("%s; its training form is taken to be its evaluation form", error)
            return evaluation

    def adjust(self, restart: CloseModule | OpenLeaf) -> None:
        """Keep a module whole, or open a leaf, because Python did what a graph cannot."""
        path, name = restart.path, type(self.model).__name__
        if not path:
            raise CaptureError(
                f"{name} cannot be captured: {restart.why}; move that code into a submodule, which is then "
                f"kept whole, or out of the model"
            ) from None
        close = isinstance(restart, CloseModule)
        if (path, close) in self.tried or (not close and not self.policy.is_openable(path)):
            parent = path.rpartition(".")[0]
            self.adjust(CloseModule(parent, restart.why))
            return
        self.tried.add((path, close))
        if close:
            self.policy = self.policy.with_closed({path, *self.policy.like(path)})
        else:
            self.policy = self.policy.with_opened([path])

    # ---------------------------------------------------------------- one run

    def record(self, training: bool) -> Recording:
        """One recording; the model starts in the state it was given in."""
        for watch in (False, True):
            self.start(training)
            args, kwargs = fresh((self.args, self.kwargs), self.device)
            recorder = Recorder(
                self.names, self.paths, self.known, self.device, self.policy.is_leaf, training, watch
            )
            try:
                with (
                    self.route.to(recorder),
                    opaque.replaced(self.functions, self.model, recorder.kept_function, recorder.kept_method),
                    opaque.drawing(recorder.outside_draw),
                ):
                    recording = recorder.run(self.model, args, kwargs, Inputs.of(self.model, args, kwargs)[1])
            except WatchLeaves:
                continue
            except (CaptureError, ModelError):
                raise
            except Exception as error:
                self.explain(error, recorder.failed, training)
            self.check_state(training)
            return recording
        raise AssertionError("a watched recording suspects nothing")

    def start(self, training: bool) -> None:
        self.snapshot.restore()
        if self.model.training != training:
            switch(self.model, training)

    def run(self, training: bool) -> Any:
        """The model's own result, not recorded, from the state it is in."""
        args, kwargs = fresh((self.args, self.kwargs), self.device)
        seed(self.device)
        with self.route.suspended():
            return self.model(*args, **kwargs)

    def explain(self, error: Exception, failed: str | None, training: bool) -> None:
        """A run raised: is it the model's own error, or something that recording brought about?"""
        name = type(self.model).__name__
        self.start(training)
        try:
            self.run(training)
        except Exception as own:
            mode = "training" if training else "evaluation"
            said = f"{name}'s own forward fails in {mode} mode on the example arguments: {_short(own)}"
            raise Refused(f"{said}; pass args and kwargs it can run on") from own
        if failed:
            raise CloseModule(failed, f"recording inside {failed} fails: {_short(error)}") from error
        raise CaptureError(
            f"{name} runs, but cannot be recorded: {_short(error)} (at {_place(error)}); move that code "
            f"into a submodule, which is then kept whole"
        ) from error

    def check_state(self, training: bool) -> None:
        """Python state that an open module changes must not matter to the next call."""
        changed = [(p, a) for p, a in self.snapshot.changes() if p == "" or not self.inside_leaf(p)]
        if not changed:
            return
        path, attribute = next(((p, a) for p, a in changed if a == "_buffers"), changed[0])
        shown = f"{path or type(self.model).__name__}.{attribute}"
        if attribute == "_buffers":
            raise CloseModule(path, f"a forward replaces a buffer of {path or 'the model itself'}")
        self.start(training)
        first, second = (flatten(self.run(training))[0] for _ in range(2))
        if len(first) != len(second) or not all(map(close_to, first, second)):
            raise CloseModule(path, f"a forward changes {shown}, and the next call's result depends on it")

    def inside_leaf(self, path: str) -> bool:
        names = path.split(".")
        return any(self.policy.is_leaf(".".join(names[: i + 1])) for i in range(len(names)))


def device_of(model: nn.Module, *given: Any) -> torch.device:
    """Where the model is: its first parameter or buffer, else the first tensor in what it is given."""
    held: torch.Tensor | None = next(model.parameters(), None)
    held = next(model.buffers(), None) if held is None else held
    tensors = (v for v in flatten(given)[0] if isinstance(v, torch.Tensor))
    held = next(tensors, None) if held is None else held
    return torch.device("cpu") if held is None else held.device


def fresh(value: Any, device: torch.device) -> Any:
    """The same structure with each tensor a copy of its own, on meta for a meta model.

    A tensor given twice becomes two; the caller's are safe from in-place writes.
    """
    leaves, spec = flatten(value)
    return unflatten(spec, [_copy(v, device) if isinstance(v, torch.Tensor) else v for v in leaves])


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = tensor.detach().to("meta") if device.type == "meta" else tensor.detach()
    return new.clone().requires_grad_(tensor.requires_grad)


def close_to(a: Any, b: Any) -> bool:
    """Equal up to rounding; values that are no tensors count as equal."""
    if not isinstance(a, torch.Tensor):
        return True
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta or torch.equal(a, b):
        return True
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    scale = a.abs()[a.isfinite()].max().item() if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _short(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    place = "unknown place"
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
