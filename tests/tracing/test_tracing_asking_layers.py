"""What asks how many rows there are is asked by number once where it does the same, and again where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.rows.among_many import RowsMet

AT = 15
"""So many rows are something else to what goes by them; it is named in either way, and so asked in both."""


def counted(h: Tensor) -> Tensor:
    return torch.ones_like(h[:, 0]).sum()


def evenly(layer: nn.Module, h: Tensor, *_: Any) -> Tensor:
    return h * counted(h).clamp(max=1)


def keeping(layer: nn.Module, h: Tensor, *_: Any) -> Tensor:
    layer.n_rows = counted(h)
    return h * layer.n_rows.clamp(max=1)


def keeping_rows(layer: nn.Module, h: Tensor, *_: Any) -> Tensor:
    layer.rows = h * 0 + counted(h)
    return h * layer.rows.clamp(max=1)


def writing(layer: nn.Module, h: Tensor, other: Tensor) -> Tensor:
    other[:, 0] += counted(h)
    return h * 1


def beside(layer: nn.Module, h: Tensor, *_: Any) -> Tensor:
    return torch.cat([h, doubled_then(h, counted(h))], 1)


def keeping_pieces(layer: nn.Module, h: Tensor, *_: Any) -> Tensor:
    layer.pieces = h.split(1)
    return h * 1


def returning(layer: nn.Module, h: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return h, counted(h)


def doubled_then(h: Tensor, n_rows: Tensor) -> Tensor:
    return h * (1 + (n_rows == AT))


class Inner(nn.Module):
    """Goes by how many rows there are in some way."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, *given: Any) -> Any:
        return self.does(self, *given)


class Outer(nn.Module):
    """Has a layer that asks, and does something otherwise in training, or where there is a mask."""

    def __init__(self, is_masked: bool, does: Callable[..., Any], usually: Any, otherwise: Any) -> None:
        super().__init__()
        self.linear, self.inner, self.is_masked = nn.Linear(4, 4), Inner(does), is_masked
        self.usually, self.otherwise = usually, otherwise

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        is_other = AT > 0 and (mask is not None if self.is_masked else self.training)
        does = self.otherwise if is_other else self.usually
        return does(self.inner, self.linear(h), mask)


class Asks(nn.Module):
    """Has a form with a mask, and one without, where its layer goes by one."""

    def __init__(self, is_masked: bool, *told: Any) -> None:
        super().__init__()
        self.layer, self.head, self.is_masked = Outer(is_masked, *told), nn.Linear(4, 2), is_masked

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        is_left_out = self.is_masked and not mask.all()
        h = self.layer(x, mask if is_left_out else None)
        return self.head(h)


def found(is_masked: bool, *told: Any) -> list[str]:
    """What is said to mix rows, of all forms in both modes."""
    torch.manual_seed(0)
    given = torch.randn(4, 4), torch.ones(4, dtype=torch.bool)
    made = capture(Asks(is_masked, *told), given, closed=["layer"]).new_forms.made
    mixing = [variation.mixing for variation in made.variations.values()]
    return [words for each in mixing for words in (each.always, each.training) if words]


def plain(inner: nn.Module, h: Tensor, mask: Tensor | None) -> Tensor:
    return inner(h)


def masked(inner: nn.Module, h: Tensor, mask: Tensor | None) -> Tensor:
    return inner(h) if mask is None else inner(h) * mask[:, None]


def kept(inner: nn.Module, h: Tensor, mask: Tensor | None) -> Tensor:
    return doubled_then(inner(h), inner.n_rows)


def given_out(inner: nn.Module, h: Tensor, mask: Tensor | None) -> Tensor:
    return doubled_then(*inner(h))


def written(inner: nn.Module, h: Tensor, mask: Tensor | None) -> Tensor:
    made = inner(h, other := h * 0)
    return doubled_then(made, other[:, :1])


OTHERWISE = {
    "ahead": (evenly, plain, lambda inner, h, mask: inner(doubled_then(h, counted(h)))),
    "behind": (evenly, plain, lambda inner, h, mask: doubled_then(inner(h), counted(h))),
    "number": (evenly, plain, lambda inner, h, mask: inner(h) * (2 if len(h) == AT else 1)),
    "number in it": (
        lambda layer, h, is_other=False: h * 2 if is_other and len(h) == AT else evenly(layer, h),
        plain,
        lambda inner, h, mask: inner(h, True),
    ),
    "in it": (
        lambda layer, h, is_other=False: doubled_then(h, counted(h)) if is_other else evenly(layer, h),
        plain,
        lambda inner, h, mask: inner(h, True),
    ),
    "another number in it": (
        lambda layer, h, factor=1: h * (1 + (counted(h) == AT) * (factor - 1)),
        plain,
        lambda inner, h, mask: inner(h, 2),
    ),
    "twice": (
        lambda layer, h, is_other=False: doubled_then(h, counted(h)) if is_other else evenly(layer, h),
        plain,
        lambda inner, h, mask: inner(inner(h, True)),
    ),
    "kept": (keeping, plain, kept),
    "kept by row": (keeping_rows, plain, lambda inner, h, mask: doubled_then(inner(h), inner.rows)),
    "written": (writing, lambda inner, h, mask: inner(h, h * 0), written),
    "left out": (beside, lambda inner, h, mask: inner(h)[:, :4], lambda inner, h, mask: inner(h)[:, 4:]),
    "kept in pieces": (
        keeping_pieces,
        plain,
        lambda inner, h, mask: inner(h) * (2 if len(inner.pieces) == AT else 1),
    ),
    "given out": (returning, lambda inner, h, mask: inner(h)[0], given_out),
}
"""What a layer does, what is made of it usually, and otherwise: then so many rows are something else."""


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_goes_by_a_number_of_rows_in_one_mode_or_form_alone_is_found(name: str, is_masked: bool) -> None:
    assert found(is_masked, *OTHERWISE[name])


@pytest.mark.parametrize("otherwise", [plain, masked])
def test_what_asks_is_asked_by_number_once_where_it_does_the_same(
    otherwise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = RowsMet._ask_of_each_number

    def noting(met: RowsMet, call: Any, *told: Any) -> Any:
        asked.append(call.name)
        return ask(met, call, *told)

    monkeypatch.setattr(RowsMet, "_ask_of_each_number", noting)
    assert not found(otherwise is masked, evenly, plain, otherwise)
    assert asked == ["layer"]


class Gated(nn.Module):
    """Makes something of so many rows, as much as its gate lets through."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate, self.linear = nn.Parameter(torch.full((4,), gate)), nn.Linear(4, 4)

    def forward(self, h: Tensor) -> Tensor:
        if h.shape[0] >= 20:
            h = h + self.gate * (h - h.mean(0))
        return self.linear(h)


@pytest.mark.parametrize("is_within", [False, True])
def test_a_layer_whose_gate_is_shut_tells_nothing_of_one_like_it(is_within: bool) -> None:
    torch.manual_seed(0)
    gated = Gated(0.0), Gated(1.0)
    layers = [nn.Sequential(nn.Linear(4, 4), each) if is_within else each for each in gated]
    mixing = capture(nn.Sequential(*layers), (torch.randn(4, 4),), closed=["0", "1"]).variation.mixing
    assert "others where they are 20" in mixing.always
