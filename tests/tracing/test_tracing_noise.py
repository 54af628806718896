"""Every op of torch that draws gives one number where noise is to be even, or is known to draw whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.tracing.rows.noise import EvenNoise

CPU = torch.device("cpu")
G = torch.Generator
X = torch.tensor([[0.2, 0.9, 0.4], [0.7, 0.1, 0.5]])
NEGATIVE = -X
EXAMPLES: dict[str, Callable[[], Any]] = {
    "bernoulli": lambda: torch.bernoulli(X),
    "bernoulli.out": lambda: torch.bernoulli(X, out=torch.empty(2, 3)),
    "bernoulli.p": lambda: torch.bernoulli(X, 0.3),
    "bernoulli_.Tensor": lambda: torch.empty(2, 3).bernoulli_(X),
    "bernoulli_.float": lambda: torch.empty(2, 3).bernoulli_(0.3),
    "binomial": lambda: torch.binomial(X.mul(9).round(), X),
    "cauchy_": lambda: torch.empty(2, 3).cauchy_(),
    "exponential": lambda: torch.ops.aten.exponential(X),
    "exponential_": lambda: torch.empty(2, 3).exponential_(),
    "geometric_": lambda: torch.empty(2, 3).geometric_(0.2),
    "log_normal_": lambda: torch.empty(2, 3).log_normal_(),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True),
    "normal.Tensor_Tensor": lambda: torch.normal(X, X + 1),
    "normal.Tensor_Tensor_out": lambda: torch.normal(X, X + 1, out=torch.empty(2, 3)),
    "normal.Tensor_float": lambda: torch.normal(X, 2.0),
    "normal.Tensor_float_out": lambda: torch.normal(X, 2.0, out=torch.empty(2, 3)),
    "normal.float_Tensor": lambda: torch.normal(1.0, X),
    "normal.float_Tensor_out": lambda: torch.normal(1.0, X, out=torch.empty(2, 3)),
    "normal.float_float": lambda: torch.normal(1.0, 2.0, (2, 3)),
    "normal.float_float_out": lambda: torch.normal(1.0, 2.0, (2, 3), out=torch.empty(2, 3)),
    "normal_": lambda: torch.empty(2, 3).normal_(),
    "normal_functional": lambda: torch.ops.aten.normal_functional(X),
    "poisson": lambda: torch.poisson(X),
    "rand": lambda: torch.rand(2, 3),
    "rand.generator": lambda: torch.rand(2, 3, generator=G()),
    "rand.out": lambda: torch.rand(2, 3, out=torch.empty(2, 3)),
    "rand_like": lambda: torch.rand_like(X),
    "rand_like.generator": lambda: torch.rand_like(X, generator=G()),
    "randn": lambda: torch.randn(2, 3),
    "randn.generator": lambda: torch.randn(2, 3, generator=G()),
    "randn_like": lambda: torch.randn_like(X),
    "randn_like.generator": lambda: torch.randn_like(X, generator=G()),
    "rrelu_with_noise": lambda: F.rrelu(NEGATIVE, training=True),
    "rrelu_with_noise.out": lambda: torch.ops.aten.rrelu_with_noise(
        NEGATIVE, torch.empty(2, 3), training=True, out=torch.empty(2, 3)
    ),
    "rrelu_with_noise_": lambda: F.rrelu_(NEGATIVE.clone(), training=True),
    "_sample_dirichlet": lambda: torch._sample_dirichlet(X),
    "_standard_gamma": lambda: torch._standard_gamma(X),
    "uniform_": lambda: torch.empty(2, 3).uniform_(),
}
"""By overload, a call that comes to it."""
OF_VALUES = frozenset({
    "bernoulli", "bernoulli.out", "bernoulli_.Tensor", "binomial", "normal.Tensor_Tensor",
    "normal.Tensor_Tensor_out", "normal.Tensor_float", "normal.Tensor_float_out", "normal.float_Tensor",
    "normal.float_Tensor_out", "poisson", "rrelu_with_noise", "rrelu_with_noise.out", "rrelu_with_noise_",
    "_sample_dirichlet", "_standard_gamma",
})  # fmt: skip
"""Those that draw by the values that they are given, which are to show in what they give."""
WHOLE: dict[str, Callable[[], Any]] = {
    "multinomial": lambda: torch.multinomial(X, 2),
    "randint": lambda: torch.randint(9, (2, 3)),
    "randint_like": lambda: torch.randint_like(X, 9),
    "random": lambda: torch.empty(2, 3).random_(),
    "randperm": lambda: torch.randperm(9),
}
"""Those of whole numbers, by packet."""
MADE_OF_OTHERS = frozenset({
    "alpha_dropout", "alpha_dropout_", "dropout", "dropout_", "feature_alpha_dropout",
    "feature_alpha_dropout_", "feature_dropout", "feature_dropout_", "gru", "lstm", "rnn_relu", "rnn_tanh",
    "rrelu", "rrelu_", "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
})  # fmt: skip
"""Packets that come to others of these."""
OF_ACCELERATORS = frozenset({
    "_cudnn_attention_backward", "_cudnn_attention_forward", "_cudnn_rnn", "_efficient_attention_forward",
    "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_fused_dropout", "_lstm_mps",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    "_triton_scaled_dot_attention", "miopen_rnn",
})  # fmt: skip
"""Packets that a CPU has not, or not with dropout: they are told how much to leave out."""
DRAWING_NOTHING = frozenset({
    "_cudnn_attention_forward_no_dropout_inplace", "_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_",
    "_fused_sdp_choice", "_nested_tensor_softmax_with_shape",
})  # fmt: skip
"""Packets that draw nothing themselves, or by a seed that they are given."""


def _overloads() -> list[Any]:
    """Every overload of torch's that is said to draw."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    packets = {s.name.removeprefix("aten::"): None for s in schemas}
    found = []
    for packet in (getattr(torch.ops.aten, name, None) for name in sorted(packets)):
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            if torch.Tag.nondeterministic_seeded in op.tags:
                found.append(op)
    return found


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def _packet(name: str) -> str:
    """That of an overload, or of what it does in place."""
    return name.partition(".")[0].removesuffix("_functional").removesuffix("_")


def test_each_op_that_draws_is_among_these() -> None:
    known = MADE_OF_OTHERS | OF_ACCELERATORS | DRAWING_NOTHING | WHOLE.keys()
    ops = _overloads()
    assert len(ops) > 100
    others = {_name(op) for op in ops} - {
        n for n in map(_name, ops) if {n.partition(".")[0], _packet(n)} & known
    }
    assert {*map(_packet, others)} == {*map(_packet, EXAMPLES)}


def test_what_is_left_out_elsewhere_is_said_by_an_argument_of_one_of_two_names() -> None:
    """By that it is left out where noise is even."""
    asked = [op for op in _overloads() if _name(op).partition(".")[0] in OF_ACCELERATORS - {"_fused_dropout"}]
    assert asked
    for op in asked:
        assert {"dropout", "dropout_p"} & {a.name for a in op._schema.arguments}, op


class _Met(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes which overloads are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(_name(func))
        return func(*args, **(kwargs or {}))


def _first(made: Any) -> Tensor:
    first: Tensor = made[0] if isinstance(made, tuple) else made
    return first


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_gives_one_number_whatever_is_drawn(name: str) -> None:
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        with EvenNoise(CPU), _Met() as met:
            made.append(_first(EXAMPLES[name]()))
        assert name in met.names
    assert made[0].equal(made[1])
    assert made[0].equal(made[2])
    assert (made[0].unique().numel() > 1) == (name in OF_VALUES or "dropout" in name)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_none_or_refused(name: str) -> None:
    with EvenNoise(CPU, any_op=True):
        assert not WHOLE[name]().any()
    with pytest.raises(ValueError, match="may go by rows"), EvenNoise(CPU):
        WHOLE[name]()


def test_slopes_are_those_of_gradients() -> None:
    x = NEGATIVE.clone().requires_grad_()
    with EvenNoise(CPU):
        made = F.rrelu(x, training=True)
        made.sum().backward()
    torch.testing.assert_close(made, F.rrelu(x))
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x, made)
