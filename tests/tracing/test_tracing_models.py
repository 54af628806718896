"""A captured model does what the model does: outputs, gradients, dropout, in both modes, at other sizes."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from autopipe.errors import InputError
from autopipe.tracing import capture

D = 8


class Block(nn.Module):
    def __init__(self, d=D, p=0.1):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(d), nn.Dropout(p)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.drop(self.ff(self.norm(x)))


class Stack(nn.Module):
    """Blocks between an embedding-like layer and a head; subclasses change the glue."""

    def __init__(self, n=3):
        super().__init__()
        self.inp, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block() for _ in range(n)])

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.body(self.inp(x)))


class ModeInGlue(Stack):
    def forward(self, x):
        h = F.dropout(self.body(self.inp(x)), 0.3 if self.training else 0.0, training=self.training)
        return self.head(h)


class BranchOnMode(Stack):
    def forward(self, x):
        h = self.inp(x)
        if self.training:
            h = h + torch.randn_like(h) * 0.1
        return self.head(self.body(h))


class UnusedDraw(Stack):
    def forward(self, x):
        torch.rand([])
        return self.head(F.dropout(self.body(self.inp(x)), 0.5, self.training))


class DropoutIsIdentityInEval(Stack):
    def forward(self, x):
        h = self.inp(x)
        y = F.dropout(h, 0.5, self.training)
        return self.head(self.body(y) + h)


class Shared(Stack):
    def forward(self, x):
        h = self.inp(x)
        for _ in range(3):
            h = self.blocks[0](h)
        return self.head(h) + self.head(self.blocks[1](h))


class Tied(Stack):
    def __init__(self):
        super().__init__()
        self.head.weight = self.inp.weight

    def forward(self, x):
        return F.linear(self.body(self.inp(x)), self.inp.weight) + self.head.bias


class Parameters(Stack):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(D)) for _ in range(3)])
        nn.utils.parametrizations.weight_norm(self.head)

    def forward(self, x):
        h = self.inp(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            h = block(h) * scale
        return self.head(h) + F.linear(h, self.head.weight)


class Buffers(Stack):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.rand(D))
        self.register_buffer("temporary", torch.rand(D), persistent=False)
        self.plain = torch.rand(D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        h = self.norm((self.inp(x) + self.kept).transpose(1, 2)).transpose(1, 2)
        return self.head(self.body(h * self.temporary)) + self.plain


class InPlace(Stack):
    def forward(self, x):
        h = self.inp(x)
        out = h.new_zeros(h.shape[0], h.shape[1] + 1, D)
        out[:, 1:] = h
        out[:, 0] += 1.0
        view = out[:, :2]
        view.mul_(2.0)
        y = self.body(out).clone()
        y += 1
        return self.head(y.relu_())


class Regions(Stack):
    def forward(self, x):
        with torch.no_grad():
            frozen = self.blocks[0](self.inp(x)).mean(-1, keepdim=True)
            with torch.enable_grad():
                live = self.blocks[1](self.inp(x))
        with torch.autocast("cpu", torch.bfloat16):
            cast = self.blocks[2](live) @ torch.ones(D, D)
        return self.head(cast.float() * frozen)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


class CustomFunction(Stack):
    def forward(self, x):
        return self.head(Triple.apply(self.body(Triple.apply(self.inp(x)))))


class Vmap(Stack):
    def forward(self, x):
        h = self.inp(x)
        scale = h.mean()
        return self.head(self.body(torch.vmap(lambda row: row * scale + row.sum())(h)))


class Functional(Stack):
    def forward(self, x):
        doubled = {k: v * 2 for k, v in self.head.named_parameters()}
        return torch.func.functional_call(self.head, doubled, (self.body(self.inp(x)),))


class Checkpointed(Stack):
    def forward(self, x):
        h = self.inp(x)
        for i, block in enumerate(self.blocks):
            h = checkpoint(block, h, use_reentrant=bool(i % 2))
        return self.head(h)


class Numpy(Stack):
    def forward(self, x):
        shift = torch.from_numpy(np.linspace(0, 1, D).astype(np.float32))
        return self.head(
            self.body(self.inp(x) * np.float32(0.5) + shift + torch.as_tensor(np.ones(D), dtype=x.dtype))
        )


class Sizes(Stack):
    def forward(self, x):
        b, t = x.shape[:2]
        h = self.inp(x).view(b * t, -1) * ((b * t) ** -0.5) / np.sqrt(D)
        position = torch.arange(t, device=x.device).float() / max(t, 1)
        h = h.reshape(b, t, D) + position[None, :, None] + len(x) * 0.01
        return self.head(self.body(h)[:, -(t // 2) :])


class Hooked(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_hook(lambda m, a, out: out * 2)
        self.blocks[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))

    def forward(self, x):
        h = self.inp(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        return self.head(self.body(h))


class Leaking(Stack):
    """A block keeps its output on itself, and the model reads it there."""

    class Keeper(Block):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last * 2

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Keeper() for _ in range(3)])

    def forward(self, x):
        h = self.body(self.inp(x))
        return self.head(h + self.blocks[0].last)


class Routed(nn.Module):
    """A mixture of experts that chooses rows by data."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 2)
        self.experts = nn.ModuleList([Block(p=0.0) for _ in range(2)])

    def forward(self, x):
        flat = x.reshape(-1, D)
        choice = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().flatten()
            if rows.numel():
                out[rows] = expert(flat[rows])
        return out.view_as(x)


class Mixture(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Routed(), Block(), Routed()])


class RoutedToHit(Routed):
    """Runs only the experts that some row chose, by name, in a loop over them."""

    def forward(self, x):
        flat = x.reshape(-1, D)
        choice = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for i in choice.unique():
            rows = torch.where(choice == i)
            out[rows] = self.experts.get_submodule(f"{i}")(flat[rows])
        return out.view_as(x)


class MixtureOfHit(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), RoutedToHit(), Block(), RoutedToHit()])


class Counting(Stack):
    """A block whose result depends on how often it has run is kept whole."""

    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.inner = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            if self.training:
                self.steps += 1
            if self.steps % 2 == 1:
                x = self.inner[0](x)
            return self.inner[1](x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), self.Warm(), Block()])


class Recurrent(Stack):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True)

    def forward(self, x):
        out, (h, _) = self.lstm(self.inp(x))
        return self.head(self.body(out)) + h[-1][:, None]


class ReturnsSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(D, D)

    def forward(self, x):
        return self.proj(x), x.shape[1]


class SizesFromLeaf(Stack):
    def __init__(self):
        super().__init__()
        self.inp = ReturnsSizes()

    def forward(self, x):
        h, n = self.inp(x)
        return self.head(self.body(h)).reshape(-1, n * D)


class DeviceLiteral(Stack):
    def forward(self, x):
        return self.head(self.body(self.inp(x) + torch.arange(D, device="cpu").float()))


class FirstOfTorch(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.TransformerEncoderLayer(D, 2, 16, batch_first=True) for _ in range(3)))


class Gnn(Stack):
    """Messages scattered along edges."""

    def forward(self, x, edges):
        h = self.inp(x)
        for block in self.blocks:
            gathered = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            h = block(h + gathered.scatter_add(0, edges[0][:, None].expand(-1, D), h[edges[1]]))
        return self.head(h)


MODELS = [
    Stack, ModeInGlue, BranchOnMode, UnusedDraw, DropoutIsIdentityInEval, Shared, Tied, Parameters,
    Buffers, InPlace, Regions, CustomFunction, Vmap, Functional, Checkpointed, Numpy, Sizes, Hooked,
    Leaking, Mixture, Counting, Recurrent, SizesFromLeaf, DeviceLiteral, FirstOfTorch,
]  # fmt: skip


def run(function, model, args, kwargs):
    """Output leaves and gradients of one call from a fixed seed and fixed buffers."""
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    torch.manual_seed(3)
    model.zero_grad()
    out = [v for v in _pytree.tree_leaves(function(*args, **kwargs)) if isinstance(v, torch.Tensor)]
    sum(v.float().pow(2).sum() for v in out if v.requires_grad).backward()
    after = {k: v.clone() for k, v in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, after


def agree(captured, model, args, kwargs=None):
    expected, gradients, buffers = run(model, model, args, kwargs or {})
    found, found_gradients, found_buffers = run(captured, model, args, kwargs or {})
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, gradients)
    torch.testing.assert_close(found_buffers, buffers)


@pytest.mark.parametrize(
    ("cls", "captured_in"),
    [
        pytest.param(cls, mode, id=f"{cls.__name__}-{mode}", marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, cls in enumerate(MODELS)
        for j, mode in enumerate(("train", "eval"))
    ],
)
def test_same_as_the_model(cls, captured_in):
    torch.manual_seed(0)
    model = cls().train(captured_in == "train")
    captured = capture(model, (torch.randn(2, 6, D),))
    assert model.training is (captured_in == "train")
    for mode in (True, False):
        model.train(mode)
        for batch, length in ((2, 6), (5, 9)):
            agree(captured, model, (torch.randn(batch, length, D),))


def test_as_many_experts_as_the_data_hit():
    torch.manual_seed(0)
    model = MixtureOfHit().eval()
    captured = capture(model, (torch.randn(D).expand(2, 6, D),))
    agree(captured, model, (torch.randn(5, 9, D),))


def test_graph_network():
    model = Gnn()
    captured = capture(model, (torch.randn(5, D), torch.tensor([[0, 1, 2], [1, 2, 3]])))
    agree(captured, model, (torch.randn(9, D), torch.randint(0, 9, (2, 7))))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    masks: list
    scale: float = 1.0


@dataclasses.dataclass
class Result:
    out: torch.Tensor
    extra: dict


class Structured(Stack):
    def forward(self, batch, *rest, mode="sum", bias=None, **more):
        h = self.inp(batch.x) * batch.scale + sum(rest)
        for mask in batch.masks:
            h = h * mask
        h = self.body(h) if mode == "sum" else h
        extra = {
            "none": None,
            "pair": (h.mean(), [h.sum(), 3]),
            "name": "ok",
            "more": more["nested"]["a"] * 2,
        }
        return Result(self.head(h) if bias is None else self.head(h) + bias, extra)


def test_any_structure_in_and_out():
    def arguments(b):
        batch = Batch(torch.randn(b, 4, D), [torch.ones(b, 4, 1), torch.ones(b, 1, 1)], 0.5)
        return (batch, torch.randn(b, 4, D)), {"bias": torch.randn(D), "nested": {"a": torch.ones(2)}}

    model = Structured().eval()
    captured = capture(model, *arguments(2))
    args, kwargs = arguments(3)
    expected, found = model(*args, **kwargs), captured(*args, **kwargs)
    assert type(found) is Result
    torch.testing.assert_close(found.out, expected.out)
    assert list(found.extra) == list(expected.extra)
    assert found.extra["none"] is None
    assert found.extra["name"] == "ok"
    assert found.extra["pair"][1][1] == 3
    torch.testing.assert_close(found.extra["pair"], expected.extra["pair"])
    torch.testing.assert_close(found.extra["more"], expected.extra["more"])
    assert {"batch_x", "batch_masks_0", "rest_0", "bias"} <= {op.name for op in captured.ops.inputs}


@dataclasses.dataclass
class Scored:
    out: torch.Tensor

    def __post_init__(self):
        self.best = self.out.amax(-1)
        self.name = "scores"

    @functools.cached_property
    def total(self):
        return self.out.sum()


class Scoring(Stack):
    def forward(self, x):
        found = Scored(self.head(self.body(self.inp(x))))
        return found, found.total


def test_attributes_of_a_dataclass_beside_its_fields():
    model = Scoring().eval()
    captured = capture(model, (torch.randn(2, 4, D),))
    x = torch.randn(3, 4, D)
    (expected, total), (found, found_total) = model(x), captured(x)
    torch.testing.assert_close(found.best, expected.best)
    torch.testing.assert_close(found_total, total)
    torch.testing.assert_close(found.total, total)
    assert found.name == "scores"


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_compiled_and_scripted_modules_are_leaves():
    script = torch.jit.trace(nn.Linear(D, D), torch.randn(2, D))
    in_place = nn.Linear(D, D)
    in_place.compile(backend="eager")
    model = nn.Sequential(
        nn.Linear(D, D), torch.compile(nn.Linear(D, D), backend="eager"), script, in_place, Block(p=0.0)
    )
    captured = capture(model, (torch.randn(2, D),))
    assert [op.target for op in captured.ops.compute][:4] == ["0", "1", "2", "3"]
    agree(captured, model, (torch.randn(4, D),))


class Reads(nn.Module):
    """Asks a layer for all that it holds, beside one of the kind that is compiled."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.compiled = torch.compile(nn.Linear(D, D), backend="eager")

    def forward(self, x):
        return self.last(self.compiled(self.first(x))) * vars(self.first)["out_features"]


def test_what_is_asked_of_all_attributes_does_not_reach_the_compiler():
    model = Reads()
    agree(capture(model, (torch.randn(2, D),)), model, (torch.randn(4, D),))


def test_exported_program_and_graph_module():
    model = Stack().eval()
    x = torch.randn(2, 6, D)
    program = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(capture(program, (x,))(x), model(x))
    captured = capture(capture(model, (x,)).module, (x,))
    torch.testing.assert_close(captured(x)[0], model(x))


def test_an_exported_program_takes_the_sizes_that_it_was_exported_for():
    model, x = Stack().eval(), torch.randn(4, 6, D)
    fixed = capture(torch.export.export(model, (x,)).module(), (x,))
    with pytest.raises(InputError, match=r"is fixed at 4 .*dynamic_shapes"):
        fixed(x[:3])
    rows = ({0: torch.export.Dim("rows")},)
    free = capture(torch.export.export(model, (x,), dynamic_shapes=rows).module(), (x,))
    torch.testing.assert_close(free(x[:3]), model(x[:3]))
