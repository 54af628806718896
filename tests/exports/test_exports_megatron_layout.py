"""Megatron's layout strings: what a split becomes, and splits made by a layout."""

import pytest
import torch
from exports_models import Tied
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe
from autopipe.errors import InputError
from autopipe.exports import from_megatron_layout


@pytest.fixture(scope="module")
def captured():
    return autopipe.capture(Tied(n=7), (torch.randint(0, 11, (8, 6)),))


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Et*3|t*2|ttL", [3, 2, 2]),
        ("E|t*3|tt,tt|L", [0, 3, 4, 0]),
        ("Et|(tt|)*2t*2 L", [1, 2, 2, 2]),
        ("Et|((t|)*2tt|)*1tt|L", [1, 1, 1, 2, 2, 0]),
    ],
)
def test_a_layout_is_split_as_it_says(captured, layout, counts):
    pin = from_megatron_layout(layout, captured.ops)
    assert [list(pin.values()).count(s) for s in range(len(counts))] == counts
    pin |= {"embedding": 0, "head": len(counts) - 1}
    pipe = autopipe.split(captured, len(counts), pin=pin, costs="estimated", ties="sync")
    again = from_megatron_layout(pipe.to_megatron_layout(), captured.ops)
    assert {**pin, **again} == pin


@pytest.mark.parametrize(
    "layout", ["", "Et*7", "Et*8L", "tEt*6L", "Et*7x", "E(t*7L", "Et*999999999", "((t)*9999)*9999"]
)
def test_odd_layouts_are_refused_or_mean_what_they_say(captured, layout):
    if layout == "Et*7":
        assert set(from_megatron_layout(layout, captured.ops).values()) == {0}
        return
    with pytest.raises(InputError):
        from_megatron_layout(layout, captured.ops)


@settings(max_examples=60)
@given(text=st.text(alphabet="EtL|()*, 0123456789m", max_size=30))
def test_no_layout_ends_in_a_raw_error(captured, text):
    try:
        pin = from_megatron_layout(text, captured.ops)
    except InputError:
        return
    assert len(pin) == 7


def test_a_model_without_blocks_has_no_layout():
    captured = autopipe.capture(torch.nn.Linear(4, 4), (torch.randn(4, 4),))
    with pytest.raises(InputError, match="numbered list"):
        from_megatron_layout("EtL", captured.ops)
