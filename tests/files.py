"""Files of every kind the package reads, and ways to damage them, for tests and for walks on demand."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from plans import make_plan

from autopipe.costs import CostTable, OpCost
from autopipe.graph import Dim, Op, OpGraph, Packed, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.plans import Candidate, Plan
from autopipe.schedule import build, from_csv, to_csv
from autopipe.schema import parse
from autopipe.simulator import Timeline, simulate
from autopipe.units import symbol

Kind = tuple[str, Callable[[str], Any], Callable[[Any], str]]
"""A kind of file: a sound one, how it is read, how it is written again."""


def graph() -> OpGraph:
    batch, seq = symbol("batch"), symbol("seq")
    x = TensorSpec((batch, seq, 8), "float32", True)
    return OpGraph(
        model="Small",
        ops=(
            Op("x", "input", "x", outputs=(x,)),
            Op("first", "module", "layers.0", outputs=(x,), parameters=("w",), buffers=("b",), signature="L"),
            Op("second", "function", "torch.relu", outputs=(TensorSpec((batch, seq // 2 + 1, 8), "bool"),)),
            Op("output", "output", "output"),
        ),
        edges=(("x", "first"), ("first", "second"), ("second", "output")),
        groups=(("first", "second"),),
        parameters=(
            ParameterSpec("w", ("w", "tied.w"), (8, 8), "float32"),
            ParameterSpec("b", ("b",), (8,), "float32", False, True),
        ),
        dims=(Dim("batch", 4, (("x", 0),)), Dim("seq", 6, (("x", 1),), (Packed("x", 24),))),
    )


def table() -> CostTable:
    return CostTable(
        {"first": OpCost(1.0, 2.0, 1.0, 1.0, 512, 64, 64, 9, "measured", 0.1, ("x",)), "second": OpCost()},
        {"batch": 4, "seq": 6},
        "a CPU",
        "measured",
        -0.02,
        1e-9,
        {"torch": "2.13"},
        ("one note",),
    )  # fmt: skip


def cluster() -> Cluster:
    device = Device("H200", 10**11, {"bfloat16": 9e14}, 4.8e12, 5e-6, 1.0, "a datasheet", "cuda")
    links = {(0, 1): Link(1e-5, 1e9, "probed"), (1, 0): Link(2e-5, 2e9, "probed")}
    return Cluster((device, device), (0, 1), Link(), Link(1e-4, 1e8, "", 1e-5, 1e-9), links, cores=(2, 4))


def plan() -> Plan:
    settings = {
        "dims": {"batch": 2, "seq": 6},
        "memory_limit": "16GB",
        "opened": ["layers.0"],
        "optimizer_bytes_per_parameter_byte": 2.0,
        "optimizer_s_per_byte": 1e-9,
        "pin": {"head": 1},
        "precision": "bf16-mixed",
        "optimizer": "adam-8bit",
        "offload": "activations",
        "uncounted": "3.0% of calls, at least 0.2% of bytes, have no FLOP count: mylib::gated (2)",
        "versions": {"torch": "2.13"},
    }
    candidates = (Candidate("uniform", "1f1b", 4, 8, 1.0, 100),)
    return make_plan(settings=settings, candidates=candidates, n_candidates=1)


def kinds() -> dict[str, Kind]:
    """By name, every kind of file that needs no torch to read."""

    def as_json(cls: Any) -> tuple[Callable[[str], Any], Callable[[Any], str]]:
        return lambda text: cls.from_dict(parse(text, "the file")), lambda found: json.dumps(found.to_dict())

    timeline = simulate(make_plan(n_stages=2, n_microbatches=2, ties=()))
    made: dict[str, Any] = {"graph": graph(), "costs": table(), "cluster": cluster(), "timeline": timeline}
    types = {"graph": OpGraph, "costs": CostTable, "cluster": Cluster, "timeline": Timeline}
    out = {name: (json.dumps(made[name].to_dict()), *as_json(cls)) for name, cls in types.items()}
    out["plan"] = (plan().to_json(), Plan.from_json, Plan.to_json)
    out["schedule"] = (to_csv(build("zb-h1", 2, 2, 3)), from_csv, to_csv)
    return out


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -0.0, 0.5, -2.5, 1e308, -1e308, 1e-320, 2**31, 2**63, 10**30, -(10**30),
    "", " ", "x", "a\nimport os", "\x00", "\u2028", "\ud800", "1e999", "open('x')", "nan",
    "../../x", "é" * 50_000, [], [[]], {}, {"a": 1}, [None], ["x"] * 3, [0, 0],
)  # fmt: skip


def damaged(text: str, draw: random.Random) -> str:
    """The text with one damage: to a value, a name, the structure, or the bytes themselves."""
    if not text.startswith("{") or draw.random() < 0.15:
        return _scratched(text, draw)
    data = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2))):
        _damage(data, draw)
    out = json.dumps(data)
    for wild in ("NaN", "Infinity", "-Infinity", "1e999", "[" * 100_000):
        if draw.random() < 0.02:
            out = out.replace("1", wild, 1)
    return out


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a nest."""
    keys = data if isinstance(data, dict) else range(len(data))
    for key in list(keys):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from _places(data[key])


def _damage(data: Any, draw: random.Random) -> None:
    container, key = draw.choice(list(_places(data)))
    what = draw.randrange(7)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container[str(draw.choice(("extra", "", "a\nb", "version", "é")))] = draw.choice(ODD)
    elif what == 2 and isinstance(container, list):
        container.insert(key, copy.deepcopy(draw.choice([container[key], *ODD[:8]])))
    elif what == 3:
        other, there = draw.choice(list(_places(data)))
        container[key] = copy.deepcopy(other[there])
    elif what == 4 and isinstance(container[key], (int, float)):
        container[key] = draw.choice((-container[key], container[key] * 1e9, container[key] + 1, 1 / 3))
    elif what == 5:
        for _ in range(draw.choice((1, 40, 300))):
            container[key] = [container[key]]
    else:
        container[key] = copy.deepcopy(draw.choice(ODD))


def _scratched(text: str, draw: random.Random) -> str:
    """Characters changed, cut, doubled or put in."""
    at = draw.randrange(len(text))
    there = draw.choice((at, at + 1, at + draw.randrange(40)))
    put = draw.choice(
        ("", "", text[at:there] * 2, "9" * 5000, "99999999999999999999", *",\n\"'[{()}]-0e7\x00F;é")
    )
    return text[:at] + put + text[there:]
