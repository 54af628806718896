"""What a runtime is put together from: device, peers, stages and workers, and what hangs on who has which.

Running batches through it is left to ``runner``.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn

from .. import accelerator
from ..errors import InputError
from ..graph import batch_dim
from ..plans import Plan
from ..schedule import Message, Schedule
from ..stages import Stage
from ..stages.gradients import outside_inference
from ..torch_private import UnseenByFunctions
from ..tracing.graphs.emit import output_leaves
from .data.call_kinds import Kinds
from .data.feed import Feed
from .data.intake import Intake, is_torchs
from .execute.executor import Clock, Executor, Line
from .execute.program import (
    LOSS_WAITS,
    MODEL_WAITS,
    forward_part,
    has_room,
    pick_schedule,
    step_program,
)
from .execute.results import Results
from .execute.step_agreement import StepAgreement
from .new_forms import NewForms
from .options import Options, Progress
from .peak_memory import PeakMemory
from .reduce.data_parallel import ReplicaDims, Replicas, replicas_of
from .reduce.hooks import is_hooked
from .reduce.option_changes import OptionChanges
from .reduce.precision import placeholder
from .reduce.refusals import watch, watch_scalers
from .reduce.ties import TieSum, check_ties, find_ties, learned, own_of
from .stage.initialise import initialise
from .stage.loss import Loss
from .stage.setup import card, check_same, pick_device, place, sections_of
from .stage.worker import Worker
from .stage.workers import (
    check_replicas,
    gathered,
    make_workers,
    notice_whole_backwards,
    sharded_stages,
    wrap_all,
)
from .stage.written_copies import Copies
from .thread_turns import Turn
from .weights.equal_start import check_weights, fingerprints
from .weights.gather import gather_weights
from .weights.stale import StaleTensor, absent, filled, guard, mark, readable
from .weights.written_alone import WrittenAlone
from .wire.boundary import edges_between
from .wire.channel import Channel
from .wire.peers import STOPS, Peers, pipeline_ranks
from .wire.position import Patience, Position

if TYPE_CHECKING:
    from ..tracing import Capture
    from .step_records import Publisher

__all__ = ["Engine"]

REMEMBERED_STEPS = 32
_OF_OUTPUTS = 8
"""How many times its outputs a loss takes that is asked both ways: joined, in parts, and their gradients."""
T = TypeVar("T")


class Engine:
    """The stages of this process and all that they need, alone or with peers.

    Attributes
    ----------
    rank: within the pipeline. stages, workers: those of this process. peers: None when it holds all stages.
    progress: of the model, by this runtime and others of it. n_own_steps: training steps by this one.
    n_loads: calls of ``load_state_dict`` that have reached weights of several ranks.
    was_loaded: whether any has reached weights since :meth:`follow_parameters`.
    option_changes: what is changed of its optimizers' options between their steps.
    records: (start, duration, clock) of recent training steps.
    frees: whether weights that only others train are given back. absent: those that others train.
    turn: held by the thread that uses the runtime. under_way: what it does meanwhile.
    kinds: what takes in batches, by what arguments they come in.
    publisher: writes recent steps where they are watched. peak_memory: the most the stages held.
    """

    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        stages: tuple[Stage, ...],
        options: Options,
        progress: Progress,
    ) -> None:
        self.capture, self.plan, self.all_stages, self.options = capture, plan, stages, options
        self.progress = progress
        self.n_own_steps = self.n_loads = 0
        self.was_loaded = False
        self.was_wrapped = False
        self.under_way = ""
        self.publisher: Publisher | None = None
        self.option_changes = OptionChanges()
        self._steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._guards: list[Any] = []
        self._sent: dict[Clock, dict[Message, int]] = {}
        self._gathered: tuple[tuple[int, ...], int | None] = (), None
        self.records: collections.deque[tuple[float, float, Clock]] = collections.deque(
            maxlen=REMEMBERED_STEPS
        )
        self._lines: dict[tuple[int, bool, bool], Line] = {}
        self.patience = Patience(options.stall_limit_s, plan.step_s)
        self._sections = sections_of(stages, options)
        self.is_whole = len(self._sections) > len(stages)
        self._schedule(options.n_microbatches)
        check_same(capture, stages)
        ranks = pipeline_ranks(options.mesh, plan.n_ranks)
        self.device = pick_device(options.device, stages, bool(ranks))
        accelerator.keep_freed(self.device)
        self.peers = self._join(ranks) if ranks else None
        try:
            with outside_inference():
                self._settle()
        except STOPS as error:  # the others may wait for this rank to connect
            self.fail(error)

    def _settle(self) -> None:
        """Have the weights and all else in place, each rank its own."""
        capture, options, stages = self.capture, self.options, self.all_stages
        self.rank = self.peers.rank if self.peers else 0
        self.seed: int = self.peers.cards[0]["own seed"] if self.peers else torch.initial_seed()
        self.stages = tuple(s for s in stages if self.peers is None or s.rank == self.rank)
        releases = options.release and self.peers is not None
        self.frees = self.peers is not None and (
            options.release or any(p.is_meta for p in capture.model.parameters())
        )
        self.unfilled = place(capture, self.stages, stages, self.device, releases)
        is_read = isinstance(options.weights, (str, pathlib.Path))
        initialise(
            capture.model,
            self.unfilled,
            self.seed,
            self.device,
            init=None if is_read else options.weights,  # type: ignore[arg-type]
            tables_only=is_read,
        )
        self.placeholder = placeholder(self.device)
        self.replica_dims = ReplicaDims(options.mesh)
        self.is_random = any(op.is_random for op in capture.ops.compute)
        self.turn = Turn(waits=self.peers is None, draws=self.is_random, fail=self.fail)
        self.kinds = Kinds(capture, options, is_whole=self.is_whole)
        self._forms = NewForms(self)
        devices = (
            [c["own device"] for c in self.peers.cards] if self.peers else [accelerator.identity(self.device)]
        )
        last = self.peers.cards[self.plan.placement[-1]]["own loss of torch's"] if self.peers else None
        self.loss = Loss(
            self.kinds,
            options,
            self.device,
            is_on_host=not any(devices),
            is_torchs=is_torchs(options.loss_fn) if last is None else last,
        )
        self._n_layouts = 0
        self._feed = self._make_feed()
        self._lay_out()
        watch_scalers(self)
        if self.peers is not None:
            watch(self)
        if releases:
            self.part_with_weights()
        else:
            self._guards = guard(self.absent) if self.peers is not None else []
        self.peak_memory = PeakMemory(self.device, self.stages)

    def _join(self, ranks: tuple[int, ...]) -> Peers:
        """The ranks of the pipeline, all of them with the same capture, plan, options and weights."""
        options = self.options
        mine = card(self.capture, self.plan, self.all_stages, options, self.device)
        trained = learned(options.loss_fn, self.capture.model, self.plan.n_ranks)
        mine["what loss_fn trains"] = [f"{t.name} {list(t.parameter.shape)}" for t in trained]
        mine["own loss of torch's"] = is_torchs(options.loss_fn)
        mine["own weights"] = fingerprints(self.capture, self.all_stages)
        peers = Peers(ranks, self.device, mine, self.patience)
        weakref.finalize(self, peers.close)
        peers.stand_beside(*replicas_of(options.mesh, ranks))
        check_weights(peers.cards)
        return peers

    def _lay_out(self) -> None:
        """Make all that depends on which stages there are and where."""
        capture, plan, options, stages = self.capture, self.plan, self.options, self.all_stages
        self.absent = absent(capture, self.stages, stages)
        self.loss.call.away = self.elsewhere
        self._named = _named(capture.model)
        is_one = self.peers is not None and self.replica_dims.n == 1
        beside = learned(options.loss_fn, capture.model, plan.n_ranks) if is_one else ()
        self.loss.call.trains = {id(t.parameter) for t in beside} if plan.n_ranks > 1 and self.peers else None
        ties = (*find_ties(stages), *beside) if self.peers else ()
        purpose = f"ties {self._n_layouts}" if self._n_layouts else "ties"
        self._n_layouts += 1
        self.ties = TieSum(ties, self.rank, self.peers.new_group, purpose) if self.peers else None
        self.tied = {id(t.parameter) for t in ties}
        self.counted_elsewhere = {id(t.parameter) for t in ties if t.ranks[0] != self.rank}
        everywhere, gather = (stages, self.peers.gather) if self.peers else ((), lambda mine, _: [mine])
        layers = None if self.peers is None else capture.whole.again()
        self.written = WrittenAlone(capture.model, everywhere, self.rank, gather, layers, options.loss_fn)
        self.records.clear()
        self.intake = Intake(
            capture, options, self.kinds, self._forms, self._feed, self.peers, self.stages, self.device
        )
        last = stages[-1].rank
        self.results = Results(self.kinds, self.peers, last, self.device)
        self._wire()

    def _wire(self) -> None:
        """Make what hangs on the code of the stages, and on the values that they take and give."""
        capture, plan = self.capture, self.plan
        own = dict.fromkeys(m for stage in self.stages for m in stage.modules())  # hooks run in their order
        self._held = tuple(m._parameters for m in own if m._parameters)
        hooking = {*own, *capture.model.modules()}
        self._hooks = tuple(hooks for m in hooking for hooks in (m._backward_hooks, m._backward_pre_hooks))
        self._lines.clear()
        self.edges = edges_between(self._sections)
        self.workers = make_workers(
            capture,
            plan,
            self.stages,
            self._sections,
            self.edges,
            self.loss,
            self.options.autocast,
            self.device,
        )
        self.copies = Copies(self.stages, self.all_stages)
        self.intake.follow(self.stages, self.all_stages)
        self._channel = None if self.peers is None else Channel(self.peers, self.device)
        position = Position() if self.peers is None else self.peers.position
        self.executor = Executor(self.workers, self.edges, plan, self._channel, position)
        self.step_agreement: StepAgreement | None = None
        if self.peers is not None and self._channel is not None:
            beside = (p for _, p in own_of(self.options.loss_fn, capture.model))
            self.step_agreement = StepAgreement(
                capture,
                self.peers,
                self._channel,
                parameters=(*capture.model.parameters(), *beside),
                is_fed=self.intake.is_fed,
                device=self.device,
            )
            self._connect(self.peers)

    def _take_up(self, stages: tuple[Stage, ...]) -> None:
        """Have these stages of the model in the place of those there are."""
        self.all_stages, self._sections = stages, sections_of(stages, self.options)
        self.stages = tuple(s for s in stages if self.peers is None or s.rank == self.rank)
        for stage in self.stages:
            stage.to(self.device)

    def renew(self, stages: tuple[Stage, ...]) -> None:
        """Go on with the same stages built anew, as they have further forms now."""
        self._sent = {clock: self.message_bytes(clock) for _, _, clock in [*self.records][-1:]}
        self._take_up(stages)
        self._wire()

    def recut(self, plan: Plan, stages: tuple[Stage, ...]) -> None:
        """Go on with other stages of the same model, whose weights are where they belong."""
        self.plan, self.patience.step_s = plan, plan.step_s
        self._take_up(stages)
        self._lay_out()
        if self.peers is not None:
            self.part_with_weights()

    def _make_feed(self) -> Feed | None:
        source, n_ranks = self.options.feed, self.plan.n_ranks
        if self.peers is None or source is None:
            return None
        if not 0 <= source < n_ranks:
            raise InputError(f"feed is {source}; the pipeline's ranks are 0 to {n_ranks - 1}")
        return Feed(source, self.all_stages, self.peers, self.device, self.kinds)

    def note_form(self, capture: Capture, inputs: Mapping[str, Any]) -> None:
        """Keep what a form was recorded for, until ranks that are fed are told."""
        if self._feed is not None:
            self._feed.note(self.kinds.of(capture).number, inputs)

    def _connect(self, peers: Peers) -> None:
        """Link this rank with those that it exchanges messages with."""
        placed, source = self.plan.placement, self.options.feed
        crossing = (e for e in self.edges if e.destination < len(placed))
        ends = [(placed[e.source], placed[e.destination]) for e in crossing]
        if source is not None:
            ends += [(source, rank) for rank in range(self.plan.n_ranks)]
        peers.connect([(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]])

    def wrap(self, wrapper: Callable[[Stage], nn.Module | None]) -> None:
        """Put every stage's worker behind what ``wrapper`` makes of it; ties follow replaced parameters."""
        accept = self.capture.holding()
        replaced = wrap_all(self.workers, wrapper, self.rank)
        if self.peers is not None:
            check_replicas(self.workers, self.ranks)
        self.was_wrapped = True
        Replicas.join([worker.replicas for worker in self.workers.values()])
        self._lines.clear()
        schedule = self._schedule(self.options.n_microbatches)
        notice_whole_backwards(self.workers, schedule)
        rank = None if self.peers is None else self.rank
        self._gathered = gathered(self.workers, self.plan, schedule, rank)
        self._replace_ties(replaced)
        accept()  # shards and wrapped layers are the runtime's own doing
        self.written.after_call()

    def part_with_weights(self) -> None:
        """From now on the weights of other ranks' stages are theirs alone: reading them here raises."""
        self._end_guard()
        mark(self.absent)

    def _end_guard(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def gather_weights(self) -> None:
        """Bring every weight to every rank."""
        if self.peers is not None:
            self.written.check()
            self._end_guard()
            gather_weights(self.capture, self.all_stages, self.peers, self.device)
            self.absent = absent(self.capture, self.stages, self.all_stages)
            self.written.note()

    def note_load(self, module: nn.Module) -> None:
        """Count a ``load_state_dict`` of weights that several ranks train: every rank is to call it alike.

        That of one rank's weights alone need not be.
        """
        loaded = {id(p) for p in module.parameters()}
        reached = {s.rank for s in self.all_stages if any(id(p) in loaded for p in s.parameters())}
        self.n_loads += len(reached) > 1
        self.was_loaded |= bool(reached)

    def note_options(self, optimizer: torch.optim.Optimizer, *, is_after: bool) -> None:
        """Keep in mind by what options an optimizer steps, if it is one of this rank's weights."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        known = self._steppers.get(optimizer)
        if known is None or known[0] != id(first):
            is_own = any(p is first for p in (*(p for _, p in self.stepped()), self.placeholder))
            self._steppers[optimizer] = known = id(first), is_own
        if known[1]:
            (self.option_changes.after_step if is_after else self.option_changes.before_step)(optimizer)

    def follow_parameters(self) -> None:
        """Take the parameters that the model has now for those that it had under the same names.

        Raises :class:`InputError` where others are tied; new ties are no matter to one process.
        """
        before, now = self._named, _named(self.capture.model)
        check_ties(self.capture, now if self.peers is None else before, now)
        self.was_loaded, self._named = False, now
        replaced = {id(p): now[n] for n, p in before.items() if n in now and now[n] is not p}
        if replaced and self.peers is not None:
            self.absent = absent(self.capture, self.stages, self.all_stages)
            self._replace_ties(replaced)

    def _replace_ties(self, replaced: Mapping[int, nn.Parameter]) -> None:
        """Sum gradients of, and count, other parameters from now on: id of the old → the new."""
        self.tied = {id(replaced[i]) if i in replaced else i for i in self.tied}
        self.counted_elsewhere = {id(replaced[i]) if i in replaced else i for i in self.counted_elsewhere}
        if self.ties is not None:
            self.ties.replace(replaced)

    def stepped(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizers may have: its parameters, and those of the loss alone, by name."""
        yield from self.named_parameters()
        yield from own_of(self.options.loss_fn, self.capture.model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters once each, under the model's first name for them, in the model's order."""
        first = self.capture.ops.parameter
        own: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                own.setdefault(id(parameter), (first[name].name if name in first else name, parameter))
        place = {name: i for i, name in enumerate(self._named)}
        yield from sorted(own.values(), key=lambda named: place.get(named[0], len(place)))

    @property
    def elsewhere(self) -> set[int]:
        """The ids of the model's parameters that other ranks train."""
        return {id(home.tensor) for home in self.absent} if self.peers is not None else set()

    @property
    def norm_dtype(self) -> torch.dtype:
        """In what a norm over all ranks is told, alike on each: fp64 where any of the model's weights is."""
        with UnseenByFunctions():  # other ranks' weights would each answer at length
            kinds = {p.dtype for p in self.capture.model.parameters()}
        return torch.float64 if kinds & {torch.float64, torch.complex128} else torch.float32

    @property
    def scaler(self) -> object:
        """The user's ``GradScaler`` that scales its losses, or None."""
        return self.options.scaler

    def partial(self) -> Iterator[nn.Parameter]:
        """This rank's parameters while others of the model are elsewhere."""
        if any(isinstance(home.tensor, StaleTensor) for home in self.absent):
            yield from (p for stage in self.stages for p in stage.parameters())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The job's ranks that this pipeline runs on; none where this process holds all stages."""
        return pipeline_ranks(self.options.mesh, self.plan.n_ranks)

    def hooked(self) -> tuple[bool, list[nn.Parameter], list[nn.Parameter]]:
        """Whether backward calls hooks of the user's, and the parameters that have some on whole gradients.

        Those are this rank's own, and tied ones, of which it has a part until ranks sum them. ``fully_shard``
        calls those of its shards itself. Raises :class:`InputError` for hooks under data parallelism.
        """
        if any(worker.replicas.is_sharded for worker in self.workers.values()):
            return any(self._hooks), [], []
        tied = [] if self.ties is None else self.ties.hooked()
        beside = (p for _, p in own_of(self.options.loss_fn, self.capture.model))
        parameters = (p for held in self._held for p in held.values() if p is not None)
        hooked = filter(is_hooked, itertools.chain(parameters, beside))
        own = {id(p): p for p in hooked if id(p) not in self.tied}
        if (own or tied) and any(worker.is_replicated for worker in self.workers.values()):
            raise InputError(
                f"{self.place_of_hook([*own.values(), *tied][0])}, would be given this replica's part, as "
                "DistributedDataParallel averages it later: remove the hook, and change gradients between "
                "rt.step() and optimizer.step()"
            )
        return bool(own or tied) or any(self._hooks), [*own.values()], tied

    def place_of_hook(self, parameter: nn.Parameter) -> str:
        """Where a hook on a parameter's gradient is, in words."""
        name = next((n for n, p in self.named_parameters() if p is parameter), "a parameter")
        return f"rank {self.rank}, a hook on the gradient of {name}"

    @property
    def replica(self) -> int:
        """Which of several replicas of the pipeline this process belongs to: 0 for the first."""
        return self.replica_dims.index

    @property
    def end_worker(self) -> Worker | None:
        """The one that computes the loss, where this process has it."""
        return self.workers.get(len(self._sections) - 1)

    @property
    def averages(self) -> bool:
        """Whether replicas average gradients of this rank."""
        return self.replica_dims.n > 1 and any(worker.is_replicated for worker in self.workers.values())

    def any_sharded(self) -> bool:
        """Whether replicas hold a stage of any rank in shards; every rank calls it."""
        here = any(worker.replicas.is_sharded for worker in self.workers.values())
        return here if self.peers is None else self.peers.any(here)

    def weighs_replicas(self) -> bool:
        """Whether this rank says what a batch weighs beside those of other replicas: it makes the loss.

        A last stage without parameters has nothing to wrap.
        """
        last = self.workers.get(len(self.all_stages) - 1)
        if last is None:
            return False
        if last.is_replicated or not self.was_wrapped:
            return last.is_replicated
        return not any(p.requires_grad for p in last.stage.parameters())

    @contextlib.contextmanager
    def shapes(self) -> Iterator[None]:
        """Within it the model may be recorded here, whosever its weights are: that goes by their shapes."""
        with readable(self.absent), filled(self.capture, self.all_stages):
            yield

    def message_bytes(self, clock: Clock) -> dict[Message, int]:
        """How large the messages were that this rank sent in a training step."""
        if clock in self._sent:  # before its stages were built anew
            return self._sent[clock]
        return self.executor.message_bytes(clock)

    def _schedule(
        self, n_microbatches: int, has_backward: bool = True, *, loss_waits: bool = False
    ) -> Schedule:
        """What a step with so many microbatches goes by, or a call that makes no gradients.

        Where the ``loss_waits`` for all of them, as it was found to, one that does takes any other's place.
        Raises :class:`InputError` where the one that was asked for does not fit.
        """
        waits = None
        if has_backward:
            takes_batch = loss_waits or self.options.loss_on == "batch"
            waits = MODEL_WAITS if self.is_whole else LOSS_WAITS if takes_batch else None
        wanted = self.options.schedule
        schedule = pick_schedule(self.plan, wanted, n_microbatches, waits=waits, gives_way=loss_waits)
        return schedule if has_backward else forward_part(schedule)

    def has_room(self, n_microbatches: int, n_rows: int | None) -> bool:
        """Whether every rank has room for all microbatches, and the last for their outputs several times.

        ``n_rows``: of the batch; None for as many as the example has.
        """
        ops = self.capture.ops
        leaves = output_leaves(self.capture.graphs[self.capture.model.training])
        given = {getattr(leaf, "name", "") for leaf in leaves} & ops.by_name.keys()
        example = {dim.name: dim.example for dim in ops.dims}
        dim = batch_dim(ops.dims)
        taken = sum(ops.by_name[name].bytes_at(example) for name in given)
        times = _OF_OUTPUTS * (1.0 if dim is None or n_rows is None else n_rows / max(1, dim.example))
        schedule = self._schedule(n_microbatches, loss_waits=True)
        return has_room(self.plan, schedule, round(times * taken))

    def line(self, n_microbatches: int, grad: bool, *, loss_waits: bool = False) -> Line:
        """What this process does in a step, as calls."""
        key = (n_microbatches, grad, loss_waits)
        if key not in self._lines:
            program = step_program(
                self.plan,
                self._schedule(n_microbatches, grad, loss_waits=loss_waits),
                self.edges,
                None if self.peers is None else self.rank,
                one_piece=sharded_stages(self.workers),
                sharded=self._gathered[0],
                most_whole=self._gathered[1],
            )
            self._lines[key] = self.executor.compile(program)
        return self._lines[key]

    def called(self, name: str, look: Callable[[], T], show: Callable[[T], str] = lambda found: "") -> T:
        """What ``look`` makes of the arguments of the call ``name``, which every rank makes between steps.

        Where it raises on every rank each raises its own, and where it does on some the others raise
        :class:`InputError` with their cause, as all do where it does not ``show`` the same on every rank.
        :class:`StepError` where some are at another call. Nobody waits on for who never comes.
        """
        with self.turn:
            self.check_between(f"{name}()")
            with self.doing(f"the call of {name}"):
                return look() if self.step_agreement is None else self.step_agreement.call(name, look, show)

    def check_between(self, call: str) -> None:
        """Raise :class:`InputError` where this thread is within another call, which the user's code made."""
        if self.under_way:
            raise InputError(
                f"{call} was called while {self.under_way} was under way in the same thread, by loss_fn, the "
                "model, a hook or the handler of a signal; call it between steps (a handler can set a flag "
                "that the loop looks at after each), or make a second runtime for what a step needs"
            )

    @contextlib.contextmanager
    def doing(self, words: str) -> Iterator[None]:
        """Within it no other call is taken from this thread, which has the runtime to itself."""
        with self.turn:
            outer, self.under_way = self.under_way, words
            try:
                yield
            finally:
                self.under_way = outer

    @contextlib.contextmanager
    def together(self, words: str, *, waits: bool) -> Iterator[None]:
        """Within it all ranks do what ``words`` says, between steps; ``waits``: they only wait for others.

        What they make is for steps to come, also where the caller is in ``inference_mode``.
        """
        peers = self.peers
        with (
            self.doing(words),
            outside_inference(),
            contextlib.nullcontext() if peers is None else peers.together(words, waits=waits),
        ):
            yield

    def outside(self, words: str) -> contextlib.AbstractContextManager[None]:
        """Within it this rank waits for those of other replicas."""
        return contextlib.nullcontext() if self.peers is None else self.peers.outside(words)

    def follow(self, words: str) -> None:
        """Take what the device was given so far for something that ranks wait for one another in."""
        if self.peers is not None and accelerator.is_async(self.device):
            after = (self.rank + 1) % self.peers.n_ranks
            self.peers.position.follow_to(words, after, accelerator.mark(self.device))

    def fail(self, error: BaseException) -> NoReturn:
        """Raise ``error``, or with peers the one cause that all of them report."""
        if self.peers is None:
            raise error
        self.peers.fail(error)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))
