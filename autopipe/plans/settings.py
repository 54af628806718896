"""What a plan's settings may be: how it was asked for, as its file has it."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

import msgspec

from ..presets import Offload, Optimizer, Precision
from ..schema import Bytes, Count, Index, Line, Name, Positive, Seconds

__all__ = ["Settings"]


class Settings(TypedDict, total=False):
    """The settings by name; a plan that was made otherwise, or earlier, has some of them."""

    balance: Literal["cost", "parameters", "uniform", "callable"]
    ties: Literal["auto", "sync", "colocate"]
    pin: dict[Name, int]
    together: list[list[Name]]
    uncut: list[Name]
    clone: Literal["auto", "never", "always"]
    sender_pays: Literal["once", "receiver"]
    device_order: Literal["hosts", "given", "auto"]
    recompute: Literal["never", "auto", "always"]
    overlap: bool
    memory_limit: Bytes | str | list[Bytes | str] | None
    optimizer_bytes_per_parameter_byte: Annotated[float, msgspec.Meta(gt=-2, le=1e6)]
    optimizer_s_per_byte: Seconds
    optimizer_s_per_tensor: Seconds
    start_s: Seconds
    jitter_s: Seconds
    alone: Positive
    costs: Line
    costs_of: Line
    dims: dict[Name, Count]
    versions: dict[Name, Line]
    ranks: list[Index]
    steps_by_microbatches: dict[Name, Seconds]
    opened: list[Name]
    opened_from: Line
    uncounted: Line
    precision: Precision | Literal[""]
    optimizer: Optimizer
    offload: Offload
    tail: Line
    loss_on: Literal["batch"]
