"""One call of a pipeline, from a batch to its loss: split, weigh, agree, run, sum, share.

Each of those has a module of its own, and what they work on is made in ``engine``; what users see of it is
left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import accelerator
from ..arguments import brief, number
from ..errors import AutopipeError, InputError, StepError
from ..stages import rng
from ..stages.gradients import making
from ..torch_private import UnseenByFunctions, uncompiled
from .data.input_gradients import backpropagate
from .data.intake import BATCHES, WeightedBatch, drawn
from .data.microbatch import Batch
from .engine import Engine
from .execute.executor import Clock, Line
from .execute.step_agreement import Traits
from .options import Request, is_due
from .reduce.hooks import once_a_step
from .reduce.option_changes import Told, are_unlike, unlike
from .reduce.precision import spread_overflow
from .reduce.refusals import refuse_line_search
from .reduce.unstepped import Unstepped
from .stage.last import OF_BATCH
from .stage.setup import Generators
from .stage.worker import StepInputs
from .step_result import StepLoss, StepResult

__all__ = ["Runner"]

_logger = logging.getLogger("autopipe")

MOST_TIMES = 1e30
LOOKED_AT = 2
"""Steps in which replicas' batches are held against each other."""


class Runner:
    """Sets an engine to work: one call at a time, from its batch to its loss.

    Attributes
    ----------
    syncs: whether a step ends with gradients summed over ranks. factor: what gradients are multiplied by.
    share: what they are multiplied by beside replicas' own, where that is not each step's to say.
    is_summed: whether the last step did so. n_summed: how many have begun that do.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.syncs, self.factor, self.is_summed = True, 1.0, True
        self.n_summed = 0
        self.share: Tensor | None = None
        self._has_added = self._is_accumulating = self._is_asked_by_all = False
        self._hooked: Sequence[nn.Parameter] = ()
        self._hooked_ties: Sequence[nn.Parameter] = ()
        self._traits = 0
        self._waited_s = 0.0
        self._weighed: tuple[Any, Tensor] = None, torch.empty(0, device="cpu")
        self._agreed: AutopipeError | None = None
        self._nonfinite: StepError | None = None
        self._unstepped, self._was_loaded = Unstepped(), False
        self._n_options_compared, self._has_unlike_options = 0, False

    # -- calls --------------------------------------------------------------------------------------

    @uncompiled
    def run(self, request: Request) -> StepResult:
        """One batch through the pipeline: forward, and backward where gradients are asked for."""
        engine = self.engine
        with engine.turn:
            engine.check_between("a step")
            with engine.doing("a step"), accelerator.using(engine.device):
                return self._run(request)

    def accumulate(self, batches: Iterable[Any], n_microbatches: int | None) -> StepResult:
        """See :meth:`Runtime.accumulate`."""
        with self.engine.turn:
            self._is_accumulating = True
            try:
                return self._accumulate(batches, n_microbatches)
            finally:
                self.share, self._is_accumulating = None, False

    def _accumulate(self, batches: Iterable[Any], n_microbatches: int | None) -> StepResult:
        try:
            if not isinstance(batches, Iterable):
                raise InputError(f"batches is {brief(batches)}; {BATCHES}")
            self._check_as_trained()
            calls, shares, total = self.engine.intake.shares(drawn(batches), n_microbatches)
        except Exception as error:  # batches and loss_weight are any Python
            self._refuse(error)
        if total is not None and self.engine.weighs_replicas():
            self.share = self._share(total)
        # a batch without labels that count has no loss
        counted = [(call, share) for call, share in zip(calls, shares, strict=True) if share]
        self._check_as_many(len(counted))
        parts: list[Tensor] = []
        for i, ((args, kwargs), share) in enumerate(counted):
            own = {name: value for name, value in kwargs.items() if name != "target"}
            target = kwargs.get("target")
            request = Request(args=args, kwargs=own, target=target, n_microbatches=n_microbatches, grad=True)
            with self.changed(syncs=i + 1 == len(counted), times=share):
                found = self.run(request).loss.as_subclass(Tensor)
            parts.append(share * found.double())
        self.engine.progress.n_steps += 1
        is_scaled = self.engine.options.scaler is not None
        loss = torch.stack(parts).sum().to(found.dtype)
        return StepResult(StepLoss.of(loss, is_scaled=is_scaled))

    def _check_as_many(self, n_batches: int) -> None:
        """Raise :class:`InputError` on all replicas that gather weights together and not as often."""
        engine = self.engine
        if engine.replica_dims.n == 1:
            return
        with engine.together("hearing whether replicas hold stages in shards", waits=True):
            if not engine.any_sharded():
                return
        with engine.outside("hearing how many batches other replicas accumulate"):
            is_odd = engine.replica_dims.are_unlike(n_batches, engine.device)
        if is_odd:
            raise InputError(
                f"this replica accumulates {n_batches} batches with labels that count, and another replica a "
                "different number: replicas gather the weights of sharded stages together in each; give all "
                "of them as many"
            )

    def check_summed(self, words: str) -> None:
        """Raise :class:`InputError` where ranks have yet to sum gradients, which ``words`` needs whole."""
        engine = self.engine
        is_summed = self.is_summed and (engine.ties is None or engine.ties.is_whole)  # by another runtime too
        if not is_summed and engine.peers is not None and (engine.tied or engine.replica_dims.n > 1):
            what = "tied parameters" if engine.tied else "replicas"
            raise InputError(
                f"{words} comes after a step within no_sync(), and the gradients of {what} are not summed "
                "yet; make the last step before it outside no_sync(), or call accumulate()"
            )

    def scaled(self, factor: float) -> contextlib.AbstractContextManager[None]:
        """See :meth:`Runtime.scaled`."""
        with self.engine.turn:
            try:
                times = number("factor", factor, -MOST_TIMES, MOST_TIMES)
            except InputError as error:
                if self.engine.under_way:
                    raise
                self._refuse(error)
        return self.changed(times=times)

    @contextlib.contextmanager
    def changed(self, *, syncs: bool = True, times: float = 1.0) -> Iterator[None]:
        """Within it gradients are multiplied by so much more, and not summed over ranks unless ``syncs``."""
        with self.engine.turn:
            outer = self.syncs, self.factor
            self.syncs, self.factor = self.syncs and syncs, self.factor * times
            try:
                yield
            finally:
                self.syncs, self.factor = outer

    def _run(self, request: Request) -> StepResult:
        engine, start_s = self.engine, time.perf_counter()
        try:
            adds = request.grad and self._adds()
            step, inputs = self._take(request)
            line = engine.line(step.batch.n_microbatches, request.grad)
            self._choose(step)
            generators = None if step.seed is None else Generators(engine.device, step.seed)
        except BaseException as error:
            self._refuse(error)
        try:
            self._begin(step)
            if step.grad and engine.loss.gathers:
                line = engine.line(step.batch.n_microbatches, True, loss_waits=True)
            result, clock = self._work(step, inputs, line)
        except BaseException as error:
            self._fail(error)
        finally:
            if generators is not None:
                generators.restore()
            step.outside.restore()
            self._end()
        engine.patience.is_warm = True
        self._leave(step.batch)
        engine.written.after_call()
        if not step.grad:
            engine.progress.n_forwards += 1
            return result
        is_scaled = engine.options.scaler is not None
        result = StepResult(StepLoss.of(result.loss, adds=adds, is_scaled=is_scaled), result.outputs)
        engine.progress.n_backwards += 1
        engine.progress.n_steps += not self._is_accumulating
        engine.n_own_steps += 1
        self.is_summed = self.syncs
        self._unstepped.note(p for stage in engine.stages for p in stage.parameters())
        step_s = time.perf_counter() - start_s - self._waited_s
        engine.records.append((clock.origin_s, step_s, clock))
        if engine.publisher is not None:
            engine.publisher.after_step(result.loss)
        return result

    def _choose(self, step: StepInputs) -> None:
        """How the loss of a step is made."""
        engine, batch = self.engine, step.batch
        has_replicas = engine.options.has_replicas
        rows: int | None = sum(batch.rows)
        n = batch.n_microbatches
        if has_replicas:  # their batches may be of unlike sizes: one schedule where that can be
            rows, n = None, engine.options.n_microbatches
        engine.loss.choice.choose(
            batch,
            grad=step.grad,
            n_done=self.n_summed if has_replicas else engine.n_own_steps,
            has_room=lambda: engine.has_room(n, rows),
            is_one=engine.is_whole or not step.want_loss,  # an end that takes the batch gives one loss
        )

    def _leave(self, batch: Batch) -> None:
        """Set the numbers in attributes that a call with all of a batch leaves there: a step is one call."""
        capture = self.engine.kinds[batch.kind].capture
        own = capture.own[capture.model.training]
        capture.leave(next(iter((*batch.of_all, *batch.forms)), own[0]), batch.whole)

    def _refuse_strangers(self) -> None:
        """Raise :class:`InputError` for parameters that came after the split: no other rank has them."""
        capture = self.engine.capture
        new = [n for n, _ in capture.model.named_parameters() if n not in capture.ops.parameter]
        if new and not self.engine.was_wrapped:
            raise InputError(
                f"{capture.ops.model} has {', '.join(new[:3])} only since it was captured, and no other rank "
                "would get that; change the model first (parametrizations, pruning, adapters), then capture "
                "again with autopipe.split"
            )

    def _take(self, request: Request) -> tuple[StepInputs, Mapping[str, Tensor]]:
        """What a call brings, in microbatches, and those of its tensors that require a gradient.

        Raises :class:`InputError` for what no step can begin with.
        """
        engine = self.engine
        request.check()
        if request.grad and engine.peers is not None and is_due(engine.n_own_steps):
            refuse_line_search()
            self._refuse_strangers()
        engine.unfilled.check()
        if request.grad and not self._is_accumulating:
            self._check_as_trained()
        taken = engine.intake.take(request)
        self._was_loaded = engine.was_loaded
        if request.grad and not engine.was_wrapped and (engine.was_loaded or is_due(engine.n_own_steps)):
            engine.follow_parameters()
        batch = taken.batch
        if request.outputs and not engine.is_whole:
            engine.kinds[batch.kind].outputs.check(batch)
        return self._inputs(taken, request), taken.inputs

    def _work(self, step: StepInputs, inputs: Mapping[str, Tensor], line: Line) -> tuple[StepResult, Clock]:
        engine, clock = self.engine, Clock(self.engine.device)
        with making():
            with once_a_step(self._hooked_ties, engine.place_of_hook):
                with once_a_step(self._hooked, engine.place_of_hook):
                    engine.executor.run(line, clock)
                    engine.copies.check()
                self._hear_of_hooks(Traits.HOOKS)
                if step.grad:
                    self._sum()
                    self._agree_on_loss()
            self._hear_of_hooks(Traits.HOOKED_TIES)
            if step.grad and self.syncs and engine.options.scaler is not None:
                self._share_overflow()
        if inputs:
            group = None if engine.peers is None else engine.peers.group
            leaves = [worker.leaves for worker in engine.workers.values()]
            backpropagate(inputs, leaves, step.batch, engine.device, group.all_reduce if group else None)
        result, loss = engine.results.of(step, engine.end_worker)
        self._look(step, loss)
        engine.kinds[step.batch.kind].mixed.settle()
        clock.stop()
        engine.follow("the sums and the loss of all ranks")
        return result, clock

    def _agree_on_loss(self) -> None:
        """Have the loss take the whole batch on all replicas, where it was found to on any."""
        engine = self.engine
        if engine.is_whole or not (engine.options.has_replicas and self.syncs):
            return
        may_find = self._is_asked_by_all or engine.loss.choice.may_find(self.n_summed - 1)
        if engine.end_worker is not None and may_find:
            with engine.outside("hearing whether the loss of other replicas takes the whole batch"):
                if engine.replica_dims.any(engine.loss.choice.has_found, engine.device):
                    engine.loss.choice.is_on_batch = True

    def _hear_of_hooks(self, trait: int) -> None:
        """Have who is done first hear of a hook that failed elsewhere, where any rank has such."""
        peers = self.engine.peers
        if self._traits & trait and peers is not None:
            peers.position.words = "the hooks on gradients of every rank"
            peers.any(False)

    def _adds(self) -> bool:
        """Whether a step now would, unscaled, add to gradients; looked at now and then, true once."""
        engine = self.engine
        if self._has_added or self.factor != 1.0 or self.share is not None or not is_due(engine.n_own_steps):
            return False
        trained = [p for stage in engine.stages for p in stage.parameters() if p.requires_grad]
        grad = trained[-1].grad if trained else None
        # zeros that an optimizer left are not added to; on an accelerator looking would wait for it
        self._has_added = grad is not None and (grad.device.type != "cpu" or bool(grad.any()))
        return self._has_added

    def _share(self, counted: float) -> Tensor:
        """What this replica's batch weighs beside the others'."""
        with self.engine.outside("weighing its batch beside the other replicas'"):
            return self.engine.replica_dims.share(counted, self.engine.device)

    def _inputs(self, taken: WeightedBatch, request: Request) -> StepInputs:
        engine, grad, counted = self.engine, request.grad, taken.counted
        scaler = engine.options.scaler if grad else None
        # every rank's scaler must know its scale before it can unscale
        scale = None if scaler is None else scaler.scale(torch.ones((), device=engine.device))
        told = 1.0 if scale is None or engine.device.type != "cpu" else float(scale)
        if grad and counted is not None and engine.weighs_replicas():
            share = self.share if self.share is not None else self._share(counted)
            scale = share if scale is None else scale * share
        factor = self.factor

        def seeds(weights: Sequence[float | Tensor], loss: Tensor) -> Sequence[Tensor]:
            found = self._weights_of_losses(weights, factor, loss)
            found = found.clone() if scale is None else found * scale.to(found)
            # of a DTensor's kind for one
            each = found.unbind()
            return each if type(loss) is Tensor else [torch.ones_like(loss) * seed for seed in each]

        progress = engine.progress
        count = progress.n_backwards if grad or request.like_step else -1 - progress.n_forwards
        replica = engine.replica_dims.index
        own_seed = rng.mix(engine.seed, replica) if replica else engine.seed
        return StepInputs(
            taken.batch,
            taken.weights,
            seeds,
            rng.mix(own_seed, count) if engine.is_random else None,
            grad,
            want_loss=request.loss,
            outputs_on=request.outputs_on,
            syncs=self.syncs,
            tracked=frozenset(taken.inputs),
            scale=told,
        )

    def _weights_of_losses(self, weights: Sequence[float | Tensor], factor: float, loss: Tensor) -> Tensor:
        """What microbatches weigh, times a factor, in the kind of their losses; of numbers it is kept."""
        there = [w for w in weights if isinstance(w, Tensor)]
        key = None if there else (weights, factor, loss.dtype, loss.device)
        if key is None or key != self._weighed[0]:
            told = torch.stack(there) if there else torch.tensor(weights, dtype=torch.float64, device="cpu")
            self._weighed = key, accelerator.upload((told * factor).to(loss.dtype), loss.device)
        return self._weighed[1]

    def _begin(self, step: StepInputs) -> None:
        engine = self.engine
        for edge in engine.edges:
            edge.begin(step.batch.n_microbatches)
        for worker in engine.workers.values():
            worker.begin(step)
        engine.copies.begin()
        if engine.end_worker is not None:
            engine.loss.begin(engine.end_worker.step)
        if step.grad and self.syncs:
            self._compare_replicas(step)
        has_hooks, self._hooked, self._hooked_ties = engine.hooked() if step.grad else (False, (), ())
        looks, self._traits = False, self._own_traits(has_hooks) if step.grad else 0
        if engine.written.any:
            self._traits |= Traits.WRITTEN
        if engine.loss.choice.is_on_batch:
            self._traits |= Traits.ON_BATCH
        if self._has_to_ask(step):
            self._traits |= Traits.ASKS
        if engine.step_agreement is not None:
            self._waited_s, looks, self._traits = engine.step_agreement.begin(
                step, self.factor, engine.n_loads, self._traits
            )
        if self._traits & Traits.ON_BATCH:
            engine.loss.choice.follow()
        if self._traits & Traits.ASKS:
            engine.loss.choice.ask()
        if self._traits & Traits.STEPPED:
            self._unstepped.tell(engine.rank, engine.progress.n_steps)
        if self._traits & Traits.KEPT and self._traits & Traits.FREED:
            self._unstepped.tell_of_kept(engine.rank, engine.progress.n_steps)
        if are_unlike(self._traits):
            self._compare_options()
        self._check_written(looks=looks)
        if step.grad and engine.step_agreement is not None:
            engine.part_with_weights()
        if step.grad and not self._traits & Traits.HOLDS:
            self._nonfinite = None
        if self._traits & Traits.HOOKED_TIES:
            self._compare_hooks()
        if step.grad and engine.ties is not None:
            engine.ties.before_step(has_hooks=bool(self._traits & Traits.HOOKED_TIES))
            if looks:
                engine.ties.compare()

    def _has_to_ask(self, step: StepInputs) -> bool:
        """Whether a step is to ask ``loss_fn``, as the rank of any replica knows that has the loss."""
        engine, choice = self.engine, self.engine.loss.choice
        self._is_asked_by_all = False
        if engine.end_worker is None or not engine.options.has_replicas:
            return engine.loss.has_to_ask
        if step.grad and self.syncs and choice.may_be_told(self.n_summed - 1):
            with engine.outside("hearing whether another replica is to ask its loss_fn"):
                self._is_asked_by_all = engine.replica_dims.any(engine.loss.has_to_ask, engine.device)
        return self._is_asked_by_all

    def _check_written(self, *, looks: bool) -> None:
        """Raise :class:`InputError` for what some ranks alone wrote to: all do, and may go on."""
        engine = self.engine
        looks &= engine.written.has_shared and engine.device.type == "cpu"  # looking at a device would wait
        if looks or self._traits & Traits.WRITTEN:
            try:
                engine.written.check()
            except InputError as error:
                if self._is_alone:
                    self._agreed = error
                raise

    def _compare_options(self) -> None:
        """Warn once of options of optimizers that one rank alone has changed."""
        engine = self.engine
        looks = self._n_options_compared < LOOKED_AT or is_due(engine.n_own_steps)
        if self._has_unlike_options or not looks:
            return
        assert engine.peers is not None
        self._n_options_compared += 1
        found = unlike(engine.peers.gather(engine.option_changes.told(), list[Told]))
        if found is None:
            return
        self._has_unlike_options = True
        if engine.rank in found[0]:
            shown = " and ".join(f"{has} on rank {rank}" for rank, has in found[0].items())
            _logger.warning(
                "optimizers step by %s, %s: layers of one model are trained otherwise there; where that is "
                "not meant, change options on every rank alike (not under `if rank == 0`)",
                shown,
                found[1],
            )

    def _compare_hooks(self) -> None:
        """Raise :class:`InputError` where ranks have unlike hooks on a tied weight: all do, and may go on."""
        engine = self.engine
        assert engine.peers is not None
        assert engine.ties is not None
        by_rank = engine.peers.gather(engine.ties.n_hooks(), dict[str, int])
        for name in sorted({name for told in by_rank for name in told}):
            counts = {rank: told[name] for rank, told in enumerate(by_rank) if name in told}
            if len({*counts.values()}) > 1:
                shown = ", ".join(f"{n} on rank {rank}" for rank, n in counts.items())
                error = InputError(
                    f"tied parameter {name} has unlike hooks on its gradient on the ranks that hold it "
                    f"({shown}); register the same on each"
                )
                if self._is_alone:
                    self._agreed = error
                raise error

    @property
    def _is_alone(self) -> bool:
        """Whether no replicas of the pipeline go by what it does."""
        return not self.engine.options.has_replicas

    def _own_traits(self, has_hooks: bool) -> int:
        engine = self.engine
        traits = Traits.HOOKS if has_hooks else 0
        if self._hooked_ties:
            traits |= Traits.HOOKED_TIES
        if engine.averages:
            traits |= Traits.AVERAGES
        if self._nonfinite is not None and self._may_hold():
            traits |= Traits.HOLDS
        if self._unstepped.was_changed and not self._was_loaded:
            traits |= Traits.STEPPED
        kept, freed = self._unstepped.gradients
        traits |= Traits.KEPT * kept | Traits.FREED * freed
        return traits | engine.option_changes.bits

    def _may_hold(self) -> bool:
        """Whether there may be gradients of earlier steps: what shards have yet to sum is not theirs to show.

        Nor is what they have summed looked at: replicas would have to join.
        """
        if any(worker.replicas.is_sharded for worker in self.engine.workers.values()):
            return True
        gradients = (p.grad for stage in self.engine.stages for p in stage.parameters())
        return any(g is not None and bool(g.any()) for g in gradients)

    def _compare_replicas(self, step: StepInputs) -> None:
        """Look at what replicas have in common, now and then.

        In steps that sum gradients alone: each replica makes as many of those, whatever else it does.
        """
        engine, n_before = self.engine, self.n_summed
        self.n_summed += 1
        if not engine.was_wrapped and engine.rank == 0:
            engine.replica_dims.notice_unwrapped()
        replicated = [worker for worker in engine.workers.values() if worker.is_replicated]
        if not replicated or not is_due(n_before):
            return
        if n_before < LOOKED_AT and engine.options.feed is None:
            with engine.outside("comparing its batch with the other replicas'"):
                engine.replica_dims.notice_equal(step.batch.checksum(), engine.device)
        with engine.outside("comparing its weights with the other replicas'"):
            for worker in replicated:
                worker.replicas.compare(worker.stage.index)

    def _check_as_trained(self) -> None:
        """Raise :class:`StepError` on all replicas where some froze other parameters."""
        engine = self.engine
        # on an accelerator hearing it would wait
        looks = engine.device.type == "cpu" or is_due(self.n_summed)
        if not (looks and self.syncs and engine.was_wrapped and engine.replica_dims.n > 1):
            return
        with UnseenByFunctions():  # other ranks' weights would each answer at length
            trained = bytes([p.requires_grad for p in engine.capture.model.parameters()])
        with engine.outside("hearing whether replicas train the same parameters"):
            is_odd = engine.replica_dims.are_unlike(zlib.crc32(trained), engine.device)
        if is_odd:
            raise StepError(
                f"this replica trains {sum(trained)} parameters of {engine.capture.ops.model}, and another "
                "one others, whose gradients are to be averaged: freeze and thaw the same on every rank"
            )

    def _sum(self) -> None:
        """Sum gradients over ranks in steps that do, and in every one those that hooks are called with."""
        engine = self.engine
        for worker in engine.workers.values() if self.syncs else ():
            worker.reduce()
        if engine.peers is not None and (self.syncs or self._traits & Traits.HOOKED_TIES):
            assert engine.ties is not None
            engine.peers.position.words = "the sum of tied gradients"
            engine.ties.after_step()

    def _share_overflow(self) -> None:
        engine = self.engine
        if engine.peers is not None:
            engine.placeholder.grad = torch.zeros_like(engine.placeholder)
            parameters = [p for stage in engine.stages for p in stage.parameters()]
            spread_overflow([*parameters, engine.placeholder], engine.peers.group, engine.device)

    def _end(self) -> None:
        engine = self.engine
        for worker in engine.workers.values():
            worker.end()
        engine.loss.end()
        for edge in engine.edges:
            edge.begin(0)
        if engine.peers is not None:
            position = engine.peers.position
            position.index, position.waits_for, position.is_idle = -2, -1, True
            position.words = f"the user's own code after step {position.step}"

    # -- failures -----------------------------------------------------------------------------------

    def _look(self, step: StepInputs, loss: Tensor | None) -> None:
        """Raise :class:`StepError` where a loss is not finite, unless looking would wait or is not wanted.

        Of replicas whose gradients are averaged every one does, in the step that sums them: it has what the
        others' losses made of them, unless they were zeroed since.
        """
        engine = self.engine
        options = engine.options
        if not options.check_finite or options.scaler is not None or engine.device.type != "cpu":
            return
        found = self._nonfinite if step.grad else None
        averages = self._traits & Traits.AVERAGES  # now: to explain one is to begin anew
        if found is None and loss is not None and not math.isfinite(loss):
            found = self._explain_nonfinite(step, loss.item())
        if averages:
            self._nonfinite = None if self.syncs else found
            if not self.syncs:
                return
            with engine.outside("hearing whether the losses of other replicas are finite"):
                is_any = engine.replica_dims.any(found is not None, engine.device)
            if is_any and found is None:
                found = StepError(
                    "the loss of another replica is not finite, as its log says where, and gradients are "
                    "averages with its; check_finite=False lets such steps pass"
                )
        if found is not None:
            self._agreed = found
            raise found

    def _explain_nonfinite(self, step: StepInputs, loss: float) -> StepError:
        """Run the batch forward once more, looking at every value, and say where the first bad one is.

        The same on every rank. Stages in shards are not run again: their replicas would have to join.
        """
        engine, lets = self.engine, "check_finite=False lets such steps pass"
        if engine.any_sharded():
            return StepError(f"the loss is {loss}; {lets}")
        probe = dataclasses.replace(step, grad=False, outputs_on="")
        found: list[tuple[int, int, str]] = []
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for worker in engine.workers.values():
                stack.enter_context(worker.probing(found))
            self._begin(probe)
            engine.executor.run(engine.line(step.batch.n_microbatches, False), Clock(engine.device))
        everyone = [found] if engine.peers is None else engine.peers.gather(found, list[tuple[int, int, str]])
        first = min((f for part in everyone for f in part), default=None)
        where = "no stage gave a value that is not finite, so only the backward's sum of losses did"
        if first is not None:
            m, stage, what = first
            stage = min(stage, len(engine.all_stages) - 1)
            at = "" if what == OF_BATCH else f", microbatch {m}, action {stage}F{m}"
            where = (
                f"the first value that is not finite is {what}, in rank {engine.all_stages[stage].rank}, "
                f"stage {stage}{at}"
            )
            if what == "the loss" and step.batch.n_microbatches > 1:
                rows = step.batch.rows
                where += (
                    f", of {rows[m]} of the batch's {sum(rows)} rows; a loss that compares rows, as by their "
                    "variance, takes loss_on='batch'"
                )
        return StepError(f"the loss is {loss}: {where}; {lets}")

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise ``error``, or with peers the one cause that all of them report."""
        for worker in self.engine.workers.values():
            worker.replicas.after_backward()  # no other runtime of the model is to meet its hooks
        if error is self._agreed:
            raise error
        self.engine.fail(error)

    def _refuse(self, error: BaseException) -> NoReturn:
        """Raise ``error``, which keeps a step from beginning: what keeps every rank from it ends no rank.

        Beside other replicas it does: they begin the step.
        """
        engine = self.engine
        if (
            engine.step_agreement is None
            or engine.peers is None
            or not self._is_alone
            or not isinstance(error, Exception)
            or isinstance(error, StepError)
            or engine.peers.position.waits_for >= 0
        ):
            self._fail(error)
        try:
            engine.step_agreement.refuse(error)
        finally:
            self._end()
