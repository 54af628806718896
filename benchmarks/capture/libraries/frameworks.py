"""Models of frameworks and toolkits with layers of their own: Keras on torch, fastai, quantised and Lipschitz
layers, hyperdimensional computing, operators, logic, label sequences and policies.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .catalogue import add, image, rows, tokens

__all__: list[str] = []

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("DDE_BACKEND", "pytorch")


class _Scored(nn.Module):
    """A model and what its loss is of the target."""

    def __init__(self, body: nn.Module, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, x: Any, target: Any) -> Any:
        output = self.body(x)
        return {"loss": self.loss(output, target), "output": output}


def classes(width: int = 16, n: int = 5) -> Any:
    """Rows and their classes."""
    return lambda b, _: (torch.randn(b, width), torch.randint(0, n, (b,)))


def pictures(side: int = 32, n: int = 5) -> Any:
    """Images and their classes."""
    return lambda b, _: (torch.randn(b, 3, side, side), torch.randint(0, n, (b,)))


# Keras
def _keras_mlp(k: Any) -> nn.Module:
    return k.Sequential([k.Input((16,)), k.layers.Dense(32, activation="relu"), k.layers.BatchNormalization(), k.layers.Dropout(0.2), k.layers.Dense(32, activation="gelu"), k.layers.Dense(5)])


def _keras_cnn(k: Any) -> nn.Module:
    x = i = k.Input((32, 32, 3))
    for width in (8, 16):
        y = k.layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        y = k.layers.Conv2D(width, 3, padding="same")(y)
        x = k.layers.MaxPooling2D()(k.layers.Activation("relu")(k.layers.Add()([k.layers.Conv2D(width, 1)(x), y])))
    return k.Model(i, k.layers.Dense(5, activation="softmax")(k.layers.GlobalAveragePooling2D()(x)))


def _keras_text(k: Any) -> nn.Module:
    i = k.Input((None,), dtype="int32")
    x = k.layers.Embedding(64, 32)(i)
    x = k.layers.LayerNormalization()(x + k.layers.MultiHeadAttention(4, 8)(x, x))
    x = k.layers.LayerNormalization()(x + k.layers.Dense(32)(k.layers.Dense(64, activation="relu")(x)))
    return k.Model(i, k.layers.Dense(5)(k.layers.GlobalMaxPooling1D()(x)))


add("mlp", "keras", _keras_mlp, rows(16))
add("cnn", "keras", _keras_cnn, lambda b, n: (torch.randn(b, 32, 32, 3),))
add("text", "keras", _keras_text, tokens())
add("lstm", "keras", lambda k: k.Sequential([k.Input((12, 8)), k.layers.LSTM(16, return_sequences=True), k.layers.LSTM(16), k.layers.Dense(3)]), lambda b, n: (torch.randn(b, 12, 8),))
add("loss", "keras", lambda k: _Scored(k.Sequential([k.Input((16,)), k.layers.Dense(32, activation="relu"), k.layers.Dense(32, activation="relu"), k.layers.Dense(5)]), F.cross_entropy), classes())
add("mobilenet", "keras", lambda k: k.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=5), lambda b, n: (torch.randn(b, 32, 32, 3),))

# fastai
add("tabular_parts", "fastai.tabular.model", lambda m: m.TabularModel([(10, 4), (7, 3)], 6, 3, [32, 16], ps=[0.1, 0.1], embed_p=0.1), lambda b, n: (torch.stack([torch.randint(0, 10, (b,)), torch.randint(0, 7, (b,))], 1), torch.randn(b, 6)))
add("xresnet_parts", "fastai.vision.models.xresnet", lambda m: m.xresnet18(n_out=5), image(side=64))
add("xse_resnext", "fastai.vision.models.xresnet", lambda m: m.xse_resnext18(n_out=5), image(side=64))
add("qrnn_free_lm", "fastai.text.models.awdlstm", lambda m: m.AWD_LSTM(64, 32, 48, 2, hidden_p=0.0, input_p=0.0, embed_p=0.0, weight_p=0.5), lambda b, n: (torch.randint(1, 64, (2, n)),))
add("focal", "fastai.losses", lambda m: _Scored(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)), m.FocalLossFlat()), classes())
add("smoothing", "fastai.losses", lambda m: _Scored(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)), m.LabelSmoothingCrossEntropyFlat()), classes())

# torchhd
add("random_projection", "torchhd.embeddings", lambda m: nn.Sequential(nn.Linear(16, 16), m.Projection(16, 128), nn.Tanh(), nn.Linear(128, 5)), rows(16))
add("sinusoid", "torchhd.embeddings", lambda m: nn.Sequential(nn.Linear(16, 16), m.Sinusoid(16, 128), nn.Linear(128, 5)), rows(16))


class _Bound(nn.Module):
    def __init__(self, hd: Any) -> None:
        super().__init__()
        self.hd = hd
        self.place, self.value = hd.embeddings.Random(16, 128), hd.embeddings.Level(10, 128)
        self.classify = hd.models.Centroid(128, 5, requires_grad=True)
        nn.init.normal_(self.classify.weight)

    def forward(self, x: Any) -> Any:
        bound = self.hd.bind(self.place.weight, self.value(x))
        return self.classify(self.hd.hard_quantize(self.hd.multiset(bound)), dot=True)


add("bound", "torchhd", _Bound, lambda b, n: (torch.rand(b, 16),))

# DeepXDE
add("fnn", "deepxde.nn", lambda m: m.FNN([2, *[32] * 3, 1], "tanh", "Glorot uniform"), rows(2))
add("pfnn", "deepxde.nn", lambda m: m.PFNN([2, [16, 16], [16, 16], 2], "tanh", "Glorot uniform"), rows(2))
add("deeponet", "deepxde.nn", lambda m: _Listed(m.DeepONet([10, 32, 32], [2, 32, 32], "relu", "Glorot normal")), lambda b, n: (torch.randn(b, 10), torch.randn(b, 2)))
add("cartesian", "deepxde.nn", lambda m: _Listed(m.DeepONetCartesianProd([10, 32, 32], [2, 32, 32], "relu", "Glorot normal")), lambda b, n: (torch.randn(b, 10), torch.randn(7, 2)))


class _Listed(nn.Module):
    """A model that takes its arguments in one tuple."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(args)


class _Residual(nn.Module):
    """The residual of a heat equation, as a loss."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.net = m.FNN([2, *[32] * 3, 1], "tanh", "Glorot uniform")

    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            u = self.net(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            dxx = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)[0][:, 0]
        return (du[:, 1] - dxx).square().mean()


add("heat", "deepxde.nn", _Residual, rows(2))

# Brevitas
add("quant_mlp", "brevitas.nn", lambda m: nn.Sequential(m.QuantLinear(16, 32, bias=True, weight_bit_width=4), m.QuantReLU(bit_width=4), m.QuantLinear(32, 32, bias=True, weight_bit_width=4), m.QuantReLU(bit_width=4), m.QuantLinear(32, 5, bias=True, weight_bit_width=4)), rows(16))
add("quant_cnn", "brevitas.nn", lambda m: nn.Sequential(m.QuantConv2d(3, 8, 3, weight_bit_width=4), nn.BatchNorm2d(8), m.QuantReLU(bit_width=4), m.QuantConv2d(8, 8, 3, weight_bit_width=4), m.QuantReLU(bit_width=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), m.QuantLinear(8, 5, bias=True, weight_bit_width=4)), image(side=32))
add("quant_identity", "brevitas.nn", lambda m: nn.Sequential(m.QuantIdentity(), nn.Linear(16, 32), m.QuantTanh(), nn.Linear(32, 5)), rows(16))

# embeddings of numbers
add("linear_relu", "rtdl_num_embeddings", lambda m: nn.Sequential(m.LinearReLUEmbeddings(6, 8), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 3)), rows(6))
add("periodic", "rtdl_num_embeddings", lambda m: nn.Sequential(m.PeriodicEmbeddings(6, 8, lite=False), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 3)), rows(6))
add("piecewise", "rtdl_num_embeddings", lambda m: nn.Sequential(m.PiecewiseLinearEmbeddings(m.compute_bins(torch.randn(100, 6), n_bins=8), 8, activation=False, version="B"), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 3)), rows(6))


# label sequences
class _Tagger(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.embed, self.lstm, self.head, self.crf = nn.Embedding(64, 32), nn.LSTM(32, 16, bidirectional=True, batch_first=True), nn.Linear(32, 5), m.CRF(5)

    def forward(self, ids: Any, labels: Any, mask: Any) -> Any:
        return -self.crf(self.head(self.lstm(self.embed(ids))[0]), labels, mask).mean()


def tagged(b: int, n: int) -> tuple[Any, ...]:
    """Tokens, their labels, and which are there."""
    lengths = torch.randint(2, n + 1, (b,))
    lengths[0] = n
    return torch.randint(1, 64, (b, n)), torch.randint(0, 5, (b, n)), torch.arange(n) < lengths[:, None]


add("tagger", "TorchCRF", _Tagger, tagged)

# iTransformer
I = {"num_variates": 6, "lookback_len": 24, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "pred_length": (4, 8)}  # noqa: E741
add("plain", "iTransformer", lambda m: m.iTransformer(**I, use_reversible_instance_norm=True), lambda b, n: (torch.randn(b, 24, 6),))
add("two_dims", "iTransformer", lambda m: m.iTransformer2D(**I, num_time_tokens=4), lambda b, n: (torch.randn(b, 24, 6),))

# layers with a Lipschitz constant, on manifolds, of another width
add("lipschitz", "deel.torchlip", lambda m: m.Sequential(m.SpectralLinear(16, 32), m.GroupSort2(), m.SpectralLinear(32, 32), m.GroupSort2(), m.FrobeniusLinear(32, 1)), rows(16))
add("lipschitz_cnn", "deel.torchlip", lambda m: m.Sequential(m.SpectralConv2d(3, 8, (3, 3), padding="same"), m.GroupSort2(), m.ScaledL2NormPool2d((2, 2)), nn.Flatten(), m.SpectralLinear(8 * 16 * 16, 5)), lambda b, n: (torch.randn(b, 3, 32, 32),))
add("hkr", "deel.torchlip", lambda m: _Scored(m.Sequential(m.SpectralLinear(16, 32), m.GroupSort2(), m.SpectralLinear(32, 32), m.GroupSort2(), m.FrobeniusLinear(32, 1)), lambda y, t: m.functional.hinge_margin_loss(y[:, 0], t, 1.0)), lambda b, n: (torch.randn(b, 16), torch.randint(0, 2, (b,)) * 2.0 - 1))


def _constrained(m: Any, names: tuple[str, ...]) -> nn.Module:
    layers = [nn.Linear(16, 16) for _ in names]
    for layer, name in zip(layers, names, strict=True):
        getattr(m, name)(layer, "weight", **({"rank": 4} if "rank" in name else {}))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(16, 3))


add("orthogonal", "geotorch", lambda m: _constrained(m, ("orthogonal", "orthogonal", "sphere")), rows(16))
add("low_rank", "geotorch", lambda m: _constrained(m, ("low_rank", "positive_definite", "skew")), rows(16))


def _mu(m: Any) -> nn.Module:
    make = lambda width: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), m.MuReadout(width, 5))  # noqa: E731
    model = make(32)
    m.set_base_shapes(model, make(8), delta=make(16))
    return model


add("readout", "mup", _mu, rows(16))


class _Adversarial(nn.Module):
    """Domains told apart behind a reversed gradient."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()), nn.Linear(32, 5)
        self.domain = nn.Sequential(m.RevGrad(alpha=0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Any, labels: Any, domains: Any) -> Any:
        h = self.features(x)
        return F.cross_entropy(self.head(h), labels) + F.cross_entropy(self.domain(h), domains)


add("domains", "pytorch_revgrad", _Adversarial, lambda b, n: (torch.randn(b, 16), torch.randint(0, 5, (b,)), torch.randint(0, 2, (b,))))


# logic
class _Logic(nn.Module):
    """How far rows of two classes satisfy what is said of them."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m, self.net = m, nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, a: Any, b: Any) -> Any:
        m = self.m
        holds, negated = m.Predicate(self.net), m.Connective(m.fuzzy_ops.NotStandard())
        every = m.Quantifier(m.fuzzy_ops.AggregPMeanError(p=2), quantifier="f")
        x, y = m.Variable("x", a), m.Variable("y", b)
        return 1 - (every(x, holds(x)).value + every(y, negated(holds(y))).value) / 2


add("predicate", "ltn", _Logic, lambda b, n: (torch.randn(b, 8), torch.randn(b, 8)))

# policies
add("mlp", "rsl_rl.modules", lambda m: m.MLP(12, 4, [32, 32], "elu"), rows(12), package="rsl_rl")
add("normalised", "rsl_rl.modules", lambda m: nn.Sequential(m.EmpiricalNormalization(12), m.MLP(12, 4, [32, 32], "elu")), rows(12), package="rsl_rl")

# molecules, hypergraphs, knowledge
add("hgnn", "dhg", lambda m: _Hyper(m), lambda b, n: (torch.randn(12, 16),))


class _Hyper(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.net = m.models.HGNN(16, 32, 5, drop_rate=0.0)
        self.graph = m.Hypergraph(12, [(0, 1, 2), (2, 3), (4, 5, 6, 7), (8, 9), (9, 10, 11), (0, 11)])

    def forward(self, x: Any) -> Any:
        return self.net(x, self.graph)


# flows for inference by simulation
add("maf", "sbi.neural_nets.net_builders", lambda m: _Density(m.build_maf(torch.randn(100, 3), torch.randn(100, 4), hidden_features=16, num_transforms=2)), lambda b, n: (torch.randn(b, 3), torch.randn(b, 4)))
add("nsf", "sbi.neural_nets.net_builders", lambda m: _Density(m.build_nsf(torch.randn(100, 3), torch.randn(100, 4), hidden_features=16, num_transforms=2)), lambda b, n: (torch.randn(b, 3), torch.randn(b, 4)))
add("mdn", "sbi.neural_nets.net_builders", lambda m: _Density(m.build_mdn(torch.randn(100, 3), torch.randn(100, 4), hidden_features=16, num_components=3)), lambda b, n: (torch.randn(b, 3), torch.randn(b, 4)))


class _Density(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, theta: Any, x: Any) -> Any:
        return self.net.loss(theta, x).mean()
