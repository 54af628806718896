"""Instances in the likeness of published ones that are not at hand, made from those that are.

``python -m benchmarks.solver.likeness FOLDER [--json]`` with the folder of the published files. BERT of other
depths repeats one encoder layer of a file at hand, its backward nodes and colour classes with it; an
inference graph is a training graph's forward nodes, a layer graph's training its nodes twice; the
convolutional networks are drawn from their architecture. Reading an instance is left to ``published``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from autopipe.solve import chain

from .convolutional import inception, resnet
from .published import from_dict

Data = dict[str, Any]
FILES = (
    "operator_bert3_training",
    "operator_bert6_inference",
    "layer_gnmt_training",
    "layer_resnet50_inference",
)


def forward(data: Data) -> Data:
    """The forward nodes of a training graph."""
    kept = {n["id"] for n in data["nodes"] if not n["isBackwardNode"]}
    edges = [e for e in data["edges"] if {e["sourceId"], e["destId"]} <= kept]
    return {**data, "nodes": [n for n in data["nodes"] if n["id"] in kept], "edges": edges}


def mirrored(data: Data, slowdown: float = 2.0) -> Data:
    """A graph of layers with their backward nodes, as the published training graphs of layers have them."""
    by = max(n["id"] for n in data["nodes"]) + 1
    back = [
        {**n, "id": n["id"] + by, "isBackwardNode": True, "fpgaLatency": n["fpgaLatency"] * slowdown}
        for n in data["nodes"]
    ]
    edges = [{**e, "sourceId": e["sourceId"] + by, "destId": e["destId"] + by} for e in data["edges"]]
    return {**data, "nodes": [*data["nodes"], *back], "edges": [*data["edges"], *edges]}


def repeated(data: Data, more: int) -> Data:
    """A BERT of operators with so many more encoder layers, each like its last two."""
    last = _layer(data, _n_layers(data) - 1)
    previous = _layer(data, _n_layers(data) - 2)
    twin = dict(zip(previous, last, strict=True))
    at = {**dict.fromkeys(previous, 0), **dict.fromkeys(last, 1)}
    first = {v: u for u, v in twin.items()} | {v: v for v in previous}
    id_by, class_by = (1 + max(n.get(key, 0) for n in data["nodes"]) for key in ("id", "colorClass"))

    def copy(v: int, layer: int) -> int:
        """A node of the previous layer in another: the old nodes hold the first place and the last."""
        return v if layer == 0 else twin[v] if layer == more + 1 else v + id_by * layer

    nodes = {n["id"]: n for n in data["nodes"]}
    made = list(data["nodes"])
    for layer in range(1, more + 1):
        for v in previous:
            node = {**nodes[v], "id": copy(v, layer)}
            if "colorClass" in node:
                node["colorClass"] += class_by * layer
            made.append(node)
    pairs = {(e["sourceId"], e["destId"]) for e in data["edges"]}
    edges = []
    for e in data["edges"]:
        a, b = e["sourceId"], e["destId"]
        if a not in at and b not in at:
            edges.append(e)
        elif a in at and b in at and at[a] != at[b]:
            for layer in range(more + 1):
                edges.append(_between(e, copy(first[a], layer + at[a]), copy(first[b], layer + at[b])))
        elif at.get(a, at.get(b)) == 0:
            there = (twin.get(a, a), twin.get(b, b))
            for layer in range(more + 2) if there in pairs else (0,):
                edges.append(_between(e, copy(a, layer) if a in at else a, copy(b, layer) if b in at else b))
        elif (first.get(a, a), first.get(b, b)) not in pairs:
            edges.append(e)
    return {**data, "nodes": made, "edges": edges}


def _between(edge: Data, source: int, target: int) -> Data:
    return {**edge, "sourceId": source, "destId": target}


def _n_layers(data: Data) -> int:
    found = (re.match(r"bert\.encoder\.layer\.(\d+)\.", n["name"]) for n in data["nodes"])
    return 1 + max(int(f[1]) for f in found if f)


def _layer(data: Data, layer: int) -> list[int]:
    """The nodes of one encoder layer, weights, forward and backward, in an order that is every layer's."""
    names = [n["name"] for n in data["nodes"]]

    def first(start: str) -> int:
        return next((x for x, name in enumerate(names) if name.startswith(start)), len(names))

    places = [x for x, name in enumerate(names) if name.startswith(f"bert.encoder.layer.{layer}.")]
    own, before = f"LayerNormalization{2 * layer + 3}", f"LayerNormalization{2 * layer + 1}"
    places += range(names.index(before) + 1, names.index(own) + 1)
    places += range(first(own + "_Grad"), first(before + "_Grad"))
    looks = {data["nodes"][x]["id"]: re.sub(r"\d+", "", names[x]) for x in places}
    for _ in range(12):
        beside: dict[int, list[str]] = {v: [look] for v, look in looks.items()}
        for e in data["edges"]:
            u, v = e["sourceId"], e["destId"]
            if u in looks and v in looks:
                beside[u].append("to " + looks[v])
                beside[v].append("from " + looks[u])
        looks = {v: hashlib.md5(str(sorted(row)).encode()).hexdigest() for v, row in beside.items()}
    return sorted(looks, key=lambda v: looks[v])


def stacked(data: Data, times: int) -> Data:
    """Whole models in a row, forward and backward, each with its own head: stranger than any one model."""
    id_by, class_by = (1 + max(n.get(key, 0) for n in data["nodes"]) for key in ("id", "colorClass"))
    nodes, edges = [], []
    ends = [_ends(data, {n["id"] for n in data["nodes"] if n["isBackwardNode"] == b}) for b in (False, True)]
    for x in range(times):
        for n in data["nodes"]:
            colour = {"colorClass": n["colorClass"] + class_by * x} if "colorClass" in n else {}
            nodes.append({**n, "id": n["id"] + id_by * x, **colour})
        edges += [_between(e, e["sourceId"] + id_by * x, e["destId"] + id_by * x) for e in data["edges"]]
        for is_backward, (sources, sinks) in enumerate(ends) if x else ():
            here, there = (x, x - 1) if is_backward else (x - 1, x)
            for a in sinks[:2]:
                made = next((e for e in data["edges"] if e["sourceId"] == a), data["edges"][0])
                edges += [_between(made, a + id_by * here, b + id_by * there) for b in sources[:2]]
    return {**data, "nodes": nodes, "edges": edges, "maxSizePerFPGA": data["maxSizePerFPGA"] * times}


def _ends(data: Data, own: set[int]) -> tuple[list[int], list[int]]:
    """Those of some nodes that none of them comes before, and that none comes after."""
    inner = [e for e in data["edges"] if {e["sourceId"], e["destId"]} <= own]
    takes, makes = {e["destId"] for e in inner}, {e["sourceId"] for e in inner}
    return sorted(own - takes), sorted(own - makes)


def likenesses(folder: pathlib.Path) -> Iterator[tuple[str, Data]]:
    """Every likeness by name, with the number of accelerators of what it is like."""
    bert3, bert6, gnmt, layers = (json.loads((folder / f"{name}.json").read_text()) for name in FILES)
    for name, n_devices, data in (
        ("operator bert3 inference", 3, forward(bert3)),
        ("operator bert6 training", 3, repeated(bert3, 3)),
        ("operator bert12 inference", 6, repeated(bert6, 6)),
        ("operator bert12 training", 6, repeated(bert3, 9)),
        ("operator resnet50 inference", 6, resnet()),
        ("operator resnet50 training", 6, resnet(training=True)),
        ("layer gnmt inference", 6, forward(gnmt)),
        ("layer inception inference", 6, inception()),
        ("layer inception training", 6, mirrored(inception())),
        ("layer resnet50 training", 6, mirrored(layers)),
        ("stacked: 2 × bert6 inference", 6, stacked(bert6, 2)),
        ("stacked: 2 × bert3 training", 3, stacked(bert3, 2)),
        ("stacked: 4 × bert3 training", 6, stacked(bert3, 4)),
        ("stacked: 2 × gnmt training", 6, stacked(gnmt, 2)),
    ):
        yield name, {**data, "maxFPGAs": n_devices}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.likeness", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--devices", type=int, nargs="*", default=[], help="beside the instance's own number")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per problem")
    parser.add_argument("--only", default="", help="names that hold this")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    missing = [name for name in FILES if not (given.folder / f"{name}.json").is_file()]
    if missing:
        sys.exit(f"{given.folder} lacks {', '.join(missing)}: likenesses are made from these published files")
    rows = []
    for name, data in likenesses(given.folder):
        for n_devices in dict.fromkeys([data["maxFPGAs"], *given.devices]) if given.only in name else ():
            rows.append(_row(name, data, n_devices, given.time_limit))
            if not given.json:
                print(
                    "{like}, {nodes} nodes on {devices}: {found}, {cpu_seconds:.2f} CPU s".format(**rows[-1]),
                    flush=True,
                )
    if given.json:
        print(json.dumps(rows))


def _row(name: str, data: Data, n_devices: int, time_limit_s: float) -> dict[str, Any]:
    problem = from_dict(data, n_devices).problem
    cpu = time.process_time()
    answer = chain(problem, time_limit_s=time_limit_s)
    cpu = time.process_time() - cpu
    feasible = answer.stage_of is not None
    gap = answer.bottleneck_ns / max(1, answer.lower_ns) - 1 if feasible else None
    found = "proved" if answer.proved else f"gap {gap:.2%}" if gap is not None else "none found"
    if answer.proved and not feasible:
        found = "proved infeasible"
    return {
        "like": name,
        "nodes": len(data["nodes"]),
        "devices": n_devices,
        "found": found,
        "proved": answer.proved,
        "feasible": feasible,
        "gap": gap,
        "cpu_seconds": cpu,
    }


if __name__ == "__main__":
    main()
