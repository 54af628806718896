"""Times the ops of a replay in passes: piece by piece for what each costs, whole for what the sum should be.

Choosing what to run and when to stop is left to ``profiler``.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import accelerator
from ..costs import OpCost
from ..torch_private import pytree
from ..units import format_seconds
from .busy_cores import Peers
from .estimate import inputs_s, trains_matrices
from .kernel_counts import Kernels
from .parts import Parts, leaning
from .replay import Piece, Replay, Tape
from .samples import Samples, next_to_every
from .step_overheads import passed_between
from .survey import Account, Survey, saved_values
from .timers import Busy, Stopwatch, spread

__all__ = ["ALONE", "CPU", "FIRST", "Passes"]

ALONE = " alone"
FIRST = " first"
HOST = " host"
CPU = "CPU"
_LAUNCH_BOUND = 0.9
"""Share of a pass that the host takes to launch it, from which the device is told to wait for the host."""
_AHEAD = 1.2
"""For how much longer than the host launched before an accelerator is kept busy ahead of a pass."""
_DRIFT = 0.05
"""How much longer the last third of the passes may take than the first before it is told."""
_MOST_WARMING = 10
_HEAVY_S = {"cpu": 1e-4}
_HEAVY_THERE_S = 2e-5
_GUESS = {"cpu": (5e10, 1e10)}
_GUESS_THERE = 3e14, 2e12
"""FLOP/s and bytes/s by which ops are told light from heavy before any is timed; only that hangs on them."""


_UNDISTURBED = 0.97
"""Share of its wall time that a pass must have had a CPU for, or others are in its figures."""
_MOST_DISTURBED = 20
_N_FIRST = 3
"""Passes from a step's beginning on, of which the last takes as long as those after it."""
_N_OF_PART = 2
"""Passes over a part that count, in a round over all parts."""


class Passes:
    """Repeated passes over one replay, and the costs that follow from them."""

    def __init__(self, replay: Replay, surveyed: Survey, samples: Samples, autocast: torch.dtype | None):
        self.replay, self.surveyed, self.samples, self.autocast = replay, surveyed, samples, autocast
        self.watch, self.busy = Stopwatch(replay.device), Busy(replay.device)
        self.is_async = accelerator.is_async(replay.device)
        self.host_s: Mapping[Any, float] = {}
        self.ahead_s = 0.0
        self.disturbed = 0
        self.cpu_s = 0.0
        self.whole_failed = ""
        self.parts: Parts | None = None
        self.parts_failed = ""
        self._leanings: dict[str, list[float]] = {}
        self.pieces = replay.pieces(self._is_heavy)
        accelerator.keep_freed(replay.device)

    def divide(self, n_parts: int) -> None:
        """Have :meth:`by_parts` go over so many parts of about equal work, where there are pieces for two."""
        parts = Parts(self.replay, self.pieces, self._work_s, n_parts)
        self.parts = parts if len(parts) > 1 else None

    def _work_s(self, piece: Piece) -> float:
        """About how long a piece takes."""
        accounts = (self.surveyed.accounts.get(n.name, Account()) for n in piece.nodes)
        return sum(self._guess_s(a.forward) + self._guess_s(a.backward) for a in accounts)

    def _guess_s(self, kernels: Kernels) -> float:
        flops_s, bytes_s = _GUESS.get(self.replay.device.type, _GUESS_THERE)
        return kernels.flops / flops_s + kernels.bytes / bytes_s

    def _is_heavy(self, name: str) -> bool:
        account = self.surveyed.accounts.get(name, Account())
        limit = _HEAVY_S.get(self.replay.device.type, _HEAVY_THERE_S)
        return self._guess_s(account.forward) > limit

    def round(self, keep: bool = True) -> None:
        """One pass of each kind: by ops with the full backward, whole, by ops with the input backward."""
        self.by_ops("B", keep)
        self.whole(keep)
        self.by_ops("I", keep)

    def warm_up(self) -> None:
        """Passes that do not count: of each kind, and of the whole until an accelerator's clocks are up."""
        self.round(keep=False)
        if not self.is_async:
            return
        before = math.inf
        for _ in range(_MOST_WARMING):
            start = time.perf_counter()
            self.whole(keep=False)
            took = time.perf_counter() - start
            if took > before * (1 - _DRIFT):
                return
            before = took

    def by_ops(self, part: str, keep: bool) -> None:
        """One pass, piece by piece: forward, and then the full (``B``) or the input (``I``) backward.

        A piece that fails only now is taken out like one that failed in the survey, and the pass run again.
        """
        while True:
            n_failed = len(self.replay.failures)
            seconds = self._undisturbed(functools.partial(self._by_ops, part))
            if len(self.replay.failures) == n_failed:
                break
            self.pieces = self.replay.pieces(self._is_heavy)
        if keep:
            self._keep(seconds)

    def whole(self, keep: bool = True, *, beside: str = "") -> None:
        """One forward and backward of the same ops under a single tape, as training runs them.

        ``beside`` is part of what its seconds are kept as: :data:`ALONE` where no peer is at work.
        """
        if self.whole_failed:
            return
        try:
            seconds = self._undisturbed(self._whole)
        except Exception as error:  # the ops ran one by one: what fails here is only the calibration
            self.watch.read()
            self.whole_failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            return
        for part, value in seconds.items() if keep else ():
            self.samples.add("", f"{part}{beside}", value)
            if self.is_async:
                self.samples.add("", f"{part}{beside}{HOST}", self.host_s[part])
        if keep:
            self.samples.add("", f"{CPU}{beside}", self.cpu_s)

    def first(self, touched_bytes: int) -> None:
        """The first passes of a step: gradients are yet to be made, and no cache holds anything of theirs.

        ``touched_bytes`` of others passed through the caches before, as in an optimizer's step.
        """
        passed_between(touched_bytes, self.replay.device).add_(1)
        for parameter in self.replay.parameters:
            parameter.grad = None
        for _ in range(_N_FIRST):
            self.whole(beside=FIRST)

    def by_parts(self, peers: Peers) -> None:
        """Passes over each part in turn, as its rank makes them, while the ``peers`` are at the others.

        The first of them does not count: it finds another part in the caches.
        """
        round_s: list[dict[str, float]] = []
        for number in range(len(self.parts) if self.parts else 0):
            peers.ask(number + 1)
            try:
                passes = [self._part(number) for _ in range(1 + _N_OF_PART)][1:]
            except Exception as error:
                # the ops ran one by one: what fails here is only how they share the whole
                self.watch.read()
                self.parts_failed = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.parts = None
                break
            round_s.append({part: statistics.fmean(s.get(part, 0.0) for s in passes) for part in "FB"})
        for number, seconds in enumerate(round_s if self.parts else ()):  # a round counts once it is whole
            for part, value in seconds.items():
                self.samples.add("", f"{part} of part {number}", value)
        peers.ask(0)

    def work(self, number: int, asked: int) -> None:
        """What a peer does: the whole, or a part that is not the one that it is ``asked`` to be beside."""
        if asked and self.parts:
            self._part((asked + number) % len(self.parts))
        else:
            self.whole(keep=False)

    def _part(self, number: int) -> dict[Any, float]:
        def run() -> None:
            assert self.parts is not None
            with _steady(), self.replay.autocast(self.autocast):
                self.parts.run(number, self.watch)

        return self._undisturbed(run)

    def _undisturbed(self, run: Callable[[], None]) -> dict[Any, float]:
        """Runs a pass and reads the watch; again, a few times, where the CPU was taken away meanwhile.

        On an accelerator one pass tells what the host takes, and another, with the device kept busy until all
        is launched, what the device does.
        """
        while True:
            self.ahead_s = _AHEAD * self._launching_s(run) if self.is_async else 0.0
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            got = (time.process_time() - start_cpu) / (time.perf_counter() - start)
            self.cpu_s = time.process_time() - start_cpu
            seconds = self.watch.read()
            if self.replay.device.type != "cpu" or got > _UNDISTURBED or self.disturbed >= _MOST_DISTURBED:
                return seconds
            self.disturbed += 1

    def _launching_s(self, run: Callable[[], None]) -> float:
        """Runs a pass for what the host takes: in all, and by what is timed in ``host_s``.

        Nothing was launched before: a host that is far ahead of the device waits for room to launch more.
        """
        self.ahead_s = 0.0
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        self.watch.read()
        self.host_s = self.watch.host_s
        return took

    def _by_ops(self, part: str) -> None:
        env = {**self.replay.inputs(), **self.replay.made_up}
        self.busy.keep(self.ahead_s)  # now that the inputs are there, which the host waits for
        tapes: list[tuple[Piece, Tape]] = []
        with _steady(), self.replay.autocast(self.autocast):
            for piece in self.pieces:
                with self.replay.attempt(piece, env):
                    tapes.append((piece, self.replay.forward(piece, env, self.watch((piece, "F")))))
            self.replay.seed(env)
            while tapes:
                piece, tape = tapes.pop()
                with self.replay.attempt(piece, env):
                    self._backward(piece, tape, part)

    def _backward(self, piece: Piece, tape: Tape, part: str) -> None:
        roots, gradients = self.replay.gradients(tape)
        if not roots:
            return
        if part == "B":
            with self.watch((piece, "B")):
                torch.autograd.backward(roots, gradients)
            return
        fed = (t for t in pytree.tree_leaves(tape.feed) if isinstance(t, Tensor) and t.requires_grad)
        takes = list({id(t): t for t in fed}.values())
        if not takes:
            return
        with self.watch((piece, "I")):
            found = torch.autograd.grad(roots, takes, gradients, allow_unused=True)
        for tensor, gradient in zip(takes, found, strict=True):
            if gradient is not None and tensor.is_leaf:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

    def _keep(self, seconds: Mapping[Any, float]) -> None:
        for (piece, what), value in seconds.items():
            for name, share in self._shares(piece, what).items():
                self.samples.add(self.key(name), what, value * share)
                if self.is_async:
                    self.samples.add(self.key(name), f"{what}{HOST}", self.host_s[piece, what] * share)

    def _shares(self, piece: Piece, part: str) -> dict[str, float]:
        """How the ops of a piece share its time: as the kernels they run would take."""
        weights = {}
        for node in piece.nodes:
            account = self.surveyed.accounts.get(node.name, Account())
            kernels = account.forward if part == "F" else account.backward
            weights[node.name] = kernels.n * 2e-6 + self._guess_s(kernels)
        total = sum(weights.values())
        if not total:
            return dict.fromkeys(weights, 1 / len(weights))
        return {name: w / total for name, w in weights.items() if w}

    def _whole(self) -> None:
        env = {**self.replay.inputs(), **self.replay.made_up}
        over = self.replay.over()
        self.busy.keep(self.ahead_s)
        with _steady(), self.replay.autocast(self.autocast):
            with self.watch("F"):
                for node in self.replay.nodes:
                    env[node.name] = self.replay.call(node, env)
                    for name in over.get(node.name, ()):
                        del env[name]
            roots = [*self.replay.seed(env), *self.replay.cut_off(env)]
            gradients = [torch.ones_like(t) for t in roots]
            with self.watch("B"):
                if roots:
                    torch.autograd.backward(roots, gradients)

    def key(self, name: str) -> str:
        return self.replay.ops.by_name[name].signature or name

    def pieces_s(self, part: str) -> float:
        """The sum, over every op that is run, of its median seconds."""
        return sum(self.samples.median(self.key(n.name), part) for n in self.replay.nodes)

    def factor(self, part: str) -> float:
        """Whole-model seconds over the sum of its ops'; 1 where there is no telling."""
        pieces, whole = self.pieces_s(part), self.samples.mean("", part)
        return whole / pieces if whole and pieces else 1.0

    def _leaning(self, part: str, name: str) -> float:
        """How much longer an op takes where its part runs by itself; all together take as long."""
        if self.parts is None:
            return 1.0
        if part not in self._leanings:
            nodes: list[list[str]] = [[] for _ in range(len(self.parts))]
            for node, number in self.parts.of.items():
                nodes[number].append(node)
            by_ops = [sum(self.samples.median(self.key(n), part) for n in of) for of in nodes]
            rounds = zip(
                *(self.samples.of("", f"{part} of part {i}") for i in range(len(nodes))), strict=True
            )
            self._leanings[part] = leaning(by_ops, list(rounds))
        return self._leanings[part][self.parts.of[self.replay.ran(name)]]

    @property
    def residual(self) -> float | None:
        """How much longer the whole took than the sum of its ops, relative; None if it was not run."""
        pieces, whole = sum(map(self.pieces_s, "FB")), sum(self.samples.median("", p) for p in "FB")
        return whole / pieces - 1 if whole and pieces else None

    @property
    def first_longer(self) -> float:
        """By what share of a pass the first ones of a step take longer than others, all together."""
        took = [f + b for f, b in zip(*(self.samples.of("", part + FIRST) for part in "FB"), strict=True)]
        steps = [took[i : i + _N_FIRST] for i in range(0, len(took), _N_FIRST)]
        return max(0.0, statistics.median(sum(s) / s[-1] - _N_FIRST for s in steps)) if steps else 0.0

    @property
    def alone(self) -> float:
        """The whole's seconds with no peer at work over those with them, found in pairs.

        1 where next to every pair does not tell that it is less: chance alone would make a gain of what
        varies. Of the CPU: waiting for one is not what peers with cores of their own do to one another.
        """
        alone, busy = (self.samples.of("", CPU + x) for x in (ALONE, ""))
        pairs = [a / b for a, b in zip(reversed(alone), reversed(busy), strict=False)]
        return statistics.median(pairs) if next_to_every(p < 1.0 for p in pairs) else 1.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What may have spoilt the figures."""
        out = []
        if self.disturbed >= _MOST_DISTURBED:
            out.append("other processes kept taking the CPU away; the seconds include their share")
        out += [*self._drifted(), *self._launch_bound()]
        if self.whole_failed:
            out.append(
                f"the model could not be run whole, so its ops are not calibrated: {self.whole_failed}"
            )
        if self.parts_failed:
            out.append(f"parts of the model could not be run by themselves: {self.parts_failed}")
        return tuple(out)

    def _drifted(self) -> Iterator[str]:
        """A device that slows down while it is measured: by heat, by its power limit, or for others."""
        passes = [f + b for f, b in zip(self.samples.of("", "F"), self.samples.of("", "B"), strict=False)]
        third = len(passes) // 3
        if third < 2:
            return
        first, last = statistics.median(passes[:third]), statistics.median(passes[-third:])
        if last > first * (1 + _DRIFT):
            yield (
                f"the last passes took {last / first - 1:.0%} longer than the first: the device slowed down "
                "(heat, a power limit, others at work); measure again once it is steady"
            )

    def _launch_bound(self) -> Iterator[str]:
        """An accelerator that waits for the host to launch its kernels."""
        if not self.is_async:
            return
        device_s, host_s = (sum(self.samples.median("", part + x) for part in "FB") for x in ("", HOST))
        if device_s and host_s > _LAUNCH_BOUND * device_s:
            yield (
                f"launch-bound: of {format_seconds(device_s)} a microbatch the host takes "
                f"{format_seconds(host_s)} to launch it, so the device waits; larger microbatches or "
                "compiled stages do more at once"
            )

    @property
    def done(self) -> int:
        """Whole passes measured so far, by this run and earlier ones, of every op."""
        keys = {self.key(name) for piece in self.pieces for name in self._shares(piece, "F")}
        whole = [] if self.whole_failed else [len(self.samples.of("", "F"))]
        return min([*whole, *(len(self.samples.of(k, "F")) for k in keys)], default=0)

    def cost(self, name: str) -> OpCost:
        """The cost of an op that ran, or that one of its signature stands for."""
        account = self.surveyed.accounts.get(name, Account())
        key = self.key(name)
        forward, backward = self.samples.median(key, "F"), self.samples.median(key, "B")
        inputs = self._inputs_s(name, backward)
        factor = self.factor("B") * self._leaning("B", name)
        return OpCost(
            forward_s=forward * self.factor("F") * self._leaning("F", name),
            backward_s=backward * factor,
            backward_input_s=inputs * factor,
            backward_weight_s=(backward - inputs) * factor,
            saved_bytes=account.saved_bytes,
            workspace_bytes=account.workspace_bytes,
            backward_workspace_bytes=account.backward_workspace_bytes,
            flops=account.forward.flops,
            source="measured",
            spread=max(spread(self.samples.of(key, "F")), spread(self.samples.of(key, "B"))),
            saved_values=saved_values(self.replay.node(name), account),
            host_forward_s=self.samples.median(key, "F" + HOST) * self.factor("F" + HOST),
            host_backward_s=self.samples.median(key, "B" + HOST) * self.factor("B" + HOST),
        )

    def _inputs_s(self, name: str, backward_s: float) -> float:
        """The part of an op's backward that its inputs' gradients take.

        All of it where W has nothing to do. Where it could not be timed, as its piece takes nothing with a
        gradient though the op does: half for matrix products.
        """
        key, ops = self.key(name), self.replay.ops
        op = ops.by_name[name]
        if trains_matrices(ops, op) and self.samples.of(key, "I"):
            return min(self.samples.median(key, "I"), backward_s)
        return inputs_s(ops, op, backward_s)


class _steady:
    """Keeps the garbage collector out of what is being timed."""

    def __enter__(self) -> None:
        self.was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_on:
            gc.enable()
