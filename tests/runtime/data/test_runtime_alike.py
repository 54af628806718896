"""Calls in the form of the one before: bound and cut as that was, and anew where more may decide."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autopipe


class Weighed(nn.Module):
    """Tells its inputs apart, and reads an attribute that a caller may change."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = 1.0

    def forward(self, x, y, mask=None):
        h = self.second(torch.tanh(self.first(x - 0.5 * y))) * self.scale
        return h if mask is None else h * mask


class Asking(Weighed):
    def forward(self, x, y):
        h = self.first(x - 0.5 * y)
        return self.second(torch.relu(h) if (x.sum() > 0) else torch.tanh(h))


def of(model, n_microbatches=4):
    """The plain model, and a runtime of a copy with a count of the calls that were bound."""
    given = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    model = model.double()
    pipe = autopipe.split(copy.deepcopy(model), 2, given, costs="estimated", n_microbatches=n_microbatches)
    runtime = pipe.runtime(loss_fn=mse_loss)
    bound, bind = [], runtime.engine.intake._forms.bind
    runtime.engine.intake._forms.bind = lambda *call: bound.append(call) or bind(*call)
    return model, pipe, runtime, bound


def check(model, runtime, args, kwargs, target):
    """A step's loss and gradients are the plain model's."""
    model.zero_grad()
    loss = mse_loss(model(*args, **kwargs), target)
    loss.backward()
    for p in runtime.parameters():
        p.grad = None
    found = runtime.step(*args, **kwargs, target=target).loss
    torch.testing.assert_close(found.as_subclass(torch.Tensor), loss.detach())
    for p, q in zip(runtime.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def drawn(rows=8):
    return [torch.randn(rows, 4, dtype=torch.float64) for _ in range(3)]


def test_inputs_are_in_one_order_however_they_are_given():
    """Ranks compare values in it."""
    _, _, runtime, bound = of(Weighed())
    orders, take = [], runtime.engine.intake.take

    def taken(request):
        found = take(request)
        orders.append([*found.batch.leaves])
        return found

    runtime.engine.intake.take = taken
    x, y, target = drawn()
    for given in ({"y": y, "x": x}, {"x": x, "y": y}):
        for _ in range(3):
            runtime.step(**given, target=target)
    assert len(bound) == 2
    assert orders == [orders[0]] * 6


@pytest.mark.parametrize("is_in_order", [True, False])
def test_values_are_each_calls_own(is_in_order):
    torch.manual_seed(0)
    model, _, runtime, bound = of(Weighed())
    for _ in range(4):
        x, y, target = drawn()
        check(model, runtime, *(((x, y), {}) if is_in_order else ((), {"y": y, "x": x})), target)
    assert len(bound) == 1


def test_what_is_of_another_form_is_bound_anew():
    torch.manual_seed(0)
    model, _, runtime, bound = of(Weighed())
    x, y, target = drawn()
    small, other, aim = drawn(6)
    calls = [
        (((x, y), {}), target),
        (((y, x), {}), target),  # the same form
        (((x,), {"y": y}), target),
        (((), {"x": x, "y": y}), target),
        (((), {"y": y, "x": x}), target),
        (((small, other), {}), aim),
        (((x, y), {}), target),
        (((x.t().contiguous().t()[:, :4], y), {}), target),  # lies otherwise: bound alike, cut as it lies
    ]
    for (args, kwargs), wanted in calls:
        check(model, runtime, args, kwargs, wanted)
    assert len(bound) == 6
    runtime.step(x, y, target=target, n_microbatches=2)
    runtime.evaluate(x, y, target=target)
    runtime.forward(x, y)
    assert len(bound) == 9
    leaf = x.clone().requires_grad_()
    runtime.step(leaf, y, target=target)
    assert leaf.grad is not None
    runtime.step(x, y, target=target)
    with pytest.raises(autopipe.InputError, match="float32"):
        runtime.step(x.float(), y, target=target)
    with pytest.raises(autopipe.InputError, match="no target"):
        runtime.step(x, y)
    with torch.inference_mode():
        made = torch.randn_like(x)
    with pytest.raises(autopipe.InputError, match="inference_mode"):
        runtime.step(made, y, target=target)


def test_a_changed_model_is_noticed_by_calls_of_a_known_form():
    torch.manual_seed(0)
    model, pipe, runtime, _ = of(Weighed())
    x, y, target = drawn()
    check(model, runtime, (x, y), {}, target)
    for scale in (2.0, 1.0):
        model.scale = pipe.model.scale = scale
        check(model, runtime, (x, y), {}, target)
    for p in [*model.first.parameters(), *pipe.model.first.parameters()]:
        p.requires_grad_(False)
    check(model, runtime, (x, y), {}, target)
    for held in (model, pipe.model):
        held.first.weight.data.mul_(2)
    check(model, runtime, (x, y), {}, target)


def test_values_that_decide_are_asked_each_time():
    torch.manual_seed(0)
    model, _, runtime, bound = of(Asking(), n_microbatches=1)
    x, y, target = drawn()
    x = x.abs()
    for sign in (1, -1, 1, -1):
        check(model, runtime, (sign * x, y), {}, target)
    assert len(bound) == 4


def test_a_call_leaves_no_batch_behind():
    torch.manual_seed(0)
    _, _, runtime, bound = of(Weighed())
    x, y, target = drawn()
    runtime.step(x, y, target=target)
    bound.clear()
    left = [weakref.ref(t) for t in (x, y, target)]
    del x, y, target
    assert [held() for held in left] == [None] * 3


def test_a_loss_that_writes_to_its_seed_spoils_no_later_step():
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.mul_(2)

    torch.manual_seed(0)
    given = torch.randn(4, 4), torch.randn(4, 4)
    pipe = autopipe.split(Weighed(), 2, given, costs="estimated", n_microbatches=2)
    runtime = pipe.runtime(loss_fn=lambda out, target: Doubling.apply(mse_loss(out, target)))
    x, y, target = (v.float() for v in drawn())
    found = []
    for _ in range(3):
        for p in runtime.parameters():
            p.grad = None
        runtime.step(x, y, target=target)
        found.append([p.grad.clone() for p in runtime.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
