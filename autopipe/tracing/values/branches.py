"""Values of the inputs that the model's Python reads: those that can be asked for again before each run.

What is done about any other read is left to ``recorder``; the questions at run time to ``questions``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..calls.call import Branch, Call, Depends, Guard
from ..calls.likeness import is_same_program, without_whole_slices
from ..calls.perform import is_size_of_made
from ..code.position import Position
from ..code.restart import KeepReads

__all__ = ["Branches", "program"]

_MOST_READS = 4
"""How often one line may read in one run; more is a loop over data."""
_OTHERS = Depends.RANDOM | Depends.STATE
_SIZES = Depends.SHAPE | Depends.DATA
_YES = ("__bool__", "is_nonzero", "item", "equal", "allclose")
_NO = ("__contains__",)
_PLAIN = (int, float, str)


def program(calls: Sequence[Call], read: Call) -> tuple[Call, ...] | None:
    """The calls, in order, that make what ``read`` reads from inputs and constants; None where it takes more.

    That is: weights, buffers, random draws, or inputs that were written to. A tensor of which only a size is
    asked need not be made: that follows from the inputs' sizes.
    """
    needed = {id(c) for c in read.inputs}
    memory = read.reads.union(*(c.storages for c in read.inputs))
    given = frozenset().union(*(c.storages for c in calls if c.op == "placeholder"))
    found = [read]
    for call in reversed(calls):
        if id(call) not in needed and not call.writes & memory:
            continue
        is_other = call.depends & _OTHERS or call.mutated or call.has_effect or call.writes & given
        if is_other or (call.op == "get_attr" and call.depends):
            return None
        found.append(call)
        if is_size_of_made(call):
            continue
        needed.update(id(c) for c in call.inputs)
        memory = memory.union(call.reads, call.storages)
    return tuple(found[::-1])


class Branches:
    """The reads of input values in one run, with what came out.

    ``outcomes`` are what the first reads are to come out as, whatever the data; ``kept`` are the lines whose
    function is to stay whole instead; with ``by_value`` numbers may be read too, not only truths.
    ``extent_depends`` tells what the sizes of a call's value depend on, ``is_size`` which guard says that a
    number is the size of a value along an axis; what goes by a guard lets it ``stay``.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        extent_depends: Callable[[Call], int],
        is_size: Callable[[Call, int, Call], Guard | None],
        stay: Callable[[Guard], None],
        at: Position,
        outcomes: Sequence[Any] = (),
        kept: Collection[str] = (),
        by_value: bool = False,
    ) -> None:
        self.calls, self.extent_depends, self.at = calls, extent_depends, at
        self.is_size, self.stay = is_size, stay
        self.outcomes, self.kept, self.by_value = outcomes, kept, by_value
        self.found: list[Branch] = []

    def read(
        self, call: Call, run: Callable[[], Any], is_meta: bool = False, is_forceable: bool = True
    ) -> Branch | None:
        """What a read comes out as, to be asked again; None where that cannot be."""
        name = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "")
        if call.source in self.kept or call.depends & _OTHERS:
            return None
        calls = program(self.calls, call)
        if calls is None:
            return None
        known = next((b for b in self.found if self._are_same(b.calls, calls)), None)
        if known is not None:
            return known
        place = len(self.found)
        if place < len(self.outcomes):
            outcome = self.outcomes[place]
        elif is_meta:  # there is no data: what is asked of a mask mostly holds
            if name not in _YES + _NO or not _is_truth(name, call):
                return None
            outcome = name in _YES
        else:
            outcome = run()
        if not isinstance(outcome, bool) and not (self.by_value and _is_plain(outcome)):
            return None
        if sum(b.source == call.source for b in self.found) >= _MOST_READS:
            raise KeepReads(call.source)
        function = self.at.innermost()
        branch = Branch(call, calls, outcome, self.at.path, call.source, function is not None, is_forceable)
        self.found.append(branch)
        return self.found[-1]

    def _are_same(self, a: Sequence[Call], b: Sequence[Call]) -> bool:
        """Whether two programs compute the same; a slice that takes all of a tensor is that tensor.

        So what the one cannot answer beside the other is not recorded for nothing.
        """
        if is_same_program(a, b):
            return True
        guards: dict[int, Guard] = {}

        def is_all(call: Call, axis: int, stop: Any) -> bool:
            if isinstance(stop, Call):
                guard = self.is_size(call, axis, stop)
                guards.update({} if guard is None else {id(guard): guard})
                return guard is not None
            is_fixed = not self.extent_depends(call) & _SIZES
            return is_fixed and type(stop) is int and stop >= call.value.shape[axis]

        if not is_same_program(*(without_whole_slices(calls, is_all) for calls in (a, b))):
            return False
        for guard in guards.values():
            self.stay(guard)
        return True


def _is_truth(name: str, call: Call) -> bool:
    """Whether a read gives yes or no; ``item`` may give anything."""
    given = call.inputs[0].value if call.inputs else None
    return name != "item" or str(getattr(given, "dtype", "")) == "torch.bool"


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list) and all(map(_is_plain, value)))
