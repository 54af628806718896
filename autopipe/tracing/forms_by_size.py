"""Records a model again at sizes where its code goes another way: padded or not, in windows or in one piece.

Which sizes each recording is right for is left to ``sizes``; which form runs at a call to ``Capture``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch

from ..errors import CaptureError, InputError, ModelError
from .calls.call import Call, Recording
from .calls.likeness import prune
from .calls.memory import written
from .forms import CaptureForms
from .inputs.arguments import Inputs
from .referee.referee import Referee
from .runs.session import Session
from .sizes import dims as sizing
from .sizes.explore import taken_against_checks
from .sizes.variation import Variation

__all__ = ["check_alike", "forms_on", "record_at_sizes", "why_no_more"]

_MOST_SIZES = 3
"""At how many sizes a model may be recorded beside those of the example."""


def record_at_sizes(session: Session, made: CaptureForms) -> None:
    """Add forms for sizes that the model takes, at which what its code asks of them comes out otherwise.

    Each form is held against the model, and is for inputs whose values answer what it asks of them as the
    example's do. What cannot be recorded, or is not the model, is left out: a call of such sizes is refused.
    """
    if why_no_more(made, session.device):
        return
    known = [made.variation]
    ways = taken_against_checks(made.explorers[-1], known)
    for _, sizes in zip(range(_MOST_SIZES), ways, strict=False):
        before = session.attempt
        try:
            with contextlib.suppress(CaptureError, ModelError, InputError):
                forms = forms_on(session, made, sizing.resize(made.tensors, sizes))
                for flag, form in forms.items():
                    made.add(flag, form)
                known.append(made.variations[id(forms[False])])
        finally:
            session.attempt = before


def forms_on(
    session: Session, made: CaptureForms, tensors: Mapping[str, torch.Tensor]
) -> dict[bool, Recording]:
    """A form for these inputs in each mode, once it is held against the model; those made have named calls.

    Raises :class:`CaptureError` where there is none, or one that a plan for the others has no place for.
    """
    given = made.inputs.rebuild(session.model, tensors)
    inputs, tensors = Inputs.of(session.model, *given)
    policy, kept = session.policy, {*session.attempt.functions}
    with session.on(*given):
        recorded = session.again(divides=False)
        if recorded is None or session.policy != policy or {*session.attempt.functions} != kept:
            raise CaptureError("the model is taken apart otherwise at these sizes")
        firsts = {id(records[0]): records[0] for records in recorded.values()}
        made.shared(list(firsts.values()))
        forms = _forms(made, recorded)
        checked: dict[int, Recording] = {}
        for form in {id(f): f for f in forms.values()}.values():
            checked[id(form)] = made.at_sizes(
                form, inputs, tensors, [*checked.values()], is_shared=forms[True] is forms[False]
            )
        forms = {flag: checked[id(form)] for flag, form in forms.items()}
        check_alike(made, forms.values())
        variation = made.variations[id(forms[False])]
        fault = _fault(session, made, forms, inputs, tensors, variation)
    if fault is not None:
        raise CaptureError(fault)
    return forms


def _forms(made: CaptureForms, recorded: Mapping[bool, list[Recording]]) -> dict[bool, Recording]:
    """The recording of each mode on inputs as they are; raises where it gives another kind of output."""
    forms = {flag: prune(records[0]) for flag, records in recorded.items()}
    if recorded[True] is recorded[False]:
        forms[True] = forms[False]
    for flag, form in forms.items():
        if form.output != made.forms[flag][0].output:
            raise CaptureError("the model gives something else at these sizes")
        if form.modes != made.forms[flag][0].modes:
            raise CaptureError("the model leaves modules in other modes at these sizes")
    return forms


def check_alike(made: CaptureForms, forms: Iterable[Recording]) -> None:
    """Raise :class:`CaptureError` where a form calls more than a plan for the others can place.

    That is what writes into memory that others touch, or is called whole and holds weights of which others
    use a part; all else goes where its values are, or weights that no other uses.
    """
    known = {c.name: c for c in made.calls}
    state = {(c.op, c.target) for c in made.calls if c.op in ("call_module", "get_attr")}
    used = {f"{target}." for _, target in state}

    def is_unused(path: str) -> bool:
        return not any(u.startswith(f"{path}.") or f"{path}.".startswith(u) for u in used)

    forms = [*forms]
    elsewhere = {
        id(c)
        for form in forms
        for memory in written(form.calls)
        if memory.is_held or any(c.name in known or not _is_placeable(c) for c in memory.together)
        for c in memory.writes
    }
    for call in (c for form in forms for c in form.calls if c.op not in ("placeholder", "output")):
        other = known.get(call.name)
        if other is not None:
            # in one mode a call may write less than in the other
            is_placed = bool(call.writes) <= bool(other.writes) and {*call.mutated} <= {*other.mutated}
        elif call.op == "call_module" and is_unused(call.target):
            is_placed = not call.leaves_more  # it draws from a stream of its own
        elif call.op == "call_module":
            is_placed = (call.op, call.target) in state and not call.leaves_more and not call.is_random
        elif call.op == "get_attr" and call.depends:
            is_placed = (call.op, call.target) in state or is_unused(call.target)
        else:
            is_placed = call.is_check or (_is_placeable(call) and id(call) not in elsewhere)
        if not is_placed:
            raise CaptureError(
                f"{call.name} draws, writes or holds weights in a way that no form planned for has; capture "
                "with an example that leads there"
            )


def _is_placeable(call: Call) -> bool:
    """Whether an op may be in any stage that has what it takes; draws are its module's wherever they are."""
    leaves_more = call.op == "call_module" or call.mutated or call.has_effect
    return not leaves_more and not (call.is_random and call.stream is None)


def why_no_more(made: CaptureForms, device: torch.device) -> str:
    """Why there may be no forms for other inputs; empty where there may."""
    if not made.dynamic:
        return "dynamic=False fixes all of them"
    if tail := made.tail:
        return f"from {tail[0]} on it runs once on the whole batch, in the form that the example has"
    return "on the meta device no data ask for a form" if made.asks and device.type == "meta" else ""


def _fault(
    session: Session,
    made: CaptureForms,
    forms: Mapping[bool, Recording],
    inputs: Inputs,
    tensors: dict[str, torch.Tensor],
    variation: Variation,
) -> str | None:
    """How the forms differ from the model on other data, in words."""
    if session.device.type == "meta":
        return None
    referee = Referee(
        session.model,
        forms,
        inputs,
        tensors,
        variation,
        session.device,
        session.start,
        lambda training, given: made.is_answered(forms[training], given),
        session.runs,
    )
    fault = referee.fault()
    return None if fault is None else fault.why
