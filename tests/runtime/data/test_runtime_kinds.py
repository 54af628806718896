"""Calls whose arguments differ in kind from the example: each is the model's own, in process and on ranks."""

import itertools
import pathlib
import pickle

import kind_ranks
import pytest
import torch
from kind_models import KINDS, check_calls, close, given, loss_of, model_and_twin
from processes import run_ranks
from splitting import split_by_layers
from torch import nn

import autopipe
from autopipe.errors import InputError


@pytest.mark.parametrize("name", KINDS)
def test_call_of_another_kind(name):
    example, calls = KINDS[name]
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=example, n_microbatches=3)
    for kwargs in calls:
        for training in (True, False):
            model.train(training)
            twin.train(training)
            close(pipe(**kwargs), twin(**kwargs))
            close(pipe.graph(**kwargs), twin(**kwargs))
            assert pipe.verify(**kwargs).max_gradient_error < 1e-10
    copied = pickle.loads(pickle.dumps(pipe))
    close(copied(**calls[0]), twin(**calls[0]))


SCHEDULES = itertools.cycle(["1f1b", "zb-h1", "interleaved", "gpipe"])


@pytest.mark.parametrize(
    ("name", "schedule"), [*zip(KINDS, SCHEDULES, strict=False), ("labels left out", "mixing")]
)
def test_step_of_another_kind(name, schedule):
    example, calls = KINDS[name]
    mixes, schedule = schedule == "mixing", schedule.replace("mixing", "gpipe")
    model, twin = model_and_twin(mixes)
    n_ranks = 2 if schedule == "interleaved" else None
    pipe = autopipe.split(
        model,
        4,
        kwargs=example,
        n_microbatches=4,
        schedule=schedule,
        n_ranks=n_ranks,
        costs="estimated",
    )
    check_calls(pipe.runtime(), model, twin, [example, *calls, example])


def test_number_that_changes_is_an_input():
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=given("labels"), n_microbatches=4)
    rt = pipe.runtime()
    check_calls(rt, model, twin, [given("labels", beta=n / 8, seed=n) for n in range(12)])
    assert [len(kind.inputs.numbers) for kind in pipe.graph.kinds] == [0, 0, 1]
    check_calls(rt, model, twin, [given("labels", beta=0.5, epoch=n) for n in range(6)])
    assert len(pipe.graph.kinds) == 5


class Windowed(torch.nn.Module):
    """Looks at some of the positions alone, by slices in arguments."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, window, crop):
        return self.layers(x[:, window, crop["columns"]])


def test_slices_that_change_are_inputs():
    torch.manual_seed(0)
    model, columns = Windowed(), {"columns": slice(None, None, 1)}
    pipe = autopipe.split(model, 2, (torch.randn(4, 16, 4), slice(2, 6), columns), costs="estimated")
    rt = pipe.runtime(loss_fn=torch.nn.functional.mse_loss)
    x = torch.randn(5, 16, 4)
    for n in range(12):
        window = slice(n, n + 3 + n % 2)
        expected = model(x, window, columns)
        torch.testing.assert_close(pipe(x, window, columns), expected)
        loss = rt.step(x, window, columns, target=torch.zeros_like(expected)).loss
        torch.testing.assert_close(loss, expected.square().mean().detach())
    assert len(pipe.graph.kinds) <= 4
    for window in (slice(None, 5), slice(7, None), slice(1, 9, 2)):
        torch.testing.assert_close(pipe(x, window, columns), model(x, window, columns))


class Reduced(torch.nn.Module):
    """Its loss is reduced as it is asked to."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def forward(self, x, labels, how="mean"):
        return torch.nn.functional.cross_entropy(self.layers(x), labels, reduction=how)


def test_accumulated_batches_of_several_kinds():
    calls = [given("labels", rows=4), given("labels", "mask", rows=5, seed=1), given("labels", mode="fast")]
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=given("labels"), n_microbatches=3)
    rt = pipe.runtime()
    for first in range(3):
        model.zero_grad()
        twin.zero_grad()
        batches = calls[first:] + calls[:first]
        loss = rt.accumulate(batches).loss
        rows = [len(call["ids"]) for call in batches]
        parts = (n * loss_of(twin(**call)) for n, call in zip(rows, batches, strict=True))
        wanted = sum(parts) / sum(rows)
        wanted.backward()
        close(loss.detach().as_subclass(torch.Tensor), wanted.detach())
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            close(mine.grad, its.grad)
    for batches in ([given("labels"), given()], [given(), given("labels")]):
        with pytest.raises(InputError, match="real scalar loss, but the model's output holds none"):
            rt.accumulate(batches)


def test_accumulated_sums_and_means_are_refused():
    batch = {"x": torch.randn(4, 4), "labels": torch.arange(4)}
    pipe = split_by_layers(Reduced(), 2, kwargs=batch, n_microbatches=2)
    rt = pipe.runtime()
    rt.step(**batch, how="sum")
    for hows in (("mean", "sum"), ("sum", "mean")):
        with pytest.raises(InputError, match=r"some of these batches are sums.*loss_weight"):
            rt.accumulate([{**batch, "how": how} for how in hows])
    rt.accumulate([{**batch, "how": "sum"}] * 2)


def test_number_that_python_goes_by():
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=given())
    for times in (2, 3, 4, 5, 2, 1):
        close(pipe(**given(times=times)), twin(**given(times=times)))
    for level in range(1, 10):
        close(pipe(**given(level=level / 8)), twin(**given(level=level / 8)))


def test_option_of_many_values():
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=given())
    for n in range(8):
        close(pipe(**given(mode=f"fast {n}")), twin(**given(mode=f"fast {n}")))
    with pytest.raises(InputError, match=r"argument mode has had 8 values so far.*torch.tensor"):
        pipe(**given(mode="fast 8"))
    close(pipe(**given(mode="fast 3")), twin(**given(mode="fast 3")))


def test_draws_of_another_kind_do_not_depend_on_the_cut():
    losses = []
    for n_stages in (1, 3):
        pipe = split_by_layers(model_and_twin()[0], n_stages, kwargs=given("labels"))
        rt = pipe.runtime(n_microbatches=2)
        torch.manual_seed(3)
        losses.append([rt.step(**given("labels", drop=p)).loss.item() for p in (0.5, 0.5, 0.0)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert len({round(loss, 9) for loss in losses[0]}) == 3


def test_memory_of_inputs_written_by_another_kind_is_refused():
    class Marks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x, mark=False):
            if mark:
                x[:, 0] = 1.0
            return self.body(x)

    pipe = split_by_layers(Marks(), 2, args=(torch.ones(2, 4),))
    with pytest.raises(InputError, match="writes"):
        pipe(torch.zeros(2, 4), mark=True)


def test_what_no_plan_has_a_place_for_is_refused():
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=given("labels"))
    for _ in range(2):
        with pytest.raises(InputError, match="in another order than the plan has them"):
            pipe(**given("labels", mode="back"))
    with pytest.raises(InputError, match="does not take these arguments"):
        pipe(**given(nothing=1))
    close(pipe(**given("labels")), twin(**given("labels")))
    rt = pipe.runtime()
    rt.wrap(lambda stage: stage)
    with pytest.raises(InputError, match=r"missing labels.*wrapped"):
        rt.forward(**given())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ways", ["one each", pytest.param("all", marks=pytest.mark.slow)])
def test_on_ranks(ways):
    run_ranks(pathlib.Path(kind_ranks.__file__), 2, *(["all"] if ways == "all" else []), timeout_s=280)


@pytest.mark.parametrize("name", ["labels given", "a new modality", "a number each step"])
def test_layers_are_of_calls_like_the_example(name):
    example, calls = KINDS[name]
    model, twin = model_and_twin()
    pipe = split_by_layers(model, 2, kwargs=example)
    for kwargs in calls:
        pipe(**kwargs)
    first, last = pipe.to_layers()
    wanted = tuple(v for v in twin(**example).values() if v is not None)
    found = last(first(**example))
    close(found if isinstance(found, tuple) else (found,), wanted)
