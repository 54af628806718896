"""What a loss takes that a forward of the model has left elsewhere than in its output, as in an attribute.

A stage sets it for each microbatch, on its own rank alone, so that the loss would be made of another
microbatch's, or of what was there before training. What a loss may train is left to ``loss``.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ...torch_private import sequence_number
from ...tracing.code.attributes import put_back
from ...tracing.state.loads import attributes_stored

__all__ = ["leaves_of", "made_before", "reads_noted"]


def leaves_of(nodes: Iterable[Node], ends: Iterable[Node]) -> list[Tensor]:
    """The leaves that ``nodes`` have a gradient by, those beyond ``ends`` left out."""
    return [node.variable for node in _nodes(nodes, ends) if hasattr(node, "variable")]


def made_before(loss: Tensor, ends: Collection[Node], since: int, own: Set[int]) -> bool:
    """Whether a loss is made of what a forward computed with weights, of ids ``own``, beside its outputs.

    The graphs of these go on at ``ends``; ``since`` is what ``newest`` gave ahead of the loss. What the
    stage itself has computed of the same microbatch, of weights that its outputs are made of, is its own.
    """
    made = _nodes([get_gradient_edge(loss).node], ends)
    old = [node for node in made if not hasattr(node, "variable") and sequence_number(node) < since]
    if not old:
        return False
    known = {id(leaf) for leaf in leaves_of(ends, ())}
    return any(id(leaf) in own and id(leaf) not in known for leaf in leaves_of(old, ends))


@contextlib.contextmanager
def reads_noted(model: nn.Module, left: Iterable[str], away: Set[int]) -> Iterator[list[str]]:
    """What is read meanwhile, by name, of attributes that stages do not set, or not on this rank.

    Those by the names ``left``, and all that forwards set of modules with parameters of ids that are
    ``away``: other ranks run them.
    """
    found: list[str] = []
    watched: dict[int, set[str]] = {}
    modules = dict(model.named_modules())
    for module in modules.values() if away else ():
        cls: Any = type(module)
        if any(id(p) in away for p in module.parameters()):
            watched.setdefault(id(module), set()).update(_set_by(cls))
    for path, _, name in (full.rpartition(".") for full in left):
        watched.setdefault(id(modules.get(path)), set()).add(name)
    paths = {id(m): path for path, m in modules.items()}

    def note(module: Any, name: str) -> None:
        if name in watched.get(id(module), ()):
            found.append(f"{paths[id(module)]}.{name}".lstrip("."))

    classes: set[Any] = {type(m) for m in modules.values() if watched.get(id(m))}
    with put_back((cls, "__getattribute__") for cls in classes):
        for each in classes:
            each.__getattribute__ = _noting(each.__getattribute__, note)
        yield found


def _noting(read: Any, note: Callable[[Any, str], None]) -> Any:
    def noted(self: Any, name: str) -> Any:
        note(self, name)
        return read(self, name)

    return noted


@functools.cache
def _set_by(cls: Any) -> frozenset[str]:
    """The attributes that a class's forward sets, and the methods that it calls by name."""
    own = [vars(base) for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    names, seen, found = ["forward"], {"__init__"}, set[str]()
    while names:
        if (name := names.pop()) in seen:
            continue
        seen.add(name)
        for function in (held[name] for held in own if isinstance(held.get(name), types.FunctionType)):
            found.update(attributes_stored(function.__code__))
            names += function.__code__.co_names
    return frozenset(found)


def _nodes(nodes: Iterable[Node], ends: Iterable[Node]) -> Iterator[Node]:
    """The nodes of graphs once each, those beyond ``ends`` left out."""
    seen = set(ends)
    todo: list[Node | None] = [*nodes]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [child for child, _ in node.next_functions]
