"""Unusual inputs, outputs and module structure: nesting, dataclasses, None, sharing, parametrizations."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .registry import register

WIDTH = 16


def rows(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One tensor [batch, 16]."""
    return (torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(batch)),), {}


def sequences(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One tensor [batch, length, 16]."""
    return (torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(batch)),), {}


def layers(n: int = 4) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(n)])


@dataclasses.dataclass
class Result:
    """A dataclass output with a None, a default and nesting."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    cache: Tensor | None = None
    name: str = "result"
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)


@register(sequences)
class DataclassOutput(nn.Module):
    """Returns a dataclass that nests tuples, dicts, None, an int, a string and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Result:
        hidden: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden = (*hidden, x)
        return Result(x, hidden, None, "deep", {"first": [hidden[0].mean(), 3], "n_tokens": x.size(1)})


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@register(sequences)
class NamedTupleOutput(nn.Module):
    """Named tuples between blocks and at the end, one field None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PairLayer() for _ in range(4)])

    def forward(self, x: Tensor) -> Pair:
        pair = Pair(x, None)
        for layer in self.layers:
            pair = layer(pair)
        return pair._replace(right=None)


class PairLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        left = F.relu(self.lin(pair.left))
        return Pair(left, left.detach() if pair.right is None else pair.right + 1)


def _nested(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = sequences(batch, length)
    nested = {"a": [x, (x[..., 0], None)], "b": collections.OrderedDict(scale=2.0, mode="sum", flag=True)}
    return (nested, 3), {"extra": (x * 2, [x - 1])}


@register(_nested)
class NestedInputs(nn.Module):
    """Dicts of lists of tuples, None, ints, floats, strings and flags among the inputs; defaults unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(
        self, nested: Any, n: int, *, extra: Any, bias: Tensor | None = None, act: str = "relu"
    ) -> Any:
        x, (gate, nothing) = nested["a"]
        assert nothing is None
        for i in range(n + 1):
            x = getattr(torch, act)(self.layers[i](x)) * nested["b"]["scale"]
        if nested["b"]["mode"] == "sum" and nested["b"]["flag"]:
            x = x + sum([extra[0], *extra[1]])
        if bias is not None:
            x = x + bias
        return {"out": [x * gate.unsqueeze(-1), {"n": n, "none": None}], 7: (x.mean(),)}


class ModelOutput(collections.OrderedDict):
    """transformers' output style: a dict that answers to attributes and indexing."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class OutputLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **kwargs: Any) -> ModelOutput:
        return ModelOutput(hidden=self.dense(x) * kwargs.get("scale", 1.0), attentions=None)


@register(sequences)
class OutputObjects(nn.Module):
    """Blocks that hand each other dict objects and are called with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OutputLayer() for _ in range(4)])

    def forward(self, x: Tensor, scale: float = 0.5) -> dict[str, Any]:
        out = ModelOutput(hidden=x, attentions=None)
        for layer in self.layers:
            out = layer(out.hidden, scale=scale)
        return dict(out)


@register(rows)
class SharedModules(nn.Module):
    """One module under two names, one called three times, one weight used by two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.alias = self.a
        self.c = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.alias(self.b(x))))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@register(rows)
class Parametrized(nn.Module):
    """Weight norm, spectral norm, orthogonal and hand-written parametrizations, read in glue code too."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.symmetric = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.orthogonal(self.spectral(self.normed(x))))
        return F.linear(self.symmetric(x), self.normed.weight)


@register(rows)
class ParameterGlue(nn.Module):
    """Parameters only, used functionally: lists, dicts, slices, stacks, expanded, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.2 for _ in range(4)])
        self.biases = nn.ParameterDict({str(i): torch.zeros(WIDTH) for i in range(4)})
        self.packed = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.2)
        self.alpha = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for i, weight in enumerate(self.weights):
            x = F.relu(F.linear(x, weight, self.biases[str(i)])) + self.alpha.expand(WIDTH)
        top, bottom = self.packed.split(WIDTH)
        x = x @ top.t() + F.linear(x, bottom)
        mixed = torch.stack(list(self.weights)).mean(0)
        return torch.addmm(self.biases["0"], x, mixed.T.contiguous())


class LowRank(nn.Module):
    """LoRA's wrapper: a frozen layer under another name, and a low-rank update beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})
        self.scaling, self.active = {"default": 2.0}, ["default"]

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        for name in self.active:
            update = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x)))
            out = out + update * self.scaling[name]
        return out


@register(sequences)
class Lora(nn.Module):
    """Adapters put around the layers of a finished model, as PEFT does it; the wrapper's weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks:
            block[0] = LowRank(block[0])
        self.head = LowRank(self.head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + F.linear(x, self.head.weight)


class IntegerLinear(nn.Linear):
    """A linear layer that keeps its class and holds int8 weights with a scale per row, frozen."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@register(sequences)
class Quantized(nn.Module):
    """Integer weights in layers that keep their class, read in glue code too, between trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([IntegerLinear(WIDTH) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        last = self.layers[-1]
        return F.linear(x, last.weight.to(x.dtype) * last.scale)


@register(sequences)
class Strided(nn.Module):
    """Values that are expanded, transposed, flipped or every second element, across the cuts and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = self.token.expand(x.shape[0], 3, -1)
        x = self.layers[0](torch.cat([wide, x], 1)).transpose(0, 1)
        every_second = self.layers[1](x)[::2]
        mean = every_second.mean(0, keepdim=True).expand_as(x)
        x = self.layers[2](x.flip(0) + mean).transpose(0, 1)
        windows = x.unfold(1, 2, 1)
        y = self.layers[3](windows.mean(-1))
        return y.mT, windows, mean, torch.as_strided(y.contiguous(), (2, 2), (1, 1))


@register(rows)
class Ensemble(nn.Module):
    """``torch.func``: vmap over stacked parameters of equal members, and a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.trunk(x))
        weight = torch.stack([m.weight for m in self.members])
        bias = torch.stack([m.bias for m in self.members])
        y = torch.func.vmap(lambda w, b: torch.tanh(F.linear(x, w, b)))(weight, bias)
        state = {"weight": self.head.weight * 2, "bias": self.head.bias}
        return torch.func.functional_call(self.head, state, (y.mean(0),))


@register(sequences)
class Sequential(nn.Module):
    """Nested Sequentials and an Identity, indexed, sliced and iterated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.ReLU()),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        for module in self.net[:2]:
            x = module(x)
        return self.net[3](self.net[-2](x))


@register(rows, n_stages=1)
class OneLayer(nn.Module):
    """A model of a single parameter: as many stages as it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Hooked(nn.Linear):
    """A layer whose hooks change its input and output."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.register_forward_hook(lambda module, args, output: output + args[0])


@register(rows)
class Hooks(nn.Module):
    """Forward hooks, a pre-hook with keywords, and a full backward hook that scales gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Hooked() for _ in range(4)])
        self.layers[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)
        return x + 1


@register(rows)
def Scripted() -> nn.Module:
    """A scripted submodule and a compiled one among ordinary layers."""
    inner = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    compiled = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, compiled, nn.Linear(WIDTH, WIDTH))
