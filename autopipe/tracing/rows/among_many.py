"""From how many rows on calls give something else: code kept whole, and tensors made of sizes alone.

A limit on how many rows there are, or on their places, shows only beyond it. Such calls alone are run on many
rows, each of a few so many times over; running a form on as many as are found is left to ``row_questions``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...units import Size, symbol
from ..calls.call import Call, Depends, map_calls
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import plain_name, tensors
from ..calls.named import is_users_operator
from ..calls.perform import run_call
from ..code.leaves import asking
from ..inputs.contents import is_whole
from ..inputs.structure import mapped
from ..members import submodule
from ..state.state import generators, seed
from .asking_layers import AskingLayers, Doing, ResultsWithin
from .backwards import followed, functions_exist, has_functions, is_hooked, may_be_own
from .code_run import CodeRun
from .form_on_rows import FormOnRows
from .held_back import gradient_of, may_hold_back
from .noise import EvenNoise, NoDropout, is_drawn
from .results import ALLOWED, ROUNDED, Rows, axes, is_close, level_of
from .row_counts import RowCounts, RowsLost
from .thresholds import MOST

__all__ = ["Met", "RowsMet"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_Made = tuple[Any, Tensor | None]
"""What a call gives, and the gradients of its first row."""
_LEAST = 0, 1, 2
"""As many rows, other questions are about."""
_SMALL = range(3, 33)
"""Numbers of rows of which the model's own code is asked each."""
_COUNTED = 13
"""As many rows are counted: few other sizes are a multiple of that."""
_FEWER, *_STEPS = 0.25, 2, 4, 8, 16, 32
_FAR = 1 << 13
"""How often each row comes: numbers and tensors made of sizes are asked for by far more rows, too."""
_MOST_BYTES, _MOST_BYTES_NAMED = 1 << 18, 1 << 22
"""What rows given to code take at the most; where it names a number of rows, to come to that."""
_MOST_ROWS = 1 << 12
"""As many code is given at the most."""
_MOST_ELEMENTS = 1 << 18
"""As many has a tensor made of sizes alone at the most."""
_MOST_MET = 4
"""So many other values of a number made of sizes are looked into."""
_EVEN = frozenset({"add", "getitem", "mul", "neg", "size", "sub"})
"""Functions of numbers that have no limit."""


@dataclasses.dataclass(slots=True)
class Met:
    """How many rows there are where something first gives others than for few.

    ``near`` has such numbers, for a form to be run on, with what does, in words. Where it takes more rows
    than are run, ``far`` has how many still give the same, with what does not. ``exact`` has what gives
    others where there are exactly so many, ``gradients`` what gives other gradients alone then, ``alone``
    what gives one row such: its name, and words. ``untold`` are the numbers that code names which could not
    be run alone, ``exactly`` those for which another number is made of sizes alone.
    """

    near: dict[int, str] = dataclasses.field(default_factory=dict)
    far: dict[int, str] = dataclasses.field(default_factory=dict)
    exact: dict[int, str] = dataclasses.field(default_factory=dict)
    gradients: dict[int, str] = dataclasses.field(default_factory=dict)
    untold: set[int] = dataclasses.field(default_factory=set)
    exactly: set[int] = dataclasses.field(default_factory=set)
    alone: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class RowsMet:
    """How many rows there are where some call first gives others than for the ``n`` of a run.

    Calls that may go by their number are run alone on others: each small number, as many as code names that
    ran, for so many too, or as is usual. Of the model's own code that are those which a ``watch`` saw to be
    told of it, all where it saw nothing; of all calls, or ``among`` some.
    """

    def __init__(self, on: FormOnRows, n: int, ran: CodeRun, among: Collection[Call] | None = None) -> None:
        self._code, self._form = code, form = on.code, on.form
        self._dim, self._shapes, self._at, self._begin = on.dim, on.shapes, on.device, on.begin
        self._n, self._ran = n, ran
        self._symbol = symbol(on.dim.name)
        self._of_sizes = set[int]()
        for call in form.calls:
            is_by_rows = any(id(c) in self._of_sizes or self._tells(c, call) for c in call.inputs)
            self._of_sizes |= {id(call)} if is_by_rows and _is_of_sizes(call) else set()
        own = {c for c in (form.calls if among is None else among) if code.is_own(c)}
        self._asked = [c for c in form.calls if c in own or (among is None and id(c) in self._of_sizes)]
        self._is_any = any(not c.is_size or plain_name(c) not in _EVEN for c in self._asked)
        kept = [c for c in form.calls if c in own or id(c) in self._of_sizes or c.has_effect]
        kept = kept if self._is_any else []
        self._needed = {id(c) for c in kept}.union(*({id(i) for i in c.inputs} for c in kept))
        self._ahead = _setters_ahead(form.calls, own)
        self._is_written = any(c.writes or c.mutated or c.frees for c in form.calls)
        self._has_functions = functions_exist()
        self._applying: set[int] = set()
        given = (v for c in form.calls if id(c) in self._of_sizes for v in (*c.args, *c.kwargs.values()))
        self._numbers_named = {v for v in given if type(v) is int and 2 < v <= MOST}
        self._evenly: set[int] = set()
        self._few: dict[int, Any] = {}
        self._made: dict[tuple[int, float], Any] = {}
        self._most: dict[int, int] = {}
        self._lying: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._known: list[tuple[int, int, bool]] = []
        self._untold = set[int]()
        self._firsts: list[int] = []
        self._met = Met()

    def keep(self, call: Call, value: Any) -> None:
        """Be shown a call with its value, of a run of which all is asked once it is over."""
        if id(call) in self._needed:
            self._few[id(call)] = value if call.op == "get_attr" else mapped(self._kept, value)

    def _kept(self, leaf: Any) -> Any:
        """A leaf as it is, where others may write to it."""
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if self._is_written else leaf.detach()

    def kept(self, rows: str) -> Met:
        """What is found with the values kept of a run on these rows, each of which has its layer's own."""
        self._firsts = [*map(rows.index, rows)]
        for call in self._asked if self._is_any else ():
            self._ask(call, self._few.get(id(call)))
        if self._ahead:
            self._begin()
        return self._met

    def found(self, run: Rows, rows: str) -> Met:
        """What is found in a run of the form on these rows."""
        if self._is_any:
            run("ab", self.keep)
            self._begin()
        return self.kept(rows)

    def _tells(self, given: Call, call: Call) -> bool:
        """Whether a tensor of the inputs' tells a call made of sizes how many rows there are."""
        sizes = [n for each in self._shapes.get(id(given), ()) for n in each]
        if plain_name(call) == "size" and len(call.args) == 2 and isinstance(call.args[1], int):
            sizes = [self._shapes[id(given)][0][call.args[1]]]
        return any(self._symbol in getattr(n, "free_symbols", ()) for n in sizes)

    def _ask(self, call: Call, value: Any) -> None:
        self._known, self._untold = [], set()
        if id(call) in self._of_sizes:
            self._try(call, functools.partial(self._ask_of_sizes, value=value))
        else:
            self._try(call, functools.partial(self._ask_code, value=value))

    def _try(self, call: Call, ask: Callable[[Call], None]) -> None:
        try:
            ask(call)
        except of_models() as error:
            # any Python of the model, on rows that it may not take, or whose axis is not known
            _logger.debug("%s was not run on more rows: %s", call.name, error)

    def _ask_of_sizes(self, call: Call, value: Any) -> None:
        self._compare_number(call, value)
        if isinstance(value, Tensor):
            self._compare_rows(call, value, self._most_of(call))

    def _ask_code(self, call: Call, value: Any) -> None:
        times, before = self._most_named(call), 0
        if not self._is_new(call, times):
            return
        if self._has_functions:
            self._try(call, self._look_for_functions)
        try:
            counts = self._counts(call)
            if call.is_random and (counts.asks or counts.places):
                self._quiet(call)
            holds_back = self._may_hold_back(call)
            twos = self._twos(call, value) if counts.asks else {}
        except Exception:
            self._tell_untold(self._code.numbers(call, self._ran.may_run))
            raise
        if counts.asks:
            doing = None if holds_back or counts.reads else self._doing(call)
            if doing is None:
                self._ask_of_each_number(call, twos, counts.reads)
            else:
                self._ask_once(call, twos, doing)
            if not holds_back and self._may_hold_back(call):  # in code that ran on some number alone
                self._ask_of_each_number(call, self._twos(call, value), counts.reads)
        elif not counts.places:
            return
        if call.is_random:
            value = self._of_many(call, 1)
        while times > before:
            with self._ran:
                self._compare_rows(call, value, times)
            before, times = times, self._most_named(call)

    def _look_for_functions(self, call: Call) -> None:
        """Note whether a call applies functions with a backward of their own, by whatever names."""
        if has_functions(self._given_and_made(call, "ab", True)[0]):
            self._applying.add(id(call))

    def _quiet(self, call: Call) -> None:
        """Have a call leave out nothing by dropout; where it draws other noise, let that be one number.

        Raises :class:`ValueError` where it draws by itself, as from numpy.
        """
        seed(self._at)
        self._of_rows(call, "ab", False)
        if is_drawn(self._at):
            self._evenly.add(id(call))
            once, again = (tensors(self._of_rows(call, "ab", False)[0]) for _ in range(2))
            if not all(map(is_close, once, again)):
                raise ValueError("noise that is not torch's may go by rows")

    def _still(self, call: Call) -> AbstractContextManager[Any]:
        """Within it a call draws no noise that may go by rows: see :meth:`_quiet`."""
        if id(call) in self._evenly:
            return EvenNoise(self._at, any_op=True)
        return NoDropout() if call.is_random else nullcontext()

    def _counts(self, call: Call) -> RowCounts:
        """What a call asks of how many rows there are, more than to hand it on."""
        counts, has_own = RowCounts(_COUNTED), self._may_be_own(call)
        seed(self._at)
        seeded = generators()
        try:
            self._of_rows(call, ("ab" * _COUNTED)[:_COUNTED], has_own, counts)
        except of_models() as error:
            # any Python of the model, which may need a number for what code is told
            _logger.debug("%s was not told of counts: %s", call.name, error)
            counts.asks = True
        if counts.asks:
            self._begin()  # the call may have kept a count
        # by what it reads, or draws as numbers, it may come to another backward, which was not followed
        counts.asks |= has_own and (counts.reads or generators() != seeded or is_hooked(self._code, call))
        counts.asks |= self._code.may_ask_unseen(call, self._ran.may_run)
        return counts

    def _doing(self, call: Call) -> Doing | None:
        """What the one layer inside of a call does that asks, if nothing else in it goes by rows' number."""
        is_alone = call.op == "call_module" and not (call.is_random or self._ahead.get(id(call)))
        if not is_alone or self._form.leaves_anything(call) or self._may_be_own(call):
            return None
        if self._code.is_scripted(call) or self._code.may_ask_unseen(call, self._ran.may_run):
            return None
        counts = AskingLayers(_COUNTED, submodule(self._code.model, call.target))
        seed(self._at)
        try:
            made, _ = self._of_rows(call, ("ab" * _COUNTED)[:_COUNTED], False, counts)
        except of_models() as error:
            # any Python of the model, which may need a number for what code is told
            _logger.debug("%s was not told of counts: %s", call.name, error)
            return None
        finally:
            self._begin()  # the call may have kept a count
        return counts.doing if all(map(counts.has_rows, tensors(made))) else None

    def _ask_once(self, call: Call, twos: Mapping[str, _Made], doing: Doing) -> None:
        """Ask of each number, unless what asks in a call was told to do the same of them in another call.

        As in the other mode, or in another form of the model.
        """
        asking = Call("call_module", f"{call.target}.{doing.path}")
        codes = frozenset(f.__code__ for f, _ in self._code.functions(asking))
        kind = codes, self._code.told(asking), self._code.even(asking), doing.done
        known = self._code.same_by_number.setdefault(kind, set())
        if not self._numbers(call) <= known:
            with ResultsWithin(submodule(self._code.model, asking.target), doing.axis) as within:
                same = self._ask_of_each_number(call, twos, False, within)
            if not (self._known or self._may_hold_back(call)):
                known |= same

    def _may_be_own(self, call: Call) -> bool:
        """Whether a call may have a backward that is not torch's own: by its code, or as it was seen to."""
        return id(call) in self._applying or may_be_own(self._code, call)

    def _may_hold_back(self, call: Call) -> bool:
        """Whether a call may give values that gradients do not pass, by its code that ran so far."""
        return may_hold_back(self._code, call, self._ran.may_run)

    def _twos(self, call: Call, value: Any) -> dict[str, _Made]:
        """What a call gives for two rows, unlike or alike."""
        has_gradients = self._may_hold_back(call) or self._may_be_own(call)
        seed(self._at)
        twos = {rows: self._of_rows(call, rows, has_gradients) for rows in ("ab", "aa")}
        given = ((c, i) for c in call.inputs for i in range(len(tensors(self._few[id(c)]))))
        is_by_groups = any(k > 1 for each in given for _, k in self._places(*each))
        if is_by_groups and not self._is_same(call, twos["ab"], (value, None), self._n):
            raise ValueError("what belongs to a row does not lie together")
        return twos

    def _ask_of_each_number(
        self, call: Call, twos: Mapping[str, _Made], reads: bool, within: ResultsWithin | None = None
    ) -> set[int]:
        """Note for how many rows, of small numbers and those that code names, they are others than of two.

        Rows a and b in turn; row a alone of odd numbers where code reads what they hold, or makes something
        without rows. A backward of its own may be applied to exactly so many. Returns those that are not, nor
        what the layer ``within`` gives of them.
        """
        same = {*_LEAST}
        has_gradients: bool | None = twos["ab"][1] is not None or (None if self._has_functions else False)
        made = tensors(twos["ab"][0])
        is_alike = reads or not all(self._places(call, i) for i in range(len(made)))

        def ask(call: Call, n: int) -> None:
            two = "aa" if is_alike and n % 2 else "ab"
            made = self._of_rows(call, (two * n)[:n], has_gradients)
            of, is_applied = twos[two], has_gradients is None and made[1] is not None
            if is_applied:
                of = self._of_rows(call, two, True)
            if self._is_same(call, of, made, n):
                same.update([n] if within is None or within.is_same(given[two], n) else [])
                return
            again = self._of_rows(call, two, has_gradients or is_applied)
            if self._is_same(call, of, again, 2):  # else it never answers alike
                is_made_alike = self._is_same(call, (of[0], None), (made[0], None), n)
                self._note(call, n, n, in_gradients=is_made_alike)

        if has_gradients:
            self._try(call, functools.partial(ask, n=1))
            more = [self._of_rows(call, ("ab" * n)[:n], has_gradients)[1] for n in (3, 4, 6)]
            if all(
                g is not None and not self._is_same(call, (None, twos["ab"][1]), (None, g), 2) for g in more
            ):
                # a backward that goes by any number is left to ``backwards``
                twos, has_gradients = {rows: (made, None) for rows, (made, _) in twos.items()}, False
        given: dict[str, Tensor] = {}
        if within is not None:
            for rows in twos:
                self._of_rows(call, rows, has_gradients)
                given[rows] = within.last
        asked = {*_LEAST}
        while new := self._numbers(call) - asked:
            with self._ran:
                for n in sorted(new):
                    self._try(call, functools.partial(ask, n=n))
            asked |= new
        return same

    def _numbers(self, call: Call) -> set[int]:
        """How many rows to run a call on: few, parts of the example, as many as its code may name."""
        given = [t for c in call.inputs for t in tensors(self._few[id(c)])]
        named = self._code.numbers(call, self._ran.may_run)
        sizes = {1, *(n for t in given for n in itertools.accumulate(t.shape[1:], operator.mul))}
        near = {
            n // size + off for n in named for size in sizes if size and n % size == 0 for off in (-1, 0, 1)
        }
        near |= {n for n in range(3, self._dim.example + 1) if self._dim.example % n == 0}
        near |= {n // k for n in named for k in named if n % k == 0}.union(*map(_root_and_square, named))
        each = sum(t.nbytes for t in given) / self._n or 1
        most = min(MOST, max(2 * self._n, _MOST_BYTES_NAMED // each))
        self._tell_untold({n for n in named if most < n <= MOST})
        return {n for n in near.union(_SMALL) if n <= most}

    def _is_same(self, call: Call, two: _Made, made: _Made, n: int) -> bool:
        """Whether ``n`` rows give what ``two`` do; what has no rows may be a mean or a sum.

        Raises :class:`ValueError` where there are as many tensors as rows, or data say: none is another's.
        """
        some, others = tensors(two[0]), tensors(made[0])
        if len(some) != len(others):
            raise ValueError("more rows give other numbers of tensors")
        for i, (of, t) in enumerate(zip(some, others, strict=True)):
            along = self._places(call, i)
            is_mean = not along and t.shape == of.shape
            if is_mean and not any(is_close(t, k * of, ROUNDED) for k in (1, n / 2)):
                return False
            for axis, k in along:
                rows = _taken(of, axis, k, [place % 2 for place in range(n)])
                if rows.shape != t.shape or _others(t, rows, axis):
                    return False
        (a, b) = two[1], made[1]
        return a is None or b is None or is_close(a, b, ALLOWED)

    def _of_rows(
        self, call: Call, rows: str, has_gradients: bool | None, counts: RowCounts | None = None
    ) -> _Made:
        """What a call gives for rows a and b in places such as ``"abab"``; where asked for, gradients of a.

        These are of what it is given, and of its weights. None asks for them if a function with a backward of
        its own is behind what it gives.
        """
        made, given = self._given_and_made(call, rows, has_gradients is not False, counts)
        if not (has_gradients or (has_gradients is None and has_functions(made))):
            return made, None
        is_module = call.op == "call_module"
        module = submodule(self._code.model, call.target) if is_module else None
        weights = [*given, *(p for p in module.parameters() if p.requires_grad)] if module else given
        along = [(t, axes(call, i, self._dim, self._shapes)) for i, t in enumerate(tensors(made))]
        with nullcontext() if counts is None else followed(made, counts):
            return made, gradient_of([each for each in along if each[1]], weights, (0,))

    def _given_and_made(
        self, call: Call, rows: str, has_gradients: bool, counts: RowCounts | None = None
    ) -> tuple[Any, list[Tensor]]:
        """What a call gives for such rows, and the tensors that it was given of which gradients can be asked.

        There are these only where it ``has_gradients``.
        """
        given: list[Tensor] = []
        both, places = [0, max(self._firsts)], ["ab".index(row) for row in rows]

        def grown(of: Call) -> Any:
            if id(of) in self._of_sizes:
                number = self._of_many(of, len(rows) / self._n)
                return number if counts is None else counts.counted(number)
            value = self._few[id(of)]
            along = {id(t): self._places(of, i) for i, t in enumerate(tensors(value))}

            def put(leaf: Any) -> Any:
                own = along.get(id(leaf), [])
                for axis, k in own:
                    leaf = _taken(leaf, axis, k, both)
                if own and has_gradients and leaf.is_floating_point():
                    leaf = leaf.detach().requires_grad_()
                    given.append(leaf)
                for axis, k in own:
                    leaf = _taken(leaf, axis, k, places)
                return leaf.clone() if call.writes and isinstance(leaf, Tensor) else leaf

            return mapped(put, value)

        with torch.set_grad_enabled(has_gradients):
            args, kwargs = map_calls(call.args, grown), map_calls(call.kwargs, grown)
            scripted = counts is not None and self._code.is_scripted(call)
            with counts or nullcontext(), RowsLost(counts) if counts and scripted else nullcontext():
                return self._run(call, args, kwargs, grown), given

    def _places(self, call: Call, i: int) -> list[tuple[int, int]]:
        """The axes of a call's tensor along which rows lie, each with how many places every row has."""
        if (at := (id(call), i)) not in self._lying:
            known = self._shapes.get(id(call), ())
            sizes = {axis: known[i][axis] for axis in self._along(known[i])} if i < len(known) else {}
            if any(self._symbol in (size / self._symbol).free_symbols for size in sizes.values()):
                raise ValueError("rows lie along no axis of their own")
            shape = tensors(self._few[id(call)])[i].shape
            self._lying[at] = [(axis, shape[axis] // self._n) for axis in sizes]
        return self._lying[at]

    def _run(self, call: Call, args: Any, kwargs: Any, given: Callable[[Call], Any]) -> Any:
        """What a call gives, behind those that set its module's attributes, which are ``given`` others."""
        ahead = self._ahead.get(id(call), ())
        if ahead or self._form.leaves_anything(call):
            self._begin()
        behind = [(s, map_calls(s.args, given), map_calls(s.kwargs, given)) for s in ahead]
        with asking(), self._still(call):
            for each in (*behind, (call, args, kwargs)):
                made = run_call(self._code.model, self._form.constants, *each, {}, self._at)
        return made

    def _compare_number(self, call: Call, value: Any) -> None:
        """Note from where on a number is another that is the same for few and for fewer rows."""
        is_number = isinstance(value, Tensor) and not value.ndim
        if (is_number or isinstance(value, (int, float))) and self._of_many(call, _FEWER) == value:
            same = 1
            steps = [t for t in (*_STEPS, _FAR) if t <= self._most_of(call)]
            for times in steps:
                if self._of_many(call, times) != value:
                    self._note(call, self._n * same, self._n * times)
                    return
                same = times
            met = [value]
            for n in sorted(self._numbers_named | {*_SMALL}):
                self._try(call, functools.partial(self._compare_exactly, n=n, met=met))

    def _compare_exactly(self, call: Call, n: int, met: list[Any]) -> None:
        """Note so many rows where a number is one that was not ``met`` for others yet."""
        made = self._of_many(call, n / self._n)
        if len(met) <= _MOST_MET and all(made != other for other in met):
            met.append(made)
            self._met.exactly.add(n)

    def _compare_rows(self, call: Call, value: Any, times: int) -> None:
        for i in range(len(tensors(value))):
            for axis in axes(call, i, self._dim, self._shapes):
                self._compare(call, value, i, axis, times)

    def _is_new(self, call: Call, asked: Any) -> bool:
        """Whether no call like this one was ``asked`` so yet; else what was found of that is told of it."""
        if id(call) in self._ahead:
            return True
        known = self._code.met
        given = [t for c in call.inputs for t in tensors(self._few[id(c)])]
        kind = (
            frozenset(f.__code__ for f, _ in self._code.functions(call)),
            self._code.told(call),
            self._code.even(call),
            self._code.model.training,
            str(map_calls((call.args, call.kwargs), lambda c: None)),
            asked,
            call.target if is_users_operator(call.target) else None,
            *((t.shape, t.dtype) for t in given),
        )
        if kind not in known:
            self._known = known[kind] = []
            self._untold = self._code.untold[kind] = set()
            return True
        for met in known[kind]:
            self._tell(call, *met)
        self._tell_untold(self._code.untold[kind])
        return False

    def _most_named(self, call: Call) -> int:
        """As often as rows may come for code to come to the numbers that it names, or as is usual.

        One that takes more rows than may be given is come to by their places: rows times other sizes.
        """
        given = [t for c in call.inputs for t in tensors(self._few[id(c)])]
        n_bytes = sum(t.nbytes for t in given) or 1
        usual = max((times for times in _STEPS if times * n_bytes <= _MOST_BYTES), default=0)
        most = min((self._most_of(c) for c in call.inputs if id(c) in self._of_sizes), default=_FAR)
        most_named = min(most, _MOST_ROWS // self._n + 1, _MOST_BYTES_NAMED // n_bytes)
        sizes = {self._n, *(n for t in given for n in itertools.accumulate(t.shape, operator.mul))}
        numbers = self._code.numbers(call, self._ran.may_run)
        named = (n // size + 1 for n in numbers for size in sizes if size >= self._n)
        return max(min(most, usual), max((times for times in named if times <= most_named), default=0))

    def _most_of(self, call: Call) -> int:
        """As often as rows may come for something made of sizes, and for what that is made of."""
        if id(call) in self._most:
            return self._most[id(call)]
        made = zip(tensors(self._few[id(call)]), self._shapes.get(id(call), ()), strict=False)
        grown = [(tensor.numel(), len(self._along(sizes))) for tensor, sizes in made]
        most = min((self._most_of(c) for c in call.inputs if id(c) in self._of_sizes), default=_FAR)
        fits = (t for t in (*_STEPS, _FAR) if all(n * t**k <= _MOST_ELEMENTS for n, k in grown))
        self._most[id(call)] = min(most, max(fits, default=0))
        return self._most[id(call)]

    def _of_many(self, call: Call, times: float) -> Any:
        def grown(given: Call) -> Any:
            if id(given) in self._of_sizes:
                return self._of_many(given, times)
            value = self._few[id(given)]
            made = enumerate(tensors(value))
            each = {id(t): self._grown(given, i, t, times, call) for i, t in made}
            return mapped(lambda leaf: each.get(id(leaf), leaf), value)

        if (id(call), times) not in self._made:
            args, kwargs = map_calls(call.args, grown), map_calls(call.kwargs, grown)
            made = self._run(call, args, kwargs, grown)
            if id(call) not in self._of_sizes:
                return made
            self._made[id(call), times] = made
        return self._made[id(call), times]

    def _along(self, sizes: Iterable[Size]) -> list[int]:
        return [a for a, n in enumerate(sizes) if self._symbol in getattr(n, "free_symbols", ())]

    def _grown(self, given: Call, i: int, tensor: Tensor, times: float, call: Call) -> Tensor:
        """A tensor with each row so many times; sizes alone of it are asked for on the meta device."""
        along = self._along(self._shapes[id(given)][i])
        if not along:
            return tensor
        if along != axes(given, i, self._dim, self._shapes) or len(along) > 1:
            raise ValueError("rows lie along no axis of their own")
        if call.is_size:
            shape = [int(n * times) if a in along else n for a, n in enumerate(tensor.shape)]
            return tensor.new_empty(shape, device="meta")
        if times == int(times):
            return tensor.repeat_interleave(int(times), along[0])
        size = tensor.shape[along[0]]
        places = torch.arange(int(size * times), device=tensor.device) % size
        return tensor.index_select(along[0], places)

    def _compare(self, call: Call, value: Any, i: int, axis: int, times: int) -> None:
        """Note the first row that is another, where the few are the same in any place."""
        few = tensors(value)[i]
        first = torch.tensor(self._firsts, device=few.device)

        def others(times: int) -> list[int]:
            many = tensors(self._of_many(call, times))[i : i + 1]  # data may have made none
            there = few.index_select(axis, first).repeat_interleave(times, axis)
            return [place for t in many if t.shape == there.shape for place in _others(t, there, axis)]

        if _others(few, few.index_select(axis, first), axis) or not (found := others(times)):
            return
        if found[0] >= self._n:
            self._note(call, found[0], found[0] + 1)
            return
        same = 1
        while times - same > 1:
            between = (same + times) // 2
            same, times = (same, between) if others(between) else (between, times)
        self._note(call, self._n * same, self._n * times)

    def _note(self, call: Call, same: int, other: int, *, in_gradients: bool = False) -> None:
        """A call gives for ``other`` rows what it does not for as many as the ``same`` and fewer.

        Where both are one number, for so many alone; maybe only ``in_gradients``.
        """
        self._known.append((same, other, in_gradients))
        self._tell(call, same, other, in_gradients)

    def _tell_untold(self, numbers: Collection[int]) -> None:
        """A call, and any like it, is not told of so many rows that its code names."""
        self._untold.update(numbers)
        self._met.untold.update(numbers)

    def _tell(self, call: Call, same: int, other: int, in_gradients: bool) -> None:
        if other == same == 1:
            self._met.alone.append(
                (call.name, f"{call_and_place(call)}, whose gradients are others of one row")
            )
        elif other == same:
            what = "the gradients of whose rows" if in_gradients else "whose rows"
            words = (
                f"{call_and_place(call)}, {what} hang on how many there are, others where they are {other}"
            )
            self._met.exact.setdefault(other, words)
            if in_gradients:
                self._met.gradients.setdefault(other, words)
        elif other <= MOST:
            self._met.near.setdefault(
                other,
                f"{call_and_place(call)}, whose rows hang on how many there are, others from {other} on",
            )
        else:
            self._met.far.setdefault(max(same, self._n), call_and_place(call))


def _setters_ahead(calls: Iterable[Call], among: Collection[Call]) -> dict[int, tuple[Call, ...]]:
    """By id of each call ``among`` some that is behind others that set attributes of modules, those."""
    found: dict[int, tuple[Call, ...]] = {}
    setters: tuple[Call, ...] = ()
    for call in calls:
        if setters and call in among:
            found[id(call)] = setters
        if call.has_effect:
            setters = (*setters, call)
    return found


def _taken(tensor: Tensor, axis: int, k: int, places: Sequence[int]) -> Tensor:
    """The rows in some places along an axis, of which each has ``k``."""
    each = torch.tensor([place * k + i for place in places for i in range(k)], device=tensor.device)
    return tensor.index_select(axis, each)


def _is_of_sizes(call: Call) -> bool:
    """Whether a call makes something of sizes alone."""
    is_made = call.op in ("call_function", "call_method") and not call.writes
    unknown = Depends.INPUT | Depends.RANDOM | Depends.DATA
    return is_made and bool(call.depends & Depends.SHAPE) and not call.depends & unknown


def _root_and_square(n: int) -> set[int]:
    """What code that names a number asks for where it squares a size, or takes its root."""
    root = math.isqrt(n)
    return {n * n, root if root * root == n else n}


def _others(x: Tensor, y: Tensor, axis: int) -> list[int]:
    """The places along an axis at which tensors differ, by more than rounding."""
    if not x.numel() or torch.equal(x, y):
        return []
    level = ROUNDED[torch.float32] if is_whole(x) else level_of(x.dtype, ROUNDED)
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64).nan_to_num() for t in (x, y))
    apart = (x - y).abs() > level * y.abs().max()
    return apart.movedim(axis, 0).reshape(apart.shape[axis], -1).any(1).nonzero().flatten().tolist()
