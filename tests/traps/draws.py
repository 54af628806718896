"""Random numbers from other generators than torch's, and other things that no two calls have alike."""

from __future__ import annotations

import os
import random
import time
from random import random as draw
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, Net, trap

OWN = np.random.default_rng(0)


@trap("refused", rng=lambda: random.Random(0))
def own_random(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.rng.random())


@trap("refused", rng=lambda: random.Random(0))
def own_random_in_training(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.rng.gauss(1, 1) if self.training else x)


@trap("refused", rng=lambda: random.Random(0))
def branch_by_own_random(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.rng.random() < 0.05 else x)  # which the first calls do not take


@trap("refused")
def branch_by_a_generator_of_the_file(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if OWN.random() < 0.01 else x)


@trap("refused", rngs=lambda: [random.Random(0)])
def branch_by_a_draw_behind_all_layers(self: Any, x: Tensor) -> Tensor:
    x = self.run(x)
    return (x, x) if self.rngs[0].random() < 0.05 else (x,)  # type: ignore[return-value]


@trap("refused")
def branch_by_a_generator_without_a_seed(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if np.random.default_rng().random() < 0.01 else x)


@trap("refused")
def branch_by_the_systems_numbers(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if random.SystemRandom().random() < 0.01 else x)


@trap("refused")
def branch_by_pythons_generator_without_a_seed(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if random.Random().random() < 0.01 else x)


@trap("refused")
def branch_by_bytes_of_the_system(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if os.urandom(1)[0] < 3 else x)


def _made_without_a_seed() -> random.Random:
    return random.Random()


@trap("refused")
def branch_by_a_generator_that_a_function_makes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if _made_without_a_seed().random() < 0.01 else x)


@trap()
def pythons_generator_made_with_a_seed(self: Any, x: Tensor) -> Tensor:
    return self.run(x * random.Random(0).random())


@trap()
def generator_made_with_a_seed(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(np.random.default_rng(0).random()))


class Branching(nn.Module):
    """Leaves out its weights by a generator of its own."""

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.layer, self.rng = nn.Linear(WIDTH, WIDTH), rng

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training and self.rng.random() < 0.3 else x


@trap(one=lambda: Branching(random.Random(0)), other=lambda: Branching(np.random.default_rng(0)))
def branches_by_own_random_inside_layers(self: Any, x: Tensor) -> Tensor:
    return self.run(self.other(self.run(self.one(x))))


def _share_a_generator(model: Any) -> None:
    model.one, model.other = Branching(random.Random(1)), Branching(None)
    model.other.rng = model.one.rng


@trap(prepare=_share_a_generator)
def layers_that_share_a_generator(self: Any, x: Tensor) -> Tensor:
    return self.run(self.other(self.run(self.one(x))))


@trap("refused", rng=lambda: np.random.default_rng(0))
def own_numpy_generator(self: Any, x: Tensor) -> Tensor:
    return self.run(x + float(self.rng.normal()) if self.training else x)


@trap("refused", rng=lambda: np.random.RandomState(0))
def own_numpy_state(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.tensor(self.rng.rand(WIDTH)).float())


@trap("refused")
def generator_of_the_module_file(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.from_numpy(OWN.normal(size=WIDTH)).float())


@trap("safe", rng=lambda: torch.Generator().manual_seed(0))
def own_torch_generator(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.randn(WIDTH, generator=self.rng))


@trap("safe", rng=lambda: torch.Generator().manual_seed(0))
def own_torch_generator_twice(self: Any, x: Tensor) -> Tensor:
    x = self.layers[0](x + torch.randn(WIDTH, generator=self.rng))
    x = self.layers[1](x).tanh() * torch.rand(1, generator=self.rng)
    return self.run(x + torch.randn(WIDTH, generator=self.rng))


@trap("refused")
def generator_made_in_forward(self: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return self.run(x + torch.randn(WIDTH, generator=generator))


@trap("refused")
def bound_draw(self: Any, x: Tensor) -> Tensor:
    return self.run(x * draw())


@trap("refused")
def numpy_beta(self: Any, x: Tensor) -> Tensor:
    return self.run(x * np.random.beta(1.0, 1.0))


@trap("refused")
def python_shuffle(self: Any, x: Tensor) -> Tensor:
    order = list(range(4))
    random.shuffle(order)
    for i in order:
        x = self.layers[i](x).tanh()
    return x


def _noise(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.randn(WIDTH)).to(x.dtype)


@trap()
def numpy_draw_in_a_helper(self: Any, x: Tensor) -> Tensor:
    return self.run(_noise(x))


class Noisy(nn.Module):
    """Draws in a leaf, from everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() + float(np.random.rand()) if self.training else x


@trap(noisy=Noisy)
def draws_in_a_leaf(self: Any, x: Tensor) -> Tensor:
    return self.run(self.noisy(x))


@trap()
def functional_dropout(self: Any, x: Tensor) -> Tensor:
    return self.run(F.dropout(self.layers[0](x), 0.3, self.training))


@trap()
def drop_path(self: Any, x: Tensor) -> Tensor:
    keep = torch.rand(x.size(0), 1, 1) < 0.5
    return self.run(x * keep if self.training else x)


@trap("refused")
def layer_drop(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        if self.training and torch.rand(()) < 0.5:
            continue
        x = layer(x).tanh()
    return x


@trap("refused")
def seeded_in_forward(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return self.run(x + torch.randn(WIDTH))


@trap("safe")
def forked(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        noise = torch.randn(WIDTH)
    return self.run(x + noise + torch.randn(WIDTH))


@trap("safe")
def clock(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (time.perf_counter_ns() % 97))


@trap("safe")
def entropy(self: Any, x: Tensor) -> Tensor:
    return self.run(x * os.urandom(1)[0])


@trap()
def randn_unused(self: Any, x: Tensor) -> Tensor:
    torch.rand(3)
    return self.run(x + torch.randn(WIDTH))


@trap()
def reparametrised(self: Any, x: Tensor) -> Tensor:
    mean, spread = self.layers[0](x), self.layers[1](x).exp()
    return self.run(mean + spread * torch.randn_like(spread) if self.training else mean)


@trap("safe")
def distribution(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.distributions.Normal(self.layers[0](x), 1.0).rsample())


@trap()
class NoisyMethod(Net):
    """A method that draws outside torch, and takes a buffer, a parameter, a layer and the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)

    def noisy(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            x = x * self.scale
        return F.dropout(self.first(x) * self.gain, 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.noisy(x))


@trap()
class CountingMethod(NoisyMethod):
    """The same, and the buffer is written to."""

    def noisy(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5 + random.random())
        return super().noisy(x)


@trap()
class ForkedStatement(Net):
    """What is drawn from a fork of the generator is the same at each call, and nothing else is."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            noise = torch.randn(WIDTH)
        return self.run(x + noise + torch.randn(WIDTH))


def seeded_noise(like: Tensor) -> Tensor:
    """The same noise each time, from a generator that is made for it."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(WIDTH, generator=generator) + torch.rand(like.shape, generator=generator)


@trap()
def generator_made_by_a_function(self: Any, x: Tensor) -> Tensor:
    return self.run(x + seeded_noise(x))


class SeededNoise(nn.Module):
    """That, as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return x + torch.randn(WIDTH, generator=generator)


@trap(noise=SeededNoise)
def generator_made_in_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.noise(x))


@trap("refused")
def state_of_the_generator_put_back(self: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(WIDTH)
    torch.set_rng_state(state)
    return self.run(x + first - torch.rand(WIDTH))


@trap()
def global_generator_by_name(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.randn(WIDTH, generator=torch.default_generator))
