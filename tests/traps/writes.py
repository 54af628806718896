"""Writes in place: to buffers, parameters, inputs, views, plain tensors; by kernels that do not say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, buffers, images, tokens, trap


def _statistics(model: Any) -> None:
    buffers(model, mean=torch.zeros(WIDTH), var=torch.ones(WIDTH))


@trap(inputs=images, prepare=_statistics)
def batch_norm_in_glue(self: Any, x: Tensor) -> Tensor:
    x = F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.3)
    return self.run(x.movedim(1, -1))


@trap(inputs=images, prepare=_statistics)
def batch_norm_unused(self: Any, x: Tensor) -> Tensor:
    F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.3)
    return self.run(x.movedim(1, -1) + self.mean)


@trap(inputs=images, prepare=_statistics)
def batch_norm_of_torch(self: Any, x: Tensor) -> Tensor:
    x = torch.batch_norm(x, None, None, self.mean, self.var, self.training, 0.1, 1e-5, False)
    return self.run(x.movedim(1, -1))


@trap(inputs=images, prepare=_statistics)
def instance_norm_in_glue(self: Any, x: Tensor) -> Tensor:
    x = F.instance_norm(x, self.mean, self.var, use_input_stats=self.training, momentum=0.3)
    return self.run(x.movedim(1, -1))


@trap(inputs=images, norm=lambda: nn.BatchNorm2d(WIDTH))
def batch_norm_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.norm(x).movedim(1, -1))


@trap(inputs=images, norm=lambda: nn.BatchNorm2d(WIDTH))
def frozen_batch_norm(self: Any, x: Tensor) -> Tensor:
    self.norm.eval()
    return self.run(self.norm(x).movedim(1, -1))


@trap(prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def moving_average(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.ema.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return self.run(x - self.ema)


@trap("safe", prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def moving_average_by_data(self: Any, x: Tensor) -> Tensor:
    self.ema.data = self.ema.data * 0.9 + x.detach().mean((0, 1))
    return self.run(x - self.ema)


@trap("safe", prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def moving_average_in_data(self: Any, x: Tensor) -> Tensor:
    self.ema.data.add_(x.detach().mean((0, 1)))
    return self.run(x - self.ema)


@trap("safe", prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def moving_average_detached(self: Any, x: Tensor) -> Tensor:
    self.ema.detach()[:4] += x.detach().mean((0, 1))[:4]
    return self.run(x - self.ema)


@trap("safe", prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def moving_average_replaced(self: Any, x: Tensor) -> Tensor:
    self.ema = 0.9 * self.ema + x.detach().mean((0, 1))
    return self.run(x - self.ema)


@trap("safe", ema=lambda: torch.zeros(WIDTH))
def plain_moving_average(self: Any, x: Tensor) -> Tensor:
    self.ema.mul_(0.9).add_(x.detach().mean((0, 1)))
    return self.run(x - self.ema)


@trap("safe", ema=lambda: [torch.zeros(WIDTH)])
def plain_average_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.ema[0] += x.detach().mean((0, 1))
    return self.run(x - self.ema[0])


TOTAL = torch.zeros(WIDTH)


@trap("safe")
def global_average(self: Any, x: Tensor) -> Tensor:
    TOTAL.add_(x.detach().mean((0, 1)))
    return self.run(x - TOTAL)


@trap(prepare=lambda m: buffers(m, steps=torch.zeros((), dtype=torch.long)))
def steps_counted_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return self.run(x * torch.where(self.steps > 4, 2.0, 1.0))


@trap("refused", prepare=lambda m: buffers(m, steps=torch.zeros((), dtype=torch.long)))
def branch_on_a_counted_buffer(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return self.run(x * 2 if self.steps > 4 else x)


@trap(prepare=lambda m: buffers(m, out=torch.zeros(WIDTH)))
def written_by_out(self: Any, x: Tensor) -> Tensor:
    torch.mean(x.detach(), (0, 1), out=self.out)
    return self.run(x - self.out)


@trap(prepare=lambda m: buffers(m, queue=torch.zeros(4, WIDTH)))
def queue_of_features(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.queue.copy_(torch.cat([x.detach().mean((0, 1))[None], self.queue[:-1]]))
    return self.run(x - self.queue.mean(0))


@trap(prepare=lambda m: buffers(m, counts=torch.zeros(WIDTH)), inputs=tokens)
def counted_by_index(self: Any, ids: Tensor) -> Tensor:
    self.counts.index_put_((ids.flatten(),), torch.ones(ids.numel()), accumulate=True)
    self.counts.scatter_add_(0, ids.flatten(), torch.ones(ids.numel()))
    return self.run(F.one_hot(ids, WIDTH) / self.counts.clamp(min=1))


@trap(prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def foreach_writes(self: Any, x: Tensor) -> Tensor:
    torch._foreach_add_([self.ema], [x.detach().mean((0, 1))])
    return self.run(x - self.ema)


@trap()
def weights_clamped(self: Any, x: Tensor) -> Tensor:
    self.layers[0].weight.data.clamp_(-0.1, 0.1)
    return self.run(x)


@trap("refused")
def weights_clamped_without_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.layers[0].weight.mul_(0.99)
    return self.run(x)


@trap("safe", inputs=tokens, table=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) * 3))
def embedding_renormalised(self: Any, ids: Tensor) -> Tensor:
    return self.run(F.embedding(ids, self.table, max_norm=1.0))


@trap("safe", initialised=lambda: False, scale=lambda: nn.Parameter(torch.ones(WIDTH)))
def initialised_by_data(self: Any, x: Tensor) -> Tensor:
    if not self.initialised:
        self.scale.data.copy_(1 / (x.detach().std((0, 1)) + 1))
        self.initialised = True
    return self.run(x * self.scale)


@trap()
def input_written(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0] = 0
    x[:, 1:].mul_(2)
    return self.run(x)


@trap()
def view_written_later(self: Any, x: Tensor) -> Tensor:
    y = x * 1
    view = y[:, :2]
    h = self.layers[0](view)
    y += 1
    return self.run(h + view)


@trap()
def masked_write(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 1] = 1.0
    return self.run(y)


@trap("safe")
def resized(self: Any, x: Tensor) -> Tensor:
    y = x.detach().clone().flatten()
    y.resize_(x.size(0), WIDTH)
    return self.run(y)


@trap("safe", prepare=lambda m: buffers(m, ema=torch.zeros(WIDTH)))
def written_by_numpy(self: Any, x: Tensor) -> Tensor:
    self.ema.numpy()[:] += x.detach().mean((0, 1)).numpy()
    return self.run(x - self.ema)


@trap("safe", seen=dict)
def kept_in_a_dict(self: Any, x: Tensor) -> Tensor:
    x = x + self.seen.get("mean", 0.0)
    self.seen["mean"] = x.detach().mean()
    return self.run(x)


@trap(drop=lambda: nn.Dropout(0.2))
def written_behind_dropout(self: Any, x: Tensor) -> Tensor:
    """In evaluation what is written to is what the layer was given."""
    x = self.layers[0](x)
    y = self.drop(x)
    y += 1
    for layer in self.layers[1:]:
        y = torch.tanh(layer(y))
    return x * y


@trap(prepare=lambda m: m.register_buffer("seen", torch.zeros((), dtype=torch.float64)))
def buffer_by_a_size(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.seen += x.size(1) if x.size(1) > 7 else x.size(1) ** 2
    return self.run(x)


def _clipped_where(seen: Tensor, x: Tensor) -> Tensor:
    """``x``, clipped where a tensor made of it holds anything large."""
    return x.clamp(-1, 1) if (seen.abs() > 4).any() else x


@trap()
def asked_of_what_was_set(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    seen[:, 1:] = x[:, :-1]
    return self.run(_clipped_where(seen, x))


@trap()
def asked_of_what_was_copied_on(self: Any, x: Tensor) -> Tensor:
    seen, other = torch.zeros(x.shape), x.new_empty(x.shape)
    other.copy_(x)
    seen += other
    return self.run(_clipped_where(seen, x))


@trap()
def asked_of_what_a_view_was_given(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    part = seen[:, 0]
    seen.view(-1, WIDTH).add_(x.flatten(0, 1))
    return self.run(_clipped_where(part, x))


@trap()
def asked_of_what_was_given_out(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    torch.mul(x.detach(), 2, out=seen)
    return self.run(_clipped_where(seen, x))


@trap("safe")
def number_of_what_was_written(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(WIDTH)
    seen += x.detach().abs().amax((0, 1))
    return self.run(x / float(seen[0]))


@trap("safe")
def asked_of_what_numpy_wrote(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    seen.numpy()[:] = x.detach().numpy()
    return self.run(_clipped_where(seen, x))


@trap("safe")
def asked_of_what_an_array_was_given(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    array = seen.numpy()
    array[:] = x.detach().numpy()
    return self.run(_clipped_where(seen, x))


@trap("safe")
def asked_of_what_lies_elsewhere(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    seen.set_(x.detach())
    return self.run(_clipped_where(seen, x))


@trap("safe")
def asked_of_what_has_other_data(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    seen.data = x.detach()
    return self.run(_clipped_where(seen, x))


class WritesByNumpy(nn.Module):
    """Writes to its argument where torch does not count it."""

    def forward(self, seen: Tensor, x: Tensor) -> None:
        np.copyto(np.asarray(seen.detach()), x.detach().numpy())


@trap(writer=WritesByNumpy)
def used_where_a_layer_wrote_by_numpy(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    self.writer(seen, x)
    return self.run(x + seen)


@trap("safe", writer=WritesByNumpy)
def asked_of_what_a_layer_wrote_by_numpy(self: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(x.shape)
    self.writer(seen, x)
    return self.run(_clipped_where(seen, x))
