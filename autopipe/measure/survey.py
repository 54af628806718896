"""Walks a replay once and notes what each op asks for: kernels, saved bytes, workspace, and what fails.

Seconds are left to ``profiler`` (measured) and ``estimate`` (from the kernels noted here).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import accelerator
from ..torch_private import pytree
from .kernel_counts import NOTHING, Counter, Kernels, Saved, storage_bytes, tensors
from .replay import Piece, Replay, Tape, reads

__all__ = ["Account", "Survey", "describe", "saved_values", "survey"]


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What one op asks for in one microbatch.

    Attributes
    ----------
    forward, backward: the kernels it runs.
    saved_bytes: storages it is the first to keep for backward, or made as a movable op and others keep;
        parameters left out.
    inner_bytes: the part of them that no other op has: of its own value, and of what it makes in between.
    saved_inputs: which of its inputs (by place, see ``reads``) are among the storages it keeps, counted or
        not, and the bytes of each.
    saves_output: whether it keeps its own value.
    shows: which of its inputs its value is a view of.
    value_bytes: of the storage that its value is all of; 0 where it is of another's, or of several.
    workspace_bytes: the forward's peak above what is kept for backward: its value where nothing keeps it,
        inputs that nothing keeps, what it uses in between.
    backward_workspace_bytes: the backward's peak above what was kept for it, gradients in and out included.
    """

    forward: Kernels = NOTHING
    backward: Kernels = NOTHING
    saved_bytes: int = 0
    inner_bytes: int = 0
    saved_inputs: tuple[tuple[int, int], ...] = ()
    saves_output: bool = False
    shows: tuple[int, ...] = ()
    value_bytes: int = 0
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """Accounts by op name, failures by op name, and anything else worth telling.

    Ops that are not run have the account of the one that stands for them, but for the bytes that they are the
    first to keep: of like ops that take one value, one is.
    """

    accounts: Mapping[str, Account]
    failures: Mapping[str, str]
    notes: tuple[str, ...] = ()


class _Walk:
    def __init__(self, replay: Replay):
        self.replay = replay
        self.kept: set[int] = set()
        self.accounts: dict[str, Account] = {}
        self.notes: list[str] = []
        self.bad: set[str] = set()
        self.memory: dict[str, frozenset[int]] = {}
        held = (t for m in replay.modules for t in (*m._parameters.values(), *m._buffers.values()))
        self.ignore = {*storage_bytes(t for t in held if t is not None)}

    def forward(self, piece: Piece, env: dict[str, Any], counter: Counter) -> Tape:
        saved = Saved(self.ignore)
        for read in (read for node in piece.nodes for read in node.all_input_nodes):
            if self.replay.ran(read.name) in env:
                self._own(read, env)
        kernels, before = counter.kernels, counter.reset_peak()
        with _allocator(self.replay.device) as allocated:
            tape = self.replay.forward(piece, env, saved(), seen=self._seen)
        peak = allocated.peak if allocated else counter.peak_bytes - before
        given = storage_bytes(tensors(tape.feed))
        new = {key: n for key, n in saved.storages.items() if key not in self.kept}
        self.kept |= set(new)
        made = sum(n for key, n in new.items() if key not in given)
        passing = sum(n for key, n in given.items() if key not in self.kept | self.ignore)
        inputs = [storage_bytes(tensors(tape.feed.get(n.name))).keys() for n in reads(piece.nodes[0])]
        kept = [(i, sum(saved.storages.get(key, 0) for key in keys)) for i, keys in enumerate(inputs)]
        made_bytes = storage_bytes(tensors(tape.roots))
        value = made_bytes.keys()
        apart = {key for key in saved.storages if key not in given} | new.keys() - set().union(*inputs)
        account = Account(
            forward=counter.kernels - kernels,
            saved_bytes=sum(new.values()),
            inner_bytes=sum(saved.storages[key] for key in apart),
            saved_inputs=tuple((i, n) for i, n in kept if n),
            saves_output=not value.isdisjoint(saved.storages),
            shows=tuple(i for i, keys in enumerate(inputs) if not keys.isdisjoint(value)),
            value_bytes=sum(made_bytes.values()) if len(value) == 1 else 0,
            workspace_bytes=max(0, peak + passing - made),
        )
        self._share(piece, account)
        self._check(piece, tape)
        return tape

    def _seen(self, name: str, value: Any) -> None:
        self.memory[name] = frozenset(storage_bytes(tensors(value)))

    def _shows(self, node: fx.Node) -> tuple[int, ...]:
        """Which of the values that a node reads in its piece its own is a view of, or is, written anew.

        Of several in memories of their own, as a layer's output and state, a part is none of the others.
        """
        own, found = self.memory[node.name], []
        for i, read in enumerate(reads(node)):
            there = self.memory.get(self.replay.ran(read.name), frozenset())
            if own and own == there and len(own) == 1:
                found.append(i)
        return tuple(found)

    def backward(self, piece: Piece, tape: Tape, counter: Counter) -> None:
        roots, gradients = self.replay.gradients(tape)
        if not roots:
            return
        kernels, before = counter.kernels, counter.reset_peak()
        with _allocator(self.replay.device) as allocated:
            torch.autograd.backward(roots, gradients)
        incoming = sum(storage_bytes(gradients).values())
        peak = (allocated.peak if allocated else counter.peak_bytes - before) + incoming
        bearers = _bearers(piece)
        for node in piece.nodes:
            share = (counter.kernels - kernels) // len(bearers) if node in bearers else NOTHING
            self.accounts[node.name] = dataclasses.replace(
                self.accounts[node.name], backward=share, backward_workspace_bytes=peak
            )

    def _own(self, node: fx.Node, env: dict[str, Any]) -> Any:
        """The value a node reads, in ``env`` from now on; of an op that is not run, in memory of its own.

        Else two values that one op stands for would be one tensor: kept once, its gradients added up. What a
        view shows is in the memory of what it is a view of.
        """
        if node.op == "get_attr" or node.name in env:
            return self.replay.value(node, env)
        like = self.replay.node(self.replay.ran(node.name))
        value, memory = env[like.name], dict[int, Tensor]()
        for there, here in zip(reads(like), reads(node), strict=False):
            given = tensors(self.replay.value(there, env))
            is_there = here.op == "get_attr" or self.replay.ran(here.name) in env
            if is_there and not storage_bytes(given).keys().isdisjoint(storage_bytes(tensors(value))):
                own = tensors(self._own(here, env))
                memory |= {t.untyped_storage()._cdata: mine for t, mine in zip(given, own, strict=False)}
        env[node.name] = pytree.tree_map_only(Tensor, functools.partial(_elsewhere, memory=memory), value)
        return env[node.name]

    def _share(self, piece: Piece, account: Account) -> None:
        """Ops that memory binds into one piece share its account; the first keeps the bytes."""
        bearers = _bearers(piece)
        share = account.forward // len(bearers)
        rest = dataclasses.replace(account, saved_bytes=0, inner_bytes=0, saved_inputs=(), saves_output=False)
        for i, node in enumerate(piece.nodes):
            own = dataclasses.replace(rest, shows=self._shows(node)) if i else account
            self.accounts[node.name] = dataclasses.replace(own, forward=share if node in bearers else NOTHING)

    def _check(self, piece: Piece, tape: Tape) -> None:
        """Notes the first op on a path whose value holds NaN although what it took did not."""
        if self.replay.device.type == "meta" or not any(_has_nan(t) for t in tensors(tape.roots)):
            return
        if not self.bad & {self.replay.ran(name) for name in piece.takes}:
            self.notes.append(f"{describe(self.replay, piece.name)}: its value holds NaN")
        self.bad |= set(piece.gives)


def _bearers(piece: Piece) -> Sequence[fx.Node]:
    """The ops of a piece that run its kernels: all but those that pick from what another returned."""
    return [n for n in piece.nodes if n.target is not operator.getitem] or piece.nodes


def survey(replay: Replay, autocast: torch.dtype | None = None) -> Survey:
    """One forward and backward of every op that the replay runs, under a :class:`Counter`.

    An op that fails is taken out of the replay, and so are those that need its value where none can be
    made up; the rest goes on.
    """
    walk = _Walk(replay)
    env = {**replay.inputs(), **replay.made_up}
    walk.notes += [f"input {k!r} holds NaN" for k, v in env.items() if _has_nan(v)]
    walk.bad |= {k for k, v in env.items() if _has_nan(v)}
    tapes: list[tuple[Piece, Tape]] = []
    with Counter() as counter, replay.autocast(autocast):
        counter.track(tensors(env))
        for piece in replay.pieces(lambda name: True):
            with replay.attempt(piece, env):
                tapes.append((piece, walk.forward(piece, env, counter)))
        replay.seed(env)
        for parameter in replay.parameters:
            parameter.grad = torch.zeros_like(parameter)
        while tapes:
            piece, tape = tapes.pop()
            with replay.attempt(piece, env):
                walk.backward(piece, tape, counter)
    told = (counter.told,) if counter.told else ()
    return Survey(_of_every(replay, walk.accounts), dict(replay.failures), (*walk.notes, *told))


def _of_every(replay: Replay, accounts: Mapping[str, Account]) -> dict[str, Account]:
    """The accounts of all ops, in the graph's order: each value's bytes are its first keeper's.

    Those of a movable op's value are its own: whoever makes it again keeps it too.
    """
    out: dict[str, Account] = {}
    kept: set[str] = set()
    shown: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for node in replay.graph.nodes:
        account = accounts.get(replay.ran(node.name))
        if account is None:
            continue
        takes = [shown.get(n.name, n.name) for n in reads(node)]
        shown[node.name] = takes[account.shows[0]] if account.shows else node.name
        sizes[node.name] = account.value_bytes
        saved = {takes[i]: (i, sizes.get(takes[i]) or n_bytes) for i, n_bytes in account.saved_inputs}
        first = account.inner_bytes
        for i, n_bytes in (row for name, row in saved.items() if name not in kept):
            maker = reads(node)[i].name
            if maker in out and replay.ops.by_name[maker].is_movable:
                of = out[maker]
                out[maker] = dataclasses.replace(of, saved_bytes=of.saved_bytes + n_bytes, saves_output=True)
            else:
                first += n_bytes
        kept |= {*saved, *[shown[node.name]] * account.saves_output}
        out[node.name] = dataclasses.replace(account, saved_bytes=first)
    return out


@dataclasses.dataclass(slots=True)
class _Allocated:
    peak: int = 0


@contextlib.contextmanager
def _allocator(device: torch.device) -> Any:
    """The peak above the start as the device's allocator knows it; None where it does not count."""
    if accelerator.peak_bytes(device) is None:
        yield None
        return
    accelerator.reset_peak(device)
    before = accelerator.held_bytes(device)
    figures = _Allocated()
    yield figures
    figures.peak = (accelerator.peak_bytes(device) or 0) - before


def describe(replay: Replay, name: str) -> str:
    """An op for a person: its name, what it calls, and where."""
    op = replay.ops.by_name[name]
    place = f" ({op.source})" if op.source else ""
    return f"{name} [{op.target}]{place}"


def saved_values(node: fx.Node, account: Account) -> tuple[str, ...]:
    """The graph's values that an op keeps: those of its inputs that it does, and its own if so."""
    takes = reads(node)
    kept = (takes[i] for i, _ in account.saved_inputs)
    return (*dict.fromkeys(n.name for n in kept if n.op != "get_attr"), *[node.name] * account.saves_output)


def _elsewhere(value: Tensor, memory: dict[int, Tensor]) -> Tensor:
    """A leaf like ``value``, in what has the place of its ``memory``, by storage; else in a copy of it."""
    if value.layout is not torch.strided:
        return value.detach().requires_grad_(value.requires_grad)
    key = value.untyped_storage()._cdata
    with torch.no_grad():
        if key not in memory or memory[key].dtype != value.dtype:
            n = value.untyped_storage().nbytes() // value.element_size()
            memory[key] = value.as_strided((n,), (1,), 0).clone()
        there = memory[key].as_strided(value.shape, value.stride(), value.storage_offset())
    return there.detach().requires_grad_(value.requires_grad)


def _has_nan(value: Any) -> bool:
    floating = isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta
    return floating and bool(value.isnan().any())
