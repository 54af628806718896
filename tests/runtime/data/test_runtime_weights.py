"""The weighted sum over microbatches is the loss of the full batch."""

import copy
import functools
import logging

import pytest
import torch
from runtime_models import grads, make, worst
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError, StepError
from autopipe.runtime import Runtime
from autopipe.runtime.data.microbatch import Splitter
from autopipe.runtime.data.outputs import weighted
from autopipe.tracing.sizes.variation import Variation


class Language(nn.Module):
    """A causal model that computes its own loss as language models do: a mean over labels that count."""

    def __init__(self, shift=True, vocab=11, d=6):
        super().__init__()
        self.shift, self.vocab = shift, vocab
        self.emb = nn.Embedding(vocab, d)
        self.mix = nn.Linear(d, d)
        self.head = nn.Linear(d, vocab)

    def forward(self, tokens, labels, reduction="mean"):
        logits = self.head(torch.tanh(self.mix(self.emb(tokens))))
        if self.shift:
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return {"loss": loss, "logits": logits}


def ragged(rows=7, length=5, vocab=11):
    """Labels whose count differs from row to row; the last row has none."""
    tokens = torch.randint(0, vocab, (rows, length))
    labels = tokens.clone()
    for row in range(rows):
        labels[row, length - row % length :] = -100
    labels[-1] = -100
    return tokens, labels


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("n_microbatches", [1, 3, 7])
def test_internal_losses_weigh_by_labels_that_count(shift, n_microbatches):
    torch.manual_seed(0)
    model = Language(shift).double()
    tokens, labels = ragged()
    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=n_microbatches)
    plain = copy.deepcopy(model)
    wanted = plain(tokens, labels)["loss"]
    wanted.backward()
    out = Runtime(*made).step(tokens, labels, return_outputs=True)
    assert abs(out.loss - wanted.item()) < 1e-12
    assert abs(out.outputs["loss"] - wanted.item()) < 1e-12
    assert out.outputs["logits"].shape == (7, 5, 11)
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


class Beside(Language):
    """Its loss comes after the logits, as small language models are written; or what is only to be added."""

    def __init__(self, gives="loss"):
        super().__init__(shift=False)
        self.gives = gives

    def forward(self, tokens, labels):
        made = super().forward(tokens, labels)
        if self.gives == "a term":
            return made["logits"], made["logits"].square().mean()
        if self.gives == "a comparison":
            return made["logits"], (made["logits"].mean(-1) - tokens).square().mean()
        return (
            (made["logits"], made["loss"], None) if self.gives == "loss" else (made["logits"], labels.sum())
        )


@pytest.mark.parametrize("gives", ["loss", "a comparison"])
def test_a_loss_that_comes_last_is_found(gives):
    torch.manual_seed(0)
    model = Beside(gives).double()
    tokens, labels = ragged()
    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=3)
    plain = copy.deepcopy(model)
    wanted = plain(tokens, labels)[1]
    wanted.backward()
    runtime = Runtime(*made)
    assert abs(runtime.step(tokens, labels).loss - wanted.item()) < 1e-12
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12
    assert abs(runtime.evaluate(tokens, labels).loss - wanted.item()) < 1e-12


@pytest.mark.parametrize("gives", ["a term", "a number"])
def test_a_scalar_that_is_no_loss_is_not_trained_on(gives):
    model, (tokens, labels) = Beside(gives), ragged()
    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=1)
    with pytest.raises(InputError, match="output holds none"):
        Runtime(*made).step(tokens, labels)


@pytest.mark.parametrize("are_ragged", [True, False])
@pytest.mark.parametrize("term", [0.0, 0.1])
def test_a_loss_fn_that_takes_the_models_own_loss_gets_the_batch_where_rows_do_not_weigh_it(
    term, are_ragged, caplog
):
    torch.manual_seed(0)
    model = Language().double()
    tokens, labels = ragged()
    if not are_ragged:
        labels = tokens

    def loss_fn(output, target):
        return output["loss"] + term * output["logits"].square().mean()

    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=3)
    wanted = loss_fn(model(tokens, labels), None).item()
    with caplog.at_level(logging.WARNING, "autopipe"):
        found = Runtime(*made, loss_fn=loss_fn).step(tokens, labels).loss.item()
    assert abs(found - wanted) < 1e-12
    assert ("one that the model makes with no loss_fn" in caplog.text) == are_ragged


class Classes(nn.Module):
    """A classifier of tokens whose classes weigh unlike, by numbers from one place or another."""

    def __init__(self, place, d=6):
        super().__init__()
        weight = torch.tensor([0.1, 1.0, 2.0, 3.0, 4.0])
        self.emb, self.mix, self.head = nn.Embedding(11, d), nn.Linear(d, d), nn.Linear(d, 5)
        self.place, self.said = place, weight.tolist()
        if place == "module":
            self.loss = nn.CrossEntropyLoss(weight)
        elif place in ("buffer", "scaled buffer"):
            self.register_buffer("weight", weight)
        elif place == "attribute":
            self.weight = weight.double()

    def forward(self, tokens, labels):
        logits = self.head(torch.tanh(self.mix(self.emb(tokens)))).flatten(0, 1)
        if self.place == "module":
            return self.loss(logits, labels.flatten())
        if self.place == "numbers":
            weight = torch.tensor(self.said, dtype=logits.dtype)
        else:
            weight = self.weight / self.weight.sum() if self.place == "scaled buffer" else self.weight
        return F.cross_entropy(logits, labels.flatten(), weight)


@pytest.mark.parametrize("place", ["module", "buffer", "scaled buffer", "attribute", "numbers"])
def test_classes_that_weigh_unlike_give_the_loss_of_the_batch(place, caplog):
    torch.manual_seed(0)
    model = Classes(place).double()
    tokens, labels = torch.randint(0, 11, (7, 3)), torch.randint(0, 5, (7, 3))
    labels[2, 1:] = -100
    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=3)
    plain = copy.deepcopy(model)
    runtime = Runtime(*made)
    for scale in (1.0, 3.0) if "buffer" in place else (1.0,):
        for each in (model, plain):
            if scale != 1.0:
                each.weight[0] *= scale  # as a schedule does
                each.zero_grad()
        wanted = plain(tokens, labels)
        wanted.backward()
        with caplog.at_level(logging.WARNING, "autopipe"):
            assert abs(runtime.step(tokens, labels).loss - wanted.item()) < 1e-12
        assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12
    assert "weighed exactly" not in caplog.text


def test_a_models_own_weights_of_classes_that_the_example_does_not_show_weigh_its_batch(caplog):
    model, tokens = Classes("buffer").double(), torch.randint(0, 11, (7, 3))
    made = make(model, (tokens, torch.full((7, 3), 3)), {}, n_stages=2, n_microbatches=3)
    labels = torch.randint(0, 5, (7, 3))
    wanted = copy.deepcopy(model)(tokens, labels)
    with caplog.at_level(logging.WARNING, "autopipe"):
        assert abs(Runtime(*made).step(tokens, labels).loss - wanted.item()) < 1e-12
    assert "the weights of its classes are the model's" not in caplog.text


def chosen(labels):
    labels = labels.clone()
    labels[labels < 4] = -100
    return labels


def shifted(labels):
    others = torch.full_like(labels, -100)
    others[:, :-1].copy_(labels[:, 1:])
    return others


def through_a_view(labels):
    labels = labels.clone()
    labels.T[2:].fill_(-100)
    return labels


def input_itself(labels):
    labels[labels < 4] = -100
    return labels


@pytest.mark.parametrize("write", [chosen, shifted, through_a_view, input_itself])
def test_labels_that_are_written_into_count_as_they_are_then(write):
    class Written(Language):
        def forward(self, tokens, labels):
            logits = self.head(torch.tanh(self.mix(self.emb(tokens))))
            return {"loss": F.cross_entropy(logits.flatten(0, 1), write(labels).flatten())}

    torch.manual_seed(0)
    model = Written().double()
    tokens, labels = ragged()
    made = make(model, (tokens, labels.clone()), {}, n_stages=2, n_microbatches=3)
    plain = copy.deepcopy(model)
    wanted = plain(tokens, labels.clone())["loss"]
    wanted.backward()
    assert abs(Runtime(*made).step(tokens, labels).loss - wanted.item()) < 1e-12
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_weights_of_classes_that_are_written_into_weigh_as_they_are_then():
    class Weighed(Language):
        def forward(self, tokens, labels):
            weight = torch.ones(self.vocab, dtype=torch.float64)
            weight[:6] = 0.1
            logits = self.head(torch.tanh(self.mix(self.emb(tokens))))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)

    torch.manual_seed(0)
    model = Weighed().double()
    tokens, labels = ragged()
    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=3)
    wanted = copy.deepcopy(model)(tokens, labels)
    assert abs(Runtime(*made).step(tokens, labels).loss - wanted.item()) < 1e-12


def test_labels_may_be_left_out_by_a_number_that_sizes_make():
    class LeftOut(Language):
        def forward(self, tokens, labels):
            logits = self.head(torch.tanh(self.mix(self.emb(tokens))))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=tokens.shape[1] - 1)

    torch.manual_seed(0)
    model, tokens = LeftOut().double(), torch.randint(0, 11, (7, 5))
    labels = torch.where(torch.rand(7, 5) < 0.3, 4, tokens)
    made = make(model, (tokens, labels), {}, n_stages=2, n_microbatches=3)
    wanted = copy.deepcopy(model)(tokens, labels)
    assert abs(Runtime(*made).step(tokens, labels).loss - wanted.item()) < 1e-12


class Spans(nn.Module):
    """Where an answer begins: places behind the end of what layers make count for nothing."""

    def __init__(self, blocks):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(11, 6), nn.Sequential(*blocks), nn.Linear(6, 1)

    def forward(self, tokens, mask, starts):
        logits = self.head(self.blocks(self.emb(tokens) * mask.unsqueeze(-1))).squeeze(-1)
        end = logits.size(1)
        return F.cross_entropy(logits, starts.clamp(0, end), ignore_index=end)


def block():
    """A module that stays whole."""
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


def spans(rows, length):
    mask = torch.ones(rows, length, dtype=torch.long)
    starts = torch.where(torch.arange(rows) % 3 > 0, torch.arange(rows) % length, 100)
    return torch.randint(1, 11, (rows, length)), mask, starts


def test_labels_may_be_left_out_by_a_size_of_what_layers_make(caplog):
    torch.manual_seed(0)
    model = Spans([block() for _ in range(4)]).double()
    made = make(model, spans(6, 5), {}, n_stages=2, n_microbatches=3)
    with caplog.at_level(logging.WARNING, "autopipe"):
        runtime = Runtime(*made)
        for length in (5, 8):
            given = spans(7, length)
            wanted = copy.deepcopy(model)(*given)
            assert abs(runtime.step(*given).loss - wanted.item()) < 1e-12
        tokens, mask, starts = spans(6, 5)
        with pytest.raises(InputError, match="it cannot be told which labels"):
            runtime.step(tokens, mask[:, :1], starts)
    assert not caplog.text


def test_labels_left_out_by_a_size_that_data_may_decide_are_warned_of(caplog):
    class Trimmed(nn.Module):
        """Drops what is past the last place that counts, in any row."""

        def __init__(self):
            super().__init__()
            self.inner = block()

        def forward(self, x):
            return self.inner(x[:, : int((x.detach() ** 2).sum((0, 2)).gt(1e-30).sum())])

    torch.manual_seed(0)
    model = Spans([Trimmed(), block()]).double()
    made = make(model, spans(6, 5), {}, n_stages=2, n_microbatches=3)
    with caplog.at_level(logging.WARNING, "autopipe"):
        Runtime(*made, mixed_rows="allow").step(*spans(7, 5))
    assert "made inside the model" in caplog.text


class Kinds(nn.Module):
    """Leaves out another label for a kind of batch, and where no label counts has no loss over any."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, kinds, labels):
        logits = self.head(self.inner(x).relu())
        if (labels == 2).all():
            return 0 * logits.sum()
        return F.cross_entropy(logits, labels, ignore_index=3 if (kinds == 1).all() else 2)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("labels", [[3, 3, 0, 0, 1, 3], [2, 2, 0, 1, 3, 2]])
def test_labels_count_as_in_the_form_that_microbatches_run(kind, labels):
    torch.manual_seed(0)
    model = Kinds().double()
    x, kinds, labels = torch.randn(6, 8).double(), torch.full((6,), kind), torch.tensor(labels)
    made = make(model, (x[:4], torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 2, 3])), {}, n_stages=2)
    runtime = Runtime(*made, n_microbatches=2)
    given = x, kinds, labels
    assert abs(runtime.step(*given).loss - model(*given).item()) < 1e-12
    assert abs(runtime.evaluate(*given).loss - model(*given).item()) < 1e-12
    pieces = [tuple(t[:3] for t in given), tuple(t[3:] for t in given)]
    assert abs(runtime.accumulate(pieces, n_microbatches=1).loss - model(*given).item()) < 1e-12


def test_a_form_without_a_loss_for_want_of_labels_weighs_nothing():
    torch.manual_seed(0)
    model = Kinds().double()
    given = torch.randn(6, 8).double(), torch.zeros(6, dtype=torch.long), torch.tensor([2, 2, 2, 0, 1, 1])
    made = make(model, (given[0][:4], given[1][:4], torch.arange(4)), {}, n_stages=2)
    assert abs(Runtime(*made, n_microbatches=2).step(*given).loss - model(*given).item()) < 1e-12


class RowByRow(nn.Module):
    """Averages the losses of its rows by itself, and so is another form for each number of them."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, labels):
        rows = zip(self.head(self.inner(x).relu()), labels, strict=True)
        return sum(F.cross_entropy(row[None], label[None]) for row, label in rows) / len(x)


def test_labels_of_other_sizes_count_as_in_the_form_for_them():
    torch.manual_seed(0)
    model = RowByRow().double()
    x, labels = torch.randn(6, 8).double(), torch.arange(6) % 4
    runtime = Runtime(*make(model, (x, labels), {}, n_stages=2), n_microbatches=1)
    for n in (6, 4):
        assert abs(runtime.step(x[:n], labels[:n]).loss - model(x[:n], labels[:n]).item()) < 1e-12
    found = runtime.accumulate([(x[:4], labels[:4]), (x[4:], labels[4:])], n_microbatches=1).loss
    assert abs(found - model(x, labels).item()) < 1e-12


def test_microbatches_that_leave_out_other_labels_than_their_batch_are_refused():
    torch.manual_seed(0)
    model = Kinds().double()
    x, kinds, labels = torch.randn(6, 8).double(), torch.tensor([1, 1, 1, 0, 0, 0]), torch.arange(6) % 4
    made = make(model, (x[:4], kinds[2:], labels[:4]), {}, n_stages=2)
    runtime = Runtime(*made, n_microbatches=2)
    with pytest.raises(InputError, match=r"\(kinds == 1\).all\(\) of all rows at once"):
        runtime.step(x, kinds, labels)
    assert abs(runtime.step(x, kinds, labels, n_microbatches=1).loss - model(x, kinds, labels).item()) < 1e-12
    assert runtime.step(x, kinds[:3].repeat(2), labels).loss
    runtime = Runtime(*made, n_microbatches=2, mixed_rows="allow")
    parts = [model(x[i : i + 3], kinds[i : i + 3], labels[i : i + 3]).item() for i in (0, 3)]
    counted = [int((labels[:3] != 3).sum()), int((labels[3:] != 2).sum())]
    wanted = sum(part * n for part, n in zip(parts, counted, strict=True)) / sum(counted)
    assert abs(runtime.step(x, kinds, labels).loss - wanted) < 1e-12


class Twice(nn.Module):
    """Averages once more where a batch is of one kind."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, kinds, labels):
        loss = F.cross_entropy(self.head(self.inner(x).relu()), labels)
        return loss + F.cross_entropy(self.head(x), labels) if (kinds == 5).all() else loss


def test_forms_that_average_otherwise_weigh_by_rows(caplog):
    torch.manual_seed(0)
    model = Twice().double()
    x, kinds, labels = torch.randn(6, 8).double(), torch.tensor([5, 5, 5, 0, 0, 0]), torch.arange(6) % 4
    made = make(model, (x[:4], kinds[2:], labels[:4]), {}, n_stages=2)
    parts = [model(x[i : i + 3], kinds[i : i + 3], labels[i : i + 3]).item() for i in (0, 3)]
    with pytest.raises(InputError, match=r"\(kinds == 5\).all\(\) of all rows at once"):
        Runtime(*made, n_microbatches=2).step(x, kinds, labels)
    runtime = Runtime(*made, n_microbatches=2, mixed_rows="allow")
    with caplog.at_level(logging.WARNING, "autopipe"):
        assert abs(runtime.step(x, kinds, labels).loss - sum(parts) / 2) < 1e-12
    assert "over labels of some microbatches than of others" in caplog.text


def test_a_sum_inside_the_model_weighs_one():
    torch.manual_seed(0)
    model = Language().double()
    tokens, labels = ragged()
    made = make(model, (tokens, labels), {"reduction": "sum"}, n_stages=2, n_microbatches=3)
    runtime, wanted = Runtime(*made), model(tokens, labels, reduction="sum")["loss"].item()
    assert abs(runtime.step(tokens, labels, reduction="sum").loss - wanted) < 1e-10
    pieces = [
        {"tokens": tokens[p], "labels": labels[p], "reduction": "sum"} for p in (slice(3), slice(3, None))
    ]
    assert abs(runtime.accumulate(pieces, n_microbatches=2).loss - wanted) < 1e-10


def small(n_microbatches=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(9, 3, dtype=torch.float64)
    return model, x, make(model, (x,), {}, n_stages=2, n_microbatches=n_microbatches)


def test_sums_add_up():
    model, x, made = small()
    y = torch.randn(9, 2, dtype=torch.float64)
    loss_fn = nn.MSELoss(reduction="sum")
    out = Runtime(*made, loss_fn=loss_fn, loss_reduction="sum").step(x, target=y)
    assert abs(out.loss - loss_fn(model(x), y).item()) < 1e-12


def test_a_given_weight_overrules():
    model, x, made = small()
    target = {"y": torch.randint(0, 2, (9,)), "keep": torch.arange(9) % 3 > 0}

    def loss_fn(output, target):
        return F.cross_entropy(output[target["keep"]], target["y"][target["keep"]])

    def weight(args, kwargs, target):
        assert args[0].shape[0] == len(target["keep"])
        return target["keep"].sum().item()

    out = Runtime(*made, loss_fn=loss_fn, loss_weight=weight).step(x, target=target)
    assert abs(out.loss - loss_fn(model(x), target).item()) < 1e-12
    with pytest.raises(InputError, match="not all zero"):
        Runtime(*made, loss_fn=loss_fn, loss_weight=lambda *_: 0).step(x, target=target)
    for odd in ("3", None, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="loss_weight gave"):
            Runtime(*made, loss_fn=loss_fn, loss_weight=lambda *_, odd=odd: odd).step(x, target=target)


def test_a_given_weight_sees_microbatches_on_another_device():
    _, x, made = small()
    seen = []

    def weight(args, kwargs, target):
        seen.append((len(args[0]), len(target)))
        return len(target)

    # an index makes it another device than that of the tensors, as cuda:0 is
    runtime = Runtime(*made, loss_fn=F.mse_loss, loss_weight=weight, device="cpu:0")
    runtime.step(x, target=torch.zeros(9, 2).double())
    assert seen == [(3, 3), (2, 2), (2, 2), (2, 2)]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x, bias, scale, mode="add", table=None):
        h = self.lin(x) * scale
        return torch.tanh(h + bias if mode == "add" else h) + (0 if table is None else table.sum())


def test_arguments_without_a_batch_axis_stay_whole():
    torch.manual_seed(0)
    model = Mixed().double()
    x = torch.randn(8, 3, dtype=torch.float64)
    bias, scale = torch.randn(1, 3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    table = torch.randn(5, dtype=torch.float64)
    made = make(model, (x, bias, scale), {"mode": "add", "table": table}, n_stages=2, n_microbatches=3)
    runtime = Runtime(*made, loss_fn=F.mse_loss)
    out = runtime.forward(x[:7], bias, scale, mode="add", table=table)
    torch.testing.assert_close(out, model(x[:7], bias, scale, mode="add", table=table))


class Dims:
    """The part of a capture that splitting looks at."""

    kinds = ()
    listed_rows = ()
    variation = Variation()

    def most_microbatches(n_rows):
        return n_rows

    class ops:
        dims = ()
        inputs = ()


def test_batch_dims_settle_what_guessing_cannot():
    leaves = {"x": torch.zeros(4, 2), "square": torch.zeros(4, 4), "time_first": torch.zeros(7, 4)}

    class Named(Dims):
        class ops:
            dims = ()
            inputs = tuple(type("Op", (), {"name": n}) for n in leaves)

        class inputs:
            names, shown = tuple(leaves), tuple(leaves)

    Named.kinds = (Named,)
    batch = Splitter(Named, {"square": None, "time_first": 1}).split(leaves, None, 3)
    assert batch.rows == (2, 1, 1)
    assert [t.shape for t in batch.leaves["time_first"]] == [(7, 2), (7, 1), (7, 1)]
    assert all(t is leaves["square"] for t in batch.leaves["square"])
    with pytest.raises(InputError, match="disagree"):
        Splitter(Named, {"time_first": 0}).split(leaves, None, 3)
    assert Splitter(Named, {"time_first": 0}).split(leaves, None, 1).rows == (1,)
    with pytest.raises(InputError, match="disagree"):
        Splitter(Named, {"time_first": 0}).split(leaves, None, 1, is_weighed=True)
    with pytest.raises(InputError, match="nothing"):
        Splitter(Named, {"nothing": 0})
    with pytest.raises(InputError, match=r"rows of x lie along axis 2, but its shape is \[4, 2\]"):
        Splitter(Named, {"x": 2}).split(leaves, None, 3)
    with pytest.raises(InputError, match="empty"):
        Splitter(Named).split({"x": torch.zeros(0, 2)}, None, 3)


@pytest.mark.parametrize("state", [lambda h, c: (h, c), lambda h, c: {"h": h, "c": c}])
def test_batch_dims_of_an_argument_are_those_of_all_that_it_holds(state):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x, hidden):
            h, c = hidden.values() if isinstance(hidden, dict) else hidden
            return self.head(self.cell(x, (h, c))[0])

    torch.manual_seed(0)
    model, x, target = Recurrent().double(), torch.randn(6, 5, 3).double(), torch.randn(6, 5, 3).double()
    hidden = state(torch.randn(2, 6, 4).double(), torch.randn(2, 6, 4).double())
    loss = F.mse_loss(model(x, hidden), target)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    pipe = split_by_layers(model, 2, (x, hidden), n_microbatches=2)
    runtime = pipe.runtime(F.mse_loss, batch_dims={"x": 0, "hidden": 1})
    found = runtime.step(x, hidden, target=target)
    torch.testing.assert_close(found.loss, loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    name = next(op.name for op in pipe.graph.ops.inputs if op.name.startswith("hidden"))
    with pytest.raises(InputError, match="disagree on the number of rows"):
        pipe.runtime(F.mse_loss, batch_dims={"hidden": 1, name: 0}).step(x, hidden, target=target)


@pytest.mark.parametrize(
    ("loss_fn", "weighs"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (nn.NLLLoss(ignore_index=-100), True),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double()), True),
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (F.cross_entropy, True),
        (functools.partial(F.cross_entropy, ignore_index=-100, label_smoothing=0.2), True),
        (functools.partial(F.cross_entropy, reduction="sum"), True),
        (lambda output, target: F.cross_entropy(output, target), False),
        (lambda output, target: F.cross_entropy(output, target, reduction="sum"), False),
        (lambda output, target: F.cross_entropy(output @ output.T, torch.arange(len(output))), False),
    ],
)
def test_loss_functions_are_weighed_as_they_say_or_get_the_batch(loss_fn, weighs, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, target = torch.randn(9, 3, dtype=torch.float64), torch.tensor([0, -100, 2, 1, 1, -100, 0, 2, -100])
    made = make(model, (x,), {}, n_stages=2, n_microbatches=4)
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        found = Runtime(*made, loss_fn=loss_fn).step(x, target=target).loss.item()
    assert found == pytest.approx(loss_fn(model(x), target).item(), rel=1e-12)
    assert ("loss_fn is called once on the whole batch" in caplog.text) is not weighs


@pytest.mark.parametrize("wrong", [1.0, 1.01])
def test_a_loss_that_is_told_in_a_wider_dtype_may_be_rounded_as_its_outputs_are(wrong, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x, y = torch.randn(2, 8, 8)
    runtime = Runtime(
        *make(model, (x,), {}, n_stages=2, n_microbatches=4),
        loss_fn=lambda output, target: (F.mse_loss(output, target) * wrong ** (len(output) - 2)).double(),
    )
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        for _ in range(5):
            runtime.step(x, target=y)
    assert ("which weigh up to" in caplog.text) is (wrong != 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_told_as_that_alone(value, caplog):
    _, x, made = small()
    runtime = Runtime(*made, loss_fn=lambda output, target: F.mse_loss(output, target) * value)
    with (
        caplog.at_level(logging.WARNING, logger="autopipe"),
        pytest.raises(StepError, match=f"loss is {value}"),
    ):
        runtime.step(x, target=torch.zeros_like(made[0].model(x)))
    assert not caplog.text


def test_a_loss_that_wants_one_microbatch_is_not_warned_of(caplog):
    _, x, made = small()
    y, calls = torch.randn(9, 2, dtype=torch.float64), []

    def only_small(output, target):
        calls.append(len(output))
        assert len(output) <= 3
        return F.mse_loss(output, target)

    with caplog.at_level(logging.WARNING, logger="autopipe"):
        Runtime(*made, loss_fn=only_small).step(x, target=y)
    assert calls == [3, 2, 2, 2]  # that it was asked about all of them leaves no trace
    assert not caplog.text


class Running(nn.Module):
    """A loss over its own running mean, written in place or set anew."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.ones(()).double())

    def forward(self, output, target):
        loss = F.mse_loss(output, target)
        mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.mean = self.mean.copy_(mean) if self.in_place else mean
        return loss / mean


class Noting(nn.Module):
    """A mean over rows that keeps a count: of its calls, or of the rows it has seen."""

    def __init__(self, counts_rows):
        super().__init__()
        self.counts_rows = counts_rows
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, output, target):
        self.n += len(output) if self.counts_rows else 1
        return F.mse_loss(output, target)


def counting():
    n = [0]

    def loss_fn(output, target):
        n[0] += 1
        return F.mse_loss(output, target) * n[0]

    return loss_fn


def of_one(output, target):
    return F.mse_loss(output.squeeze(), target.squeeze()) * (2 if len(output) == 1 else 1)


def of_many(output, target):
    return F.mse_loss(output, target) * (2 if len(output) > 6 else 1)


def of_last(output, target):
    """A mean over rows of three, and of fewer something else."""
    return F.mse_loss(output, target) if len(output) > 2 else F.mse_loss(output, target).sqrt()


@pytest.mark.parametrize(
    ("make_loss", "n_microbatches", "says"),
    [
        (lambda: Running(in_place=True), 3, "before for the same"),
        (lambda: Running(in_place=False), 3, "before for the same"),
        (lambda: Noting(counts_rows=False), 3, "buffer n otherwise"),
        (lambda: Noting(counts_rows=True), 3, ""),
        (counting, 3, "before for the same"),
        (lambda: of_one, 8, "which weigh up to"),
        (lambda: of_one, 9, "which weigh up to"),
        (lambda: of_last, 4, "which weigh up to"),
        (lambda: of_last, 3, ""),
        (lambda: F.smooth_l1_loss, 4, ""),
    ],
)
def test_losses_that_go_by_calls_or_by_rows_get_the_batch(make_loss, n_microbatches, says, caplog):
    """And what a loss keeps is left as calls that are not asked leave it."""
    model, x, made = small()
    y, loss_fn, alone = torch.randn(9, 2, dtype=torch.float64), make_loss(), make_loss()
    runtime = Runtime(*made, loss_fn=loss_fn, n_microbatches=n_microbatches)
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        found = [runtime.step(x, target=y).loss.item() for _ in range(3)]
    assert says in caplog.text
    assert bool(says) == bool(caplog.text)
    output = model(x).detach()
    wanted = [alone(output, y).item() for _ in range(3)]
    assert found == pytest.approx(wanted, rel=1e-12)
    if isinstance(loss_fn, nn.Module):
        torch.testing.assert_close(dict(loss_fn.named_buffers()), dict(alone.named_buffers()))


@pytest.mark.parametrize("left_out", [slice(3), slice(3, 6), slice(6), slice(6, 9)])
def test_a_microbatch_without_labels_that_count_is_no_other_loss(left_out, caplog):
    _, x, made = small()
    labels = torch.tensor([0, 1, 1] * 3)
    labels[left_out] = -100
    runtime = Runtime(*made, loss_fn=nn.CrossEntropyLoss(), n_microbatches=3)
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        result = runtime.step(x, target=labels, return_outputs=True)
    torch.testing.assert_close(float(result.loss), F.cross_entropy(result.outputs, labels).item())
    assert not caplog.text


def test_losses_are_asked_of_all_rows_and_of_each_new_cut(caplog):
    _, x, made = small()
    y = torch.randn(9, 2, dtype=torch.float64)
    runtime = Runtime(*made, loss_fn=of_many)
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        for _ in range(5):
            runtime.step(x[:6], target=y[:6])
        assert not caplog.text
        runtime.step(x, target=y)  # at step 5, at which losses are not asked of but for what is new
    assert "for all together, which weigh up to" in caplog.text


@pytest.mark.parametrize("name", ["unscale_", "step"])
def test_a_scaler_that_the_runtime_was_not_given_is_told_of(name):
    _, x, made = small()
    runtime, scaler = Runtime(*made, loss_fn=F.mse_loss), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    runtime.step(x, target=torch.zeros(9, 2).double())
    with pytest.raises(InputError, match="give it to the runtime"):
        getattr(scaler, name)(optimizer)
    other = nn.Linear(2, 2)
    with pytest.raises(AssertionError):
        getattr(scaler, name)(torch.optim.SGD(other.parameters(), 0.1))


def test_a_target_of_other_rows_is_refused():
    _, x, made = small()
    runtime = Runtime(*made, loss_fn=F.mse_loss)
    with pytest.raises(InputError, match=r"target has 12 rows .* the batch has 9"):
        runtime.step(x, target=torch.zeros(12, 2).double())
    runtime.step(x, target=torch.zeros(()).double().expand(9, 2))


class TwoMeans(nn.Module):
    """Two means over labels, as question answering has them; one by a module that is a layer of its own."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.body, self.criterion = nn.Linear(3, 4), nn.CrossEntropyLoss(ignore_index=0)
        self.reduction = reduction

    def forward(self, x, starts, ends):
        logits = self.body(x)
        end_loss = F.cross_entropy(logits, ends, ignore_index=0, reduction=self.reduction)
        return self.criterion(logits, starts) + end_loss.sum()


def two_means(starts, ends, reduction="mean", example=None, **options):
    """(full batch's loss, ours) in four microbatches; planned for labels as in the ``example``."""
    torch.manual_seed(0)
    model, x = TwoMeans(reduction).double(), torch.randn(8, 3, dtype=torch.float64)
    labels = example or (starts, ends)
    pipe = split_by_layers(model, 2, (x, *labels), n_microbatches=4, **options)
    return model(x, starts, ends).item(), pipe.runtime().step(x, starts, ends).loss.item()


def test_several_means_weigh_together_where_their_counts_agree(caplog):
    starts = torch.tensor([1, 0, 2, 3, 1, 0, 0, 3])
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        wanted, found = two_means(starts, torch.where(starts > 0, 4 - starts, 0))
        assert found == pytest.approx(wanted, rel=1e-12)
        assert not caplog.text
        two_means(starts, torch.tensor([1, 1, 0, 3, 1, 2, 0, 3]), example=(starts, starts))
    assert "counted differently" in caplog.text


class Ahead(Language):
    """Heads that guess further ahead: each has the mean over labels of its own shift."""

    def forward(self, tokens, labels):
        h = torch.tanh(self.mix(self.emb(tokens)))
        total, each = h.new_zeros(()), []
        for shift in (1, 2):
            logits = self.head(h)[:, :-shift]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, shift:].flatten())
            total = total + loss * 0.8**shift
            each.append(loss.detach())
        return total, each


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("left_out", [(0, 1), ([4, 5], 1), (2, slice(90, None))])
def test_means_that_count_other_labels_in_rows_of_the_example_are_those_of_the_batch(caplog, dtype, left_out):
    """In single precision, too, where so few are left out that the difference passes for rounding.

    In any of the first rows, ahead of where the second head's labels begin or at the end of a row.
    """
    torch.manual_seed(0)
    model, tokens = Ahead().to(dtype), torch.randint(11, (7, 100))
    labels = tokens.clone()
    labels[left_out] = -100
    twin = copy.deepcopy(model)
    loss, _ = twin(tokens, labels)
    loss.backward()
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        runtime = split_by_layers(model, 2, (tokens, labels), n_microbatches=3).runtime()
        result = runtime.step(tokens, labels)
    assert not caplog.text
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert worst(grads(twin.named_parameters()), grads(runtime.named_parameters())) < 1e-6


class Balanced(Language):
    """A mean over labels beside what the mean over all rows comes to, as in a mixture of experts."""

    def forward(self, tokens, labels):
        found = super().forward(tokens, labels)
        return found["loss"] + 0.1 * found["logits"].softmax(-1).mean((0, 1)).square().sum()


@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_batches_weigh_by_labels_where_rows_meet_at_the_end(n_microbatches):
    """Each microbatch is a part of one loss there, and each batch still counts its labels."""
    torch.manual_seed(0)
    model = Balanced().double()
    tokens, labels = ragged(9)
    batches = [(tokens[:3], labels[:3]), (tokens[3:6], labels[3:6].fill_(2)), (tokens[6:], labels[6:])]
    plain = copy.deepcopy(model)
    pipe = split_by_layers(model, 2, batches[0], n_microbatches=n_microbatches)
    runtime = pipe.runtime()
    found = runtime.accumulate(batches).loss
    counts = [(own[:, 1:] != -100).sum() for _, own in batches]
    wanted = sum(n * plain(*batch) for n, batch in zip(counts, batches, strict=True)) / sum(counts)
    wanted.backward()
    assert abs(found - wanted.item()) < 1e-12
    assert worst(grads(plain.named_parameters()), grads(runtime.named_parameters())) < 1e-12


def test_batches_are_told_to_weigh_by_rows_where_means_count_differently(caplog):
    """Each batch is one microbatch: none differs within a batch."""
    torch.manual_seed(0)
    model, x = TwoMeans().double(), torch.randn(8, 3, dtype=torch.float64)
    starts, ends = torch.tensor([1, 0, 2, 3, 1, 0, 0, 3]), torch.tensor([1, 1, 1, 3, 1, 0, 0, 0])
    pipe = split_by_layers(model, 2, (x, starts, ends), n_microbatches=1)
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        pipe.runtime().accumulate([(x[:4], starts[:4], starts[:4]), (x[4:], starts[4:], starts[4:])])
        assert not caplog.text
        pipe.runtime().accumulate([(x[:4], starts[:4], ends[:4]), (x[4:], starts[4:], ends[4:])])
    assert "counted differently" in caplog.text


class Masked(Language):
    """A mean over what a mask of its own leaves, which no function of torch counts."""

    def forward(self, tokens, labels):
        loss = super().forward(tokens, labels.clamp(min=0), reduction="none")["loss"]
        mask = (F.pad(labels, (0, 1), value=-100)[:, 1:] != -100).flatten()
        return (loss * mask).sum() / mask.sum()


def test_batches_are_told_to_weigh_by_rows_where_the_models_own_mean_counts(caplog):
    torch.manual_seed(0)
    tokens, labels = ragged(4)
    pipe = split_by_layers(Masked().double(), 2, (tokens, labels), n_microbatches=2)
    runtime = pipe.runtime()
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        runtime.step(tokens, labels)
        assert not caplog.text
        runtime.accumulate([(tokens[:2], labels[:2]), (tokens[2:], labels[2:])])
    assert caplog.text.count("weigh by rows") == 1


class WordsAndRows(nn.Module):
    """A mean over the words that count beside one over rows, as in BERT's pretraining."""

    def __init__(self):
        super().__init__()
        self.body, self.words, self.rows = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 2)

    def forward(self, x, labels, kinds):
        h = torch.tanh(self.body(x))
        of_words = F.cross_entropy(self.words(h).flatten(0, 1), labels.flatten())
        return of_words + 0.5 * F.cross_entropy(self.rows(h[:, 0]), kinds)


@pytest.mark.parametrize("counted", [(2, 2, 2, 2, 2, 2, 2), (3, 1, 2, 2, 0, 1, 2)])
def test_means_over_words_and_over_rows_are_those_of_the_batch(caplog, counted):
    """Also where each row of the example has as many words that count."""
    torch.manual_seed(0)
    labels = torch.full((7, 3), 4).masked_fill(torch.arange(3) >= torch.tensor(counted)[:, None], -100)
    model, x = WordsAndRows().double(), torch.randn(7, 3, 3, dtype=torch.float64)
    kinds, others = torch.randint(2, (7,)), labels.roll(1, 0).index_fill(0, torch.tensor([0, 3]), 1)
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        runtime = autopipe.split(model, 2, (x, labels, kinds), n_microbatches=3).runtime()
        for words in (labels, others):
            twin = copy.deepcopy(model)
            loss = twin(x, words, kinds)
            loss.backward()
            model.zero_grad()
            assert runtime.step(x, words, kinds).loss.item() == pytest.approx(loss.item(), rel=1e-12)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
    assert not caplog.text


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_reductions_by_the_models_own_code_are_those_of_the_batch(caplog, reduction):
    labels = torch.tensor([1, 2, 2, 3, 1, 0, 0, 3])
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        wanted, found = two_means(labels, labels, reduction=reduction)
        assert found == pytest.approx(wanted, rel=1e-12)
        assert "cannot be weighed" not in caplog.text
        two_means(labels, labels, reduction=reduction, dynamic=False)
    assert "own code reduces it" in caplog.text


class Takes(nn.Module):
    """A model with an argument of the name that step() has for the loss function's."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x, target=None):
        out = torch.tanh(self.lin(x))
        return out if target is None else F.mse_loss(out, target)


def test_target_goes_to_the_loss_or_to_the_model():
    torch.manual_seed(0)
    model, x, y = Takes().double(), torch.randn(4, 3).double(), torch.randn(4, 3).double()
    made = make(model, (x, y), {}, n_stages=2)
    assert Runtime(*made).step(x, target=y).loss.item() == pytest.approx(model(x, y).item())
    both = Runtime(*made, loss_fn=lambda out, target: out * target["scale"])
    scaled = both.step(x, y, target={"scale": 3.0}).loss.item()
    assert scaled == pytest.approx(3 * model(x, y).item())
    made = make(small()[0], (x,), {}, n_stages=2)
    with pytest.raises(InputError, match="nothing takes it"):
        Runtime(*made).step(x, target=y)


class Texts(nn.Module):
    """Takes a list of texts, each as long as it is."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, texts):
        return self.head(torch.stack([self.table(text).mean(0) for text in texts]))


def test_inputs_of_one_microbatch_need_not_have_as_many_rows():
    torch.manual_seed(0)
    batches, target = (
        [[torch.arange(n) for n in ns] for ns in ((2, 3, 2), (4, 3, 5))],
        torch.tensor([0, 1, 2]),
    )
    model = Texts()
    plain = copy.deepcopy(model)
    pipe = split_by_layers(model, 2, (batches[0],), n_microbatches=1)
    runtime = pipe.runtime(loss_fn=F.cross_entropy)
    for batch in batches:
        loss = F.cross_entropy(plain(batch), target)
        loss.backward()
        torch.testing.assert_close(runtime.step(batch, target=target).loss, loss.detach())
    for (name, own), theirs in zip(runtime.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, msg=name)
    with pytest.raises(InputError, match="texts holds 3 entries, and only tensors are cut into rows"):
        runtime.step(batches[1], target=target, n_microbatches=2)
    both = F.cross_entropy(plain([*batches[0], *batches[1]]), target.repeat(2)).item()
    found = runtime.accumulate([{"texts": batch, "target": target} for batch in batches])
    assert found.loss == pytest.approx(both)


@pytest.mark.parametrize("ignored", [0, 2, -100])
def test_the_remedy_names_the_label_that_does_not_count(ignored, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    made = make(model, (torch.randn(8, 3, dtype=torch.float64),), {}, n_stages=2, n_microbatches=4)

    def loss_fn(output, target):
        return F.cross_entropy(output, target, ignore_index=ignored)

    x, target = torch.randn(8, 3, dtype=torch.float64), torch.tensor([1, 1, 1, ignored, 0, 1, 2, 1])
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        Runtime(*made, loss_fn=loss_fn).step(x, target=target)
    assert f"(target != {ignored}).sum()" in caplog.text


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_losses_of_one_place_weigh_as_numbers_do(shape, is_counted, has_gradient):
    losses = [torch.full(shape, value, requires_grad=has_gradient) for value in (2.0, 6.0)]
    weights = [torch.tensor(w) for w in (0.75, 0.25)] if is_counted else [0.75, 0.25]
    assert weighted(losses, weights).item() == 3.0
