"""What optimizers keep outside their ``state``: wrapped optimizers, and tensors or parameters in attributes.

torch's own ``state_dict`` knows nothing of it, nor does who moves ``state`` from rank to rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["held_beside", "left_out", "shared", "snapshot", "within"]

_OWN = frozenset(("state", "param_groups", "defaults"))


def within(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that one is made around, by the attribute that holds them; not those within these."""
    found = {}
    for name, value in vars(optimizer).items():
        for at, leaf in _leaves(value, name):
            if isinstance(leaf, Optimizer) and leaf is not optimizer:
                found[at] = leaf
    return found


def left_out(optimizer: Optimizer, others: Iterable[Any]) -> str:
    """The attribute with an optimizer whose state is neither its own nor one's of ``others``; "" for none."""
    known = {id(optimizer.state)} | {id(o.state) for o in others if isinstance(o, Optimizer)}
    return next((at for at, inner in within(optimizer).items() if id(inner.state) not in known), "")


def held_beside(optimizer: Optimizer, *, even_parameters: bool = False) -> str:
    """The attribute in which it keeps numbers of its parameters beside its ``state``; empty where none is.

    Such are tensors under a parameter or its ``id``, and as many numbers as all its parameters have (lists of
    copies, flat buffers). ``even_parameters`` also finds where it holds parameters themselves.
    """
    own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    n_numbers = sum(p.numel() for p in own.values() if not hasattr(p, "is_placeholder"))
    for name, value in vars(optimizer).items():
        if name in _OWN:
            continue
        leaves = [leaf for _, leaf in _leaves(value, name) if isinstance(leaf, Tensor)]
        apart = [leaf for leaf in leaves if id(leaf) not in own]
        is_keyed = any((key if isinstance(key, int) else id(key)) in own for key in _keys(value))
        if (is_keyed and (apart or even_parameters)) or 0 < n_numbers <= sum(t.numel() for t in apart):
            return name
        if even_parameters and len(apart) < len(leaves):
            return name
    return ""


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]" if isinstance(key, (str, int)) else name)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}[{i}]")
    else:
        yield name, value


def _keys(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset, deque)):
        return
    for item in value:
        yield from _keys(item)


def shared(optimizer: Optimizer) -> Callable[[], None]:
    """After a load gives those within it that have its very ``state`` or groups now what it has then."""
    held = [
        (inner, name, getattr(optimizer, name))
        for inner in within(optimizer).values()
        for name in ("state", "param_groups")
        if getattr(inner, name) is getattr(optimizer, name)
    ]

    def share() -> None:
        for inner, name, before in held:
            if getattr(inner, name) is before:
                setattr(inner, name, getattr(optimizer, name))

    return share


def snapshot(optimizer: Optimizer, around: frozenset[int] = frozenset()) -> Callable[[], None]:
    """Puts an optimizer, and those within it, back as they are now, whatever its ``load_state_dict`` does.

    Tensors of ``state`` are not copied: who loads puts others in their place. ``around`` are the ids of those
    that it is within, which may be in its attributes too.
    """
    around |= {id(optimizer)}
    puts = [snapshot(inner, around) for inner in within(optimizer).values() if id(inner) not in around]
    attributes = dict(vars(optimizer))
    state, groups = attributes.get("state"), attributes.get("param_groups")
    kept = {key: _copy(value) for key, value in state.items()} if isinstance(state, Mapping) else {}
    listed = [*(groups or ())]
    options = [{**g, "params": [*g["params"]]} for g in listed]

    def put_back() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        if isinstance(state, dict):
            state.clear()
            state.update(kept)
        if isinstance(groups, list):
            groups[:] = listed
        for group, before in zip(listed, options, strict=True):
            group.clear()
            group.update(before)
        for put in puts:
            put()

    return put_back


def _copy(kept: Any) -> Any:
    return dict(kept) if isinstance(kept, Mapping) else kept
