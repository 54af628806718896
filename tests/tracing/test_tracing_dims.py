"""Shapes as formulas of input sizes: what is fitted at a few sizes holds at all of them."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.graph import Dim
from autopipe.tracing import capture
from autopipe.tracing.sizes.dims import Formulas, fit
from autopipe.units import size_at

B, H, W = Dim("batch", 2, (("x", 0),)), Dim("height", 32, (("x", 2),)), Dim("width", 32, (("x", 3),))
FORMULAS = {
    "flattened": lambda b, h, w: b * h * w,
    "patches": lambda b, h, w: (h // 8) * (w // 8),
    "class token": lambda b, h, w: (h // 16) * (w // 16) + 1,
    "two class tokens": lambda b, h, w: b * 0 + (h // 4) * (w // 4) + 2,
    "strides": lambda b, h, w: (h + 3) // 4,
    "down and up": lambda b, h, w: b * (w // 2),
    "rows": lambda b, h, w: 3 * b - 1,
    "square": lambda b, h, w: h * h,
    "both sides": lambda b, h, w: h + w,
}


@pytest.mark.parametrize("truth", FORMULAS.values(), ids=FORMULAS)
def test_a_formula_holds_at_sizes_that_were_not_seen(truth):
    seen = [(2, 32, 32), (3, 32, 32), (2, 17, 32), (2, 32, 17), (4, 49, 49)]
    points = [dict(zip(("batch", "height", "width"), p, strict=True)) for p in seen]
    formula = fit((B, H, W), points, [truth(*p) for p in seen])
    for sizes in itertools.product((1, 5), (24, 40, 100), (24, 40, 100)):
        assert size_at(formula, dict(zip(("batch", "height", "width"), sizes, strict=True))) == truth(*sizes)


def test_shapes_of_strided_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, 2, 1),
        nn.Flatten(2),
    ).eval()
    captured = capture(model, (torch.zeros(2, 3, 64, 64),))
    for sizes in ((1, 3, 40, 72), (5, 3, 96, 51)):
        dims = {d.name: sizes[d.where[0][1]] for d in captured.ops.dims}
        x = torch.zeros(sizes)
        for module, op in zip(model, captured.ops.compute, strict=True):
            x = module(x)
            assert tuple(size_at(s, dims) for s in op.outputs[0].shape) == tuple(x.shape)


class Windows(nn.Module):
    """As in Swin, an input shorter than the window shrinks it for good, to where it fits the bias no more."""

    def __init__(self):
        super().__init__()
        self.window = 24
        self.bias = nn.Parameter(torch.randn(24, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.window = min(self.window, x.shape[1])
        x = F.pad(x, (0, 0, 0, -x.shape[1] % self.window)).unflatten(1, (-1, self.window))
        return self.layer(x + self.bias).flatten(1, 2)


def test_a_size_the_model_fails_at_leaves_the_others_free():
    model = nn.Sequential(*(Windows() for _ in range(4))).eval()
    captured = capture(model, (torch.randn(2, 32, 4),))
    x = torch.randn(3, 50, 4)
    assert torch.equal(captured(x), model(x))


class Tokens(nn.Module):
    """As in LLaVA, a text holds a token for each piece of its image."""

    def __init__(self):
        super().__init__()
        self.words, self.pieces = nn.Embedding(10, 4), nn.Conv2d(3, 4, 8, 8)

    def forward(self, ids, image):
        x = self.words(ids)
        return x.masked_scatter((ids == 9).unsqueeze(-1), self.pieces(image).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("at", [0, 11])
def test_a_text_that_can_only_be_drawn_out(at):
    ids = torch.zeros(2, 16, dtype=torch.long)
    ids[:, at : at + 4] = 9
    image = torch.randn(2, 3, 16, 16)
    captured = capture(Tokens(), (ids, image))
    longer = torch.cat([ids, ids.new_ones(2, 7)], 1)
    assert torch.equal(captured(longer, image), captured.model(longer, image))


class Rounded(nn.Module):
    """A number that Python makes of a size by rounding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        n = int(x.shape[1] / 2 + 0.5)
        return self.layer(F.pad(x, (0, 0, 0, x.shape[1] % 2))).reshape(x.shape[0], n, 2, 4).sum(2)


def test_a_size_that_is_rounded_may_vary():
    captured = capture(Rounded(), (torch.randn(2, 16, 4),))
    for n in (16, 24, 15):
        x = torch.randn(3, n, 4)
        torch.testing.assert_close(captured(x), captured.model(x))


class _Viewed(nn.Module):
    """Lays what a pooling gives out anew, by how long that is for the example's length."""

    def __init__(self, lays_out):
        super().__init__()
        self.conv, self.pool, self.lays_out = (
            nn.Conv2d(1, 8, (16, 4), padding="same"),
            nn.AvgPool2d((6, 1)),
            lays_out,
        )
        self.layers = nn.Sequential(nn.Linear(42, 4), nn.Linear(4, 2))

    def forward(self, x):  # [batch, 256, channels]
        pooled = self.pool(self.conv(x[:, None])[..., 3:])
        return self.layers(self.lays_out(pooled)).mean(1)


@pytest.mark.parametrize(
    "lays_out",
    [
        lambda x: x.view(-1, 8, 42),
        lambda x: x.reshape((-1, x.shape[1], 42)),
        lambda x: torch.reshape(x, (-1, 8, 42)),
    ],
    ids=["view", "reshape", "function"],
)
def test_a_size_left_to_torch_is_how_much_there_is_by_the_others(lays_out):
    captured = capture(_Viewed(lays_out), (torch.randn(4, 256, 4),))
    (viewed,) = (op for op in captured.ops.compute if op.name in ("view", "reshape"))
    size = viewed.outputs[0].shape[0]
    assert [size_at(size, {"batch": n, "seq": 256, "features": 4}) for n in (1, 3, 8, 20)] == [1, 3, 8, 20]
    assert size_at(size, {"batch": 4, "seq": 512, "features": 4}) * 42 == 4 * 85
    assert not captured.variation.mixing.always


class _Halved(nn.Module):
    """Halves a picture and doubles it again, and goes by whether that is larger than what was given."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up, self.joins = nn.Upsample(scale_factor=(2, 2)), joins
        self.last = nn.Conv2d(8 if joins else 4, 3, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        x = self.up(self.down(y))
        for i in range(2, x.ndim):
            if x.shape[i] > y.shape[i]:
                x = x.narrow(i, 0, y.shape[i]) if self.joins else x.flip(i).narrow(i, 1, y.shape[i])
        return self.last(torch.cat((y, x), 1) if self.joins else x).mean((2, 3))


@pytest.mark.parametrize("joins", [True, False], ids=["fails elsewhere", "runs elsewhere"])
@pytest.mark.parametrize("side", [32, 33, 15])
def test_what_is_asked_of_even_and_odd_sizes_is_known_of_either(side, joins):
    torch.manual_seed(0)
    model = _Halved(joins).eval()
    captured = capture(model, (torch.randn(2, 3, side, side),))
    for at in ((16, 16), (17, 17), (16, 17), (33, 20), (64, 64)):
        x = torch.randn(3, 3, *at)
        torch.testing.assert_close(captured(x), model(x))


def test_a_size_that_equals_a_number_is_whole():
    """It was found as what had been kept of the number, 5.0, which is no size."""
    formulas = Formulas((B,), ({"batch": 2}, {"batch": 3}))
    assert type(formulas((5.0, 5.0))) is float
    assert type(formulas((5, 5))) is int
    assert type(formulas((True, True))) is bool
    assert type(formulas((1, 1))) is int
