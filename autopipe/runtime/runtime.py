"""The runtime as users see it: steps, evaluation, accumulation, parameters, clipping.

Running a batch is left to ``runner``, what users do between steps to ``between_steps``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ..arguments import called, flag, number, place, taking
from ..costs import CostTable
from ..errors import InputError
from ..plans import Plan
from ..stages import Stage
from .between_steps import BetweenSteps
from .engine import Engine
from .options import Options, Progress, Request, Where
from .rebalance import Cutter
from .reduce.precision import clip_grad_norm
from .runner import Runner
from .save_load import Checkpoints
from .step_result import ELSEWHERE, StepResult

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["Runtime", "StepResult"]


class Runtime(BetweenSteps):
    """Runs a pipeline: this rank's stages when a process group is up, else all stages in this process.

    Every rank makes it, and calls its methods, alike. ``None`` means what the plan says. In one process,
    threads that share it take turns; over several ranks only one thread may call it, and a second one at the
    same time gets :class:`InputError`, which ends the step on every rank.

    Parameters
    ----------
    capture, plan, stages: from ``tracing``, ``solve`` and ``stages.build``.
    loss_fn: ``loss_fn(output, target)``, a scalar. Without it the model's output holds its loss: as ``loss``,
        first, or as the only scalar, where only that depends on some input (its labels) or compares all other
        outputs with one. Where ``loss_fn`` is a module with parameters that train, every rank gets their
        gradients, and its optimizers may have them. It is called for each microbatch where their weighted
        losses make the batch's, else once for the batch, as ``loss_on`` says: compute metrics from a step's
        outputs, not in here.
    n_microbatches, schedule: another count or schedule than the plan's; the placement must fit.
    device: by default the accelerator of ``LOCAL_RANK`` where the process group carries such tensors, which
        becomes the current one; else the model's. Only this rank's stages move there.
    mesh: a DeviceMesh with a ``pp`` dim; its other dims are the user's, for :meth:`wrap`.
    autocast: a dtype that each stage's forward runs in, or a function that makes a context for it.
    scaler: the user's ``GradScaler``: scales the loss; an overflow on any rank shows on all, and of several
        optimizers each skips its step.
    loss_reduction: ``"mean"`` or ``"sum"``. By default what a torch loss says of itself, or a sum where
        capture found the model's own loss to be one over rows; else a mean: over counted labels for losses
        inside the model, for ``CrossEntropyLoss`` and ``NLLLoss``, and over rows for others.
    loss_weight: ``loss_weight(args, kwargs, target)`` gives a microbatch's weight instead.
    loss_on: what ``loss_fn`` is called with. ``"batch"``: the output and target of the whole batch, once,
        when every microbatch's forward has run, as a loss needs that compares rows (contrastive, halves of a
        batch as pairs, means over masks), draws, or keeps or counts something from call to call. Gradients
        are those of the batch; the activations of all microbatches are kept until then, and the schedule is
        one that waits (GPipe or looped BFS). Replicas have a batch each, as in data parallelism.
        ``"microbatches"``: those of each. By default as it was planned for; else it is asked, at steps 0, 1,
        2, 4, 8 and so on, where a batch is cut otherwise than before, where labels on the host that it may
        leave out are first spread unevenly, and where what its code goes by was set otherwise (an epoch, a
        weight, a flag), whether it gives the same either way, on the batch and on targets in other places.
        Such a step waits too, so that it is right, and what ``loss_fn`` keeps is put back; where the answer
        is no, this and all further steps are of the whole batch, which a warning says once. Two microbatches
        alone are asked about of torch's own losses, and where the plan's memory has no room for all: there a
        loss that needs the batch is refused. ``loss_weight`` says that it is called with each.
    release: free the weights of stages that other ranks own; :meth:`gather_weights` brings them back.
    batch_dims: input name → batch axis, or None for an input every microbatch gets whole; ``target`` too. Of
        an argument that holds several tensors, as a state ``(h, c)``, its name speaks of all.
    stall_limit_s: how long a rank may make no progress in a call before all stop, and a tenth of how long it
        may stay in the user's own code while others wait for it; by default from the plan's times.
    check_finite: raise when the loss is not finite, naming the first stage that made it so; with replicas, on
        every one, in the step that sums their gradients. Not under a scaler, and not on an accelerator, where
        it would have to wait for the device: there every replica gets the gradients that are not finite.
    weights: for a model made on the meta device, of which each rank makes only its own stages: a checkpoint
        to read them from, or ``weights(module, path)``, which fills what a module holds. By default the
        model's own init (``_init_weights``, ``reset_parameters``), equal for equal seeds whatever the cut.
    feed: the pipeline rank that alone has the batch: the others call ``step()`` without inputs, and get
        what their stages use. By default every rank passes the same batch, and nothing is sent.
    costs, adopt: what each op was predicted to take, for :meth:`rebalance`; who is given its new plan.
    progress: how many steps the model has made, which this runtime and others of it count on: random streams,
        the saves of a row and :meth:`resume` go by it.
    mixed_rows: what to do with several microbatches where capture found that rows of a batch depend on one
        another (contrastive losses, in-batch negatives). ``"tail"``: where only the end of the model mixes
        them, that end runs once on the whole batch, loss included, when every microbatch has come that far.
        Gradients are those of the batch; the activations of all microbatches are kept until then, and the
        schedule is one that waits (GPipe or looped BFS). A model that mixes rows earlier is refused.
        ``"refuse"`` refuses both; ``"allow"`` makes each microbatch a batch of its own.

    Raises :class:`InputError` when the plan does not fit the ranks that run, :class:`PlanError` when ranks
    hold different plans, :class:`StepError` when a rank never comes.
    """

    @taking(Options)
    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        stages: Sequence[Stage],
        *,
        n_microbatches: int | None = None,
        costs: CostTable | None = None,
        adopt: Callable[[Plan, tuple[Stage, ...]], None] = lambda plan, stages: None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        count = plan.n_microbatches if n_microbatches is None else n_microbatches
        given = Options(n_microbatches=count, **options)
        if given.loss_on is None and given.loss_fn is not None:
            given = dataclasses.replace(given, loss_on=plan.settings.get("loss_on"))
        self._engine = Engine(capture, plan, tuple(stages), given, progress or Progress())
        self._runner = Runner(self._engine)
        self._cutter = Cutter(self._engine, costs, adopt)
        self._checkpoints = Checkpoints(self._engine, self._engine.named_parameters)
        if isinstance(given.weights, (str, pathlib.Path)):
            self._checkpoints.load(place("weights", given.weights), {}, strict=True)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a runtime cannot be pickled or copied: it holds work under way and links to other ranks. "
            "Pickle or copy the pipe, or the plan, and make another with pipe.runtime(...); rt.save(path) "
            "keeps the weights"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises :class:`InputError`: whether gradients are meant is not said."""
        raise InputError(
            "a runtime is not called as a model is: rt.step(...) trains on a batch, rt.evaluate(...) gives "
            "its loss and rt.forward(...) its outputs"
        )

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property's own error, not ours
        hint = f"; {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        raise AttributeError(f"a runtime has no {name!r}{hint}")

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 when it holds all stages."""
        return self._engine.rank

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this process."""
        return self._engine.stages

    @property
    def device(self) -> torch.device:
        """Where this process's stages are."""
        return self._engine.device

    @property
    def engine(self) -> Engine:
        """What runs it: for what joins a pipeline to other libraries."""
        return self._engine

    # -- batches ------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        n_microbatches: int | None = None,
        return_outputs: bool | Where = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are those of the full batch's loss.

        Every rank passes the same batch (samples of its values are compared), or only the one that feeds.
        ``target`` is what ``loss_fn`` gets beside the output, that of the last rank, which alone looks at it;
        without a ``loss_fn`` it is the model's own argument of that name (a model that has one beside a
        ``loss_fn`` takes it by position). Gradients add up over steps until they are zeroed, as in plain
        PyTorch. ``return_outputs``: ``"all"`` (or True) gives every rank the outputs, ``"last"`` the last.
        The user's random generators are left as they were found: random ops draw from streams fixed by the
        seed, the number of steps made, the microbatch and the op. Where the model has such ops, what else
        draws from torch within a step, as ``loss_fn`` or a hook, goes by the seed and the number of steps.

        An input that requires a gradient gets it on every rank, as in plain PyTorch: in its ``grad``, or on
        through whatever made it. So pipelines chain: forward one, step the other on its output, and step the
        first with ``loss_fn=lambda output, grad: (output * grad).sum(), loss_reduction="sum"`` on that
        output's ``grad`` as target.

        Raises :class:`InputError` for inputs that do not fit, :class:`StepError` when anything fails on any
        rank. After a batch that every rank refuses, or whose loss is found not finite, the runtime goes on;
        a loss that is not finite has left its gradients, which are to be zeroed.
        """
        return self._runner.run(
            Request(
                args=args,
                kwargs=kwargs,
                target=target,
                n_microbatches=n_microbatches,
                grad=True,
                outputs=return_outputs,
            )
        )

    @torch.no_grad()
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        n_microbatches: int | None = None,
        return_outputs: bool | Where = False,
        **kwargs: Any,
    ) -> StepResult:
        """The loss of one batch without gradients, in the model's present mode.

        A stage whose forward takes derivatives itself, as of an energy, is run with them.
        Arguments and errors are those of :meth:`step`. In training mode dropout is at work: call
        ``pipe.eval()`` first for a validation loss.
        """
        return self._runner.run(
            Request(
                args=args,
                kwargs=kwargs,
                target=target,
                n_microbatches=n_microbatches,
                outputs=return_outputs,
            )
        )

    @torch.no_grad()
    def forward(
        self,
        *args: Any,
        n_microbatches: int | None = None,
        outputs_on: Where = "all",
        like_step: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The model's output for one batch, without gradients; None on ranks that are not to have it.

        ``like_step`` draws the random numbers that the next step will, dropout's included: the outputs are
        those which that step has on the same batch, for a loss made of them elsewhere.
        """
        return self._runner.run(
            Request(
                args=args,
                kwargs=kwargs,
                n_microbatches=n_microbatches,
                outputs=outputs_on,
                loss=False,
                like_step=like_step,
            )
        ).outputs

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within it steps do not sum gradients over ranks (ties, data parallel); the next step does."""
        return self._runner.changed(syncs=False)

    def scaled(self, factor: float) -> contextlib.AbstractContextManager[None]:
        """Within it the gradients that steps make are multiplied by ``factor``; losses stay as they are.

        A factor that one rank refuses ends the step of all, as a refused batch does.
        """
        return self._runner.scaled(factor)

    def accumulate(
        self, batches: Iterable[Mapping[str, Any] | tuple[Any, ...]], *, n_microbatches: int | None = None
    ) -> StepResult:
        """One step's gradients from several batches: exactly those of all of them in one batch.

        Each batch is what :meth:`step` takes: a mapping of its keyword arguments (``target`` among them) or a
        tuple of its positional ones. Batches may be ragged: each weighs by what the loss averages over, rows
        or counted labels; where that cannot be told by rows, which a warning says. Losses that compare rows
        compare those of one batch. Ranks sum their gradients once, in the last batch. Under ``feed`` the
        other ranks pass as many empty batches, else every rank raises :class:`InputError`. Replicas may pass
        different numbers of batches, unless stages are sharded.

        Returns the loss of all batches together. Raises what :meth:`step` raises.
        """
        return self._runner.accumulate(batches, n_microbatches)

    # -- parameters ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters once each, under the model's first name for them, in the model's order."""
        return self._engine.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters once each, in the model's order, for an optimizer.

        A rank whose stages hold none that is trained (only a loss, say, or frozen layers) gives one number
        that stays zero: torch's optimizers refuse an empty list, and every rank runs the same script. With a
        scaler every rank gives it, since scalers refuse an optimizer of which no parameter has a gradient.
        Over several ranks torch's ``clip_grad_norm_`` is refused them, its ``LBFGS``, and optimizers that
        make one number of all their parameters (Prodigy, D-Adaptation), since each would go by this rank's
        gradients alone: :meth:`clip_grad_norm_` is for all.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        if not any(p.requires_grad for p in own) or self._engine.options.scaler is not None:
            own.append(self._engine.placeholder)
        return iter(own)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of the whole model's gradients, over all ranks, tied parameters counted once.

        Every rank calls it alike. ``norm_type`` is above 0, ``inf`` included. Returns the norm before
        clipping. Raises :class:`InputError` after a step within :meth:`no_sync`, since its gradients are not
        summed over ranks yet.
        """

        def look() -> tuple[float, float, bool]:
            self._runner.check_summed("clipping gradients")
            return (
                number("max_norm", max_norm),
                number("norm_type", norm_type, above=True),
                flag("error_if_nonfinite", error_if_nonfinite),
            )

        engine, parameters = self._engine, [p for _, p in self.named_parameters()]
        most, order, raises = engine.called("clip_grad_norm_", look, _shown)
        with self._engine.together("clipping gradients", waits=True):
            norm = clip_grad_norm(
                parameters,
                [p for p in parameters if id(p) not in engine.counted_elsewhere],
                most,
                norm_type=order,
                error_if_nonfinite=raises,
                group=engine.peers.group if engine.peers else None,
                device=engine.device,
                dtype=engine.norm_dtype,
            )
            engine.follow("clipping gradients")
            return norm

    def wrap(self, wrapper: Callable[[Stage], nn.Module | None]) -> None:
        """Wrap each of this rank's stages: ``lambda s: DDP(s, process_group=…)``, or ``torch.compile``.

        A wrapper that returns None has changed the stage in place, as ``fully_shard`` and
        ``parallelize_module`` do. Gradients are reduced over the replicas once per step, outside
        :meth:`no_sync`. Sharded stages (``fully_shard``) are gathered whole once a step, or where the plan's
        memory limit has no room for all of a rank's, in turn as the schedule comes to them; where it has none
        for one, each sharded module gathers its own as it runs. Schedules that split backwards split those
        in DDP; of sharded stages they stay whole, which a warning says. Make the optimizer afterwards. Raises
        :class:`InputError` where the wrapper unties what stages of one rank share.
        """
        called("wrapper", wrapper, "a function of a stage")
        with self._engine.turn:
            self._engine.wrap(wrapper)


def _shown(clipped: tuple[float, float, bool]) -> str:
    max_norm, norm_type, _ = clipped
    return f"max_norm={max_norm:g} and norm_type={norm_type:g}"
