"""Losses as transformers' Trainer makes them: of smoothed labels, over the pieces of an accumulated batch.

The loop around them is left to ``trainer``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..stages.verify import undisturbed
from ..torch_private import pytree
from .adapters import has_adapters, has_prompts

__all__ = ["Smoothed", "first_compared", "n_compared", "smoothed", "takes_count"]

IGNORED = -100
COUNT = "num_items_in_batch"


def first_compared(model: nn.Module) -> int | None:
    """The position of a row from which on transformers' causal loss compares labels; None: it has another.

    Each label is compared with the position before it, which the first one has behind a learned prompt alone.
    """
    inner: Any = model.get_base_model() if has_adapters(model) else model  # type: ignore[operator]
    is_encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if is_encoder_decoder or getattr(inner, "loss_function", None) is not ForCausalLMLoss:
        return None
    return 0 if has_prompts(model) else 1


def n_compared(labels: Tensor, first: int) -> int:
    """How many ``[..., positions]`` labels a loss compares, from the ``first`` of each row on."""
    return int((labels[..., first:] != IGNORED).sum())


class Smoothed:
    """Cross entropy of smoothed labels, as a runtime's ``loss_fn``; its ``weight`` is the ``loss_weight``.

    What transformers' ``LabelSmoother`` gives: the mean over labels that are not -100, each of which a causal
    model (``shifts``) compares with the position before it.
    """

    def __init__(self, factor: float, *, shifts: bool) -> None:
        self._factor, self._shifts = factor, shifts

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        logits = output["logits"] if isinstance(output, Mapping) else _first_logits(output)
        logits = logits[..., :-1, :] if self._shifts else logits
        compared = self._compared(labels)
        total = cross_entropy(
            logits.flatten(0, -2),
            compared.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self._factor,
        )
        return total / (compared != IGNORED).sum().clamp(min=1)

    def weight(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Tensor) -> float:
        """How many labels of a microbatch count."""
        return float((self._compared(labels) != IGNORED).sum())

    def _compared(self, labels: Tensor) -> Tensor:
        return labels[..., 1:] if self._shifts else labels


def smoothed(model: Any, args: TrainingArguments) -> Smoothed | None:
    """The loss of smoothed labels, where the Trainer makes it of this model."""
    config = getattr(model, "config", None)
    is_multiple = getattr(config, "problem_type", None) == "multi_label_classification"
    if not args.label_smoothing_factor or is_multiple:
        return None
    inner = model.get_base_model() if has_adapters(model) else model
    is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return Smoothed(args.label_smoothing_factor, shifts=is_causal)


def _first_logits(output: Any) -> Tensor:
    """Of a tuple, which may begin with a loss."""
    found: Tensor = next(x for x in output if isinstance(x, Tensor) and x.ndim > 1)
    return found


class _Asked(Tensor):
    """A number that notes whether anything was made of it."""

    was_used = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, dict(kwargs or {}))):
            if isinstance(leaf, _Asked):
                leaf.was_used = True
        return super().__torch_function__(func, types, args, dict(kwargs or {}))


_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def takes_count(model: nn.Module, example: tuple[tuple[Any, ...], Mapping[str, Any]]) -> bool:
    """Whether a model's loss is divided by the number of items that the Trainer hands it.

    Some take it among other keywords and make nothing of it: theirs is the mean over a piece, and the Trainer
    adds such means up. Found by handing one over, with two rows of the example. A model on the meta device
    has nothing to run on, and is taken to use it.
    """
    if model not in _known:
        args, kwargs = example
        is_meta = any(p.is_meta for p in model.parameters())
        _known[model] = is_meta or _uses_count(model, *_two_rows(args, dict(kwargs)))
    return _known[model]


def _uses_count(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    takes = inspect.signature(model.forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD or p.name == COUNT for p in takes):
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    asked = torch.ones((), dtype=torch.int64, device=device).as_subclass(_Asked)
    with undisturbed(model), torch.no_grad():
        model(*args, **{**kwargs, COUNT: asked})
    return asked.was_used


def _two_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.ndim]
    n_rows = tensors[0].shape[0] if tensors else 0
    cut = [x[:2] if isinstance(x, Tensor) and x.ndim and x.shape[0] == n_rows else x for x in leaves]
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(cut, structure)
    return found
