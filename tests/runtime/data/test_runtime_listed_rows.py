"""Lists with an entry for each row, as detection models take them, which no microbatch gets a part of."""

from __future__ import annotations

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn
from torch.nn import functional

import autopipe
from autopipe.errors import InputError

SIDE = 8


class Detector(nn.Module):
    """Of pictures in a list, and what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.head = nn.Linear(4, 5)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        x = torch.stack([functional.interpolate(i[None], size=(SIDE, SIDE))[0] for i in images])
        out = self.head(self.body(x).mean((2, 3)))
        losses = [
            functional.cross_entropy(o.expand(len(t["labels"]), -1), t["labels"])
            for o, t in zip(out, targets, strict=True)
        ]
        return torch.stack(losses).mean()


class Beside(Detector):
    """Of pictures in one tensor, with a text for each in a list."""

    def forward(self, images: Tensor, texts: list[Tensor]) -> Tensor:
        out = self.head(self.body(images).mean((2, 3)))
        return (out + torch.stack([text.mean() for text in texts])[:, None]).square().mean()


def detected(n: int, unlike: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images = [torch.randn(3, SIDE + k * unlike, SIDE) for k in range(n)]
    return images, [{"labels": torch.randint(5, (2 + k * unlike,))} for k in range(n)]


@pytest.mark.parametrize(("make", "example", "name"), [
    (Detector, detected(4, 0), "images"),
    (Detector, detected(4, 1), "images"),
    (Beside, (torch.randn(4, 3, SIDE, SIDE), [torch.randn(6) for _ in range(4)]), "texts"),
], ids=["alike", "unlike", "beside"])  # fmt: skip
def test_a_list_with_an_entry_for_each_row_is_told_of(make, example, name, caplog):
    """Channels or boxes of its entries would be taken for rows, or told of as what does not vary."""
    torch.manual_seed(0)
    model = make()
    pipe = split_by_layers(model, 2, example, n_microbatches=2)
    said = rf"{name} holds 4 entries, and only tensors are cut into rows: put them into one"
    assert said in caplog.text
    assert pipe.plan.n_microbatches == 1
    runtime = pipe.runtime()
    with pytest.raises(
        InputError, match=said + r".*accumulate.*, pass n_microbatches=1, or name it in batch_dims"
    ):
        runtime.step(*example, n_microbatches=2)
    assert runtime.step(*example).loss == pytest.approx(model(*example).item())


class Points(nn.Module):
    """Of clouds in a list, of as many points each as it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.layers = nn.Linear(3, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])

    def forward(self, clouds: list[Tensor]) -> Tensor:
        return self.layers(torch.stack([self.each(cloud).tanh().mean(0) for cloud in clouds]))


@pytest.mark.parametrize("n_microbatches", [None, 2])
@pytest.mark.parametrize("unlike", [0, 1])
def test_entries_with_an_axis_that_varies_are_rows_all_the_same(unlike, n_microbatches):
    torch.manual_seed(0)
    model, example = Points(), [torch.randn(5 + k * unlike, 3) for k in range(4)]
    pipe = autopipe.split(model, 2, (example,), costs="estimated", n_microbatches=n_microbatches)
    assert pipe.plan.n_microbatches == 1
    runtime = pipe.runtime(functional.mse_loss)
    for n in (4, 6):
        clouds, target = [torch.randn(7 + k * unlike, 3) for k in range(n)], torch.randn(n, 8)
        expected = functional.mse_loss(model(clouds), target).item()
        assert runtime.step(clouds, target=target).loss == pytest.approx(expected)


class Scales(nn.Module):
    """Of what a backbone gives at several scales, each with all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(8, 6)])

    def forward(self, features: list[Tensor]) -> Tensor:
        return sum(layer(x).square().mean() for layer, x in zip(self.layers, features, strict=True))


def test_a_list_whose_entries_have_all_rows_is_cut():
    torch.manual_seed(0)
    model, example = Scales(), ([torch.randn(2, 4), torch.randn(2, 8)],)
    runtime = split_by_layers(model, 2, example, n_microbatches=2).runtime()
    assert runtime.step(*example).loss == pytest.approx(model(*example).item())


@pytest.mark.parametrize("unlike", [0, 1])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 1, 2), (4, 2)])
def test_batches_of_lists_weigh_by_their_entries(sizes, unlike):
    """Channels of a picture were taken for rows, or every batch for one."""
    torch.manual_seed(0)
    model = Detector()
    images, targets = detected(sum(sizes), unlike)
    model(images, targets).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    runtime = split_by_layers(model, 2, (images[:4], targets[:4])).runtime()
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    batches = [(images[a : a + n], targets[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    assert runtime.accumulate(batches).loss == pytest.approx(model(images, targets).item())
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
