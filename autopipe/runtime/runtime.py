"""The runtime: training steps of a pipeline, on this process's stages or all of them.

Splitting and weighting batches, running actions, moving messages and everything else has a module of its
own; this one puts them together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils._pytree import tree_map

from ..errors import InputError, StepError
from ..plans import Plan
from ..schedule import Schedule
from ..stages import Stage, find_loss
from .boundary import edges_between
from .channel import Channel
from .executor import Clock, Executor
from .failure import Position
from .microbatch import Batch, Splitter, move
from .outputs import join, share, weighted
from .peers import Peers, pipeline_ranks
from .precision import Autocast, autocast_context, clip_grad_norm, spread_overflow
from .program import Program, compile_program, forward_part, pick_schedule
from .ties import TieSum, find_ties
from .weights import LossWeight, Weigher
from .worker import StepInputs, Worker

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["Runtime", "StepResult"]

Where = Literal["last", "all"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back, free of any graph.

    ``loss`` (0-d) is that of the full batch, on every rank; ``outputs`` the model's outputs for the full
    batch in its own structure, where asked for.
    """

    loss: Tensor
    outputs: Any = None


class Runtime:
    """Runs a pipeline: this rank's stages when a process group is up, else all stages in this process.

    Every rank makes it, and calls its methods, alike. ``None`` means what the plan says.

    Parameters
    ----------
    capture, plan, stages: from ``tracing``, ``solve`` and ``stages.build``.
    loss_fn: ``loss_fn(output, target)``, a scalar; without it the model's output holds its loss.
    n_microbatches, schedule: another count or schedule than the plan's; the placement must fit.
    device: by default the model's, or ``cuda:LOCAL_RANK`` under NCCL. Only this rank's stages move there.
    mesh: a DeviceMesh with a ``pp`` dim; its other dims are the user's, for :meth:`wrap`.
    autocast: a dtype, or a factory of a context, each stage's forward runs in.
    scaler: the user's ``GradScaler``: scales the loss; an overflow on any rank shows on all.
    loss_reduction: ``"mean"`` over rows (over counted labels for losses inside the model) or ``"sum"``.
    loss_weight: ``loss_weight(args, kwargs, target)`` weighs a microbatch instead.
    release: free the weights of stages that other ranks own.
    batch_dims: input name → batch axis, or None for an input every microbatch gets whole; ``target`` too.
    stall_limit_s: how long a rank may make no progress before all stop; by default from the plan's times.
    check_finite: raise when the loss is not finite, naming the first stage that made it so (not under a
        scaler, and not on CUDA, where looking would wait for the device).

    Raises :class:`InputError` when the plan does not fit the ranks that run, :class:`PlanError` when ranks
    hold different plans, :class:`StepError` when a rank never comes.
    """

    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        stages: Sequence[Stage],
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        n_microbatches: int | None = None,
        schedule: str | Schedule | None = None,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        autocast: Autocast = None,
        scaler: Any = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: LossWeight | None = None,
        release: bool = False,
        batch_dims: Mapping[str, int | None] | None = None,
        stall_limit_s: float | None = None,
        check_finite: bool = True,
    ) -> None:
        self.capture, self.plan, self.all_stages = capture, plan, tuple(stages)
        self._loss_fn, self._scaler = loss_fn, scaler
        self._n_microbatches = n_microbatches or plan.n_microbatches
        self._schedule = schedule
        self._stall_limit_s = stall_limit_s
        self._steps = self._forwards = 0
        self._programs: dict[tuple[int, bool], Program] = {}
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._syncs = True
        self._loss_dtype: torch.dtype | None = None
        self._loss_dtype_shared = False
        self._check_finite = check_finite and scaler is None
        pick_schedule(plan, schedule, self._n_microbatches)
        ranks = pipeline_ranks(mesh, plan.n_ranks)
        self.device = _device(device, stages, bool(ranks))
        self._check_finite = self._check_finite and self.device.type == "cpu"
        self._peers = Peers(ranks, self.device, self._card(), self._limit_s) if ranks else None
        self.rank = self._peers.rank if self._peers else 0
        self.stages = tuple(s for s in self.all_stages if self._peers is None or s.rank == self.rank)
        for stage in self.stages:
            stage.to(self.device)
        self._splitter = Splitter(capture, batch_dims)
        self._weigher = Weigher(capture, loss_reduction, loss_weight, loss_fn is None)
        self._seed = torch.initial_seed() if self._peers is None else self._peers.cards[0]["own seed"]
        self._edges = edges_between(self.all_stages)
        self._workers = self._make_workers(autocast_context(autocast, self.device))
        self._make_executor()
        ties = find_ties(self.all_stages) if self._peers else ()
        self._ties = TieSum(ties, self.rank, self._peers.new_group) if self._peers else None
        self._counted_elsewhere = {id(t.parameter) for t in ties if t.ranks[0] != self.rank}

    # -- training -----------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        n_microbatches: int | None = None,
        return_outputs: bool | Where = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are those of the full batch's loss.

        Every rank passes the same batch. Gradients add up over steps until they are zeroed, as in plain
        PyTorch. ``return_outputs``: ``"all"`` (or True) gives every rank the outputs, ``"last"`` the last.
        The user's random generators are left as they were found.

        Raises :class:`InputError` for inputs that do not fit, :class:`StepError` when anything fails on any
        rank.
        """
        result = self._run(args, kwargs, target, n_microbatches, grad=True, outputs=return_outputs)
        self._steps += 1
        return result

    @torch.no_grad()
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        n_microbatches: int | None = None,
        return_outputs: bool | Where = False,
        **kwargs: Any,
    ) -> StepResult:
        """The loss of one batch without gradients, in the model's present mode."""
        self._forwards += 1
        return self._run(args, kwargs, target, n_microbatches, grad=False, outputs=return_outputs)

    @torch.no_grad()
    def forward(
        self, *args: Any, n_microbatches: int | None = None, outputs_on: Where = "all", **kwargs: Any
    ) -> Any:
        """The model's output for one batch, without gradients, in its own structure; None where not asked for."""
        self._forwards += 1
        run = self._run(args, kwargs, None, n_microbatches, grad=False, outputs=outputs_on, loss=False)
        return run.outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it steps do not sum gradients over ranks (ties, data parallel); the next step does."""
        outer, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = outer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters once each, under the model's first name for them."""
        seen: set[int] = set()
        first = self.capture.ops.parameter
        for worker in self._workers.values():
            for name, parameter in worker.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (first[name].name if name in first else name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters once each, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the whole model's gradient norm, over all ranks, tied parameters counted once; every rank calls it.

        Returns the norm before clipping.
        """
        parameters = list(self.parameters())
        return clip_grad_norm(
            parameters,
            [p for p in parameters if id(p) not in self._counted_elsewhere],
            max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            group=self._peers.group if self._peers else None,
            device=self.device,
        )

    def wrap(self, wrapper: Callable[[Stage], nn.Module | None]) -> None:
        """Wrap each of this rank's stages, in DDP or with ``fully_shard``; None keeps the stage itself."""
        for worker in self._workers.values():
            worker.wrap(wrapper(worker.stage) or worker.stage)

    # -- one call -----------------------------------------------------------------------------------

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        n_microbatches: int | None,
        *,
        grad: bool,
        outputs: bool | Where,
        loss: bool = True,
    ) -> StepResult:
        batch = self._splitter.split(
            move(self.capture.bind(args, kwargs), self.device),
            target if target is None else _to(target, self.device),
            n_microbatches or self._n_microbatches,
        )
        weights = self._weigher.weigh(batch, args, kwargs) if loss else [1.0] * batch.n_microbatches
        step = self._inputs(batch, weights, grad=grad, loss=loss, outputs=bool(outputs))
        program = self._program(batch.n_microbatches, grad)
        self._begin(step)
        clock = Clock(self.device)
        generators = _Generators(self.device) if step.seed is not None else None
        try:
            self._executor.run(program, clock)
            if grad and self._syncs:
                self._synchronise()
            return self._result(step, weights, outputs)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if generators is not None:
                generators.restore()
            for worker in self._workers.values():
                worker.end()
            for edge in self._edges:
                edge.begin(0)

    def _inputs(
        self, batch: Batch, weights: Sequence[float], *, grad: bool, loss: bool, outputs: bool
    ) -> StepInputs:
        scaler = self._scaler if grad else None
        if scaler is not None:
            # every rank's scaler must know its scale before it can unscale
            scale = scaler.scale(torch.ones((), device=self.device))

        def seeds(m: int, loss_of_m: Tensor) -> Tensor:
            seed = torch.full_like(loss_of_m, weights[m])
            return seed if scaler is None else seed * scale.to(seed.dtype)

        count = self._steps if grad else -1 - self._forwards
        seed = _mix(self._seed, count) if any(op.is_random for op in self.capture.ops.compute) else None
        return StepInputs(batch, weights, seeds, seed, grad, loss, outputs)

    def _begin(self, step: StepInputs) -> None:
        n = step.batch.n_microbatches
        for edge in self._edges:
            edge.begin(n)
        for worker in self._workers.values():
            worker.begin(step)
        if self._peers is None:
            return
        peers, position = self._peers, self._peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        model = self.capture.model
        words = f"with {step.batch.rows} rows, inputs {step.batch.signature(0)}, training={model.training}, "
        words += f"grad={step.grad}, sync={self._syncs}, loss={step.want_loss}, outputs={step.want_outputs}"
        try:
            peers.agree(position.step, words)
        except BaseException as error:
            self._fail(error)
            raise
        assert self._channel is not None
        mode = (step.grad, model.training)
        keys = [(*mode, step.batch.signature(m)) for m in range(n)]
        self._channel.signatures = [self._signatures.setdefault(k, len(self._signatures)) for k in keys]
        if step.grad and self._ties is not None:
            self._ties.before_step()

    def _synchronise(self) -> None:
        for worker in self._workers.values():
            worker.reduce()
        if self._peers is None:
            return
        assert self._ties is not None
        self._peers.position.words = "the sum of tied gradients"
        self._ties.after_step()
        if self._scaler is not None:
            spread_overflow(self.parameters(), self._peers.group, self.device)

    def _result(self, step: StepInputs, weights: Sequence[float], outputs: bool | Where) -> StepResult:
        last = self._workers.get(len(self.all_stages) - 1)
        leaves = total = None
        if last is not None and step.want_loss:
            total = weighted(last.losses, weights)
            self._loss_dtype = self._loss_dtype or next(x.dtype for x in last.losses if x is not None)
        if last is not None and step.want_outputs:
            leaves = join([o or [] for o in last.outputs], step.batch.rows, weights)
        if self._peers is not None:
            leaves, total = self._share(step, leaves, total, outputs)
        joined = None if leaves is None else self.capture.assemble(leaves)
        if total is None:
            return StepResult(torch.full((), math.nan), joined)
        if self._check_finite and not math.isfinite(total):
            self._find_nonfinite(step, total)
        return StepResult(total.to(self._loss_dtype), joined)

    def _share(
        self, step: StepInputs, leaves: list[Any] | None, total: Tensor | None, outputs: bool | Where
    ) -> tuple[list[Any] | None, Tensor | None]:
        """Outputs and loss on the ranks that are to have them."""
        assert self._peers is not None
        source = self.all_stages[-1].rank
        self._peers.position.words = "sharing the loss"
        if step.want_loss:
            if total is None:
                total = torch.zeros((), device=self.device, dtype=torch.float64)
            total = self._peers.broadcast(total, source)
            if not self._loss_dtype_shared:
                self._loss_dtype = self._peers.share(self._loss_dtype, source)
                self._loss_dtype_shared = True
        if outputs in (True, "all"):
            leaves = share(leaves, self._peers, source, self.device)
        return leaves, total

    def _loss(self, outputs: tuple[Any, ...], target: Any) -> Tensor:
        output = self.capture.assemble(outputs)
        loss = find_loss(output) if self._loss_fn is None else self._loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            source = "the model's output holds none" if self._loss_fn is None else f"loss_fn returned {what}"
            raise InputError(
                f"a step needs a scalar loss, but {source}; pass loss_fn=lambda output, target: … to runtime()"
                " that returns a 0-d tensor"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InputError("the loss does not require a gradient: every parameter it depends on is frozen")
        return loss

    def _find_nonfinite(self, step: StepInputs, total: Tensor) -> None:
        raise StepError(f"the loss is {total.item()}")

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends, or say why they did."""
        if self._peers is None:
            return
        peers = self._peers
        if isinstance(error, StepError) or not isinstance(error, Exception):
            message = f"{type(error).__name__}: {error}" if not isinstance(error, StepError) else str(error)
            raise StepError(peers.watch.publish(message)) from error
        cause = peers.watch.cause()
        if cause is None:
            other = peers.position.waits_for
            who = f"rank {other} or one it waits for" if other >= 0 else "another rank"
            cause = peers.watch.publish(
                f"{who} is gone without a word (killed, or it left); rank {peers.rank} lost its connection at "
                f"{peers.position.words}: {error}"
            )
        raise StepError(cause) from error

    # -- making it ----------------------------------------------------------------------------------

    def _make_workers(
        self, context: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> dict[int, Worker]:
        ops = self.capture.ops.by_name
        workers = {}
        for stage in self.stages:
            planned = self.plan.stages[stage.index]
            mine = [ops[name] for name in planned.ops if name in ops]
            written = {name for op in mine for name in op.mutated_buffers}
            workers[stage.index] = Worker(
                stage,
                self._edges,
                loss=self._loss,
                forward_context=context,
                recompute=planned.recompute,
                mutated=[b for name, b in stage.named_buffers() if name in written],
                is_random=any(op.is_random for op in mine),
            )
        for worker in workers.values():
            worker.receivers = workers
        return workers

    def _make_executor(self) -> None:
        position, self._channel = Position(), None
        if self._peers is not None:
            position = self._peers.position
            self._channel = Channel(self._peers, self.device)
        self._executor = Executor(
            self._workers, self._edges, self.plan.placement, self.rank, self._channel, position
        )

    def _program(self, n_microbatches: int, grad: bool) -> Program:
        key = (n_microbatches, grad)
        if key not in self._programs:
            schedule = pick_schedule(self.plan, self._schedule, n_microbatches)
            chosen = schedule if grad else forward_part(schedule)
            rank = None if self._peers is None else self.rank
            self._programs[key] = compile_program(chosen, self._edges, rank)
        return self._programs[key]

    def _card(self) -> dict[str, Any]:
        """What every rank must have alike, and (``own``) what only it knows."""
        plan = hashlib.sha256(self.plan.to_json().encode()).hexdigest()[:16]
        code = hashlib.sha256("".join(s.code for s in self.all_stages).encode()).hexdigest()[:16]
        return {
            "the plan": plan,
            "the model": self.capture.ops.digest,
            "the stages' code": code,
            "the schedule": str(self._schedule),
            "own seed": torch.initial_seed(),
        }

    def _limit_s(self) -> float:
        """Seconds without progress that count as a stall: far above the plan's times, longer at first."""
        if self._stall_limit_s is not None:
            return self._stall_limit_s
        limit = max(MIN_STALL_S, STALL_STEPS * self.plan.step_s)
        return limit if self._steps or self._forwards else FIRST_STEP_FACTOR * limit


MIN_STALL_S = 60.0
STALL_STEPS = 20.0
FIRST_STEP_FACTOR = 5.0
"""First steps compile kernels, load libraries and open connections."""


class _Generators:
    """The user's random generators, to be left as they were found."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def _mix(seed: int, count: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + count * 0xBF58476D1CE4E5B9) & ((1 << 62) - 1)


def _to(target: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return target
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, target)


def _device(wanted: torch.device | str | None, stages: Sequence[Stage], is_distributed: bool) -> torch.device:
    if wanted is not None:
        return torch.device(wanted)
    if is_distributed and "nccl" in str(torch.distributed.get_backend()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    parameters = (p for stage in stages for p in stage.parameters())
    first = next(parameters, None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
