"""Training state beside the weights: optimizers by parameter name, objects with state, random streams.

Files are left to ``saving`` and ``loading``; here is what goes in, and how it is put back all or not at all.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import logging
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import InputError, StoreError
from ..files.stored_tensor import Stored
from .optimizer_extras import held_beside, left_out, shared, snapshot
from .optimizer_state import LISTED, as_saved, is_torchs_way, named_state, names_in, place_for
from .replica_state import ALONE, Replica
from .state_by_group import by_group
from .state_by_weight import NOTHING, Holding, by_position, fitting

if TYPE_CHECKING:
    from .loading import Checkpoint

__all__ = ["Restoring", "collect", "filled", "find_stored"]

_logger = logging.getLogger(__name__)

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
    objects: Mapping[str, Any],
    named: Sequence[tuple[str, nn.Parameter]],
    device: torch.device,
    extras: Mapping[str, nn.Module] | None = None,
    *,
    elsewhere: Collection[int] = (),
    is_kept: bool = True,
) -> dict[str, Any]:
    """This rank's training state as a tree of plain values and tensors.

    ``extras`` are the modules whose ``get_extra_state`` it saves, ``elsewhere`` the ids of parameters that
    other ranks train. ``is_kept`` is False where optimizers are another replica's to save.

    Raises :class:`InputError` for what has no ``state_dict``, or an optimizer of other parameters.
    """
    optimizers, others = {}, {}
    check_made(objects)
    for key, thing in objects.items():
        if thing is None:
            continue
        if isinstance(thing, torch.optim.Optimizer):
            optimizers[key] = named_state(thing, named, elsewhere, is_kept=is_kept)
            _check_whole(key, thing, objects)
        elif callable(getattr(thing, "state_dict", None)):
            others[key] = thing.state_dict()
        else:
            raise InputError(
                f"{key} is a {type(thing).__name__}, which has no state_dict() to save; give an object "
                "that has it and load_state_dict(), or leave it out"
            )
    kept = {name: module.get_extra_state() for name, module in (extras or {}).items()}
    return {"optimizers": optimizers, "objects": others, "random": _random_state(device), "extras": kept}


def check_made(objects: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` for a class in the place of what it makes."""
    for key, thing in objects.items():
        if isinstance(thing, type):
            raise InputError(f"{key} is the class {thing.__name__}; give the object that was made of it")


def _check_whole(key: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` where an optimizer keeps what its ``state_dict`` does not tell."""
    if not is_torchs_way(optimizer):
        return
    if at := left_out(optimizer, objects.values()):
        raise InputError(
            f"{key}, a {type(optimizer).__name__}, is made around an optimizer in .{at}, whose state its own "
            f"state_dict leaves out; give that one too, under a name of its own: inner={key}.{at}"
        )
    if at := held_beside(optimizer):
        raise InputError(
            f"{key}, a {type(optimizer).__name__}, keeps numbers of its parameters in .{at}, which its "
            "state_dict leaves out; keep them in its state, or give it a state_dict that tells them"
        )


def _random_state(device: torch.device) -> dict[str, Any]:
    """Of the user's own generators: torch's, Python's and numpy's; steps do not draw from them."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def _set_random(device: torch.device, found: Mapping[str, Any]) -> None:
    """Put the user's random generators where they were."""
    if "torch" in found:
        torch.set_rng_state(found["torch"])
    if "python" in found:
        random.setstate(found["python"])
    if "numpy" in found and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(found["numpy"])
    if "device" in found and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(found["device"], device)


def find_stored(tree: Any) -> Iterator[Stored]:
    """Every stored tensor in a tree of state."""
    if isinstance(tree, Stored):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from find_stored(item)
    elif isinstance(tree, (list, tuple, collections.deque)):
        for item in tree:
            yield from find_stored(item)


def filled(tree: Any) -> Any:
    """The tree with every stored tensor read."""
    if isinstance(tree, Stored):
        return tree.read()
    if isinstance(tree, Mapping):
        made = copy.copy(tree)
        for key, item in tree.items():
            made[key] = filled(item)  # type: ignore[index]
        return made
    if isinstance(tree, collections.deque):
        return collections.deque(map(filled, tree), tree.maxlen)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(map(filled, tree))
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
        *,
        extras: Mapping[str, nn.Module] | None = None,
        replica: Replica = ALONE,
        device: torch.device | None = None,
        holding: Holding = NOTHING,
        elsewhere: Collection[int] = (),
    ) -> None:
        """``extras`` are the modules that keep state beside their tensors, ``elsewhere`` the ids of
        parameters that other ranks train; random generators are restored where there is a ``device``."""
        self._checkpoint, self._rank, self._names = checkpoint, rank, names
        self._extras, self._replica, self._device = extras or {}, replica, device
        self._holding = holding
        self._named, self._elsewhere = named, elsewhere
        check_made(objects)
        self._objects = {key: thing for key, thing in objects.items() if thing is not None}
        self._undo: list[tuple[str, Callable[[], None]]] = []

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {k: o for k, o in self._objects.items() if isinstance(o, torch.optim.Optimizer)}

    def _names_in(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        return names_in(optimizer, self._named, self._elsewhere)

    def _state_of(self, key: str) -> Any:
        """An object's state: as this rank saved it, else as the first that did; each replica its own.

        What it keeps by weights' names, or for each group of an optimizer that is given too, is of those of
        this rank, whichever rank had them then.
        """
        savers, trees = self._saved_of(key)
        if not trees:
            return None
        thing, holdings = self._objects[key], [self._holding.of(saver) for saver in savers]
        found = fitting(trees, holdings, self._holding, thing.state_dict)
        held = [*getattr(thing, "__dict__", {}).values()]
        of = next((k for k, o in self.optimizers.items() if any(value is o for value in held)), None)
        if of is None or found is not trees[0]:
            return found
        groups = [s.get("optimizers", {}).get(of, {}).get("groups", ()) for s in savers]
        name_of = self._names_in(self.optimizers[of])
        return by_group(
            trees,
            [[group["params"] for group in each] for each in groups],
            [
                [name_of[id(p)] for p in group["params"] if id(p) in name_of]
                for group in self.optimizers[of].param_groups
            ],
            thing.state_dict(),
            self._names,
        )

    def _saved_of(self, key: str) -> tuple[list[dict[str, Any]], list[Any]]:
        """What ranks saved that have an object's state, and that: this rank's first, then in their order."""
        states = self._checkpoint.states
        here = [*states[self._rank : self._rank + 1], *states[: self._rank], *states[self._rank + 1 :]]
        found = [state for state in here if key in state.get("objects", {})]
        return found, [self._replica.own(s, "objects").get(key, s["objects"][key]) for s in found]

    def _is_by_position(self, key: str) -> bool:
        savers, trees = self._saved_of(key)
        return bool(trees) and by_position(trees[0], self._holding.of(savers[0]), self._holding)

    def _saved(self, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state, group) of an optimizer by parameter name, whichever ranks saved them."""
        state: dict[str, Any] = {}
        group_of: dict[str, Any] = {}
        for found in self._checkpoint.optimizer_states(key):
            state = {**found.get("state", {}), **state}
            group_of = {n: g for g in found.get("groups", ()) for n in g["params"]} | group_of
        return state, group_of

    def stored(self) -> list[Stored]:
        """The tensors of state that this rank is going to read."""
        wanted: list[Any] = []
        for key in self.optimizers:
            state, groups = self._saved(key)
            wanted += [{k: v for k, v in g.items() if k not in LISTED} for g in groups.values()]
            wanted += self._numbered(key)
            wanted += [state.get(self._found(state, name)) for name, _ in self._named]
        others = [self._state_of(key) for key in self._objects if key not in self.optimizers]
        others += [self._checkpoint.extras.get(name) for name in self._extras]
        return list(find_stored([wanted, others, self._random()]))

    def _numbered(self, key: str) -> Sequence[Mapping[str, Any]]:
        """An optimizer's groups of a rank that had as many, for those without parameters here.

        None where what has some was in groups of other numbers.
        """
        optimizer = self.optimizers[key]
        saved = [state.get("groups", ()) for state in self._checkpoint.optimizer_states(key)]
        at = {name: i for groups in saved for i, group in enumerate(groups) for name in group["params"]}
        name_of = self._names_in(optimizer)
        for i, group in enumerate(optimizer.param_groups):
            names = (name_of[id(p)] for p in group["params"] if id(p) in name_of)
            if any(at.get(self._found(at, name), i) != i for name in names):
                return ()
        first = (*saved[self._rank : self._rank + 1], *saved)
        return next((groups for groups in first if len(groups) == len(optimizer.param_groups)), ())

    def _found(self, saved: Mapping[str, Any], name: str) -> str:
        """The name a parameter was saved under: its own or another of a tied one."""
        return next((alias for alias in (name, *self._names(name)) if alias in saved), name)

    def _random(self) -> dict[str, Any]:
        states = self._checkpoint.states
        own = [*states[self._rank : self._rank + 1], *states][:1]
        if not own or self._device is None or not self._replica.was_there(own[0]):
            return {}
        found: dict[str, Any] = self._replica.own(own[0], "random") or own[0].get("random", {})
        return found

    def check(self) -> list[str]:
        """In words, what the checkpoint lacks or has otherwise."""
        faults = []
        for key, optimizer in self.optimizers.items():
            state, group_of = self._saved(key)
            if not group_of:
                faults.append(f"it holds no state of {key}")
                continue
            faults += self._other_kind(key, optimizer)
            name_of = self._names_in(optimizer)
            own = {name_of[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in name_of}
            absent = [name for name in own if self._found(group_of, name) not in group_of]
            if absent:
                faults.append(f"{key} has no state for {', '.join(absent[:4])}")
            faults += self._mixed_groups(key, optimizer, name_of, group_of)
            for name, parameter in own.items():
                entries = state.get(self._found(state, name), {})
                faults += [
                    f"{key}'s {kind} of {name} is {value.spec} there, the parameter {list(parameter.shape)}"
                    for kind, value in entries.items()
                    if kind in ELEMENTWISE and isinstance(value, Stored)
                    if value.spec.shape != tuple(parameter.shape)
                ]
        missing = [k for k in self._objects if k not in self.optimizers and self._state_of(k) is None]
        faults += [f"it holds no state of {key}" for key in missing]
        faults += [
            f"{key} has a list with a tensor for each parameter that its rank had, and this rank has others: "
            "keep them by the names of rt.named_parameters()"
            for key in self._objects
            if self._is_by_position(key)
        ]
        if (
            self._checkpoint.manifest is not None or self._checkpoint.extras
        ):  # safetensors alone cannot have any
            faults += [f"missing: {name}" for name in self._extras if name not in self._checkpoint.extras]
        return faults + self._replica.faults(self._checkpoint.states, self._objects)

    def _other_kind(self, key: str, optimizer: torch.optim.Optimizer) -> list[str]:
        """Whether another kind of optimizer was saved, without the options that this one works by."""
        for found in self._checkpoint.optimizer_states(key):
            was, now = found.get("kind"), type(optimizer).__qualname__
            for group in found.get("groups", ()):
                lacks = ", ".join(name for name in optimizer.defaults if name not in group)
                if lacks and isinstance(was, str) and was != now:
                    return [f"{key} was saved as {was}, without {lacks}, and is {now} here"]
        return []

    def _mixed_groups(
        self, key: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], saved: Mapping[str, Any]
    ) -> list[str]:
        """Groups of the optimizer whose parameters were in groups with other options."""
        faults = []
        for group in optimizer.param_groups:
            names = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
            known = [(n, saved[found]) for n in names if (found := self._found(saved, n)) in saved]
            for name, other in known[1:]:
                first = known[0][1]
                apart = [k for k in first if k not in LISTED and _text(first[k]) != _text(other.get(k))]
                if apart:
                    faults.append(
                        f"{key} has {known[0][0]} and {name} in one group, and they were saved with "
                        f"{apart[0]} {first[apart[0]]} and {other.get(apart[0])}; make them as they were"
                    )
                    break
        return faults

    def apply(self) -> None:
        """Put all state in; whatever a ``load_state_dict`` raises says that it did not fit.

        Optimizers that shared their groups, one being made around another, share them again.
        """
        pairs = itertools.combinations(self.optimizers.values(), 2)
        alike = [(one, other) for one, other in pairs if one.param_groups is other.param_groups]
        for key, thing in self._objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                self._put(key, functools.partial(self._apply_optimizer, key), thing)
                continue
            before = copy.deepcopy(thing.state_dict())
            self._undo.append((key, functools.partial(thing.load_state_dict, before)))
            self._put(key, thing.load_state_dict, filled(self._state_of(key)))
        for one, other in alike:
            other.param_groups = one.param_groups
        for name in self._extras.keys() & self._checkpoint.extras.keys():
            module = self._extras[name]
            before = copy.deepcopy(module.get_extra_state())
            self._undo.append((name, functools.partial(module.set_extra_state, before)))
            self._put(name, module.set_extra_state, filled(self._checkpoint.extras[name]))
        if self._device is not None:
            before = _random_state(self._device)
            self._undo.append(("random", functools.partial(_set_random, self._device, before)))
            self._put("random", functools.partial(_set_random, self._device), filled(self._random()))

    def _put(self, key: str, take: Callable[[Any], object], state: Any) -> None:
        try:
            take(state)
        except StoreError:
            raise
        except Exception as error:  # the object's own, of whatever kind
            raise StoreError(
                f"{key} does not take the state saved for it: {type(error).__name__}: {error}"
            ) from error

    def _apply_optimizer(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        state, group_of = self._saved(key)
        name_of = self._names_in(optimizer)
        flat = [(name_of.get(id(p), ""), p) for group in optimizer.param_groups for p in group["params"]]
        made: dict[int, dict[str, Any]] = {}
        read: dict[str, Tensor] = {}
        stored: dict[str, Stored] = {}
        for i, (name, parameter) in enumerate(flat):
            entries = state.get(self._found(state, name)) if name else None
            if entries is None:
                continue
            made[i] = {}
            for kind, value in entries.items():
                if not isinstance(value, Stored) or value.is_array:
                    made[i][kind] = filled(value)
                else:
                    made[i][kind] = read[f"{i}/{kind}"] = place_for(value, parameter)
                    stored[f"{i}/{kind}"] = value
        self._checkpoint.read(read, stored)
        numbers = iter(range(len(flat)))
        groups, numbered = [], dict(enumerate(self._numbered(key)))
        for i, own in enumerate(optimizer.param_groups):
            name = next((name_of[id(p)] for p in own["params"] if id(p) in name_of), "")
            saved = group_of.get(self._found(group_of, name)) or numbered.get(i, own)
            groups.append(
                {
                    **filled({k: v for k, v in saved.items() if k not in LISTED}),
                    "params": [next(numbers) for _ in own["params"]],
                }
            )
        self._undo.append((key, snapshot(optimizer)))
        share = shared(optimizer)
        optimizer.load_state_dict({"state": made, "param_groups": groups})
        share()
        for i, (_, parameter) in enumerate(flat):
            as_saved(optimizer, parameter, made.get(i, {}))

    def undo(self) -> None:
        """Put every object back as it was before :meth:`apply`."""
        while self._undo:
            key, put_back = self._undo.pop()
            try:
                put_back()
            except Exception as error:  # the object's own, of whatever kind; the others go on
                _logger.warning("%s does not take back what it had: %s: %s", key, type(error).__name__, error)


def _text(option: Any) -> str:
    return "" if any(find_stored([option])) else str(option)
