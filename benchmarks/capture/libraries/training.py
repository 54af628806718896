"""Two steps of a runtime in microbatches, held against the plain model's loss and gradients.

Capturing and comparing outputs are left to ``walk``; what counts as equal to ``tests.zoo.observe``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopipe
from autopipe.stages import find_loss
from benchmarks.capture.inputs import Sizes
from tests.zoo.observe import Observation, difference, leaves, seed

__all__ = ["steps"]

BATCHES = (Sizes(4, 32), Sizes(5, 32))
"""What is stepped on; two microbatches of the second are uneven."""
Inputs = Callable[[Sizes], tuple[tuple[Any, ...], dict[str, Any]]]


def steps(model: nn.Module, pipe: autopipe.Pipe, inputs: Inputs) -> tuple[bool | None, str]:
    """Whether two steps give the plain model's losses and gradients, and else what is wrong, in words.

    Of a model that returns no scalar loss, its first output is one where it is a single number, and else the
    mean square of that. The mode is training, but
    evaluation where the model draws there, since microbatches draw otherwise, or mixes rows there alone, as
    batch norm does, of which a step warns. None where the plain model does not run on these batches, gives
    other losses when it is asked again, or draws in evaluation too. Gradients of narrow types are rounded
    microbatch by microbatch.
    """
    try:
        variation = pipe.graph.variation
        mixes = variation.mixing.training or variation.tail.before
        is_training = not (mixes or _draws(model.train(), inputs))
        if not is_training and _draws(model.eval(), inputs):
            return None, ""
        model.train(is_training)
        own, wanted = _plain(model, inputs)
        if any(map(difference, wanted, _plain(model, inputs)[1])):
            return None, ""
    except Exception:  # whatever it is: then the model itself takes no such batches
        model.eval()
        return None, ""
    try:
        rtol = max([1e-4, *(2 * torch.finfo(p.dtype).eps for p in model.parameters() if p.requires_grad)])
        got = _stepped(model, pipe, inputs, own)
        problem = next(filter(None, (difference(a, b, rtol) for a, b in zip(wanted, got, strict=True))), "")
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()
    return not problem, problem and f"{'train' if is_training else 'eval'}: {problem}"


def _draws(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model gives another loss or other gradients under another seed.

    Gradients too: an adapter's dropout goes unseen in outputs as long as what it is multiplied with is zero.
    """
    return any(map(difference, _plain(model, inputs)[1], _plain(model, inputs, first_seed=1)[1]))


def _plain(model: nn.Module, inputs: Inputs, first_seed: int = 0) -> tuple[bool, list[Observation]]:
    """Whether the model returns its loss, and the loss and gradients of each batch."""
    observed = []
    is_own = False
    for sizes in BATCHES:
        model.zero_grad(set_to_none=True)
        args, kwargs = inputs(sizes)
        seed(first_seed)
        output = model(*args, **kwargs)
        loss = find_loss(output)
        is_own = loss is not None
        loss = _made(output) if loss is None else loss
        loss.backward()
        observed.append(_observation(model, loss))
    return is_own, observed


def _stepped(model: nn.Module, pipe: autopipe.Pipe, inputs: Inputs, is_own: bool) -> list[Observation]:
    observed = []
    runtime = pipe.runtime(None if is_own else lambda output, _: _made(output), n_microbatches=2)
    for sizes in BATCHES:
        model.zero_grad(set_to_none=True)
        args, kwargs = inputs(sizes)
        seed()
        observed.append(_observation(model, runtime.step(*args, **kwargs).loss))
    return observed


def _made(output: Any) -> torch.Tensor:
    """The loss that is made of an output: a single number is a mean already, of which no square is one."""
    first = next(t for _, t in leaves(output) if t.is_floating_point() or t.is_complex())
    if first.numel() == 1 and first.is_floating_point():
        return first.reshape(())
    return first.abs().square().mean()


def _observation(model: nn.Module, loss: torch.Tensor) -> Observation:
    return Observation({"loss": loss.detach()}, {n: p.grad for n, p in model.named_parameters()}, {})
