"""Holds a pipeline against its model: outputs, loss and every gradient, and the first op that differs.

Building the stages is left to ``build``; running them over ranks to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import number, whole
from ..errors import AutopipeError, InputError, ModelError, VerificationError
from ..tracing import preserved
from ..tracing.inputs.caches import switched_off
from ..tracing.inputs.held_numbers import divided
from ..tracing.inputs.structure import flatten, unflatten
from ..tracing.members import submodule
from ..tracing.state.example_data import hooks_kept_back
from .build import renewed
from .gradients import making
from .losses import find_loss

if TYPE_CHECKING:
    from ..tracing import Capture
    from .stage import Stage

__all__ = ["Parity", "relative_error", "run_stages", "run_values", "tensors_of", "undisturbed", "verify"]


@dataclasses.dataclass(frozen=True, slots=True)
class Parity:
    """How far the pipeline is from the model, each as the largest absolute difference over the largest value.

    ``gradients`` counts the parameters compared; ``loss`` is the model's own loss, or the seeded projection
    of its outputs that stood in for one.
    """

    outputs: int
    gradients: int
    loss: float
    max_output_error: float
    max_loss_error: float
    max_gradient_error: float

    def __str__(self) -> str:
        outputs = f"{self.outputs} output{'s' * (self.outputs != 1)}"
        gradients = f"{self.gradients} gradient{'s' * (self.gradients != 1)}"
        return (
            f"equal: {outputs} within {self.max_output_error:.1e}, loss {self.loss:.6g} within "
            f"{self.max_loss_error:.1e}, {gradients} within {self.max_gradient_error:.1e}"
        )


def run_stages(capture: Capture, stages: Sequence[Stage], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """All stages in turn in this process, on inputs of any kind; the model's flat output leaves."""
    kind, values = capture.kind_met(args, kwargs)
    form = kind.form_met(values)
    kind.assumptions.begin()
    return run_values(renewed(capture, tuple(stages)), values, form)


def run_values(stages: Sequence[Stage], inputs: Mapping[str, Any], form: int) -> tuple[Any, ...]:
    """All stages in turn on bound inputs, which ask for ``form``; the model's flat output leaves."""
    values = dict(inputs)
    for stage in stages:
        given = stage(*map(values.get, stage.inputs), form=form)  # no call has inputs of all kinds
        values.update(zip(stage.outputs, given, strict=not stage.is_last))
    return tuple(given)


def verify(
    capture: Capture,
    stages: Sequence[Stage],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    rtol: float | None = None,
    seed: int = 0,
) -> Parity:
    """Run model and stages on the same inputs with the same random numbers and compare everything.

    The model's mode is used as it is, and gradients are made under ``torch.no_grad`` too; buffers, gradients,
    those of the inputs included, attributes, what else its code reaches and random generators are put back.
    ``rtol`` is relative to the largest value of each tensor: by default 1e-5 for fp32, 1e-10 for fp64, 2e-2
    below.

    Raises :class:`VerificationError` naming the first op that differs, :class:`InputError` for a model on the
    meta device, :class:`ModelError` where the model itself fails.
    """
    if rtol is not None:
        rtol = number("rtol", rtol)
    seed = whole("seed", seed, 0, 2**63 - 1)
    model = capture.model
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise InputError(
            "the model is on the meta device and has no values to compare; verify one that was made on a "
            "real device, a smaller one of the same code perhaps"
        )
    args, kwargs = capture.arguments(args, kwargs)
    kwargs, _ = divided(kwargs)  # numbers in attributes are there for the model and the stages alike

    def ours(*args: Any, **kwargs: Any) -> Any:
        leaves = run_stages(capture, stages, args, kwargs)
        return capture.kind_of(args, kwargs)[0].assemble(leaves)

    with torch.inference_mode(False), torch.enable_grad():
        with undisturbed(model), switched_off(model):
            expected = _expected(model, _own(args, kwargs), seed)
        with undisturbed(model), capture.assumptions.aside():
            got = _observe(model, ours, _own(args, kwargs), seed)
        return _compare(expected, got, rtol, lambda: _first_difference(capture, args, kwargs, seed))


def _own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors that require gradients cut off from what they were made of.

    Backward then leaves neither gradients in the caller's tensors nor a used-up graph behind them.
    """
    leaves, spec = flatten((args, kwargs))
    cut: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in cut:
            fresh = leaf.detach().requires_grad_()
            cut[id(leaf)] = fresh if leaf.is_leaf else fresh.view_as(fresh)
    return unflatten(spec, [cut.get(id(leaf), leaf) for leaf in leaves])


@dataclasses.dataclass(frozen=True, slots=True)
class _Observed:
    outputs: tuple[Any, ...]
    loss: Tensor
    gradients: Mapping[str, Tensor | None]


def _observe(
    model: nn.Module, run: Callable[..., Any], given: tuple[tuple[Any, ...], dict[str, Any]], seed: int
) -> _Observed:
    model.zero_grad(set_to_none=True)
    _seed(seed)
    output = run(*given[0], **given[1])
    leaves = tensors_of(output)
    loss = find_loss(output)
    if loss is None or not loss.requires_grad:
        loss = _projection(leaves, seed)
    if loss.requires_grad:
        with making(), hooks_kept_back(model.parameters()):
            loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return _Observed(tuple(leaf.detach() for leaf in leaves), loss.detach(), gradients)


def _expected(model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], seed: int) -> _Observed:
    """What the model itself shows."""
    try:
        return _observe(model, model, given, seed)
    except AutopipeError:
        raise
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise ModelError(
            f"{type(model).__name__}'s own forward or backward fails on these inputs: "
            f"{type(error).__name__}: {said}; verify with inputs that it trains on"
        ) from error


def _seed(seed: int) -> None:
    """Seed the generators that a model may draw from: torch's, Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def _projection(leaves: Sequence[Tensor], seed: int) -> Tensor:
    """A scalar that every differentiable output moves: a seeded random projection."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for leaf in leaves:
        if not leaf.requires_grad:
            continue
        leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        if leaf.numel():
            weights = torch.rand(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
            total = total.to(leaf.device) + (leaf.double() * weights.to(leaf.device)).mean()
    return total


def tensors_of(output: Any) -> list[Tensor]:
    """Every tensor of a nested output, in order; dataclasses and mappings included."""
    return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]


def _compare(
    expected: _Observed, got: _Observed, rtol: float | None, first_difference: Callable[[], str]
) -> Parity:
    if len(expected.outputs) != len(got.outputs):
        raise VerificationError(
            f"the model returns {len(expected.outputs)} tensors, the pipeline {len(got.outputs)}"
        )
    faults: list[str] = []

    def largest(pairs: list[tuple[str, Any, Any]]) -> float:
        worst = 0.0
        for name, a, b in pairs:
            error, allowed = relative_error(a, b), rtol if rtol is not None else _tolerance(a)
            worst = max(worst, error)
            if not error <= allowed:
                faults.append(f"{name} differs by {error:.2e} (allowed {allowed:.0e})")
        return worst

    outputs = largest(
        [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(expected.outputs, got.outputs, strict=True))]
    )
    loss = largest([("loss", expected.loss, got.loss)])
    gradients = largest([(f"gradient of {n}", g, got.gradients[n]) for n, g in expected.gradients.items()])
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise VerificationError(
            f"the pipeline is not equal to the model: {'; '.join(faults[:3])}{more}; {first_difference()}"
        )
    counted = sum(g is not None for g in expected.gradients.values())
    return Parity(
        outputs=len(expected.outputs),
        gradients=counted,
        loss=float(expected.loss),
        max_output_error=outputs,
        max_loss_error=loss,
        max_gradient_error=gradients,
    )


def relative_error(a: Tensor | None, b: Tensor | None) -> float:
    """Largest absolute difference over the largest value; infinite for another shape, dtype or None."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.layout is not torch.strided:  # as gradients of embeddings may be
        a, b = a.to_dense(), b.to_dense()
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    same_nan = torch.isnan(a) & torch.isnan(b)
    equal = same_nan | (a == b)
    difference = torch.where(equal, torch.zeros((), dtype=torch.float64, device="cpu"), (a - b).abs())
    scale = torch.where(
        torch.isfinite(a.abs()), a.abs(), torch.zeros((), dtype=torch.float64, device="cpu")
    ).max()
    worst = float(difference.max())
    return float("inf") if worst != worst else worst / max(float(scale), 1e-12)


def _tolerance(a: Tensor | None) -> float:
    if a is None or a.dtype in (torch.float64, torch.complex128):
        return 1e-10
    return 1e-5 if a.dtype in (torch.float32, torch.complex64) else 2e-2


def _first_difference(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> str:
    """The first leaf module whose output differs between the model and its captured graph."""
    model = capture.model
    names = {id(m): n for n, m in model.named_modules()}

    def record(run: Callable[[], Any]) -> list[tuple[str, list[Tensor]]]:
        seen: list[tuple[str, list[Tensor]]] = []

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            seen.append((names[id(module)], [t.detach().clone() for t in tensors_of(output)]))

        targets = {str(n.target) for n in capture.graphs[model.training].nodes if n.op == "call_module"}
        with undisturbed(model), torch.no_grad():  # which takes these hooks off as well
            for target in sorted(targets):
                submodule(model, target).register_forward_hook(hook)
            _seed(seed)
            run()
        return seen

    eager = record(lambda: model(*args, **kwargs))
    ours = record(lambda: capture(*args, **kwargs))
    for (name, a), (other, b) in zip(eager, ours, strict=False):
        if name != other:
            return f"the model calls {name} where the captured graph calls {other}"
        if len(a) != len(b) or any(relative_error(x, y) > _tolerance(x) for x, y in zip(a, b, strict=True)):
            return f"the first op that differs is {name}"
    return "no leaf module's forward differs, so the difference is in glue code or in the backward"


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers, attributes, what else the model's code reaches and the random state back."""
    with preserved(model):
        yield
