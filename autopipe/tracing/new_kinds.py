"""Records a captured model once more, for calls of another kind or for another state of the model.

Which capture a call is for is left to ``captured``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import AutopipeError, InputError
from .inputs.arguments import Inputs
from .inputs.free_numbers import freed
from .inputs.held_numbers import HELD, numbers_of
from .state.example_data import all_on
from .state.turns import in_turn

if TYPE_CHECKING:
    from .captured import Capture

__all__ = ["recorded_beside"]

_MOST_KINDS = 32
"""How many kinds of calls a capture may have, each of which takes about as long to record as the first."""
_MOST_VALUES = 8
"""How many of them may differ in one plain value."""


@in_turn()
def recorded_beside(first: Capture, unfit: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """A capture of calls like this one, that ``unfit`` is not for; from now on one of ``first``'s kinds.

    Raises :class:`AutopipeError` where it cannot be recorded, or there are too many kinds.
    """
    told = ((kind, first.model, *kind.arguments(args, kwargs)) for kind in first.kinds)
    others = Counter(filter(None, (kind.inputs.only_other_value(*given) for kind, *given in told)))
    place, n_values = next(iter(others.most_common(1)), ("", 0))
    if n_values >= _MOST_VALUES:
        raise InputError(
            f"argument {place} has had {n_values} values so far, and the model was recorded for each; "
            "give what keeps changing as a tensor, such as torch.tensor(0.5)"
        )
    if len(first.kinds) >= _MOST_KINDS:
        raise InputError(
            f"the model was recorded for {len(first.kinds)} kinds of arguments or states of it so far; "
            "give as few, or what varies as tensors: a buffer, where the model holds it"
        )
    with all_on(first.device, first.model):
        made = _recorded_with(first, unfit.assumptions.changed_numbers(), args, kwargs)
    assert made.new_forms is not None
    made.new_forms.made.join()
    own: dict[bool, list[int]] = {}
    for flag, forms in made.forms.items():
        n = len(first.forms[flag])
        own[flag] = [*range(n, n + len(forms))]
        first.forms[flag] = (*first.forms[flag], *forms)
    first.constants.update(made.constants)
    made = dataclasses.replace(made, forms=first.forms, own=own, constants=first.constants)
    made.assumptions.called = first.assumptions.called
    first.others.append(made)
    return made


def _recorded_with(
    first: Capture, changed: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Capture:
    """A capture of calls like this one; plain numbers that had other values may vary, if they can.

    Those in attributes, too, of which the ``changed`` had these.
    """
    given = _with_numbers(first, changed, args, kwargs)
    inputs, tensors = Inputs.of(first.model, *given)
    known = inputs.with_free_numbers([kind.inputs for kind in first.kinds])
    if (known is not inputs or known.held) and first.device.type != "meta":
        with contextlib.suppress(AutopipeError):
            return first.beside(first, *known.rebuild(first.model, tensors))
    return first.beside(first, args, kwargs)


def _with_numbers(
    first: Capture, changed: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the numbers in attributes beside them that have been others."""
    met = {name: [was] for name, was in changed.items()}
    counted: set[str] = set()
    for kind in first.kinds:
        met |= kind.inputs.values_held
        counted |= kind.inputs.counts.keys()
    now = numbers_of(first.model, met)
    numbers = {
        name: freed(now[name], next((w for w in known if w != now[name]), known[0]), is_set=name in counted)
        for name, known in met.items()
        if type(now[name]) is type(known[0])
    }
    return args, {**kwargs, HELD: numbers} if numbers else kwargs
