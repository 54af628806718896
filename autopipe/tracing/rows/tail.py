"""The tail of a model: the ops from those that mix rows on, which are right on a whole batch alone.

Whether rows are mixed at all is told by ``mixing``; running the tail once on all microbatches together is
left to ``runtime``.

What is before the tail gives row by row what the tail takes, so that its values in microbatches, joined along
the batch, are those of the batch. That is looked at value by value, as in ``mixing``, and then tried: a batch
in two pieces up to the tail, and from there on as one, gives what the batch gives. What a whole model is
asked about its rows is asked of what is ahead, which may hang on how many there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...errors import InputError
from ...graph import Dim, OpGraph, batch_dim
from ...units import Size
from ..calls.call import Call, Recording, map_calls
from ..calls.derivatives import derived
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..calls.named import are_nested, place_of
from ..calls.perform import run_call
from ..code.own_code import OwnCode
from ..inputs.contents import is_whole
from ..inputs.layout import concatenated, of_blocks
from ..inputs.structure import flatten, unflatten
from ..members import submodule
from ..sizes.dims import axis_of
from ..sizes.rerun import replay
from ..sizes.trials import first_line
from ..sizes.variation import Mixing, Tail
from ..state.state import seed
from .mixing import mixing, rows_of
from .per_call_state import carriers
from .results import ALLOWED, ROUNDED, Rows, is_close
from .varied_data import made_of_rows, unlike

__all__ = ["ahead_of", "find_tail", "is_late", "join", "row_axes", "taken_amiss"]

MOST_PARAMETERS = 0.5
"""The share of a model's parameters that its tail may have: with more, the mixing is in the middle."""

Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_LAYOUTS = frozenset({False, True})
"""Whether several places of a row have others' between them (:attr:`Tail.blocks`), or lie together."""


def row_axes(ops: OpGraph, name: str) -> tuple[int | None, ...]:
    """Where the rows of a batch lie in each tensor of an op's value."""
    batch = batch_dim(ops.dims)
    assert batch is not None
    return tuple(axis_of(t.shape, batch.name) for t in ops.by_name[name].outputs)


def join(parts: Sequence[Any], axes: Sequence[int | None], blocks_of: Sequence[int] = ()) -> Any:
    """A value of the batch from those of its pieces: tensors along their axes, else as the first has it.

    ``blocks_of`` are the pieces' numbers of rows where a value is in blocks (:attr:`Tail.blocks`). Raises
    :class:`InputError` where data have made other things of some pieces than of others.
    """
    if len(parts) == 1:
        return parts[0]
    each, (spec, *_) = zip(*map(flatten, parts), strict=True)
    if len({tuple(v.ndim if isinstance(v, Tensor) else None for v in leaves) for leaves in each}) > 1:
        raise InputError(
            "parts of the batch give other tensors than others, which cannot be joined; pass n_microbatches=1"
        )
    columns = zip(*each, strict=True)
    places = iter(axes)
    out = []
    for column in columns:
        axis = next(places) if isinstance(column[0], Tensor) else None
        if axis is None:
            out.append(column[0])
        else:
            out.append(of_blocks(column, axis, blocks_of) if blocks_of else concatenated(column, axis))
    return unflatten(spec, out)


def taken_amiss(piece: fx.Graph, whole: fx.Graph, tail: Tail) -> str:
    """The first value, by name, that the tail of a batch's form takes and a piece's form does not make.

    Forms have common names for calls that are alike: one with other constants, as of another column of a
    table, is something else under the same name, and so is what is made of it.
    """
    made = {node.name: node for node in piece.nodes}
    inside, others = {*tail.ops}, set[str]()
    for node in whole.nodes:
        given = [n for n in node.all_input_nodes if n.op not in ("placeholder", "get_attr")]
        if node.op == "output" or node.name in inside:
            taken = (n.name for n in given if n.name not in inside and n.name not in tail.again)
            amiss = next((name for name in taken if name not in made or name in others), "")
            if amiss:
                return amiss
        elif node.name in made and (
            any(n.name in others for n in given) or _has_other_constants(node, made[node.name])
        ):
            others.add(node.name)
    return ""


def _has_other_constants(a: fx.Node, b: fx.Node) -> bool:
    (ours, spec), (theirs, other_spec) = (flatten((list(n.args), dict(n.kwargs))) for n in (a, b))
    return spec == other_spec and any(map(_are_other_constants, ours, theirs))


def _are_other_constants(a: Any, b: Any) -> bool:
    """Whether both are constants, and not the same; a value, or nothing, in the place of one is no other."""
    if isinstance(a, slice) and isinstance(b, slice):
        parts = ((x.start, x.stop, x.step) for x in (a, b))
        return any(map(_are_other_constants, *parts))
    are_plain = not any(x is None or isinstance(x, fx.Node) for x in (a, b))
    return are_plain and type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a != b


def find_tail(
    code: OwnCode,
    forms: Mapping[bool, Recording],
    given: Mapping[str, Tensor],
    dims: Sequence[Dim],
    shapes: Shapes,
    device: torch.device,
    start: Callable[[bool], None],
    found: Mixing,
    names: Collection[str] = (),
    *,
    takes: Callable[[int], bool],
    n_rows: int = 0,
) -> Tail:
    """The tail of a model ``found`` to mix rows, or from calls by ``names`` on; ``start`` sets the mode.

    ``takes`` tells for how many rows the forms are right: two alone may mix where more hide that. For
    ``n_rows`` see :func:`mixing`.

    Layers that keep statistics of batches (batch norm) belong to it if they come late in a model that mixes
    rows in evaluation too. Else they are left out, and each microbatch is a batch of its own there.
    """
    dim, model = batch_dim(dims), code.model
    if dim is None or found.points or not (found.always or found.training or found.carried or names):
        return Tail()
    if found.elsewhere and not names:
        return Tail(obstacle="it does so on other data than the example's")

    def tried(quiet: bool) -> Tail:
        modes = (False, True) if found.always or names else (True,)
        starts = {flag: functools.partial(_start, model, forms[flag], start, flag, quiet) for flag in modes}

        def view(flag: bool, rows: Mapping[str, Tensor], dim: Dim) -> _View:
            run = rows_of(model, forms[flag], rows, dim, device, starts[flag])
            out = _View(model, forms[flag], run, dim, shapes)
            starts[flag]()
            out.see_twice(rows, device)
            return out

        views = {flag: [view(flag, given, dim)] for flag in modes}
        for flag in modes:
            told = model, forms[flag], given, dim, shapes
            others = [*unlike(*told), *unlike(*told, reads=True)]
            is_cut = dim.example > 2 and takes(2)
            for rows, of in _two_of((given, *others), dim) if is_cut else ((each, dim) for each in others):
                with contextlib.suppress(Exception):  # any Python of the model, on data that it may not take
                    views[flag].append(view(flag, rows, of))
        tails = (_tail(model, views, given, device, start, begun, lasts) for lasts in (True, False))
        narrow = next(tails)
        if not (found.always or found.training):
            return dataclasses.replace(narrow, unasked=found.unasked, nearly=found.nearly)
        judged = judge(narrow, views, starts)
        return judged if judged.ops else judge(next(tails), views, starts)

    def judge(tail: Tail, views: Mapping[bool, Sequence[_View]], starts: dict[bool, Any]) -> Tail:
        """The tail if nothing ahead of it mixes rows, or else why there is none."""
        if not tail.ops:
            return tail
        ahead = ahead_of({flag: forms[flag] for flag in views}, tail)
        if False not in ahead:
            ahead, starts = {False: ahead[True]}, {False: starts[True]}

        def begin(flag: bool) -> None:
            starts[flag]()

        mixed = mixing(code, ahead, given, dims, shapes, device, begin, takes=takes, n_rows=n_rows)
        ahead_of_it = mixed.always or mixed.training
        if ahead_of_it:
            return Tail(obstacle=f"ahead of what follows from it is {ahead_of_it}")
        return dataclasses.replace(tail, unasked=mixed.unasked, nearly=mixed.nearly)

    begun = frozenset(names) | (carriers(code, forms[True]) if found.carried else frozenset[str]())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            norms = _norms(forms[True], begun)
            tail = Tail() if norms and not found.always else tried(quiet=False)
            if norms and not tail.ops:
                late = tried(quiet=True)
                return dataclasses.replace(late, before=f"{norms[0]} in training") if late.ops else tail
            return tail
        except of_models() as error:
            # any Python of the model, on rows it may not take
            if any(form.takes_grad_mode for form in forms.values()):
                return Tail(obstacle="it takes derivatives, which rows joined before it have none of")
            return Tail(obstacle=f"its rows could not be told apart: {first_line(error)}")


def ahead_of(forms: Mapping[bool, Recording], tail: Tail) -> dict[bool, Recording]:
    """Forms up to their tail, by training flag, which give what that takes; one of both modes stays one."""
    found = {id(form): _ahead(form, tail) for form in forms.values()}
    return {flag: found[id(form)] for flag, form in forms.items()}


def _ahead(form: Recording, tail: Tail) -> Recording:
    *calls, output = (c for c in form.calls if c.name not in tail.ops)
    taken = (c for c in _taken(form, tail.ops) if c.name not in tail.again)
    given = Call("output", output.target, (tuple(taken),), name=output.name)
    return dataclasses.replace(form, calls=[*calls, given], guards=[])


def _taken(form: Recording, names: Iterable[str]) -> list[Call]:
    """The calls outside the tail whose values it takes; the form's output is at its end."""
    own = {*names}
    inside = [c for c in form.calls if c.name in own or c.op == "output"]
    found = dict.fromkeys(c for call in inside for c in call.inputs if c.name not in own)
    return [c for c in found if c.op not in ("placeholder", "get_attr")]


def is_late(model: nn.Module, form: Recording, names: Collection[str]) -> bool:
    """Whether what follows of calls by ``names`` has few enough of a model's parameters to be its tail."""
    found = set[int]()
    for call in form.calls:
        if call.op != "output" and (call.name in names or any(id(c) in found for c in call.inputs)):
            found.add(id(call))
    return _share(model, (c for c in form.calls if id(c) in found)) <= MOST_PARAMETERS


def _norms(form: Recording, begun: Collection[str] = ()) -> list[str]:
    """The modules that write buffers as they run, such as statistics of batches, but for those ``begun``."""
    return [str(c.target) for c in form.calls if c.mutated and c.op == "call_module" and c.name not in begun]


def _start(model: nn.Module, form: Recording, start: Callable[[bool], None], flag: bool, quiet: bool) -> None:
    """Set the mode, with what keeps statistics in evaluation where it is to be ``quiet``."""
    start(flag)
    for path in _norms(form) if quiet else ():
        submodule(model, path).eval()


def _tail(
    model: nn.Module,
    views: Mapping[bool, Sequence[_View]],
    given: Mapping[str, Tensor],
    device: torch.device,
    start: Callable[[bool], None],
    names: frozenset[str],
    lasts: bool,
) -> Tail:
    """What follows of ops by ``names``, or in any of the ``views`` of each form, which are of other data.

    What mixes rows on the way alone does not count where only what ``lasts`` does.
    """
    every = [view for each in views.values() for view in each]
    while True:
        grown = names.union(*(view.follow(names, lasts) for view in every))
        frontiers = [view.frontier(grown) for view in every]
        grown = grown.union(*(unfit for _, unfit in frontiers))
        lies = _layouts(every, grown)
        grown |= {name for name, layouts in lies.items() if not layouts}
        if grown == names:
            break
        names = grown
    if not names:
        return Tail(obstacle="no op of its own mixes them")
    again = frozenset[str]().union(*(found for found, _ in frontiers))
    blocks = {name for name, layouts in lies.items() if False not in layouts}
    obstacle = _too_large(model, (each[0] for each in views.values()), names)
    if not obstacle and False in views:
        begin = functools.partial(start, False)
        obstacle = views[False][0].differs(names | again, blocks, given, device, begin)
    if obstacle:
        return Tail(obstacle=obstacle)
    return Tail(tuple(sorted(names)), tuple(sorted(again - names)), blocks=tuple(sorted(blocks)))


def _layouts(views: Sequence[_View], names: frozenset[str]) -> dict[str, frozenset[bool]]:
    """Of what ops by ``names`` take and is joined, how it may lie in all views: in blocks, or row by row."""
    found: dict[str, frozenset[bool]] = {}
    for view in views:
        for call in view.joined(names):
            found[call.name] = found.get(call.name, _LAYOUTS) & view.joins(call)
    return found


def _too_large(model: nn.Module, views: Iterable[_View], names: frozenset[str]) -> str:
    share = _share(model, (c for view in views for c in view.calls if c.name in names))
    if share <= MOST_PARAMETERS:
        return ""
    return f"it is in the middle: what follows has {share:.0%} of the parameters"


class _View:
    """One form of a model, and the values in it as rows change."""

    def __init__(self, model: nn.Module, form: Recording, run: Rows, dim: Dim, shapes: Shapes) -> None:
        self.model, self.form, self.dim, self.shapes = model, form, dim, shapes
        self.calls = [c for c in form.calls if c.op not in ("placeholder", "get_attr", "output")]
        self.seen: dict[str, dict[int, list[Tensor]]] = {}
        for rows in ("ab", "aa", "bb"):
            kept = self.seen[rows] = {}

            def look(call: Call, value: Any, kept: dict[int, list[Tensor]] = kept) -> None:
                kept[id(call)] = [t.detach().clone() for t in tensors(value)]

            run(rows, look)
        self.n_rows = max(2, dim.example)
        self.made_of_rows = made_of_rows(form, {name for name, _ in dim.where})
        self.is_noisy = any(c.is_random for c in self.calls)
        self.twice: dict[int, list[Tensor]] = {}
        self._joins: dict[int, frozenset[bool]] = {}

    def see_twice(self, given: Mapping[str, Tensor], device: torch.device) -> None:
        """Look at the values for twice as many rows: some hang on their number alone."""

        def look(call: Call, value: Any) -> None:
            self.twice[id(call)] = [t.detach().clone() for t in tensors(value)]

        seed(device)
        replay(self.model, self.form, _doubled(given, self.dim), device, look=look)

    # -- what follows from a mixing of rows ---------------------------------------------------------

    def follow(self, names: Iterable[str], lasts: bool) -> set[str]:
        """The calls with these names, those that mix rows, and all that depends on any of them."""
        mixed = self.lasting if lasts else {number for number, is_mixed in self.mixed.items() if is_mixed}
        wanted, found, touched = {*names}, set[int](), set[int]()
        written: set[int] = set()
        for call in self.calls:
            depends = any(id(c) in found for c in call.inputs)
            aliases = bool(call.writes & touched or (call.storages | call.reads) & written)
            if depends or aliases or call.name in wanted or id(call) in mixed:
                found.add(id(call))
                touched |= call.storages | call.reads
                written |= call.writes
        found |= {id(c) for c in self._set_for(found)}
        # what the tail writes to is made there, and what it derives something by
        made = {c.name for c in self.calls if id(c) in found or c.storages & written}
        derivatives = (c for c in self.calls if c.target is torch.autograd.grad and c.name in made)
        return made.union(*map(derived, derivatives))

    def _set_for(self, found: Collection[int]) -> Iterator[Call]:
        """Calls that set what any found by id goes by unseen: of its leaf, or in a tensor of its own."""
        leaves = (c for c in self.calls if id(c) in found and (c.keeps or c.op == "call_module"))
        paths = {*map(place_of, leaves)}
        held = (c for c in self.form.calls if c.op == "get_attr" and c.target in self.form.constants)
        beside = frozenset[int]().union(*(c.storages for c in held))
        for call in self.calls if found else ():
            is_setter = call.has_effect and call.keeps
            if (is_setter and any(are_nested(place_of(call), p) for p in paths)) or call.writes & beside:
                yield call

    def _values(self, call: Call, i: int) -> tuple[Tensor, Tensor, Tensor]:
        ab, aa, bb = (self.seen[rows].get(id(call), [])[i] for rows in ("ab", "aa", "bb"))
        return ab, aa, bb

    @functools.cached_property
    def mixed(self) -> dict[int, bool | None]:
        """Whether each call's value, by id, is not that of one row each; see :meth:`_is_mixed`."""
        return {id(call): self._is_mixed(call) for call in self.calls}

    @functools.cached_property
    def lasting(self) -> set[int]:
        """The calls, by id, whose values are not of one row each and make others that are not, to the end.

        Rows may lie in any order on the way, as those that go to an expert do, and be put back in their
        places. Whole numbers are places of rows, which mix none; what is the same for all rows, such as a
        loss that is clipped to nothing, does not tell that they are back.
        """
        output = self.form.calls[-1]
        last = {id(c) for c in output.inputs}
        given_out = frozenset[int]().union(*(c.storages for c in output.inputs))
        after: dict[int, list[Call]] = {}
        written: dict[int, list[Call]] = {}
        for call in self.calls:
            writers = {id(c): c for s in call.storages | call.reads for c in written.get(s, ())}
            for given in {id(c): c for c in call.inputs} | writers:
                after.setdefault(given, []).append(call)
            for storage in call.writes:
                written.setdefault(storage, []).append(call)
        lasting, seeds = set[int](), set[int]()
        for call in reversed(self.calls):
            is_mixed = self.mixed[id(call)]
            is_back = is_mixed is False and not call.writes and self._varies(call)
            goes_on = any(id(c) in lasting for c in after.get(id(call), ()))
            if not is_back and (goes_on or id(call) in last or call.writes & given_out):
                lasting.add(id(call))
                seeds |= {id(call)} if is_mixed else set()
        return seeds

    def _is_mixed(self, call: Call) -> bool | None:
        """Whether a call's value is not that of one row each; None where whole numbers alone are not."""
        counts = {len(seen.get(id(call), ())) for seen in self.seen.values()}
        if len(counts) > 1:
            return True
        mixed = [i for i in range(self._count(call)) if not self._is_of_rows(call, i)]
        return (any(self._is_float(call, i) for i in mixed) or None) if mixed else False

    def _varies(self, call: Call) -> bool:
        """Whether a call gives tensors, all of which are others for other rows."""
        each = (self._values(call, i) for i in range(self._count(call)))
        return all(not (_are_alike(a, b) and _are_alike(a, c)) for a, b, c in each) and self._count(call) > 0

    def _is_of_rows(self, call: Call, i: int) -> bool:
        return any(self._stays(call, i, lies) for lies in self._by_row(call, i))

    def _is_float(self, call: Call, i: int) -> bool:
        return self._values(call, i)[0].is_floating_point()

    def _stays(self, call: Call, i: int, lies: bool) -> bool:
        """Whether the first row is what it is among twice as many rows too, at their begin and at their end.

        Not asked where noise is drawn: more rows draw other noise.
        """
        there, axis = self.twice.get(id(call), ()), self._axis(call, i)
        if self.is_noisy or id(call) not in self.made_of_rows or i >= len(there) or axis is None or axis < 0:
            return True
        first = _rows_of(self._values(call, i)[0], axis, self.n_rows, lies)
        rows = _rows_of(there[i], axis, 2 * self.n_rows, lies)
        if not first or not rows:
            return True
        return all(_are_alike(first[0], row, ROUNDED) for row in (rows[0], rows[-1]))

    def _by_row(self, call: Call, i: int) -> Iterator[bool]:
        """How one tensor of a call may lie such that its rows hang on nothing but their own, or on no row."""
        values, axis = self._values(call, i), self._axis(call, i)
        if all(_are_alike(values[0], other) for other in values[1:]):
            yield from _LAYOUTS if axis is not None or self._is_of_no_rows(call, i) else ()
        elif axis is not None and axis >= 0 and len({t.shape for t in values}) == 1:
            for lies in sorted(_LAYOUTS):
                ab, aa, bb = (_rows_of(t, axis, self.n_rows, lies) for t in values)
                if ab and _are_alike(ab[0], aa[0]) and _are_alike(ab[1], bb[1]):
                    yield lies

    def _is_of_no_rows(self, call: Call, i: int) -> bool:
        """Whether a tensor is the same for twice as many rows."""
        there = self.twice.get(id(call), ())
        return i < len(there) and _are_alike(self.seen["ab"][id(call)][i], there[i])

    def _axis(self, call: Call, i: int) -> int | None:
        known = self.shapes.get(id(call), ())
        return axis_of(known[i], self.dim.name) if i < len(known) else -1

    # -- what goes into the tail --------------------------------------------------------------------

    def frontier(self, names: frozenset[str]) -> tuple[set[str], set[str]]:
        """Of what the tail takes, the calls to make again from sizes, and those that cannot be joined."""
        again, unfit, todo = set[str](), set[str](), _taken(self.form, names)
        while todo:
            call = todo.pop()
            if call.name in again or self.joins(call):
                continue
            if self._can_repeat(call):
                again.add(call.name)
                todo += [c for c in call.inputs if c.op not in ("placeholder", "get_attr")]
            else:
                unfit.add(call.name)
        return again, unfit

    def _count(self, call: Call) -> int:
        return len(self.seen["ab"].get(id(call), ()))

    def joined(self, names: frozenset[str]) -> list[Call]:
        """The calls outside the tail whose values of pieces it takes joined."""
        return [c for c in _taken(self.form, names) if self.joins(c)]

    def joins(self, call: Call) -> frozenset[bool]:
        """How the values of a call in pieces may lie to be joined; in no way where they cannot be."""
        if id(call) not in self._joins:
            each = [frozenset(self._layouts(call, i)) for i in range(self._count(call))]
            self._joins[id(call)] = frozenset.intersection(*each) if each else frozenset()
        return self._joins[id(call)]

    def _layouts(self, call: Call, i: int) -> Iterable[bool]:
        axis, values = self._axis(call, i), self._values(call, i)
        if axis is None:
            # that rows tried here give the same says nothing of others
            is_kept = not (call.is_random or id(call) in self.made_of_rows)
            is_same = is_kept and all(_are_alike(values[0], other) for other in values[1:])
            return _LAYOUTS if is_same and self._is_of_no_rows(call, i) else ()
        found = self._by_row(call, i) if axis >= 0 else ()
        if call.is_random or not all(_are_alike(values[0], other) for other in values[1:]):
            return found
        return [lies for lies in found if self._are_one(call, i, lies)]

    def _are_one(self, call: Call, i: int, lies: bool) -> bool:
        """Whether all rows of a tensor are the same, among twice as many too: no numbers of places."""
        axis, there = self._axis(call, i), self.twice.get(id(call), ())
        assert axis is not None
        rows = _rows_of(self.seen["ab"][id(call)][i], axis, self.n_rows, lies)
        rows += _rows_of(there[i], axis, 2 * self.n_rows, lies) if i < len(there) else ()
        return bool(rows) and all(_are_alike(rows[0], row) for row in rows[1:])

    def _can_repeat(self, call: Call) -> bool:
        """Whether a call is made of sizes and constants, and may be made again at other sizes.

        An order of rows may be the same for all that are tried here.
        """
        if call.is_random or call.has_effect or call.writes or call.mutated or id(call) in self.made_of_rows:
            return False
        if not self._count(call) and not isinstance(call.value, _NUMBERS):
            return False
        is_same = all(_are_alike(*self._values(call, i)[:2]) for i in range(self._count(call)))
        return is_same and not any(t.requires_grad for t in tensors(call.value))

    # -- a trial ------------------------------------------------------------------------------------

    def differs(
        self,
        names: frozenset[str],
        blocks: Collection[str],
        given: Mapping[str, Tensor],
        device: torch.device,
        begin: Callable[[], None],
    ) -> str:
        """In words, what a batch gives otherwise that is in two pieces up to the ops ``names``; or nothing.

        Not asked where noise is drawn: pieces draw other noise than the batch.
        """
        if self.is_noisy:
            return ""
        whole = _doubled(given, self.dim)
        values: list[dict[int, Any]] = []
        for half in (0, 1):
            kept: dict[int, Any] = {}
            begin()
            replay(
                self.model,
                self.form,
                _half(whole, self.dim, half),
                device,
                look=functools.partial(_keep, kept),
            )
            values.append(kept)
        known = {
            id(c): join(
                [v[id(c)] for v in values],
                [self._axis(c, i) for i in range(self._count(c))],
                [self.n_rows] * 2 if c.name in blocks else (),
            )
            for c in _taken(self.form, names)
        }
        begin()
        expected = replay(self.model, self.form, whole, device).result
        begin()
        for a, b in zip(expected, self._rest(names, known, whole, device), strict=True):
            if isinstance(a, Tensor) and not (a.shape == b.shape and is_close(a, b, ROUNDED)):
                return "rows joined ahead of it do not give what they give together"
        return ""

    def _rest(
        self, names: frozenset[str], known: dict[int, Any], given: Mapping[str, Tensor], device: torch.device
    ) -> Sequence[Any]:
        """The form's output leaves from the ops ``names``, run on values that are known."""
        values = dict(known)
        for call in self.form.calls:
            if call.name in names or call.op in ("placeholder", "get_attr"):
                args, kwargs = (map_calls(x, lambda c: values[id(c)]) for x in (call.args, call.kwargs))
                values[id(call)] = run_call(
                    self.model, self.form.constants, call, args, kwargs, given, device
                )
        result: Sequence[Any] = map_calls(self.form.calls[-1].args[0], lambda c: values[id(c)])
        return result


def _share(model: nn.Module, calls: Iterable[Call]) -> float:
    """How many of a model's parameters calls use, as a share of all."""
    known, own = dict(model.named_parameters(remove_duplicate=False)), dict[int, int]()
    for call in calls:
        used = [*submodule(model, call.target).parameters()] if call.op == "call_module" else []
        used += [known[c.target] for c in call.inputs if c.op == "get_attr" and c.target in known]
        own.update((id(p), p.numel()) for p in used)
    return sum(own.values()) / max(1, sum(p.numel() for p in model.parameters()))


def _rows_of(tensor: Tensor, axis: int, n: int, lies: bool) -> tuple[Tensor, ...]:
    """The pieces of a tensor that belong to each of ``n`` rows, ``lies`` being whether it is in blocks.

    Empty where there are no such pieces.
    """
    if not tensor.shape[axis] or tensor.shape[axis] % n:
        return ()
    return tensor.unflatten(axis, (-1, n)).unbind(axis + 1) if lies else tensor.chunk(n, axis)


def _are_alike(a: Tensor, b: Tensor, allowed: Mapping[torch.dtype, float] = ALLOWED) -> bool:
    """Whether two tensors are equal, up to rounding where they round."""
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) if is_whole(a) else is_close(a, b, allowed)


_NUMBERS = (int, float, tuple, torch.dtype, torch.device, type(None))


def _two_of(batches: Iterable[Mapping[str, Tensor]], dim: Dim) -> Iterator[tuple[dict[str, Tensor], Dim]]:
    """The first two rows of each batch alone, and the dim that they lie along."""
    for batch in batches:
        first = {name: batch[name].detach().narrow(axis, 0, 2) for name, axis in dim.where}
        yield {**batch, **first}, dataclasses.replace(dim, example=2)


def _keep(kept: dict[int, Any], call: Call, value: Any) -> None:
    kept[id(call)] = value


def _doubled(given: Mapping[str, Tensor], dim: Dim) -> dict[str, Tensor]:
    """The tensors with their rows twice over, the second time in the opposite order."""
    out = dict(given)
    for name, axis in dim.where:
        out[name] = torch.cat([given[name].detach(), given[name].detach().flip(axis)], axis)
    return out


def _half(whole: Mapping[str, Tensor], dim: Dim, half: int) -> dict[str, Tensor]:
    out = dict(whole)
    for name, axis in dim.where:
        out[name] = whole[name].chunk(2, axis)[half]
    return out
