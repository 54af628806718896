"""What a runtime is told to do, once and at each call.

All are documented where users meet them, in ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import accelerator
from ..arguments import brief, called, flag, mapping, number, one_of, whole
from ..errors import InputError
from ..schedule import NAMES, Schedule

__all__ = ["Autocast", "Init", "LossOn", "LossWeight", "Options", "Progress", "Request", "Where", "is_due"]

Autocast = torch.dtype | Callable[[], contextlib.AbstractContextManager[Any]] | None
"""The dtype that forward and loss run in, or what makes the context they run in."""
Init = Callable[[nn.Module, str], object]
"""``init(module, path)`` fills the parameters and buffers that a module itself holds."""
LossWeight = Callable[[tuple[Any, ...], dict[str, Any], Any], float]
"""``loss_weight(args, kwargs, target)`` of one microbatch; only ratios matter."""

LossOn = Literal["batch", "microbatches"]
"""What a ``loss_fn`` is called with: all microbatches at once, or each."""
Where = Literal["last", "all"]

MOST_MICROBATCHES = 2**16


def is_due(n_done: int) -> bool:
    """Whether what is looked at now and then is looked at after so many calls: 0, 1, 2, 4, 8 and so on."""
    return n_done & (n_done - 1) == 0


@dataclasses.dataclass
class Progress:
    """How many steps a model has made, and calls with and without gradients, whichever runtime made them.

    ``n_steps`` are as users count them, several batches that one call accumulates being one. Random streams
    go by the calls, of which each batch is one. ``saves`` are the folders of rows that it made, or found when
    it went on from one of them.
    """

    n_steps: int = 0
    n_backwards: int = 0
    n_forwards: int = 0
    saves: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call: the batch, in how many microbatches other than the options', and what is to be made of it.

    ``grad``: backward too. ``outputs``: whether and where they are wanted. ``loss``: whether that is.
    ``like_step``: with the random numbers of the next step.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    n_microbatches: int | None = None
    grad: bool = False
    outputs: bool | Where = False
    loss: bool = True
    like_step: bool = False

    def check(self) -> None:
        """Raise :class:`InputError` for what no call can be."""
        if self.grad and not torch.is_grad_enabled():
            raise InputError(
                "step() makes gradients, but they are off here (torch.no_grad or inference_mode); call it "
                "outside, or evaluate() for the loss alone"
            )
        if self.n_microbatches is not None:
            n = whole("n_microbatches", self.n_microbatches, most=MOST_MICROBATCHES, also="None")
            object.__setattr__(self, "n_microbatches", n)
        flag("like_step", self.like_step)
        if not isinstance(self.outputs, bool):
            one_of("return_outputs" if self.loss else "outputs_on", self.outputs, get_args(Where))

    @property
    def outputs_on(self) -> Literal["", "last", "all"]:
        """The ranks that are to have the outputs; none as a rule."""
        return self.outputs if isinstance(self.outputs, str) else "all" if self.outputs else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`Runtime`, which documents them."""

    loss_fn: Callable[[Any, Any], Tensor] | None = None
    n_microbatches: int = 1
    schedule: str | Schedule | None = None
    device: torch.device | str | None = None
    mesh: DeviceMesh | None = None
    autocast: Autocast = None
    scaler: Any = None
    loss_reduction: Literal["mean", "sum"] | None = None
    loss_weight: LossWeight | None = None
    loss_on: LossOn | None = None
    release: bool = False
    batch_dims: Mapping[str, int | None] | None = None
    stall_limit_s: float | None = None
    check_finite: bool = True
    feed: int | None = None
    mixed_rows: Literal["tail", "refuse", "allow"] = "tail"
    weights: str | pathlib.Path | Init | None = None

    @property
    def has_replicas(self) -> bool:
        """Whether the mesh has dims beside the pipeline's, along which others train on other batches."""
        return self.mesh is not None and self.mesh.ndim > 1

    def __post_init__(self) -> None:
        n = whole("n_microbatches", self.n_microbatches, most=MOST_MICROBATCHES)
        # as Python's own: numpy's multiply tuples in their own way, and messages have no tensors
        object.__setattr__(self, "n_microbatches", n)
        flag("release", self.release)
        flag("check_finite", self.check_finite)
        one_of("mixed_rows", self.mixed_rows, ("tail", "refuse", "allow"))
        if isinstance(self.schedule, str) or not isinstance(self.schedule, (Schedule, type(None))):
            one_of("schedule", self.schedule, NAMES)
        if self.loss_fn is not None:
            called("loss_fn", self.loss_fn, "a function of (output, target)")
            if isinstance(self.loss_fn, type) and issubclass(self.loss_fn, nn.Module):
                name = self.loss_fn.__name__
                raise InputError(f"loss_fn is the class {name}; give what it makes, such as {name}()")
        if self.loss_weight is not None:
            called("loss_weight", self.loss_weight, "a function of (args, kwargs, target)")
        if self.loss_reduction is not None:
            one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        if self.loss_on is not None:
            one_of("loss_on", self.loss_on, get_args(LossOn))
            if self.loss_fn is None:
                raise InputError(
                    f"loss_on is {self.loss_on!r}, but there is no loss_fn; a loss that the model makes "
                    "itself runs on the whole batch where capture finds that it compares rows"
                )
        if self.stall_limit_s is not None:
            limit_s = number("stall_limit_s", self.stall_limit_s, above=True, most=1e9, unit="seconds")
            object.__setattr__(self, "stall_limit_s", limit_s)
        if not isinstance(self.weights, (str, pathlib.Path, type(None))):
            called("weights", self.weights, "a checkpoint, or a function of (module, path)")
        if self.feed is not None:
            object.__setattr__(self, "feed", whole("feed", self.feed, 0, also="None"))
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype):
            called("autocast", self.autocast, "a dtype or a function that makes a context")
        if not isinstance(self.mesh, (DeviceMesh, type(None))):
            raise InputError(f"mesh is {brief(self.mesh)}; it must be a DeviceMesh with a 'pp' dim")
        try:
            _look_for(torch.device("cpu" if self.device is None else self.device))
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
            why = str(error).partition("\n")[0]
            raise InputError(
                f"device is {brief(self.device)}; it must be a torch device that is here: {why}"
            ) from error
        if self.scaler is not None and not hasattr(self.scaler, "scale"):
            raise InputError(f"scaler is {brief(self.scaler)}; it must be a GradScaler")
        axes = {} if self.batch_dims is None else self.batch_dims
        for name, axis in mapping("batch_dims", axes, "a dict of input name to axis or None").items():
            if axis is not None:
                whole(f"batch_dims[{name!r}]", axis, -64, 64, also="None")


def _look_for(device: torch.device) -> None:
    """Raise where a device is not here. One without an index is not opened: it may be another rank's."""
    if device.type == "meta":
        raise ValueError("what is there has no values")
    if device.index is not None or device.type != accelerator.current().type:
        torch.empty(0, device=device)
