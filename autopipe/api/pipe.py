"""The pipe: the model, its plan and its stages in one object that behaves as the model does.

Making it is left to ``verbs``, training it on many ranks to ``runtime``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..costs import CostTable
from ..errors import InputError
from ..exports import gather, relays, to_megatron_layout, to_torch_stages
from ..neighbours.generation import generate
from ..plans import Plan, check_between, check_plan
from ..runtime import Progress, Runtime, mixing
from ..runtime.wire.peers import joining
from ..stages import Parity, Stage, build, renewed, run_values, undisturbed, verify
from ..torch_private import uncompiled
from ..tracing import Capture
from .agree import in_group, join_group
from .checks import check_names, check_whole

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["Pipe"]

_logger = logging.getLogger(__name__)


# fmt: off
METHODS = (
    "forward", "train", "eval", "state_dict", "load_state_dict", "parameters", "named_parameters", "verify",
    "merge", "runtime", "generate", "to_torch_stages", "to_layers", "to_megatron_layout",
)
# fmt: on
"""What one calls on a pipe; the rest of ``nn.Module`` works as on the model."""
ELSEWHERE = {"save_pretrained": "rt.save(folder) writes what from_pretrained reads"}
"""What models of libraries have, and who does it of a pipe."""


class _Short(type):
    """Lists of a class what its users need: ``help(Pipe)`` is a page, not all of ``nn.Module``."""

    def __dir__(cls) -> list[str]:
        own = {name for name in vars(cls) if not name.startswith("_")}
        return sorted({*own, *METHODS, "__init__", "__doc__", "__module__"})


class Pipe(nn.Module, metaclass=_Short):
    """A model split into pipeline stages; made by :func:`autopipe.split`.

    Its parameters, buffers, mode and ``state_dict`` are the model's own, and calling it is calling the
    model: all stages run in turn in this process, with the model's random numbers in the model's order.
    ``copy.deepcopy`` and ``pickle`` make an independent pipe over a copy of the model.

    Attributes
    ----------
    model: the model, unmodified.
    graph: what was captured: ``graph.module`` is a linted fx GraphModule, ``graph.ops`` the op graph.
    plan: stages, ties, boundaries and predictions; saved as JSON, it opens without torch or the model.
    costs: what each op was measured or estimated to cost, or None for a pipe built from a given plan.
    stages: one ``nn.Module`` per stage.
    """

    def __init__(self, capture: Capture, plan: Plan, costs: CostTable | None = None) -> None:
        # nn.Module.__init__ would make dicts of its own: the pipe's are the model's, so that parameters,
        # zero_grad, apply and requires_grad_ act on the model itself
        object.__setattr__(self, "_model", [capture.model])
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(capture.model, name))
        for name, value in (("graph", capture), ("plan", plan), ("costs", costs)):
            object.__setattr__(self, name, value)
        check_plan(plan)
        object.__setattr__(self, "stages", build(capture, plan))
        check_between(plan, capture.ops)
        object.__setattr__(self, "_runtime", [])
        object.__setattr__(self, "_exported", [])
        object.__setattr__(self, "_progress", Progress())
        object.__setattr__(self, "_has_warned", False)
        object.__setattr__(self, "forward", self._signed(type(self).forward))

    _model: list[nn.Module]
    graph: Capture
    plan: Plan
    costs: CostTable | None
    stages: tuple[Stage, ...]
    _runtime: list[Runtime]
    _exported: list[dist.ProcessGroup | None]
    _progress: Progress
    _has_warned: bool

    def __reduce__(self) -> tuple[Any, ...]:
        # the stages are generated code: a copy makes its own from its own model and the plan
        return type(self), (self.graph, self.plan, self.costs)

    def __dir__(self) -> list[str]:
        return sorted({*dir(nn.Module), *super().__dir__()})  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if callable(getattr(Runtime, name, None)) and not name.startswith("_"):
                hint = f"make rt = pipe.runtime(loss_fn) and call rt.{name}(...)"
            elif "_model" in self.__dict__ and hasattr(self.model, name):
                hint = ELSEWHERE.get(name, f"the model has: pipe.model.{name}")
            else:
                raise
        raise AttributeError(f"a pipe has no {name!r}; {hint}")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel asks this of what it wraps, and lets errors beside AttributeError pass
        raise InputError(
            "a pipe must not be wrapped in DistributedDataParallel (which Fabric.setup, Accelerator.prepare "
            "and transformers' Trainer do): every rank would train all stages. Leave it out of setup and "
            "prepare, and train rt = pipe.runtime() with rt.step(...), or take autopipe.neighbours' "
            "PipelineTrainer, PipelineAccelerator or FabricPipelineStrategy; for replicas of a pipeline, "
            "give pipe.runtime(mesh=...) and rt.wrap(DistributedDataParallel)"
        )

    @property
    def model(self) -> nn.Module:
        """The model that was split; once ranks train, current on each in its own stages alone."""
        return self._model[0]

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "stages" in self.__dict__:
            self.model.training = mode

    def train(self, mode: bool = True) -> Pipe:
        """``model.train(mode)``."""
        self.model.train(mode)
        return self

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the model's own structure.

        ``torch.compile`` of a pipe leaves it as it is: stages are compiled by ``rt.wrap(torch.compile)``.
        Raises :class:`InputError` naming the argument when the inputs do not fit what was captured, and
        :class:`StaleError` once ranks train: ``rt.forward`` runs them, ``merge`` brings their weights.
        """
        self._warn_of_whole()
        if "num_items_in_batch" in kwargs and "num_items_in_batch" not in self.graph.inputs.spec.keys:
            raise InputError(
                "transformers' Trainer calls the pipe with num_items_in_batch, which it was not split with, "
                "and knows nothing of stages; train with autopipe.neighbours.trainer.PipelineTrainer(pipe, "
                "...), which takes the Trainer's own arguments, in one process or many"
            )
        kind, values, form = self._meet(args, kwargs)
        kind.assumptions.begin()
        return kind.answer(run_values(self.stages, values, form), args, kwargs)

    def _meet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Capture, dict[str, Any], int]:
        """The capture for such calls, the inputs by name and the form they ask for, which stages have."""
        kind, values = self.graph.kind_met(args, kwargs)
        form = kind.form_met(values)
        object.__setattr__(self, "stages", renewed(self.graph, self.stages))
        return kind, values, form

    def _signed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method with the signature of the model's forward: trainers choose a batch's columns by it."""

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        called.__signature__ = inspect.signature(self.model.forward)  # type: ignore[attr-defined]
        return called

    def _warn_of_whole(self) -> None:
        """Say so where one might take a call for a step of the pipeline."""
        is_whole = in_group() and self.plan.n_ranks > 1 and not self._runtime
        if is_whole and self.training and torch.is_grad_enabled() and not self._has_warned:
            object.__setattr__(self, "_has_warned", True)
            _logger.warning(
                "pipe(...) runs all stages in this process, and so does each of the %d ranks; to train each "
                "rank's own part, make rt = pipe.runtime() and call rt.step(...)",
                dist.get_world_size(),
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """``model.state_dict()``."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """``model.load_state_dict()``; with ``assign`` the stages take over the new tensors.

        Raises :class:`InputError` for ``assign`` under stages that a runtime has wrapped.
        """
        if assign and any(runtime.engine.was_wrapped for runtime in self._runtime):
            raise InputError(
                "the stages were wrapped, and what wraps them would keep the old tensors; load without "
                "assign=True, or before pipe.runtime() and its wrap()"
            )
        accept = self.graph.holding()
        result = self.model.load_state_dict(state_dict, strict, assign)
        if assign:
            accept()
            object.__setattr__(self, "stages", build(self.graph, self.plan))
            for runtime in self._runtime:
                runtime.engine.renew(self.stages)
        return result

    def verify(self, *args: Any, rtol: float | None = None, seed: int = 0, **kwargs: Any) -> Parity:
        """Compare the pipe with the model: outputs, loss and every gradient, in the model's present mode.

        Without inputs, those it was captured with are used. ``rtol`` is relative to each tensor's largest
        value; by default 1e-5 in fp32, 1e-10 in fp64, 2e-2 in half precision. Raises
        :class:`VerificationError` naming the first op that differs.

        Also runs the batch in the plan's microbatches, in evaluation mode, and warns where the result is not
        the whole batch's: then rows depend on one another, or lie along another axis.
        """
        if not args and not kwargs:
            args, kwargs = self.graph.example
        self._meet(*self.graph.arguments(args, kwargs))
        parity = verify(self.graph, self.stages, args, kwargs, rtol=rtol, seed=seed)
        try:
            with undisturbed(self.model):
                mixed = mixing(self.graph, self.stages, args, kwargs, self.plan.n_microbatches)
        except Exception as error:  # whatever the model raises: the whole batch runs
            mixed = f"they cannot be run: {type(error).__name__}: {error}"
        if mixed:
            _logger.warning(
                "microbatches do not give what the whole batch does: %s. Rows depend on one another, so only "
                "steps with n_microbatches=1 are the model's; or the batch is along another axis, which "
                "runtime(batch_dims={'name': axis}) tells",
                mixed,
            )
        return parity

    def merge(self) -> nn.Module:
        """The model itself, a plain ``nn.Module`` again, with the weights that the pipeline trained.

        In one process that is free, since stages share the model's parameters. After :meth:`runtime` in a
        process group every rank must call it: each stage's weights come from the rank that trains them, ties
        included, those it had released too (see :meth:`Runtime.gather_weights`). On an accelerator a rank's
        own stages stay there and the others' weights where they were: ``pipe.merge().to(device)`` to run it.
        """
        if self._runtime:
            self._runtime[-1].gather_weights()
        elif self._exported:
            gather(self.graph, self.stages, self._exported[-1])
        return self.model

    def generate(self, *args: Any, n_microbatches: int | None = None, **kwargs: Any) -> Any:
        """``model.generate(*args, **kwargs)`` of transformers' models, token for token.

        Once a runtime runs on several ranks every rank calls it with the same arguments (under ``feed``, only
        the one that feeds): each runs its own layers and keeps their caches, and all get the result. An
        encoder runs once; what each decoder layer makes of its states stays with the layer's rank. The rank
        with the model's head chooses the tokens, so that its random generator, streamer, logits processors
        and stopping criteria count.

        The batch passes in ``n_microbatches`` of whole prompts, so that ranks work at the same time: by
        default one for each rank as far as each has 16 sequences, else fewer, since a piece of few rows
        takes about as long as one of many: every weight is read for it.

        Greedy search, sampling and beams are taken. Raises :class:`InputError` for models and options that
        are not, saying what to do instead.
        """
        return generate(
            self.model, self._runtime[-1] if self._runtime else None, args, kwargs, n_microbatches
        )

    def runtime(self, loss_fn: Callable[..., torch.Tensor] | None = None, **options: Any) -> Runtime:
        """This rank's part of the pipeline when a process group is up, else all stages in this process.

        ``loss_fn(output, target)`` is for models that do not compute their own loss. Options are those of
        :class:`autopipe.runtime.Runtime`: ``n_microbatches``, ``schedule``, ``device``, ``mesh``,
        ``autocast``, ``scaler``, ``loss_reduction``, ``loss_weight``, ``loss_on``, ``release``,
        ``batch_dims``, ``stall_limit_s``, ``check_finite``, ``feed``, ``mixed_rows``, ``weights``. None means
        what the plan says. Further runtimes of a pipe count its steps together: random streams, saves and
        resumes go on. Raises :class:`InputError` for an unknown option, and where the pipe or part of it is
        wrapped.
        """
        join_group()
        with joining(options.get("mesh")):
            return self._make_runtime(loss_fn, options)

    def _make_runtime(self, loss_fn: Callable[..., torch.Tensor] | None, options: dict[str, Any]) -> Runtime:
        check_names("runtime", options, Runtime)
        check_whole(self)
        own = weakref.WeakMethod(self._adopt)  # else the two would keep each other
        adopt = {"adopt": lambda *cut: (adopt := own()) and adopt(*cut)}
        given = {"costs": self.costs, "progress": self._progress, **adopt, **options}
        runtime = Runtime(self.graph, self.plan, self.stages, loss_fn=loss_fn, **given)
        self._runtime[:] = [runtime]
        return runtime

    def to_torch_stages(
        self,
        *,
        n_microbatches: int | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> list[PipelineStage]:
        """This rank's stages as ``torch.distributed.pipelining.PipelineStage``, for torch's own schedules.

        ``n_microbatches`` (by default the plan's) must be the schedule's: shapes are those of so many equal
        pieces of the example batch, and torch takes no others. Each rank of ``group`` (by default the world)
        calls it; rank 0 gives the schedule the model's arguments, and the last stage gives the model's
        output where that is a tensor or a tuple of tensors, else the tensors in it. Weights are the model's
        own: :meth:`merge`, on every rank, brings them together after training.

        Raises :class:`InputError` without a process group, for another number of ranks than the plan's, for
        rows that make no equal microbatches or depend on one another, and for a parameter of several stages,
        whose gradients torch does not sum (``pin`` puts it in one).
        """
        made = to_torch_stages(
            self.graph, self.plan, self.stages, n_microbatches=n_microbatches, device=device, group=group
        )
        self._exported[:] = [group]
        return made

    def to_layers(self) -> list[nn.Module]:
        """The stages as a chain of modules of tensors, each called with what the one before gave.

        What a later stage needs is handed on by those in between; several tensors may be given as one tuple.
        For tools that take a model as a list of layers, such as DeepSpeed's ``PipelineModule(
        layers=pipe.to_layers(), num_stages=..., partition_method="uniform")``. Warns where rows depend on one
        another: such tools run microbatches one by one. Raises :class:`InputError` for a parameter of several
        stages.
        """
        if mixing := self.graph.variation.mixing.always:
            _logger.warning(
                "rows of a batch of %s depend on one another (%s): layers run on microbatches do not give "
                "what the batch gives; run them on whole batches, or train with pipe.runtime()",
                self.graph.ops.model,
                mixing,
            )
        return list(relays(self.graph, self.stages, *self.graph.example).relays)

    def to_megatron_layout(self) -> str:
        """The split of a chain of alike blocks as Megatron-LM's ``--pipeline-model-parallel-layout``.

        Raises :class:`InputError` where a stage is not made of whole blocks in their order.
        """
        return to_megatron_layout(self.graph.ops, self.plan)

    def _adopt(self, plan: Plan, stages: tuple[Stage, ...]) -> None:
        """Take over the cut that the runtime's :meth:`Runtime.rebalance` has made."""
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "stages", stages)

    def __repr__(self) -> str:
        return "\n".join([f"{self.plan}", *(f"Note: {note}" for note in self.graph.notes)])

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()
