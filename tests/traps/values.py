"""Values of the inputs that Python looks at, and sizes that they decide."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .registry import WIDTH, trap


def with_lengths(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Sequences, and how long each one is."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    return torch.randn(batch, length, WIDTH, generator=generator), lengths


def with_mask(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Sequences, and a mask that is whole for every third draw."""
    x, lengths = with_lengths(batch, length, seed)
    mask = torch.arange(length)[None] < lengths[:, None]
    return x, mask | (seed % 3 == 0)


def with_mask_up_to_six(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Sequences, and a mask of the first six of them, or of five in every other draw."""
    x, _ = with_lengths(batch, length, seed)
    return x, (torch.arange(length) < 5 + seed % 2).expand(batch, length).clone()


def with_labels(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Sequences, and labels of which some are left out."""
    x, _ = with_lengths(batch, length, seed)
    labels = torch.randint(0, WIDTH, (batch, length), generator=torch.Generator().manual_seed(seed))
    return x, labels.masked_fill(labels < seed % 4, -100)


@trap(inputs=with_mask)
def mask_is_whole(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.run(x if mask.all() else x.masked_fill(~mask[..., None], 0.0))


@trap(inputs=with_mask)
def size_asked_where_the_mask_has_holes(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.run(x * 2 if not mask.all() and len(x) > 2 else x)


@trap(inputs=with_mask)
def length_asked_where_the_mask_is_whole(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = self.run(x)
    if mask.all():
        return y * 2 if x.shape[1] > 7 else y
    return y


@trap(inputs=with_mask)
def mask_is_whole_as_a_number(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.run(x if mask.sum() == mask.numel() else x * mask[..., None])


@trap(inputs=with_mask_up_to_six)
def mask_asked_again_up_to_a_place(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.run(x if mask.all() else x * (2 if mask[:, :6].all() else 3))


@trap(inputs=with_mask)
def mask_made_none(self: Any, x: Tensor, mask: Any) -> Tensor:
    mask = None if bool((mask == 1).all().item()) else mask
    return self.run(x if mask is None else x * mask[..., None])


@trap("safe", inputs=with_mask)
def mask_by_its_smallest(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return self.run(x * (2 if float(mask.float().mean()) < 0.7 else 1))


@trap(inputs=with_labels)
def loss_of_what_counts(self: Any, x: Tensor, labels: Tensor) -> Any:
    out = self.run(x)
    if (labels != -100).any():
        return F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return out.sum() * 0


@trap(inputs=with_labels)
def loss_over_the_chosen(self: Any, x: Tensor, labels: Tensor) -> Any:
    out, keep = self.run(x), labels != -100
    return F.cross_entropy(out[keep], labels[keep], reduction="sum") / keep.sum().clamp(min=1)


@trap(inputs=with_lengths)
def mask_from_lengths(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.size(1))[None] < lengths[:, None]
    return self.run(x * mask[..., None])


@trap("safe", inputs=with_lengths)
def item_of_lengths(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * lengths.max().item())


@trap(inputs=with_lengths, cell=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def packed_and_padded_to_all(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(self.run(x), lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.size(1))[0]


@trap("safe", inputs=with_lengths)
def cut_at_the_longest(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x[:, : int(lengths.max())])


@trap("safe", inputs=with_lengths)
def lengths_as_a_list(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(torch.stack([row[:n].mean(0) for row, n in zip(x, lengths.tolist(), strict=True)]))


@trap("safe", inputs=with_lengths)
def largest_of_a_list(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x[:, : max(lengths.tolist())])


@trap("safe", inputs=with_lengths)
def largest_by_python(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * max(lengths))


@trap("safe", inputs=with_lengths)
def sorted_by_length(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = sorted(range(len(lengths)), key=lambda i: int(lengths[i]))
    return self.run(x[order])


@trap(inputs=with_lengths)
def sorted_by_torch(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x[lengths.argsort(stable=True)])


@trap("safe", inputs=with_lengths)
def split_by_lengths(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    parts = x.flatten(0, 1)[: int(lengths.sum())].split(lengths.tolist())
    return self.run(torch.stack([p.mean(0) for p in parts]))


@trap("safe", inputs=with_lengths)
def range_of_a_length(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(int(lengths[0])):
        x = x * 1.1
    return self.run(x)


@trap("safe", inputs=with_lengths)
def dict_by_a_length(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * {1: 2.0, 2: 3.0}.get(lengths[0].item(), 1.0))


@trap("safe", inputs=with_lengths)
def list_by_a_length(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0][lengths[0]])


@trap("safe", inputs=with_lengths)
def layer_by_a_value(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(self.layers[int(lengths[0]) % 4](x))


@trap("safe", inputs=with_lengths)
def text_of_a_value(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * len(f"{lengths.tolist()}"))


@trap("safe", inputs=with_lengths)
def membership(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * 2 if 3 in lengths else x)


@trap("safe", inputs=with_lengths)
def equality_of_tensors(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x * 2 if torch.equal(lengths, lengths.sort().values) else x)


@trap("safe", inputs=with_lengths)
def loop_until_it_holds(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    while lengths.sum() > 6:
        x, lengths = x * 1.1, lengths // 2
    return self.run(x)


@trap("safe", inputs=with_lengths)
def counted_by_item(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x[:, : (lengths > 2).sum().item() + 1])


@trap(inputs=with_labels)
def picked_rows(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    return self.run(x[labels == 3].sum(0) + x.mean((0, 1)))


@trap(inputs=with_labels)
def nonzero_added(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    rows, columns = (labels > 4).nonzero(as_tuple=True)
    return self.run(torch.zeros(WIDTH, WIDTH).index_add(0, labels[rows, columns], x[rows, columns]))


@trap(inputs=with_labels)
def means_by_label(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    flat, where = labels.clamp(min=0).flatten(), x.flatten(0, 1)
    total = torch.zeros(WIDTH, WIDTH).index_add(0, flat, where)
    return self.run(total / torch.bincount(flat, minlength=WIDTH).clamp(min=1)[:, None])


@trap(inputs=with_labels)
def means_by_unique(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    found, inverse = labels.unique(return_inverse=True)
    total = torch.zeros_like(found, dtype=x.dtype).scatter_add(0, inverse.flatten(), x.mean(-1).flatten())
    return self.run(x + total.mean())


@trap("safe", inputs=with_labels)
def branch_on_uniques(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    return self.run(x * 2 if labels.unique().numel() > 5 else x)


@trap(inputs=with_labels)
def masked_mean(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    return self.run(x + x.masked_select((labels > 1)[..., None]).mean())


@trap(inputs=with_labels)
def best_of_each(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    best = x.topk(2, dim=1)
    return self.run(best.values + x.gather(1, best.indices))


@trap(inputs=with_labels)
def loop_over_classes(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    out = x * 0
    for k in range(3):
        out = out + self.layers[k](x) * (labels == k)[..., None]
    return self.run(out)


@trap("safe", inputs=with_labels)
def experts_that_are_hit(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    out, flat = torch.zeros_like(x).flatten(0, 1), x.flatten(0, 1)
    for k in range(4):
        rows = (labels.flatten() == k).nonzero().squeeze(-1)
        if rows.numel() == 0:
            continue
        out = out.index_add(0, rows, self.layers[k](flat[rows]))
    return self.run(out.view(x.shape))


@trap("safe", inputs=with_lengths)
def raises_for_some(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    if (lengths > 100).any():
        raise ValueError("too long")
    return self.run(x)


@trap("safe", inputs=with_lengths)
def caught(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    try:
        if lengths.min() < 2:
            raise ValueError("short")
        return self.run(x * 2)
    except ValueError:
        return self.run(x)


@trap(inputs=with_lengths)
def warned(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    if x.size(1) > 1:
        warnings.warn(f"lengths are {lengths}", stacklevel=2)
        logging.getLogger("trap").info("mean %s", x.mean())
    return self.run(x)


@trap("safe", inputs=with_lengths)
def checked(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    torch._assert(bool((lengths > 0).all()), "empty")
    assert lengths.min().item() > 0, f"got {lengths}"
    return self.run(x)


@trap(inputs=with_lengths)
def scaled_by_a_tensor(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x / lengths.max() + lengths[:, None, None])


@trap(inputs=with_lengths)
def filled_with_a_tensor(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x + torch.full_like(x, 2.0) * torch.ones(()).fill_(lengths[0]))


@trap("safe", inputs=with_lengths)
def full_of_a_value(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x + torch.full(x.shape, lengths.float().mean()))


@trap("safe", inputs=with_lengths)
def keyword_from_a_tensor(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(torch.add(x, x, alpha=lengths[0]))


@trap("safe", inputs=with_lengths)
def threshold_from_a_tensor(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(F.threshold(x, float(x.detach().mean()), 0.0))


@trap("safe", inputs=with_lengths)
def clamped_by_a_number(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x.clamp(max=lengths.max().item()) * lengths.min().item())


@trap(inputs=with_lengths)
def rolled_by_a_size(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x.roll(x.size(1) // 2, 1) + lengths.numel())


@trap("safe", inputs=with_lengths)
def rolled_by_a_value(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x.roll(int(lengths[0]), 1))


@trap("safe", inputs=with_lengths)
def narrowed_by_a_tensor(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x.narrow(1, lengths.min() - 1, 1))


@trap(inputs=with_lengths)
def row_by_a_tensor(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.run(x[:, lengths.min() - 1] + x.select(1, 0))


class Router(nn.Module):
    """A leaf that branches on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.mean() > 0 else self.b(x)


@trap(router=Router)
def branch_in_a_leaf(self: Any, x: Tensor) -> Tensor:
    return self.run(self.router(x))


class Picks(nn.Module):
    """A leaf whose result is as long as its data say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[..., 0] > 0]


@trap("safe", picks=Picks)
def rows_picked_in_a_leaf(self: Any, x: Tensor) -> Tensor:
    rows = self.picks(x)
    return self.run(rows.sum(0) * (2 if rows.size(0) > 6 else 1))


@trap()
def branch_as_a_function(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.cond(x.sum() > 0, torch.sin, lambda z: z.cos() * 2, (x,)))


@trap()
def loop_as_a_function(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        start = torch.tensor(0), x.mean()
        _, rate = torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.1), start)
    return self.run(x * rate)


@trap("refused")
def branch_as_a_function_on_what_layers_give(self: Any, x: Tensor) -> Tensor:
    x = self.run(x)
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
