"""An optimizer's state by parameter name: its own, or what its class makes a ``state_dict`` of.

When it is saved and put back is left to ``training_state``, moving it between ranks to ``weight_moves``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...torch_private import pytree
from ..files.stored_tensor import Stored
from ..reduce.refusals import OF

__all__ = ["LISTED", "as_saved", "is_torchs_way", "named_state", "names_in", "place_for"]

LISTED = ("params", "param_names")
"""What is a group's own whatever else it has in common with another."""


def named_state(
    optimizer: torch.optim.Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    elsewhere: Collection[int],
    *,
    is_kept: bool,
) -> dict[str, Any]:
    """Its kind, its groups with names in the place of parameters, and its state by name.

    ``elsewhere`` are the ids of parameters that other ranks train. Where ``is_kept`` is False another
    replica's is saved, and this one only helps to bring it together.

    Raises :class:`InputError` for an optimizer of other parameters, or whose own ``state_dict`` is not laid
    out as torch's are; that may raise anything.
    """
    name_of = names_in(optimizer, named, elsewhere)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    state: Mapping[Any, Any] = optimizer.state
    if not is_torchs_way(optimizer):
        found: Mapping[str, Any] | None = None
        try:
            found = optimizer.state_dict()
        except RuntimeError:  # what is sharded may be brought together on the first replica alone
            if is_kept:
                raise
        if found is not None:
            if not _is_by_number(found, len(own)):
                raise InputError(
                    f"{type(optimizer).__name__} lays out its state_dict in a way of its own "
                    f"({', '.join(map(str, found))}), not by parameter alone; keep it in an object that is "
                    "no optimizer, whose state_dict() and load_state_dict() call its: each rank gets its own"
                )
            groups = [{**g, "params": [own[i] for i in g["params"]]} for g in found["param_groups"]]
            state = {own[i]: kept for i, kept in found["state"].items()}
    return {
        "kind": type(optimizer).__qualname__,
        "groups": [
            {**g, "params": [name_of[id(p)] for p in g["params"] if id(p) in name_of]} for g in groups
        ],
        "state": {name_of[id(p)]: dict(kept) for p, kept in state.items() if kept and id(p) in name_of},
    }


def is_torchs_way(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``state`` is all there is: a class with a ``state_dict`` of its own may keep it elsewhere."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _is_by_number(found: Mapping[str, Any], n_parameters: int) -> bool:
    """Whether a ``state_dict`` is laid out as torch's optimizers lay theirs out, and has no more."""
    state, groups = found.get("state"), found.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return False
    if found.keys() - {"state", "param_groups", OF}:
        return False
    numbers = [*state, *(i for group in groups for i in group.get("params", ()))]
    return all(type(i) is int and 0 <= i < n_parameters for i in numbers)


def names_in(
    optimizer: torch.optim.Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    elsewhere: Collection[int] = (),
) -> dict[int, str]:
    """The name of each parameter by its id; a placeholder has none, nor what other ranks train.

    Raises :class:`InputError` for parameters that are neither.
    """
    name_of = {id(p): name for name, p in named}
    held = (p for group in optimizer.param_groups for p in group["params"])
    others = [p for p in held if id(p) not in name_of and id(p) not in elsewhere]
    foreign = [tuple(p.shape) for p in others if not hasattr(p, "is_placeholder")]
    if foreign:
        raise InputError(
            f"the optimizer has parameters that are not this rank's, of shapes {foreign[:3]}; make it of "
            "runtime.parameters() or named_parameters()"
        )
    return name_of


def as_saved(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
    """Undo what ``load_state_dict`` rounds to the parameter's dtype: fp32 moments of bf16, quantised ones.

    A class with a way of its own is left with what it made of them.
    """
    if not is_torchs_way(optimizer):
        return
    state, device = optimizer.state.get(parameter, {}), parameter.device

    def put(tensor: Any) -> Any:
        return tensor.to(device) if isinstance(tensor, Tensor) else tensor

    for kind, value in saved.items():
        found = state.get(kind)
        if not isinstance(value, Tensor):
            state[kind] = pytree.tree_map(put, value)
        elif isinstance(found, Tensor) and found.dtype != value.dtype:
            state[kind] = value.to(found.device)


def place_for(value: Stored, parameter: nn.Parameter) -> Tensor:
    """Memory for a state tensor: sharded as its parameter where it has the same shape."""
    if hasattr(parameter, "device_mesh") and value.spec.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=value.spec.dtype, requires_grad=False)
    device = parameter.device if value.spec.shape == tuple(parameter.shape) else "cpu"
    return torch.empty(value.spec.shape, dtype=value.spec.dtype, device=device)
