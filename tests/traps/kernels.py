"""Torch's less common functions and ways to call them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

from .registry import WIDTH, images, trap
from .values import with_lengths


@trap("safe")
def torch_function_disabled(self: Any, x: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        y = x * 2
    return self.run(y)


@trap("safe")
def torch_function_all_disabled(self: Any, x: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        y = torch.tanh(x * 2)
    return self.run(y)


@trap()
def ops_of_aten(self: Any, x: Tensor) -> Any:
    return self.run(
        torch.ops.aten.mul.Tensor(torch.ops.aten.add(x, 1), x) + torch.ops.aten.sum.dim_IntList(x, [1], True)
    )


@trap()
def foreach_not_in_place(self: Any, x: Tensor) -> Any:
    a, b = torch._foreach_mul([x, x + 1], 2.0)
    return self.run(a + b)


@trap("safe")
def applied_elementwise(self: Any, x: Tensor) -> Any:
    return self.run(x.detach().clone().apply_(lambda v: v * 2))


@trap("safe")
def swapped_tensors(self: Any, x: Tensor) -> Any:
    a, b = x * 2, x + 1
    torch.utils.swap_tensors(a, b)
    return self.run(a) - b


@trap("safe")
def data_assigned(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    y.data = y.data * 2
    return self.run(y)


@trap("safe")
def detached_view_written(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    y.detach()[:, :2].zero_()
    return self.run(y)


@trap("safe")
def requires_grad_of_a_result(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = self.layers[0](x)
    y.requires_grad_(True)
    return self.run(y)


@trap()
def view_written_across_layers(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    v = y[:, :3]
    z = self.layers[1](x) + y
    v.mul_(2)
    return self.layers[2](z) + self.layers[3](y)


@trap()
def base_written_view_read(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    v = y.transpose(0, 1)
    z = self.layers[1](x)
    y.add_(1)
    return self.layers[2](z) + v.transpose(0, 1)


@trap()
def chunks_written_in_place(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x).clone()
    a, b = y[..., :4], y[..., 4:]
    a += b
    b -= a.detach()
    return self.run(y)


@trap()
def sdpa_grouped(self: Any, x: Tensor) -> Any:
    B, L, D = x.shape
    q = x.view(B, L, 4, 2).transpose(1, 2)
    k = q[:, :2]
    return self.run(
        F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
        .transpose(1, 2)
        .reshape(B, L, D)
    )


@trap()
def sdpa_with_dropout_and_bias(self: Any, x: Tensor) -> Any:
    B, L, D = x.shape
    q = x.view(B, L, 2, 4).transpose(1, 2)
    bias = torch.zeros(L, L).masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), float("-inf"))
    return self.run(
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias, dropout_p=0.2 if self.training else 0.0)
        .transpose(1, 2)
        .reshape(B, L, D)
    )


@trap()
def sparse_adjacency(self: Any, x: Tensor) -> Any:
    L = x.size(1)
    i = torch.arange(L)
    e = torch.stack([i, (i + 1) % L])
    A = torch.sparse_coo_tensor(e, torch.ones(L), (L, L))
    return self.run(torch.stack([torch.sparse.mm(A, r) for r in x.unbind(0)]))


@trap()
def complex_parts(self: Any, x: Tensor) -> Any:
    z = torch.complex(x, x.flip(1))
    z = z * torch.polar(torch.ones_like(x), x)
    return self.run(torch.view_as_real(z).sum(-1) + z.mH.real.mT + z.angle() * 0.1)


@trap()
def fake_quantised(self: Any, x: Tensor) -> Any:
    return self.run(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))


@trap()
def vmap_in_chunks(self: Any, x: Tensor) -> Any:
    return self.run(torch.vmap(lambda r: r @ r.T @ r / 9, in_dims=0, chunk_size=1)(x))


@trap("safe")
def functional_hvp(self: Any, x: Tensor) -> Any:
    _, h = torch.autograd.functional.hvp(lambda t: t.pow(3).sum(), x.detach(), torch.ones_like(x))
    return self.run(x + h * 0.01)


@trap("safe")
def linearised(self: Any, x: Tensor) -> Any:
    y, f = torch.func.linearize(torch.sin, x)
    return self.run(y + f(torch.ones_like(x)))


@trap("safe")
def double_backward(self: Any, x: Tensor) -> Any:
    t = x.detach().requires_grad_()
    y = self.layers[0](t).tanh().sum()
    (g,) = torch.autograd.grad(y, t, create_graph=True)
    (g2,) = torch.autograd.grad(g.square().sum(), t, create_graph=self.training)
    return self.run(x + g2)


class Sine(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * 0.5


@trap()
def function_with_setup_context(self: Any, x: Tensor) -> Any:
    return self.run(Sine.apply(x))


@trap("safe")
def function_under_vmap(self: Any, x: Tensor) -> Any:
    return self.run(torch.vmap(Sine.apply)(x))


class Partly(Function):
    @staticmethod
    def forward(ctx, x, scale, flag=True):
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        idx = x.argmax(-1)
        ctx.mark_non_differentiable(idx)
        return x * scale, idx

    @staticmethod
    def backward(ctx, g, _):
        return (None if g is None else g * ctx.scale * 2, None, None)


@trap()
def function_with_settings(self: Any, x: Tensor) -> Any:
    y, i = Partly.apply(x, 2.0)
    return self.run(y), i


class Needs(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (
            g * w if ctx.needs_input_grad[0] else None,
            (g * x).sum((0, 1)) if ctx.needs_input_grad[1] else None,
        )


@trap(
    prepare=lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(WIDTH))),
    later=lambda m: m.gain.requires_grad_(False),
)
def function_by_what_needs_gradients(self: Any, x: Tensor) -> Any:
    return self.run(Needs.apply(x, self.gain))


@trap("safe")
def fx_traced_inside(self: Any, x: Tensor) -> Any:
    gm = torch.fx.symbolic_trace(self.layers[0])
    return self.run(gm(x))


@trap("safe")
def make_fx_inside(self: Any, x: Tensor) -> Any:

    g = make_fx(lambda t: t.sin())(x.detach())
    return self.run(g(x))


@trap("safe")
def fake_mode_inside(self: Any, x: Tensor) -> Any:

    with FakeTensorMode() as m:
        shape = (m.from_tensor(x.detach()) @ torch.empty(WIDTH, 3)).shape
    return self.run(x * shape[-1])


@trap(inputs=images)
def pooled_by_ceiling(self: Any, x: Tensor) -> Any:
    y = F.avg_pool2d(x, 4, 3, ceil_mode=True, count_include_pad=False)
    y = F.interpolate(y, scale_factor=1.5, recompute_scale_factor=True, mode="bilinear")
    return self.run(F.adaptive_avg_pool2d(y, (3, None)).movedim(1, -1))


@trap(inputs=images)
def warped_by_a_grid(self: Any, x: Tensor) -> Any:
    g = F.affine_grid(torch.eye(2, 3).expand(x.size(0), 2, 3), x.shape, align_corners=False)
    return self.run(F.grid_sample(x, g, align_corners=False).movedim(1, -1))


@trap()
def spectrum_of_another_length(self: Any, x: Tensor) -> Any:
    z = torch.fft.rfft(x, n=16, dim=1)
    f = torch.fft.rfftfreq(16)
    return self.run(torch.fft.irfft(z * f[:, None], n=x.size(1), dim=1))


@trap()
def short_time_spectrum(self: Any, x: Tensor) -> Any:
    w = torch.hann_window(4)
    s = torch.stft(x.transpose(1, 2).flatten(0, 1), 4, 2, 4, w, return_complex=True)
    y = torch.istft(s, 4, 2, 4, w, length=x.size(1))
    return self.run(y.view(x.size(0), WIDTH, -1).transpose(1, 2))


@trap()
def solved(self: Any, x: Tensor) -> Any:
    A = x.mT @ x + 8 * torch.eye(WIDTH)
    L = torch.linalg.cholesky(A)
    e = torch.linalg.eigvalsh(A)
    _u, s, _vh = torch.linalg.svd(A)
    return self.run(
        torch.cholesky_solve(x.mT, L).mT + torch.linalg.solve(A, x.mT).mT + (e + s).unsqueeze(1) * 0.01
    )


@trap()
def scattered_by_reduction(self: Any, x: Tensor) -> Any:
    i = (torch.arange(x.size(1)) // 2)[None, :, None].expand_as(x)
    y = torch.zeros_like(x).scatter_reduce(1, i, x, "amax", include_self=False)
    return self.run(y + torch.zeros_like(x).index_reduce(1, i[0, :, 0], x.detach(), "prod") * 0.01)


@trap()
def top_of_a_half(self: Any, x: Tensor) -> Any:
    k = x.size(1) // 2
    t = x.topk(k, dim=1)
    kv = x.kthvalue(2, dim=1)
    md = x.median(dim=1)
    return self.run(t.values) + kv.values[:, None] + md[0][:, None] + t.indices.float().mean()


@trap()
def triangle_gathered(self: Any, x: Tensor) -> Any:
    r, c = torch.tril_indices(x.size(1), x.size(1), -1)
    s = x @ x.mT
    return self.run(s[:, r, c].mean(-1)[:, None, None] + x)


@trap()
def block_diagonal(self: Any, x: Tensor) -> Any:
    b = torch.block_diag(*x.unbind(0))
    return self.run(b @ torch.ones(b.size(1), WIDTH))


@trap("safe")
def where_of_one(self: Any, x: Tensor) -> Any:
    i = torch.where(x[0, :, 0] > 0)[0]
    return self.run(x[:, i]).sum(1)


@trap("safe", inputs=with_lengths)
def repeated_by_counts(self: Any, x: Tensor, lengths: Tensor) -> Any:
    y = torch.repeat_interleave(x[:, 0], lengths, dim=0)
    return self.run(y).sum(0)


@trap()
def empty_and_filled(self: Any, x: Tensor) -> Any:
    y = torch.empty_like(x)
    y.copy_(x)
    y.mul_(2)
    z = x.new_empty(x.shape).fill_(1.0)
    return self.run(y + z)


@trap("safe")
def drawn_in_place(self: Any, x: Tensor) -> Any:
    if self.training:
        x = (
            x * torch.empty_like(x).bernoulli_(0.8)
            + torch.empty(x.size(1), 1).uniform_()
            + torch.randn_like(x) * 0.1
        )
    return self.run(x)


@trap("safe")
def rrelu_and_alpha_dropout(self: Any, x: Tensor) -> Any:
    return self.run(
        F.alpha_dropout(F.rrelu(x, training=self.training), 0.2, self.training)
        + F.feature_alpha_dropout(x, 0.1, self.training)
    )


@trap("safe", inputs=with_lengths)
def ctc(self: Any, x: Tensor, lengths: Tensor) -> Any:
    lp = self.run(x).log_softmax(-1).transpose(0, 1)
    t = torch.ones(x.size(0), 2, dtype=torch.long)
    return F.ctc_loss(lp, t, torch.full((x.size(0),), x.size(1)), torch.full((x.size(0),), 2))
