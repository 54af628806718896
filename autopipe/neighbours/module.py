"""A pipeline as a module with a loss: for loops, of the user's own or of a library, that call ``backward``.

Running batches is left to ``runtime``; loops of transformers, Accelerate and Lightning to their modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..runtime import Runtime
from ..runtime.reduce.hooks import add, set_aside
from ..runtime.reduce.refusals import n_scaled, watch_scaling
from ..torch_private import pytree

__all__ = ["PipelineModule"]

DDP = "torch.nn.parallel.distributed"
_WRAPPED = (
    "a PipelineModule must not be wrapped in DistributedDataParallel, which would give every rank the "
    "weights of the first: take PipelineAccelerator, FabricPipelineStrategy or PipelineStrategy of "
    "autopipe.neighbours, or leave it out of setup and prepare; for replicas of a pipeline, give "
    "pipe.runtime(mesh=...) and rt.wrap(DistributedDataParallel)"
)


class PipelineModule(nn.Module):
    """``loss = module(**batch); loss.backward()``, where the module is a split model.

    Called in training with gradients on, it runs a step of the pipeline and keeps its gradients aside; the
    loss's backward adds them, times whatever the loss was multiplied by, to the parameters' own (those of a
    ``loss_fn`` too), calls hooks on these, and hands on those of inputs that require a gradient. Otherwise it
    gives the loss alone, whose backward raises :class:`InputError`. Its parameters are this rank's, under the
    model's names and in its order; its mode is the model's. Every rank calls it with the same batch, as
    :meth:`autopipe.runtime.Runtime.step` is called.

    A runtime with a ``scaler`` makes scaled gradients, so that they do not vanish: ``loss.backward()`` gives
    them as they are, and so does ``scaler.scale(loss).backward()``.

    Attributes
    ----------
    runtime: this rank's part of the pipeline; for outputs, its ``evaluate`` and ``forward``.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._held = (runtime,)  # not a submodule
        for name, parameter in runtime.named_parameters():
            self.register_parameter(name.replace(".", "/"), parameter)
        if not self._parameters:
            self.register_parameter("none", runtime.engine.placeholder)
        self.training = self._model.training
        if self._scaler is not None:
            watch_scaling(self._scaler)

    @property
    def runtime(self) -> Runtime:
        return self._held[0]

    @property
    def _model(self) -> nn.Module:
        return self.runtime.engine.capture.model

    @property
    def _scaler(self) -> Any:
        return self.runtime.engine.scaler

    def train(self, mode: bool = True) -> PipelineModule:
        """The model's mode."""
        self._model.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, 0-d, on every rank; arguments are those of :meth:`Runtime.step`."""
        if not torch.is_grad_enabled():
            return self.runtime.evaluate(*args, **kwargs).loss
        if not self.training:
            return self._made(self.runtime.evaluate(*args, **kwargs).loss, None)
        trained = {id(p): p for _, p in self.runtime.engine.stepped()}  # others after rebalance()
        parameters = [p for p in trained.values() if p.requires_grad]
        inputs, own, (args, kwargs) = _cut_off((args, kwargs))
        made: list[Tensor | None] = []
        with set_aside(parameters, made):
            loss = self.runtime.step(*args, **kwargs).loss
        return self._made(loss, _Gradients(parameters, made, [x.grad for x in own], self._scaler), *inputs)

    def _made(self, loss: Tensor, gradients: _Gradients | None, *inputs: Tensor) -> Tensor:
        # the graph wants something that requires a gradient, also where this rank has no parameters
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        made: Tensor = _Loss.apply(anchor, loss, gradients, *inputs)
        return made

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, under the model's names."""
        if sys._getframe(1).f_globals.get("__name__") == DDP:
            raise InputError(_WRAPPED)  # it wraps a module that holds this one
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("/", "."), parameter

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # asked by DistributedDataParallel, which lets errors beside AttributeError pass
        raise InputError(_WRAPPED)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "a PipelineModule has this rank's part of the weights; module.runtime.load(folder) reads them, "
            "also of a plain model's checkpoint"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "a PipelineModule has this rank's part of the weights; module.runtime.save(folder) keeps all of "
            "them, and pipe.merge() brings them here"
        )


def _cut_off(given: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """The tensors that require a gradient, leaves in their places, and what was given with these instead."""
    leaves, structure = pytree.tree_flatten(given)
    tracked = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    before = [leaves[i] for i in tracked]
    for i in tracked:
        leaves[i] = leaves[i].detach().requires_grad_()
    return before, [leaves[i] for i in tracked], pytree.tree_unflatten(leaves, structure)


class _Gradients:
    """Those of one step, to be given to its parameters once; those of its inputs are returned."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        grads: list[Tensor | None],
        inputs: list[Tensor | None],
        scaler: Any,
    ) -> None:
        self._parameters, self._grads, self._inputs = parameters, grads, inputs
        self._is_given = False
        self._scaler, self._n_scaled = scaler, n_scaled(scaler) if scaler is not None else 0

    @torch.no_grad()
    def give(self, factor: Tensor) -> list[Tensor | None]:
        if self._is_given:
            raise InputError(
                "backward of this loss has run before; call the module again for other gradients"
            )
        grads, self._grads, self._is_given = self._grads, [], True
        if self._scaler is not None and n_scaled(self._scaler) > self._n_scaled:
            factor = factor / self._scaler.scale(torch.ones_like(factor))  # the step has multiplied by it
        for parameter, grad in zip(self._parameters, grads, strict=True):
            if grad is not None:
                add(parameter, grad.mul_(factor.to(grad.dtype)))
        inputs, self._inputs = self._inputs, []
        return [None if grad is None else grad * factor.to(grad.dtype) for grad in inputs]


class _Loss(torch.autograd.Function):
    """The loss, whose backward gives a step's gradients to the parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, made: _Gradients | None, *inputs: Tensor) -> Tensor:
        ctx.made = made
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise InputError(
                "the module was in evaluation mode, in which it makes no gradients: call module.train(), and "
                "eval() of the layers that are to evaluate; or module.runtime.step(...), which makes them in "
                "any mode"
            )
        return (None, None, None, *ctx.made.give(grads[0]))
