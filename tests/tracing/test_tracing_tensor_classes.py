"""Tensors that refuse what is asked of every tensor are told of by name, wherever a model holds them."""

import pytest
import torch
from torch import nn

from autopipe.errors import InputError
from autopipe.tracing import capture

REFUSED = [
    "numel", "shape", "dtype", "device", "layout", "is_meta", "detach", "clone", "stride",
    "is_floating_point", "requires_grad", "_version",
]  # fmt: skip


def refusing(refused, base):
    """A class of tensors that refuses one function or attribute of torch."""

    class Refusing(base):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
            if name == refused:
                raise TypeError(f"{name} is not for me")
            return super().__torch_function__(func, types, args, kwargs or {})

    return Refusing


class Net(nn.Module):
    """Two layers, and a tensor that is used as a plain one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.held = nn.Linear(4, 4), nn.Linear(4, 4), []

    def forward(self, x):
        held = self.held[0] if isinstance(self.held, list) else self.held
        return self.b(self.a(x).tanh() + torch.Tensor.as_subclass(held, torch.Tensor))


def hold(model, tensor, how):
    if how == "buffer":
        del model.held
        model.register_buffer("held", tensor)
    elif how == "in a list":
        model.held.append(tensor)
    else:
        model.held = tensor


@pytest.mark.parametrize("how", ["attribute", "buffer", "in a list", "parameter"])
@pytest.mark.parametrize("refused", REFUSED)
def test_a_tensor_that_refuses_what_is_asked_of_it_is_named(refused, how):
    model, base = Net(), nn.Parameter if how == "parameter" else torch.Tensor
    hold(model, torch.Tensor._make_subclass(refusing(refused, base), torch.ones(4), how == "parameter"), how)
    assert model(torch.randn(3, 4)).shape == (3, 4)
    if (refused, how) == ("clone", "parameter"):
        capture(model, (torch.randn(3, 4),))  # detached it is a plain tensor
        return
    with pytest.raises(InputError, match=rf"the model's held is a Refusing, which refuses {refused} "):
        capture(model, (torch.randn(3, 4),))


def test_an_argument_that_refuses_what_is_asked_of_it_is_told_of():
    model = Net()
    model.held.append(torch.ones(4))
    with pytest.raises(InputError, match="an argument is a Refusing, which refuses numel "):
        capture(model, (torch.ones(3, 4).as_subclass(refusing("numel", torch.Tensor)),))


class Unequal(torch.Tensor):
    __hash__ = None


def test_a_tensor_without_a_hash_is_told_of():
    model = Net()
    hold(model, torch.ones(4).as_subclass(Unequal), "attribute")
    with pytest.raises(InputError, match="the model's held is a Unequal, which refuses __hash__ "):
        capture(model, (torch.randn(3, 4),))
