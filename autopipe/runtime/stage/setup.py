"""What a runtime does once: pick a device, put stages there, say who it is to the other ranks.

Connecting to them is left to ``peers``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import accelerator
from ...errors import InputError
from ...graph import Op
from ...plans import Plan
from ...stages import Section, Stage
from ...torch_private import UnseenByFunctions
from ...tracing.calls.functions import storages
from ..options import Autocast, Options
from ..reduce.precision import autocast_context
from .initialise import Unfilled

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = [
    "Generators",
    "card",
    "check_same",
    "exchange",
    "pick_device",
    "place",
    "sections_of",
    "written_buffers",
]


def card(
    capture: Capture, plan: Plan, stages: Sequence[Stage], options: Options, device: torch.device
) -> dict[str, Any]:
    """What every rank must have alike, and (``own``) what only it knows."""
    scaler = options.scaler
    return {
        "the model": capture.ops.digest,
        "the plan": _digest(plan.to_json()),
        "the stages' code": _digest("".join(_words(code) for stage in stages for code in stage.sources)),
        "the schedule": str(options.schedule),
        "n_microbatches": options.n_microbatches,
        "having a loss_fn": options.loss_fn is not None,
        "having a scaler": scaler is not None and getattr(scaler, "is_enabled", lambda: True)(),
        "autocast": _cast(options.autocast, device),
        "loss_reduction": options.loss_reduction,
        "having a loss_weight": options.loss_weight is not None,
        "loss_on": options.loss_on,
        "batch_dims": dict(options.batch_dims or {}),
        "release": options.release,
        "check_finite": options.check_finite,
        "mixed_rows": options.mixed_rows,
        "feed": options.feed,
        "own seed": torch.initial_seed(),
        "own device": accelerator.identity(device),
    }


def _cast(autocast: Autocast, device: torch.device) -> str | None:
    """What forwards are cast to, in words; of a function what the context that it makes now says."""
    if autocast is None or isinstance(autocast, torch.dtype):
        return None if autocast is None else str(autocast)
    with autocast_context(autocast, device)():
        if not torch.is_autocast_enabled(device.type):
            return "a function"
        return f"a function that casts to {torch.get_autocast_dtype(device.type)}"


def _words(code: str) -> str:
    """Code line by line without the order in a line: that of a dict may be the process's own."""
    return "\n".join(" ".join(sorted(re.findall(r"[^\s,;{}()\[\]]+", line))) for line in code.splitlines())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pick_device(
    wanted: torch.device | str | None, stages: Sequence[Stage], is_distributed: bool
) -> torch.device:
    """The device asked for; else the rank's, where the process group carries its tensors; else the model's.

    The rank's accelerator is that of ``LOCAL_RANK``, which becomes the current one, else the current one. It
    is meant, too, where a kind of device is asked for and not which one.
    """
    if wanted is not None:
        given = torch.device(wanted)
        if given.index is not None or not accelerator.is_async(given):
            return given
        own = accelerator.of_rank(carried=False) if is_distributed else None
        return own or accelerator.current()
    own = accelerator.of_rank() if is_distributed else None
    if own is not None:
        return own
    first = next((p for stage in stages for p in stage.parameters()), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def sections_of(stages: Sequence[Stage], options: Options) -> list[Section]:
    """What is run of each stage: all of it, or of the last, before and apart, what takes the whole batch.

    Not apart where that is all that the model does: then nothing is made of microbatches.
    """
    found = [stage.sections[""] for stage in stages]
    last = stages[-1].sections
    is_elsewhere = {*(options.batch_dims or ())} - {"target"}
    if options.mixed_rows == "tail" and "tail" in last and not is_elsewhere:
        apart = [*found[:-1], last["body"], last["tail"]]
        if any(not {*section.outputs}.isdisjoint(last["tail"].inputs) for section in apart[:-1]):
            return apart
    return found


def check_same(capture: Capture, stages: Sequence[Stage]) -> None:
    """Raise :class:`InputError` where the model has other parameters by now than its stages hold.

    What changed inside modules that stages hold whole has changed there too.
    """
    now = dict(capture.model.named_parameters(remove_duplicate=False))
    held = dict(pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False))
    other = [name for name, parameter in held.items() if now.get(name) is not parameter]
    other += [name for name in now if name not in held and name not in capture.ops.parameter]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise InputError(
            f"the model's {', '.join(other[:3])}{more} were put in, or taken out, after it was split, so its "
            "stages would train without; change the model first (adapters, another head), then split it"
        )


def place(
    capture: Capture, own: Sequence[Stage], stages: Sequence[Stage], device: torch.device, release: bool
) -> Unfilled:
    """Put the stages in ``own`` on ``device``; with ``release`` free the weights only others use.

    Parameters and buffers on the meta device get memory there; returned are those, without values as yet.
    """
    filled: dict[int, Tensor] = {}
    unfilled, first = Unfilled(), capture.ops.parameter
    for stage in own:
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            if tensor.is_meta and id(tensor) not in filled:
                filled[id(tensor)] = unfilled.make(
                    first[name].name if name in first else name, tensor, device
                )
    exchange((capture.model, *stages), filled)
    for stage in own:
        stage.to(device)
    if release:
        kept = {id(t) for stage in own for t in (*stage.parameters(), *stage.buffers())}
        others = [t for stage in stages for t in (*stage.parameters(), *stage.buffers()) if id(t) not in kept]
        with UnseenByFunctions():  # those that other ranks train already would answer at length
            for tensor in others:
                tensor.data = tensor.data.new_empty(0)
    return unfilled


def exchange(roots: Iterable[nn.Module], new: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of parameters and buffers, wherever they are held: id of the old → new.

    What shared a tensor before shares the new one.
    """
    held = {id(d): d for root in roots for m in root.modules() for d in (m._parameters, m._buffers)}
    for tensors in held.values() if new else ():
        for name, tensor in tensors.items():
            if id(tensor) in new:
                tensors[name] = new[id(tensor)]  # type: ignore[assignment]


def written_buffers(stage: Stage, ops: Sequence[Op]) -> list[tuple[nn.Module, str]]:
    """The stage's buffers that its forward writes, such as batch-norm statistics: (module, name in it).

    Others in the same memory, as another layer's, are written with them.
    """
    names = {name for op in ops for name in op.mutated_buffers}
    written = frozenset[int]().union(*(storages(b) for name, b in stage.named_buffers() if name in names))
    return [
        (module, name)
        for path, module in stage.named_modules()
        # a registry may be TorchScript's own
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if f"{path}.{name}".lstrip(".") in names or not written.isdisjoint(storages(buffer))
    ]


class Generators:
    """The user's random generators, to be left as they were found; until then they are seeded.

    So what draws beside the model's ops, as a ``loss_fn`` or a hook, has other numbers at each step.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        own = accelerator.default_generator(device)
        kept: list[accelerator.Drawing] = [torch.default_generator]
        kept += [own] if own is not None and own is not torch.default_generator else []
        self._states = [(generator, generator.get_state()) for generator in kept]
        for generator in kept:
            generator.manual_seed(seed)

    def restore(self) -> None:
        """Put them back."""
        for generator, state in self._states:
            generator.set_state(state)
