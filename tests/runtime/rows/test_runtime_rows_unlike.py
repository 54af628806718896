"""What mixes rows and does not show on two of them, nor while a weight is nought: right or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from crossed import crossed
from splitting import split_by_layers
from torch import Tensor, nn

from autopipe.errors import InputError


class Leaf(nn.Module):
    """Code of a user's that stays whole."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *, is_open: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.leaf = None if is_open else Leaf(function)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(self.function(h) if self.leaf is None else self.leaf(h))


def step_and_whole(model: nn.Module, x: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    pipe = split_by_layers(model.double(), 2, (x,), n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda output, target: output.square().mean())
    return lambda: runtime.step(x).loss, model(x).square().mean()


def spanned(h: Tensor) -> Tensor:
    return h @ (torch.linalg.pinv(h) @ h.roll(1, -1).square())


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "sign of a mean": lambda h: h * (h.mean(0) > 0),
    "sign of a mean, straight through": lambda h: h + h.mean(0).sign().detach(),
    "most frequent": lambda h: h - (h > 0).to(h).mode(0)[0],
    "largest half": lambda h: h * (h >= h.kthvalue(max(1, len(h) // 2), dim=0)[0]),
    "largest of all": lambda h: h * (h >= h.flatten().topk(2 * len(h))[0][-1]),
    "span of all rows": spanned,
    "sign of a mean over places of all rows": lambda h: h * (h.view(-1, 2).mean(0) > 0).repeat(2),
    "largest place of all rows": lambda h: h * (h.view(-1, 2) >= h.view(-1, 2).topk(3, 0)[0][2]).view_as(h),
    "sign of one mean": lambda h: h * (h.mean() > 0),
}
SLIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "kinds of rows": lambda h: h - h.mean(0) if len(torch.unique(h[:, 0])) > 3 else h,
    "kinds of rows, as a set": lambda h: h - h.mean(0) if len({*h[:, 0].tolist()}) > 3 else h,
    "directions of rows": lambda h: h - h.mean(0) if int(torch.linalg.matrix_rank(h)) > 3 else h,
}
"""What is made only of four rows that are unlike, and hardly shows in a loss."""
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sign of each row's mean": lambda h: h * (h.mean(1, keepdim=True) > 0),
    "largest of each row": lambda h: h * (h >= h.topk(2, dim=1)[0][:, -1:]),
    "span of each row": lambda h: (h[:, None] @ torch.linalg.pinv(h[:, None])) * h,
}


@crossed(seed=[0, 3], is_open=[True, False], kind=MIXED)
def test_what_all_rows_decide_is_right_or_refused(kind: str, is_open: bool, seed: int) -> None:
    torch.manual_seed(seed)
    step, whole = step_and_whole(Net(MIXED[kind], is_open=is_open), torch.randn(6, 4).double())
    with contextlib.suppress(InputError):
        torch.testing.assert_close(step(), whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", SLIGHT)
def test_what_unlike_rows_decide_is_refused_where_it_changes_a_loss_by_little(kind: str) -> None:
    torch.manual_seed(0)
    net = Net(SLIGHT[kind], is_open=False)
    with torch.no_grad():
        net.b.bias.fill_(30.0)
    step, _ = step_and_whole(net, torch.randn(8, 4).double())
    with pytest.raises(InputError, match="depend on one another"):
        step()


class Labelled(nn.Module):
    """A loss over labels, which weigh rows."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "whole"])
@pytest.mark.parametrize("kind", MIXED)
def test_what_all_rows_decide_ahead_of_a_loss_over_labels_is_right_or_refused(
    kind: str, is_open: bool
) -> None:
    torch.manual_seed(0)
    model = Labelled(Net(MIXED[kind], is_open=is_open)).double()
    example = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 3, 0, 1])
    pipe = split_by_layers(model, 2, example, n_microbatches=3)
    with contextlib.suppress(InputError):
        torch.testing.assert_close(pipe.runtime().step(*example).loss, model(*example), rtol=1e-9, atol=0)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "whole"])
@pytest.mark.parametrize("kind", ALONE)
def test_what_each_row_decides_is_right(kind: str, is_open: bool) -> None:
    torch.manual_seed(0)
    step, whole = step_and_whole(Net(ALONE[kind], is_open=is_open), torch.randn(6, 4).double())
    torch.testing.assert_close(step(), whole, rtol=1e-9, atol=0)


class Gated(nn.Module):
    """A weight or buffer that is nought at first, by which ``share`` of a row is taken."""

    def __init__(self, share: Callable[[Tensor], Tensor], gate: Tensor, *, is_open: bool) -> None:
        super().__init__()
        self.net = Net(lambda h: h + self.of(share(h)), is_open=is_open)
        if isinstance(gate, nn.Parameter):
            self.gate = gate
        else:
            self.register_buffer("gate", gate)

    def of(self, h: Tensor) -> Tensor:
        return h @ self.gate if self.gate.ndim else h * self.gate

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


GATES: dict[str, Callable[[], Tensor]] = {
    "number": lambda: nn.Parameter(torch.zeros(())),
    "layer": lambda: nn.Parameter(torch.zeros(4, 4)),
    "buffer": lambda: torch.zeros(()),
    "truth": lambda: torch.zeros((), dtype=torch.bool),
}


def mixed_by_likeness(h: Tensor) -> Tensor:
    return (h @ h.T).softmax(-1) @ h


@pytest.mark.parametrize("kind", ["number", "layer"])
def test_rows_mixed_behind_a_weight_that_is_nought_are_refused_in_the_middle(kind: str) -> None:
    torch.manual_seed(0)
    step, _ = step_and_whole(
        Gated(mixed_by_likeness, GATES[kind](), is_open=True), torch.randn(6, 4).double()
    )
    with pytest.raises(InputError, match="gate holds other values"):
        step()


@pytest.mark.parametrize("n_microbatches", [2, 4])
@pytest.mark.parametrize(
    ("kind", "is_open"), [(k, o) for k in GATES for o in (True, False) if not o or k in ("buffer", "truth")]
)
def test_rows_mixed_late_behind_a_weight_that_is_nought_have_the_whole_batch(
    kind: str, is_open: bool, n_microbatches: int
) -> None:
    """While it is nought and after, on more rows than those of the example."""

    def made() -> Gated:
        torch.manual_seed(0)
        return Gated(mixed_by_likeness, GATES[kind](), is_open=is_open).double()

    def loss_of(output: Tensor, _: object) -> Tensor:
        return output.square().mean()

    model, plain, x = made(), made(), torch.randn(8, 4).double()
    pipe = split_by_layers(model, 2, (x,), n_microbatches=n_microbatches)
    runtime = pipe.runtime(loss_fn=loss_of)
    for value, n in ((0, 8), (0, 20), (1, 8), (1, 20)):
        with torch.no_grad():
            for gate in (model.gate, plain.gate):
                gate.fill_(value)
        x = torch.randn(n, 4).double()
        found, loss = runtime.step(x).loss, loss_of(plain(x), None)
        loss.backward()
        torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-10, atol=0)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
        model.zero_grad()
        plain.zero_grad()


def test_a_weight_that_is_nought_ahead_of_rows_alone_is_right() -> None:
    torch.manual_seed(0)
    model = Gated(torch.tanh, nn.Parameter(torch.zeros(4, 4)), is_open=True)
    step, whole = step_and_whole(model, torch.randn(6, 4).double())
    torch.testing.assert_close(step(), whole, rtol=1e-9, atol=0)
