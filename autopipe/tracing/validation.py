"""Checks the forms of a capture against the model on other data, and records again what differs.

As few sizes are fixed as can be. One set of forms is left to ``forms``, comparing to ``referee``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, InputError, ModelError
from ..graph import Dim
from .calls.call import UNSAFE, Call, Depends, Recording
from .code.checks import expecting_nothing
from .code.restart import Function, Method, Statement
from .forms import CaptureForms
from .forms_by_size import record_at_sizes
from .inputs.arguments import Inputs
from .inputs.structure import flatten
from .members import modules_in, submodule
from .referee.referee import Referee
from .runs.session import Session
from .sizes.dims import resize
from .sizes.explore import taken_beside
from .sizes.unproven import Proofs, is_plain
from .sizes.variation import Variation
from .state.example_data import are_close
from .state.state import preserved

__all__ = ["validated_forms", "with_more_sizes_free"]

_logger = logging.getLogger("autopipe")
_IDLE = (
    "what the model draws from Python's or numpy's generator and nothing goes by, as checks of types do, "
    "stages do not draw"
)

_FASTER = (
    "in evaluation without gradients, outputs are other than the model's: torch's %s takes a faster way "
    "there, with zeros where a padding mask leaves places out, and stages do not; with "
    "enable_nested_tensor=False it takes the one that stages do"
)

_OTHERWISE_UNSEEN = nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer
"""Layers of torch that take other ways in evaluation where nobody looks on, as a run without data does."""


def validated_forms(
    session: Session,
    inputs: Inputs,
    tensors: dict[str, torch.Tensor],
    dynamic: Any,
    known: Variation | None,
    below: int | None = None,
    kin: Sequence[CaptureForms] = (),
) -> CaptureForms:
    """Forms that are the model on other data, and what may vary; recorded again where they are not.

    Not asked of a model on meta. Where forms follow questions about the data, that of the example is. Beside
    ``kin`` they take their names, and what is whole for those is whole for them. Raises
    :class:`CaptureError` where no fewer than ``below`` checks say which sizes they are right for.
    """
    while True:
        made = CaptureForms(session, inputs, tensors, session.forms(is_judged=True), dynamic, known, kin)
        if not kin:  # whose model is taken apart in one way
            made = _undivided(session, _freed(session, made))
        if session.device.type == "meta":
            session.notes.append(
                "the graph was not held against the model on other data: on the meta device there are none"
            )
            return made
        forms = {flag: found[0] for flag, found in made.forms.items()}
        referee = Referee(
            session.model,
            forms,
            inputs,
            tensors,
            made.variation,
            session.device,
            session.start,
            made.is_of_the_example,
            session.runs,
            functools.partial(_has_its_sizes, session, made.proofs),
        )
        fault = referee.fault()
        by_data = session.runs.by_data
        if not dynamic and not referee.by_data <= by_data:  # with sizes free, what goes by them is seen
            by_data |= referee.by_data
            continue
        is_told = functools.partial(_is_told, session, made.proofs, forms[False])
        did_so = referee.did_as_recorded
        if fault is None and not session.is_evaluated(forms[False], is_told, did_as_recorded=did_so):
            session.distrust_short_cuts()
            continue
        if fault is None:
            if referee.has_idle_draws and _IDLE not in session.notes:
                session.notes.append(_IDLE)
            if faster := referee.faster_without_gradients():
                session.notes.append(_FASTER % ", ".join(faster))
                _logger.warning("%s: %s", type(session.model).__name__, session.notes[-1])
            if below is not None and len(made.variation.checks) >= below and not made.is_narrowed:
                raise CaptureError(f"{len(made.variation.checks)} checks say which sizes it is right for")
            record_at_sizes(session, made)
            return made
        if not session.distrust_short_cuts():
            session.close(fault.path, fault.why)


def _is_told(session: Session, proofs: Proofs, form: Recording, call: Call) -> bool:
    """Whether a call that does on other data in evaluation what was recorded does so on the example too.

    It may not if its code names the mode, and goes by what the data hold: no layer does that runs without, if
    it cannot tell such runs from others, and is given no numbers or sizes that hang on data.
    """
    if not session.code.may_go_by_mode(call, form):
        return True
    return call.op == "call_module" and _runs_without_data(session, proofs, call)


def _runs_without_data(session: Session, proofs: Proofs, call: Call) -> bool:
    """Whether a layer runs without data in evaluation, and does then what it does with any of such sizes.

    It cannot tell such runs from others, and is given no numbers or sizes that hang on data.
    """
    modes, code = session.runs.snapshot.modes_begun.get(False), session.code
    if modes is None or any(map(_hangs_on_data, call.inputs)):
        return False
    inside = modules_in(submodule(session.model, call.target))
    is_shown = not any(isinstance(m, _OTHERWISE_UNSEEN) for _, m in inside)
    return is_shown and not code.may_miss_data(call) and proofs.of(call, modes)


def _has_its_sizes(session: Session, proofs: Proofs, call: Call) -> bool:
    """Whether a layer gives what has the sizes recorded, in evaluation, whatever data of such sizes hold."""
    module = submodule(session.model, call.target)
    return is_plain(module) or _runs_without_data(session, proofs, call)


def _hangs_on_data(call: Call) -> bool:
    """Whether what a call gives without data, as its sizes and numbers, hangs on data."""
    is_number = any(not isinstance(v, torch.Tensor) for v in flatten(call.value)[0])
    return bool(call.depends & (UNSAFE if is_number else Depends.DATA))


def with_more_sizes_free(
    session: Session, made: CaptureForms, is_open: Callable[[str], bool]
) -> tuple[Session, CaptureForms]:
    """The same, recorded from where a run at another size leaves the model, where that lets more sizes vary.

    A model that has run before may have tables for the sizes it met, which a recording takes as they are;
    from there it makes them anew. Only where what it gives for the example is the same from there.
    """
    if session.device.type == "meta" or not made.is_narrowed:
        return session, made
    for sizes in taken_beside(made.explorers[0], made.variation):
        session.start(training=False)
        expected = _answer(session)
        if not _is_left_otherwise(session, made, sizes) or not are_close(expected, _answer(session)):
            break
        _is_left_otherwise(session, made, sizes)
        with (
            preserved(session.model, is_open, holds_back=True) as snapshot,
            contextlib.suppress(CaptureError, ModelError, InputError),
        ):
            other = Session(
                session.model,
                session.args,
                session.kwargs,
                session.first_policy,
                snapshot,
                sizes_vary=session.sizes_vary,
                n_rows=session.n_rows,
            )
            found = validated_forms(other, made.inputs, made.tensors, made.dynamic, None)
            if len(found.variation.fixed) < len(made.variation.fixed):
                return other, found
    return session, made


def _answer(session: Session) -> list[Any]:
    return flatten(session.runs.run(training=False))[0]


def _is_left_otherwise(session: Session, made: CaptureForms, sizes: Mapping[Dim, int]) -> bool:
    """Whether a run at other sizes, which is made now, leaves the model other than it was given."""
    session.start(training=False)
    with session.on(*made.inputs.rebuild(session.model, resize(made.tensors, sizes))):
        _answer(session)
    return not session.runs.snapshot.is_unchanged


def _freed(session: Session, made: CaptureForms) -> CaptureForms:
    """The same with functions kept whole that ask about sizes, where that lets more sizes vary.

    Statements of the root's forward with them, or else functions alone: those may hold layers.
    """
    asking = made.functions or (made.settling if made.settling and made.is_narrowed else {})
    new = [f for f in asking if f not in session.attempt.functions]
    alone = [f for f in new if not isinstance(f, Statement)]
    for chosen in (new, alone) if 0 < len(alone) < len(new) else (new,):
        freed = _kept_whole(session, made, chosen)
        if freed is not made:
            return freed
    return made


def _kept_whole(
    session: Session, made: CaptureForms, functions: Sequence[Function | Method | Statement]
) -> CaptureForms:
    """The same with functions kept whole, where that lets more sizes vary."""
    before = session.attempt
    recorded = session.again(functions) if functions else None
    if recorded is None:
        return made
    with contextlib.suppress(CaptureError, ModelError, InputError):
        other = CaptureForms(session, made.inputs, made.tensors, recorded, made.dynamic, None)
        is_whole = [_modules(session.model, m.forms) for m in (other, made)]
        n_forms = [[len(forms) for forms in m.forms.values()] for m in (other, made)]
        keeps_all = n_forms[0] == n_forms[1] or not other.asks
        keeps_all &= len(expecting_nothing(other.forms)) <= len(expecting_nothing(made.forms))
        fewer = [(len(m.variation.fixed), len(m.variation.checks)) for m in (other, made)]
        if is_whole[0] == is_whole[1] and keeps_all and fewer[0] < fewer[1]:
            return other
    session.attempt = before
    return made


def _undivided(session: Session, made: CaptureForms) -> CaptureForms:
    """The same with leaves whole that were opened only for more to cut, where that lets more sizes vary."""
    for path in reversed(session.attempt.divided):
        if not made.is_narrowed:
            break
        before = session.attempt
        recorded = session.again(closed=[path])
        if recorded is None:
            continue
        with contextlib.suppress(CaptureError, ModelError, InputError):
            other = CaptureForms(session, made.inputs, made.tensors, recorded, made.dynamic, None)
            if len(other.variation.fixed) < len(made.variation.fixed):
                made = other
                continue
        session.attempt = before
    return made


def _modules(model: nn.Module, forms: Mapping[bool, Sequence[Recording]]) -> dict[bool, list[str]]:
    """By training flag, the leaves with parameters that the first form calls."""

    def holds(path: str) -> bool:
        return next(submodule(model, path).parameters(), None) is not None

    return {
        flag: [c.target for c in fs[0].calls if c.op == "call_module" and holds(c.target)]
        for flag, fs in forms.items()
    }
