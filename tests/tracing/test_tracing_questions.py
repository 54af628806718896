"""Branches on values of the inputs: one form for each way they come out, chosen before a batch runs."""

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn

import autopipe
from autopipe.tracing import capture

WIDTH = 8


class Masked(nn.Module):
    """Leaves its mask out where it is all ones, as transformers do, and looks at it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = None
        if not mask.all():
            scale = mask.to(x.dtype)[..., None]
        for layer in self.layers:
            x = layer(x).relu()
            x = x if scale is None else x * scale
        if mask.any():
            x = x + mask.sum(1)[:, None, None]
        return self.head(x)


class Together(nn.Module):
    """Two truths, neither of which makes a difference alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        are_whole = [bool(mask.all()) for mask in (a, b)]
        x = self.first(x)
        return self.second(x if any(are_whole) else 2 * x)


class Longest(nn.Module):
    """Cuts its batch to the longest row: a number made of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(self.first(x[:, : int(lengths.max())]))


class Dropped(nn.Module):
    """Drops values in its own forward, and looks at its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x), 0.5, self.training)
        return self.second(x if mask.bool().all() else x * mask[..., None])


class Summed(Longest):
    """Goes through as many positions as the longest row has."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(sum(self.first(x[:, i]) for i in range(int(lengths.max()))))


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y if y.sum() > 0 else -y)


def masks(rows: int, length: int) -> dict[str, Tensor]:
    ragged = torch.ones(rows, length, dtype=torch.int64)
    ragged[0, length // 2 :] = 0
    ones, zeros = torch.ones_like(ragged), torch.zeros_like(ragged)
    return {"ones": ones, "ragged": ragged, "zeros": zeros}


@pytest.mark.parametrize("example", ["ones", "ragged", "zeros"])
@pytest.mark.parametrize("training", [True, False])
def test_every_outcome_is_the_models_whatever_the_example(example: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Masked().train(training)
    captured = capture(model, (torch.randn(2, 6, WIDTH), masks(2, 6)[example]))
    bound = [captured.bind((torch.randn(2, 6, WIDTH), mask)) for mask in masks(2, 6).values()]
    assert len(set(map(captured.form_of, bound))) == 3
    for rows, length in ((2, 6), (5, 9)):
        for mask in masks(rows, length).values():
            x = torch.randn(rows, length, WIDTH)
            torch.testing.assert_close(captured(x, mask), model(x, mask))


@pytest.mark.parametrize("example", [(0, 0), (0, 1), (1, 1)])
def test_truths_that_matter_together_alone(example: tuple[int, int]) -> None:
    model = Together()
    masks = torch.zeros(2, 6), torch.ones(2, 6)
    captured = capture(model, (torch.randn(2, 6, WIDTH), *(masks[n] for n in example)))
    for a, b in itertools.product(masks, masks):
        x = torch.randn(2, 6, WIDTH)
        torch.testing.assert_close(captured(x, a, b), model(x, a, b))


def test_microbatches_of_one_step_take_the_forms_they_ask_for() -> None:
    torch.manual_seed(0)
    model = Masked().double()
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[3, 2:] = 0
    pipe = autopipe.split(model, 2, args=(x, masks(4, 6)["ones"]), n_microbatches=4, recompute="always")
    runtime = pipe.runtime(lambda y, t: (y - t).square().mean())
    target = torch.randn(4, 6, 2, dtype=torch.float64)
    rows = [slice(row, row + 1) for row in range(4)]
    loss = sum((model(x[row], mask[row]) - target[row]).square().mean() / 4 for row in rows)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    found = runtime.step(x, mask, target=target)
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


def test_every_outcome_has_a_form_in_training_where_values_are_dropped() -> None:
    model = Dropped()
    captured = capture(model, (torch.randn(2, 6, WIDTH), masks(2, 6)["ones"]))
    for training in (True, False):
        model.train(training)
        for mask in masks(3, 7).values():
            x = torch.randn(3, 7, WIDTH)
            torch.manual_seed(1)
            expected = model(x, mask)
            torch.manual_seed(1)
            torch.testing.assert_close(captured(x, mask), expected)


def test_a_number_that_torch_alone_takes_may_be_any() -> None:
    model = Longest()
    captured = capture(model, (torch.randn(2, 6, WIDTH), torch.tensor([3, 5])))
    x = torch.randn(4, 6, WIDTH)
    for lengths in (torch.tensor([5, 1, 2, 3]), torch.tensor([2, 1, 2, 1])):
        torch.testing.assert_close(captured(x, lengths), model(x, lengths))


def test_a_number_met_for_the_first_time_is_recorded_then_but_not_by_what_only_binds() -> None:
    model = Summed()
    captured = capture(model, (torch.randn(2, 6, WIDTH), torch.tensor([3, 5])))
    x = torch.randn(4, 6, WIDTH)
    lengths = torch.tensor([5, 1, 2, 3])
    torch.testing.assert_close(captured(x, lengths), model(x, lengths))
    told = r"questions\.py:\d+: the model reads .* comes out 4 here and was 5"
    with pytest.raises(autopipe.InputError, match=told):
        captured.bind((x, lengths.clamp(max=4)))
    torch.testing.assert_close(captured(x, lengths.clamp(max=4)), model(x, lengths.clamp(max=4)))


class Tasks(nn.Module):
    """Has a head for each of some tasks, which a number tells."""

    def __init__(self, choose: Callable[[nn.ModuleList, Tensor], nn.Module], n_tasks: int = 3) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2), nn.Dropout(0.5)) for _ in range(n_tasks)
        )
        self.choose = choose

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return self.last(self.choose(self.heads, task)(self.body(x).relu()))


def _by_case(heads: nn.ModuleList, task: Tensor) -> nn.Module:
    number = task.item()
    return heads[0] if number == 0 else heads[1] if number == 7 else heads[2]


CHOICES = [
    lambda heads, task: heads[task.item()],
    lambda heads, task: heads[0] if task.item() == 0 else heads[1],
    lambda heads, task: heads[int(task.view(1)[0])],
    lambda heads, task: getattr(heads, f"{int(task)}"),
    lambda heads, task: heads[0] if float(task) < 0.5 else heads[1],
    _by_case,
]


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("example", [0, 1])
def test_layers_that_a_number_chooses_are_all_in_the_plan(
    choose: Callable[[nn.ModuleList, Tensor], nn.Module], example: int
) -> None:
    torch.manual_seed(0)
    model, x = Tasks(choose).double(), torch.randn(4, WIDTH).double()
    pipe = split_by_layers(model, 2, (x, torch.tensor(example)), n_microbatches=2)
    captured = pipe.graph
    n_forms = len(captured.forms[True])
    for task in (0, 1, 2, 7) if choose is _by_case else (0, 1):
        for training in (False, True):
            model.train(training)
            given = x, torch.tensor(task)
            for run in (captured, pipe):
                torch.manual_seed(1)
                found = run(*given)
                assert found.shape == (4, 2)
                if not training:
                    torch.testing.assert_close(found, model(*given))
    assert len(captured.forms[True]) == n_forms > 1


def test_layers_that_no_form_planned_calls_are_where_their_weights_are() -> None:
    torch.manual_seed(0)
    model = Tasks(CHOICES[0], 12).double()
    given = torch.randn(4, WIDTH).double(), torch.tensor(0)
    pipe = split_by_layers(model, 2, given, n_microbatches=2)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    planned = {op.name for op in pipe.graph.ops.compute}
    assert not any("heads_11" in name for name in planned)
    model.eval()
    found = runtime.step(given[0], torch.tensor(11)).loss
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {n.split(".")[1] for n in gradients if n.startswith("heads")} == {"11"}
    expected = model(given[0], torch.tensor(11)).square().mean()
    torch.testing.assert_close(found.detach().as_subclass(Tensor), expected.detach())
    held_to = torch.autograd.grad(expected, [dict(model.named_parameters())[n] for n in gradients])
    for name, gradient in zip(gradients, held_to, strict=True):
        torch.testing.assert_close(gradients[name], gradient)


def test_a_branch_on_what_layers_made_is_refused_with_its_line() -> None:
    with pytest.raises(autopipe.CaptureError, match=r"questions\.py:\d+.*parameter or buffer"):
        capture(Draws(), (torch.randn(2, WIDTH),))


def test_a_mask_of_no_matter_asks_nothing() -> None:
    captured = capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), (torch.randn(2, WIDTH),))
    assert not captured.has_questions


class AsksWithSizesOfMadeTensors(nn.Module):
    """Its question takes sizes of what it made of its inputs, in a form of evaluation's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ids = ids.view(-1, ids.shape[1])
        h = self.table(ids)
        keep = mask.view(ids.shape[0], -1)[:, : h.shape[1]]
        if keep.all():
            keep = None
        for layer in self.layers:
            h = layer(h) if keep is None else layer(h) * keep[..., None]
            h = nn.functional.dropout(h, 0.0, self.training)
        return h


def test_sizes_of_made_tensors_in_questions():
    model = AsksWithSizesOfMadeTensors()
    mask = torch.ones(4, 7, dtype=torch.int64)
    mask[1, :2] = 0
    found = capture(model, (torch.randint(11, (4, 7)), mask))
    for training in (True, False):
        model.train(training)
        for n_rows, n_masked in ((4, 0), (2, 1), (5, 0), (3, 2)):
            mask = torch.ones(n_rows, 7, dtype=torch.int64)
            mask[0, :n_masked] = 0
            ids = torch.randint(11, (n_rows, 7))
            torch.testing.assert_close(found(ids, mask), model(ids, mask))


class AsksAgain(Longest):
    """Asks a mask for all of it, and then up to a place; which may be all of it, too."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop = stop

    def asked(self, mask: Tensor) -> Tensor:
        return mask

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        asked = self.asked(mask)
        x = self.first(x)
        if asked.all():
            return self.second(x)
        return self.second(x * (2 if asked[:, : self.stop].all() else 3))


class AsksTheChosen(AsksAgain):
    """Asks in columns that the data choose, so many of them."""

    def asked(self, mask: Tensor) -> Tensor:
        return mask[:, mask[0] < 2]


class AsksAfterAWrite(AsksAgain):
    """Writes what it asks for in between."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        if mask.all():
            return self.second(self.first(x))
        mask[:, :3] = 1
        return self.second(self.first(x) * (2 if mask[:, : self.stop].all() else 3))


@pytest.mark.parametrize(
    ("model", "n_forms"),
    [(AsksAgain(6), 2), (AsksAgain(4), 3), (AsksTheChosen(4), 3), (AsksAfterAWrite(6), 3)],
)
@pytest.mark.parametrize("example", [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 2, 2]])
def test_a_truth_that_is_asked_again_of_a_whole_slice(
    model: nn.Module, n_forms: int, example: list[int]
) -> None:
    torch.manual_seed(0)
    captured = capture(model, (torch.randn(2, 6, WIDTH), torch.tensor([example] * 2)), dynamic=False)
    assert len(captured.forms[False]) == n_forms
    for values in itertools.product((0, 1, 2), repeat=3):
        x, mask = torch.randn(2, 6, WIDTH), torch.tensor([values] * 2).repeat_interleave(2, 1)
        torch.testing.assert_close(captured(x, mask), model(x, mask))


class AsksUpToTheInput(Longest):
    """Asks a mask for all of it, then for as much as the input is long: all of it, where both are equal."""

    def __init__(self, compares: bool) -> None:
        super().__init__()
        self.compares = compares

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, x = x.shape[1], self.first(x)
        if (not self.compares or mask.shape[1] == n) and mask.all():
            return self.second(x)
        return self.second(x * (1 if mask[:, :n].all() else 3))


@pytest.mark.parametrize(("compares", "n_forms"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("first", [0, 1])
def test_a_truth_that_is_asked_again_of_what_is_whole_by_its_sizes(
    compares: bool, n_forms: int, first: int
) -> None:
    torch.manual_seed(0)
    model, mask = AsksUpToTheInput(compares), torch.ones(2, 6, dtype=torch.long)
    mask[0, 1] = first
    captured = capture(model, (torch.randn(2, 6, WIDTH), mask))
    assert [len(forms) for forms in captured.forms.values()] == [n_forms] * 2
    for length, longer, place in itertools.product((6, 8), (0, 2), (0, -1, None)):
        x, mask = torch.randn(2, length, WIDTH), torch.ones(2, length + longer, dtype=torch.long)
        if place is not None:
            mask[0, place] = 0
        if not longer:
            torch.testing.assert_close(captured(x, mask), model(x, mask))
            continue
        with contextlib.suppress(autopipe.AutopipeError):  # or it is right
            torch.testing.assert_close(captured(x, mask), model(x, mask))


class Chosen(nn.Module):
    """Goes by a number that its inputs are held to, which may be none that their type has."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        return self.last(self.heads[(marks < self.limit).sum().item()](x))


@pytest.mark.parametrize(
    ("limit", "dtype"), [(float("inf"), torch.float32), (300, torch.uint8), (65503.5, torch.float16)]
)
def test_a_number_that_a_type_of_inputs_does_not_have_is_not_tried(limit: float, dtype: torch.dtype) -> None:
    model, x = Chosen(limit), torch.randn(4, WIDTH)
    marks = torch.tensor([1, 2, 3], dtype=dtype)
    assert torch.equal(autopipe.capture(model, (x, marks))(x, marks), model(x, marks))


class ComparesInputs(Longest):
    """Goes by whether its inputs are of one length: by two numbers, or by one that both cancel in."""

    def __init__(self, subtracts: bool) -> None:
        super().__init__()
        self.subtracts = subtracts

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, m, x = x.shape[1], mask.shape[1], self.first(x)
        is_one = m - n == 0 if self.subtracts else m == n
        return self.second(x if is_one else x * 3)


@pytest.mark.parametrize("subtracts", [False, True])
def test_what_is_asked_of_two_inputs_that_are_of_one_size_in_the_example(subtracts: bool) -> None:
    torch.manual_seed(0)
    model = ComparesInputs(subtracts)
    captured = capture(model, (torch.randn(2, 6, WIDTH), torch.ones(2, 6)))
    for n in (4, 6, 9):
        x, mask = torch.randn(3, n, WIDTH), torch.ones(3, n)
        torch.testing.assert_close(captured(x, mask), model(x, mask))
        for m in {4, 6, 9} - {n}:
            with pytest.raises(autopipe.InputError, match=r"asks whether .* was True"):
                captured(x, torch.ones(3, m))
