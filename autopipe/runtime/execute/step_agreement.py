"""What ranks agree on before a step: that it is the same, of one batch, with messages of like shapes.

Carrying that between them is left to ``peers``, the books of shapes to ``boundary``.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ...errors import AutopipeError, InputError
from ...torch_private import UnseenByFunctions
from ..data.microbatch import AT_A_GLANCE, LOOKED_AT, Batch
from ..options import is_due
from ..stage.worker import StepInputs
from ..wire.channel import Channel
from ..wire.peers import Peers

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["StepAgreement", "Traits"]

T = TypeVar("T")

FROZEN = "frozen parameters"
ALIKE = (
    "rows",
    "n_microbatches",
    "inputs",
    "mode (train or eval)",
    "call (step or evaluate)",
    "no_sync",
    "inputs that require a gradient",
    "factor of gradients",
    "scale of the scaler",
    "call (with or without a loss)",
    "return_outputs",
    "autocast",
    "default dtype",
    FROZEN,
    "ways through the model",
    "calls of load_state_dict",
)
"""What of a step is to be alike on every rank, beside its batch's values and the random seed."""


class Traits:
    """Bits: what a rank may have of a step that others are to know of, though they need not have it too.

    Above them are those of ``option_changes``.
    """

    HOOKS = 1
    """Hooks of the user's that backward calls, which may fail when the others are done."""
    AVERAGES = 2
    """A stage whose gradients replicas average."""
    HOLDS = 4
    """Gradients of earlier steps, maybe, of which one was not finite."""
    HOOKED_TIES = 8
    """Hooks of the user's on gradients that several ranks sum, which are called with the sum."""
    WRITTEN = 16
    """Buffers or weights that user code wrote to, which others are to have written to as well."""
    STEPPED = 32
    """Weights that were changed since the last step that made gradients of them, as an optimizer does."""
    ON_BATCH = 64
    """A ``loss_fn`` that was found to take the whole batch."""
    KEPT = 128
    """Gradients of the last step that are still there, as where they are to add up."""
    FREED = 256
    """Gradients of the last step that are gone, as after ``zero_grad``."""
    ASKS = 512
    """Labels of a batch by which a ``loss_fn`` is to be asked whether it does."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Said:
    """What ranks say of a step beside its number, seed and batch, and the signatures of its microbatches.

    ``key`` is all that it follows from. ``marks`` has a number for each thing that is to be alike.
    """

    key: tuple[Any, ...] = ()
    words: str = ""
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    signatures: Sequence[int] = ()


class StepAgreement:
    """Makes every rank begin the same step, or every rank raise."""

    def __init__(
        self,
        capture: Capture,
        peers: Peers,
        channel: Channel,
        parameters: Sequence[nn.Parameter],
        is_fed: bool,
        device: torch.device,
    ) -> None:
        """``parameters`` are those that are to be frozen or trained alike; ``device`` is where stages run."""
        self._capture, self._model = capture, capture.model
        self._peers, self._channel, self._is_fed = peers, channel, is_fed
        self._device = device.type
        self._forms: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self._parameters = tuple(parameters)
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._said = _Said()

    def begin(self, step: StepInputs, factor: float, n_loads: int, traits: int) -> tuple[float, bool, int]:
        """Agree on a step.

        ``n_loads``: how many calls of ``load_state_dict`` have reached several ranks' weights. Returns the
        seconds waited for another rank, whether a closer look is due, and the traits of any rank.
        """
        batch, position = step.batch, self._peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        position.is_idle = False
        said = self._say(step, factor, n_loads)
        looks = is_due(position.step - 1)
        # what is on the device is looked at while that still warms up
        looks_at_batch = not self._is_fed and (batch.is_on_host or (looks and position.step <= 2))
        most = LOOKED_AT if looks else AT_A_GLANCE
        checksum = batch.checksum(most, position.step) if looks_at_batch else 0
        marks = {**said.marks, "random seed": zlib.crc32(str(step.seed).encode())}
        waited_s, told = self._peers.agree(position.step, said.words, marks, checksum, traits)
        self._channel.signatures = said.signatures
        return waited_s, looks, self._peers.union(traits | told, n_known=2)

    def call(self, name: str, look: Callable[[], T], show: Callable[[T], str]) -> T:
        """What ``look`` makes of the arguments of a call that all ranks make: see :meth:`Engine.called`."""
        found: list[T] = []
        error: Exception | None = None
        try:
            found.append(look())
        except Exception as refusal:  # arguments are any Python
            error = refusal
        is_ours = isinstance(error, (AutopipeError, type(None)))
        fault = str(error or "") if is_ours else f"{type(error).__name__}: {error}"
        with self._peers.together(f"the call of {name}", waits=True):
            why = self._peers.meet(name, "".join(map(show, found)), fault, n_marks=len(ALIKE) + 1)
        if why:
            raise error or InputError(why)
        return found[0]

    def refuse(self, error: Exception) -> NoReturn:
        """Raise ``error``, which keeps this rank from beginning a step: see :meth:`Peers.refuse`."""
        position = self._peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        self._peers.refuse(position.step, error, n_marks=len(ALIKE) + 1)

    def _say(self, step: StepInputs, factor: float, n_loads: int) -> _Said:
        """What is to be said of a step; made anew where it is not what was said of the last one."""
        batch, training = step.batch, self._model.training
        with UnseenByFunctions():  # other ranks' weights would each answer at length
            flags = tuple([p.requires_grad for p in self._parameters])
        mode = step.grad, training, flags, step.tracked
        cut = batch.rows, batch.forms, tuple(map(tuple, batch.packed.values()))
        asked = step.syncs, factor, step.scale, step.want_loss, step.outputs_on, n_loads
        cast = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        around = cast, torch.get_default_dtype()
        key = mode, asked, around, cut, batch.signature(0)
        if key == self._said.key:
            return self._said
        said = dict(
            zip(
                ALIKE,
                (
                    f"{sum(batch.rows)} rows",
                    f"in {batch.n_microbatches} microbatches",
                    f"of {_shapes(batch)},",
                    f"training={training},",
                    f"gradients={step.grad},",
                    f"sync={step.syncs},",
                    f"inputs' gradients={sorted(step.tracked)},",
                    f"times={factor:.12g},",
                    f"scale={step.scale:.12g}," if step.scale != 1.0 else "",
                    f"loss={step.want_loss},",
                    f"outputs={step.outputs_on or None},",
                    f"autocast to {cast}," if cast else "",
                    f"default dtype {around[1]}," if around[1] is not torch.float32 else "",
                    f"trained={sum(flags)} of {len(flags)}",
                    self._ways(batch.forms),
                    f"after {n_loads} load_state_dict" if n_loads else "",
                ),
                strict=True,
            )
        )
        marks = {name: zlib.crc32(text.encode()) for name, text in {**said, FROZEN: str(flags)}.items()}
        words = " ".join(filter(None, ["with", *said.values()]))
        self._said = _Said(key, words, marks, self._sign(batch, mode))
        return self._said

    def _ways(self, numbers: Sequence[int]) -> str:
        """What microbatches run beside the form that all ranks planned for, told apart by what it calls."""
        training = self._model.training
        for number in {*numbers} - {0, *self._forms[training]}:
            source = self._capture.forms[training][number].graph.python_code("self").src
            lines = "\n".join(sorted(source.splitlines()))  # ops that are free of one another in any order
            self._forms[training][number] = f"{number} ({zlib.crc32(lines.encode()):08x})"
        shown = [self._forms[training].get(number, "0") for number in numbers]
        return f"forms {', '.join(shown)} of the model" if any(numbers) else ""

    def _sign(self, batch: Batch, mode: tuple[Any, ...]) -> list[int]:
        """Numbers of what decides the shapes on the wire: ranks meet the same in the same order."""
        known: dict[tuple[int, ...], int] = {}
        sizes = list(batch.sizes())
        for m, size in enumerate(sizes):
            if size not in known:
                key = (mode, batch.signature(m))
                known[size] = self._signatures.setdefault(key, len(self._signatures))
        return [known[size] for size in sizes]


def _shapes(batch: Batch) -> str:
    columns: dict[str, Sequence[Any]] = dict(batch.leaves)
    shapes = (
        f"{name} {v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else f"{name}={v!r}"
        for name, v in ((name, column[0]) for name, column in columns.items())
    )
    return ", ".join(shapes)
