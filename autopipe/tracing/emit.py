"""fx graphs from recordings, and graph modules that hold the model's own submodules.

The op graph beside them is left to ``opgraph``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from . import regions
from .calls import Recording, map_calls

__all__ = ["attach", "graph", "module"]


def graph(recording: Recording) -> fx.Graph:
    """The recording as an fx graph, one node per call under the call's name."""
    out = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    for call in recording.calls:
        args = map_calls(call.args, lambda c: nodes[id(c)])
        kwargs = map_calls(call.kwargs, lambda c: nodes[id(c)])
        node = out.create_node(call.op, call.target, args, kwargs, name=call.name)
        node.meta |= {"val": call.value, "region": call.region, "source": call.source, "path": call.path}
        nodes[id(call)] = node
    return out


def module(
    model: nn.Module, source: fx.Graph, constants: dict[str, Any], device: torch.device
) -> fx.GraphModule:
    """A linted graph module over the model's own submodules, parameters and buffers."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(source, {}))
    regions.insert(copied)
    out = fx.GraphModule(nn.Module(), fx.Graph(), type(model).__name__)
    out.training = model.training
    for node in copied.nodes:
        if node.op in ("call_module", "get_attr"):
            attach(out, model, node.target, constants, device)
    out.graph = copied
    out.graph.lint()
    out.recompile()
    return out


def attach(
    holder: nn.Module, model: nn.Module, target: str, constants: dict[str, Any], device: torch.device
) -> None:
    """Give ``holder`` what a node's target names: the model's own object, under the model's own path."""
    if target == "_device":
        holder._device = device  # type: ignore[assignment]
        return
    *path, last = target.split(".")
    owner: Any = model
    for name in path:
        inner = getattr(owner, name)
        if name not in holder._modules:
            child = _Shell()
            child.training = inner.training
            holder.add_module(name, child)
        holder, owner = holder._modules[name], inner  # type: ignore[assignment]
        if holder is owner:
            return
    if last == "training":
        holder.training = owner.training
        return
    value = constants[target] if target in constants else getattr(owner, last) if last else owner
    if isinstance(value, nn.Module):
        holder._modules[last] = value
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(last, value)
    elif isinstance(value, torch.Tensor):
        keep = target in constants or last in getattr(owner, "_non_persistent_buffers_set", ())
        holder.register_buffer(last, value, persistent=not keep)
    else:
        setattr(holder, last, value)


class _Shell(nn.Module):
    """Stands where the model has a module that was opened, so that paths stay the model's own."""
