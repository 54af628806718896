"""How tensors lie in memory, asked in code, where inputs come in one order and another, or with one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import WIDTH, images, trap


def either(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    if seed % 2 == 0:
        return (torch.randn(batch, length, WIDTH, generator=g),)
    return (torch.randn(length, batch, WIDTH, generator=g).transpose(0, 1),)


def other(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    return either(batch, length, seed + 1)


@trap("safe", inputs=either)
def contiguity_of_the_input(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.is_contiguous() else x)


@trap("safe", inputs=other)
def contiguity_of_the_input_turned(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.is_contiguous() else x)


def in_every_second(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    x = torch.randn(batch, length, 2 * WIDTH, generator=torch.Generator().manual_seed(seed))
    return (x[..., ::2] if seed % 2 else x[..., :WIDTH].contiguous(),)


def one_for_all(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(seed)).expand(batch, -1, -1)
    return (x if seed % 2 else x.contiguous(),)


@trap("safe", inputs=in_every_second)
def contiguity_where_there_are_gaps(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.is_contiguous() else x)


@trap("safe", inputs=lambda b, n, s: in_every_second(b, n, s + 1))
def contiguity_where_an_example_has_gaps(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.is_contiguous() else x)


@trap("safe", inputs=one_for_all)
def contiguity_of_one_row_for_all(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.is_contiguous() else x)


@trap("safe", inputs=lambda b, n, s: one_for_all(b, n, s + 1))
def contiguity_where_an_example_is_one_row(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.is_contiguous() else x)


@trap("safe", inputs=either)
def viewed_or_reshaped(self: Any, x: Tensor) -> Any:
    try:
        y = x.view(-1, WIDTH) * 2
    except RuntimeError:
        y = x.reshape(-1, WIDTH)
    return self.run(y)


@trap("safe", inputs=either)
def contiguity_of_a_result(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if (x + 1).is_contiguous() else x)


@trap("safe", inputs=either)
def storage_order(self: Any, x: Tensor) -> Any:
    return self.run(x.permute(sorted(range(3), key=x.stride, reverse=True)).reshape(-1, WIDTH))


def im(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    x = images(batch, length, seed)[0]
    return (x.to(memory_format=torch.channels_last),) if seed % 2 else (x,)


@trap("safe", inputs=im)
def channels_last_asked(self: Any, x: Tensor) -> Any:
    return self.run((x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x).movedim(1, -1))


@trap("safe")
def contiguity_of_a_transposed(self: Any, x: Tensor) -> Any:
    return self.run(x * 2 if x.transpose(0, 1).is_contiguous() else x)


@trap("safe")
def viewed_where_a_slice_can_be(self: Any, x: Tensor) -> Any:
    y = x[:, 1:]
    try:
        z = y.view(-1, WIDTH) * 2
    except RuntimeError:
        z = y.reshape(-1, WIDTH)
    return self.run(z)


@trap("safe")
def strided_by_strides(self: Any, x: Tensor) -> Any:
    return self.run(torch.as_strided(x, x.shape, x.stride()))


@trap("safe", inputs=images)
def channels_last_of_a_permuted(self: Any, x: Tensor) -> Any:
    return self.run(
        (
            x * 2
            if x.movedim(1, -1).contiguous().movedim(-1, 1).is_contiguous(memory_format=torch.channels_last)
            else x
        ).movedim(1, -1)
    )


@trap()
def beginning_of_a_piece(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    piece = y.as_strided((y.size(0), 2), (y.stride(0), 1), y[:, -1].storage_offset())
    return self.run(x + piece.mean())


@trap()
def beginning_of_a_piece_compared(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    return self.run(y * 2 if y[:, -1].storage_offset() > 50 else y)


@trap("refused")
def beginning_of_an_input(self: Any, x: Tensor) -> Tensor:
    return self.run(x + x[:, -1].storage_offset())


@trap("refused")
def addresses_compared(self: Any, x: Tensor) -> Tensor:
    y = x.transpose(0, 1).contiguous()
    return self.run(y * 2 if y.data_ptr() == x.data_ptr() else y)


@trap("refused")
def view_of_another(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x._base is None else x)
