"""Sizes that Python reads in C, where nobody is asked: tables, arithmetic of floats, texts, bytes, iterators.

All come out alike at sizes near those of the example, and otherwise at one that is far.
"""

from __future__ import annotations

import array
import bisect
import collections
import ctypes
import datetime
import enum
import itertools
import json
import math
import operator
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .registry import WIDTH, sequences, trap

FAR = 66
BUCKETS = [1.0] * 40 + [3.0] * 100
SPECIAL = {FAR: 3.0, 99: 4.0}
PAIRS = {(FAR, WIDTH): 3.0}


class Known(enum.Enum):
    """A size that has a name."""

    LONG = FAR


def far(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Much longer where another length is asked for."""
    return sequences(batch, FAR if length == 9 else length, seed)


@trap(inputs=far)
def place_in_a_list(self: Any, x: Tensor) -> Tensor:
    return self.run(x * BUCKETS[x.size(1)])


@trap(inputs=far, table=lambda: tuple(BUCKETS))
def place_in_a_tuple(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.table[x.size(1) - 1])


@trap(inputs=far)
def place_in_a_text(self: Any, x: Tensor) -> Tensor:
    return self.run(x * int(("1" * 40 + "3" * 100)[x.size(1)]))


@trap(inputs=far)
def place_in_bytes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (bytes(40) + bytes([2]) * 100)[x.shape[1]])


@trap(inputs=far)
def place_from_behind(self: Any, x: Tensor) -> Tensor:
    return self.run(x * BUCKETS[::-1][-x.size(1)])


@trap(inputs=far)
def place_in_a_deque(self: Any, x: Tensor) -> Tensor:
    return self.run(x * collections.deque(BUCKETS)[x.size(1)])


@trap(inputs=far)
def place_in_an_array(self: Any, x: Tensor) -> Tensor:
    return self.run(x * array.array("d", BUCKETS)[x.size(1)])


@trap(inputs=far, table=lambda: np.array(BUCKETS))
def place_in_an_array_of_numpy(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(self.table[x.size(1)]))


@trap(inputs=far)
def place_in_a_range(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (2 if range(0, 300, 3)[x.size(1)] > 150 else 1))


@trap(inputs=far)
def greatest_of_a_slice(self: Any, x: Tensor) -> Tensor:
    return self.run(x * max(BUCKETS[: x.size(1)]))


@trap(inputs=far)
def taken_out_of_a_list(self: Any, x: Tensor) -> Tensor:
    return self.run(x * list(BUCKETS).pop(x.size(1)))


@trap(inputs=far)
def put_into_a_list(self: Any, x: Tensor) -> Tensor:
    table = [0.0] * 50
    table.insert(x.size(1), 5.0)
    return self.run(x + table[-1])


@trap(inputs=far)
def key_of_a_dict(self: Any, x: Tensor) -> Tensor:
    return self.run(x * {FAR: 3.0}.get(x.size(1), 1.0))


@trap(inputs=far)
def key_of_a_dict_of_the_file(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    return self.run(x * SPECIAL[n] if n in SPECIAL else x)


@trap(inputs=far, table=lambda: dict(SPECIAL))
def key_of_a_dict_that_is_held(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.table.get(x.shape[1], 1.0))


@trap(inputs=far)
def key_of_a_dict_by_default(self: Any, x: Tensor) -> Tensor:
    table = collections.defaultdict(lambda: 1.0, SPECIAL)
    return self.run(x * table[x.size(1)])


@trap(inputs=far)
def key_of_two_parts(self: Any, x: Tensor) -> Tensor:
    return self.run(x * PAIRS.get((x.size(1), x.size(2)), 1.0))


@trap(inputs=far)
def key_that_is_missed(self: Any, x: Tensor) -> Tensor:
    try:
        return self.run(x * SPECIAL[x.size(1)])
    except KeyError:
        return self.run(x)


@trap(inputs=far, chosen=lambda: frozenset({FAR, 99}))
def member_of_a_set(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) in self.chosen else x)


@trap(inputs=far)
def no_member_of_a_set(self: Any, x: Tensor) -> Tensor:
    return self.run(x if x.size(1) not in {FAR, 99} else x * 2)


@trap(inputs=far)
def member_of_two_sets(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + len({FAR, 7} & {x.size(1)})))


@trap(inputs=far, kept=dict)
def table_kept_by_size(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    if n not in self.kept:
        self.kept[n] = torch.arange(n)[:, None] / 9
    return self.run(x + self.kept[n])


@trap(inputs=far)
def float_times_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if 0.5 * x.size(1) > 20 else x)


@trap(inputs=far)
def float_less_than_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) > 20.5 else x)


@trap(inputs=far)
def float_over_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1.0 / x.size(1)))


@trap(inputs=far)
def float_to_the_power_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if 2.0 ** x.size(1) > 1e12 else x)


@trap(inputs=far)
def float_divided_with_rest(self: Any, x: Tensor) -> Tensor:
    quotient, _ = divmod(200.0, x.size(1))
    return self.run(x * 2 if quotient < 4 else x)


@trap(inputs=far)
def imaginary_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if abs(1j * x.size(1)) > 20 else x)


@trap(inputs=far)
def greater_of_a_float(self: Any, x: Tensor) -> Tensor:
    return self.run(x * max(x.size(1), 20.5) / 20.5)


@trap(inputs=far)
def place_among_floats(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + bisect.bisect_left([20.5, 99.5], x.size(1))))


@trap(inputs=far)
def as_an_index(self: Any, x: Tensor) -> Tensor:
    return self.run(x * BUCKETS[operator.index(x.size(1))])


@trap(inputs=far)
def taken_by_an_item_getter(self: Any, x: Tensor) -> Tensor:
    return self.run(x * operator.itemgetter(x.size(1))(BUCKETS))


@trap(inputs=far)
def first_of_an_iterator(self: Any, x: Tensor) -> Tensor:
    return self.run(x * max(itertools.islice(BUCKETS, x.size(1))))


@trap(inputs=far)
def repeated_by_an_iterator(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if sum(itertools.repeat(0.5, x.size(1))) > 20 else x)


@trap(inputs=far)
def combinations_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + len(list(itertools.combinations(range(11), x.size(1) // 33)))))


@trap(inputs=far)
def sign_of_a_number(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if chr(x.size(1)) == "B" else x)


@trap(inputs=far)
def digits_to_another_base(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if hex(x.size(1)) == "0x42" else x)


@trap(inputs=far)
def digits_by_a_template(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if "%x" % x.size(1) == "42" else x)  # noqa: UP031


@trap(inputs=far)
def text_by_a_template(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if "n%d" % x.size(1) == "n66" else x)  # noqa: UP031


@trap(inputs=far)
def width_of_a_text(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if len(f"{1:{x.size(1)}}") > 40 else x)


@trap(inputs=far)
def filled_with_zeros(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if len("1".zfill(x.size(1))) > 40 else x)


@trap(inputs=far)
def packed_into_bytes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if struct.pack("<i", x.size(1))[0] > 40 else x)


@trap(inputs=far)
def days(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if datetime.timedelta(days=x.size(1)) > datetime.timedelta(weeks=6) else x)


@trap(inputs=far)
def near_a_number(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if math.isclose(x.size(1), FAR) else x)


@trap(inputs=far)
def distance_of_numbers(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if math.dist((0.0,), (x.size(1),)) > 20 else x)


@trap(inputs=far)
def scaled_by_the_machine(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if math.ldexp(1.0, x.size(1)) > 1e12 else x)


@trap(inputs=far)
def square_of_numpy(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if np.eye(x.size(1)).sum() > 20 else x)


@trap(inputs=far)
def size_before_a_list(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if len(x.size(1) * [0]) > 20 else x)


@trap(inputs=far)
def elements_of_its_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.shape.numel() > 1000 else x)


@trap(inputs=far, more=lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]))
def layer_by_a_bucket(self: Any, x: Tensor) -> Tensor:
    return self.run(self.more[x.size(1) // 40](x))


@trap(inputs=far, more=lambda: nn.ModuleDict({"n66": nn.Linear(WIDTH, WIDTH)}))
def layer_by_a_name(self: Any, x: Tensor) -> Tensor:
    name = f"n{x.size(1)}"
    return self.run(self.more[name](x) if name in self.more else x)


def _bucket(n: int) -> float:
    return BUCKETS[n]


@trap(inputs=far)
def place_in_a_helper(self: Any, x: Tensor) -> Tensor:
    return self.run(x * _bucket(x.size(1)))


@trap(inputs=far)
def place_of_half_a_size_in_training(self: Any, x: Tensor) -> Tensor:
    return self.run(x * BUCKETS[x.size(1)] if self.training else x)


@trap(inputs=far)
def place_of_a_sum(self: Any, x: Tensor) -> Tensor:
    total = 0
    for n in x.shape[1:]:
        total += n
    return self.run(x * BUCKETS[total])


@trap(inputs=far)
def fraction_of_a_size(self: Any, x: Tensor) -> Tensor:
    half = x.size(1) / 2
    return self.run(x * 2 if "%.1f" % half == "33.0" else x)  # noqa: UP031


@trap(inputs=far)
def written_as_json(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if json.dumps([x.size(1)]) == "[66]" else x)


@trap(inputs=far)
def hash_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if hash(x.size(1)) > 40 else x)


@trap(inputs=far)
def hash_of_a_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if hash((x.size(1), 3)) == hash((FAR, 3)) else x)


@trap(inputs=far)
def number_of_numpy(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if np.int64(x.size(1)) > 40 else x)


@trap(inputs=far)
def number_of_c(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if ctypes.c_int(x.size(1)).value > 40 else x)


@trap(inputs=far)
def sum_by_the_method_of_int(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if int.__add__(x.size(1), 1) > 40 else x)


@trap(inputs=far)
def member_of_an_enum(self: Any, x: Tensor) -> Tensor:
    try:
        return self.run(x * len(Known(x.size(1)).name))
    except ValueError:
        return self.run(x)


# ------------------------------------------------------------ how many are distinct


def wide(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """As long as wide in some calls."""
    return sequences(batch, 8 if length > 6 else length, seed)


@trap(inputs=wide)
def sizes_in_a_set(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len(set(x.shape)))


@trap(inputs=wide)
def sizes_in_a_set_as_written(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len({x.size(0), x.size(1), 8}))


@trap(inputs=wide)
def sizes_counted_as_keys(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len(collections.Counter(x.shape)) + len(dict.fromkeys(x.shape)))
