"""More arithmetic with sizes: every way in which Python can turn one into something else."""

from __future__ import annotations

import bisect
import decimal
import itertools
import math
import operator
import random
import statistics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, images, trap


@trap()
def rounded(self: Any, x: Tensor) -> Tensor:
    return self.run(x * round(x.size(1) * 0.3) + round(x.size(1) / 4))


@trap()
def ceiling_of_a_quotient(self: Any, x: Tensor) -> Tensor:
    return self.run(x * math.ceil(x.size(1) / 4) - -(-x.size(1) // 4))


@trap()
def quotient_and_rest(self: Any, x: Tensor) -> Tensor:
    quotient, rest = divmod(x.size(1), 4)
    return self.run(x * quotient + rest)


@trap()
def whole_part(self: Any, x: Tensor) -> Tensor:
    return self.run(x * int(x.size(1) * 1.5) + math.trunc(x.size(1) / 5))


@trap()
def last_half(self: Any, x: Tensor) -> Tensor:
    return self.run(x[:, -(x.size(1) // 2) :])


@trap()
def layers_by_a_size(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers[: 1 + x.size(1) % 4]:
        x = layer(x).tanh()
    return x


@trap()
def layer_by_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(self.layers[x.size(1) % 4](x))


@trap()
def backwards(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.stack([x[:, i] * (i + 1) for i in range(x.size(1) - 1, -1, -1)], 1))


@trap()
def zipped_with_a_range(self: Any, x: Tensor) -> Tensor:
    return self.run(x + sum(i for i, _ in zip(range(x.size(1)), itertools.count(), strict=False)))


@trap()
def counted_by_torch(self: Any, x: Tensor) -> Tensor:
    for i in torch.arange(x.size(1)):
        x = x + i
    return self.run(x / 9)


@trap()
def shape_compared(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.shape == (2, 6, WIDTH) else x)


@trap("safe")
def shapes_compared(self: Any, x: Tensor) -> Tensor:
    y = x[:, :6]
    return self.run(x * 2 if x.size() == y.size() else x)


@trap()
def shape_reversed(self: Any, x: Tensor) -> Tensor:
    return self.run(x.reshape(tuple(x.shape)[::-1]).permute(2, 1, 0))


@trap()
def shape_put_together(self: Any, x: Tensor) -> Tensor:
    return self.run(x.view((*x.shape[:-1], 4, 2)).flip(-1).reshape(*x.shape[:2], -1))


@trap()
def array_of_a_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(np.array(x.shape).sum()))


@trap()
def list_of_nothing(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len([None] * x.size(1)))


@trap()
def text_repeated(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len("ab" * x.size(1)))


@trap()
def plain_list_cut(self: Any, x: Tensor) -> Tensor:
    return self.run(x * sum([3, 1, 4, 1, 5, 9, 2, 6, 5, 3][: x.size(1)]))


@trap()
def range_indexed(self: Any, x: Tensor) -> Tensor:
    return self.run(x * range(x.size(1))[-1])


@trap()
def length_of_a_range(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len(range(0, x.size(1), 4)))


@trap()
def bisected(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + bisect.bisect([3, 7, 11], x.size(1))))


@trap()
def mean_of_sizes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(statistics.mean(x.shape)))


@trap()
def decimal_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(decimal.Decimal(x.size(1)) / 4))


@trap()
def padded_text(self: Any, x: Tensor) -> Tensor:
    return self.run(x * int(f"{x.size(1):03d}") + len(f"{x.size(1):b}"))


@trap()
def binary_digits(self: Any, x: Tensor) -> Tensor:
    return self.run(x * bin(x.size(1)).count("1"))


@trap()
def bytes_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * x.size(1).to_bytes(2, "little")[0] + len(bytes(x.size(1))))


@trap()
def numpy_zeros(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.from_numpy(np.linspace(0, 1, x.size(1), dtype=np.float32))[:, None])


@trap()
def seeded_by_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * random.Random(int(x.size(1))).random())


@trap()
def sum_of_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x * sum(x.shape) / 9 + max(*x.shape) - min(x.shape))


@trap()
def any_and_all(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if any(n > 8 for n in x.shape) and all(x.shape) else x)


@trap()
def sizes_in_a_dict(self: Any, x: Tensor) -> Tensor:
    sizes = dict(zip("bld", x.shape, strict=True))
    return self.run(x * sizes["l"] + len(set(x.shape)))


@trap()
def made_by_operator(self: Any, x: Tensor) -> Tensor:
    return self.run(x * operator.index(x.size(1)) + operator.attrgetter("shape")(x)[1])


@trap()
def comparison_as_a_number(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + (x.size(1) > 7)))


@trap()
def chained_comparison(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if 4 < x.size(1) <= 7 else x)


@trap()
def padded_to_a_multiple(self: Any, x: Tensor) -> Tensor:
    return self.run(F.pad(x, (0, 0, 0, -x.size(1) % 4), value=1.0))


@trap()
def interpolated(self: Any, x: Tensor) -> Tensor:
    y = F.interpolate(x.transpose(1, 2), size=x.size(1) * 2)
    return self.run(y.transpose(1, 2))


@trap()
def interpolated_by_a_factor(self: Any, x: Tensor) -> Tensor:
    return self.run(F.interpolate(x.transpose(1, 2), scale_factor=1.5).transpose(1, 2))


@trap()
def pooled(self: Any, x: Tensor) -> Tensor:
    return self.run(F.adaptive_avg_pool1d(x.transpose(1, 2), max(1, x.size(1) // 3)).transpose(1, 2))


@trap()
def unfolded(self: Any, x: Tensor) -> Tensor:
    return self.run(x.unfold(1, 3, 2).mean(-1))


@trap()
def causal_mask(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    mask = torch.full((n, n), float("-inf")).triu(1)
    return self.run((x @ x.transpose(1, 2) / math.sqrt(x.size(-1)) + mask).softmax(-1) @ x)


@trap()
def squeezed(self: Any, x: Tensor) -> Tensor:
    return self.run(x.mean(1, keepdim=True).squeeze())


@trap()
def broadcast_by_chance(self: Any, x: Tensor) -> Tensor:
    return self.run(x + x[:1])


@trap()
def flattened_batch(self: Any, x: Tensor) -> Tensor:
    return self.run(x.view(-1, WIDTH)).view(len(x), -1, WIDTH)


@trap()
def stepped_positions(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.linspace(0, 1, x.size(1))[:, None] + torch.arange(0, x.size(1), 1)[:, None])


@trap(inputs=images)
def windows(self: Any, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    x = F.pad(x, (0, -w % 4, 0, -h % 4))
    x = x.view(b, c, x.size(2) // 4, 4, x.size(3) // 4, 4).mean((3, 5))
    return self.run(x.movedim(1, -1))


@trap(inputs=images)
def square_or_not(self: Any, x: Tensor) -> Tensor:
    x = x if x.size(2) == x.size(3) else x.transpose(2, 3)
    return self.run(x.movedim(1, -1))


@trap()
def tiles(self: Any, x: Tensor) -> Tensor:
    return self.run(x.repeat(1, x.size(1) // 3, 1).repeat_interleave(2, dim=1))


@trap()
def while_it_is_long(self: Any, x: Tensor) -> Tensor:
    while x.size(1) > 3:
        x = x[:, ::2] + 1
    return self.run(x)


@trap()
def last_position(self: Any, x: Tensor) -> Tensor:
    return self.run(x[:, x.size(1) - 1] + x[torch.arange(len(x)), -1])


@trap(scale=lambda: nn.Parameter(torch.ones(16, WIDTH)))
def table_cut(self: Any, x: Tensor) -> Tensor:
    return self.run(x + self.scale[: x.size(1)])


@trap()
def shape_unpacked_with_a_star(self: Any, x: Tensor) -> Tensor:
    first, *rest = x.shape
    return self.run(x.reshape(first * rest[0], *rest[1:]) * len(rest)).view(first, *rest)


@trap()
def walrus(self: Any, x: Tensor) -> Tensor:
    return self.run(x * n if (n := x.size(1)) > 7 else x)


@trap()
def power_of_two(self: Any, x: Tensor) -> Tensor:
    n = 1 << (x.size(1) - 1).bit_length()
    return self.run(F.pad(x, (0, 0, 0, n - x.size(1))))


@trap()
def isinstance_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (x.size(1) if isinstance(x.size(1), int) and type(x.shape) is torch.Size else 1))


@trap()
def number_of_the_class_of_a_size(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    return self.run(x * type(n)(3) + type(n / 2)(0.5))


@trap()
def longer_than_a_number_of_numpys(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) > np.float64(8) else x)


@trap()
def bounds_of_numpys_joined(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if not (x.size(1) <= np.float64(8)) & (x.size(0) > 0) else x)


@trap()
def times_a_logarithm_of_numpys(self: Any, x: Tensor) -> Tensor:
    return self.run(x - (x.size(1) - 1) * np.log(3) + divmod(x.size(1), np.float64(4))[1])


class Metres(float):
    """A number with a way of its own to be written."""

    def __repr__(self) -> str:
        return f"{float(self)} m"


@trap()
def times_a_number_of_a_kind_of_its_own(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (x.size(1) * Metres(0.5)) if x.size(1) > Metres(8) else x)


@trap("safe")
def longer_than_a_tensor(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) > torch.tensor(8) else x)


@trap("safe")
def longer_by_what_a_tensor_holds(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if (torch.tensor(x.size(1)) > 8).item() else x)


@trap("safe")
def longer_by_the_last_place(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.arange(x.size(1)).max() > 7 else x)


@trap()
def cast_of_a_count(self: Any, x: Tensor) -> Tensor:
    n = torch.ones(x.size(1))
    return self.run(x * int(n.sum()) / float(n.sum() + 1))


@trap("safe")
def looked_up_by_a_count(self: Any, x: Tensor) -> Tensor:
    return self.run(x * range(1, 20)[torch.tensor(x.size(1) // 3)])


@trap()
def filled_up_by_a_quotient_of_numpys(self: Any, x: Tensor) -> Tensor:
    whole = int(np.ceil(x.size(1) / 4) * 4)
    filled = F.pad(x, (0, 0, 0, whole - x.size(1)))
    return self.run(filled.unflatten(1, (-1, 4)).mean(2, keepdim=True).sum(1) + x)


@trap("safe")
def whole_number_of_numpys(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (np.ceil(x.size(1) / 4) * 2).astype(int).item())
