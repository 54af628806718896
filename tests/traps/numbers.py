"""Numbers that Python makes of sizes and of data, and what it decides by them."""

from __future__ import annotations

import fractions
import functools
import itertools
import math
import operator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import WIDTH, tokens, trap


@trap()
def blocks_of_a_range(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.cat([x[:, i : i + 4] * (i + 1) for i in range(0, x.size(1), 4)], 1))


@trap()
def every_position(self: Any, x: Tensor) -> Tensor:
    out = []
    state = x[:, 0] * 0
    for i in range(x.size(1)):
        state = self.layers[0](state + x[:, i]).tanh()
        out.append(state)
    return self.run(torch.stack(out, 1))


@trap()
def split_in_fours(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.cat([p - p.mean(1, keepdim=True) for p in x.split(4, 1)], 1))


@trap()
def chunks(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.cat([p - p.mean(1, keepdim=True) for p in x.chunk(4, 1)], 1))


@trap()
def tensor_split(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.cat([p - p.mean(1, keepdim=True) for p in torch.tensor_split(x, 2, 1)], 1))


@trap()
def parity(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) & 1 else x)


@trap()
def shifted(self: Any, x: Tensor) -> Tensor:
    return self.run(x[:, x.size(1) >> 1 :])


@trap()
def masked_bits(self: Any, x: Tensor) -> Tensor:
    return self.run(x * ((x.size(1) | 8) ^ 3))


@trap()
def root_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * int(x.size(1) ** 0.5))


@trap()
def integer_root(self: Any, x: Tensor) -> Tensor:
    return self.run(x * math.isqrt(x.size(1)))


@trap()
def list_by_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * [1, 2, 3, 4, 5, 6, 7, 8, 9, 10][x.size(1)])


@trap()
def dict_by_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * {6: 1.0, 9: 3.0}.get(x.size(1), 5.0))


@trap()
def set_of_sizes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) in {9, 12} else x)


@trap()
def text_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * {"n6": 2.0}.get(f"n{x.size(1)}", 3.0))


@trap()
def text_of_a_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len(str(tuple(x.shape)) + "9" * x.size(1)))


@trap()
def greatest_divisor(self: Any, x: Tensor) -> Tensor:
    return self.run(x * math.gcd(x.size(1), 6))


@trap()
def as_often_as_a_divisor(self: Any, x: Tensor) -> Tensor:
    if self.training:  # 6 at several lengths, and not at others
        for _ in range(math.gcd(x.size(1), 6)):
            x = x * 1.5
    return self.run(x)


@trap()
def logarithm(self: Any, x: Tensor) -> Tensor:
    return self.run(x * math.log(x.size(1)) + math.ceil(math.log2(x.size(1))))


@trap()
def bit_length(self: Any, x: Tensor) -> Tensor:
    return self.run(x * x.size(1).bit_length())


@trap()
def product_of_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x / math.prod(x.shape) + functools.reduce(operator.mul, x.shape[:2]))


@trap()
def numpy_of_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(np.prod(x.shape)) / 100)


@trap()
def numpy_positions(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.from_numpy(np.arange(x.size(1), dtype=np.float32))[:, None])


@trap()
def fraction(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(fractions.Fraction(x.size(1), 4)))


@trap()
def smallest(self: Any, x: Tensor) -> Tensor:
    return self.run(x[:, : min(x.size(1), 7)] * max(x.shape))


@trap()
def sorted_sizes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * sorted(x.shape)[0])


@trap()
def repeated_list(self: Any, x: Tensor) -> Tensor:
    return self.run(x * sum([0.5] * x.size(1)))


@trap()
def product_of_ranges(self: Any, x: Tensor) -> Tensor:
    return self.run(x * sum(i * j for i, j in itertools.product(range(x.size(1)), range(2))))


@trap()
def numbered(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.stack([row * i for i, row in enumerate(x.transpose(0, 1))], 1))


@trap()
def halving(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    while n > 1:
        x, n = x * 1.5, n // 2
    return self.run(x)


def _depth(n: int) -> int:
    return 0 if n <= 1 else 1 + _depth(n // 2)


@trap()
def recursion(self: Any, x: Tensor) -> Tensor:
    return self.run(x * _depth(x.size(1)))


@trap()
def early_return(self: Any, x: Tensor) -> Tensor:
    return self.run(x) if x.size(1) < 8 else x


@trap()
def tried(self: Any, x: Tensor) -> Tensor:
    try:
        return self.run(x.view(x.size(0), 2, 3, WIDTH).flatten(1, 2) * 2)
    except RuntimeError:
        return self.run(x)


@trap()
def matched(self: Any, x: Tensor) -> Tensor:
    match x.shape:
        case (_, 6, _):
            return self.run(x * 2)
        case _:
            return self.run(x)


@trap()
def loop_over_a_count(self: Any, x: Tensor) -> Tensor:
    n = (x.detach().abs().amax((0, 1)) > 2.2).sum()
    for _ in range(torch.arange(n).size(0)):
        x = x * 1.1
    return self.run(x)


@trap("safe", inputs=tokens)
def one_hot_then_branch(self: Any, ids: Tensor) -> Tensor:
    hot = F.one_hot(ids)
    x = F.pad(hot, (0, WIDTH - hot.size(-1))).float()
    return self.run(x * 2 if hot.size(-1) == WIDTH else x)


@trap(inputs=tokens)
def repeated_then_loop(self: Any, ids: Tensor) -> Tensor:
    x = torch.repeat_interleave(ids.flatten()).float()
    out = torch.zeros(WIDTH)
    for i in range(0, len(x), 10):
        out = out + x[i]
    return self.run(out[None] / 9)


@trap(inputs=tokens)
def range_to_the_largest(self: Any, ids: Tensor) -> Tensor:
    steps = torch.arange(ids.sum())
    x = torch.ones(ids.size(0), WIDTH)
    return self.run(x * (2 if steps.shape[0] % 2 else 1))


@trap("safe", inputs=tokens)
def zeros_of_a_count(self: Any, ids: Tensor) -> Tensor:
    pad = torch.zeros(ids.max(), WIDTH)
    return self.run(torch.ones(2, WIDTH) * (pad.size(0) if pad.size(0) > 6 else 1))


@trap(inputs=tokens)
def uniques_counted(self: Any, ids: Tensor) -> Tensor:
    return self.run(torch.ones(2, WIDTH) * (2 if len(ids.unique()) > 6 else 1))


@trap("safe", inputs=tokens)
def slice_then_branch(self: Any, ids: Tensor) -> Tensor:
    table = torch.arange(20)[: ids.max() + ids.min()]
    return self.run(torch.ones(2, WIDTH) * (2 if table.numel() > 7 else 1))


@trap()
def branch_on_data(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.mean() > 0 else x)


@trap("safe")
def assertion_on_data(self: Any, x: Tensor) -> Tensor:
    assert not x.isnan().any(), "not a number"
    return self.run(x)


@trap()
def data_in_a_try(self: Any, x: Tensor) -> Tensor:
    try:
        return self.run(x * (1 / int(x.detach().mean() > 0)))
    except ZeroDivisionError:
        return self.run(x)


@trap()
def smaller_of_two(self: Any, x: Tensor) -> Tensor:
    return self.run(x * min(x.mean(), x.std() - 1))


@trap("refused")
def order_of_rows(self: Any, x: Tensor) -> Tensor:
    rows = sorted(x.flatten(0, 1).unbind(), key=lambda r: float(r.detach().sum()))
    return self.run(torch.stack(rows))


@trap("safe")
def compiling(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.compiler.is_compiling() else x)


@trap("safe")
def exporting_in_training(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.training and torch.compiler.is_exporting() else x)


@trap("safe")
def scripting(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.jit.is_tracing() or torch.jit.is_scripting() else x)


@trap("safe")
def branch_on_contiguity(self: Any, x: Tensor) -> Tensor:
    return self.run(x if x.is_contiguous() else x * 2)


@trap("safe")
def conditional(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.cond(x.mean() > 0, torch.sin, torch.cos, (x,)))


@trap("safe")
def lengths_of_a_batch(self: Any, x: Tensor) -> Tensor:
    lengths = torch.full((x.size(0),), x.size(1))
    lengths[0] -= 1
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.run(torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0])


@trap()
def tables_of_two_shapes(self: Any, x: Tensor) -> Tensor:
    wide = torch.tensor(np.array([np.arange(WIDTH) ** i for i in range(2)])).float()
    long = torch.tensor(np.array([np.arange(WIDTH) * i for i in range(3)])).float()
    return self.run(x + wide.mean(0) + long.mean(0))


@trap(first=lambda: np.ones((2, WIDTH)), second=lambda: np.ones((3, WIDTH)))
def arrays_of_two_shapes(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.tensor(self.first).float().sum(0) + torch.tensor(self.second).float().sum(0))


@trap()
def power_of_a_size_by_remainder(self: Any, x: Tensor) -> Tensor:
    return self.run(x * pow(x.size(1), 2, 7))


@trap()
def complex_infinity(self: Any, x: Tensor) -> Tensor:
    h = self.run(x)
    return h + (h * complex(0, float("inf"))).abs().clamp(max=2.0)
