"""Training state beside the weights: optimizers by parameter name, objects with state, random streams.

Files are left to ``saving`` and ``loading``; here is what goes in, and how it is put back all or not at all.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, StoreError
from .loading import Checkpoint, Stored

__all__ = ["Restoring", "collect", "find_stored"]

ELEMENTWISE = frozenset(
    (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
    )
)
"""State that torch's optimizers keep for each element of a parameter."""


def collect(
    objects: Mapping[str, Any], named: Sequence[tuple[str, nn.Parameter]], device: torch.device
) -> dict[str, Any]:
    """This rank's training state as a tree of plain values and tensors.

    Raises :class:`InputError` for what has no ``state_dict``, or an optimizer of other parameters.
    """
    optimizers, others = {}, {}
    for key, thing in objects.items():
        if thing is None:
            continue
        if isinstance(thing, torch.optim.Optimizer):
            optimizers[key] = _of_optimizer(thing, named)
        elif callable(getattr(thing, "state_dict", None)):
            others[key] = thing.state_dict()
        else:
            raise InputError(f"{key} is a {type(thing).__name__}, which has no state_dict() to save")
    return {"optimizers": optimizers, "objects": others, "random": _random_state(device)}


def _of_optimizer(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, Any]:
    name_of = _names(optimizer, named)
    groups = [
        {**group, "params": [name_of[id(p)] for p in group["params"] if id(p) in name_of]}
        for group in optimizer.param_groups
    ]
    state = {name_of[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in name_of}
    return {"groups": groups, "state": state}


def _names(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """The name of each parameter by its id; a placeholder has none."""
    name_of = {id(p): name for name, p in named}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in own if id(p) not in name_of and not hasattr(p, "is_placeholder")]
    if foreign:
        raise InputError(
            f"the optimizer has parameters that are not this rank's, of shapes {foreign[:3]}; make it of "
            "runtime.parameters() or named_parameters()"
        )
    return name_of


def _random_state(device: torch.device) -> dict[str, Any]:
    """Of the user's own generators: torch's, Python's and numpy's; steps do not draw from them."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def find_stored(tree: Any) -> Iterator[Stored]:
    """Every stored tensor in a tree of state."""
    if isinstance(tree, Stored):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from find_stored(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from find_stored(item)


def _filled(tree: Any) -> Any:
    """The tree with every stored tensor read."""
    if isinstance(tree, Stored):
        return tree.read()
    if isinstance(tree, Mapping):
        made = copy.copy(tree)
        for key, item in tree.items():
            made[key] = _filled(item)  # type: ignore[index]
        return made
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(map(_filled, tree))
    return tree


class Restoring:
    """Training state of a checkpoint on its way into the user's objects.

    :meth:`check` finds what does not fit, :meth:`apply` puts everything in, :meth:`undo` takes it out again.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        objects: Mapping[str, Any],
        named: Sequence[tuple[str, nn.Parameter]],
        rank: int,
        names: Callable[[str], Sequence[str]],
    ) -> None:
        self._checkpoint, self._rank, self._names = checkpoint, rank, names
        self._named = named
        self._objects = {key: thing for key, thing in objects.items() if thing is not None}
        self._undo: list[Callable[[], None]] = []

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {k: o for k, o in self._objects.items() if isinstance(o, torch.optim.Optimizer)}

    def _state_of(self, key: str) -> Any:
        """An object's state: as this rank saved it, else as the first that did."""
        states = self._checkpoint.states
        for state in (*states[self._rank : self._rank + 1], *states):
            if key in state.get("objects", {}):
                return state["objects"][key]
        return None

    def _saved(self, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state, group) of an optimizer by parameter name, whichever ranks saved them."""
        state: dict[str, Any] = {}
        group_of: dict[str, Any] = {}
        for each in self._checkpoint.states:
            found = each.get("optimizers", {}).get(key, {})
            state = {**found.get("state", {}), **state}
            group_of = {n: g for g in found.get("groups", ()) for n in g["params"]} | group_of
        return state, group_of

    def stored(self) -> list[Stored]:
        """The tensors of state that this rank is going to read."""
        wanted = []
        for key in self.optimizers:
            state, _ = self._saved(key)
            wanted += [state.get(self._found(state, name)) for name, _ in self._named]
        others = [self._state_of(key) for key in self._objects if key not in self.optimizers]
        return list(find_stored([wanted, others, self._random()]))

    def _found(self, saved: Mapping[str, Any], name: str) -> str:
        """The name a parameter was saved under: its own or another of a tied one."""
        return next((alias for alias in (name, *self._names(name)) if alias in saved), name)

    def _random(self) -> dict[str, Any]:
        states = self._checkpoint.states
        own = [*states[self._rank : self._rank + 1], *states][:1]
        return own[0].get("random", {}) if own else {}

    def check(self) -> list[str]:
        """In words, what the checkpoint lacks or has otherwise."""
        faults = []
        for key, optimizer in self.optimizers.items():
            state, group_of = self._saved(key)
            if not group_of:
                faults.append(f"it holds no state of {key}")
                continue
            name_of = _names(optimizer, self._named)
            own = {name_of[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in name_of}
            absent = [name for name in own if self._found(group_of, name) not in group_of]
            if absent:
                faults.append(f"{key} has no state for {', '.join(absent[:4])}")
            for name, parameter in own.items():
                entries = state.get(self._found(state, name), {})
                faults += [
                    f"{key}'s {kind} of {name} is {value.spec} there, the parameter {list(parameter.shape)}"
                    for kind, value in entries.items()
                    if kind in ELEMENTWISE and isinstance(value, Stored)
                    if value.spec.shape != tuple(parameter.shape)
                ]
        missing = [k for k in self._objects if k not in self.optimizers and self._state_of(k) is None]
        return faults + [f"it holds no state of {key}" for key in missing]

    def apply(self) -> None:
        """Put all state in; whatever a ``load_state_dict`` raises says that it did not fit."""
        for key, thing in self._objects.items():
            try:
                if isinstance(thing, torch.optim.Optimizer):
                    self._apply_optimizer(key, thing)
                else:
                    before = copy.deepcopy(thing.state_dict())
                    self._undo.append(functools.partial(thing.load_state_dict, before))
                    thing.load_state_dict(_filled(self._state_of(key)))
            except StoreError:
                raise
            except Exception as error:  # the object's own, of whatever kind
                raise StoreError(
                    f"{key} does not take the state saved for it: {type(error).__name__}: {error}"
                ) from error

    def _apply_optimizer(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        state, group_of = self._saved(key)
        name_of = _names(optimizer, self._named)
        flat = [(name_of.get(id(p), ""), p) for group in optimizer.param_groups for p in group["params"]]
        made: dict[int, dict[str, Any]] = {}
        read: dict[str, Tensor] = {}
        stored: dict[str, Stored] = {}
        for i, (name, parameter) in enumerate(flat):
            entries = state.get(self._found(state, name)) if name else None
            if entries is None:
                continue
            made[i] = dict(entries)
            for kind, value in entries.items():
                if isinstance(value, Stored):
                    made[i][kind] = read[f"{i}/{kind}"] = _place_for(value, parameter)
                    stored[f"{i}/{kind}"] = value
        self._checkpoint.read(read, stored)
        numbers = iter(range(len(flat)))
        groups = []
        for own in optimizer.param_groups:
            name = name_of.get(id(own["params"][0]), "") if own["params"] else ""
            saved = group_of.get(self._found(group_of, name), own)
            groups.append(
                {**_filled({**saved, "params": 0}), "params": [next(numbers) for _ in own["params"]]}
            )
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        self._undo.append(functools.partial(optimizer.__setstate__, before))
        optimizer.load_state_dict({"state": made, "param_groups": groups})

    def apply_random(self, device: torch.device) -> None:
        """Put the user's random generators where they were."""
        found = _filled(self._random())
        if "torch" in found:
            torch.set_rng_state(found["torch"])
        if "python" in found:
            random.setstate(found["python"])
        if "numpy" in found and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(found["numpy"])
        if "device" in found and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(found["device"], device)

    def undo(self) -> None:
        """Put every object back as it was before :meth:`apply`."""
        while self._undo:
            self._undo.pop()()


def _place_for(value: Stored, parameter: nn.Parameter) -> Tensor:
    """Memory for a state tensor: sharded as its parameter where it has the same shape."""
    if hasattr(parameter, "device_mesh") and value.spec.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=value.spec.dtype, requires_grad=False)
    device = parameter.device if value.spec.shape == tuple(parameter.shape) else "cpu"
    return torch.empty(value.spec.shape, dtype=value.spec.dtype, device=device)
