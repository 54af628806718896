"""Whether rows of a batch depend on one another in the backward alone, where each forward is its own.

An embedding may divide its gradient by how often the batch names an entry, and a ``Function`` that is not
torch's own, or a hook on the gradient of a tensor or module or on what is saved for it, make anything of it.
What forwards do to rows is left to ``mixing``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ...graph import Dim
from ...torch_private import HiddenMode, gradients, is_torchs_function
from ...units import Size
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..code.own_code import HOOKS, OwnCode
from ..members import submodule
from ..state.example_data import hooks_kept_back
from .data_dependent import Change, Turn, Turned, reads_noted, rows_times, turns_of
from .noise import EvenNoise, NoDropout
from .results import ALLOWED, EQUAL, Rows, axes, is_close
from .row_counts import RowCounts

__all__ = [
    "OwnBackwards", "followed", "functions_exist", "has_functions", "is_hooked", "may_be_own",
    "mixed_in_backward",
]  # fmt: skip

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_Made = tuple[Call, int, int]
"""A call, the place of a tensor that it makes, and the axis along which rows lie there."""
_BY_FREQUENCY = "scale_grad_by_freq"
_HOOKING = HOOKS | {"saved_tensors_hooks"}
_SAVED = f"_saved_{_BY_FREQUENCY}"
_APART = 64.0
"""What row b is taken times beside row a: any limit on the larger one lies between them at some scale."""
_SCALES = tuple(_APART**k for k in range(-4, 4))
_NARROW = slice(2, 6)
"""Those of the scales that half precision has numbers for."""
_WIDE = 4
"""Bytes of a number of a type that has all of them."""
_EVENLY = 1.0, 1.0
_OPPOSITE = (1.0, -2.0), (2.0, -1.0)
"""What rows are taken times for a sum over both to have the sign of one, and of the other."""
_AMONG = -1.0, _APART, 1 / _APART
"""What some of a call's tensors are taken times beside the others: against them, far above and far below."""


class OwnBackwards:
    """The calls whose backward may mix rows, as a run with gradients shows them: ``found``.

    Each comes with the place and the batch axis of a tensor it makes, once however many runs show it; those
    in ``without_rows`` have none. Such runs are within ``hooks``, which see those that objects set.
    ``is_whole``: all calls were shown.
    """

    def __init__(self, code: OwnCode, dim: Dim, shapes: _Shapes) -> None:
        self.code, self.dim, self.shapes = code, dim, shapes
        self._seen: set[Node] = set()
        self.hooks = HooksSet()
        self.found: dict[_Made, None] = {}
        self.without_rows: dict[_Made, None] = {}
        self.is_whole = False

    def look(self, call: Call, value: Any) -> None:
        """Be shown a call, with its value and what that came of."""
        self.is_whole, has_hooks = True, self.hooks.taken()
        if call.hint in HOOKS:
            self.found |= {
                (c, 0, axis): None for c in call.inputs for axis in axes(c, 0, self.dim, self.shapes)[:1]
            }
            return
        made = tensors(value)
        # what a function gives has one node together
        nodes = [node for tensor in made for node in _nodes_above(tensor.grad_fn, self._seen)]
        if has_hooks or any(map(_is_odd, nodes)) or is_hooked(self.code, call):
            for i in (i for i, tensor in enumerate(made) if tensor.grad_fn is not None):
                places = axes(call, i, self.dim, self.shapes)[:1]
                self.found |= {(call, i, axis): None for axis in places}
                self.without_rows |= {} if places else {(call, i, 0): None}

    def see(self, form: Recording, run: Rows) -> None:
        """Be shown a run of a form with gradients, unless one was, or no call may have such a backward."""
        if self.is_whole or not _may_mix(self.code, form):
            return
        with torch.enable_grad(), self.hooks:
            run("ab", self.look)
        self.end()

    def end(self) -> None:
        """Let go of what the calls of a run came of."""
        self._seen.clear()


class HooksSet(HiddenMode):
    """Within it hooks on gradients are seen to be set, by whatever code."""

    def __init__(self) -> None:
        super().__init__()
        self._is_any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._is_any |= getattr(func, "__name__", "") in HOOKS
        return func(*args, **(kwargs or {}))

    def taken(self) -> bool:
        """Whether any was set since this was asked last."""
        found, self._is_any = self._is_any, False
        return found


def mixed_in_backward(
    form: Recording,
    run: Rows,
    own: OwnBackwards,
    tail: Collection[str],
    *,
    takes_more: bool,
) -> dict[str, str]:
    """The calls in whose backward rows are mixed, by name, each in words.

    ``run`` runs the form on rows a and b. Only calls with a backward that is not torch's own, or goes by the
    whole batch, are asked, and none of the ``tail``, which has that: the gradients of each row alone are to
    be the same beside the other as beside itself, those of a beside two b where the form ``takes_more`` rows
    by one, and those of both rows together the sum of each one's, in either order; of backwards that go by
    data so are those of other sizes, signs and values that they keep. All are asked at once;
    where rows are mixed, one by one. What has no rows, as a loss, gets a part of its gradient from each
    microbatch: it is to hand on that part.
    """
    found: dict[str, str] = {}
    own.see(form, run)
    weights = [p for p in own.code.model.parameters() if p.requires_grad]
    with torch.enable_grad():
        asked = [made for made in own.found if made[0].name not in tail]
        places = {id(c): a for c in form.calls for a in axes(c, 0, own.dim, own.shapes)[:1]}
        if asked and (are_mixed := _fault(run, asked, weights, takes_more, places)) is not None:
            mixed = [made for made in asked if are_mixed([made])] or asked
            found |= {made[0].name: f"the backward of {call_and_place(made[0])}" for made in mixed}
        for made in own.without_rows:
            if made[0].name not in {*tail, *found} and not _hands_on_parts(run, made, weights):
                words = f"the backward of {call_and_place(made[0])}, of half a gradient no half"
                found[made[0].name] = words
    return found


def _may_mix(code: OwnCode, form: Recording) -> bool:
    """Whether some call may have a backward of its own, or one that goes by the whole batch."""
    if any(getattr(module, _BY_FREQUENCY, False) for module in code.model.modules()):
        return True
    do_exist = functions_exist()
    return any(
        call.kwargs.get(_BY_FREQUENCY)
        or call.hint in HOOKS
        or is_hooked(code, call)
        or (do_exist and code.is_own(call))
        for call in form.calls
    )


def functions_exist() -> bool:
    """Whether there are functions with a backward that is not torch's own, those of operators among them."""
    return not all(map(is_torchs_function, _functions(torch.autograd.Function)))


def has_functions(made: Any) -> bool:
    """Whether functions with a backward of their own are behind what a call ``made``.

    Whatever holds the functions: names in code do not tell of those in tables, in objects and of operators.
    """
    seen: set[Node] = set()
    return any(_is_own(node) for t in tensors(made) for node in _nodes_above(t.grad_fn, seen))


def may_be_own(code: OwnCode, call: Call) -> bool:
    """Whether a call may have a backward that is not torch's own: a function's, or a hook."""
    return code.may_have_backward(call) or is_hooked(code, call)


@contextlib.contextmanager
def followed(made: Any, counts: RowCounts) -> Iterator[None]:
    """Within it, backwards of a model's own behind what a call ``made`` are also run as ``counts`` follows.

    It is to be asked for gradients of all of that; what does not run then may ask for anything.
    """
    seen: set[Node] = set()
    waiting = {node for t in tensors(made) for node in _nodes_above(t.grad_fn, seen) if _is_odd(node)}

    def follow(node: Any, gradients: Any) -> None:
        waiting.discard(node)
        with counts:
            node.apply(*gradients)

    for node in filter(_is_own, [*waiting]):
        node.register_prehook(functools.partial(follow, node))
    yield
    counts.asks |= bool(waiting)


def is_hooked(code: OwnCode, call: Call) -> bool:
    """Whether code in or around a call may hook on gradients of what it computes, or on what is saved."""
    if call.region is not None and call.region.saved is not None:
        return True
    if call.op == "call_module":
        inside = submodule(code.model, str(call.target)).modules()
        if any(m._backward_hooks or m._backward_pre_hooks for m in inside):
            return True
    return code.is_own(call) and not _HOOKING.isdisjoint(code.names(call))


def _functions(kind: type) -> Iterator[type]:
    """All classes derived from one."""
    found: type
    for found in kind.__subclasses__():
        yield found
        yield from _functions(found)


def _nodes_above(node: Node | None, seen: set[Node]) -> Iterator[Node]:
    """The nodes of a graph that were not ``seen``, which they are then."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [child for child, _ in node.next_functions]


def _is_odd(node: Node) -> bool:
    return _is_own(node) or (_may_be_by_frequency(type(node)) and bool(getattr(node, _SAVED)))


def _is_own(node: Node) -> bool:
    return issubclass(type(node), BackwardCFunction)


@functools.cache
def _may_be_by_frequency(kind: type) -> bool:
    """Whether nodes of a kind keep whether they go by frequency: to ask each of those that do not is slow."""
    return hasattr(kind, _SAVED)


def _fault(
    run: Rows, asked: Sequence[_Made], weights: Sequence[Tensor], takes_more: bool, places: Mapping[int, int]
) -> Callable[[Sequence[_Made]], bool] | None:
    """What tells whether gradients of what calls make are those of rows alone, where those asked are not.

    Of backwards that read what they are given, or make numbers of all of it, elsewhere too: see
    :class:`_Elsewhere`. ``places`` are the axes along which rows of calls' values lie, by id.
    """

    def mixed(made: Sequence[_Made]) -> bool:
        return _are_mixed(run, made, weights, takes_more)

    if mixed(asked):
        return mixed
    for at in _elsewhere(run, asked, weights, places):
        found = functools.partial(_are_mixed_elsewhere, run, weights=weights, at=at)
        if found(asked):
            return found
    return None


def _are_mixed(run: Rows, asked: Sequence[_Made], weights: Sequence[Tensor], takes_more: bool) -> bool:
    """Whether gradients of what calls make are not those of rows alone, of each beside others too."""
    made = functools.partial(_gradients, run, asked, weights)
    first, second, both = (made("ab", places) for places in ((0,), (1,), (0, 1)))
    summed = [a + b for a, b in zip(first, second, strict=True)]
    is_own = _are_close(first, made("aa", (0,))) and _are_close(second, made("bb", (1,)))
    if not (is_own and _are_close(both, summed)):
        return True
    with EvenNoise(weights[0].device, any_op=True):  # in the other order each is given other noise
        if not _are_close(made("ab", (0, 1)), made("ba", (0, 1))):
            return True
    if not takes_more or _are_close(first, made("abb", (0,))):
        return False
    with NoDropout() as noise:  # a batch of more rows leaves out others; what else is drawn may hide mixing
        return not (_are_close(made("ab", (0,)), made("abb", (0,))) and noise.is_of_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Where a backward that goes by data may go another way.

    Attributes
    ----------
    slopes: what the gradients to begin with are taken times, of row a and of b. digit, times: those of the
        tensors of a call whose number has that binary digit are taken times so much. change: what puts other
        values in the place of those that the calls take, and keep for it. turn: a truth that it asks for,
        which is to come out as it does not.
    """

    slopes: tuple[float, float] = _EVENLY
    digit: int = 0
    times: float = 1.0
    change: Change | None = None
    turn: Turn | None = None

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.turn is None else Turned(self.turn)


def _elsewhere(
    run: Rows, asked: Sequence[_Made], weights: Sequence[Tensor], places: Mapping[int, int]
) -> Iterator[_Elsewhere]:
    """Where to ask; nowhere if no code of theirs reads what is in a tensor, or makes a number of one."""
    noted = reads_noted()
    _gradients(run, asked, weights, "ab", None, within=noted)
    if not (noted.has_read or noted.seen or _read_ahead(run, asked)):
        return
    narrow = any(w.dtype.itemsize < _WIDE for w in weights)
    for scale in _SCALES[_NARROW] if narrow else _SCALES:
        yield _Elsewhere(slopes=(scale, _APART * scale))
    for slopes in _OPPOSITE:
        yield _Elsewhere(slopes=slopes)
    # any two tensors of a call differ in some binary digit of their numbers
    for digit in range(max(i for _, i, _ in asked).bit_length()):
        for times in _AMONG:
            yield _Elsewhere(digit=digit, times=times)
    taken = {id(c): places[id(c)] for call, *_ in asked for c in call.inputs if id(c) in places}
    for scale in _SCALES[_NARROW] if taken else ():
        yield _Elsewhere(change=functools.partial(rows_times, taken, (scale, _APART * scale)))
    for factors in _OPPOSITE if taken else ():
        yield _Elsewhere(change=functools.partial(rows_times, taken, factors))

    def again(rows: str) -> Mapping[Any, int]:
        noted = reads_noted()
        _gradients(run, asked, weights, rows, None, within=noted)
        return noted.truths

    turns = turns_of(noted.truths, again)
    yield from (_Elsewhere(turn=turn) for turn in turns)


def _read_ahead(run: Rows, asked: Sequence[_Made]) -> bool:
    """Whether calls read, or make numbers of, what they are given: their backwards may go by that."""
    calls, found, n_seen = {id(call) for call, *_ in asked}, False, 0
    noted = reads_noted()

    def look(call: Call, value: Any) -> None:
        nonlocal found, n_seen
        found |= id(call) in calls and (noted.has_read or len(noted.seen) > n_seen)
        noted.has_read, n_seen = False, len(noted.seen)

    with noted:
        run("ab", look)
    return found


def _are_mixed_elsewhere(
    run: Rows, asked: Sequence[_Made], *, weights: Sequence[Tensor], at: _Elsewhere
) -> bool:
    """As :func:`_are_mixed`; False where that does not run, or leads out of all numbers."""

    def made(rows: str, places: Sequence[int]) -> list[Tensor]:
        return _gradients(run, asked, weights, rows, places, at=at)

    try:
        first, second, both = (made("ab", places) for places in ((0,), (1,), (0, 1)))
        alone = [*made("aa", (0,)), *made("bb", (1,))] if at.slopes == _EVENLY else []
    except of_models() as error:
        # any Python of the model, on data that it may not take
        _logger.debug("backwards were not asked elsewhere: %s", error)
        return False
    if not all(bool(g.isfinite().all()) for g in (*first, *second, *both, *alone)):
        return False
    is_own = not alone or _are_close([*first, *second], alone)
    return not (is_own and _are_close(both, [a + b for a, b in zip(first, second, strict=True)]))


def _hands_on_parts(run: Rows, asked: _Made, weights: Sequence[Tensor]) -> bool:
    """Whether half the gradient of what a call makes is half of all gradients, which is exact in any type.

    Where code reads gradients, or makes numbers of them, so are others of other sizes.
    """
    noted = reads_noted()
    whole = _gradients(run, [asked], weights, "ab", None, within=noted)
    goes_by_size = noted.has_read or bool(noted.seen)
    for scale in (0.5, *(_SCALES[_NARROW] if goes_by_size else ())):
        part = _gradients(run, [asked], weights, "ab", None, scale)
        if not all(is_close(scale * a, b, EQUAL) for a, b in zip(whole, part, strict=True)):
            return False
    return True


def _gradients(
    run: Rows,
    asked: Sequence[_Made],
    weights: Sequence[Tensor],
    rows: str,
    places: Sequence[int] | None,
    scale: float = 1.0,
    *,
    at: _Elsewhere = _Elsewhere(),
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> list[Tensor]:
    """The gradients of ``weights`` by some rows of what calls make, or all, each number weighed unlike.

    A row is weighed alike in any place. Backwards run ``within`` a context.
    """
    made: dict[tuple[int, int], Tensor] = {}
    axes_of = {(id(call), i): axis for call, i, axis in asked}

    def look(call: Call, value: Any) -> Any:
        made.update({(id(call), i): t for i, t in enumerate(tensors(value)) if (id(call), i) in axes_of})
        return None if at.change is None else at.change(rows, call, value)

    run(rows, look)
    which = None if places is None else {place: "ab".index(rows[place]) for place in places}
    seeds = [
        scale
        * (at.times if i >> at.digit & 1 else 1.0)
        * _seed(t, axes_of[number, i], which, at.slopes, n_before=i)
        for (number, i), t in made.items()
    ]
    roots = [*made.values()]
    found: Sequence[Tensor | None]
    with hooks_kept_back(weights), within or at.around():
        if within is None and at.turn is None:
            found = torch.autograd.grad(roots, weights, seeds, allow_unused=True)
        else:
            found = gradients(roots, seeds, weights)
    return [torch.zeros_like(w) if g is None else _dense(g) for w, g in zip(weights, found, strict=True)]


def _seed(
    made: Tensor,
    axis: int,
    rows: Mapping[int, int] | None,
    slopes: tuple[float, float] = _EVENLY,
    *,
    n_before: int = 0,
) -> Tensor:
    """The gradient to begin with at what a call made: no two numbers of a row alike, nothing for others.

    ``rows`` are those that have any, by place; ``slopes`` what that of row a is taken times, and of row b.
    The numbers of a row rise, or fall if the tensors of the call ``n_before`` this one are odd in number. How
    far row b's are above row a's is another for each tensor: no ratio of two is the same for both rows.
    """
    ends = (2, 1) if n_before % 2 else (1, 2)
    above = 1 + n_before / (1 + n_before)
    if rows is None:
        numbers = torch.linspace(*ends, made.numel(), dtype=torch.float64, device=made.device)
        return numbers.view(made.shape).to(made)
    seed = torch.zeros_like(made)
    for place, which in rows.items():
        row = seed.select(axis, place)
        numbers = torch.linspace(*ends, row.numel(), dtype=torch.float64, device=row.device) + above * which
        row.copy_(slopes[which] * numbers.view(row.shape))
    return seed


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _are_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(is_close(a, b, ALLOWED) for a, b in zip(some, others, strict=True))
