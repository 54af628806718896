"""The runtime as users see it: steps, evaluation, parameters, clipping, checkpoints, reports.

Running a batch is left to ``engine``.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import flag, number, place
from ..costs import CostTable
from ..errors import InputError
from ..plans import Plan
from ..schedule import Schedule
from ..simulator import Report, make_report
from ..stages import Stage
from ..units import parse_bytes
from .data.weights import LossWeight
from .engine import Engine
from .given import ELSEWHERE, StepLoss, StepResult
from .keep.keeper import Keeper, Saving
from .options import Options, Request, Where
from .rebalance import Cutter
from .record import Publisher, prepare, record
from .reduce.precision import Autocast, clip_grad_norm
from .stage.initialise import Init

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["Runtime", "StepResult"]


class Runtime:
    """Runs a pipeline: this rank's stages when a process group is up, else all stages in this process.

    Every rank makes it, and calls its methods, alike. ``None`` means what the plan says. In one process
    threads that share it take turns; over several ranks one thread calls it, and a second at the same time is
    refused with :class:`InputError`, which ends the step on every rank.

    Parameters
    ----------
    capture, plan, stages: from ``tracing``, ``solve`` and ``stages.build``.
    loss_fn: ``loss_fn(output, target)``, a scalar; without it the model's output holds its loss.
    n_microbatches, schedule: another count or schedule than the plan's; the placement must fit.
    device: by default the accelerator of ``LOCAL_RANK`` where the process group carries such tensors, which
        becomes the current one; else the model's. Only this rank's stages move there.
    mesh: a DeviceMesh with a ``pp`` dim; its other dims are the user's, for :meth:`wrap`.
    autocast: a dtype, or a factory of a context, each stage's forward runs in.
    scaler: the user's ``GradScaler``: scales the loss; an overflow on any rank shows on all.
    loss_reduction: ``"mean"`` or ``"sum"``; by default what a torch loss says of itself, else the mean: over
        counted labels for losses inside the model, for ``CrossEntropyLoss`` and ``NLLLoss``; else over rows.
    loss_weight: ``loss_weight(args, kwargs, target)`` weighs a microbatch instead.
    release: free the weights of stages that other ranks own; :meth:`gather_weights` brings them back.
    batch_dims: input name → batch axis, or None for an input every microbatch gets whole; ``target`` too.
    stall_limit_s: how long a rank may make no progress before all stop; by default from the plan's times.
    check_finite: raise when the loss is not finite, naming the first stage that made it so (not under a
        scaler, and not on an accelerator, where looking would wait for the device).
    weights: of a model made on the meta device, where each rank makes only its own stages: a checkpoint to
        read them from, or ``weights(module, path)`` to fill what a module holds; by default the model's own
        init (``_init_weights``, ``reset_parameters``), alike for the same seed whatever the cut.
    feed: the pipeline rank that alone has the batch: the others call ``step()`` without inputs, and get
        what their stages use. By default every rank passes the same batch, and nothing is sent.

    costs, adopt: what each op was thought to take, for :meth:`rebalance`, and who is told of its plan.
    mixed_rows: what to do with a batch in several microbatches where capture found that rows depend on one
        another (contrastive losses, in-batch negatives). ``"tail"``: where only the end of the model mixes
        them, that runs once on the whole batch, loss and all, as soon as every microbatch has come so far;
        gradients are those of the batch, every microbatch is held until then, and the schedule is one that
        waits (GPipe or looped BFS). A model that mixes rows earlier is refused. ``"refuse"``: every one is.
        ``"allow"``: each microbatch is a batch of its own.

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
        loss_reduction: Literal["mean", "sum"] | None = None,
        loss_weight: LossWeight | None = None,
        release: bool = False,
        batch_dims: Mapping[str, int | None] | None = None,
        stall_limit_s: float | None = None,
        check_finite: bool = True,
        feed: int | None = None,
        mixed_rows: Literal["tail", "refuse", "allow"] = "tail",
        weights: str | pathlib.Path | Init | None = None,
        costs: CostTable | None = None,
        adopt: Callable[[Plan, tuple[Stage, ...]], None] = lambda plan, stages: None,
    ) -> None:
        options = Options(
            loss_fn,
            plan.n_microbatches if n_microbatches is None else n_microbatches,
            schedule,
            device,
            mesh,
            autocast,
            scaler,
            loss_reduction,
            loss_weight,
            release,
            batch_dims,
            stall_limit_s,
            check_finite,
            feed,
            mixed_rows,
            weights,
        )
        self._engine = Engine(capture, plan, tuple(stages), options)
        self._cutter = Cutter(self._engine, costs, adopt)
        self._keeper = Keeper(self._engine, self.named_parameters)
        if isinstance(weights, (str, pathlib.Path)):
            self._keeper.load(pathlib.Path(weights), {}, strict=True)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a runtime is not to be pickled or copied: it holds work under way and links to other ranks. "
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
        ``target`` is what ``loss_fn`` gets beside the output; without a ``loss_fn`` it is the model's own
        argument of that name (a model that has one beside a ``loss_fn`` takes it by position). Gradients add
        up over steps until they are zeroed, as in plain PyTorch.
        ``return_outputs``: ``"all"`` (or True) gives every rank the outputs, ``"last"`` the last. The user's
        random generators are left as they were found: random ops draw from streams fixed by the seed, the
        number of steps made, the microbatch and the op.

        An input that requires a gradient gets it on every rank, as in plain PyTorch: in its ``grad``, or on
        through whatever made it. So pipelines chain: forward one, step the other on its output, and step the
        first with ``loss_fn=lambda output, grad: (output * grad).sum(), loss_reduction="sum"`` on that
        output's ``grad`` as target.

        Raises :class:`InputError` for inputs that do not fit, :class:`StepError` when anything fails on any
        rank. After a batch that every rank refuses, or whose loss is found not finite, the runtime goes on;
        a loss that is not finite has left its gradients, which are to be zeroed.
        """
        if not torch.is_grad_enabled():
            raise InputError(
                "step() makes gradients, but they are off here (torch.no_grad or inference_mode); call it "
                "outside, or evaluate() for the loss alone"
            )
        return self._engine.run(
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
        """The loss of one batch without gradients, in the model's present mode."""
        return self._engine.run(
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
        return self._engine.run(
            Request(
                args=args,
                kwargs=kwargs,
                n_microbatches=n_microbatches,
                outputs=outputs_on,
                loss=False,
                like_step=like_step,
            )
        ).outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it steps do not sum gradients over ranks (ties, data parallel); the next step does."""
        with self._engine.turn:
            outer, self._engine.syncs = self._engine.syncs, False
            try:
                yield
            finally:
                self._engine.syncs = outer

    @contextlib.contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Within it the gradients that steps make are multiplied by ``factor``; losses stay as they are."""
        with self._engine.turn:
            outer, self._engine.factor = self._engine.factor, self._engine.factor * factor
            try:
                yield
            finally:
                self._engine.factor = outer

    def accumulate(
        self, batches: Iterable[Mapping[str, Any] | tuple[Any, ...]], *, n_microbatches: int | None = None
    ) -> StepResult:
        """One step's gradients from several batches: exactly those of all of them in one batch.

        Each batch is what :meth:`step` takes: a mapping of its keyword arguments (``target`` among them) or a
        tuple of its positional ones. A batch weighs by what the loss averages over, rows or counted labels:
        batches may be ragged. What compares rows sees those of one batch. Ranks sum their gradients once, in
        the last.
        Returns the loss of all batches together. Under ``feed`` the other ranks pass as many empty ones.
        """
        with self._engine.turn:
            try:
                return self._accumulate(batches, n_microbatches)
            finally:
                self._engine.share = None

    def _accumulate(
        self, batches: Iterable[Mapping[str, Any] | tuple[Any, ...]], n_microbatches: int | None
    ) -> StepResult:
        calls = [_call_of(i, batch) for i, batch in enumerate(batches)]
        if not calls:
            raise InputError("accumulate() got no batches; give it at least one")
        shares, self._engine.share = self._engine.shares(calls)
        # a batch without labels that count has no loss
        counted = [(call, share) for call, share in zip(calls, shares, strict=True) if share]
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for i, ((args, kwargs), share) in enumerate(counted):
            syncs = contextlib.nullcontext() if i + 1 == len(counted) else self.no_sync()
            with syncs, self.scaled(share):
                loss = self.step(*args, n_microbatches=n_microbatches, **kwargs).loss
            total = total.to(loss.device) + share * loss.double()
        return StepResult(
            StepLoss.of(total.to(loss.dtype), is_scaled=self._engine.options.scaler is not None)
        )

    # -- parameters ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters once each, under the model's first name for them."""
        first = self._engine.capture.ops.parameter
        seen: set[int] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (first[name].name if name in first else name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters once each, for an optimizer.

        A rank whose stages hold none that is trained (only a loss, say, or frozen layers) gives one number
        that stays zero: torch's optimizers refuse an empty list, and every rank runs the same script. With a
        scaler every rank gives it, since scalers refuse an optimizer of which no parameter has a gradient.
        Over several ranks torch's ``clip_grad_norm_`` is refused them, and its ``LBFGS``, since each would go
        by this rank's gradients alone: :meth:`clip_grad_norm_` is for all.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        if not any(p.requires_grad for p in own) or self._engine.options.scaler is not None:
            own.append(self._engine.placeholder)
        return iter(own)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of the whole model's gradients, over all ranks, tied parameters counted once.

        Every rank calls it. Returns the norm before clipping.
        """
        engine, parameters = self._engine, [p for _, p in self.named_parameters()]
        with self._together("clipping gradients", waits=True):
            norm = clip_grad_norm(
                parameters,
                [p for p in parameters if id(p) not in engine.counted_elsewhere],
                max_norm,
                norm_type=norm_type,
                error_if_nonfinite=error_if_nonfinite,
                group=engine.peers.group if engine.peers else None,
                device=engine.device,
            )
            engine.follow("clipping gradients")
            return norm

    def wrap(self, wrapper: Callable[[Stage], nn.Module | None]) -> None:
        """Wrap each of this rank's stages: ``lambda s: DDP(s, process_group=…)``, or ``torch.compile``.

        A wrapper that returns None has changed the stage in place, as ``fully_shard`` and
        ``parallelize_module`` do. Gradients are reduced over the replicas once per step, outside
        :meth:`no_sync`. Sharded stages (``fully_shard``) are gathered whole once a step, or where the plan's
        memory limit has no room for all of a rank's, in turn as the schedule comes to them; where it has none
        for one, each sharded module gathers its own as it runs. Make the optimizer afterwards. Raises
        :class:`InputError` where the wrapper unties what stages of one rank share.
        """
        with self._engine.turn:
            self._engine.wrap(wrapper)

    # -- checkpoints and reports --------------------------------------------------------------------

    def save(
        self,
        path: str | pathlib.Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        max_shard_bytes: str | int = "5GB",
        keep_last: int | None = None,
        background: bool = False,
        **states: Any,
    ) -> Saving:
        """Save the whole model under its own names, and what trains it; every rank calls it alike.

        ``path`` becomes a directory of safetensors shards with an index, as Hugging Face lays them out (with
        ``config.json`` for transformers models, so that ``from_pretrained`` reads it), each rank writing its
        own. ``torch.distributed.checkpoint.load`` reads all of it, into any model over any mesh, through
        :func:`autopipe.exports.dcp_reader`, and its weights through torch's ``HuggingFaceStorageReader``.
        There is no ``.metadata`` in it: torch's own layout is pickles, in which every weight would lie a
        second time (:func:`autopipe.exports.to_dcp` makes it for tools that read no other). It appears whole,
        by one rename: whatever fails or dies before leaves an earlier save there as it was. A ``path`` that
        ends as torch's files do (``model.pt``, ``.pth``, ``.bin``, ``.ckpt``) gets one file that
        ``model.load_state_dict(torch.load(…))`` reads instead.

        ``optimizer`` and ``states`` (``scheduler=``, ``scaler=``, ``loader=``, further optimizers: anything
        with ``state_dict``) go into the directory: optimizers by parameter name, so that another cut or
        number of ranks can go on from it; other objects per rank, but what they keep by weights' names, as
        an average of ``rt.named_parameters()`` does, goes where the weights go. With them go the number of
        steps, the seed and the user's random generators, and what modules keep beside their tensors
        (``get_extra_state``). Of data-parallel replicas each one's objects and generators are saved where
        they differ, and come back to as many replicas. Gradients are not kept: save after the optimizer.

        ``keep_last=3`` makes ``path`` a row of saves, ``step-00000120`` and so on, of which the last three
        are kept; :meth:`resume` goes on from the last. ``background`` copies everything, returns, and writes
        while training goes on; ``wait()`` on what is returned says how it ended, as does the next save.

        Raises :class:`StoreError` on every rank where one could not write (training may go on),
        :class:`InputError` for a place or an object that cannot be saved.
        """
        with self._engine.turn:
            return self._keeper.save(
                place("path", path),
                {"optimizer": optimizer, **states},
                max_bytes=parse_bytes(max_shard_bytes),
                keep_last=keep_last,
                background=flag("background", background),
            )

    def load(
        self,
        path: str | pathlib.Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        strict: bool = True,
        **states: Any,
    ) -> None:
        """Load what :meth:`save` wrote, or a plain model's checkpoint: Hugging Face's layout, or one file.

        So is what ``torch.distributed.checkpoint`` saved of a plain or an FSDP2 model, under whichever key,
        with an optimizer's ``get_optimizer_state_dict`` and other objects by their keys. Names may have what
        DDP (``module.``) or ``torch.compile`` put before them, or lack what a head put before a base model.

        Each rank reads the tensors it holds, whatever the cut, schedule or number of ranks were. What
        :meth:`save` wrote also restores the number of steps, so that random streams go on, the user's random
        generators, and the state of ``optimizer`` and ``states``. Everything is checked first, checksums
        included, and nothing is changed unless all of it fits on every rank. ``strict=False`` passes over
        weights that the model does not have.

        Raises :class:`StoreError` saying what is damaged, missing or differs.
        """
        with self._engine.turn:
            self._keeper.load(
                place("path", path), {"optimizer": optimizer, **states}, strict=flag("strict", strict)
            )

    def resume(
        self, path: str | pathlib.Path, *, optimizer: torch.optim.Optimizer | None = None, **states: Any
    ) -> int:
        """Load the last whole save of a row made with ``keep_last``; the number of steps it had made.

        0 where there is none yet. A damaged one is passed over with a warning for the one before it; where
        none can be loaded, the last one's :class:`StoreError` is raised. Raises :class:`InputError` where
        ``path`` is a save itself.
        """
        with self._engine.turn:
            return self._keeper.resume(place("path", path), {"optimizer": optimizer, **states})

    @property
    def plan(self) -> Plan:
        """The plan it runs: the one it was made with, or the last that :meth:`rebalance` made."""
        return self._engine.plan

    def rebalance(
        self,
        *,
        plan: Plan | None = None,
        least_gain: float = 1.05,
        speeds: Mapping[int, float] | None = None,
        time_limit_s: float | None = None,
        **optimizers: torch.optim.Optimizer,
    ) -> bool:
        """Cut anew from what the stages were measured to take, and move weights to where they now belong.

        Between steps every rank calls it alike, and passes every optimizer there is (``optimizer=``, each
        under a name of its own): it moves what they keep of a parameter too, and changes their groups in
        place. Schedulers, the number of steps and random streams stay: the run goes on as if cut so from its
        start. Returns whether it was cut anew: not where a step would not become ``least_gain`` times faster.

        ``plan`` is cut to instead where one is given: for the same graph, ranks and microbatches. ``speeds``
        (rank → factor) says which devices became slower or faster; drift is else laid on the ops.

        Raises :class:`InputError` on every rank, with nothing moved, for stages that :meth:`wrap` changed,
        for optimizers whose groups are not alike on every rank, and where there is nothing to plan from.
        """
        by = self.report() if plan is None else plan
        with self._together("cutting anew", waits=False):
            return self._cutter.cut(
                by,
                {key: optimizer for key, optimizer in optimizers.items() if optimizer is not None},
                least_gain=least_gain,
                speeds=speeds,
                time_limit_s=time_limit_s,
            )

    def gather_weights(self) -> None:
        """Make the model whole on every rank: each weight as the rank that trains it has it now.

        Every rank calls it. Released weights, and those of a model made on the meta device, come to the CPU.
        Stages that were sharded (``fully_shard``) lose their shards to the model and train no more.
        """
        with self._together("gathering weights", waits=False):
            self._engine.gather_weights()

    @contextlib.contextmanager
    def _together(self, words: str, *, waits: bool) -> Iterator[None]:
        peers = self._engine.peers
        with (
            self._engine.turn,
            contextlib.nullcontext() if peers is None else peers.together(words, waits=waits),
        ):
            yield

    def report(self) -> Report:
        """Predicted beside measured, and every action of the last step; every rank calls it.

        Its ``drift`` says when :meth:`rebalance` would pay.
        On an accelerator with the most memory each rank held since the runtime was made.
        """
        engine = self._engine
        with self._together("gathering a report", waits=False):
            offset_s = engine.peers.clock_offset_s() if engine.peers else 0.0
        mine = record(engine, offset_s)
        with self._together("gathering a report", waits=False):
            everyone = engine.peers.gather(mine) if engine.peers else [mine]
        return make_report(engine.plan, everyone)

    def publish(self, folder: str | pathlib.Path, every_s: float = 1.0) -> None:
        """From now on write what the last steps took to ``folder``, about every ``every_s`` seconds.

        ``autopipe watch folder`` shows it while the job runs, as does :func:`autopipe.watch` in a notebook:
        the step, idle time by cause, stragglers, drift from the plan. Every rank calls it, with a folder that
        whoever watches reaches too. What an earlier job wrote there is removed. Of several replicas the first
        is shown. Writing takes well under a millisecond, and a step never waits for it.

        Raises :class:`InputError` on every rank where one cannot write there.
        """
        number("every_s", every_s, above=True, most=1e6, unit="seconds")
        engine = self._engine
        if engine.replica:
            return
        with self._together("publishing steps", waits=False):
            offset_s = engine.peers.clock_offset_s() if engine.peers else 0.0
            ready = prepare(pathlib.Path(folder), engine.rank)
            faults = [f for f in (engine.peers.gather(ready) if engine.peers else [ready]) if f]
        if faults:
            raise InputError(f"steps cannot be published to {folder}: {faults[0]}; give another folder")
        engine.publisher = Publisher(engine, pathlib.Path(folder), every_s, offset_s)


def _call_of(i: int, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``step`` that batch ``i`` of several stands for."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    raise InputError(
        f"batch {i} of accumulate() is a {type(batch).__name__}; give a list of batches, each a mapping of "
        "step()'s keyword arguments, such as {'x': x, 'target': y}, or a tuple of its positional ones"
    )
