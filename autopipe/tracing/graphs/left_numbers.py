"""The numbers that a call leaves in attributes, computed by themselves: of other numbers and of sizes.

Which they are is left to ``inputs.writes``, what else they may not be made of to ``recorder``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ..inputs.structure import Spec
from ..inputs.writes import numbers_left
from .emit import output_leaves

__all__ = ["left_in", "numbers_left_by"]


def numbers_left_by(graph: fx.Graph, output: Spec, values: Mapping[str, Any]) -> dict[str, Any]:
    """By path and name, what a form with an ``output`` leaves in attributes for inputs by name."""
    known: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in known:
            known[node] = made(node)
        return known[node]

    def made(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return values[str(node.target)]
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    left = left_in(graph, output)
    return {name: value(n) if isinstance(n, fx.Node) else n for name, n in left.items()}


def left_in(graph: fx.Graph, output: Spec) -> dict[str, Any]:
    """By path and name, the node or constant that a form with an ``output`` leaves in an attribute."""
    return numbers_left(output, output_leaves(graph))
