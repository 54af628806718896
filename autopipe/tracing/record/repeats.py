"""Whether what a forward leaves behind matters to the next: Python state that changes, weights that it makes.

Runs themselves are left to ``runs``, what changed to ``state``, what is done about it to ``session``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

from torch import nn

from ...errors import CaptureError
from ..inputs.structure import flatten
from .given import are_close, doubled, other_data
from .glance import Seen
from .leaves import Policy
from .restart import CloseModule
from .state import Snapshot, switch

__all__ = ["Repeats"]


class Run(Protocol):
    """Runs the model from the state it is in, on changed data where asked; equal seeds each time."""

    def __call__(self, training: bool, change: Callable[[Any], Any] | None = None, /) -> Any:
        """What the model gives."""


class Repeats:
    """Calls one after another; open code reads the attributes ``of_leaves``, by path and name."""

    def __init__(
        self, model: nn.Module, snapshot: Snapshot, run: Run, of_leaves: Set[tuple[str, str]]
    ) -> None:
        self.model, self.snapshot, self.run, self.of_leaves = model, snapshot, run, of_leaves

    def check_state(self, policy: Policy, training: bool, answer: Sequence[Any] | None = None) -> bool:
        """Python state that an open module changes must not matter to the next call; whether it changes any.

        ``answer`` is what the call gave that has just been made, if that stands for the model's own.
        """
        if self.snapshot.is_unchanged:
            return False
        self.check_made(policy)

        def is_met(path: str, name: str) -> bool:
            is_own = path == "" or not policy.is_inside_leaf(path)
            return is_own or (path, name) in self.of_leaves

        changed = [(p, a) for p, a in self.snapshot.changes() if is_met(p, a)]
        beside = [(p, a) for p, a in self.snapshot.changed_beside() if is_met(p, a)]
        if not changed and not beside:
            return False
        path, attribute = next(((p, a) for p, a in changed if a == "_buffers"), (changed + beside)[0])
        name = type(self.model).__name__
        shown = f"{path or name}.{attribute}" if changed else attribute
        if attribute == "_buffers":
            named = self.snapshot.replaced(path)
            raise CloseModule(
                path,
                f"a forward replaces the buffer {named} by another tensor, where a stage would keep the old "
                f"one; {named}.copy_(...) writes to it",
            )
        is_alike, is_settled = self.is_repeated(training, answer)
        if not is_alike or not self.forgets(training, is_settled):
            raise CloseModule(path, f"a forward changes {shown}, and the next call's result depends on it")
        if not self.forgets_weights(training):
            why = f"a forward keeps in {shown} what it makes of weights, whatever becomes of them"
            raise CloseModule(
                path, f"{why}; where the first call alone does, call it once before the capture"
            )
        if not is_settled:
            self.check_counts(training, is_met)
        return True

    def is_repeated(self, training: bool, answer: Sequence[Any] | None) -> tuple[bool, bool]:
        """Whether a second call gives what the first did, and leaves all as that left it."""
        if answer is not None and not self.snapshot.generators:
            between = self.snapshot.glance.seen()
            with contextlib.suppress(Exception):  # whatever it is: two calls of the model itself show it too
                if are_close(answer, flatten(self.run(training))[0]):  # one that draws is called twice again
                    return True, self.is_left_at(between)
        self.snapshot.start(training)
        first = flatten(self.run(training))[0]
        between = self.snapshot.glance.seen()
        second = flatten(self.run(training))[0]
        return are_close(first, second), self.is_left_at(between)

    def is_left_at(self, seen: Seen) -> bool:
        """Whether a call has left everything as it was seen before, and tensors as at first."""
        return self.snapshot.is_as(seen) and self.snapshot.glance.is_kept()

    def check_counts(self, training: bool, is_met: Callable[[str, str], bool]) -> None:
        """No number or text may be another in each call."""
        self.snapshot.start(training)
        before = self.snapshot.numbers()
        self.run(training)
        between = self.snapshot.numbers()
        self.run(training)
        for (at, counted), value in self.snapshot.numbers().items():
            seen = before.get((at, counted)), between.get((at, counted)), value
            if seen[0] != seen[1] != seen[2] and is_met(at, counted):
                shown = "other" if isinstance(value, bytes) else f"{seen[0]!r}, {seen[1]!r}, {seen[2]!r}"
                said = f"{shown} in calls one after another"
                name = type(self.model).__name__
                raise CloseModule(at, f"{counted} of {at or name} is {said}; a later call may act on it")

    def check_made(self, policy: Policy) -> None:
        """No forward may make the weights that it runs with."""
        for path, name, is_new in self.snapshot.made():
            if is_new or path == "" or not policy.is_inside_leaf(path):
                shown = f"{path}.{name}".lstrip(".")
                raise CaptureError(
                    f"{type(self.model).__name__} cannot be captured: its forward makes the weights {shown}; "
                    "where only the first call does, run it once on an example before it is captured, else "
                    "make them in __init__"
                )

    def forgets(self, training: bool, is_called: bool) -> bool:
        """Whether what the model gives for other data is the same after a call as it is without one.

        Where it ``is_called``, it is in the state that calls leave it in.
        """
        try:
            if not is_called or self.snapshot.generators:
                self.snapshot.start(training)
                self.run(training)
            after = flatten(self.run(training, other_data))[0]
            self.snapshot.start(training)
            return are_close(after, flatten(self.run(training, other_data))[0])
        except Exception:  # whatever it is: then the model does not take these data
            return True

    def forgets_weights(self, training: bool) -> bool:
        """Whether with other weights, and its mode set anew, the model does as if never called."""
        results = []
        try:
            for is_called in (False, True):
                self.snapshot.start(training)
                if is_called:
                    self.run(training)
                with doubled(self.model):
                    switch(self.model, not training)
                    switch(self.model, training)
                    results.append(flatten(self.run(training))[0])
        except Exception:  # whatever it is: then the model does not take these weights
            return True
        return are_close(*results)
