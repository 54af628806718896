"""Ways in which people write forwards: writes to views, caches, what is returned, arguments, control flow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, Net, buffers, sequences, tokens, trap


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# ------------------------------------------------------------ writes to parts


@trap("safe")
def part_of_the_input_scaled(self: Any, x: Tensor) -> Tensor:
    x = x.clone() if x.requires_grad else x
    x[:, 0] *= 2
    return self.run(x)


@trap("safe")
def view_of_the_input_written(self: Any, x: Tensor) -> Tensor:
    if not x.requires_grad:
        x.view(-1)[::2].mul_(3)
        x.transpose(1, 2)[:, 0].add_(1)
    return self.run(x)


@trap()
def one_of_the_unbound_written(self: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.select(1, 0).add_(1)
    y[..., -1].zero_()
    return self.run(y)


@trap()
def diagonal_filled(self: Any, x: Tensor) -> Tensor:
    score = x @ x.transpose(1, 2)
    score.diagonal(dim1=1, dim2=2).fill_(-9)
    return self.run(score.softmax(-1) @ x)


@trap()
def triangle_set_by_index(self: Any, x: Tensor) -> Tensor:
    score = x @ x.transpose(1, 2)
    row, column = torch.triu_indices(x.size(1), x.size(1), 1)
    score[:, row, column] = float("-inf")
    return self.run(score.softmax(-1) @ x)


@trap("safe")
def chosen_ones_replaced(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    mask = x > 1
    y[mask] = x[mask] * 0.5 + 0.5
    return self.run(y)


@trap("safe")
def chosen_ones_through_a_layer(self: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > 0
    out = torch.zeros_like(x)
    out[mask] = self.layers[0](x[mask])
    return self.run(out)


@trap("safe")
def places_of_one_argument(self: Any, x: Tensor) -> Tensor:
    row, place = torch.where(x[..., 0] > 0)
    return self.run(x.index_put((row, place), torch.zeros(row.size(0), WIDTH)))


@trap("safe")
def mean_of_the_chosen(self: Any, x: Tensor) -> Tensor:
    chosen = x[x.abs() > 100]
    return self.run(x + (chosen.mean() if chosen.numel() else 0.0))


@trap()
def scattered_from_a_source(self: Any, x: Tensor) -> Tensor:
    return self.run(x.masked_scatter(x < 0, x.flip(1).abs()))


@trap()
def result_filled_row_by_row(self: Any, x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    for i in range(4):
        out[:, i::4] = x[:, i::4] * (i + 1)
    return self.run(out)


@trap()
def swapped_halves(self: Any, x: Tensor) -> Tensor:
    a, b = x[..., :4], x[..., 4:]
    a, b = b + a, b
    return self.run(torch.cat((a, b), -1))


@trap("safe")
def gradient_stopped_by_setting(self: Any, x: Tensor) -> Tensor:
    y = (x * 2).detach().requires_grad_()
    return self.run(y + x)


# ------------------------------------------------------------ what is kept


class WithTable(Net):
    """A table that is made when it is first asked for."""

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(40.0)[:, None] / 40


@trap("safe")
class TableMadeOnce(WithTable):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.table[: x.size(1)])


class WithMemo(Net):
    """A method behind a cache, by size."""

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def positions(self, n: int, width: int = WIDTH) -> Tensor:
        return torch.linspace(0, 1, n * width).view(n, width)


@trap("safe")
class PositionsByAMethodWithAMemo(WithMemo):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.positions(x.size(1)))


@trap("safe")
def mask_registered_by_the_first_call(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "mask"):
        self.register_buffer("mask", torch.ones(40, 40).tril().bool(), persistent=False)
    n = x.size(1)
    score = (x @ x.transpose(1, 2)).masked_fill(~self.mask[:n, :n], -9e9)
    return self.run(score.softmax(-1) @ x)


@trap("safe", prepare=lambda m: m.register_buffer("mask", None, persistent=False))
def mask_grown_where_it_is_short(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    if self.mask is None or self.mask.size(0) < n:
        self.mask = torch.ones(n, n).tril()
    return self.run(self.mask[:n, :n] @ x)


@trap("safe", cached=lambda: (0, None))
def table_of_the_last_size(self: Any, x: Tensor) -> Tensor:
    if self.cached[0] != x.size(1):
        self.cached = x.size(1), torch.arange(x.size(1))[:, None] / 9
    return self.run(x + self.cached[1])


def _defaulted(x: Tensor, seen: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    n = x.size(1)
    if n not in seen:
        seen[n] = torch.ones(n, 1) * n
    return x * seen[n]


@trap("safe")
def kept_in_a_default(self: Any, x: Tensor) -> Tensor:
    return self.run(_defaulted(x))


class Switched(Net):
    """Flips a flag for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


@trap()
class FlagForAWhile(Switched):
    def step(self, x: Tensor) -> Tensor:
        return self.run(x * 2 if self.is_on else x)

    def forward(self, x: Tensor) -> Tensor:
        with self.on():
            y = self.step(x)
        return self.step(y)


@trap("safe", losses=list)
def losses_of_this_call(self: Any, x: Tensor) -> Any:
    self.losses.clear()
    for layer in self.layers:
        x = torch.tanh(layer(x))
        self.losses.append(x.square().mean((1, 2)))
    return x, sum(self.losses)


# ------------------------------------------------------------ what is returned


class Step(NamedTuple):
    """One of several results."""

    hidden: Tensor
    extra: Any = None


@dataclasses.dataclass
class Result:
    """Results of kinds within one another."""

    steps: list[Step]
    last: Tensor | None = None
    told: dict[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 0


@trap()
def results_within_results(self: Any, x: Tensor) -> Any:
    steps = []
    for i, layer in enumerate(self.layers):
        x = torch.tanh(layer(x))
        steps.append(Step(x, (i, None, {"mean": x.mean(-1)})))
    return Result(steps, None, {"size": tuple(x.shape), "name": "n", "all": OrderedDict(x=x)}, len(steps))


@trap()
def more_in_training(self: Any, x: Tensor) -> Any:
    outs = []
    for layer in self.layers:
        x = torch.tanh(layer(x))
        outs.append(x)
    return outs if self.training else outs[-1]


@trap()
def one_result_under_two_names(self: Any, x: Tensor) -> Any:
    y = self.run(x)
    return {"logits": y, "scores": y, "again": [y, y[:1]], "input": x}


@trap()
def views_of_the_input(self: Any, x: Tensor) -> Any:
    return self.run(x), x.transpose(1, 2), x[:, 0], x


@trap()
def nothing_in_evaluation(self: Any, x: Tensor) -> Any:
    loss = self.run(x).square().mean((1, 2)) if self.training else None
    return {"loss": loss, "out": self.run(x)}


@trap()
def numbers_and_texts(self: Any, x: Tensor) -> Any:
    return self.run(x), x.size(1) * 2, f"{x.dim()} dims", 0.5, True, None, x.dtype, x.shape


@trap()
def sorted_with_places(self: Any, x: Tensor) -> Any:
    found = self.run(x).sort(-1)
    return found, torch.topk(found.values, 2), found.indices.float()


@trap()
def bound_result_of_a_loop(self: Any, x: Tensor) -> Any:
    pairs = [(layer, name) for name, layer in self.layers.named_children()]
    return {name: layer(x) for layer, name in pairs}


# ------------------------------------------------------------ what is given


def at_depth(batch: int, length: int, seed: int) -> dict[str, Any]:
    """Tensors at several depths of keywords."""
    (x,) = sequences(batch, length, seed)
    return {"x": x, "extra": {"a": {"b": [x * 2, {"c": x.sum(-1)}]}, "n": 3}}


@trap(inputs=at_depth)
def tensors_deep_in_keywords(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
    b, c = kwargs["extra"]["a"]["b"]
    return self.run(x + b + c["c"][..., None] * kwargs["extra"]["n"])


def without_dims(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Tensors without dims, of floats and whole numbers."""
    return (*sequences(batch, length, seed), torch.tensor(0.5 + seed % 3), torch.tensor(seed % 4))


@trap(inputs=without_dims)
def numbers_as_tensors(self: Any, x: Tensor, scale: Tensor, place: Tensor) -> Tensor:
    picked = x.index_select(1, place.reshape(1)) * scale
    return self.run(x * scale + picked + place)


@trap("safe", inputs=without_dims)
def place_given_as_a_tensor(self: Any, x: Tensor, scale: Tensor, place: Tensor) -> Tensor:
    return self.run(x[:, place : place + 2] * scale)


@trap("safe", inputs=without_dims)
def layer_given_as_a_tensor(self: Any, x: Tensor, scale: Tensor, place: Tensor) -> Tensor:
    return self.run(self.layers[place](x) * scale)


@trap("safe", inputs=without_dims)
def rate_given_as_a_tensor(self: Any, x: Tensor, scale: Tensor, place: Tensor) -> Tensor:
    return self.run(F.dropout(x, float(scale) / 5, self.training))


@trap("safe", inputs=lambda b, n, s: (torch.zeros(0, n, WIDTH) if s % 2 else sequences(b, n, s)[0],))
def batches_without_rows(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", inputs=lambda b, n, s: (*sequences(b, n, s), [] if s % 2 else [torch.ones(WIDTH)]))
def lists_without_tensors(self: Any, x: Tensor, more: Any) -> Tensor:
    return self.run(x + sum(more))


def given_by_place(x: Tensor, /, y: Any = None, *rest: Any, scale: float = 1.0) -> Any:
    """Splits arguments as a forward with all kinds of them would."""
    return x, y, rest, scale


@trap(inputs=lambda b, n, s: (*sequences(b, n, s), None, *sequences(b, n, s + 1)))
def arguments_handed_on(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    x, y, rest, scale = given_by_place(*args, **kwargs)
    assert y is None
    return self.run(x * scale + sum(rest))


@trap("safe", inputs=lambda b, n, s: (sequences(b, n, s)[0].expand(b, n, WIDTH)[:, :, :],))
def branch_on_what_is_a_view(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x._base is not None else x)


# ------------------------------------------------------------ ways through


class Stop(Exception):
    """Carries a result out of the layers."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result


class Stopping(nn.Module):
    """Leaves by an exception."""

    def forward(self, x: Tensor) -> Tensor:
        raise Stop(x * 2)


@trap("safe", stop=Stopping)
def left_by_an_exception(self: Any, x: Tensor) -> Tensor:
    try:
        self.stop(self.layers[0](x))
    except Stop as stop:
        return self.run(stop.result)
    return x


@trap()
def heads_by_name(self: Any, x: Tensor, task: str = "2") -> Tensor:
    return self.run(getattr(self.layers, task)(x) + self.layers.get_submodule("1")(x))


@trap()
def steps_folded(self: Any, x: Tensor) -> Tensor:
    return functools.reduce(lambda y, layer: layer(y).tanh(), self.layers, x)


@trap()
def steps_accumulated(self: Any, x: Tensor) -> Tensor:
    rows = itertools.accumulate(x.unbind(1), lambda a, b: 0.5 * a + b)
    return self.run(torch.stack(list(rows), 1))


@trap()
def pairs_of_neighbours(self: Any, x: Tensor) -> Tensor:
    rows = x.unbind(1)
    return self.run(torch.stack([a - b for a, b in itertools.pairwise(rows)], 1))


@trap()
def methods_by_operator(self: Any, x: Tensor) -> Tensor:
    y = operator.methodcaller("softmax", -1)(x)
    return self.run(operator.matmul(y, operator.attrgetter("mT")(y)) @ x)


@trap("safe")
def depth_by_chance(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        if self.training and torch.rand(1).item() < 0.5 * i / 4:
            continue
        x = x + layer(x)
    return x


@trap()
def rows_dropped_by_chance(self: Any, x: Tensor) -> Tensor:
    if self.training:
        kept = torch.empty(x.size(0), 1, 1, device=x.device).bernoulli_(0.7)
        x = x.div(0.7) * kept
    return self.run(x)


@trap("safe")
def chosen_softly_but_hard(self: Any, x: Tensor) -> Tensor:
    return F.gumbel_softmax(self.run(x), tau=0.5, hard=True)


@trap("safe", inputs=tokens, table=linear)
def order_by_what_is_found(self: Any, ids: Tensor) -> Tensor:
    order = torch.argsort(ids, stable=True)
    back = torch.argsort(order)
    hot = F.one_hot(ids, WIDTH).float()
    gathered = hot.gather(1, order[..., None].expand_as(hot))
    return self.run(self.table(gathered).gather(1, back[..., None].expand_as(hot)))


@trap("safe")
def warned_about_its_size(self: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if x.size(1) > 8:
                warnings.warn("long", UserWarning, stacklevel=1)
        except UserWarning:
            x = x * 2
    return self.run(x)


@trap("safe")
def raises_where_it_is_long(self: Any, x: Tensor) -> Tensor:
    def checked(n: int) -> int:
        if n > 8:
            raise ValueError(n)
        return n

    try:
        return self.run(x * checked(x.size(1)))
    except ValueError:
        return self.run(x)


class Delegates(nn.Module):
    """Gives what it lacks from what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.run(x)


@trap()
class WrapperThatDelegates(Delegates):
    pass


@trap(inner=Delegates)
def part_that_delegates(self: Any, x: Tensor) -> Tensor:
    return self.run(self.inner(x))


@trap("safe", prepare=lambda m: buffers(m, steps=torch.zeros((), dtype=torch.long)))
def warms_up_by_a_buffer(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.steps += 1
    rate = torch.clamp(self.steps / 5, max=1.0)
    return self.run(x * rate)


@trap()
def noise_of_its_own_kind(self: Any, x: Tensor) -> Tensor:
    noise = torch.empty_like(x).uniform_(-1, 1) + torch.normal(0.0, 1.0, x.shape) + torch.randn(x.shape)
    shuffled = x[:, torch.randperm(x.size(1))]
    return self.run(x + noise * 0.1 + shuffled + torch.multinomial(torch.ones(4), 1))


@trap(
    "safe", inputs=lambda b, n, s: (sequences(b, n, s)[0].to_sparse() if s == 0 else sequences(b, n, s)[0],)
)
def captured_with_another_layout(self: Any, x: Tensor) -> Tensor:
    return self.run(x.to_dense() if x.is_sparse else x)


@trap("safe")
def layers_in_an_order_by_chance(self: Any, x: Tensor) -> Tensor:
    for i in torch.randperm(4).tolist():
        x = torch.tanh(self.layers[i](x))
    return x


@trap()
def compared_in_a_chain(self: Any, x: Tensor) -> Tensor:
    inside = (x > -1) & (x < 1) | x.isnan()
    return self.run(torch.where(inside, x, x.sign()))


@trap("safe")
def loops_over_what_it_holds(self: Any, x: Tensor) -> Tensor:
    scale = sum(p.detach().norm() for n, p in self.named_parameters() if "weight" in n)
    return self.run(x / scale)


@trap("safe")
def inner_forward_given_the_parts(self: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor, layers: Any = tuple(self.layers), depth: int = 0) -> Tensor:
        return x if depth == len(layers) else inner(layers[depth](x).tanh(), layers, depth + 1)

    return inner(x)


# ------------------------------------------------------------ what tensors are beside their values


@trap("safe", inputs=lambda b, n, s: (sequences(b, n + s % 2, s)[0][:, s % 2 :],))
def branch_on_where_it_starts(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.storage_offset() else x)


@trap("safe", inputs=lambda b, n, s: (sequences(b, n, s)[0].to(torch.cfloat),))
def branch_on_a_conjugate(self: Any, z: Tensor) -> Tensor:
    y = z.conj() if self.training else z
    return self.run(y.real * 2 if y.is_conj() else y.real)


@trap("safe")
def branch_on_how_often_it_was_written(self: Any, x: Tensor) -> Tensor:
    y = x * 1
    y += 1
    return self.run(y * 2 if y._version else y)


@trap("safe", inputs=lambda b, n, s: ((nn.Parameter if s % 2 else torch.Tensor.clone)(*sequences(b, n, s)),))
def branch_on_the_class_of_the_input(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if isinstance(x, nn.Parameter) else x)


@trap("safe", inputs=lambda b, n, s: (*sequences(b, n, s), torch.sin if s % 2 else torch.cos))
def function_as_an_argument(self: Any, x: Tensor, function: Any) -> Tensor:
    return self.run(function(x))


@trap("safe", inputs=lambda b, n, s: (*sequences(b, n, s), s % 2 == 1, 1 if s % 2 else 1.0))
def truth_or_number(self: Any, x: Tensor, first: Any, second: Any) -> Tensor:
    return self.run(x * 2 if first is True and isinstance(second, int) else x)


@trap("safe", inputs=lambda b, n, s: (*sequences(b, n, s), [*sequences(b, n, s + 1)]))
def list_that_is_given_grows(self: Any, x: Tensor, states: list[Tensor]) -> Any:
    for layer in self.layers:
        x = torch.tanh(layer(x))
        states.append(x)
    return x, states[-2] + states[0]


@trap("safe", inputs=lambda b, n, s: ({"x": sequences(b, n, s)[0]},))
def dict_that_is_given_is_filled(self: Any, batch: dict[str, Tensor]) -> Any:
    batch["y"] = self.run(batch["x"])
    batch["loss"] = batch["y"].square().mean((1, 2))
    return batch


@trap("safe", inputs=lambda b, n, s: ({"x": sequences(b, n, s)[0], "more": 2},))
def dict_that_is_given_is_emptied(self: Any, batch: dict[str, Any]) -> Any:
    scale = batch.pop("more")
    return self.run(batch.pop("x") * scale), len(batch)


@trap("safe")
def number_of_ones_own_class(self: Any, x: Tensor) -> Tensor:
    n = x.size(1)
    return self.run(x * 2 if type(n) is int and n is x.shape[1] else x)
