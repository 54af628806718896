"""What all rows together decide, where none of the example does: a limit passed, a label it lacks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rows_models import captured_mixing
from torch import nn
from torch.nn import functional as F


class Deciding(nn.Module):
    """Two layers whose result goes by what ``decide`` says of rows."""

    def __init__(self, decide):
        super().__init__()
        self.a, self.b, self.decide = nn.Linear(4, 4), nn.Linear(4, 4), decide

    def forward(self, x):
        h = self.a(x).tanh()
        return self.decide(self.b(h), h)


def over_limit(y, h):
    return y * (h.max() > 1.5)


def any_over_limit(y, h):
    return torch.where((h > 1.5).any(), y, 2 * y)


def by_how_many(y, h):
    return y / (h > 1.5).sum().clamp(min=1)


def by_how_many_kinds(y, h):
    return y * len(h.detach().round().unique())


def by_least_kind(y, h):
    return y + h.detach().round().unique()[0]


def by_mean_over_limit(y, h):
    picked = h[h > 1.5]
    return y - (picked.mean() if picked.numel() else 0)


def over_limit_by_row(y, h):
    return y * (h.amax(-1, keepdim=True) > 1.5)


def how_many_by_row(y, h):
    return y / (h > 1.5).sum(-1, keepdim=True).clamp(min=1)


def rows_over_limit(y, h):
    picked = h[:, 0] > 0
    return y.masked_scatter(picked[:, None].expand_as(y), 2 * y[picked])


OF_ALL = [over_limit, any_over_limit, by_how_many, by_how_many_kinds, by_least_kind, by_mean_over_limit]


@pytest.mark.parametrize("decide", [*OF_ALL, over_limit_by_row, how_many_by_row, rows_over_limit])
def test_a_limit_that_no_row_of_the_example_passes(decide):
    torch.manual_seed(0)
    found = captured_mixing(Deciding(decide).double(), torch.randn(6, 4, dtype=torch.float64))
    assert bool(found.always) == (decide in OF_ALL), found


class Limiting(nn.Module):
    """A layer that stays whole, since it is given a limit to go by."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, x):
        return self.does(x)


class Scored(nn.Module):
    """A loss that is large where values are, so that little of it comes of a limit on them."""

    def __init__(self, does):
        super().__init__()
        self.a, self.limiting = nn.Linear(4, 8), Limiting(does)
        self.b = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x, labels):
        return F.cross_entropy(self.b(self.limiting(self.a(x))), labels)


def shortened_by_the_largest(x):
    largest = x.detach().abs().max()
    return x * (4 / largest) if largest > 4 else x


def shortened_by_row(x):
    largest = x.detach().abs().amax(1, keepdim=True)
    return torch.where(largest > 4, x * (4 / largest), x) if (largest > 4).any() else x


def filled_with_means_of_others(x):
    """Where a column holds nothing within the limit, there is no mean of it."""
    is_beyond = x.abs() > 20
    return torch.where(is_beyond, x.masked_fill(is_beyond, torch.nan).nanmean(0), x)


def filled_by_row(x):
    is_beyond = x.abs() > 20
    return torch.where(is_beyond, x.masked_fill(is_beyond, torch.nan).nanmean(1, keepdim=True), x)


OF_ROWS = [shortened_by_row, filled_by_row]


@pytest.mark.parametrize("does", [shortened_by_the_largest, filled_with_means_of_others, *OF_ROWS])
def test_a_limit_of_which_little_or_no_number_comes_beyond_it(does):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    found = captured_mixing(Scored(does).double(), x, torch.arange(6) % 3)
    assert bool(found.always) == (does not in OF_ROWS), found
    assert not found.nearly


class Judged(nn.Module):
    """A loss whose second part is a mean over rows of some labels."""

    def __init__(self, is_counted):
        super().__init__()
        self.a, self.b, self.is_counted = nn.Linear(4, 4), nn.Linear(4, 9), is_counted

    def forward(self, x, labels):
        losses = F.cross_entropy(self.b(self.a(x).tanh()), labels, reduction="none")
        counted = self.is_counted(labels)
        return losses.mean() + (losses * counted).sum() / counted.sum().clamp(min=1)


@pytest.mark.parametrize("is_counted", [lambda y: y == 7, lambda y: y > 3, lambda y: y.ge(4)])
def test_a_mean_over_labels_that_the_example_lacks(is_counted):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert captured_mixing(Judged(is_counted).double(), x, torch.arange(6) % 3).always


@torch.jit.script
def doubled_by_a_mean(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.mean() > 0 else x


@torch.jit.script
def grown_by_a_number(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.abs().max().item() * 0)):
        x = x * 1.5
    return x


@torch.jit.script
def halved_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    y = x
    n = 0
    while bool(y.norm() > 100.0) and n < 5:
        y = y / 2
        n += 1
    return y


@torch.jit.script
def by_sizes(x: torch.Tensor) -> torch.Tensor:
    y = x
    for i in range(int(x.size(1) // 2)):
        y = y + x[:, i : i + 1]
    return y


@torch.jit.script
def doubled_by_a_mask(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None and bool(mask.any()):
        return x * 2
    return x


@torch.jit.script
def doubled_by_a_table(x: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
    return x * 2 if bool(masks["over"].any()) else x


@torch.jit.script
class Held:
    def __init__(self, mask: torch.Tensor):
        self.mask = mask


@torch.jit.script
def doubled_by_an_object(x: torch.Tensor, held: Held) -> torch.Tensor:
    return x * 2 if bool(held.mask.any()) else x


@torch.jit.script
def doubled_by_how_many(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.nonzero(x > 5).size(0) > 3 else x


@torch.jit.script
def halved_by_how_many_a_mask_has(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x[x > 1].numel() > 3 else x


@torch.jit.script
def halved_by_how_many_masks_leave(x: torch.Tensor) -> torch.Tensor:
    kept = x > 1
    if x.size(1) > 2:
        kept = kept & ~x.isnan()
    return x / (1 + x[kept.all(dim=-1)].size(0))


@torch.jit.script
def halved_by_a_mask_it_is_given(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if len(x[mask]) > 3 else x


@torch.jit.script
def halved_by_how_many_places(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + len(torch.where(x > 1)[0]))


@torch.jit.script
def halved_by_how_many_truths_a_table_makes(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x[(x * 2).relu().to(torch.bool)].numel())


@torch.jit.script
def by_rows_of_a_mask(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x.sum(dim=-1) > 0)[:, None], x * 2, x / x.size(1))


@torch.jit.script
def by_places(x: torch.Tensor) -> torch.Tensor:
    turned = x[:, torch.arange(x.size(1)).flip(0)]
    return x + turned / turned.size(1)


@torch.jit.script
def repeated(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=-1).view(x.size(0), -1, 2).sum(dim=-1) * x.repeat_interleave(2).dim()


@torch.jit.script
def by_a_count_of_its_own(x: torch.Tensor, least: list[int]) -> torch.Tensor:
    n = torch.zeros(1)
    for _ in range(3):
        n = n + 1
        if float(n) > least[0]:
            x = x * 2
    return x


@torch.jit.script
def scaled_by(x: torch.Tensor, by: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x * float(by) * times if bool(by > 0) else x


class ByABuffer(nn.Module):
    """Hands a buffer to scripted code, as it is or written to by what ``makes`` it of rows."""

    def __init__(self, makes=None):
        super().__init__()
        self.a, self.b, self.makes = nn.Linear(4, 4), nn.Linear(4, 4), makes
        self.register_buffer("by", torch.tensor(2.0))

    def forward(self, x):
        x = self.a(x)
        return self.b(scaled_by(x, by=self.by if self.makes is None else self.makes(x, self.by), times=2))


@pytest.mark.parametrize(
    ("makes", "is_refused"),
    [
        (None, False),
        (lambda x, by: by * 2, False),
        (lambda x, by: by + x.mean(), True),
        (lambda x, by: by + len(x), True),
        (lambda x, by: by.clone().copy_(x.mean()), True),
    ],
    ids=["itself", "alone", "rows", "count", "written"],
)
def test_scripted_code_may_go_by_values_of_the_models_own(makes, is_refused):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert bool(captured_mixing(ByABuffer(makes), x).always) is is_refused


def in_turn(x, by):
    return scaled_by(x, by) + scaled_by(x, x.mean())


@pytest.mark.parametrize(
    ("scales", "is_refused"),
    [
        (lambda x, by: scaled_by(x, by), False),
        (lambda x, by: scaled_by(times=2, by=by, x=x), False),
        (lambda x, by: scaled_by(x, by + x.mean()), True),
        (lambda x, by: scaled_by(x, by.mul_(1 + x.mean())), True),
        (lambda x, by: scaled_by(by, x.mean()) * x, True),
        (in_turn, True),
    ],
    ids=["itself", "named", "rows", "written", "other", "in_turn"],
)
def test_scripted_code_in_layers_may_go_by_values_of_the_models_own(scales, is_refused):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("by", torch.tensor(2.0))

        def forward(self, x):
            return scales(self.inner(x), self.by)

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found = captured_mixing(Around(nn.Sequential(Scaled(), Scaled())), x)
    assert bool(found.always or found.training) is is_refused


class ByItsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor):
        return x * self.weight if bool(self.weight.sum() > 0) else x


class ByItsInput(ByItsWeights):
    def forward(self, x: torch.Tensor):
        return x * self.weight if bool((x * self.weight).sum() > 0) else x


class Around(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.a, self.code, self.b = nn.Linear(4, 4), code, nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.code(self.a(x)))


SCRIPTED = """
truth number loop mask table object many picked masks given_mask places made_truths rows_of_a_mask
of_places repeated sizes count weights layer
"""


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        (doubled_by_a_mean, True),
        (grown_by_a_number, True),
        (halved_in_a_loop, True),
        (lambda x: doubled_by_a_mask(x, x > 5), True),
        (lambda x: doubled_by_a_table(x, {"over": x > 5}), True),
        (lambda x: doubled_by_an_object(x, Held(x > 5)), True),
        (doubled_by_how_many, True),
        (halved_by_how_many_a_mask_has, True),
        (halved_by_how_many_masks_leave, True),
        (lambda x: halved_by_a_mask_it_is_given(x, x > 1), True),
        (halved_by_how_many_places, True),
        (halved_by_how_many_truths_a_table_makes, True),
        (by_rows_of_a_mask, False),
        (by_places, False),
        (repeated, False),
        (by_sizes, False),
        (lambda x: by_a_count_of_its_own(x, [2]), False),
        (torch.jit.script(ByItsWeights()), False),
        (torch.jit.script(ByItsInput()), True),
    ],
    ids=SCRIPTED.split(),
)
def test_scripted_code_that_goes_by_values_has_all_rows_at_once(code, is_refused):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert bool(captured_mixing(Around(code), x).always) is is_refused


@torch.library.custom_op("autopipe_tests::by_mean", mutates_args=())
def by_mean(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.mean() > 0.5) else x.clone()


@torch.library.custom_op("autopipe_tests::by_row", mutates_args=())
def by_row(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * 2 if row.mean().item() > 0.5 else row for row in x])


for operator in (by_mean, by_row):
    operator.register_autograd(
        lambda ctx, slope: slope * ctx.factor,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", output / inputs[0]),
    )


def in_a_thread(x):
    with ThreadPoolExecutor(1) as pool:
        return x * 2 if pool.submit(lambda: x.mean().item() > 0.5).result() else x


class Leaf(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("code", "is_mixed"),
    [
        (by_mean, True),
        (Leaf(by_mean), True),
        (by_row, False),
        (Leaf(by_row), False),
        (Leaf(in_a_thread), True),
    ],
    ids=["operator", "layer of it", "operator of rows", "layer of that", "thread"],
)
def test_values_that_are_read_where_no_mode_looks_are_seen(code, is_mixed):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    item = torch.Tensor.item
    assert bool(captured_mixing(Around(code), x).always) is is_mixed
    assert torch.Tensor.item is item


def halved_where_any_passes(x):
    return torch.where((x > 5).any(0), x * 0.5, x)


def halved_where_many_pass(x):
    return x / (x > 5).sum(0).clamp(min=1)


def halved_where_a_row_passes(x):
    return torch.where((x > 5).any(-1, keepdim=True), x * 0.5, x)


@pytest.mark.parametrize("n_wide", [4, 8])
@pytest.mark.parametrize(
    ("code", "is_mixed"),
    [
        (halved_where_any_passes, True),
        (halved_where_many_pass, True),
        (halved_where_a_row_passes, False),
        (torch.relu, False),
    ],
)
def test_truths_of_all_rows_in_a_layer_are_seen_whatever_its_width(code, is_mixed, n_wide):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_wide, n_wide), Leaf(code), nn.Linear(n_wide, 2))
    found = captured_mixing(model, torch.rand(6, n_wide))
    assert bool(found.always or found.nearly) is is_mixed, found


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize(
    ("does", "is_mixed"),
    [
        (lambda x: x * 0.1 if x.abs().max() > 9 else x, True),
        (lambda x: x * 0.1 if x.detach().norm().item() > 99 else x, True),
        (lambda x: torch.where(x.abs().amax(-1, keepdim=True) > 9, x * 0.1, x), False),
    ],
)
def test_limits_in_hooks_on_torchs_own_layers_are_seen(does, is_mixed, is_ahead):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    if is_ahead:
        model[1].register_forward_pre_hook(lambda module, given: (does(given[0]),))
    else:
        model[1].register_forward_hook(lambda module, given, made: does(made))
    found = captured_mixing(model, torch.rand(6, 4))
    assert bool(found.always or found.nearly) is is_mixed, found


def less_the_largest_from_a_level_on(x):
    return x - x.amax(0).clamp(min=8)


def cut_off_at_a_quantile(x):
    return x.clamp(max=torch.quantile(x.detach(), 0.9).clamp(min=6))


def rounded_by_the_largest(x):
    step = x.detach().abs().max().clamp(min=8) / 127
    return x + ((x / step).round() * step - x).detach()


def rounded_by_the_largest_of_a_row(x):
    step = x.detach().abs().amax(-1, keepdim=True).clamp(min=8) / 127
    return x + ((x / step).round() * step - x).detach()


@pytest.mark.parametrize(
    "code",
    [
        less_the_largest_from_a_level_on,
        cut_off_at_a_quantile,
        rounded_by_the_largest,
        rounded_by_the_largest_of_a_row,
    ],
)
def test_what_a_layer_makes_of_all_rows_from_a_level_on_is_seen(code):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Leaf(code), nn.Linear(4, 2))
    found = captured_mixing(model, torch.rand(6, 4))
    assert bool(found.always or found.nearly) is (code is not rounded_by_the_largest_of_a_row), found
