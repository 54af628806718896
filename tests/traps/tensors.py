"""Tensors that come by other ways than torch's own functions, or from elsewhere than the inputs."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import io
import pickle
import weakref
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from .registry import WIDTH, Net, buffers, tokens, trap

TABLE = torch.linspace(-1, 1, WIDTH)
POOL = concurrent.futures.ThreadPoolExecutor(1)


class Marked(torch.Tensor):
    """A subclass that does nothing of its own."""


@dataclasses.dataclass
class Holder:
    """A plain object with a tensor in it."""

    scale: Tensor
    bias: float = 0.5


@trap()
def deep_copy(self: Any, x: Tensor) -> Tensor:
    return self.run(copy.deepcopy(x.detach()) + x)


@trap()
def deep_copy_in_list(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        a, (b,) = (
            copy.deepcopy(
                [
                    x * 2,
                    {"k": x.sum(-1, keepdim=True)}["k"],
                ]
            )[0],
            copy.deepcopy((x + 1,)),
        )
    return self.run(a + b)


@trap()
def deep_copied_layer(self: Any, x: Tensor) -> Tensor:
    frozen = copy.deepcopy(self.layers[0]).requires_grad_(False)
    return self.run(x + frozen(x))


@trap()
def shallow_copy(self: Any, x: Tensor) -> Tensor:
    return self.run(copy.copy(x) * 2)


@trap(table=lambda: nn.Parameter(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)))
def normalized_weight(self: Any, x: Tensor) -> Tensor:
    return nn.functional.normalize(self.run(x), dim=-1) @ nn.functional.normalize(self.table, dim=-1).T


@trap()
def parameter_of_input(self: Any, x: Tensor) -> Tensor:
    return self.run(nn.Parameter(x * 2) + x)


@trap()
def buffer_of_input(self: Any, x: Tensor) -> Tensor:
    return self.run(nn.Buffer(x.detach() * 2))


@trap()
def dlpack(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.from_dlpack(x.detach() * 2) + x)


@trap()
def dlpack_bound_at_import(self: Any, x: Tensor) -> Tensor:
    return self.run(from_dlpack(x.detach() + 1))


@trap()
def dlpack_capsule(self: Any, x: Tensor) -> Tensor:
    return self.run(from_dlpack(torch.utils.dlpack.to_dlpack(x.detach() + 1)))


@trap("refused")
def numpy_round_trip(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.from_numpy(np.sin(x.detach().numpy())) + x)


@trap("refused")
def numpy_asarray(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.tensor(np.asarray(x.detach()).mean(0)))


@trap("refused")
def numpy_from_dlpack(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.tensor(np.from_dlpack(x.detach()).mean()))


def _numpy_quantile(x: Tensor) -> Tensor:
    return torch.as_tensor(np.quantile(x.detach().numpy(), 0.9, axis=-1, keepdims=True)).float()


@trap()
def numpy_in_a_helper(self: Any, x: Tensor) -> Tensor:
    return self.run(x / _numpy_quantile(x))


@trap("refused")
def thread_pool_of_layers(self: Any, x: Tensor) -> Tensor:
    return self.run(POOL.submit(self.layers[0], x).result())


@trap("refused")
def thread_pool_of_glue(self: Any, x: Tensor) -> Tensor:
    return self.run(sum(POOL.map(torch.sin, [x, x * 2])))


@trap("refused")
def number_from_a_thread(self: Any, x: Tensor) -> Tensor:
    return self.run(x * POOL.submit(lambda: float(x.detach().abs().mean())).result())


@trap("refused")
def pickled(self: Any, x: Tensor) -> Tensor:
    return self.run(pickle.loads(pickle.dumps(x.detach())))


@trap("refused")
def saved_and_loaded(self: Any, x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return self.run(torch.load(file))


@trap("refused")
def through_a_list(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.tensor(x.tolist()))


@trap("safe")
def legacy_constructor(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.Tensor(x.detach()) * 2)


@trap()
def tensor_of_its_class_filled(self: Any, x: Tensor) -> Tensor:
    room = torch.Tensor(*x.shape).to(x)
    for i in range(WIDTH):
        room[..., i] = x[..., i] * (i + 1)
    return self.run(room + torch.Tensor(x.size()).fill_(0.5))


@trap()
class tensor_of_a_type(Net):
    """Made by a class that torch does not show, and filled where it is made."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.FloatTensor(x.size(0), x.size(1), 1).fill_(1.0)
        mask = torch.BoolTensor(x.size(0), x.size(1)).zero_()
        return self.run(x.masked_fill(mask[..., None] | (x > 1), 1.0))


@trap()
def new_of_a_size(self: Any, x: Tensor) -> Tensor:
    ones = x.data.new(x.size()).fill_(1.0)
    return self.run(x * ones + x.new(x.size(0), x.size(1), 1).zero_())


@trap()
def tensor_of_tensors(self: Any, x: Tensor) -> Tensor:
    return self.run(x * torch.tensor([x.mean(), x.max()]).sum())


@trap()
def tensor_of_sizes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * torch.tensor([x.size(0), x.shape[1]]).float().mean() / 9)


@trap("safe")
def storage_set(self: Any, x: Tensor) -> Tensor:
    y = x.detach().clone()
    return self.run(torch.empty(0).set_(y.untyped_storage(), 0, y.shape, y.stride()))


@trap("refused")
def bytes_of_it(self: Any, x: Tensor) -> Tensor:
    raw = bytearray(x.detach().numpy().tobytes())
    return self.run(torch.frombuffer(raw, dtype=torch.float32).view(x.shape))


@trap("safe")
def as_subclass(self: Any, x: Tensor) -> Tensor:
    return self.run((x.as_subclass(Marked) * 2).as_subclass(Tensor))


@trap("safe")
def made_subclass(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.Tensor._make_subclass(Marked, x.detach()).as_subclass(Tensor) + 1)


@trap()
def data_of_it(self: Any, x: Tensor) -> Tensor:
    return self.run(x.data * 2 + x)


@trap()
def strided(self: Any, x: Tensor) -> Tensor:
    x = x.contiguous()
    return self.run(x.as_strided(x.shape, x.stride()) + x.flip(1))


@trap("safe")
def nested_tensor(self: Any, x: Tensor) -> Tensor:
    nested = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
    return self.run((nested * 2).to_padded_tensor(0.0))


@trap("refused")
def masked_tensor(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.masked.masked_tensor(self.layers[0](x), x > 0).to_tensor(0.0))


@trap("refused")
def nested_tensor_without_layout(self: Any, x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor([x[0], x[0, :3]])
    return self.run(torch.nested.to_padded_tensor(nested * 2, 0.0) + x[:1])


@trap()
def sparse(self: Any, x: Tensor) -> Tensor:
    return self.run((x * (x > 0)).to_sparse().to_dense() + x)


@trap()
def complex_values(self: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(torch.ones(5, 2))
    return self.run(torch.fft.irfft(z, n=x.size(-1), dim=-1) + z.abs().mean())


@trap()
def parts_that_are_set(self: Any, x: Tensor) -> Tensor:
    z = torch.zeros(x.shape, dtype=torch.complex64)
    z.real, z.imag = x, x.flip(1)
    z[:, :2].imag = 3
    return self.run(z.abs())


@trap()
def global_tensor(self: Any, x: Tensor) -> Tensor:
    return self.run(x + TABLE)


@trap(table=lambda: [torch.ones(WIDTH), {"k": torch.arange(WIDTH)}])
def tensors_in_containers(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.table[0] + self.table[1]["k"])


@trap(holder=lambda: Holder(torch.full((WIDTH,), 0.5)))
def tensor_in_an_object(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.holder.scale + self.holder.bias)


@trap(function=lambda: functools.partial(torch.mul, torch.full((WIDTH,), 3.0)))
def tensor_in_a_partial(self: Any, x: Tensor) -> Tensor:
    return self.run(self.function(x))


@trap(function=lambda: (lambda t: lambda x: x + t)(torch.arange(WIDTH)))
def tensor_in_a_closure(self: Any, x: Tensor) -> Tensor:
    return self.run(self.function(x))


@functools.lru_cache
def _positions(n: int) -> Tensor:
    return torch.arange(n).float()[:, None]


@trap()
def cached_by_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x + _positions(x.size(1)) / 9)


@functools.lru_cache
def _halves(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    return (*shape[:-1], parts, shape[-1] // parts)


@trap()
def cached_recipe(self: Any, x: Tensor) -> Tensor:
    return self.run(x + x.reshape(_halves(tuple(x.shape), 2)).mean(-2).repeat(1, 1, 2))


@functools.cache
def _is_long(n: int) -> bool:
    return n > 7


@trap()
def cached_decision(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if _is_long(x.size(1)) else x)


@trap(cache=dict)
def cached_on_the_model(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    if n not in self.cache:
        self.cache[n] = torch.arange(n).float()[:, None]
    return self.run(x + self.cache[n])


@trap(cache=collections.OrderedDict)
def kept_in_order_by_size(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    if n not in self.cache:
        self.cache[n] = torch.arange(n).float()[:, None]
    return self.run(x * self.cache[n])


@trap(cache=lambda: None)
def cached_while_long_enough(self: Any, x: Tensor) -> Tensor:
    if self.cache is None or len(self.cache) < x.size(1):
        self.cache = torch.arange(x.size(1)).float()[:, None]
    return self.run(x + self.cache[: x.size(1)])


@trap("refused", first=lambda: None)
def first_input_kept(self: Any, x: Tensor) -> Tensor:
    if self.first is None:
        self.first = x.detach().mean()
    return self.run(x + self.first)


@trap()
def weak_reference(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    return self.run(weakref.ref(y)())


@trap(inputs=tokens)
def one_hot_and_table(self: Any, ids: Tensor) -> Tensor:
    return self.run(torch.nn.functional.one_hot(ids, WIDTH).float() + TABLE)


@trap("safe")
def array_interface(self: Any, x: Tensor) -> Tensor:
    y = x.detach().clone()
    address, n = y.data_ptr(), y.numel()
    import ctypes

    held = (ctypes.c_float * n).from_address(address)
    return self.run(torch.tensor(list(held)).view(x.shape))


@trap(prepare=lambda m: buffers(m, adjacency=torch.eye(WIDTH).to_sparse()))
def sparse_buffer_of_its_own_dtype(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.sparse.mm(self.adjacency.to(x.dtype), x.flatten(0, 1).t()).t().view(x.shape))


@trap(prepare=lambda m: buffers(m, adjacency=torch.eye(WIDTH).to_sparse_csr()))
def rows_of_a_sparse_buffer_of_its_own_dtype(self: Any, x: Tensor) -> Tensor:
    return self.run((self.adjacency.to(x.dtype) @ x.flatten(0, 1).t()).t().view(x.shape))


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)])


@trap("refused", table=ragged)
def nested_tensor_of_the_model(self: Any, x: Tensor) -> Tensor:
    return self.run(x) + self.table.to_padded_tensor(0.0).sum((0, 1))


@trap("refused", prepare=lambda m: buffers(m, table=ragged()))
def nested_buffer(self: Any, x: Tensor) -> Tensor:
    return self.run(x) + self.table.to_padded_tensor(0.0).sum((0, 1))


@trap()
def function_of_numpy_by_element(self: Any, x: Tensor) -> Tensor:
    return self.run(x + np.maximum(np.tanh(x.detach()), 0)) * np.exp(-x.detach()[..., :1])


@trap()
def running_largest_by_numpy(self: Any, x: Tensor) -> Tensor:
    steps = np.maximum.accumulate(np.arange(x.size(1)) % 3)
    return self.run(x * torch.as_tensor(steps, dtype=x.dtype)[:, None])


@trap(scale=lambda: torch.tensor(0.3))
def function_of_numpy_of_a_number_of_the_model(self: Any, x: Tensor) -> Tensor:
    return self.run(x) * np.exp(self.scale) / np.sqrt(x.size(-1))


@trap(inputs=tokens)
def function_of_numpy_of_whole_numbers(self: Any, x: Tensor) -> Tensor:
    return self.run(np.log1p(x).float()[..., None].expand(-1, -1, WIDTH))
