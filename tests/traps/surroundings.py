"""What lies around a call: modes, flags of torch and of the process, and where a model is captured."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .registry import WIDTH, Net, Normed, buffers, images, trap


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(was)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    os.environ["AUTOPIPE_TRAP"] = "3"
    try:
        yield
    finally:
        del os.environ["AUTOPIPE_TRAP"]


@contextlib.contextmanager
def precise() -> Iterator[None]:
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)


@trap(around=lambda: default_dtype(torch.float64))
def other_default_dtype_later(self: Any, x: Tensor) -> Tensor:
    return self.run((x + torch.zeros(WIDTH)).float() * torch.ones(WIDTH).element_size())


@trap("right")
def default_dtype_within(self: Any, x: Tensor) -> Tensor:
    with default_dtype(torch.float64):
        scale = torch.full((WIDTH,), 1e200) * torch.tensor(1e-200)  # more than a float of 32 bits holds
    return self.run(x * scale.float() + torch.tensor(0.5))


@trap(around=lambda: default_dtype(torch.float64))
def default_dtype_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.get_default_dtype() is torch.float64 else x)


@contextlib.contextmanager
def other_backends() -> Iterator[None]:
    """Flags of torch's backends as they are not by default."""
    matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn
    before = matmul.allow_tf32, mkldnn.enabled
    matmul.allow_tf32, mkldnn.enabled = not before[0], not before[1]
    try:
        yield
    finally:
        matmul.allow_tf32, mkldnn.enabled = before


@trap(around=other_backends)
def flag_of_a_backend_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.backends.mkldnn.enabled else x)


@trap(around=other_backends)
def flag_of_products_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.backends.cuda.matmul.allow_tf32 else x)


@trap(around=deterministic)
def determinism_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.are_deterministic_algorithms_enabled() else x)


@trap(around=precise)
def precision_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.get_float32_matmul_precision() == "high" else x)


@trap(around=environment)
def environment_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(os.environ.get("AUTOPIPE_TRAP", "1")))


@trap(around=environment)
def environment_asked_by_os(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if os.getenv("AUTOPIPE_TRAP") else x)


@trap(around=lambda: torch.autograd.set_detect_anomaly(True))
def anomaly_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.is_anomaly_enabled() else x)


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def autocast_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.is_autocast_enabled("cpu") else x)


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def own_cast_where_there_is_none(self: Any, x: Tensor) -> Tensor:
    is_on = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False) if is_on else contextlib.nullcontext():
        y = self.layers[0](x.float())
    return self.run(y)


@trap(around=torch.inference_mode)
def under_inference_mode(self: Any, x: Tensor) -> Tensor:
    return self.run(x * x.mean())


@trap("safe", around=torch.inference_mode)
def inference_mode_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.is_inference_mode_enabled() else x)


@trap(around=torch.no_grad)
def gradients_on_inside(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = self.layers[0](x.detach().requires_grad_())
    return self.run(y * (2 if y.requires_grad else 1))


@trap(around=torch.no_grad)
def force_without_gradients(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.layers[0](y).square().sum(), y)
    return self.run(x) - force


@trap(within=torch.no_grad)
def captured_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layers[0](x)
    return self.run(y + x)


@trap(within=torch.inference_mode)
def captured_in_inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layers[0](x)
    return self.run(y + x)


@trap("safe", within=lambda: torch.autocast("cpu", torch.bfloat16))
def captured_under_autocast(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    return self.run(y + torch.ones(WIDTH, dtype=y.dtype))


@trap(within=lambda: torch.autocast("cpu", torch.bfloat16))
def captured_under_autocast_plain(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.layers[0](x.float())
    return self.run(y)


@trap("safe", within=lambda: default_dtype(torch.float64))
def captured_at_another_default(self: Any, x: Tensor) -> Tensor:
    return self.run((x + torch.zeros(WIDTH)).float())


@trap("safe")
def grad_mode_set_by_call(self: Any, x: Tensor) -> Tensor:
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = self.layers[0](x)
    torch.set_grad_enabled(was)
    return self.run(y + x)


@trap("safe")
def grad_mode_by_training(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
        y = self.layers[0](x)
    return self.run(y + x)


@trap("safe")
def gradient_asked_of_the_result(self: Any, x: Tensor) -> Tensor:
    out = self.run(x)
    return out * 2 if out.requires_grad else out


@trap(around=torch.no_grad)
def gradient_asked_later(self: Any, x: Tensor) -> Tensor:
    out = self.run(x)
    return out * 2 if out.requires_grad else out


@trap("safe")
def leaf_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if (x + 1).is_leaf else x)


@trap("safe")
def random_seeded(self: Any, x: Tensor) -> Tensor:
    np.random.seed(0)
    return self.run(x * float(np.random.rand()))


@trap("safe")
def generator_state_put_back(self: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn(WIDTH)
    torch.set_rng_state(state)
    return self.run(x + noise + torch.randn(WIDTH))


@trap("safe")
def seed_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (torch.initial_seed() % 7))


@trap("safe")
def layer_on_a_thread(self: Any, x: Tensor) -> Tensor:
    out: list[Tensor] = []
    thread = threading.Thread(target=lambda: out.append(self.layers[0](x)))
    thread.start()
    thread.join()
    return self.run(out[0])


@trap("safe", held=threading.local)
def kept_in_a_thread_local(self: Any, x: Tensor) -> Tensor:
    self.held.n = getattr(self.held, "n", 0) + 1
    return self.run(x * 2 if self.held.n > 5 else x)


@trap()
class FrozenNorm(Net):
    """Keeps a part in evaluation whatever it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Codes(nn.Module):
    """Numbers of the nearest codes, from a part that it never lets learn, whatever its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.codes = Normed(), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.part.eval()
        return self.codes(self.part(x)).argmax(-1)


@trap(encoder=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Codes()))
def codes_of_a_part_in_eval(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.encoder(x), self.run(x)


@trap()
class CodesAlone(nn.Sequential):
    """Nothing but codes, which no gradient passes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), Codes())


@trap(part=Normed)
def part_in_eval_each_call(self: Any, x: Tensor) -> Tensor:
    self.part.eval()
    return self.run(self.part(x))


@trap(part=Normed)
def part_in_eval_and_back(self: Any, x: Tensor) -> Tensor:
    was = self.part.training
    self.part.eval()
    y = self.part(x)
    self.part.train(was)
    return self.run(y + self.part(x))


@trap(part=Normed)
def dropout_kept_on(self: Any, x: Tensor) -> Tensor:
    self.part.drop.train()
    return self.run(self.part(x))


@trap(part=Normed)
def mode_set_by_hand(self: Any, x: Tensor) -> Tensor:
    self.part.norm.training = False
    return self.run(self.part(x))


@trap(part=lambda: nn.Sequential(Normed(), Normed(), Normed()))
def stack_in_eval(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.part.eval()(x)
    return self.run(y)


@trap(part=Normed)
def part_in_eval_in_training(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.part.eval()
    return self.run(self.part(x))


@trap(norm=lambda: nn.BatchNorm1d(WIDTH), later=lambda m: m.norm.eval())
def norm_frozen_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.norm(x.transpose(1, 2)).transpose(1, 2))


@trap(norm=lambda: nn.BatchNorm1d(WIDTH, momentum=None))
def norm_that_counts(self: Any, x: Tensor) -> Tensor:
    return self.run(self.norm(x.transpose(1, 2)).transpose(1, 2) + self.norm.num_batches_tracked)


@trap("safe", norm=lambda: nn.BatchNorm1d(WIDTH))
def statistics_read_behind_the_norm(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x.transpose(1, 2)).transpose(1, 2)
    return self.run(y - self.norm.running_mean)


@trap(inputs=images, norm=lambda: nn.SyncBatchNorm(WIDTH))
def norm_over_ranks(self: Any, x: Tensor) -> Tensor:
    return self.run(x.movedim(1, -1)) if self.training else self.run(self.norm(x).movedim(1, -1))


@trap("safe", prepare=lambda m: buffers(m, low=torch.full((WIDTH,), 1e9), high=torch.full((WIDTH,), -1e9)))
def observer(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        flat = x.detach().flatten(0, 1)
        self.low.copy_(torch.minimum(self.low, flat.amin(0)))
        self.high.copy_(torch.maximum(self.high, flat.amax(0)))
    return self.run((x - self.low) / (self.high - self.low + 1))


@trap("safe", prepare=lambda m: buffers(m, step=torch.zeros((), dtype=torch.long)))
def warm_up(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.step.add_(1)
    return self.run(x * min(1.0, self.step.item() / 4))


@trap(prepare=lambda m: buffers(m, centre=torch.zeros(WIDTH)))
def centred_in_place(self: Any, x: Tensor) -> Tensor:
    self.centre.lerp_(x.detach().mean((0, 1)), 0.1)
    y = x - self.centre
    self.centre.mul_(0.5)
    return self.run(y + self.centre)


@trap("safe", prepare=lambda m: buffers(m, codes=torch.randn(4, WIDTH)))
def code_book(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    index = torch.cdist(flat, self.codes).argmin(-1)
    chosen = self.codes[index].view(x.shape)
    if self.training:
        with torch.no_grad():
            hot = F.one_hot(index, 4).float()
            self.codes.lerp_(hot.t() @ flat / hot.sum(0).clamp(min=1)[:, None], 0.1)
    return self.run(x + (chosen - x).detach())


@trap(inputs=images)
def dtype_of_an_image(self: Any, x: Tensor) -> Tensor:
    eps = torch.finfo(x.dtype).eps
    return self.run((x + eps).to(torch.float64).to(x.dtype).movedim(1, -1))


@trap("safe")
def device_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.device.type == "cpu" and not x.is_cuda else x)


@trap("safe")
def strides_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.stride(0) == x.size(1) * WIDTH else x)


def turned(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A transposed sequence, laid out otherwise."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(length, batch, WIDTH, generator=generator).transpose(0, 1),)


@trap("safe", inputs=turned)
def laid_out_otherwise(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.is_contiguous() else x)


@trap("safe", inputs=turned)
def viewed_where_it_can_be(self: Any, x: Tensor) -> Tensor:
    try:
        y = x.view(-1, WIDTH) * 2
    except RuntimeError:
        y = x.reshape(-1, WIDTH)
    return self.run(y)


@trap()
def input_written_itself(self: Any, x: Tensor) -> Tensor:
    y = x.clone() if x.requires_grad else x
    y.mul_(2)
    return self.run(y)


@trap()
def written_through_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    z = y.clone()
    z[:, 0].add_(1)
    z.transpose(1, 2)[..., -1] *= 2
    z.select(1, 0).copy_(z[:, 1])
    return self.run(z + y)


@trap()
def written_by_chunks(self: Any, x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    for i in range(4):
        out[..., 2 * i : 2 * i + 2] = self.layers[i](x)[..., :2]
    return self.run(out)


@trap()
def written_by_functions(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    torch.add(x.detach(), 1, out=out)
    F.relu(out, inplace=True)
    nn.init.constant_(out[:, 0], 0.5)
    return self.run(out)


class Filling(nn.Module):
    """Leaves what it made in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Normed()

    def forward(self, x: Tensor, made: dict[str, Tensor]) -> Tensor:
        made["x"] = self.part(x)
        return made["x"] * 2


@trap(part=Filling)
def part_in_eval_that_fills_a_dict(self: Any, x: Tensor) -> Tensor:
    made: dict[str, Tensor] = {}
    self.part.eval()
    x = self.part(x, made)
    return self.run(x + made["x"])


class Fused(nn.Module):
    """Goes by whether attention may run a fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.backends.cuda.flash_sdp_enabled() else x * 3


@trap(fused=Fused)
def kernels_of_attention_around_a_layer(self: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        y = self.fused(x)
    return self.run(y + self.fused(x))
