"""Whether what a forward leaves behind matters to the next: Python state that changes, weights that it makes.

Runs themselves are left to ``runs``, what changed to ``state``, what is done about it to ``session``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...errors import CaptureError
from ..calls.call import Recording
from ..calls.faults import of_models
from ..code.kept import NamesRead
from ..code.leaves import Policy
from ..code.restart import CloseModule, HoldNumbers
from ..code.set_first import Place, reads_before_sets
from ..inputs.free_numbers import is_number
from ..inputs.held_numbers import is_of_class, leave, names_inside, numbers_of
from ..inputs.structure import flatten
from ..members import OF_ALL, submodule
from ..state.example_data import are_close, doubled, other_data
from ..state.quick_check import Seen
from ..state.state import LENGTH_OF, Snapshot, switch
from ..values.tracked import plain

__all__ = ["Repeats"]

_N_ASKED = 3
"""Calls after which it is looked at what they leave: one on other data, two with other weights."""


class _Asked(NamedTuple):
    """What a call has ``left`` of which it is known that no other goes by it, and in which mode it was made.

    Its code ``sees_no_mode``, or may.
    """

    left: Seen
    training: bool
    sees_no_mode: bool


class Repeats:
    """Calls one after another; open code reads the attributes ``of_leaves``, by path and name.

    ``run``, a method of what holds this, runs the model with equal seeds each time.

    What is in attributes of other than the ``names_read`` is for people alone. The numbers that attributes
    have ``held``, by dotted path, are inputs of each call. ``remade`` are the weights, by dotted path, that
    layers which stay whole replace by new ones in each; ``unread`` the attributes that the last call changed
    and no code reads.
    """

    def __init__(
        self,
        model: nn.Module,
        snapshot: Snapshot,
        run: Callable[..., Any],
        of_leaves: Set[tuple[str, str]],
        names_read: NamesRead,
        held: Collection[str] = (),
    ) -> None:
        self.model, self.snapshot, self.of_leaves = model, snapshot, of_leaves
        self._run = weakref.WeakMethod(run)  # of what holds this
        self.names_read, self.held = names_read, held
        self._inside = numbers_of(model, [name for name in held if "[" in name])
        self.remade: set[str] = set()
        self.unread = frozenset[Place]()
        self._first: tuple[Seen | None, Sequence[Place]] = None, ()
        self._left: list[Sequence[Place]] = []
        self._left_plainly: Sequence[Place] | None = None
        self._asked: _Asked | None = None
        self._counts = False

    def run(self, training: bool, change: Callable[[Any], Any] | None = None) -> Any:
        """What the model gives from the state it is in, on changed data where asked."""
        run = self._run()
        assert run is not None
        return run(training, change)

    def forget(self) -> None:
        """Let go of what is known: the calls from now on are others."""
        self._asked = None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within it what is known of calls is not, nor afterwards what is found of those within."""
        before, self._asked = self._asked, None
        try:
            yield
        finally:
            self._asked = before

    def check_state(
        self,
        policy: Policy,
        recording: Recording,
        is_as_begun: bool,
        answer: Sequence[Any] | None = None,
        *,
        sees_no_mode: bool = False,
    ) -> bool:
        """Python state that an open module changes must not matter to the next call; whether it changes any.

        The call that was recorded has just been made, and ``is_as_begun`` where it has left all as it was;
        ``answer`` is what it gave, if that stands for the model's own. Where calls in either mode leave the
        same objects, and open code ``sees_no_mode``, calls on other data and with other weights are made in
        one of them alone.
        """
        training = recording.training
        if (training, "", not training) in recording.modes:
            raise CloseModule("", "a forward leaves the model itself in another mode than it was called in")
        leave(self.model, self._inside)  # what is in containers, which then hold what they held
        self.unread = frozenset()
        if is_as_begun or (self._inside and self.snapshot.seen_unchanged() is not None):
            return False
        self.check_made(policy)
        changes, put = self.snapshot.changes(), self.snapshot.put_on_classes()
        glance = self.snapshot.glance
        self._first = glance.seen() if glance.is_kept_but_tensors() else None, changes

        is_met = functools.partial(self.is_met, policy)
        changed = self.met_among(policy, changes)
        beside = [(p, a) for p, a in self.snapshot.changed_beside() if is_met(p, a)]
        if not changed and not beside and (path := self.switched(policy, recording)) is not None:
            changed, answer = [(path, "training")], None
        changes = self.snapshot.changes() if recording.modes else changes  # maybe all is put back
        self.unread = frozenset((p, a) for p, a in changes if not self.is_read(p, a))
        if any(is_number(plain(self._held(p, a))) for p, a in self.unread):
            self.hold_counts(policy, recording, read=False)
        if not changed and not beside:
            return False
        replaced = [n for p, a in changed if a == "_buffers" for n in self.snapshot.replaced(p)]
        recording.rebuilt &= {*replaced}
        others = [n for n in replaced if n not in recording.rebuilt]
        path, attribute = next(((p, a) for p, a in changed if a == "_buffers"), (changed + beside)[0])
        name = type(self.model).__name__
        shown = f"{path or name}.{attribute}" if changed else attribute
        if others:
            raise _replaces(others[0])
        recording.left = (*recording.left, *(n for n in replaced if n not in recording.left))
        is_alike, is_settled = self.is_repeated(training, answer)
        is_known = is_alike and is_settled and self.is_asked(training, sees_no_mode=sees_no_mode)
        if not is_known:
            self._left, self._left_plainly, self._asked = [], None, None
        if not is_alike or not (is_known or self.forgets(training, is_settled)):
            if replaced:
                raise _replaces(replaced[0])
            self.hold_counts(policy, recording)
            why = f"a forward changes {shown}, and the next call's result depends on it"
            remedy = "give it to the call as a tensor, one that counts calls too"
            if changed and isinstance(self._held(path, attribute), Tensor):
                remedy = "make it a buffer, which stages write to (register_buffer)"
            if attribute in ("_forward_hooks", "_forward_pre_hooks"):
                remedy = "where the first call alone does, call it once before the capture"
            raise CloseModule(path, f"{why}; {remedy}")
        if not (is_known or self.forgets_weights(training)):
            why = f"a forward keeps in {shown} what it makes of weights, whatever becomes of them"
            raise CloseModule(
                path, f"{why}; where the first call alone does, call it once before the capture"
            )
        if not is_settled and self._counts:
            self.check_counts(policy, recording, is_met)
        if (left := self._first[0]) is not None and not is_known:
            self._asked = _Asked(left, training, sees_no_mode)
        if is_settled:
            self.snapshot.keep_on_classes(put)
        return True

    def is_asked(self, training: bool, *, sees_no_mode: bool) -> bool:
        """Whether it is known of what the recorded call has left that no call goes by it.

        Of the same objects in the same places, but for modes where code sees none of them.
        """
        known, left = self._asked, self._first[0]
        if known is None or left is None:
            return False
        apart = self.snapshot.glance.keys_apart(known.left, left)
        is_of_mode = known.training is training or (sees_no_mode and known.sees_no_mode)
        return is_of_mode and apart <= {"training"}

    def changed_in_leaves(self, policy: Policy) -> dict[str, bool]:
        """The leaves in which a call has left something otherwise that calls may read, or numbers.

        Each with whether it is numbers: in attributes, or in containers and objects there. Else it is what
        helpers and hooks keep, in closures, in objects of their own or deeper.
        """
        found: dict[str, bool] = {}
        for path, name in (*self.snapshot.changes(), *self.snapshot.changed_beside()):
            held = self._held(path, name)
            counts = is_number(held) or any(names_inside(name, held))
            if policy.is_inside_leaf(path) and (counts or self.is_read(path, name)):
                leaf = _leaf_around(path, policy)
                found[leaf] = counts or found.get(leaf, False)
        return found

    def left_in(self, paths: Collection[str], training: bool) -> dict[str, dict[Any, Callable[[], None]]]:
        """Of modules at some paths those that a call leaves otherwise: in which places, and what undoes it.

        One place may be of several modules, as what one hook of all of them counts in.
        """
        self.snapshot.start(training)
        each = {path: Snapshot(submodule(self.model, path)) for path in paths}
        self.run(training)
        found: dict[str, dict[Any, Callable[[], None]]] = {}
        for path, then in each.items():
            own = [(p, a) for p, a in then.changes() if self.is_read(f"{path}.{p}".strip("."), a)]
            if places := {**{(path, *at): _nothing for at in own}, **dict(then.beside.restorers())}:
                found[path] = places
        return found

    def hangs_on(self, undo: Iterable[Callable[[], None]], paths: Iterable[str], training: bool) -> bool:
        """Whether calls of modules go by what other calls within one of the model leave in some places."""
        self.snapshot.start(training)
        usual = flatten(self.run(training))[0]
        self.snapshot.start(training)
        undo = [*undo]

        def put_back(*_: Any) -> None:
            for each in undo:
                each()

        hooks = [submodule(self.model, path).register_forward_hook(put_back) for path in paths]
        try:
            return not are_close(usual, flatten(self.run(training))[0])
        except of_models():  # as where one has nothing that another one left for it
            return True
        finally:
            for hook in hooks:
                hook.remove()

    def set_first(self, policy: Policy, training: bool) -> frozenset[Place]:
        """The attributes of open modules that a call leaves otherwise, and sets before it reads them."""
        left = self._left_plainly
        if left is None:
            self.snapshot.start(training)
            self.run(training)
            left = self.snapshot.changes()
        changed = ((p, a) for p, a in left if a != "_buffers")
        places = {(p, a) for p, a in changed if p == "" or not policy.is_inside_leaf(p)}
        if not places:
            return frozenset()
        self.snapshot.start(training)
        with reads_before_sets(self.model, places) as read:
            self.run(training)
        return frozenset(places - read)

    def is_met(self, policy: Policy, path: str, name: str) -> bool:
        """Whether open code may read the attribute of the module at a path."""
        is_own = path == "" or not policy.is_inside_leaf(path)
        return (is_own and self.is_read(path, name)) or (path, name) in self.of_leaves

    def is_read(self, path: str, name: str) -> bool:
        """Whether a call may read what an attribute, or the first one in some words, holds."""
        attribute = name.removeprefix(LENGTH_OF).partition(".")[0]
        is_plain = attribute in vars(submodule(self.model, path)) and attribute not in OF_ALL
        return not is_plain or attribute in self.names_read

    def _held(self, path: str, name: str) -> Any:
        return vars(submodule(self.model, path)).get(name)

    def changes_met(self, policy: Policy) -> list[tuple[str, str]]:
        """The attributes that are other than at first and may be read, by path and name."""
        leave(self.model, self._inside)
        return self.met_among(policy, self.snapshot.changes())

    def changes_left(self) -> Sequence[Place]:
        """The attributes that are other than at first: those behind the recorded call, if all is as there."""
        seen, changes = self._first
        if seen is not None and self.snapshot.glance.is_kept_but_tensors() and self.snapshot.is_as(seen):
            return changes
        return self.snapshot.changes()

    def met_among(self, policy: Policy, changes: Iterable[Place]) -> list[Place]:
        """Of attributes those that may be read, and whose numbers are no inputs."""
        found = ((p, a) for p, a in changes if _dotted(p, a) not in self.held)
        return [(p, a) for p, a in found if self.is_met(policy, p, a)]

    def switched(self, policy: Policy, recording: Recording) -> str | None:
        """The open module around the first that a call leaves in another mode; all is then as at first."""
        if not recording.modes:
            return None
        self.snapshot.start(recording.training)
        found = {p for _, p, mode in recording.modes if submodule(self.model, p).training is not mode}
        path = min(found, default=None)
        while path and policy.is_inside_leaf(path):
            path = path.rpartition(".")[0]
        return path

    def is_repeated(self, training: bool, answer: Sequence[Any] | None) -> tuple[bool, bool]:
        """Whether a second call gives what the first did, and leaves all as that left it.

        Where it does not, it is noted whether numbers or texts are among that.
        """
        if answer is not None and not self.snapshot.generators:
            between, numbers = self.snapshot.glance.seen(), self.snapshot.numbers()
            with contextlib.suppress(Exception):  # whatever it is: two calls of the model itself show it too
                if are_close(answer, flatten(self.run(training))[0]):  # one that draws is called twice again
                    return True, self.is_left_at(between, numbers)
        self.snapshot.start(training)
        first = flatten(self.run(training))[0]
        between, numbers = self.snapshot.glance.seen(), self.snapshot.numbers()
        second = flatten(self.run(training))[0]
        return are_close(first, second), self.is_left_at(between, numbers)

    def is_left_at(self, seen: Seen, numbers: Mapping[Place, Any]) -> bool:
        """Whether a call has left everything as it was seen before, and tensors as at first."""
        is_left = self.snapshot.is_as(seen) and self.snapshot.glance.is_kept()
        self._counts = not is_left and any(numbers.get(k) != v for k, v in self.snapshot.numbers().items())
        return is_left

    def hold_counts(self, policy: Policy, recording: Recording, *, read: bool = True) -> None:
        """Have numbers that a call leaves otherwise in attributes of open modules be inputs of each call.

        Where they are not ``read``, those that are others after each. Raises :class:`HoldNumbers` where there
        are any.
        """
        self.snapshot.start(recording.training)
        names = {
            _dotted(path, name)
            for path, module in self.model.named_modules()
            if path == "" or not policy.is_inside_leaf(path)
            for name in (*vars(module), *_names_of_class(module), *_names_inside(module))
        }
        before = numbers_of(self.model, names - {*self.held, *recording.left})
        self.run(recording.training)
        after = numbers_of(self.model, before)
        found = {
            name: (was, after[name])
            for name, was in before.items()
            if is_number(was)
            and type(was) is type(after[name])
            and was != after[name]
            and not is_of_class(self.model, name)
        }
        if found and not read:
            self.run(recording.training)
            found = {n: v for n, v in found.items() if numbers_of(self.model, [n])[n] != v[1]}
        if found:
            raise HoldNumbers(found)

    def check_counts(self, policy: Policy, recording: Recording, is_met: Callable[[str, str], bool]) -> None:
        """No number or text may be another in each call."""
        training = recording.training
        self.snapshot.start(training)
        before = self.snapshot.numbers()
        self.run(training)
        between = self.snapshot.numbers()
        self.run(training)
        for (at, counted), value in self.snapshot.numbers().items():
            seen = before.get((at, counted)), between.get((at, counted)), value
            if (
                seen[0] != seen[1] != seen[2]
                and is_met(at, counted)
                and _dotted(at, counted) not in self.held
                and not self.is_of_log(at, counted)
            ):
                self.hold_counts(policy, recording)
                shown = "other" if isinstance(value, bytes) else f"{seen[0]!r}, {seen[1]!r}, {seen[2]!r}"
                said = f"{shown} in calls one after another; a later call may act on it"
                begun = (
                    "; have __init__ set it to what the first call takes it for" if seen[0] is None else ""
                )
                name = type(self.model).__name__
                raise CloseModule(at, f"{counted} of {at or name} is {said}{begun}")

    def is_of_log(self, path: str, counted: str) -> bool:
        """Whether a number is of something global that code only adds to: how much there is, or an entry."""
        return any(
            at == path
            and (counted == f"{LENGTH_OF}{name}" or counted.startswith(f"{name}."))
            and self.snapshot.reached.is_only_added_to(holder)
            for at, name, holder in self.snapshot.reached.holders
        )

    def check_made(self, policy: Policy) -> None:
        """No forward may make the weights that it runs with."""
        for path, name, is_new in self.snapshot.made():
            shown = f"{path}.{name}".lstrip(".")
            if is_new or path == "" or not policy.is_inside_leaf(path):
                raise CaptureError(
                    f"{type(self.model).__name__} cannot be captured: its forward makes the weights {shown}; "
                    "where only the first call does, run it once on an example before it is captured, else "
                    "make them in __init__"
                )
            self.remade.add(shown)

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
            without = flatten(self.run(training, other_data))[0]
            self._left.append(self.changes_left())
            return are_close(after, without)
        except of_models():  # whatever it is: then the model does not take these data
            return True

    def forgets_weights(self, training: bool) -> bool:
        """Whether with other weights, and its mode set anew, the model does as if never called."""
        results = []
        try:
            for is_called in (False, True):
                self.snapshot.start(training)
                if is_called:
                    self.run(training)
                    self._left_plainly = self.changes_left()
                with doubled(self.model):
                    switch(self.model, not training)
                    switch(self.model, training)
                    results.append(flatten(self.run(training))[0])
                    self._left.append(self.changes_left())
        except of_models():  # whatever it is: then the model does not take these weights
            return True
        return are_close(*results)

    def carried(self, policy: Policy, training: bool) -> tuple[str, ...]:
        """The attributes that a call in a mode leaves and one in the other mode goes by, as dotted paths.

        What calls in the other mode set as well, such as hooks that the first call of any installs, is no
        other behind one of them.
        """
        left = {} if self.leaves_none(policy) else self.left_by(policy, training)
        too = self.left_by(policy, not training) if left else {}
        own = {place: value for place, value in left.items() if place not in too}
        found = self.gone_by(not training, own, 0) or self.gone_by(not training, left, 1)
        return tuple(f"{path}.{name}".lstrip(".") for path, name in found)

    def leaves_none(self, policy: Policy) -> bool:
        """Whether all calls were asked, on other data and with other weights, and left none that is read."""
        return len(self._left) == _N_ASKED and not any(self.met_among(policy, left) for left in self._left)

    def gone_by(
        self, training: bool, left: Mapping[tuple[str, str], Any], n_before: int
    ) -> list[tuple[str, str]]:
        """The attributes ``left`` so that a call in a mode goes by, behind ``n_before`` others in it."""
        without = self.answer(training, {}, n_before) if left else None
        if without is None:
            return []

        def is_alike(some: Mapping[tuple[str, str], Any]) -> bool:
            answer = self.answer(training, some, n_before)
            return answer is not None and are_close(without, answer)

        if is_alike(left):
            return []
        return [place for place, value in left.items() if not is_alike({place: value})] or [*left]

    def left_by(self, policy: Policy, training: bool) -> dict[tuple[str, str], Any]:
        """What a call in a mode leaves in attributes, by path and name; on other data where it takes them."""
        for change in (other_data, None):
            self.snapshot.start(training)
            before = self.held_anew(policy)  # by the change of mode, which the other mode undoes
            with contextlib.suppress(Exception):  # whatever it is: the model does not take these data
                with doubled(self.model):
                    self.run(training, change)
                found = self.held_anew(policy)
                return {p: v for p, v in found.items() if p not in before or before[p] is not v}
        return {}

    def held_anew(self, policy: Policy) -> dict[tuple[str, str], Any]:
        """What the attributes hold that are other than at first and may be read, by path and name."""
        found = self.changes_met(policy)
        held = {place: vars(submodule(self.model, place[0])) for place in found}
        return {place: _copied(had[place[1]]) for place, had in held.items() if place[1] in had}

    def answer(
        self, training: bool, left: Mapping[tuple[str, str], Any], n_before: int
    ) -> Sequence[Any] | None:
        """What a call gives where attributes are ``left`` so behind ``n_before`` others; None if it fails."""
        self.snapshot.start(training)
        with contextlib.suppress(Exception):  # whatever it is: that it fails is told apart
            for _ in range(n_before):
                self.run(training)
            for (path, name), value in left.items():
                vars(submodule(self.model, path))[name] = _copied(value)
            return flatten(self.run(training))[0]
        return None


def _replaces(name: str) -> CloseModule:
    return CloseModule(
        name.rpartition(".")[0],
        f"a forward replaces the buffer {name} by another tensor, where a stage would keep the old one; "
        f"{name}.copy_(...) writes to it",
    )


def _nothing() -> None:
    pass


def _leaf_around(path: str, policy: Policy) -> str:
    while policy.is_inside_leaf(parent := path.rpartition(".")[0]) and parent:
        path = parent
    return path


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _names_of_class(module: nn.Module) -> Iterator[str]:
    """What a module's class holds as numbers, which code may count on from."""
    for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        yield from (name for name, value in vars(cls).items() if is_number(value))


def _names_inside(module: nn.Module) -> Iterator[str]:
    """What the numbers in containers and objects are called that a module's attributes hold."""
    for field, value in vars(module).items():
        if field not in OF_ALL:
            yield from names_inside(field, value)


def _copied(value: Any) -> Any:
    """A container with what it holds now; anything else as it is."""
    return copy.copy(value) if isinstance(value, (dict, list, set, collections.deque)) else value
