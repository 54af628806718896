"""Functions of torch, Python and numpy that a model's file has imported under names of its own."""

from __future__ import annotations

from math import sqrt as root
from typing import Any

import torch
from numpy import prod as product
from torch import Tensor, cond, from_numpy
from torch import is_grad_enabled as gradients
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as over
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from .registry import WIDTH, trap

TABLE = torch.arange(WIDTH).float().numpy()


@trap()
def imported_jacrev(self: Any, x: Tensor) -> Tensor:
    return self.run(jacrev(lambda t: t.square().sum((0, 1)))(x).sum(0))


@trap()
def imported_jacfwd(self: Any, x: Tensor) -> Tensor:
    return self.run(x + jacfwd(lambda t: t.square().sum((0, 1)))(x).sum(0))


@trap()
def imported_hessian(self: Any, x: Tensor) -> Tensor:
    return self.run(x + hessian(lambda t: self.layers[0](t).pow(3).sum())(x[0, 0]).sum())


@trap()
def imported_grad_and_jvp(self: Any, x: Tensor) -> Tensor:
    _, tangent = jvp(torch.sin, (x,), (x,))
    return self.run(grad(lambda t: t.sin().sum())(x) + tangent + vmap(torch.cos)(x))


@trap()
def imported_vjp(self: Any, x: Tensor) -> Tensor:
    y, back = vjp(torch.sin, x)
    return self.run(y + back(x)[0])


@trap("refused")
def imported_linearize(self: Any, x: Tensor) -> Tensor:
    y, tangent = linearize(torch.sin, x)
    return self.run(y + tangent(x))


@trap()
def imported_branch(self: Any, x: Tensor) -> Tensor:
    return self.run(cond(x.sum() > 0, torch.sin, lambda z: z.cos() * 2, (x,)))


@trap()
def imported_branch_over_layers(self: Any, x: Tensor) -> Tensor:
    return self.run(cond(x.sum() > 0, lambda z: self.layers[0](z) * 1, lambda z: self.layers[1](z) * 2, (x,)))


@trap("refused")
def imported_branch_on_what_layers_give(self: Any, x: Tensor) -> Tensor:
    x = self.run(x)
    return cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@trap()
def imported_loop(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        _, rate = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.1), (torch.tensor(0), x.mean()))
    return self.run(x * rate)


@trap()
def imported_map(self: Any, x: Tensor) -> Tensor:
    return self.run(over(lambda t: t.sin() * 2, x))


@trap()
def imported_map_of_a_layer(self: Any, x: Tensor) -> Tensor:
    layer = self.layers[0]
    return self.run(over(lambda t: layer(t), x))


@trap("refused")
def imported_map_of_the_whole_model(self: Any, x: Tensor) -> Tensor:
    return self.run(over(lambda t: self.layers[0](t), x))


@trap()
def imported_scan(self: Any, x: Tensor) -> Tensor:
    carry, steps = scan(lambda a, b: (a + b, a * b), torch.zeros(WIDTH), x.mean(0))
    return self.run(x + steps.sum(0) + carry)


@trap()
def imported_associative_scan(self: Any, x: Tensor) -> Tensor:
    return self.run(associative_scan(lambda a, b: a + b, x, 1, combine_mode="generic"))


@trap()
def imported_root_of_a_size(self: Any, x: Tensor) -> Tensor:
    return self.run(x / root(x.size(1)) + product(x.shape[1:]) / 100)


@trap()
def imported_array(self: Any, x: Tensor) -> Tensor:
    return self.run(x + from_numpy(TABLE))


@trap()
def imported_question(self: Any, x: Tensor) -> Tensor:
    return self.run(x if gradients() else x * 2)
