"""fx graphs from recordings, and graph modules that hold the model's own submodules.

The op graph beside them is left to ``opgraph``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ...torch_private import fx_graph
from ..calls import regions
from ..calls.call import Recording, map_calls
from ..calls.memory import written
from .scope import OWN, attach

__all__ = ["graph", "module", "output_leaves"]


def graph(recording: Recording) -> fx.Graph:
    """The recording as an fx graph, one node per call under the call's name."""
    out = fx_graph()
    nodes: dict[int, fx.Node] = {}
    for call in recording.calls:
        args = map_calls(call.args, lambda c: nodes[id(c)])
        kwargs = map_calls(call.kwargs, lambda c: nodes[id(c)])
        node = out.create_node(call.op, call.target, args, kwargs, name=call.name)
        node.meta |= {"val": call.value, "region": call.region, "source": call.source, "path": call.path}
        if call.uncounted:
            node.meta["uncounted"] = call.uncounted
        if call.recompute:
            node.meta["recompute"] = True
        if call.stream is not None:  # an op may draw in the other form alone
            node.meta["stream"] = call.stream
        if call.shares or call.draws_anew:
            node.meta["runs_once"] = True
        if call.derives:
            node.meta["derives"] = True
        if call.frees:
            node.meta["frees"] = frozenset(c.name for c in recording.calls if c.storages & call.frees)
        nodes[id(call)] = node
    for memory in written(recording.calls):
        names = frozenset(c.name for c in memory.together)
        for call in memory.together:
            meta = nodes[id(call)].meta
            meta["together"] = names | meta.get("together", frozenset())
        writers = frozenset(c.name for c in memory.writes)
        for call in memory.users:
            meta = nodes[id(call)].meta
            meta["writers"] = writers | meta.get("writers", frozenset())
    return out


def output_leaves(graph: fx.Graph) -> tuple[Any, ...]:
    """What gives each leaf of a graph's output: a node, or the constant that it is."""
    last = next(node for node in reversed(graph.nodes) if node.op == "output")
    leaves: Any = last.args[0]
    return tuple(leaves)


def module(
    model: nn.Module, source: fx.Graph, constants: dict[str, Any], device: torch.device
) -> fx.GraphModule:
    """A linted graph module over the model's own submodules, parameters and buffers."""
    out = fx.GraphModule(nn.Module(), fx_graph(), type(model).__name__)
    copied = fx_graph(hidden={*dir(out)} - {*OWN})
    copied.output(copied.graph_copy(source, {}))
    regions.insert(copied)
    copied.lint()  # while it has no holder, whose own attributes it would take for what is registered
    out.training = model.training
    out._device = device  # type: ignore[assignment]
    attach(out, model, (n.target for n in copied.nodes if n.op in ("call_module", "get_attr")), constants)
    out.graph = copied
    out.recompile()
    return out
