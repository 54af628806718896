"""Parameters that several ranks hold: their gradients are summed once per step.

Which parameters are tied is read off the stages, and off a loss that has some of its own; when the sum is due
is left to ``runtime``.

After a sum every holder has the same gradient. Before the next step adds to it, all holders but the first
drop theirs: so the next sum counts what was there once, with ``zero_grad`` between steps or without. What is
frozen meanwhile keeps what it has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed import ReduceOp
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import InputError, StepError
from ...stages import Stage
from ..wire.group import Group
from .diverged import Diverged
from .hooks import is_hooked, n_hooks
from .sums import sum_gradients

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["Tie", "TieSum", "check_ties", "find_ties", "learned", "own_of"]


@dataclasses.dataclass(frozen=True)
class Tie:
    """A parameter of several ranks: its names in the stages, the ranks that hold it in order."""

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]


def find_ties(stages: Sequence[Stage]) -> tuple[Tie, ...]:
    """The parameters that stages of more than one rank hold."""
    holders: dict[int, tuple[str, nn.Parameter, set[int]]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            holders.setdefault(id(parameter), (name, parameter, set()))[2].add(stage.rank)
    return tuple(Tie(name, p, tuple(sorted(ranks))) for name, p, ranks in holders.values() if len(ranks) > 1)


def check_ties(capture: Capture, was: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Raise :class:`InputError` where captured ties are gone, or tensors apart in ``was`` are tied now."""

    def n_tensors(names: Iterable[str], held: Mapping[str, nn.Parameter]) -> int:
        return len({id(held[name]) for name in names if name in held})

    sharing: dict[int, list[str]] = {}
    for name, parameter in now.items():
        sharing.setdefault(id(parameter), []).append(name)
    parted = next((s.names for s in capture.ops.parameter.values() if n_tensors(s.names, now) > 1), ())
    joined = next((names for names in sharing.values() if n_tensors(names, was) > 1), ())
    if names := parted or joined:
        change = (
            "were one tensor when captured" if parted else "are one tensor only since the runtime was made"
        )
        raise InputError(
            f"{', '.join(names[:3])} of {capture.ops.model} {change}, and gradients are summed and weights "
            "saved by what was tied then; put that back, or tie the model as it is to be and call "
            "autopipe.split again"
        )


def learned(loss_fn: object, model: nn.Module, n_ranks: int) -> tuple[Tie, ...]:
    """What a loss may train beside the model: every rank holds it, and the one with the loss has gradients.

    What is frozen may be thawed later.
    """
    own = own_of(loss_fn, model) if n_ranks > 1 else []
    return tuple(Tie(name, p, tuple(range(n_ranks))) for name, p in own)


def own_of(loss_fn: object, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a loss has beside the model's, by names that none of the model's has."""
    found = list(loss_fn.named_parameters()) if isinstance(loss_fn, nn.Module) else []
    others = {id(p) for p in model.parameters()} if found else set()
    return [(f"loss_fn().{name}", p) for name, p in found if id(p) not in others]


_IN_PARTS = WeakIdKeyDictionary()
"""Of which holders have parts of the gradient, as since the last sum a step of some runtime added to it."""


class TieSum:
    """Sums the gradients of one rank's ties over the ranks that share them."""

    def __init__(
        self,
        ties: Sequence[Tie],
        rank: int,
        new_group: Callable[[str, tuple[int, ...]], Group],
        purpose: str,
    ) -> None:
        self._rank = rank
        self._groups: dict[tuple[int, ...], tuple[Group, list[nn.Parameter]]] = {}
        self._names: dict[tuple[int, ...], list[str]] = {}
        for ranks in sorted({t.ranks for t in ties if rank in t.ranks}):
            members = [t for t in ties if t.ranks == ranks]
            self._groups[ranks] = (new_group(purpose, ranks), [t.parameter for t in members])
            self._names[ranks] = [t.name for t in members]
        self._diverged = Diverged()

    def replace(self, replaced: Mapping[int, nn.Parameter]) -> None:
        """Sum the gradients of other parameters from now on: id of the old → the new."""
        for _, parameters in self._groups.values():
            for p in parameters:
                if id(p) in replaced and p in _IN_PARTS:
                    _IN_PARTS[replaced[id(p)]] = None
            parameters[:] = [replaced.get(id(p), p) for p in parameters]

    @property
    def is_whole(self) -> bool:
        """Whether no holder has a gradient that was not summed."""
        held = [p for _, parameters in self._groups.values() for p in parameters]
        return all(p.grad is None for p in held if p in _IN_PARTS)

    def compare(self) -> None:
        """Raise :class:`StepError` where holders have different values of a parameter, not only roundings.

        Of those that train: what a loss keeps frozen is read on one rank alone.
        """
        for ranks, (group, parameters) in self._groups.items():
            named = zip(self._names[ranks], parameters, strict=True)
            trained = {name: p for name, p in named if p.requires_grad}
            where = ", ".join(map(str, ranks))
            largest = functools.partial(group.all_reduce, op=ReduceOp.MAX)
            self._diverged.look(where, [*trained], [*trained.values()], largest)
        self._judge()

    def _judge(self) -> None:
        found = self._diverged.told()
        if found is not None:
            raise StepError(
                f"tied parameter {', '.join(found[1])} has different values on ranks {found[0]}; make "
                "the model with the same seed or checkpoint on every rank, and give its copies the same "
                "learning rate and weight decay"
            )

    def hooked(self) -> list[nn.Parameter]:
        """The parameters here that have hooks on their gradients."""
        return [p for _, parameters in self._groups.values() for p in parameters if is_hooked(p)]

    def n_hooks(self) -> dict[str, int]:
        """How many hooks on its gradient each parameter here has, by its name on every rank."""
        return {
            name: n_hooks(parameter)
            for ranks, (_, parameters) in self._groups.items()
            for name, parameter in zip(self._names[ranks], parameters, strict=True)
        }

    def before_step(self, *, has_hooks: bool = False) -> None:
        """Make the gradients of the last sum count once in the next.

        Where ranks ``has_hooks`` on some, those are whole before the step, and stay for what it adds to them.
        """
        self._judge()
        if has_hooks:
            self.after_step()
        for ranks, (_, parameters) in self._groups.items():
            for parameter in parameters:
                if parameter.requires_grad and parameter not in _IN_PARTS:
                    _IN_PARTS[parameter] = None
                    if ranks[0] != self._rank and not is_hooked(parameter):
                        parameter.grad = None

    def after_step(self) -> None:
        """Sum over the holders; a parameter that got no gradient anywhere keeps none."""
        for group, parameters in self._groups.values():
            sum_gradients([p for p in parameters if p in _IN_PARTS], group.all_reduce)
            for parameter in parameters:
                _IN_PARTS.pop(parameter, None)
