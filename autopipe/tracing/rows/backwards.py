"""Whether rows of a batch depend on one another in the backward alone, where each forward is its own.

An embedding may divide its gradient by how often the batch names an entry, and a ``Function`` that is not
torch's own, or a hook on the gradient of a tensor or module or on what is saved for it, make anything of it.
What forwards do to rows is left to ``mixing``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ...graph import Dim
from ...torch_private import HiddenMode, is_torchs_function
from ...units import Size
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.functions import tensors
from ..code.own_code import HOOKS, OwnCode
from ..state.example_data import hooks_kept_back
from .noise import EvenNoise, NoDropout
from .results import ALLOWED, EQUAL, Rows, axes, is_close
from .row_counts import RowCounts

__all__ = [
    "OwnBackwards", "followed", "functions_exist", "has_functions", "is_hooked", "may_be_own",
    "mixed_in_backward",
]  # fmt: skip

_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_Made = tuple[Call, int, int]
"""A call, the place of a tensor that it makes, and the axis along which rows lie there."""
_BY_FREQUENCY = "scale_grad_by_freq"
_HOOKING = HOOKS | {"saved_tensors_hooks"}
_SAVED = f"_saved_{_BY_FREQUENCY}"


class OwnBackwards:
    """The calls whose backward may mix rows, as a run with gradients shows them: ``found``.

    Each comes with the place and the batch axis of a tensor it makes; those in ``without_rows`` have none.
    Such runs are within ``hooks``, which see those that objects set.
    ``is_whole``: all calls were shown.
    """

    def __init__(self, code: OwnCode, dim: Dim, shapes: _Shapes) -> None:
        self.code, self._dim, self._shapes = code, dim, shapes
        self._seen: set[Node] = set()
        self.hooks = HooksSet()
        self.found: list[_Made] = []
        self.without_rows: list[_Made] = []
        self.is_whole = False

    def look(self, call: Call, value: Any) -> None:
        """Be shown a call, with its value and what that came of."""
        self.is_whole, has_hooks = True, self.hooks.taken()
        if call.hint in HOOKS:
            self.found += [
                (c, 0, axis) for c in call.inputs for axis in axes(c, 0, self._dim, self._shapes)[:1]
            ]
            return
        made = tensors(value)
        # what a function gives has one node together
        nodes = [node for tensor in made for node in _nodes_above(tensor.grad_fn, self._seen)]
        if has_hooks or any(map(_is_odd, nodes)) or is_hooked(self.code, call):
            for i in (i for i, tensor in enumerate(made) if tensor.grad_fn is not None):
                places = axes(call, i, self._dim, self._shapes)[:1]
                self.found += [(call, i, axis) for axis in places]
                self.without_rows += [] if places else [(call, i, 0)]

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
    by one, and those of both rows together the sum of each one's, in either order. All are asked at once;
    where rows are mixed, one by one. What has no rows, as a loss, gets a part of its gradient from each
    microbatch: it is to hand on that part.
    """
    found: dict[str, str] = {}
    if not (own.is_whole or _may_mix(own.code, form)):
        return found
    weights = [p for p in own.code.model.parameters() if p.requires_grad]
    with torch.enable_grad():
        if not own.is_whole:
            with own.hooks:
                run("ab", own.look)
            own.end()
        asked = [made for made in own.found if made[0].name not in tail]
        if asked and _are_mixed(run, asked, weights, takes_more):
            mixed = [made for made in asked if _are_mixed(run, [made], weights, takes_more)] or asked
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
        inside = code.model.get_submodule(str(call.target)).modules()
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


def _hands_on_parts(run: Rows, asked: _Made, weights: Sequence[Tensor]) -> bool:
    """Whether half the gradient of what a call makes is half of all gradients, which is exact in any type."""
    whole, half = (_gradients(run, [asked], weights, "ab", None, scale) for scale in (1.0, 0.5))
    return all(is_close(a, 2 * b, EQUAL) for a, b in zip(whole, half, strict=True))


def _gradients(
    run: Rows,
    asked: Sequence[_Made],
    weights: Sequence[Tensor],
    rows: str,
    places: Sequence[int] | None,
    scale: float = 1.0,
) -> list[Tensor]:
    """The gradients of ``weights`` by some rows of what calls make, or all, each number weighed unlike.

    A row is weighed alike in any place.
    """
    made: dict[tuple[int, int], Tensor] = {}
    axes_of = {(id(call), i): axis for call, i, axis in asked}

    def look(call: Call, value: Any) -> None:
        made.update({(id(call), i): t for i, t in enumerate(tensors(value)) if (id(call), i) in axes_of})

    run(rows, look)
    at = None if places is None else {place: "ab".index(rows[place]) for place in places}
    seeds = [scale * _seed(tensor, axes_of[place], at) for place, tensor in made.items()]
    with hooks_kept_back(weights):
        found = torch.autograd.grad([*made.values()], weights, seeds, allow_unused=True)
    return [torch.zeros_like(w) if g is None else _dense(g) for w, g in zip(weights, found, strict=True)]


def _seed(made: Tensor, axis: int, rows: Mapping[int, int] | None) -> Tensor:
    """The gradient to begin with at what a call made: no two numbers of a row alike, nothing for others.

    ``rows`` are those that have any, by place.
    """
    if rows is None:
        numbers = torch.linspace(1, 2, made.numel(), dtype=torch.float64, device=made.device)
        return numbers.view(made.shape).to(made)
    seed = torch.zeros_like(made)
    for place, which in rows.items():
        row = seed.select(axis, place)
        numbers = torch.linspace(1 + which, 2 + which, row.numel(), dtype=torch.float64, device=row.device)
        row.copy_(numbers.view(row.shape))
    return seed


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _are_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(is_close(a, b, ALLOWED) for a, b in zip(some, others, strict=True))
