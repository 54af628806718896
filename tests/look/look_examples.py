"""Hand-made graphs, costs and plans of any size, for tests and benchmarks of what shows them."""

from __future__ import annotations

from autopipe.costs import CostTable, OpCost
from autopipe.graph import Dim, Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.plans import Boundary, Bounds, Candidate, Plan, StagePlan, Tie
from autopipe.units import symbol


def graph(n_blocks: int = 12) -> OpGraph:
    """A language model, 4 ops per block: mask and rotary tables made once, a residual stream, a tied head."""
    batch = symbol("batch")
    hidden = (TensorSpec((batch, 64, 256), "float32", True),)
    ids = (TensorSpec((batch, 64), "int64"),)
    mask = (TensorSpec((batch, 1, 64, 64), "bool"),)
    table = (TensorSpec((1, 64, 32), "float32"),)
    ops = [Op("input_ids", "input", "input_ids", outputs=ids)]
    edges = []

    def add(name, kind, target, takes, path="", **fields):
        ops.append(Op(name, kind, target, path, "model/lm.py:42", **fields))
        edges.extend((p, name) for p in takes)
        return name

    add(
        "embed",
        "module",
        "model.embed",
        ["input_ids"],
        "model.embed",
        outputs=hidden,
        parameters=("model.embed.weight",),
    )
    add("mask", "function", "torch.tril", ["input_ids"], "model", outputs=mask, is_movable=True)
    add("rotary", "module", "model.rotary", ["input_ids"], "model.rotary", outputs=table, is_movable=True)
    h = "embed"
    parameters = [
        ParameterSpec("model.embed.weight", ("model.embed.weight", "head.weight"), (8000, 256), "float32")
    ]
    for i in range(n_blocks):
        where = f"model.layers.{i}"
        for part in ("attention", "mlp"):
            spec = ParameterSpec(
                f"{where}.{part}.weight", (f"{where}.{part}.weight",), (256, 1024), "float32"
            )
            parameters.append(spec)
            takes = [h, "mask", "rotary"] if part == "attention" else [h]
            out = add(
                f"layers_{i}_{part}", "module", f"{where}.{part}", takes, f"{where}.{part}",
                outputs=hidden, parameters=(spec.name,), is_random=True, signature=part,
            )  # fmt: skip
            h = add(
                f"add_{2 * i + (part == 'mlp')}", "function", "operator.add", [h, out], where, outputs=hidden
            )
    logits = (TensorSpec((batch, 64, 8000), "float32", True),)
    add("head", "module", "head", [h], "head", outputs=logits, parameters=("model.embed.weight",))
    add("output", "output", "output", ["head"])
    edges.sort(key=lambda e: [op.name for op in ops].index(e[0]) if n_blocks < 50 else 0)
    return OpGraph(
        "LanguageModel",
        tuple(ops),
        tuple(edges),
        (),
        (),
        tuple(parameters),
        (Dim("batch", 8, (("input_ids", 0),)),),
    )


def costs(graph: OpGraph) -> CostTable:
    """Milliseconds by kind of op."""
    times = {"attention": 2.0e-3, "mlp": 3.0e-3}
    table = {}
    for op in graph.compute:
        forward = times.get(op.signature, 5e-5 if op.kind == "function" else 4e-3)
        backward = 2 * forward if op.requires_grad else 0.0
        table[op.name] = OpCost(
            forward,
            backward,
            backward / 2,
            backward / 2,
            op.bytes_at({"batch": 2}),
            0,
            0,
            10**9,
            "measured",
            0.03,
        )
    versions = {"torch": "2.13.0"}
    return CostTable(
        table,
        {"batch": 2},
        "CPU, 2 cores",
        "measured",
        residual=0.021,
        optimizer_s_per_byte=1e-10,
        versions=versions,
    )


def plan(
    graph: OpGraph,
    costs: CostTable,
    n_stages: int = 4,
    n_microbatches: int = 8,
    schedule: str = "1f1b",
    memory_limit: str | None = "80MB",
) -> Plan:
    """Equal counts of ops per stage, with the mask computed again in each."""
    ops = [op.name for op in graph.compute if op.name not in ("mask", "rotary")]
    cuts = [round(i * len(ops) / n_stages) for i in range(n_stages + 1)]
    stages, boundaries = [], []
    tied = graph.parameter["model.embed.weight"]
    for s in range(n_stages):
        own = tuple(ops[cuts[s] : cuts[s + 1]])
        clones = ("mask", "rotary")
        total = costs.total((*clones, *own))
        weights = sum(graph.parameter[p].bytes for op in own for p in graph.by_name[op].parameters)
        in_flight = min(n_stages - s, n_microbatches)
        stages.append(
            StagePlan(
                s,
                s,
                (*clones, *own),
                clones,
                forward_s=total.forward_s,
                backward_s=total.backward_s,
                backward_input_s=total.backward_input_s,
                backward_weight_s=total.backward_weight_s,
                parameter_bytes=weights,
                gradient_bytes=weights,
                saved_bytes=total.saved_bytes,
                workspace_bytes=2**20,
                in_flight=in_flight,
                memory_bytes=4 * weights + in_flight * total.saved_bytes + 2**20,
            )
        )
        if s + 1 < n_stages and own:
            boundaries.append(Boundary(own[-1], s, (s + 1,), graph.by_name[own[-1]].bytes_at({"batch": 2})))
    slowest = max(s.seconds for s in stages)
    device = Device("NVIDIA H200", 141 * 10**9)
    tie = Tie(tied.name, tied.names, (0, n_stages - 1), tied.bytes, "sync", 8e-4)
    step = slowest * (n_microbatches + n_stages - 1)
    candidates = (
        Candidate("this plan", schedule, n_stages, n_microbatches, step, 60 * 2**20),
        Candidate("uniform", schedule, n_stages, n_microbatches, 1.21 * step, 71 * 2**20),
        Candidate("by parameters", schedule, n_stages, n_microbatches, 1.34 * step, 93 * 2**20, False),
    )
    cluster = Cluster.uniform(n_stages, device, Link(5e-6, 1e11))
    settings = {
        "balance": "cost",
        "ties": "auto",
        "memory_limit": memory_limit,
        "optimizer_bytes_per_parameter_byte": 2.0,
    }
    bounds = Bounds(slowest, slowest * 0.97, step * 0.93, False)
    return Plan(
        graph.model,
        "0123456789abcdef",
        tuple(stages),
        tuple(boundaries),
        (tie,),
        schedule,
        n_microbatches,
        step,
        bounds,
        cluster,
        candidates,
        settings,
    )
