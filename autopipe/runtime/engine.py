"""One call of a pipeline, from a batch to its loss: split, weigh, agree, run, sum, share.

Each of those has a module of its own; what users see of it is left to ``runtime``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import math
import pathlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from .. import accelerator
from ..errors import InputError, StaleError, StepError
from ..plans import Plan
from ..schedule import Message
from ..simulator import stage_times
from ..stages import Stage, rng
from .data.feed import Feed
from .data.inputs import backpropagate, tracked
from .data.microbatch import Batch, Splitter, with_forms
from .data.outputs import Outputs, share, weighted
from .data.rows import MixedRows
from .data.weights import Weigher
from .execute.executor import Call, Clock, Executor
from .execute.program import compile_program, forward_part, pick_schedule
from .keep.alike import check_weights, fingerprints
from .keep.away import absent, mark, readable
from .keep.whole import gather_weights
from .options import Options, StepResult, Where, is_due
from .reduce.parallel import ReplicaDims
from .reduce.precision import autocast_context, placeholder, spread_overflow
from .reduce.ties import TieSum, find_ties
from .stage.initialise import initialise
from .stage.loss import Loss
from .stage.setup import Generators, card, check_same, pick_device, place, written_buffers
from .stage.worker import StepInputs, Worker
from .turn import Turn
from .wire.boundary import edges_between
from .wire.channel import Channel
from .wire.failure import Patience, Position
from .wire.peers import Peers, pipeline_ranks
from .wire.values import dtype_of, name_of

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["Engine"]

REMEMBERED_STEPS = 32


class Engine:
    """The stages of this process at work, alone or with peers.

    Attributes
    ----------
    rank: within the pipeline. stages, workers: those of this process. peers: None when it holds all stages.
    records: (start, duration, clock) of recent training steps.
    turn: held by the thread that uses the runtime.
    syncs: whether a step ends with gradients summed over ranks. factor: what gradients are multiplied by.
    """

    def __init__(self, capture: Capture, plan: Plan, stages: tuple[Stage, ...], options: Options) -> None:
        self.capture, self.plan, self.all_stages, self.options = capture, plan, stages, options
        self.n_steps = self.n_forwards = 0
        self.syncs = True
        self.factor = 1.0
        self.records: collections.deque[tuple[float, float, Clock]] = collections.deque(
            maxlen=REMEMBERED_STEPS
        )
        self._programs: dict[tuple[int, bool], tuple[Call, ...]] = {}
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._patience = Patience(options.stall_limit_s, plan.step_s)
        self._loss_dtype: torch.dtype | None = None
        self._is_dtype_shared = False
        self._waited_s = 0.0
        if options.n_microbatches < 1:
            raise InputError(f"n_microbatches is {options.n_microbatches}; a step has at least 1")
        pick_schedule(plan, options.schedule, options.n_microbatches)
        check_same(capture, stages)
        ranks = pipeline_ranks(options.mesh, plan.n_ranks)
        self.device = pick_device(options.device, stages, bool(ranks))
        self.peers: Peers | None = None
        if ranks:
            mine = card(capture, plan, stages, str(options.schedule), self.device)
            mine["own weights"] = fingerprints(capture, stages)
            self.peers = Peers(ranks, self.device, mine, self._patience)
            weakref.finalize(self, self.peers.close)
            check_weights(self.peers.cards)
        self.rank = self.peers.rank if self.peers else 0
        self.seed: int = self.peers.cards[0]["own seed"] if self.peers else torch.initial_seed()
        self.stages = tuple(s for s in stages if self.peers is None or s.rank == self.rank)
        releases = options.release and self.peers is not None
        self._unfilled = place(capture, self.stages, stages, self.device, releases)
        is_read = isinstance(options.weights, (str, pathlib.Path))
        initialise(
            capture.model,
            self._unfilled,
            self.seed,
            self.device,
            init=None if is_read else options.weights,  # type: ignore[arg-type]
            tables_only=is_read,
        )
        self._absent = absent(capture, self.stages, stages)
        if releases:
            mark(self._absent)
        ties = find_ties(stages) if self.peers else ()
        self._ties = TieSum(ties, self.rank, self.peers.new_group) if self.peers else None
        self.counted_elsewhere = {id(t.parameter) for t in ties if t.ranks[0] != self.rank}
        self.placeholder = placeholder(self.device)
        self._flags = tuple(capture.model.parameters())
        self._replicas = ReplicaDims(options.mesh)
        self._is_random = any(op.is_random for op in capture.ops.compute)
        self.turn = Turn(waits=self.peers is None, draws=self._is_random, fail=self._fail)
        self._is_running = False
        self._mixed = MixedRows(capture)
        self._splitter = Splitter(capture, options.batch_dims)
        self._weigher = Weigher(capture, options.loss_reduction, options.loss_weight, options.loss_fn)
        self._outputs = Outputs(capture)
        self._loss = Loss(capture, options, self._outputs, self._weigher.is_sum, self.device)
        self._edges = edges_between(stages)
        self.workers = self._make_workers()
        self._channel = None if self.peers is None else Channel(self.peers, self.device)
        position = Position() if self.peers is None else self.peers.position
        self._feed = None
        if self.peers is not None and options.feed is not None:
            if not 0 <= options.feed < plan.n_ranks:
                raise InputError(f"feed is {options.feed}; the pipeline's ranks are 0 to {plan.n_ranks - 1}")
            self._feed = Feed(options.feed, stages, self.peers, self.device, self._splitter.read)
        self._executor = Executor(self.workers, self._edges, plan, self._channel, position)
        if self.peers is not None:
            ends = [(plan.placement[e.source], plan.placement[e.destination]) for e in self._edges]
            if options.feed is not None:
                ends += [(options.feed, rank) for rank in range(plan.n_ranks)]
            self.peers.connect([(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]])

    def _make_workers(self) -> dict[int, Worker]:
        by_name = self.capture.ops.by_name
        workers: dict[int, Worker] = {}
        for stage in self.stages:
            planned = self.plan.stages[stage.index]
            ops = [by_name[name] for name in planned.ops if name in by_name]
            workers[stage.index] = Worker(
                stage,
                self._edges,
                loss=self._loss,
                forward_context=autocast_context(self.options.autocast, self.device),
                recompute=planned.recompute,
                mutated=written_buffers(stage, ops),
                is_random=any(op.is_random for op in ops),
            )
        for worker in workers.values():
            worker.receivers = workers
        return workers

    def wrap(self, wrapper: Callable[[Stage], nn.Module | None]) -> None:
        """Put every stage's worker behind what ``wrapper`` makes of it; ties follow replaced parameters.

        Raises :class:`InputError` where stages of this rank share a parameter and no longer do.
        """
        replaced: dict[int, nn.Parameter] = {}
        is_as_captured = not self.capture.standing.changed()
        for worker in self.workers.values():
            before = dict(worker.stage.named_parameters(remove_duplicate=False))
            made = wrapper(worker.stage)
            worker.wrap(worker.stage if made is None else made)
            after = dict(worker.stage.named_parameters(remove_duplicate=False))
            for name, old in before.items():
                new = after.get(name, old)
                if replaced.setdefault(id(old), new) is not new:
                    raise InputError(
                        f"{name} is shared by several stages of rank {self.rank}, and the wrapper gave stage "
                        f"{worker.stage.index} a copy of its own; plan with ties='colocate', or with one "
                        "stage per rank"
                    )
        self.counted_elsewhere = {id(replaced[i]) for i in self.counted_elsewhere if i in replaced}
        if self._ties is not None:
            self._ties.replace(replaced)
        if is_as_captured:
            self.capture.standing.accept()  # shards and wrapped layers are the runtime's own doing

    def part_with_weights(self) -> None:
        """From now on the weights of other ranks' stages are theirs alone: reading them here raises."""
        mark(self._absent)

    def gather_weights(self) -> None:
        """Bring every weight to every rank."""
        if self.peers is not None:
            gather_weights(self.capture, self.all_stages, self.peers, self.device)
            self._absent = absent(self.capture, self.stages, self.all_stages)

    # -- a call -------------------------------------------------------------------------------------

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        n_microbatches: int | None,
        *,
        grad: bool,
        outputs: bool | Where,
        loss: bool = True,
        like_step: bool = False,
    ) -> StepResult:
        """One batch through the pipeline: forward, and backward when ``grad``."""
        with self.turn, accelerator.using(self.device):
            if self._is_running:
                raise InputError(
                    "the runtime was called from within its own step, by loss_fn or the model; call it "
                    "between steps, or make a second runtime for what a step needs"
                )
            self._is_running = True
            try:
                return self._run(args, kwargs, target, n_microbatches, grad, outputs, loss, like_step)
            finally:
                self._is_running = False

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        n_microbatches: int | None,
        grad: bool,
        outputs: bool | Where,
        loss: bool,
        like_step: bool,
    ) -> StepResult:
        start_s = time.perf_counter()
        try:
            self._unfilled.check()
            batch, (weights, counted), inputs = self._batch(args, kwargs, target, n_microbatches, loss)
            inputs = inputs if grad else {}
            if outputs:
                self._outputs.check(batch)
            if batch.n_microbatches > 1 and not self.options.batch_dims:
                self._mixed.check(self.options.mixed_rows == "allow")
            step = self._inputs(
                batch, weights, counted, grad=grad, loss=loss, outputs=bool(outputs), like_step=like_step
            )
            step = dataclasses.replace(step, tracked=frozenset(inputs))
            program = self._program(batch.n_microbatches, grad)
            generators = None if step.seed is None else Generators(self.device)
        except Exception as error:
            self._fail(error)
        try:
            self._begin(step)
            clock = Clock(self.device)
            self._executor.run(program, clock)
            if grad and self.syncs:
                self._synchronise()
            if inputs:
                group = None if self.peers is None else self.peers.group
                leaves = [worker.leaves for worker in self.workers.values()]
                backpropagate(inputs, leaves, batch, self.device, group.all_reduce if group else None)
            result = self._result(step, weights, outputs)
            clock.stop()
        except BaseException as error:
            self._fail(error)
        finally:
            if generators is not None:
                generators.restore()
            self._end()
        self._patience.is_warm = True
        if grad:
            self.n_steps += 1
            step_s = time.perf_counter() - start_s - self._waited_s
            self.records.append((clock.origin_s, step_s, clock))
        else:
            self.n_forwards += 1
        return result

    def _batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, n_asked: int | None, loss: bool
    ) -> tuple[Batch, tuple[list[float], float], dict[str, Tensor]]:
        """The batch in microbatches, what each weighs and counted, and inputs that require a gradient.

        Of this rank's arguments, or as it is fed.
        """
        if self._feed is not None and self._feed.source != self.rank:
            if args or kwargs or target is not None:
                raise InputError(
                    f"rank {self.rank} was given inputs, but only rank {self._feed.source} feeds this "
                    "pipeline; call step() without any here, or make the runtime without feed"
                )
            leaves, target, n, weights, forms = self._feed.take()
            return dataclasses.replace(self._splitter.split(leaves, target, n), forms=forms), weights, {}
        kwargs, target = self._route(kwargs, target)
        bound = self._bind(args, kwargs)
        inputs = tracked(bound)
        if inputs and self._feed is not None:
            raise InputError(
                f"{', '.join(inputs)} require a gradient, which what rank {self.rank} feeds the others "
                "cannot get; make the runtime without feed and pass every rank the batch, or detach them"
            )
        n = n_asked or self.options.n_microbatches
        free = {name: v.detach() if name in inputs else v for name, v in bound.items()}
        batch = with_forms(self._splitter.split(free, target, n), self.capture)
        # counted where the batch is: on the device every count would wait
        weigh = self._weigher.weigh
        weights = weigh(batch, args, kwargs, bound) if loss else ([1.0] * batch.n_microbatches, 0.0)
        if self._feed is not None:
            self._feed.give(batch, target, n, weights)
        used = {name for stage in self.stages for name in stage.inputs}
        return batch.on(self.device, used, self.stages[-1].is_last), weights, inputs

    def shares(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[float]:
        """What each batch's loss weighs in that of all together, alike on every rank."""
        found: list[float | None] = []
        if self._feed is None or self._feed.source == self.rank:
            for args, given in calls:
                own = {name: value for name, value in given.items() if name != "target"}
                kwargs, target = self._route(own, given.get("target"))
                bound = self._bind(args, kwargs)
                batch = self._splitter.split(bound, target, 1)
                found.append(self._weigher.measure(batch, args, kwargs, bound))
        if self._feed is not None and self.peers is not None:
            found = self.peers.share(found, self._feed.source, list[float | None])
        counts = [1.0 if n is None else n for n in found]
        total = 1.0 if None in found else sum(counts)
        if total == 0:
            raise InputError("none of the batches has a label that counts; leave such batches out")
        return [n / total for n in counts]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Inputs by name. A changed model (a layer thawed) is recorded again, whatever its values."""
        try:
            return self.capture.bind(args, kwargs)
        except StaleError:
            with readable(self._absent):
                return self.capture.bind(args, kwargs)

    def _route(self, kwargs: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
        """The target's way: to ``loss_fn``, or without one to the model's own argument of that name."""
        if target is None or self.options.loss_fn is not None:
            return kwargs, target
        if "target" in inspect.signature(self.capture.model.forward).parameters:
            return {**kwargs, "target": target}, None
        raise InputError(
            "step got a target, but nothing takes it: there is no loss_fn, and the model has no argument "
            "'target'; pass loss_fn to runtime(), or the labels under the model's own name for them"
        )

    def _inputs(
        self,
        batch: Batch,
        weights: Sequence[float],
        counted: float,
        *,
        grad: bool,
        loss: bool,
        outputs: bool,
        like_step: bool = False,
    ) -> StepInputs:
        scaler = self.options.scaler if grad else None
        # every rank's scaler must know its scale before it can unscale
        scale = None if scaler is None else scaler.scale(torch.ones((), device=self.device))
        last = self.workers.get(len(self.all_stages) - 1)
        if grad and counted and last is not None and last.is_replicated:
            share = self._replicas.share(counted, self.device)
            scale = share if scale is None else scale * share

        def seeds(m: int, loss_of_m: Tensor) -> Tensor:
            seed = torch.full_like(loss_of_m, weights[m] * self.factor)
            return seed if scale is None else seed * scale.to(seed.dtype)

        count = self.n_steps if grad or like_step else -1 - self.n_forwards
        own_seed = rng.mix(self.seed, self._replicas.index) if self._replicas.index else self.seed
        seed = rng.mix(own_seed, count) if self._is_random else None
        return StepInputs(batch, weights, seeds, seed, grad, loss, outputs, self.syncs)

    def _begin(self, step: StepInputs) -> None:
        batch = step.batch
        for edge in self._edges:
            edge.begin(batch.n_microbatches)
        for worker in self.workers.values():
            worker.begin(step)
        self._loss.begin(step)
        if self.peers is None:
            return
        if step.grad:
            self.part_with_weights()
        training = self.capture.model.training
        position = self.peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        position.is_idle = False
        words = (
            f"with {sum(batch.rows)} rows in {batch.n_microbatches} microbatches of "
            f"{_shapes(batch)}, training={training}, gradients={step.grad}, sync={step.syncs}, "
            f"inputs' gradients={sorted(step.tracked)}, times={self.factor:.12g}, "
            f"loss={step.want_loss}, outputs={step.want_outputs}"
            + (f", forms {list(batch.forms)} of the model" if any(batch.forms) else "")
        )
        flags = tuple(p.requires_grad for p in self._flags)
        looks = is_due(position.step - 1)
        # what is on the device is looked at while that still warms up
        looks_at_batch = looks and self._feed is None and (position.step <= 2 or batch.is_on_host)
        checksum = batch.checksum() if looks_at_batch else 0
        self._waited_s = self.peers.agree(position.step, words, f"{words} {flags}", checksum)
        self._sign(batch, (step.grad, training, flags, step.tracked))
        if step.grad and self._ties is not None:
            self._ties.before_step()
            if looks:
                self._ties.compare()

    def _sign(self, batch: Batch, mode: tuple[Any, ...]) -> None:
        """Number what decides the shapes on the wire: ranks meet the same in the same order."""
        assert self._channel is not None
        known: dict[tuple[int, ...], int] = {}
        sizes = [batch.sizes(m) for m in range(batch.n_microbatches)]
        for m, size in enumerate(sizes):
            if size not in known:
                key = (mode, batch.signature(m))
                known[size] = self._signatures.setdefault(key, len(self._signatures))
        self._channel.signatures = [known[size] for size in sizes]

    def _synchronise(self) -> None:
        for worker in self.workers.values():
            worker.reduce()
        if self.peers is None:
            return
        assert self._ties is not None
        self.peers.position.words = "the sum of tied gradients"
        self._ties.after_step()
        if self.options.scaler is not None:
            self.placeholder.grad = torch.zeros_like(self.placeholder)
            parameters = [p for stage in self.stages for p in stage.parameters()]
            spread_overflow([*parameters, self.placeholder], self.peers.group, self.device)

    def _end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        for edge in self._edges:
            edge.begin(0)
        if self.peers is not None:
            position = self.peers.position
            position.index, position.waits_for, position.is_idle = -2, -1, True
            position.words = f"the user's own code after step {position.step}"

    def message_bytes(self) -> dict[Message, int]:
        """How large the messages were that this rank sent in the last training step."""
        return self._executor.message_bytes(self.records[-1][2]) if self.records else {}

    # -- results ------------------------------------------------------------------------------------

    def _result(self, step: StepInputs, weights: Sequence[float], outputs: bool | Where) -> StepResult:
        last = self.workers.get(len(self.all_stages) - 1)
        leaves = total = None
        if last is not None and step.want_loss:
            total = weighted(last.losses, weights)
            self._loss_dtype = self._loss_dtype or next(x.dtype for x in last.losses if x is not None)
        if last is not None and step.want_outputs:
            leaves = self._outputs.join([o or [] for o in last.outputs], step.batch, weights)
        if self.peers is not None:
            leaves, total = self._share(self.peers, step, leaves, total, outputs)
        joined = None if leaves is None else self.capture.assemble(leaves)
        if total is None:
            return StepResult(torch.full((), math.nan), joined)
        looks = self.options.check_finite and self.options.scaler is None and self.device.type == "cpu"
        if looks and not math.isfinite(total):
            self._explain_nonfinite(step, total.item())
        return StepResult(total.to(self._loss_dtype), joined)

    def _share(
        self,
        peers: Peers,
        step: StepInputs,
        leaves: list[Any] | None,
        total: Tensor | None,
        outputs: bool | Where,
    ) -> tuple[list[Any] | None, Tensor | None]:
        """Outputs and loss on the ranks that are to have them."""
        source = self.all_stages[-1].rank
        peers.position.words = "sharing the loss"
        if step.want_loss:
            if total is None:
                total = torch.zeros((), device=self.device, dtype=torch.float64)
            total = peers.broadcast(total, source)
            if not self._is_dtype_shared:
                mine = None if self._loss_dtype is None else name_of(self._loss_dtype)
                self._loss_dtype, self._is_dtype_shared = dtype_of(peers.share(mine or "", source)), True
        if outputs in (True, "all"):
            leaves = share(leaves, peers, source, self.device)
        return leaves, total

    # -- failures -----------------------------------------------------------------------------------

    def _explain_nonfinite(self, step: StepInputs, loss: float) -> NoReturn:
        """Run the batch forward once more, looking at every value, and say where the first bad one is."""
        probe = dataclasses.replace(step, grad=False, want_outputs=False)
        found: list[tuple[int, int, str]] = []
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for worker in self.workers.values():
                stack.enter_context(worker.probing(found))
            self._begin(probe)
            self._executor.run(self._program(step.batch.n_microbatches, False), Clock(self.device))
        everyone = [found] if self.peers is None else self.peers.gather(found, list[tuple[int, int, str]])
        first = min((f for part in everyone for f in part), default=None)
        where = "no stage gave a value that is not finite, so only the backward's sum of losses did"
        if first is not None:
            m, stage, what = first
            where = (
                f"the first value that is not finite is {what}, in rank {self.all_stages[stage].rank}, stage "
                f"{stage}, microbatch {m}, action {stage}F{m}"
            )
        raise StepError(f"the loss is {loss}: {where}; check_finite=False lets such steps pass")

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise ``error``, or with peers the one cause that all of them report."""
        if self.peers is None:
            raise error
        self.peers.fail(error)

    def _program(self, n_microbatches: int, grad: bool) -> tuple[Call, ...]:
        key = (n_microbatches, grad)
        if key not in self._programs:
            schedule = pick_schedule(self.plan, self.options.schedule, n_microbatches)
            chosen = schedule if grad else forward_part(schedule)
            rank = None if self.peers is None else self.rank
            known = all(s.forward_s for s in self.plan.stages)
            times = stage_times(self.plan) if known else None
            program = compile_program(chosen, self._edges, rank, times)
            self._programs[key] = self._executor.compile(program)
        return self._programs[key]


def _shapes(batch: Batch) -> str:
    shapes = (
        f"{name} {v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else f"{name}={v!r}"
        for name, v in ((name, column[0]) for name, column in batch.leaves.items())
    )
    return ", ".join(shapes)
