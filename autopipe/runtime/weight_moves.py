"""Moves weights between ranks, with their gradients and what optimizers keep of them: at a step's boundary.

Which weight belongs where is read off the stages; when to move is left to ``rebalance``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor, nn

from .. import accelerator
from ..errors import InputError
from ..stages import Stage
from ..torch_private import UnseenByFunctions
from .checkpoint.optimizer_extras import held_beside, left_out
from .checkpoint.optimizer_state import LISTED, names_in
from .files.safetensors_file import text_of
from .reduce.hooks import n_hooks
from .reduce.ties import own_of
from .stage.setup import exchange
from .weights.stale import unmark
from .wire.peers import Peers
from .wire.plain_values import Unfit, dtype_of, dumps, loads, name_of

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Move", "move_weights", "moves"]

Optimizers = Mapping[str, torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Move:
    """A parameter or buffer that goes from one rank to another, which had none of it."""

    name: str
    tensor: Tensor
    source: int
    destination: int


class _Groups(msgspec.Struct, frozen=True):
    """One rank's groups of one optimizer: the options of each, and the number of each parameter's."""

    options: list[str]
    number: dict[str, int]


class _Told(msgspec.Struct, frozen=True):
    """What one rank has: its groups by optimizer and how many hooks each weight, or why it cannot move."""

    groups: dict[str, _Groups]
    fault: str = ""
    n_hooks: dict[str, int] = {}


class _Parcel(msgspec.Struct, frozen=True):
    """What comes with a weight: (dtype, shape, whether it stays on the CPU) of each tensor, and the rest."""

    tensors: list[tuple[str, tuple[int, ...], bool]]
    has_gradient: bool
    states: str


def moves(old: Sequence[Stage], new: Sequence[Stage]) -> tuple[Move, ...]:
    """What ranks need under the ``new`` stages and lack under the ``old``, in one order on every rank."""
    before, after = _holders(old), _holders(new)
    return tuple(
        Move(name, tensor, min(before[key][2]), rank)
        for key, (name, tensor, ranks) in after.items()
        for rank in sorted(ranks - before[key][2])
    )


def _holders(stages: Sequence[Stage]) -> dict[int, tuple[str, Tensor, set[int]]]:
    found: dict[int, tuple[str, Tensor, set[int]]] = {}
    for stage in stages:
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            if not name.endswith("_anchor"):
                found.setdefault(id(tensor), (name, tensor, set()))[2].add(stage.rank)
    return found


def move_weights(engine: Engine, peers: Peers, new: Sequence[Stage], optimizers: Optimizers) -> None:
    """Move all that the ``new`` stages need elsewhere; every rank calls it.

    Raises :class:`InputError` on every rank, before anything has moved, for what cannot be moved.
    """
    planned = moves(engine.all_stages, new)
    everyone = peers.gather(_told(engine, planned, optimizers))
    faults = [t.fault for t in everyone if t.fault] or [
        *_without_group(planned, everyone),
        *_without_hooks(planned, everyone),
    ]
    if faults:
        raise InputError(faults[0])
    roots = (engine.capture.model, *engine.all_stages, *new)
    accept = engine.capture.holding()
    for move in planned:
        if move.source == peers.rank:
            _give(peers, move, optimizers)
        elif move.destination == peers.rank:
            _take(engine, move, roots, optimizers, everyone)
    _part(engine, new, optimizers)
    accept()  # new memory for the same weights is the runtime's own doing


def _told(engine: Engine, planned: Sequence[Move], optimizers: Optimizers) -> _Told:
    named = [pair for stage in engine.stages for pair in stage.named_parameters()]
    named += own_of(engine.options.loss_fn, engine.capture.model)
    try:
        sharded = [m.name for m in planned if hasattr(m.tensor, "to_local")]
        if sharded or any(w.module is not w.stage or w.is_replicated for w in engine.workers.values()):
            raise InputError("stages that were wrapped or sharded do not move; rebalance before wrap()")
        if not optimizers and any(m.tensor.requires_grad for m in planned):
            raise InputError(
                "parameters would move away from their optimizer; pass it, and any other: "
                "rebalance(optimizer=optimizer)"
            )
        if engine.ties is not None and not engine.ties.is_whole:
            raise InputError(
                "tied gradients are not summed yet; rebalance after a step outside no_sync(), or after "
                "zero_grad()"
            )
        _check_all_moves(planned, optimizers)
        for move in planned:
            for key, optimizer in optimizers.items() if move.source == engine.rank else ():
                _check_movable(key, optimizer, move)
        groups = {key: _groups(key, optimizer, named) for key, optimizer in optimizers.items()}
        return _Told(groups, n_hooks={m.name: _n_hooks(m.tensor) for m in planned})
    except InputError as error:
        return _Told({}, str(error))


def _check_all_moves(planned: Sequence[Move], optimizers: Optimizers) -> None:
    """Raise :class:`InputError` for optimizers that keep something of their parameters beside ``state``."""
    for key, optimizer in optimizers.items() if any(m.tensor.requires_grad for m in planned) else ():
        if at := left_out(optimizer, optimizers.values()):
            raise InputError(
                f"{key}, a {type(optimizer).__name__}, is made around an optimizer in .{at}, whose state "
                f"would stay behind; pass that one too: rebalance({key}={key}, inner={key}.{at})"
            )
        if at := held_beside(optimizer, even_parameters=True):
            raise InputError(
                f"{key}, a {type(optimizer).__name__}, keeps something of its parameters in .{at}, which "
                "would stay behind: state and param_groups are what moves; rebalance before it is made"
            )


def _check_movable(key: str, optimizer: torch.optim.Optimizer, move: Move) -> None:
    try:
        dumps(dict(optimizer.state.get(move.tensor, {})), lambda tensor, where: where)
    except Unfit as error:
        raise InputError(f"what {key} keeps of {move.name} cannot move: {error}") from error


def _groups(key: str, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> _Groups:
    name_of = names_in(optimizer, named)
    options: list[str] = []
    number: dict[str, int] = {}
    for i, group in enumerate(optimizer.param_groups):
        kept = {k: v for k, v in group.items() if k not in LISTED}
        try:
            options.append(dumps(kept, lambda t, _: text_of(t.detach().cpu().contiguous())))
        except Unfit as error:
            raise InputError(f"group {i} of {key} cannot be compared: {error}") from error
        number |= {name_of[id(p)]: i for p in group["params"] if id(p) in name_of}
    return _Groups(options, number)


def _without_group(planned: Sequence[Move], everyone: Sequence[_Told]) -> list[str]:
    """In words, parameters whose optimizer has no group of the same options where they go."""
    return [
        f"{key} of rank {move.destination} has no group with the options that {move.name} has on rank "
        f"{move.source}; make its groups alike on every rank, empty ones too"
        for move in planned
        for key, groups in everyone[move.source].groups.items()
        if move.name in groups.number and _group_for(move, key, everyone) is None
    ]


def _n_hooks(tensor: Tensor) -> int:
    """How many hooks of the user's on its gradient a weight has here; one on the meta device is made anew."""
    with UnseenByFunctions():
        if tensor.is_meta or not isinstance(tensor, nn.Parameter):
            return 0
        return n_hooks(tensor)


def _without_hooks(planned: Sequence[Move], everyone: Sequence[_Told]) -> list[str]:
    """In words, parameters whose hooks on gradients would stay behind."""
    return [
        f"{move.name} has {there} hook{'s' * (there != 1)} on its gradient on rank {move.source} and {here} "
        f"on rank {move.destination}, where it would go; register the same on every rank, on all of "
        "model.named_parameters(), or remove them before and register them anew after"
        for move in planned
        for there, here in [(everyone[r].n_hooks[move.name] for r in (move.source, move.destination))]
        if there != here
    ]


def _group_for(move: Move, key: str, everyone: Sequence[_Told]) -> int | None:
    """The group a parameter goes into: the one of the same number if its options are the same."""
    there, here = everyone[move.source].groups[key], everyone[move.destination].groups.get(key)
    number = there.number[move.name]
    options = [] if here is None else here.options
    alike = [i for i, text in enumerate(options) if text == there.options[number]]
    return number if number in alike else next(iter(alike), None)


def _give(peers: Peers, move: Move, optimizers: Optimizers) -> None:
    aside: list[Tensor] = []

    def put(tensor: Tensor, _: str) -> str:
        aside.append(tensor)
        return str(len(aside) - 1)

    gradient = move.tensor.grad if isinstance(move.tensor, nn.Parameter) else None
    put(move.tensor, "")
    if gradient is not None:
        put(gradient, "")
    states = {key: dict(o.state[move.tensor]) for key, o in optimizers.items() if move.tensor in o.state}
    text = dumps(states, put)
    sent = [t.detach().contiguous() for t in aside]
    told = [(name_of(t.dtype), tuple(t.shape), t.device.type == "cpu") for t in sent]
    peers.tell(_Parcel(told, gradient is not None, text), move.destination)
    for tensor in sent:
        if tensor.numel():
            raw = accelerator.raw(tensor).to(move.tensor.device)
            peers.group.wait(peers.group.send(raw, move.destination))
    peers.finish_telling()


def _take(
    engine: Engine, move: Move, roots: Sequence[nn.Module], optimizers: Optimizers, everyone: Sequence[_Told]
) -> None:
    peers = engine.peers
    assert peers is not None
    parcel = peers.hear(move.source, _Parcel)
    found: list[Tensor] = []
    for dtype, shape, is_here in parcel.tensors:
        tensor = torch.empty(shape, dtype=dtype_of(dtype), device=engine.device)
        if tensor.numel():
            peers.group.wait(peers.group.recv(tensor.view(-1).view(torch.uint8), move.source))
        found.append(tensor.cpu() if is_here else tensor)
    value = found[0].to(engine.device)
    tensor = _put(move.tensor, value, roots)
    if isinstance(tensor, nn.Parameter):
        tensor.grad = found[1].to(engine.device) if parcel.has_gradient else None
    states = loads(parcel.states, lambda text: found[int(text)])
    for key, optimizer in optimizers.items():
        if move.name not in everyone[move.source].groups[key].number:
            continue
        number = _group_for(move, key, everyone)
        assert number is not None
        group = optimizer.param_groups[number]
        if not any(p is tensor for p in group["params"]):  # of groups that an inner optimizer has too
            group["params"].append(tensor)
            if "param_names" in group:
                group["param_names"].append(move.name)
        if key in states:
            optimizer.state[tensor] = states[key]


def _put(held: Tensor, value: Tensor, roots: Sequence[nn.Module]) -> Tensor:
    """Give a weight that this rank did not have its value; what holds it then."""
    unmark([held])
    if not held.is_meta:
        held.data = value
        return held
    made = nn.Parameter(value, held.requires_grad) if isinstance(held, nn.Parameter) else value
    exchange(roots, {id(held): made})
    return made


def _part(engine: Engine, new: Sequence[Stage], optimizers: Optimizers) -> None:
    """Leave to others what this rank no longer has: optimizers forget it, memory is given back."""
    kept = {id(t) for s in new if s.rank == engine.rank for t in (*s.parameters(), *s.buffers())}
    gone = {id(p): p for stage in engine.stages for p in stage.parameters() if id(p) not in kept}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            stays = [id(p) not in gone for p in group["params"]]
            for key in LISTED:
                if key in group:
                    group[key] = [x for x, keeps in zip(group[key], stays, strict=False) if keeps]
        for parameter in gone.values():
            optimizer.state.pop(parameter, None)
    for parameter in gone.values():
        parameter.grad = None
        if engine.frees:
            parameter.data = parameter.data.new_empty(0)
