"""Measures what every op of a captured model costs, in context, and calibrates the sum against the whole.

Running the graph is left to ``replay``, counting bytes and kernels to ``survey``, keeping results to
``store``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from ..costs import CostTable, OpCost
from .account import Kernels
from .clock import Stopwatch, device_name, spread
from .devices import described
from .efficiency import fit
from .estimate import estimate
from .replay import Piece, Replay, Tape, stand_ins
from .survey import Account, Survey, describe, survey

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["profile"]

_HEAVY_S = {"cpu": 1e-4, "cuda": 2e-5}
_GUESS = {"cpu": (5e10, 1e10), "cuda": (3e14, 2e12)}
"""FLOP/s and bytes/s by which ops are told light from heavy before any is timed; only that hangs on them."""


class Samples:
    """Seconds measured so far: ``samples[key][part]``, a list with one figure per op and pass.

    A key is an op's signature, so equal ops share their figures. ``part`` is ``F``, ``B`` or ``I``.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, dict[str, list[float]]] = {}

    def add(self, key: str, part: str, seconds: float) -> None:
        self.by_key.setdefault(key, {}).setdefault(part, []).append(seconds)

    def of(self, key: str, part: str) -> list[float]:
        return self.by_key.get(key, {}).get(part, [])

    def median(self, key: str, part: str) -> float:
        found = self.of(key, part)
        return statistics.median(found) if found else 0.0


class _Profiler:
    def __init__(self, replay: Replay, surveyed: Survey, autocast: torch.dtype | None):
        self.replay, self.surveyed, self.autocast = replay, surveyed, autocast
        self.watch = Stopwatch(replay.device)
        self.samples = Samples()
        self.sums: dict[str, list[float]] = {"F": [], "B": []}
        self.wholes: dict[str, list[float]] = {"F": [], "B": []}
        self.pieces = replay.pieces(self._is_heavy)

    def _guess_s(self, kernels: Kernels) -> float:
        flops_s, bytes_s = _GUESS.get(self.replay.device.type, _GUESS["cpu"])
        return kernels.flops / flops_s + kernels.bytes / bytes_s

    def _is_heavy(self, name: str) -> bool:
        account = self.surveyed.accounts.get(name, Account())
        limit = _HEAVY_S.get(self.replay.device.type, _HEAVY_S["cpu"])
        return self._guess_s(account.forward) > limit

    def by_ops(self, part: str) -> None:
        """One pass, piece by piece: forward, and then the full (``B``) or the input (``I``) backward."""
        env = {**self.replay.inputs(), **self.replay.made_up}
        tapes: list[tuple[Piece, Tape]] = []
        with _steady(), self.replay.autocast(self.autocast):
            for piece in self.pieces:
                tapes.append((piece, self.replay.forward(piece, env, self.watch((piece, "F")))))
            self.replay.seed(env)
            while tapes:
                piece, tape = tapes.pop()
                self._backward(piece, tape, part)
        self._keep(self.watch.read(), part)

    def _backward(self, piece: Piece, tape: Tape, part: str) -> None:
        roots, gradients = self.replay.gradients(tape)
        if not roots:
            return
        if part == "B":
            with self.watch((piece, "B")):
                torch.autograd.backward(roots, gradients)
            return
        takes = [t for t in pytree.tree_leaves(tape.feed) if isinstance(t, Tensor) and t.requires_grad]
        if not takes:
            return
        with self.watch((piece, "I")):
            found = torch.autograd.grad(roots, takes, gradients, allow_unused=True)
        for tensor, gradient in zip(takes, found, strict=True):
            if gradient is not None and tensor.is_leaf:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

    def _keep(self, seconds: Mapping[Any, float], part: str) -> None:
        for (piece, what), value in seconds.items():
            for name, share in self._shares(piece, what).items():
                self.samples.add(self.key(name), what, value * share)
        if part == "B":
            for what, sums in self.sums.items():
                sums.append(sum(v for (_, w), v in seconds.items() if w == what))

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

    def whole(self) -> None:
        """One forward and backward of the same ops under a single tape, as training runs them."""
        env = {**self.replay.inputs(), **self.replay.made_up}
        with _steady(), self.replay.autocast(self.autocast):
            with self.watch("F"):
                for node in self.replay.nodes:
                    env[node.name] = self.replay.call(node, env)
            seeds = self.replay.seed(env)
            with self.watch("B"):
                if seeds:
                    torch.autograd.backward(seeds, [torch.ones_like(t) for t in seeds])
        for part, value in self.watch.read().items():
            self.wholes[str(part)].append(value)

    def key(self, name: str) -> str:
        return self.replay.ops.by_name[name].signature or name

    def factor(self, part: str) -> float:
        """Whole-model seconds over the sum of the pieces'; 1 where there is no telling."""
        if not self.wholes[part] or not self.sums[part] or not min(self.sums[part]):
            return 1.0
        return statistics.median(self.wholes[part]) / statistics.median(self.sums[part])

    @property
    def residual(self) -> float | None:
        if not self.wholes["F"]:
            return None
        whole = sum(statistics.median(self.wholes[p]) for p in "FB" if self.wholes[p])
        total = sum(statistics.median(self.sums[p]) for p in "FB" if self.sums[p])
        return whole / total - 1 if total else None

    def saved_values(self, name: str, account: Account) -> tuple[str, ...]:
        """The graph's values that an op keeps: those of its inputs that it does, and its own if so."""
        takes = [p.name for p in self.replay.node(name).all_input_nodes]
        kept = [takes[i] for i in account.saved_inputs if i < len(takes)]
        return tuple(n for n in kept if n in self.replay.ops.by_name) + (name,) * account.saves_output

    def cost(self, name: str) -> OpCost:
        """The cost of an op that ran, or that one of its signature stands for."""
        ran = self.replay.ran(name)
        account = self.surveyed.accounts.get(ran, Account())
        key = self.key(name)
        forward, backward = self.samples.median(key, "F"), self.samples.median(key, "B")
        inputs = min(self.samples.median(key, "I"), backward)
        factor = self.factor("B")
        return OpCost(
            forward_s=forward * self.factor("F"),
            backward_s=backward * factor,
            backward_input_s=inputs * factor,
            backward_weight_s=(backward - inputs) * factor,
            saved_bytes=account.saved_bytes,
            workspace_bytes=account.workspace_bytes,
            backward_workspace_bytes=account.backward_workspace_bytes,
            flops=account.forward.flops,
            source="measured",
            spread=max(spread(self.samples.of(key, "F")), spread(self.samples.of(key, "B"))),
            saved_values=self.saved_values(name, account),
        )


def profile(
    capture: Capture,
    *,
    dims: Mapping[str, int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    compiled: bool = False,
    training: bool = True,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    min_passes: int = 5,
    max_passes: int = 25,
    min_s: float = 1.0,
    progress: bool = True,
) -> CostTable:
    """Costs of every op of ``capture`` for one microbatch of ``dims``, measured.

    Parameters
    ----------
    capture: what to measure. Its example gives the inputs, cut or repeated to ``dims``.
    dims: input dims of one microbatch, such as ``{"batch": 2}``; others keep their example's value.
    device: where to measure; default the device of the model's first parameter.
    dtype: measure as if the model had been cast to it.
    autocast: measure under ``torch.autocast`` to this dtype.
    compiled: run leaf modules through ``torch.compile``.
    training: which form of the model.
    optimizer: its step is timed per parameter byte.
    min_passes, max_passes, min_s: passes go on until there are ``min_passes`` and ``min_s`` is spent.
    progress: show a bar with the time left where the output is a terminal.

    Ops of one signature are run at most a few times and share their figures, so a model of 96 equal blocks
    costs what one of 4 does. The model, its gradients and the random state are left as they were.

    Raises :class:`CostError` for a model without data; ops that fail are reported in the table's ``notes``
    and estimated.
    """
    device = torch.device(device or _device_of(capture.model))
    replay = Replay(capture, dims=dims, device=device, dtype=dtype, training=training, compiled=compiled)
    with stand_ins(replay, training=training):
        surveyed = survey(replay, autocast)
        profiler = _Profiler(replay, surveyed, autocast)
        _passes(profiler, min_passes, max_passes, min_s, progress)
        optimizer_s_per_byte = _optimizer_seconds(optimizer, replay.parameters, device)
    costs = {
        op.name: profiler.cost(op.name)
        for op in capture.ops.compute
        if not op.is_size and replay.has(op.name) and replay.ran(op.name) not in replay.failures
    }
    guessed, notes = _estimated(capture, replay, costs, surveyed, device)
    return CostTable(
        costs={**costs, **guessed},
        dims=replay.dims,
        device=device_name(device),
        source="measured",
        residual=profiler.residual,
        optimizer_s_per_byte=optimizer_s_per_byte,
        versions={"torch": torch.__version__},
        notes=(*surveyed.notes, *notes),
    )


def _estimated(
    capture: Capture,
    replay: Replay,
    costs: Mapping[str, OpCost],
    surveyed: Survey,
    device: torch.device,
) -> tuple[dict[str, OpCost], tuple[str, ...]]:
    """Costs of the ops that failed, from a roofline fitted to those that did not, and the reasons why."""
    failed = [op.name for op in capture.ops.compute if replay.ran(op.name) in replay.failures]
    if not failed:
        return {}, ()
    peaks = described(device_name(device))
    pairs = [(a.forward, costs[n].forward_s) for n, a in surveyed.accounts.items() if n in costs]
    guess = estimate(capture.ops, peaks, dims=replay.dims, efficiency=fit(pairs, peaks))
    notes = tuple(f"{describe(replay, n)}: {why}; estimated" for n, why in replay.failures.items())
    return {name: guess[name] for name in failed}, notes


def _passes(profiler: _Profiler, min_passes: int, max_passes: int, min_s: float, progress: bool) -> None:
    profiler.whole()
    profiler.wholes = {"F": [], "B": []}
    start = time.perf_counter()
    with tqdm(total=max_passes, desc="measuring", unit="pass", disable=None if progress else True) as bar:
        for i in range(max_passes):
            profiler.by_ops("B")
            profiler.whole()
            profiler.by_ops("I")
            bar.update()
            if i + 1 >= min_passes and time.perf_counter() - start > min_s:
                bar.total = i + 1
                break


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _steady:
    """Keeps the garbage collector out of what is being timed."""

    def __enter__(self) -> None:
        self.was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_on:
            gc.enable()


def _optimizer_seconds(
    optimizer: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], device: torch.device
) -> float:
    """Seconds of one optimizer step per byte of parameter, on parameters of the model's own shapes."""
    chosen: list[nn.Parameter] = []
    total = 0
    for p in {p.shape: p for p in parameters}.values():
        if total and total + p.nbytes > _SAMPLE_BYTES:
            continue
        chosen.append(nn.Parameter(torch.empty_like(p, device=device).normal_()))
        total += p.nbytes
    if not chosen:
        return 0.0
    for p in chosen:
        p.grad = torch.ones_like(p)
    step = optimizer(chosen, lr=1e-3).step  # type: ignore[call-arg]
    watch = Stopwatch(device)
    seconds = []
    for _ in range(4):
        with watch("step"):
            step()
        seconds.append(watch.read()["step"])
    return statistics.median(seconds[1:]) / total


_SAMPLE_BYTES = 2**28
