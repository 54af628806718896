"""Stages as a chain of modules that hand one another nothing but tensors, as other pipelines want them.

Which stages there are is left to ``stages``, who runs the chain to the other modules here.

A value that a later stage needs is handed on by those in between: gradients come back the same way. Numbers
and structures cross as tensors and are put together again on the other side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..stages import Stage
from ..stages.verify import undisturbed
from ..torch_private import pytree
from ..tracing import Capture

__all__ = ["Relay", "relays"]

FORM = "the form of the model"
"""What the number of the form that a microbatch asks for is called among the values that cross."""
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """How a value crosses: its structure, and per leaf None for a tensor, a number's type, or what it is."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> _Kind:
        leaves, structure = pytree.tree_flatten(value)
        return cls(structure, tuple(map(cls._leaf, leaves)))

    @staticmethod
    def _leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return None
        return type(leaf) if type(leaf) in NUMBERS else (leaf,)

    def pack(self, name: str, value: Any, device: torch.device) -> list[Tensor]:
        """The tensors that stand for it. Raises :class:`InputError` where it is of another kind now."""
        if _Kind.of(value) != self:
            raise InputError(
                f"{name} is not what it was for the example (its structure or a value in it that is neither "
                "tensor nor number); make the stages from an example like the batches, or run the split "
                "with pipe.runtime()"
            )
        leaves = pytree.tree_leaves(value)
        return [
            leaf if kind is None else torch.tensor(leaf, dtype=NUMBERS[kind], device=device)
            for leaf, kind in zip(leaves, self.leaves, strict=True)
            if not isinstance(kind, tuple)
        ]

    def unpack(self, tensors: Iterator[Tensor]) -> Any:
        """The value again."""
        leaves = [
            kind[0] if isinstance(kind, tuple) else next(tensors) if kind is None else next(tensors).item()
            for kind in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)


class Relay(nn.Module):
    """One stage as a module that takes the tensors of the one before and gives those that later ones need.

    The first takes what the model takes, and binds it as a call of the model does; the others take tensors
    in order and leave keywords alone. Several may come as one tuple, as DeepSpeed hands them on. The last
    gives the model's output where that is a tensor or a tuple of tensors, else the tensors in it, as a tuple.

    Attributes
    ----------
    stage: the stage, whose parameters are the model's own.
    takes, gives: names of the values that cross before and after it, in order.
    """

    def __init__(
        self,
        capture: Capture,
        stage: Stage,
        takes: tuple[str, ...],
        gives: tuple[str, ...],
        kinds: Mapping[str, _Kind],
    ) -> None:
        super().__init__()
        self.stage = stage
        self.takes, self.gives = takes, gives
        self._capture, self._kinds = capture, kinds
        super().train(stage.training)

    @property
    def is_last(self) -> bool:
        """Whether it gives the model's output."""
        return self.stage.is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The tensors of ``gives``, a lone one bare; of the last stage the model's output."""
        if len(args) == 1 and type(args[0]) is tuple and not self._takes_a_tuple:
            args = args[0]
        values = self._bound(args, kwargs) if self.stage.index == 0 else self._unpacked(args)
        form = values.get(FORM, 0)
        made = self.stage(*(values[name] for name in self.stage.inputs), form=form)
        if self.is_last:
            return _tensors(self._capture.assemble(made, self.stage.training))
        values.update(zip(self.stage.outputs, made, strict=True))
        device = self.stage._device
        flat = [t for n in self.gives for t in self._kinds[n].pack(n, values[n], device)]
        # a split backward of torch detaches in place what was given, which no view lets it do
        flat = [t.clone() if t.requires_grad and t._is_view() else t for t in flat]
        return flat[0] if len(flat) == 1 else tuple(flat)

    @property
    def _takes_a_tuple(self) -> bool:
        """Whether a lone tuple is the model's own argument."""
        given = self._capture.example[0]
        return self.stage.index == 0 and bool(given) and isinstance(given[0], tuple)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        values = _values(self._capture, args, kwargs)
        self._capture.assumptions.begin()
        return values

    def _unpacked(self, args: Sequence[Tensor]) -> dict[str, Any]:
        tensors = map(_entering, args)
        return {name: self._kinds[name].unpack(tensors) for name in self.takes}

    def extra_repr(self) -> str:
        return f"{', '.join(self.takes) or 'inputs'} -> {', '.join(self.gives) or 'output'}"


def _entering(tensor: Tensor) -> Tensor:
    """What a stage goes on with: not the leaf that was received, and the gradient of that contiguous.

    torch sends gradients as they come, and gloo takes none that is not contiguous.
    """
    if not tensor.requires_grad:
        return tensor
    taken = tensor.view_as(tensor)
    taken.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return taken


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The relays of a split, in order, and what each takes and gives of the example, as tensors."""

    relays: tuple[Relay, ...]
    examples: tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...]], ...]


def relays(
    capture: Capture, stages: Sequence[Stage], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Chain:
    """The stages as a chain, which one microbatch of ``args`` and ``kwargs`` is run through once.

    Parameters, buffers, gradients and random numbers are left as they were. Raises :class:`InputError` for a
    parameter of several stages, whose gradients a chain would not sum, and for a number that calls count
    with, which a chain would not set.
    """
    _check_ties(stages)
    if counts := capture.inputs.counts:
        raise InputError(
            f"{capture.ops.model} counts with {', '.join(f'self.{n}' for n in counts)} at each call, which "
            "stages of torch's do not set; train with pipe.runtime(), or count in a buffer"
        )
    names = _crossing(stages, capture.has_questions)
    made: list[Relay] = []
    examples: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    with undisturbed(capture.model), torch.enable_grad():
        values = _values(capture, args, dict(kwargs))
        given = tuple(t for t in pytree.tree_leaves(list(args)) if isinstance(t, Tensor))
        for stage, takes, gives in zip(stages, [(), *names], [*names, ()], strict=True):
            outputs = stage(*(values[n] for n in stage.inputs), form=values[FORM])
            values.update({} if stage.is_last else zip(stage.outputs, outputs, strict=True))
            kinds = {n: _Kind.of(values[n]) for n in (*takes, *gives)}
            relay = Relay(capture, stage, takes, gives, kinds)
            flat = [t for n in gives for t in kinds[n].pack(n, values[n], stage._device)]
            if stage.is_last:
                found = _tensors(capture.assemble(outputs))
                flat = [found] if isinstance(found, Tensor) else list(found)
            given_out = tuple(t.detach().requires_grad_(t.requires_grad) for t in flat)
            made.append(relay)
            examples.append((given, given_out))
            given = given_out
    return Chain(tuple(made), tuple(examples))


def _values(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call like the example by name, None for those of other kinds of calls, and its form."""
    values, form = capture.bound(args, kwargs)
    others = dict.fromkeys(name for kind in capture.kinds for name in kind.inputs.names if name is not None)
    return {**others, **values, FORM: form}


def _tensors(output: Any) -> Any:
    """A tensor or a tuple of tensors as it is; of anything else its tensors."""
    is_plain = isinstance(output, tuple) and all(isinstance(x, Tensor) for x in output)
    if isinstance(output, Tensor) or (is_plain and type(output) is tuple):
        return output
    leaves = tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return leaves[0] if len(leaves) == 1 else leaves


def _crossing(stages: Sequence[Stage], with_form: bool) -> list[tuple[str, ...]]:
    """What crosses each boundary: every value that a stage after it takes and none after it makes."""
    out = []
    for n in range(1, len(stages)):
        later = {name for stage in stages[n:] for name in stage.outputs}
        needed = dict.fromkeys(name for stage in stages[n:] for name in stage.inputs)
        out.append((*(name for name in needed if name not in later), *([FORM] if with_form else [])))
    return out


def _check_ties(stages: Sequence[Stage]) -> None:
    holder: dict[int, tuple[int, str]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            first, known = holder.setdefault(id(parameter), (stage.index, name))
            if first != stage.index:
                raise InputError(
                    f"{known} is used by stages {first} and {stage.index}, and only pipe.runtime() would sum "
                    f"its gradients; split with pin so that one stage has it all, such as "
                    f"pin={{{known.rpartition('.')[0]!r}: {stage.index}}}, or untie it"
                )
