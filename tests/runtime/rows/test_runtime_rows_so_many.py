"""Code that names more rows than a batch has is asked about once so many come: no capture runs so many."""

from __future__ import annotations

import collections
import copy
import logging
import pathlib
from typing import Any

import pytest
import so_many_ranks
import torch
from processes import run_ranks
from so_many_models import (
    Bright,
    Exactly,
    Images,
    Matched,
    centred,
    expected,
    held_back,
    images,
    laid_out,
    trained,
)
from torch.utils._python_dispatch import TorchDispatchMode

import autopipe
from autopipe.errors import InputError
from autopipe.tracing.rows import affordable


class Rows(TorchDispatchMode):
    """Counts how often the first layer is given each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and args[0].shape[1] == 3:
            self.seen[len(args[0])] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def pipes() -> dict[Any, Any]:
    """A pipe of each model, and what rows its capture has run."""
    found = {}
    for then in (laid_out, centred, held_back):
        torch.manual_seed(0)
        model, rows = Images(then), Rows()
        before = copy.deepcopy(model)
        with rows:
            pipe = autopipe.split(
                model, 2, images(8), costs="estimated", n_microbatches=4, closed=["enlarge"]
            )
        found[then] = before, pipe, pipe.runtime(), rows.seen
    return found


@pytest.mark.parametrize("then", [laid_out, centred, held_back])
def test_a_capture_runs_no_more_rows_than_its_batch_has(then: Any, pipes: Any) -> None:
    *_, seen = pipes[then]
    assert max(seen) == 8
    assert seen[2] > 4 * seen[8]


@pytest.mark.parametrize("then", [laid_out, centred, held_back])
@pytest.mark.parametrize(("n", "n_microbatches"), [(8, 4), (60, 4), (64, 1), (70, 1)])
def test_fewer_rows_and_those_in_one_piece_are_the_models(
    n: int, n_microbatches: int, then: Any, pipes: Any
) -> None:
    model, _, rt, _ = pipes[then]
    loss, gradients = expected(model, *images(n))
    found, of_weights = trained(rt, *images(n), n_microbatches)
    assert found == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(of_weights, gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("n", [64, 70])
def test_what_so_many_rows_do_is_asked_once_they_come(n: int, pipes: Any) -> None:
    model, _, rt, _ = pipes[laid_out]
    with Rows() as rows:
        found, of_weights = trained(rt, *images(n), 4)
    loss, gradients = expected(model, *images(n))
    assert found == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(of_weights, gradients, rtol=1e-3, atol=1e-5)
    assert max(rows.seen) in ((66,) if n == 64 else (18, 66))  # asked once
    for then in (centred, held_back):
        with pytest.raises(InputError, match=r"depend on one another .* how many .* n_microbatches=1"):
            pipes[then][2].step(*images(n))


def test_they_are_asked_once(pipes: Any) -> None:
    _, _, rt, _ = pipes[laid_out]
    trained(rt, *images(64), 4)
    with Rows() as rows:
        trained(rt, *images(66), 4)
    assert max(rows.seen) == 17


def test_so_is_a_number_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example of two rows is asked about as few; more are asked first, then as many as code names."""
    monkeypatch.setattr(affordable, "_LITTLE_BYTES", 1)
    torch.manual_seed(0)
    model = Images(centred, 40)
    pipe = autopipe.split(model, 2, images(2), costs="estimated", n_microbatches=2, closed=["enlarge"])
    rt = pipe.runtime()
    with Rows() as rows:
        trained(rt, *images(9), 2)
    assert max(rows.seen) == 8, rows.seen
    with pytest.raises(InputError, match="depend on one another"):
        rt.step(*images(40))


@pytest.mark.parametrize("then", [laid_out, centred])
@pytest.mark.parametrize("n_bright", [0, 20, 40])
def test_so_is_each_form_of_a_model_that_asks_of_data(
    then: Any, n_bright: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Microbatches of one kind each, of which the example may be another one than those that come."""
    torch.manual_seed(0)
    model = Bright(then, 40)
    twin = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, images(4), costs="estimated", n_microbatches=2, closed=["enlarge"])
    x, y = images(40)
    x[40 - n_bright :] += 1
    if then is centred or n_bright == 20:
        with pytest.raises(InputError, match="depend on one another"):
            pipe.runtime().step(x, y)
    else:
        found, of_weights = trained(pipe.runtime(), x, y, 4)
        loss, gradients = expected(twin, x, y)
        assert found == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(of_weights, gradients, rtol=1e-3, atol=1e-5)
    assert "could not be asked" not in caplog.text


def test_so_are_exactly_as_many() -> None:
    torch.manual_seed(0)
    model = Images(centred, 64)
    model.enlarge = Exactly(centred, 64)
    twin = copy.deepcopy(model)
    rt = autopipe.split(
        model, 2, images(8), costs="estimated", n_microbatches=4, closed=["enlarge"]
    ).runtime()
    found, of_weights = trained(rt, *images(60), 4)
    loss, gradients = expected(twin, *images(60))
    assert found == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(of_weights, gradients, rtol=1e-3, atol=1e-5)
    with pytest.raises(InputError, match=r"depend on one another .* where they are 64"):
        rt.step(*images(64))


@pytest.mark.parametrize("then", [laid_out, centred])
@pytest.mark.parametrize("more", [0, 10])
def test_so_is_what_lies_ahead_of_an_end_that_has_the_whole_batch(more: int, then: Any) -> None:
    """In each form of a model that asks something there."""
    torch.manual_seed(0)
    model = Matched(then)
    twin = copy.deepcopy(model)
    rt = autopipe.split(
        model, 2, images(8), costs="estimated", n_microbatches=4, closed=["enlarge"]
    ).runtime()
    for n in (8, 60, 64):
        x, y = images(n)
        y += more
        if then is centred and n == 64:
            with pytest.raises(InputError, match=r"depend on one another \([^;]* how many .*\), so its"):
                rt.step(x, y)
            break
        found, of_weights = trained(rt, x, y, 4)
        loss, gradients = expected(twin, x, y)
        assert found == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(of_weights, gradients, rtol=1e-3, atol=1e-5)


def test_where_it_cannot_be_asked_this_is_said(pipes: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, pipe, _, _ = pipes[laid_out]
    rt = copy.deepcopy(pipe).runtime()
    with caplog.at_level(logging.WARNING, "autopipe"):
        rt.step(*images(32))
        assert "could not be asked" not in caplog.text
        for _ in range(2):
            rt.step(*images(64))
    assert caplog.text.count("whether 64 rows of a batch of Images or more depend on one another") == 1


def test_ranks_ask_alike() -> None:
    run_ranks(pathlib.Path(so_many_ranks.__file__), 2)
