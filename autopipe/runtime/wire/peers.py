"""The ranks of one pipeline: how they find each other, agree on every step, and end together.

Moving tensors is left to ``channel``, judging stalls to ``failure``.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ... import accelerator
from ...errors import AutopipeError, InputError, PlanError, StepError
from ...host_link import Link
from ...torch_private import default_store
from .board import Board, StoreGone
from .control_messages import ControlMessages
from .ended import ended
from .failure import Watch, first_difference, roll_call
from .group import FOREVER, Group, HostGroup, break_group, make_group
from .host_links import connect
from .lost_ranks import corner, end_of_a_replica, loss_in, tells_of_a_loss
from .position import OUTSIDE, Patience, Position
from .refused import refusal, say_refused
from .side_thread import in_side_thread

__all__ = ["STOPS", "Peers", "joining", "pipeline_ranks"]

_logger = logging.getLogger(__name__)

_made: dict[tuple[int, ...], int] = {}
_n_begun = 0
_elsewhere: AutopipeError | None = None
"""The last refusal of a rank that looked for the others elsewhere: it counts no pipeline of theirs."""
T = TypeVar("T")
STOPS = Exception, KeyboardInterrupt, SystemExit
"""What may end a call on one rank alone."""
MOST_AHEAD = 64
"""Steps between two ranks' counts that may still be steps; what is told of another call has any number."""
REFUSED = -1
"""In the place of a batch's checksum: the rank cannot begin this step."""
CALLS = (
    *("clip_grad_norm_", "save", "load", "resume", "rebalance", "gather_weights", "report", "publish"),
    "generate",
)
"""What ranks call between steps, and agree on as on a step."""
FIRST_CALL = -1 << 20
"""The number of the first of these in the place of a step's; the next ones are below it."""
ACCEPTS, REFUSES, DIFFERS = 1, 2, 4
"""Bits: what a rank makes of its arguments of a call, and that they are not those of the rank before."""


def pipeline_ranks(mesh: DeviceMesh | None, n_ranks: int) -> tuple[int, ...]:
    """The global ranks of this process's pipeline in order; empty for all stages in this process.

    Raises :class:`InputError` when their number is not the plan's.
    """
    ranks = _ranks_of(mesh)
    if ranks and len(ranks) != n_ranks:
        if len(ranks) == 1:
            return ()
        raise InputError(
            f"the plan is for {n_ranks} ranks but {len(ranks)} are running; start {n_ranks} processes, "
            f"plan for n_ranks={len(ranks)}, or pass a mesh with a 'pp' dim of {n_ranks}"
        )
    return ranks if len(ranks) > 1 else ()


def _ranks_of(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The global ranks that a mesh, or else the job, has for a pipeline; none where there is no group."""
    group: Any
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if "pp" in names:
            group = mesh.get_group("pp")
        elif mesh.ndim == 1:
            group = mesh.get_group()
        else:
            raise InputError(f"the mesh has dims {names}; name the pipeline's 'pp'")
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.group.WORLD
    else:
        return ()
    return tuple(dist.get_process_group_ranks(group))


@contextlib.contextmanager
def joining(mesh: Any) -> Iterator[None]:
    """Within it each rank of a pipeline makes its runtime, on a ``mesh`` or, where that is none, in the job.

    What keeps one alone from it, the others hear at once: by where it looks for them and, as that may be
    what is wrong, by how many runtimes of several ranks it has begun.
    """
    global _n_begun
    try:
        ranks = _ranks_of(mesh)
    except (AttributeError, InputError):  # what the runtime is refused for, too
        ranks = _ranks_of(None)
    n_made = _made.get(ranks, -1)
    _n_begun += len(ranks) > 1
    try:
        yield
    except BaseException as error:
        if error is _elsewhere:  # where this rank looked for them nobody has met
            _made[ranks] = n_made
        elif len(ranks) > 1 and _made.get(ranks, -1) == n_made:  # it has not come to the others
            _made[ranks] = n_made + 1
            own = dist.get_rank()
            say_refused(corner(ranks, n_made + 1), "runtime", ranks.index(own), error)
            say_refused(_corner_of_begun(), "runtime", own, error)
        raise


def _corner_of_begun() -> str:
    return f"runtimes/{_n_begun}"


class Peers(ControlMessages):
    """This rank's ties to the other ranks of its pipeline.

    Attributes
    ----------
    rank, n_ranks: within the pipeline. group: carries tensors. control: carries small CPU messages.
    position: where this rank is, kept up to date by whoever works. watch: see :class:`Watch`.
    """

    def __init__(
        self, ranks: tuple[int, ...], device: torch.device, card: dict[str, Any], patience: Patience
    ) -> None:
        super().__init__(ranks.index(dist.get_rank()), len(ranks))
        self._device, self._process = device, os.getpid()
        _made[ranks] = self._n_made = _made.get(ranks, -1) + 1
        default: Any = default_store()
        self._host = default  # lives as long as the others may ask it
        is_hosted_here = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.board = Board(default, corner(ranks, self._n_made), lambda: patience.limit_s)
        try:
            self.store: Any = self.board.connection()
            self.cards = self._compare(card, patience.limit_s, lambda r: self._gone(r, ranks[r]))
        except BaseException as error:
            self.board.close()
            if isinstance(error, StoreGone):
                raise StepError(str(error)) from error
            raise
        self._connect_s = patience.limit_s
        self._links: dict[int, Link] = {}
        self._groups: list[Group] = []
        self._breakable: list[Group | HostGroup] = []
        self._others: list[Any] = []
        self._replicas: Sequence[tuple[int, ...]] = ()
        self.position = Position()
        self.watch = Watch(
            self.board,
            self.rank,
            self.n_ranks,
            position=self._seen,
            abort=self._abort,
            patience=patience,
            host=ranks.index(0) if is_hosted_here and 0 in ranks else -1,
            broken=lambda: [rank for rank, link in list(self._links.items()) if link.is_broken],
            members=ranks,
        )
        try:
            with self.together("connecting", waits=True):
                self._meet()
        except BaseException:
            self.watch.close()
            self.board.close()
            raise

    def _meet(self) -> None:
        self._links |= connect(self.board, self.rank, self.n_ranks, self._check)
        everyone = tuple(range(self.n_ranks))
        self.group = self.new_group("tensors", everyone)
        if self.rank in self.crowded[:1]:
            _logger.warning(
                "ranks %s share an accelerator with others of the pipeline: messages go by way of the host, "
                "slowly; where there is a device for each, start the job with torchrun, which says whose is "
                "which (LOCAL_RANK), or pass runtime(device=...)",
                ", ".join(map(str, self.crowded)),
            )
        aside = dist.PrefixStore("control", self.store)  # type: ignore[attr-defined]
        self.control = self._unless_failed(
            lambda: HostGroup(
                aside, everyone, self.rank, self._connect_s, self._links, self.watch.raise_if_failed
            )
        )
        self._breakable.append(self.control)

    @functools.cached_property
    def crowded(self) -> tuple[int, ...]:
        """The ranks that share an accelerator with another of this pipeline."""
        devices = [card["own device"] for card in self.cards]
        return tuple(r for r, device in enumerate(devices) if device and devices.count(device) > 1)

    def _unless_failed(self, make: Callable[[], T]) -> T:
        """What ``make`` makes. Raises the pipeline's :class:`StepError` where there is one meanwhile."""
        return in_side_thread(make, "autopipe connecting", self.watch.raise_if_failed)

    def _seen(self) -> Position:
        """Where this rank is. Whoever asks an event, in whatever thread, opens what is its current device."""
        with accelerator.using(self._device):
            return self.position.seen()

    def _check(self, waits_for: int) -> None:
        """Raise where there is no use in waiting on for a rank."""
        self.position.waits_for = waits_for
        self.watch.raise_if_failed()

    def _compare(
        self, card: dict[str, Any], limit_s: float, gone: Callable[[int], AutopipeError | None]
    ) -> list[dict[str, Any]]:
        cards = roll_call(self.board, self.rank, self.n_ranks, json.dumps(card), limit_s, gone)
        read = [json.loads(c) for c in cards]
        for key in (k for k in card if not k.startswith("own ")):
            odd = first_difference([json.dumps(c[key]) for c in read])
            if odd is not None:
                raise PlanError(
                    f"ranks disagree on {key}: rank 0 has {read[0][key]}, rank {odd} has {read[odd][key]}; "
                    "run the same code with the same plan on every rank"
                )
        return read

    def _gone(self, rank: int, number: int) -> AutopipeError | None:
        """Why a rank, the job's by its ``number``, does not come; None where nothing says that."""
        global _elsewhere
        if found := refusal(self.board, rank):
            return found
        _elsewhere = refusal(self.board.corner(_corner_of_begun()), number)
        text = "" if _elsewhere else ended(self.board, number)
        return _elsewhere or (StepError(text) if text else None)

    def new_group(self, purpose: str, ranks: tuple[int, ...]) -> Group:
        """A communicator of some of the pipeline's ranks; only they ask for it, once for each purpose."""
        name = f"{purpose}/{'-'.join(map(str, ranks))}"
        with self.together("connecting", waits=True):
            made = self._unless_failed(
                lambda: make_group(
                    self.store,
                    name,
                    ranks,
                    self.rank,
                    self._device,
                    self._connect_s,
                    self._links,
                    shares_device=bool(self.crowded),
                    check=self.watch.raise_if_failed,
                )
            )
        self._groups.append(made)
        self._breakable.append(made)
        return made

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Open what carries tensors between ``pairs`` of ranks, which would else open in the first step."""
        with self.together("connecting", waits=True):
            self._unless_failed(functools.partial(self._open, tuple(pairs)))

    def _open(self, pairs: Sequence[tuple[int, int]]) -> None:
        with accelerator.using(self._device):
            for group in self._groups:
                ranks = {*group.ranks}
                group.connect([pair for pair in pairs if {*pair} <= ranks], self._connect_s)

    def agree(
        self, step: int, words: str, marks: Mapping[str, int], checksum: int, told: int
    ) -> tuple[float, int]:
        """Check that the rank before this one begins the same step with the same batch.

        ``marks`` has a number for each thing that must be equal, ``words`` what people need to see of them,
        ``checksum`` is of the batch's values. Where all neighbours on the ring agree, all ranks do; a rank
        that differs from the one before raises :class:`StepError` and thereby ends all others. Returns the
        seconds this rank waited for the one before to begin, and what that one ``told``, beside all that
        must be equal.
        """
        began_s = time.perf_counter()
        mine = [step, checksum, *marks.values()]
        *theirs, is_told = self._of_before([*mine, told])
        if mine == theirs:
            return time.perf_counter() - began_s, is_told
        found = [name for name, own, others in zip(marks, mine[2:], theirs[2:], strict=True) if own != others]
        other = f" with other {', '.join(found) or 'values'}" if mine[1:] != theirs[1:] else ""
        is_step = abs(theirs[0] - step) <= MOST_AHEAD
        raise StepError(self._apart(f"begins step {step} {words}", theirs, is_step=is_step, other=other))

    def _apart(self, does: str, theirs: Sequence[int], *, is_step: bool, other: str = "") -> str:
        """What ends every rank where the one before this one does not do what this one ``does``."""
        if theirs[1] == REFUSED and (cause := self.watch.cause()) is not None:
            return cause
        number = FIRST_CALL - theirs[0]
        its = f"is at {CALLS[number]}" if 0 <= number < len(CALLS) else "is at another call"
        if is_step:
            its = f"begins step {theirs[0]}{other}"
        message = (
            f"rank {self.rank} {does}; rank {(self.rank - 1) % self.n_ranks} {its}; step, evaluate, save, "
            "merge and report on every rank alike (not under `if rank == 0`), with the same batches in the "
            "same order and mode (a data loader that shuffles needs one seed for all), or make the runtime "
            "with feed=0 and read them on rank 0 only"
        )
        return self.watch.publish(message)

    def meet(self, call: str, given: str, fault: str, n_marks: int) -> str:
        """Make one of the :data:`CALLS`, which every rank makes; why it is refused here or elsewhere, or "".

        ``fault`` is why it is here, ``given`` what ranks are to be given alike. ``n_marks``: of how many
        :meth:`agree` is told, so that a rank that begins a step meanwhile hears of the call.
        """
        mine = [FIRST_CALL - CALLS.index(call), zlib.crc32(given.encode()), *[0] * n_marks]
        own = REFUSES if fault else ACCEPTS
        *theirs, told = self._of_before([*mine, own])
        if theirs[0] != mine[0]:
            is_step = abs(theirs[0] - self.position.step) <= MOST_AHEAD
            raise StepError(self._apart(f"is at {call}", theirs, is_step=is_step))
        if theirs != mine and not (own | told) & REFUSES:
            own |= DIFFERS
        found = self.union(own | told, n_known=2)
        if found & ACCEPTS and found & REFUSES:
            faults = self.gather(fault)
            return next(f"{call} on rank {rank}: {text}" for rank, text in enumerate(faults) if text)
        if found & DIFFERS:
            return f"this rank calls {call} with {given}, and another with other values; give all the same"
        return fault

    def refuse(self, step: int, error: Exception, n_marks: int) -> NoReturn:
        """Raise ``error``, which keeps this rank from beginning a step: the pipeline goes on if it keeps all.

        ``n_marks``: of how many :meth:`agree` is told.
        Where another rank begins the step all end with :class:`StepError`. What keeps each need not be the
        same, nor told in the same words, which may show an object by its address.
        """
        try:
            mine = [step, REFUSED, *[0] * (n_marks + 1)]
            if mine == self._of_before(mine):
                raise error
        except (RuntimeError, ConnectionError, StepError) as lost:
            if lost is not error:
                self.fail(lost)
            raise
        self.fail(error)

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank; every rank calls it, and none returns before all have."""
        return bool(self.union(int(mine)))

    def union(self, mine: int, n_known: int = 1) -> int:
        """The bits that any rank has; every rank calls it, and none returns before all have.

        ``mine`` are already of the ``n_known`` ranks that end with this one.
        """
        found, distance = mine, n_known
        while distance < self.n_ranks:  # what each knows doubles
            found |= self._of_before([found], distance)[0]
            distance *= 2
        return found

    def _of_before(self, mine: Sequence[int], distance: int = 1) -> list[int]:
        """What the rank so far before this one shows while this one shows ``mine`` to the one after."""
        self.watch.raise_if_failed()
        before, after = (self.rank - distance) % self.n_ranks, (self.rank + distance) % self.n_ranks
        self.position.waits_for = before
        shown = torch.frombuffer(array.array("q", mine), dtype=torch.int64)
        theirs = torch.empty_like(shown)
        arriving, leaving = self.control.recv(theirs, before), self.control.send(shown, after)
        arriving.wait(FOREVER)
        leaving.wait(FOREVER)
        self.position.waits_for = -1
        return theirs.tolist()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` of pipeline rank ``source``, on every rank."""
        self.position.waits_for = source if source != self.rank else -1
        is_aside = tensor.is_cpu and self._device.type != "cpu"
        (self.control if is_aside else self.group).broadcast(tensor, source)
        self.position.waits_for = -1
        return tensor

    @contextlib.contextmanager
    def together(self, words: str, *, waits: bool) -> Iterator[None]:
        """Within it all ranks do what ``words`` says between steps, as who waits for them is told.

        ``waits`` says that it does nothing but wait for the others.
        """
        position = self.position
        before = dataclasses.replace(position)
        position.words, position.index = words, -3
        if waits:
            position.is_idle, position.waits_for = False, (self.rank + 1) % self.n_ranks
        try:
            yield
        except STOPS as error:
            if isinstance(error, AutopipeError) and not isinstance(error, RuntimeError):
                raise  # on every rank
            self.fail(error)
        finally:
            position.words, position.index, position.is_idle = before.words, before.index, before.is_idle
            position.waits_for = -1

    @contextlib.contextmanager
    def outside(self, words: str) -> Iterator[None]:
        """Within it this rank waits for those of other pipelines, as ``words`` says, but not for ever."""
        position = self.position
        before = dataclasses.replace(position)
        position.words, position.index, position.waits_for, position.is_idle = words, OUTSIDE, -1, False
        try:
            yield
        except STOPS as error:
            if isinstance(error, AutopipeError) and not isinstance(error, RuntimeError):
                raise  # on every rank
            self.fail(error)
        finally:
            position.words, position.index = before.words, before.index
            position.waits_for, position.is_idle = before.waits_for, before.is_idle

    def stand_beside(self, replicas: Sequence[tuple[int, ...]], groups: Iterable[Any]) -> None:
        """Tell, and be told by, other replicas, the job's ranks of each, of failures.

        ``groups`` of torch's own, of ranks of several of them, are broken when this pipeline fails.
        """
        self._replicas = replicas
        self._others += groups

    def fail(self, error: BaseException) -> NoReturn:
        """Raise ``error``, or the one cause all ranks report: this one's, or whatever came first."""
        watch, position = self.watch, self.position
        if self._replicas and loss_in(error) is not None:
            cause = self._lost_replica()
        elif isinstance(error, AutopipeError):
            cause = watch.publish(str(error))
            if cause == str(error):
                raise error
        elif not isinstance(error, Exception):
            watch.publish(f"rank {self.rank} was stopped by {type(error).__name__} in {position.words}")
            raise error
        elif (lost := self._lost_by(error)) >= 0:
            watch.note_lost(lost)
            found = watch.cause()
            cause = found if found is not None else watch.publish(watch.lost(lost))
            raise StepError(cause) from None  # a broken link says no more than the cause
        elif self._replicas and tells_of_a_loss(error):
            cause = self._lost_replica()
        else:
            where = f"rank {self.rank}, {position.words}"
            cause = watch.publish(f"{where}: {type(error).__name__}: {error}")
        raise StepError(cause) from error

    def _lost_replica(self) -> str:
        """The cause that stands where this rank lost one of another replica."""
        found = self.watch.cause(0.0)  # a rank of this pipeline's, whose failure has broken more than its own
        made = end_of_a_replica(self.board, self._replicas, self._n_made) if not found else ""
        return found or self.watch.publish(made)

    def _lost_by(self, error: BaseException) -> int:
        """The rank that an error says is gone, or -1: the one that is waited for, else one sent to."""
        if not tells_of_a_loss(error):
            return -1
        if self.position.waits_for >= 0 or not isinstance(error, ConnectionError):
            return self.position.waits_for
        return next((rank for rank, link in self._links.items() if link.is_broken), -1)

    def close(self) -> None:
        """Stop watching and drop the links; nothing may be sent after. A forked child has none of its own."""
        if os.getpid() != self._process:
            return
        self.watch.close()
        for group in self._breakable:
            with contextlib.suppress(RuntimeError):  # on a device that failed nothing can be ended in order
                group.abort() if self.watch.failure else group.close()
        for link in self._links.values():
            link.close()
        self.board.close()
        self.store = None

    def _abort(self) -> None:
        for link in self._links.values():
            link.abort()
        for group in self._breakable:
            with contextlib.suppress(RuntimeError):  # of a device that failed it may not be broken any more
                group.abort()
        for other in self._others:
            break_group(other, self._device)
