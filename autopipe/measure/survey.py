"""Walks a replay once and notes what each op asks for: kernels, saved bytes, workspace, and what fails.

Seconds are left to ``profiler`` (measured) and ``estimate`` (from the kernels noted here).
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import accelerator
from .account import NOTHING, Counter, Kernels, Saved, storage_bytes, tensors
from .replay import Piece, Replay, Tape

__all__ = ["Account", "Survey", "describe", "saved_values", "survey"]


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What one op asks for in one microbatch.

    Attributes
    ----------
    forward, backward: the kernels it runs.
    saved_bytes: storages it is the first to keep for backward, parameters left out.
    saved_inputs: which of its inputs (by position) are among the storages it keeps, counted or not.
    saves_output: whether it keeps its own value.
    workspace_bytes: the forward's peak above what is kept for backward: its value where nothing keeps it,
        inputs that nothing keeps, what it uses in between.
    backward_workspace_bytes: the backward's peak above what was kept for it, gradients in and out included.
    """

    forward: Kernels = NOTHING
    backward: Kernels = NOTHING
    saved_bytes: int = 0
    saved_inputs: tuple[int, ...] = ()
    saves_output: bool = False
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """Accounts by op name, for the ops that ran; failures by op name; anything else worth telling."""

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
        held = (t for m in replay.modules for t in (*m._parameters.values(), *m._buffers.values()))
        self.ignore = {*storage_bytes(t for t in held if t is not None)}

    def forward(self, piece: Piece, env: dict[str, Any], counter: Counter) -> Tape:
        saved = Saved(self.ignore)
        kernels, before = counter.kernels, counter.reset_peak()
        with _allocator(self.replay.device) as allocated:
            tape = self.replay.forward(piece, env, saved())
        peak = allocated.peak if allocated else counter.peak_bytes - before
        given = storage_bytes(tensors(tape.feed))
        new = {key: n for key, n in saved.storages.items() if key not in self.kept}
        self.kept |= set(new)
        made = sum(n for key, n in new.items() if key not in given)
        passing = sum(n for key, n in given.items() if key not in self.kept | self.ignore)
        inputs = piece.nodes[0].all_input_nodes
        account = Account(
            forward=counter.kernels - kernels,
            saved_bytes=sum(new.values()),
            saved_inputs=tuple(
                i for i, n in enumerate(inputs) if _keeps(saved, tape.feed.get(self.replay.ran(n.name)))
            ),
            saves_output=any(_keeps(saved, value) for value in tape.roots.values()),
            workspace_bytes=max(0, peak + passing - made),
        )
        self._share(piece, account)
        self._check(piece, tape)
        return tape

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

    def _share(self, piece: Piece, account: Account) -> None:
        """Ops that memory binds into one piece share its account; the first keeps the bytes."""
        bearers = _bearers(piece)
        share = account.forward // len(bearers)
        rest = dataclasses.replace(account, saved_bytes=0, saved_inputs=(), saves_output=False)
        for i, node in enumerate(piece.nodes):
            self.accounts[node.name] = dataclasses.replace(
                rest if i else account, forward=share if node in bearers else NOTHING
            )

    def _check(self, piece: Piece, tape: Tape) -> None:
        """Notes the first op on a path whose value holds NaN although what it took did not."""
        if self.replay.device.type == "meta" or not any(_has_nan(t) for t in tensors(tape.roots)):
            return
        if not self.bad & set(piece.takes):
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
    return Survey(walk.accounts, dict(replay.failures), (*walk.notes, *told))


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
    takes = node.all_input_nodes
    kept = [takes[i] for i in account.saved_inputs if i < len(takes)]
    return tuple(n.name for n in kept if n.op != "get_attr") + (node.name,) * account.saves_output


def _keeps(saved: Saved, value: Any) -> bool:
    return not storage_bytes(tensors(value)).keys().isdisjoint(saved.storages)


def _has_nan(value: Any) -> bool:
    floating = isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta
    return floating and bool(value.isnan().any())
