"""ResNet-50 of operators and Inception v3 of layers, from their architecture, in the published format.

Costs follow from shapes and two figures of a device, those that the published BERT files imply. Other
likenesses are left to ``likeness``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_FLOPS_PER_MS = 9.3e9
_BYTES_PER_MS = 32e6
_LINK_BYTES_PER_MS = 2**31 / 1000
_DEVICE_BYTES = 17185374208.0


@dataclasses.dataclass
class Net:
    """A convolutional net under construction, as the nodes and edges of a file.

    With ``operators``, parameters are nodes of their own; with ``training``, each op has a backward node,
    each parameter one that updates it. ``link`` divides what a transfer costs.
    """

    batch: int
    operators: bool = False
    training: bool = False
    link: float = 1.0
    nodes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    edges: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    shape: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    gradient: dict[int, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    tape: list[tuple[int, tuple[int, ...], int, float, list[tuple[int, float]]]] = dataclasses.field(
        default_factory=list
    )

    def op(
        self,
        kind: str,
        *inputs: int,
        channels: int = 0,
        side: int = 0,
        flops: float = 0.0,
        weights: Sequence[int] = (),
    ) -> int:
        """An op whose output has so many channels of side × side, 32-bit; ``weights`` counts parameters."""
        channels = channels or self.shape[inputs[0]][0]
        side = side or self.shape[inputs[0]][1]
        out = self._bytes(channels, side)
        latency = flops / _FLOPS_PER_MS + out / _BYTES_PER_MS
        sizes = [4.0 * n for n in weights]
        v = self._node(kind, latency, out + (0 if self.operators else sum(sizes)))
        self.shape[v] = channels, side
        held = []
        for size in sizes if self.operators else ():
            w = self._node(f"{kind} weight", 0.0, size, of=v)
            self._edge(w, v, size)
            held.append((w, size))
        for u in inputs:
            self._edge(u, v, self._bytes(*self.shape[u]))
        self.tape.append((v, inputs, len(inputs), latency, held))
        return v

    def data(self, n_devices: int) -> dict[str, Any]:
        """The file's content."""
        if self.training:
            self._backward()
        return {
            "maxSizePerFPGA": _DEVICE_BYTES,
            "maxFPGAs": n_devices,
            "maxCPUs": 1,
            "nodes": self.nodes,
            "edges": self.edges,
        }

    def _backward(self) -> None:
        """A node per op that takes the gradients of its output and its inputs, and updates per parameter."""
        arriving: dict[int, list[int]] = {}
        for v, inputs, _, latency, held in reversed(self.tape):
            size = self._bytes(*self.shape[v])
            came = arriving.get(v, [])
            if len(came) > 1:
                total = self._node("accumulate", size / _BYTES_PER_MS, size, backward=True)
                for g in came:
                    self._edge(g, total, size)
                came = [total]
            g = self._node(f"{v} gradient", 2 * latency, size, of=v, backward=True)
            for u in came:
                self._edge(u, g, size)
            for u in inputs:
                self._edge(u, g, self._bytes(*self.shape[u]))
                arriving.setdefault(u, []).append(g)
            for w, n in held:
                self._edge(w, g, n)
                step = self._node("update", n / _BYTES_PER_MS, n, of=v, backward=True)
                self._edge(w, step, n)
                self._edge(g, step, size)

    def _bytes(self, channels: int, side: int) -> float:
        return 4.0 * self.batch * channels * side * side

    def _node(self, name: str, latency: float, size: float, of: int = -1, backward: bool = False) -> int:
        v = len(self.nodes)
        colour = {} if name == "accumulate" else {"colorClass": v if of < 0 else of}
        self.nodes.append(
            {
                "name": f"{name} {v}",
                "id": v,
                "supportedOnFpga": 1,
                "cpuLatency": 10 * latency,
                "fpgaLatency": latency,
                "isBackwardNode": backward,
                "size": size,
                **colour,
            }
        )
        return v

    def _edge(self, source: int, target: int, size: float) -> None:
        cost = next(
            (e["cost"] for e in self.edges if e["sourceId"] == source), size / _LINK_BYTES_PER_MS / self.link
        )
        self.edges.append({"sourceId": source, "destId": target, "cost": cost, "size": size})


def conv(
    g: Net, x: int, channels: int, size: tuple[int, int] = (1, 1), stride: int = 1, relu: bool = True
) -> int:
    """Convolution, batch norm and ReLU."""
    before, side = g.shape[x]
    side = -(-side // stride)
    n = before * channels * size[0] * size[1]
    x = g.op("conv", x, channels=channels, side=side, flops=2.0 * g.batch * n * side * side, weights=[n])
    x = g.op("norm", x, weights=[channels] * 4)
    return g.op("relu", x) if relu else x


def resnet(training: bool = False) -> dict[str, Any]:
    """ResNet-50 of operators: (3, 4, 6, 3) bottleneck blocks."""
    g = Net(32, operators=True, training=training)
    x = g.op("image", channels=3, side=224)
    x = g.op("pool", conv(g, x, 64, (7, 7), 2), side=56)
    for group, n_blocks in enumerate((3, 4, 6, 3)):
        for b in range(n_blocks):
            width, stride = 64 << group, 2 if group and not b else 1
            y = conv(g, conv(g, x, width), width, (3, 3), stride)
            y = conv(g, y, 4 * width, relu=False)
            x = conv(g, x, 4 * width, stride=stride, relu=False) if not b else x
            x = g.op("relu", g.op("add", y, x))
    x = g.op("pool", x, side=1)
    g.op("head", x, channels=1000, side=1, flops=2.0 * g.batch * 2048 * 1000, weights=[2048 * 1000, 1000])
    return g.data(6)


def inception() -> dict[str, Any]:
    """Inception v3 of layers, after its published table of blocks."""
    g = Net(128, link=15.0)
    x = g.op("image", channels=3, side=299)
    x = conv(g, conv(g, conv(g, x, 32, (3, 3), 2), 32, (3, 3)), 64, (3, 3))
    x = conv(g, conv(g, g.op("pool", x, side=73), 80), 192, (3, 3))
    x = g.op("pool", x, side=35)
    for pooled in (32, 64, 64):
        a, b = conv(g, x, 64), conv(g, conv(g, x, 48), 64, (5, 5))
        c = conv(g, conv(g, conv(g, x, 64), 96, (3, 3)), 96, (3, 3))
        x = _concat(g, a, b, c, conv(g, g.op("pool", x), pooled))
    a = conv(g, x, 384, (3, 3), 2)
    b = conv(g, conv(g, conv(g, x, 64), 96, (3, 3)), 96, (3, 3), 2)
    x = _concat(g, a, b, g.op("pool", x, side=18))
    for width in (128, 160, 160, 192):
        a, b = conv(g, x, 192), conv(g, conv(g, conv(g, x, width), width, (1, 7)), 192, (7, 1))
        c = conv(g, conv(g, conv(g, x, width), width, (7, 1)), width, (1, 7))
        c = conv(g, conv(g, c, width, (7, 1)), 192, (1, 7))
        x = _concat(g, a, b, c, conv(g, g.op("pool", x), 192))
    a = conv(g, conv(g, x, 192), 320, (3, 3), 2)
    b = conv(g, conv(g, conv(g, conv(g, x, 192), 192, (1, 7)), 192, (7, 1)), 192, (3, 3), 2)
    x = _concat(g, a, b, g.op("pool", x, side=9))
    for _ in range(2):
        a, b = conv(g, x, 320), conv(g, x, 384)
        b = _concat(g, conv(g, b, 384, (1, 3)), conv(g, b, 384, (3, 1)))
        c = conv(g, conv(g, x, 448), 384, (3, 3))
        c = _concat(g, conv(g, c, 384, (1, 3)), conv(g, c, 384, (3, 1)))
        x = _concat(g, a, b, c, conv(g, g.op("pool", x), 192))
    x = g.op("pool", x, side=1)
    g.op("head", x, channels=1000, side=1, flops=2.0 * g.batch * 2048 * 1000, weights=[2048 * 1000])
    return g.data(6)


def _concat(g: Net, *parts: int) -> int:
    return g.op("concat", *parts, channels=sum(g.shape[v][0] for v in parts))
