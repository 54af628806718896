"""One call of a pipeline, from a batch to its loss: split, weigh, agree, run, sum, share.

Each of those has a module of its own; what users see of it is left to ``runtime``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import pathlib
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from .. import accelerator
from ..errors import InputError, StaleError, StepError
from ..plans import Plan
from ..schedule import Message
from ..stages import Stage, rng
from ..stages.gradients import making
from .data.feed import Feed
from .data.inputs import backpropagate
from .data.intake import Intake, Taken
from .data.microbatch import Splitter
from .data.outputs import Outputs
from .data.rows import MixedRows
from .data.weights import Weigher
from .execute.accord import Accord
from .execute.executor import Call, Clock, Executor
from .execute.program import pick_schedule, step_program
from .execute.results import Results
from .given import StepLoss, StepResult
from .held import Held
from .keep.alike import check_weights, fingerprints
from .keep.away import Away, absent, guard, mark, readable
from .keep.whole import gather_weights
from .options import Options, Request, is_due
from .reduce.parallel import ReplicaDims, Replicas
from .reduce.partial import refuse_line_search, watch
from .reduce.precision import autocast_context, placeholder, spread_overflow
from .reduce.ties import TieSum, find_ties
from .stage.crew import gathered, make_workers, wrap_all
from .stage.hooks import once_a_step
from .stage.initialise import initialise
from .stage.loss import Loss
from .stage.setup import Generators, card, check_same, pick_device, place, sections_of
from .stage.worker import StepInputs, Worker
from .turn import Turn
from .wire.boundary import edges_between
from .wire.channel import Channel
from .wire.peers import Peers, pipeline_ranks
from .wire.position import Patience, Position

if TYPE_CHECKING:
    from ..tracing import Capture
    from .record import Publisher

__all__ = ["Engine"]

REMEMBERED_STEPS = 32
LOOKED_AT = 2
"""Steps in which replicas' batches are held against each other."""


class Engine:
    """The stages of this process at work, alone or with peers.

    Attributes
    ----------
    rank: within the pipeline. stages, workers: those of this process. peers: None when it holds all stages.
    records: (start, duration, clock) of recent training steps.
    frees: whether weights that only others train are given back.
    turn: held by the thread that uses the runtime. patience: how long a rank may make no progress.
    syncs: whether a step ends with gradients summed over ranks. factor: what gradients are multiplied by.
    publisher: writes recent steps where they are watched. held: the most memory the stages held.
    share: what they are multiplied by beside replicas' own, where that is not each step's to say.
    """

    def __init__(self, capture: Capture, plan: Plan, stages: tuple[Stage, ...], options: Options) -> None:
        self.capture, self.plan, self.all_stages, self.options = capture, plan, stages, options
        self.n_steps = self.n_forwards = 0
        self.syncs = True
        self.factor = 1.0
        self.share: Tensor | None = None
        self._has_added = False
        self._was_wrapped = False
        self.publisher: Publisher | None = None
        self._guards: list[Any] = []
        self._gathered: tuple[tuple[int, ...], int | None] = (), None
        self.records: collections.deque[tuple[float, float, Clock]] = collections.deque(
            maxlen=REMEMBERED_STEPS
        )
        self._programs: dict[tuple[int, bool], tuple[Call, ...]] = {}
        self.patience = Patience(options.stall_limit_s, plan.step_s)
        self._waited_s = 0.0
        self._agreed: StepError | None = None
        self._sections = sections_of(stages, options)
        self._is_whole = len(self._sections) > len(stages)
        pick_schedule(plan, options.schedule, options.n_microbatches, waits=self._is_whole)
        check_same(capture, stages)
        ranks = pipeline_ranks(options.mesh, plan.n_ranks)
        self.device = pick_device(options.device, stages, bool(ranks))
        accelerator.keep_freed(self.device)
        self.peers: Peers | None = None
        if ranks:
            mine = card(capture, plan, stages, str(options.schedule), self.device)
            mine["own weights"] = fingerprints(capture, stages)
            self.peers = Peers(ranks, self.device, mine, self.patience)
            weakref.finalize(self, self.peers.close)
            mesh = options.mesh
            names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
            self.peers.break_too(mesh.get_group(name) for name in names if mesh is not None and name != "pp")
            check_weights(self.peers.cards)
        self.rank = self.peers.rank if self.peers else 0
        self.seed: int = self.peers.cards[0]["own seed"] if self.peers else torch.initial_seed()
        self.stages = tuple(s for s in stages if self.peers is None or s.rank == self.rank)
        releases = options.release and self.peers is not None
        self.frees = self.peers is not None and (
            options.release or any(p.is_meta for p in capture.model.parameters())
        )
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
        self.placeholder = placeholder(self.device)
        self._replicas = ReplicaDims(options.mesh)
        self._is_random = any(op.is_random for op in capture.ops.compute)
        self.turn = Turn(waits=self.peers is None, draws=self._is_random, fail=self._fail)
        self._is_running = False
        self._mixed = MixedRows(capture, options.mixed_rows, self._is_whole)
        self._splitter = Splitter(capture, options.batch_dims)
        self._weigher = Weigher(
            capture,
            options.loss_reduction,
            options.loss_weight,
            options.loss_fn,
            is_whole=self._is_whole,
        )
        self._outputs = Outputs(capture)
        self._loss = Loss(capture, options, self._outputs, self._weigher.is_sum, self.device)
        self._n_layouts = 0
        self._lay_out()
        if self.peers is not None:
            watch(self)
        if releases:
            self.part_with_weights()
        else:
            self._guards = guard(self._absent) if self.peers is not None else []
        self.held = Held(self.device, self.stages)

    def _lay_out(self) -> None:
        """Make all that depends on which stages there are and where."""
        capture, plan, options, stages = self.capture, self.plan, self.options, self.all_stages
        self._absent = absent(capture, self.stages, stages)
        ties = find_ties(stages) if self.peers else ()
        purpose = f"ties {self._n_layouts}" if self._n_layouts else "ties"
        self._n_layouts += 1
        self.ties = TieSum(ties, self.rank, self.peers.new_group, purpose) if self.peers else None
        self._tied = {id(t.parameter) for t in ties}
        self.counted_elsewhere = {id(t.parameter) for t in ties if t.ranks[0] != self.rank}
        self._programs.clear()
        self.records.clear()
        self._edges = edges_between(self._sections)
        self.workers = make_workers(
            capture, plan, self.stages, self._sections, self._edges, self._loss, options.autocast, self.device
        )
        self._channel = None if self.peers is None else Channel(self.peers, self.device)
        feed = self._make_feed(self._splitter.read)
        self._intake = Intake(
            capture,
            options,
            self._splitter,
            self._weigher,
            feed,
            self.peers,
            self.stages,
            self.device,
            self._bind,
        )
        self._results = Results(capture, self._outputs, self.peers, stages[-1].rank, self.device)
        position = Position() if self.peers is None else self.peers.position
        self._executor = Executor(self.workers, self._edges, plan, self._channel, position)
        self._accord: Accord | None = None
        if self.peers is not None and self._channel is not None:
            self._accord = Accord(capture, self.peers, self._channel, is_fed=feed is not None)
            self._connect(self.peers)

    def recut(self, plan: Plan, stages: tuple[Stage, ...]) -> None:
        """Go on with other stages of the same model, whose weights are where they belong."""
        self.plan, self.all_stages = plan, stages
        self._sections = sections_of(stages, self.options)
        self.stages = tuple(s for s in stages if self.peers is None or s.rank == self.rank)
        for stage in self.stages:
            stage.to(self.device)
        self.patience.step_s = plan.step_s
        is_summed = self.ties is not None and self.ties.is_whole
        self._lay_out()
        if self.ties is not None:
            self.ties.is_summed = is_summed  # holders, old and new, have the whole gradient
        if self.peers is not None:
            self.part_with_weights()

    def _make_feed(self, everywhere: Collection[str]) -> Feed | None:
        source, n_ranks = self.options.feed, self.plan.n_ranks
        if self.peers is None or source is None:
            return None
        if not 0 <= source < n_ranks:
            raise InputError(f"feed is {source}; the pipeline's ranks are 0 to {n_ranks - 1}")
        return Feed(source, self.all_stages, self.peers, self.device, everywhere)

    def _connect(self, peers: Peers) -> None:
        """Link this rank with those that it exchanges messages with."""
        placed, source = self.plan.placement, self.options.feed
        crossing = (e for e in self._edges if e.destination < len(placed))
        ends = [(placed[e.source], placed[e.destination]) for e in crossing]
        if source is not None:
            ends += [(source, rank) for rank in range(self.plan.n_ranks)]
        peers.connect([(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]])

    def wrap(self, wrapper: Callable[[Stage], nn.Module | None]) -> None:
        """Put every stage's worker behind what ``wrapper`` makes of it; ties follow replaced parameters."""
        is_as_captured = not self.capture.standing.changed()
        replaced = wrap_all(self.workers, wrapper, self.rank)
        self._was_wrapped = True
        Replicas.join([worker.replicas for worker in self.workers.values()])
        self._programs.clear()
        schedule = pick_schedule(
            self.plan, self.options.schedule, self.options.n_microbatches, waits=self._is_whole
        )
        rank = None if self.peers is None else self.rank
        self._gathered = gathered(self.workers, self.plan, schedule, rank)
        self.counted_elsewhere = {id(replaced[i]) for i in self.counted_elsewhere if i in replaced}
        if self.ties is not None:
            self.ties.replace(replaced)
        if is_as_captured:
            self.capture.standing.accept()  # shards and wrapped layers are the runtime's own doing

    def part_with_weights(self) -> None:
        """From now on the weights of other ranks' stages are theirs alone: reading them here raises."""
        self._end_guard()
        mark(self._absent)

    def _end_guard(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def gather_weights(self) -> None:
        """Bring every weight to every rank."""
        if self.peers is not None:
            self._end_guard()
            gather_weights(self.capture, self.all_stages, self.peers, self.device)
            self._absent = absent(self.capture, self.stages, self.all_stages)

    # -- a call -------------------------------------------------------------------------------------

    def run(self, request: Request) -> StepResult:
        """One batch through the pipeline: forward, and backward where gradients are asked for."""
        with self.turn, accelerator.using(self.device):
            if self._is_running:
                raise InputError(
                    "the runtime was called from within its own step, by loss_fn or the model; call it "
                    "between steps, or make a second runtime for what a step needs"
                )
            self._is_running = True
            try:
                return self._run(request)
            finally:
                self._is_running = False

    def _run(self, request: Request) -> StepResult:
        start_s = time.perf_counter()
        adds = request.grad and self._adds()
        try:
            if request.grad and self.peers is not None and is_due(self.n_steps):
                refuse_line_search()
            self._unfilled.check()
            taken = self._intake.take(request)
            batch = taken.batch
            if request.outputs and not self._is_whole:
                self._outputs.check(batch)
            if batch.n_microbatches > 1 and (self._is_whole or not self.options.batch_dims):
                self._mixed.check()
            step = self._inputs(taken, request)
            program = self._program(batch.n_microbatches, request.grad)
            generators = None if step.seed is None else Generators(self.device)
        except Exception as error:
            self._refuse(error)
        try:
            self._begin(step)
            clock = Clock(self.device)
            with making():
                with once_a_step(self._hookable() if step.grad else ()):
                    self._executor.run(program, clock)
                if step.grad and self.syncs:
                    self._synchronise()
            if taken.inputs:
                group = None if self.peers is None else self.peers.group
                leaves = [worker.leaves for worker in self.workers.values()]
                backpropagate(taken.inputs, leaves, batch, self.device, group.all_reduce if group else None)
            result, loss = self._results.of(step, self._end_worker, request.outputs)
            self._look(step, loss)
            clock.stop()
            self.follow("the sums and the loss of all ranks")
        except BaseException as error:
            self._fail(error)
        finally:
            if generators is not None:
                generators.restore()
            self._end()
        self.patience.is_warm = True
        if step.grad:
            is_scaled = self.options.scaler is not None
            result = StepResult(StepLoss.of(result.loss, adds=adds, is_scaled=is_scaled), result.outputs)
            self.n_steps += 1
            step_s = time.perf_counter() - start_s - self._waited_s
            self.records.append((clock.origin_s, step_s, clock))
            if self.publisher is not None:
                self.publisher.after_step(result.loss)
        else:
            self.n_forwards += 1
        return result

    def _adds(self) -> bool:
        """Whether a step now would, unscaled, add to gradients; looked at now and then, true once."""
        if self._has_added or self.factor != 1.0 or self.share is not None or not is_due(self.n_steps):
            return False
        trained = [p for stage in self.stages for p in stage.parameters() if p.requires_grad]
        grad = trained[-1].grad if trained else None
        # zeros that an optimizer left are not added to; on an accelerator looking would wait for it
        self._has_added = grad is not None and (self.device.type != "cpu" or bool(grad.any()))
        return self._has_added

    def partial(self) -> Iterator[nn.Parameter]:
        """This rank's parameters while others of the model are elsewhere."""
        if any(isinstance(home.tensor, Away) for home in self._absent):
            yield from (p for stage in self.stages for p in stage.parameters())

    def _hookable(self) -> Iterator[nn.Parameter]:
        """Parameters whose hooks are the user's, and whose gradients this rank has whole.

        What wraps a stage may have some of its own, and of tied ones a rank has a part until ranks sum them.
        """
        if self._was_wrapped:
            return
        own = {id(p): p for stage in self.stages for p in stage.parameters()}
        yield from (p for i, p in own.items() if i not in self._tied)

    @property
    def replica(self) -> int:
        """Which of several replicas of the pipeline this process belongs to: 0 for the first."""
        return self._replicas.index

    @property
    def _end_worker(self) -> Worker | None:
        """The one that computes the loss, where this process has it."""
        return self.workers.get(len(self._sections) - 1)

    def shares(
        self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> tuple[list[float], Tensor | None]:
        """What each batch's loss weighs in that of all together, alike on every rank.

        And what all together weigh beside replicas' own, on the ranks that ask each step.
        """
        found, total = self._intake.shares(calls)
        asks = total is not None and self._weighs_replicas()
        return found, self._share(total) if asks and total is not None else None

    def _share(self, counted: float) -> Tensor:
        with self.outside("weighing its batch beside the other replicas'"):
            return self._replicas.share(counted, self.device)

    def outside(self, words: str) -> contextlib.AbstractContextManager[None]:
        """Within it this rank waits for those of other replicas."""
        return contextlib.nullcontext() if self.peers is None else self.peers.outside(words)

    def _weighs_replicas(self) -> bool:
        """Whether this rank says what a batch weighs beside those of other replicas: it makes the loss.

        A last stage without parameters has nothing to wrap.
        """
        last = self.workers.get(len(self.all_stages) - 1)
        if last is None:
            return False
        trains = any(p.requires_grad for p in last.stage.parameters())
        return last.is_replicated or (self._was_wrapped and not trains)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Inputs by name. A changed model (a layer thawed) is recorded again, whatever its values.

        In the surroundings that stages run in, since the model's own code may ask for the autocast there.
        """
        with autocast_context(self.options.autocast, self.device)():
            try:
                return self.capture.bind(args, kwargs)
            except StaleError:
                with readable(self._absent):
                    return self.capture.bind(args, kwargs)

    def _inputs(self, taken: Taken, request: Request) -> StepInputs:
        grad, weights, counted = request.grad, taken.weights, taken.counted
        scaler = self.options.scaler if grad else None
        # every rank's scaler must know its scale before it can unscale
        scale = None if scaler is None else scaler.scale(torch.ones((), device=self.device))
        if grad and counted is not None and self._weighs_replicas():
            share = self.share if self.share is not None else self._share(counted)
            scale = share if scale is None else scale * share

        def seeds(weight: float | Tensor, loss: Tensor) -> Tensor:
            seed = weight * self.factor
            seed = seed.to(loss.dtype) if isinstance(seed, Tensor) else torch.full_like(loss, seed)
            return seed if scale is None else seed * scale.to(seed.dtype)

        count = self.n_steps if grad or request.like_step else -1 - self.n_forwards
        own_seed = rng.mix(self.seed, self._replicas.index) if self._replicas.index else self.seed
        seed = rng.mix(own_seed, count) if self._is_random else None
        return StepInputs(
            taken.batch,
            weights,
            seeds,
            seed,
            grad,
            want_loss=request.loss,
            want_outputs=bool(request.outputs),
            syncs=self.syncs,
            tracked=frozenset(taken.inputs),
        )

    def _begin(self, step: StepInputs) -> None:
        for edge in self._edges:
            edge.begin(step.batch.n_microbatches)
        for worker in self.workers.values():
            worker.begin(step)
        self._loss.begin(self._end_worker.step if self._end_worker else step)
        is_replicated = any(worker.is_replicated for worker in self.workers.values())
        if step.grad and self.n_steps < LOOKED_AT and is_replicated and self.options.feed is None:
            with self.outside("comparing its batch with the other replicas'"):
                self._replicas.notice_equal(step.batch.checksum(), self.device)
        if self._accord is None:
            return
        if step.grad:
            self.part_with_weights()
        self._waited_s, looks = self._accord.begin(step, self.factor)
        if step.grad and self.ties is not None:
            self.ties.before_step()
            if looks:
                self.ties.compare()

    def _synchronise(self) -> None:
        for worker in self.workers.values():
            worker.reduce()
        if self.peers is None:
            return
        assert self.ties is not None
        self.peers.position.words = "the sum of tied gradients"
        self.ties.after_step()
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

    def follow(self, words: str) -> None:
        """Take what the device was given so far for something that ranks wait for one another in."""
        if self.peers is not None and accelerator.is_async(self.device):
            after = (self.rank + 1) % self.peers.n_ranks
            self.peers.position.follow_to(words, after, accelerator.mark(self.device))

    def message_bytes(self, clock: Clock) -> dict[Message, int]:
        """How large the messages were that this rank sent in a training step."""
        return self._executor.message_bytes(clock)

    # -- failures -----------------------------------------------------------------------------------

    def _look(self, step: StepInputs, loss: Tensor | None) -> None:
        """Raise :class:`StepError` where a loss is not finite, unless looking would wait or is not wanted."""
        looks = self.options.check_finite and self.options.scaler is None and self.device.type == "cpu"
        if looks and loss is not None and not math.isfinite(loss):
            self._agreed = self._explain_nonfinite(step, loss.item())
            raise self._agreed

    def _explain_nonfinite(self, step: StepInputs, loss: float) -> StepError:
        """Run the batch forward once more, looking at every value, and say where the first bad one is.

        The same on every rank.
        """
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
            stage = min(stage, len(self.all_stages) - 1)
            where = (
                f"the first value that is not finite is {what}, in rank {self.all_stages[stage].rank}, stage "
                f"{stage}, microbatch {m}, action {stage}F{m}"
            )
        return StepError(f"the loss is {loss}: {where}; check_finite=False lets such steps pass")

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise ``error``, which keeps a step from beginning: what keeps every rank from it ends no rank.

        Beside other replicas it does: they begin the step.
        """
        alone = self.options.mesh is None or self.options.mesh.ndim == 1
        if (
            self.peers is None
            or not alone
            or isinstance(error, StepError)
            or self.peers.position.waits_for >= 0
        ):
            self._fail(error)
        position = self.peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        try:
            self.peers.refuse(position.step, error)
        finally:
            self._end()

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise ``error``, or with peers the one cause that all of them report."""
        if self.peers is None or error is self._agreed:
            raise error
        self.peers.fail(error)

    def _program(self, n_microbatches: int, grad: bool) -> tuple[Call, ...]:
        key = (n_microbatches, grad)
        if key not in self._programs:
            rank = None if self.peers is None else self.rank
            program = step_program(
                self.plan,
                self.options.schedule,
                n_microbatches,
                self._edges,
                rank,
                has_backward=grad,
                waits=self._is_whole,
                sharded=self._gathered[0],
                most_whole=self._gathered[1],
            )
            self._programs[key] = self._executor.compile(program)
        return self._programs[key]
