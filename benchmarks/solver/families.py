"""Graphs of known shapes with made-up costs: how large may they get before the proof takes too long?

Costs are drawn once per kind of op from a seeded generator, so that equal blocks cost the same, as in models.
Solving and timing are left to ``sweep``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from autopipe.solve import Item, Net, Problem, Stage


@dataclasses.dataclass
class Sketch:
    """A graph under construction; ops are numbered in the order they are added."""

    seed: int
    works: list[int] = dataclasses.field(default_factory=list)
    weights: list[int] = dataclasses.field(default_factory=list)
    prices: list[int] = dataclasses.field(default_factory=list)
    takers: list[list[int]] = dataclasses.field(default_factory=list)

    def op(self, kind: str, *inputs: int, work: int = 100_000, price: int = 20_000, weight: int = 0) -> int:
        """An op whose work, in ns, is around ``work``: the same for every op of its kind."""
        drawn = random.Random(f"{self.seed} {kind}")
        v = len(self.works)
        self.works.append(round(work * drawn.uniform(0.5, 1.5)))
        self.prices.append(round(price * drawn.uniform(0.8, 1.2)))
        self.weights.append(weight)
        self.takers.append([])
        for u in dict.fromkeys(inputs):
            self.takers[u].append(v)
        return v

    def problem(self, n_stages: int) -> Problem:
        """Additive loads: forward and backward work, each value sent once and received once per stage."""
        items = tuple(
            Item((f"o{v}",), w, 2 * w, self.weights[v], workspace_bytes=0) for v, w in enumerate(self.works)
        )
        nets = tuple(
            Net(v, tuple(t), self.prices[v], self.prices[v], f"o{v}") for v, t in enumerate(self.takers) if t
        )
        edges = tuple((v, t) for v, row in enumerate(self.takers) for t in row)
        return Problem(items, edges, nets, (), tuple(Stage(s) for s in range(n_stages)))


def block(g: Sketch, x: int, kind: str, *memory: int) -> int:
    """A transformer block at op granularity: attention, a cross attention where there is memory, an MLP."""
    for name, source in (("self", ()), *((("cross", memory),) if memory else ())):
        n = g.op(f"{kind} norm", x, work=5_000)
        q = g.op(f"{kind} {name} q", n, weight=4)
        k, v = (g.op(f"{kind} {name} {p}", *(source or (n,)), weight=4) for p in "kv")
        scores = g.op(f"{kind} {name} scores", q, k, work=60_000, price=80_000)
        mixed = g.op(f"{kind} {name} mixed", g.op("softmax", scores, work=30_000, price=80_000), v)
        x = g.op("add", x, g.op(f"{kind} {name} out", mixed, weight=4), work=3_000)
    up = g.op(f"{kind} up", g.op("norm", x, work=5_000), work=400_000, price=80_000, weight=16)
    down = g.op(f"{kind} down", g.op("gelu", up, work=20_000, price=80_000), work=400_000, weight=16)
    return g.op("add", x, down, work=3_000)


def transformer(g: Sketch, n_layers: int) -> int:
    x = g.op("embed", work=50_000, weight=200)
    for _ in range(n_layers):
        x = block(g, x, "decoder")
    return g.op("head", x, work=3_000_000, weight=200)


def encoder_decoder(g: Sketch, n_layers: int) -> int:
    memory = g.op("embed", work=50_000, weight=200)
    for _ in range(n_layers):
        memory = block(g, memory, "encoder")
    x = g.op("embed target", work=50_000)
    for _ in range(n_layers):
        x = block(g, x, "decoder", memory)
    return g.op("head", x, work=3_000_000, weight=200)


def unet(g: Sketch, depth: int) -> int:
    x, skips = g.op("stem", work=300_000), []
    for level in range(depth):
        for part in range(2):
            x = g.op("relu", g.op(f"down {level} {part}", x, work=800_000, weight=4**level), work=20_000)
        skips.append(x)
        x = g.op("pool", x, work=20_000)
    for level in reversed(range(depth)):
        x = g.op("concat", g.op(f"up {level}", x, work=300_000), skips[level], work=20_000)
        for part in range(2):
            x = g.op("relu", g.op(f"merge {level} {part}", x, work=900_000, weight=4**level), work=20_000)
    return x


def densenet(g: Sketch, n_layers: int) -> int:
    made = [g.op("stem", work=300_000)]
    for layer in range(n_layers):
        if layer % 12 == 11:
            made = [g.op("transition", *made, work=200_000, weight=2)]
        made.append(g.op("conv", g.op("concat", *made, work=30_000), work=300_000, weight=1))
    return g.op("head", *made, weight=10)


def wide_and_deep(g: Sketch, n_tables: int) -> int:
    dense = g.op("dense", work=200_000)
    tables = [g.op(f"table {t}", work=40_000, price=5_000, weight=50) for t in range(n_tables)]
    x = g.op("interact", dense, *tables, work=400_000)
    for layer in range(6):
        x = g.op(f"mlp {layer}", x, work=500_000, weight=4)
    return x


def towers(g: Sketch, n_towers: int, n_blocks: int) -> int:
    """Towers side by side of blocks in a row, joined at the end."""
    ends = []
    for t in range(n_towers):
        x = g.op(f"embed {t}", work=50_000)
        for _ in range(n_blocks):
            x = g.op(f"block {t}", x, work=600_000, weight=12)
        ends.append(x)
    return g.op("join", *ends)


def two_towers(g: Sketch, n_layers: int) -> int:
    ends = []
    for kind in ("image", "text"):
        x = g.op(f"embed {kind}", work=100_000)
        for _ in range(n_layers):
            x = block(g, x, kind)
        ends.append(x)
    return g.op("similarity", *ends)


def layered(g: Sketch, n_layers: int, width: int) -> int:
    """Random layers: every op takes one to three values of the layer before."""
    draw, row = random.Random(g.seed), [g.op("source", work=50_000)]
    for layer in range(n_layers):
        row = [
            g.op(f"{layer} {i}", *draw.sample(row, min(len(row), draw.randint(1, 3)))) for i in range(width)
        ]
    return g.op("sink", *row)


FAMILIES: dict[str, Callable[[Sketch], int]] = {
    "transformer, 24 layers": lambda g: transformer(g, 24),
    "transformer, 64 layers": lambda g: transformer(g, 64),
    "transformer, 128 layers": lambda g: transformer(g, 128),
    "encoder–decoder, 12 + 12": lambda g: encoder_decoder(g, 12),
    "UNet, depth 6": lambda g: unet(g, 6),
    "DenseNet, 60 layers": lambda g: densenet(g, 60),
    "wide and deep, 26 tables": lambda g: wide_and_deep(g, 26),
    "two towers, 12 layers each": lambda g: two_towers(g, 12),
    "towers, 4 × 20": lambda g: towers(g, 4, 20),
    "towers, 6 × 12": lambda g: towers(g, 6, 12),
    "random layers, 30 × 4": lambda g: layered(g, 30, 4),
    "transformer, 10,000 ops": lambda g: transformer(g, 714),
}


def problems(n_stages: int, seed: int = 0) -> Iterator[tuple[str, Problem]]:
    """A problem of every family."""
    for name, draw in FAMILIES.items():
        sketch = Sketch(seed)
        draw(sketch)
        yield name, sketch.problem(n_stages)
