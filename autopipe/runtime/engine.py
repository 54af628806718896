"""One call of a pipeline, from a batch to its loss: split, weigh, agree, run, sum, share.

Each of those has a module of its own; what users see of it is left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import accelerator
from ..errors import InputError, StepError
from ..stages import rng
from ..stages.gradients import making
from .assembly import Assembly
from .data.inputs import backpropagate
from .data.intake import Taken
from .execute.executor import Clock
from .given import StepLoss, StepResult
from .options import Request, is_due
from .reduce.partial import refuse_line_search
from .reduce.precision import spread_overflow
from .stage.hooks import once_a_step
from .stage.setup import Generators
from .stage.worker import StepInputs

__all__ = ["Engine"]

LOOKED_AT = 2
"""Steps in which replicas' batches are held against each other."""


class Engine(Assembly):
    """The stages of this process at work: one call at a time, from its batch to its loss."""

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

    def _hookable(self) -> Iterator[nn.Parameter]:
        """Parameters whose hooks are the user's, and whose gradients this rank has whole.

        What wraps a stage may have some of its own, and of tied ones a rank has a part until ranks sum them.
        """
        if self._was_wrapped:
            return
        own = {id(p): p for stage in self.stages for p in stage.parameters()}
        yield from (p for i, p in own.items() if i not in self._tied)

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
