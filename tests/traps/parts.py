"""Torch's less common layers, and layers that are changed after the capture."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .registry import WIDTH, Net, images, tokens, trap
from .values import with_lengths


@trap(part=lambda: nn.LSTM(WIDTH, 4, 2, batch_first=True, bidirectional=True, dropout=0.1))
def bidirectional_states(self: Any, x: Tensor) -> Any:
    out, (h, _c) = self.part(x)
    return self.run(out + h[-1].repeat(1, 2)[:, None])


@trap("safe", part=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), state=lambda: None)
def recurrent_state_carried(self: Any, x: Tensor) -> Any:
    h = None if self.state is None or self.state.size(1) != x.size(0) else self.state
    y, h = self.part(x, h)
    self.state = h.detach()
    return self.run(y)


@trap("safe", inputs=with_lengths, part=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))
def packed_unsorted(self: Any, x: Tensor, lengths: Tensor) -> Any:
    p = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, _ = self.part(p)
    y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.size(1))
    return self.run(y)


@trap(
    "safe", part=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2)
)
def encoder_of_torch_in_no_grad(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = self.part(x, src_key_padding_mask=torch.arange(x.size(1)).expand(x.size(0), -1) > 3)
    return self.run(y)


@trap(part=lambda: nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True))
def whole_transformer(self: Any, x: Tensor) -> Any:
    return self.run(
        self.part(
            x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.size(1)), tgt_is_causal=True
        )
    )


@trap(inputs=tokens, part=lambda: nn.EmbeddingBag(WIDTH, WIDTH, mode="mean"))
def bag_with_offsets(self: Any, ids: Tensor) -> Any:
    return self.run(self.part(ids.flatten(), torch.arange(0, ids.numel(), ids.size(1))))


@trap(
    "safe",
    inputs=tokens,
    e=lambda: nn.Embedding(WIDTH, WIDTH),
    part=lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, WIDTH, [2, 4]),
)
def adaptive_softmax(self: Any, ids: Tensor) -> Any:
    h = self.run(self.e(ids))
    r = self.part(h.flatten(0, 1), ids.flatten())
    return r.loss, r.output


@trap(inputs=images, pool=lambda: nn.MaxPool2d(2, return_indices=True), un=lambda: nn.MaxUnpool2d(2))
def unpooled(self: Any, x: Tensor) -> Any:
    y, i = self.pool(x)
    return self.run(self.un(y, i, output_size=x.shape).movedim(1, -1))


@trap(part=lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))
def orthogonal_layer(self: Any, x: Tensor) -> Any:
    return self.run(self.part(x))


@trap(later=lambda m: setattr(m.layers[1], "weight", m.layers[0].weight))
def tied_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


@trap(
    prepare=lambda m: setattr(m.layers[1], "weight", m.layers[0].weight),
    later=lambda m: setattr(m.layers[1], "weight", nn.Parameter(m.layers[0].weight.detach().clone() * 2)),
)
def untied_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


@trap(later=lambda m: setattr(m.layers[0].weight, "data", m.layers[0].weight.data * 2))
def data_replaced_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


@trap(
    later=lambda m: setattr(
        m.layers[0], "forward", types.MethodType(lambda s, x: F.linear(x, s.weight) * 2, m.layers[0])
    ),
)
def forward_on_a_leaf_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


def _hooked(m: Any) -> None:
    m.handle = m.layers[0].register_forward_hook(lambda mod, a, o: o * 2)


@trap(prepare=_hooked, later=lambda m: m.handle.remove())
def hook_on_a_leaf_removed_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


@trap(later=lambda m: setattr(m.layers[1], "bias", None))
def bias_removed_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


@trap("safe", later=lambda m: setattr(m, "layers", m.layers[:2]))
def layers_cut_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


class Updater(nn.Module):
    """Counts in training, in a method, and now and then changes what it was given: as Performer's does."""

    def __init__(self, layers: nn.ModuleList, interval: int) -> None:
        super().__init__()
        self.layers, self.interval = layers, interval
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("unsaved", torch.tensor(0), persistent=False)

    def update(self) -> None:
        if not self.training:
            return
        if self.calls >= self.interval:
            for layer in self.layers:
                layer.scale.mul_(0.9)
            self.calls.zero_()
            return
        self.calls += 1
        self.unsaved += 2


@trap()
class counted_in_a_method_of_a_module(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("scale", torch.ones(()))
        self.updater = Updater(self.layers, 1000)

    def forward(self, x: Tensor) -> Tensor:
        self.updater.update()
        return self.run(x)
