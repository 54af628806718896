"""Which form of a model its inputs ask for: the questions that its Python asks of their values, asked first.

Finding the questions is left to ``branches``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import InputError
from ..calls import describe
from ..calls.call import Branch, Call, Recording, map_calls
from ..calls.perform import Run, ask, is_size_of_made

__all__ = ["Question", "choose", "questions", "with_sizes"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A read of input values, and what follows from each answer met: another question or a form's number."""

    branch: Branch
    answers: Mapping[Any, Question | int]


def questions(forms: Sequence[Recording], numbers: Sequence[int], depth: int = 0) -> Question | int:
    """The questions that tell which of ``forms`` inputs ask for; each form goes by its number.

    A truth that makes no difference either way is not asked for.
    """
    first = forms[0]
    if len(first.branches) == depth:
        return numbers[0]
    groups: dict[Any, tuple[list[Recording], list[int]]] = {}
    for form, number in zip(forms, numbers, strict=True):
        group = groups.setdefault(_hashable(form.branches[depth].outcome), ([], []))
        group[0].append(form)
        group[1].append(number)
    answers = {answer: questions(*group, depth + 1) for answer, group in groups.items()}
    is_decided = answers.keys() == {True, False} or (first.branches[depth].of_setting and len(answers) > 1)
    found = next(iter(answers.values()))
    if is_decided and isinstance(found, int) and all(n == found for n in answers.values()):
        return found
    return Question(first.branches[depth], answers)


def with_sizes(branch: Branch, size: Callable[[Call], Call]) -> Branch:
    """The read with sizes of tensors that it does not make taken from ``size``."""
    new: dict[int, Call] = {}

    def other(call: Call) -> Call:
        return new.get(id(call), call)

    for call in branch.calls:
        if is_size_of_made(call):
            new[id(call)] = size(call)
        elif any(other(c) is not c for c in call.inputs):
            args, kwargs = map_calls(call.args, other), map_calls(call.kwargs, other)
            new[id(call)] = dataclasses.replace(call, args=args, kwargs=kwargs, _inputs=None)
    return dataclasses.replace(branch, read=other(branch.read), calls=tuple(map(other, branch.calls)))


def choose(question: Question | int, run: Run) -> int:
    """The number of the form that inputs ask for; ``run(call, args, kwargs)`` performs calls on them.

    Raises :class:`InputError` for an answer that has not been met.
    """
    while isinstance(question, Question):
        with contextlib.nullcontext() if question.branch.of_setting else torch.no_grad():
            answer = ask(question.branch.calls, run)
        if _hashable(answer) not in question.answers:
            read = question.branch.read
            met = " or ".join(map(str, question.answers))
            what = (
                read.hint if question.branch.of_setting else f"{describe.expression(read.args)} of its inputs"
            )
            raise InputError(
                f"{question.branch.source}: the model reads {what}, which "
                f"comes out {answer} here and was {met} when captured; what it does then has not been "
                "recorded: capture with an example of this kind"
            )
        question = question.answers[_hashable(answer)]
    return question


def _hashable(answer: Any) -> Any:
    return tuple(map(_hashable, answer)) if isinstance(answer, (list, tuple)) else answer
