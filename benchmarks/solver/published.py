"""The published partitioning format (msr-fiddle dnn-partitioning) as a problem, and answers back in it.

Accelerators only: every device is equal, nothing overlaps, fewer devices may be used. A value's price is
paid once by the device that makes it and once by each that takes it, forward and backward nodes alike.
Classes with backward nodes only are ordered by their backward edges, mirrored, as the published program does.
Solving is left to ``autopipe.solve``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections import defaultdict
from typing import Any

from autopipe.solve import Item, Net, Problem, Stage, chain

UNITS = 10**12
"""Integer units per unit of the file, so that rounding stays below 1e-9 of any load."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """A file's problem, the nodes of each of its items, and the exact costs for the final tally."""

    problem: Problem
    nodes: tuple[tuple[int, ...], ...]
    latency: dict[int, float]
    price: dict[int, float]
    edges: tuple[tuple[int, int], ...]


def is_instance(path: str | pathlib.Path) -> bool:
    """Whether a file holds an instance: other data lies beside them."""
    return "nodes" in json.loads(pathlib.Path(path).read_text())


def read(path: str | pathlib.Path, n_devices: int | None = None) -> Instance:
    """The instance in a file, for its own number of accelerators or another."""
    return from_dict(json.loads(pathlib.Path(path).read_text()), n_devices)


def from_dict(data: dict[str, Any], n_devices: int | None = None) -> Instance:
    """The instance in a file's content. Nodes of one colour class are one item."""
    nodes = {n["id"]: n for n in data["nodes"]}
    classes: dict[Any, list[int]] = defaultdict(list)
    for v, n in nodes.items():
        classes[("class", n["colorClass"]) if "colorClass" in n else ("node", v)].append(v)
    rows = list(classes.values())
    of = {v: i for i, row in enumerate(rows) for v in row}
    edges = tuple((e["sourceId"], e["destId"]) for e in data["edges"])
    price: dict[int, float] = {}
    takers: dict[int, set[int]] = defaultdict(set)
    for e in data["edges"]:
        price.setdefault(e["sourceId"], e["cost"])
        takers[e["sourceId"]].add(e["destId"])
    forward = {v for v, n in nodes.items() if not n["isBackwardNode"]}
    items = tuple(
        Item(
            tuple(str(v) for v in row),
            sum(round(nodes[v]["fpgaLatency"] * UNITS) for v in row),
            static_bytes=sum(round(nodes[v].get("size", 0)) for v in row),
        )
        for row in rows
    )
    nets = []
    for u, there in takers.items():
        consumers = tuple(sorted({of[v] for v in there} - {of[u]}))
        if consumers and price[u] > 0:
            cost = round(price[u] * UNITS)
            nets.append(Net(of[u], consumers, cost, cost, str(u)))
    backward_only = {i for i, row in enumerate(rows) if not forward & set(row)}
    order = {(of[a], of[b]) for a, b in edges if {a, b} <= forward and of[a] != of[b]}
    for a, b in edges:
        if not {a, b} & forward and of[a] != of[b] and {of[a], of[b]} & backward_only:
            order.add((of[b], of[a]))
    stages = tuple(
        Stage(d, limit_bytes=int(data["maxSizePerFPGA"])) for d in range(n_devices or data["maxFPGAs"])
    )
    problem = Problem(items, tuple(sorted(order)), tuple(nets), (), stages, allow_empty=True)
    latency = {v: n["fpgaLatency"] for v, n in nodes.items()}
    return Instance(problem, tuple(map(tuple, rows)), latency, price, edges)


def max_load(instance: Instance, devices: list[list[int]]) -> float:
    """The published objective of an answer, in the file's own unit."""
    of = {v: d for d, held in enumerate(devices) for v in held}
    load = [sum(instance.latency[v] for v in held) for held in devices]
    touching: dict[int, set[int]] = defaultdict(set)
    for u, v in instance.edges:
        if of[u] != of[v]:
            touching[u] |= {of[u], of[v]}
    for u, there in touching.items():
        for d in there:
            load[d] += instance.price[u]
    return max(load)


def solve_file(path: str | pathlib.Path, n_devices: int | None, time_limit_s: float) -> dict[str, Any]:
    """One row of the benchmark's JSON: the answer, its certificate and what it took."""
    started, cpu = time.perf_counter(), time.process_time()
    instance = read(path, n_devices)
    answer = chain(instance.problem, time_limit_s=time_limit_s)
    out: dict[str, Any] = {"file": str(path), "feasible": answer.stage_of is not None}
    devices: list[list[int]] = []
    if answer.stage_of is not None:
        held: list[list[int]] = [[] for _ in instance.problem.stages]
        for item, stage in enumerate(answer.stage_of):
            held[stage] += instance.nodes[item]
        devices = [sorted(h) for h in held if h]
    reached = max_load(instance, devices) if devices else None
    lower = answer.lower_ns / UNITS if answer.stage_of is not None else None
    return {
        **out,
        "max_load": reached,
        "lower_bound": reached if answer.proved else lower,
        "proved": answer.proved,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "fpgas": [{"nodes": d} for d in devices],
        "cpus": [],
    }
