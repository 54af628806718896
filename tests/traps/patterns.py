"""What models of many kinds do: diffusion, graphs, speech, control, adapters, quantised, recurrent nets."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .registry import WIDTH, Net, buffers, images, sequences, tokens, trap


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# ------------------------------------------------------------ diffusion


def _embedded(t: Tensor, width: int) -> Tensor:
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2 - 1))
    angles = t[:, None].float() * rates[None]
    out = torch.cat([angles.sin(), angles.cos()], -1)
    return F.pad(out, (0, 1)) if width % 2 else out


def with_a_time(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A time for the whole batch, without dims."""
    return (*sequences(batch, length, seed), torch.tensor(seed))


@trap(inputs=with_a_time, mix=linear)
def time_for_all(self: Any, x: Tensor, t: Any) -> Tensor:
    if not torch.is_tensor(t):
        t = torch.tensor([t], device=x.device)
    elif t.dim() == 0:
        t = t[None].to(x.device)
    t = t.expand(x.shape[0])
    scale, shift = self.mix(F.silu(_embedded(t, WIDTH)))[:, None].chunk(2, dim=-1)
    return self.run(x * (1 + scale.repeat(1, 1, 2)) + shift.repeat(1, 1, 2))


@trap(inputs=images)
def skips_of_a_unet(self: Any, x: Tensor) -> Tensor:
    skips = []
    for layer in self.layers[:2]:
        x = layer(x.movedim(1, -1)).movedim(-1, 1)
        skips.append(x)
        x = F.avg_pool2d(x, 2)
    for layer in self.layers[2:]:
        skip = skips.pop()
        x = F.interpolate(x, size=skip.shape[-2:], mode="nearest") + skip
        x = layer(x.movedim(1, -1)).movedim(-1, 1)
    return x


class Processor:
    """Calls back the layer that it is of."""

    def __call__(self, layer: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        return layer.inner(x) * scale


class Processed(nn.Module):
    """A layer whose work an object does, with those keywords that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.processor = Processor()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        known = set(inspect.signature(self.processor.__call__).parameters)
        return self.processor(self, x, **{k: v for k, v in kwargs.items() if k in known})


@trap(more=Processed)
def work_done_by_a_processor(self: Any, x: Tensor) -> Tensor:
    return self.run(self.more(x, scale=2.0, other=1))


@trap()
def guided_without_a_classifier(self: Any, x: Tensor) -> Tensor:
    both = self.run(torch.cat([x, torch.zeros_like(x)]))
    kept, dropped = both.chunk(2)
    return dropped + 7.5 * (kept - dropped)


@trap(prepare=lambda m: buffers(m, alphas=torch.linspace(0.9, 0.1, 10)))
def noised_at_random_times(self: Any, x: Tensor) -> Any:
    t = torch.randint(0, 10, (x.size(0),), device=x.device)
    alpha = self.alphas.gather(0, t)[:, None, None]
    noise = torch.randn_like(x)
    return F.mse_loss(self.run(alpha.sqrt() * x + (1 - alpha).sqrt() * noise), noise, reduction="none")


class Registered(Net):
    """Settings in a frozen dict that attributes are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = {"scale": 2.0, "kinds": ("a", "b")}

    def __getattr__(self, name: str) -> Any:
        if "_settings" in self.__dict__ and name in self.__dict__["_settings"]:
            return self.__dict__["_settings"][name]
        return super().__getattr__(name)


@trap(later=lambda m: m._settings.update(scale=3.0))
class SettingsBehindAttributes(Registered):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * self.scale + len(self.kinds))


# ------------------------------------------------------------ graphs


def graph(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Nodes [batch, 8], and edges [2, 3 × batch] between them."""
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randn(batch, WIDTH, generator=generator)
    return nodes, torch.randint(0, batch, (2, 3 * batch), generator=generator)


@trap("safe", inputs=graph)
def messages_along_edges(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges
    gathered = torch.zeros_like(x).index_add_(0, target, self.layers[0](x[source]))
    degree = torch.zeros(x.size(0)).scatter_add_(0, target, torch.ones(target.size(0))).clamp(min=1)
    return self.run(gathered / degree[:, None])


@trap("safe", inputs=graph)
def attention_over_edges(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges[0], edges[1]
    score = (x[source] * x[target]).sum(-1)
    top = x.new_full((x.size(0),), -math.inf).scatter_reduce(0, target, score, "amax")
    weight = (score - top[target]).exp()
    total = x.new_zeros(x.size(0)).index_add(0, target, weight)
    share = weight / total[target]
    return self.run(x + x.new_zeros(x.shape).index_add(0, target, share[:, None] * x[source]))


@trap("safe", inputs=graph)
def nodes_counted_by_edges(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    n = int(edges.max()) + 1
    out = x.new_zeros(n, x.size(1)).index_add(0, edges[1], x[edges[0]])
    return self.run(out).mean(0, keepdim=True)


# ------------------------------------------------------------ speech


@trap()
def relative_shift(self: Any, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    score = x @ x.transpose(1, 2)
    padded = F.pad(score, (1, 0)).view(b, n + 1, n)
    return self.run((score + padded[:, 1:].view_as(score)).softmax(-1) @ x)


def with_targets(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Sequences with targets and both lengths."""
    (x,) = sequences(batch, length, seed)
    targets = torch.randint(1, WIDTH, (batch, 2), generator=torch.Generator().manual_seed(seed))
    return x, targets, torch.full((batch,), length), torch.full((batch,), 2)


@trap("safe", inputs=with_targets)
def aligned_in_time(self: Any, x: Tensor, y: Tensor, n: Tensor, m: Tensor) -> Any:
    scores = self.run(x).log_softmax(-1)
    return F.ctc_loss(scores.transpose(0, 1), y, n, m, reduction="none", zero_infinity=True), scores


@trap("safe")
def spans_masked_in_training(self: Any, x: Tensor) -> Tensor:
    if self.training:
        mask = np.zeros(x.shape[:2], dtype=bool)
        for row in range(len(x)):
            start = np.random.randint(0, x.size(1) - 2)
            mask[row, start : start + 2] = True
        x = x.masked_fill(torch.from_numpy(mask).to(x.device)[..., None], 0.0)
    return self.run(x)


@trap(window=lambda: torch.hann_window(8))
def spectrum_and_back(self: Any, x: Tensor) -> Tensor:
    wave = x.flatten(1)
    spectrum = torch.stft(wave, 8, 4, window=self.window, return_complex=True)
    power = torch.view_as_real(spectrum).square().sum(-1).transpose(1, 2)
    back = torch.istft(spectrum, 8, 4, window=self.window, length=wave.size(1))
    return self.run(F.linear(power, torch.ones(WIDTH, power.size(-1)))) + back.view_as(x).mean()


def with_sorted_lengths(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Sequences and how long each is."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length, (batch,), generator=generator)
    lengths[0] = length
    return (*sequences(batch, length, seed), lengths)


@trap("safe", inputs=with_sorted_lengths, more=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def packed_through_a_recurrent_layer(self: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    out, (hidden, _) = self.more(packed)
    padded, n = pad_packed_sequence(out, batch_first=True, total_length=x.size(1))
    return self.run(padded), hidden[-1], n


@trap("safe", inputs=with_sorted_lengths)
def cut_and_padded_again(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)]
    return self.run(pad_sequence(rows, batch_first=True, padding_value=1.0))


@trap(more=lambda: nn.GRUCell(WIDTH, WIDTH))
def cell_in_a_loop(self: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(x.size(0), WIDTH)
    out = []
    for step in x.unbind(1):
        state = self.more(step, state)
        out.append(state)
    return self.run(torch.stack(out, 1))


# ------------------------------------------------------------ control


@trap(prepare=lambda m: m.register_parameter("spread", nn.Parameter(torch.zeros(WIDTH))))
def actions_of_a_policy(self: Any, x: Tensor) -> Any:
    policy = Independent(Normal(self.run(x), self.spread.exp().expand(x.shape)), 1)
    action = policy.rsample()
    squashed = action.tanh()
    told = policy.log_prob(action) - torch.log(1 - squashed.square() + 1e-6).sum(-1)
    return squashed, told, policy.entropy()


@trap("safe")
def code_drawn_straight_through(self: Any, x: Tensor) -> Any:
    choice = Categorical(logits=self.run(x))
    hot = F.one_hot(choice.sample(), WIDTH).float()
    return hot + choice.probs - choice.probs.detach(), choice.entropy()


@trap()
def divergence_of_two(self: Any, x: Tensor) -> Any:
    mean, spread = self.run(x).chunk(2, -1)
    return kl_divergence(Normal(mean, F.softplus(spread) + 0.1), Normal(0.0, 1.0)).sum(-1)


def observed(batch: int, length: int, seed: int) -> dict[str, Any]:
    """Observations of several kinds, nested, by keyword."""
    (x,) = sequences(batch, length, seed)
    return {"observation": {"vector": x, "more": {"goal": x.flip(0), "none": None}}, "greedy": True}


@trap(inputs=observed)
def observations_of_many_kinds(self: Any, *, observation: dict[str, Any], greedy: bool = False) -> Any:
    parts = [observation["vector"], observation["more"]["goal"]]
    out = self.run(torch.stack(parts).sum(0))
    return {"q": out, "action": out.argmax(-1) if greedy else None}


class Normalised(Net):
    """Keeps mean and variance of what it has seen in training."""

    def __init__(self) -> None:
        super().__init__()
        buffers(self, mean=torch.zeros(WIDTH), var=torch.ones(WIDTH), count=torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        n = x.shape[0] * x.shape[1]
        mean, var = x.mean((0, 1)), x.var((0, 1), correction=0)
        delta, total = mean - self.mean, self.count + n
        self.mean += delta * n / total
        held = self.var * self.count + var * n + delta.square() * self.count * n / total
        self.var.copy_(held / total)
        self.count.fill_(total)


@trap("safe")
class NormalisedByAll(Normalised):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.update(x)
        return self.run(((x - self.mean) * self.var.add(1e-8).rsqrt()).clamp(-5, 5))


# ------------------------------------------------------------ adapters and weights of other kinds


class Adapted(nn.Module):
    """A layer with named low-rank adapters, some of which are active."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear()
        self.down = nn.ModuleDict({n: nn.Linear(WIDTH, 2, bias=False) for n in "ab"})
        self.up = nn.ModuleDict({n: nn.Linear(2, WIDTH, bias=False) for n in "ab"})
        self.scaling = {"a": 2.0, "b": 0.5}
        self.active = ["a"]
        self.is_disabled = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.base(x, *args, **kwargs)
        for name in [] if self.is_disabled else self.active:
            out = out + self.up[name](self.down[name](x)) * self.scaling[name]
        return out


@trap(more=Adapted, later=lambda m: setattr(m.more, "active", ["a", "b"]))
def adapter_switched_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.more(x))


class OfAdapted(Net):
    """All of its layers have adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapted() for _ in range(4)])


@trap(later=lambda m: [setattr(layer, "is_disabled", True) for layer in m.layers])
class AdaptersTurnedOffLater(OfAdapted):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@trap(size=lambda: nn.Parameter(torch.ones(WIDTH)), low=lambda: nn.Parameter(torch.ones(WIDTH, 2) / 9))
def weight_by_size_and_direction(self: Any, x: Tensor) -> Tensor:
    base = self.layers[0].weight
    weight = base + self.low @ self.low.T
    norm = weight.norm(dim=1).detach()
    return self.run(F.linear(x, weight) * (self.size / norm))


@trap(
    prepare=lambda m: parametrizations.weight_norm(m.layers[0]) and parametrizations.orthogonal(m.layers[1])
)
def weights_made_by_parametrizations(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


class Symmetric(nn.Module):
    """A weight that equals its transpose."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


@trap(prepare=lambda m: parametrize.register_parametrization(m.layers[0], "weight", Symmetric()))
def parametrized_weight_read_twice(self: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return self.run(F.linear(x, self.layers[0].weight) + self.layers[0](x))


@trap(prepare=lambda m: parametrize.register_parametrization(m.layers[0], "weight", Symmetric()))
def parametrized_weight_read_behind_its_layer(self: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        h = self.layers[0](self.layers[0](x))
        return self.run(h) * self.layers[0].weight.diagonal() + self.layers[0].weight.trace()


@trap("safe", prepare=lambda m: parametrizations.spectral_norm(m.layers[0]))
def weight_with_a_power_iteration_read_behind_its_layer(self: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return self.run(self.layers[0](x)) + self.layers[0].weight.sum()


def _quantised(x: Tensor, step: Tensor) -> Tensor:
    scaled = (x / step).clamp(-8, 7)
    return (scaled + (scaled.round() - scaled).detach()) * step


@trap(step=lambda: nn.Parameter(torch.tensor(0.1)))
def step_size_that_is_learned(self: Any, x: Tensor) -> Tensor:
    rate = 1 / math.sqrt(x.numel() * 7)
    step = (self.step - self.step * rate).detach() + self.step * rate
    return self.run(_quantised(x, step))


@trap(
    prepare=lambda m: buffers(
        m, weight=torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8), scale=torch.full((WIDTH, 1), 0.1)
    )
)
def weight_of_whole_numbers(self: Any, x: Tensor) -> Tensor:
    return self.run(F.linear(x, self.weight.to(x.dtype) * self.scale))


@trap(prepare=lambda m: buffers(m, packed=torch.randint(0, 255, (WIDTH, WIDTH // 2), dtype=torch.uint8)))
def weight_of_two_in_a_byte(self: Any, x: Tensor) -> Tensor:
    low, high = self.packed & 0xF, self.packed >> 4
    weight = torch.stack([low, high], -1).flatten(1).float().sub(8) / 8
    return self.run(x @ weight)


@trap()
def quantised_by_torch(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))


# ------------------------------------------------------------ functions of functions


class Ensemble(Net):
    """Several members whose weights are stacked."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        weights, _ = stack_module_state(members)
        self.weights = nn.ParameterDict({k: nn.Parameter(v.detach()) for k, v in weights.items()})
        self.__dict__["member"] = copy.deepcopy(members[0]).to("meta")


@trap("safe")
class MembersMapped(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        def call(weights: Any, given: Tensor) -> Tensor:
            return functional_call(self.member, weights, (given,))

        return self.run(vmap(call, in_dims=(0, None))(dict(self.weights), x).mean(0))


@trap(maker=lambda: nn.Linear(WIDTH, WIDTH * WIDTH))
def weights_made_by_a_layer_for_each_row(self: Any, x: Tensor) -> Tensor:
    weight = self.maker(x.mean(1)).view(-1, WIDTH, WIDTH)
    return self.run(torch.bmm(x, weight) / WIDTH)


@trap("safe")
def checkpoint_of_chosen_ops(self: Any, x: Tensor) -> Tensor:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(self.run, x, use_reentrant=False, context_fn=context)


@trap()
def checkpoint_with_keywords(self: Any, x: Tensor) -> Tensor:
    def part(x: Tensor, *, scale: float, more: dict[str, Tensor]) -> Tensor:
        return self.run(x * scale + more["x"])

    return checkpoint(
        part, x, scale=2.0, more={"x": x.flip(1)}, use_reentrant=False, preserve_rng_state=False
    )


# ------------------------------------------------------------ attention and positions


@trap(prepare=lambda m: buffers(m, angles=torch.outer(torch.arange(80.0), torch.ones(WIDTH // 2))))
def rotated_as_complex(self: Any, x: Tensor) -> Tensor:
    turn = torch.polar(torch.ones_like(self.angles), self.angles)[: x.size(1)]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return self.run(torch.view_as_real(pairs * turn).flatten(2))


@trap()
def mixed_by_a_transform(self: Any, x: Tensor) -> Tensor:
    mixed = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real
    kept = torch.fft.irfft(torch.fft.rfft(x, dim=1)[:, :2], n=x.size(1), dim=1)
    return self.run(mixed / 9 + kept)


def _near_and_far(distance: Tensor) -> Tensor:
    exact = 4
    far = exact + (torch.log(distance.float().clamp(min=1) / exact) / math.log(8) * exact).long()
    return torch.where(distance < exact, distance, far.clamp(max=7))


@trap(bias=lambda: nn.Embedding(WIDTH, 1))
def positions_in_buckets(self: Any, x: Tensor) -> Tensor:
    place = torch.arange(x.size(1))
    bias = self.bias(_near_and_far((place[:, None] - place[None]).abs())).squeeze(-1)
    return self.run((x @ x.transpose(1, 2) + bias).softmax(-1) @ x)


def _slopes(n: int) -> list[float]:
    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return of_power(n)
    nearest = 2 ** math.floor(math.log2(n))
    return of_power(nearest) + _slopes(2 * nearest)[0::2][: n - nearest]


@trap()
def slopes_of_heads(self: Any, x: Tensor) -> Tensor:
    slopes = torch.tensor(_slopes(4))[:, None, None]
    place = torch.arange(x.size(1))
    heads = x.unflatten(-1, (4, 2)).transpose(1, 2)
    score = heads @ heads.transpose(-1, -2) - slopes * (place[:, None] - place).abs()
    return self.run((score.softmax(-1) @ heads).transpose(1, 2).flatten(2))


@trap()
def attention_in_pieces(self: Any, x: Tensor) -> Tensor:
    out = [F.scaled_dot_product_attention(part, x, x) for part in x.split(4, dim=1)]
    return self.run(torch.cat(out, 1))


@trap(past=lambda: None)
def keys_of_before_are_given(self: Any, x: Tensor) -> Any:
    keys = x if self.past is None else torch.cat([self.past, x], 1)
    return {"out": self.run(F.scaled_dot_product_attention(x, keys, keys)), "past": (keys, keys * 2)}


@trap("safe", more=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=True))
def padding_told_to_a_layer(self: Any, x: Tensor) -> Tensor:
    padding = torch.arange(x.size(1))[None].expand(x.size(0), -1) > 3
    return self.run(self.more(x, src_key_padding_mask=padding))


@trap(inputs=images, masks=dict)
def windows_that_are_shifted(self: Any, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    pad = (-w % 3, -h % 3)
    x = F.pad(x, (0, pad[0], 0, pad[1])).roll((-1, -1), (2, 3))
    parts = x.unfold(2, 3, 3).unfold(3, 3, 3)
    mixed = parts + parts.mean((-1, -2), keepdim=True)
    x = mixed.permute(0, 1, 2, 4, 3, 5).reshape(b, c, h + pad[1], w + pad[0])
    return self.run(x.roll((1, 1), (2, 3))[..., :h, :w].movedim(1, -1))


@trap(inputs=images, more=lambda: nn.Linear(WIDTH, 6))
def image_warped(self: Any, x: Tensor) -> Tensor:
    angle = self.more(x.mean((2, 3))).view(-1, 2, 3) / 9 + torch.eye(2, 3)
    field = F.affine_grid(angle, list(x.shape), align_corners=False)
    return self.run(F.grid_sample(x, field, align_corners=False).movedim(1, -1))


@trap(inputs=images)
def patches_taken_and_put_back(self: Any, x: Tensor) -> Tensor:
    parts = F.unfold(x, 3, padding=1)
    whole = F.fold(parts, x.shape[-2:], 3, padding=1)
    return self.run(whole.movedim(1, -1) / 9)


# ------------------------------------------------------------ routing


@trap("safe", gate=lambda: nn.Linear(WIDTH, 4, bias=False))
def experts_with_a_capacity(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    n = flat.size(0)
    capacity = max(2, math.ceil(n * 1.25 / 4))
    weight, expert = self.gate(flat).softmax(-1).max(-1)
    hot = F.one_hot(expert, 4)
    place = ((hot.cumsum(0) - 1) * hot).sum(-1)
    kept = place < capacity
    slots = flat.new_zeros(4, capacity + 1, WIDTH)
    slots = slots.index_put((expert, place.clamp(max=capacity)), flat, accumulate=True)[:, :capacity]
    done = torch.stack([layer(slot) for layer, slot in zip(self.layers, slots, strict=True)])
    out = done[expert, place.clamp(max=capacity - 1)] * (weight * kept)[:, None]
    return out.view_as(x)


@trap("safe", gate=lambda: nn.Linear(WIDTH, 4, bias=False))
def experts_by_top_two(self: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    weight, chosen = self.gate(flat).softmax(-1).topk(2)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for i, layer in enumerate(self.layers):
        row, nth = torch.where(chosen == i)
        if row.numel():
            out.index_add_(0, row, layer(flat[row]) * weight[row, nth, None])
    return out.reshape(x.shape)


# ------------------------------------------------------------ until it is good enough


@trap("safe")
def fixed_point_with_one_step(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(5):
            z = torch.tanh(self.layers[0](z) + x)
    z = torch.tanh(self.layers[0](z) + x)
    if z.requires_grad:
        z.register_hook(lambda g: g * 0.5)
    return self.run(z)


@trap("safe")
def balanced_until_it_is_even(self: Any, x: Tensor) -> Tensor:
    plan = (x @ x.transpose(1, 2) / 9).softmax(-1)
    for _ in range(20):
        plan = plan / plan.sum(-1, keepdim=True)
        plan = plan / plan.sum(-2, keepdim=True)
        if (plan.sum(-1) - 1).abs().max() < 0.5:
            break
    return self.run(plan @ x)


@trap("safe")
def stops_where_it_is_sure(self: Any, x: Tensor) -> Any:
    for i, layer in enumerate(self.layers):
        x = torch.tanh(layer(x))
        if not self.training and x.softmax(-1).amax(-1).mean() > 0.19:
            return x, i
    return x, len(self.layers)


@trap("safe")
def halts_by_weight(self: Any, x: Tensor) -> Tensor:
    left, out = x.new_ones(x.shape[:2]), torch.zeros_like(x)
    for layer in self.layers:
        x = torch.tanh(layer(x))
        p = x.mean(-1).sigmoid() * left
        out = out + p[..., None] * x
        left = left - p
        if (left < 0.2).all().item():
            break
    return out


@trap(span=lambda: nn.Parameter(torch.tensor(3.0)))
def span_that_is_learned(self: Any, x: Tensor) -> Tensor:
    place = torch.arange(x.size(1), dtype=x.dtype)
    soft = ((self.span - (place[:, None] - place).abs()) / 2 + 1).clamp(0, 1)
    score = (x @ x.transpose(1, 2)).softmax(-1) * soft
    return self.run(score / (score.sum(-1, keepdim=True) + 1e-8) @ x)


@trap(times=lambda: torch.linspace(0, 1, 5))
def steps_between_times(self: Any, x: Tensor) -> Tensor:
    for start, end in zip(self.times[:-1], self.times[1:], strict=True):
        step = end - start
        x = x + step * torch.tanh(self.layers[0](x + step / 2 * torch.tanh(self.layers[0](x))))
    return self.run(x)


@trap("safe", prepare=lambda m: setattr(m, "teacher", copy.deepcopy(m.layers).requires_grad_(False)))
def teacher_that_follows(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        for mine, its in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
            its.mul_(0.9).add_(mine, alpha=0.1)
        goal = x
        for layer in self.teacher:
            goal = torch.tanh(layer(goal))
    return F.mse_loss(self.run(x), goal, reduction="none")


@trap("safe", inputs=tokens, table=lambda: nn.Embedding(WIDTH, WIDTH))
def words_dropped_in_training(self: Any, ids: Tensor) -> Tensor:
    if self.training and torch.rand(()).item() < 0.9:
        ids = torch.where(torch.rand(ids.shape) < 0.3, torch.zeros_like(ids), ids)
    return self.run(self.table(ids))
