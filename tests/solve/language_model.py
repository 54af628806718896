"""A small language model by hand: its graph, costs, a cluster, and plans of it."""

from autopipe.costs import CostTable, OpCost
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Link
from autopipe.plans import Plan
from autopipe.solve import solve

N_LAYERS = 6
WEIGHT = ParameterSpec("embed.weight", ("embed.weight", "head.weight"), (500, 64), "float32")
LINK = Link(1e-5, 1e9)
HIDDEN = (TensorSpec((8, 64), "float32", True),)


def graph(n_layers: int = N_LAYERS) -> OpGraph:
    """An embedding, layers that all take a mask, a head that shares the embedding's weight."""
    ops = [Op("ids", "input", "ids", outputs=(TensorSpec((8,), "int64"),))]
    edges = []

    def add(name: str, takes: tuple[str, ...], weight: str, **fields) -> None:
        ops.append(Op(name, "module", name, name, outputs=HIDDEN, parameters=(weight,), **fields))
        edges.extend((p, name) for p in takes)

    add("embed", ("ids",), "embed.weight")
    mask = (TensorSpec((8, 8), "bool"),)
    ops.append(Op("mask", "function", "torch.tril", outputs=mask, is_movable=True))
    edges.append(("ids", "mask"))
    for i in range(n_layers):
        add(f"layer{i}", (f"layer{i - 1}" if i else "embed", "mask"), f"layer{i}.weight")
    add("head", (f"layer{n_layers - 1}",), "embed.weight")
    ops.append(Op("output", "output", "output"))
    edges.append(("head", "output"))
    place = {op.name: i for i, op in enumerate(ops)}
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    layers = tuple(
        ParameterSpec(f"layer{i}.weight", (f"layer{i}.weight",), (64, 64), "float32") for i in range(n_layers)
    )
    return OpGraph("LM", tuple(ops), tuple(edges), parameters=(WEIGHT, *layers))


def costs(head_s: float = 3e-3) -> CostTable:
    def cost(forward_s: float, saved_bytes: int = 1 << 10) -> OpCost:
        return OpCost(forward_s, 2 * forward_s, forward_s, forward_s, saved_bytes)

    layers = {f"layer{i}": cost(1e-3) for i in range(N_LAYERS)}
    return CostTable(
        {"embed": cost(1e-4), "mask": OpCost(1e-7), **layers, "head": cost(head_s)}, optimizer_s_per_byte=1e-9
    )


def cluster(n_ranks: int = 3, link: Link = LINK) -> Cluster:
    return Cluster.uniform(n_ranks, link=link)


def made(**changes) -> Plan:
    fields = {"n_stages": 3, "n_microbatches": 6, "costs": costs(), "cluster": cluster()} | changes
    return solve(graph(), fields.pop("costs"), fields.pop("cluster"), **fields)


def stage_of(plan: Plan, op: str) -> int:
    (stage,) = plan.stages_of[op]
    return stage
