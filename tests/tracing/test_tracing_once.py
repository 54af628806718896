"""One recording serves both modes where sizes are fixed, unless the model's own code can tell them apart.

What the modes do otherwise here shows in no data like the example's, only in large ones.
"""

import contextlib
import copy
import gc
import itertools
import operator
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from autopipe.errors import AutopipeError, CaptureError
from autopipe.tracing import capture
from autopipe.tracing.calls.likeness import is_same, may_be_same, prune
from autopipe.tracing.record.recorder import Recorder
from autopipe.tracing.referee.referee import Referee
from autopipe.tracing.runs.runs import Runs
from autopipe.tracing.runs.session import Session
from autopipe.tracing.state.garbage import seldom_searched
from autopipe.tracing.state.quick_check import Glance
from autopipe.tracing.state.state import Snapshot, preserved


class Net(nn.Module):
    """Four layers behind a limit that ``is_training`` decides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.drop = nn.Dropout(0.2)

    def is_training(self, x):
        return True

    def limited(self, x):
        return x.clamp(max=20.0 if self.is_training(x) else 40.0)

    def forward(self, x):
        x = self.limited(x)
        for layer in self.layers:
            x = self.drop(layer(x))
        return x


class Moded(Net):
    """Does something else in training."""

    def forward(self, x):
        return super().forward(x * 2 if self.training else x)


class Masked(Net):
    """Asks its inputs, not its mode."""

    def forward(self, x):
        return super().forward(x if (x > -9).all() else x.clamp(min=-9))


class MaskedInSteps(Net):
    """Asks twice: where either says no, it does the same."""

    def forward(self, x):
        return super().forward(x if (x > -9).all() and (x < 9).all() else x.clamp(-9, 9))


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(super().forward(x))


class Teller(nn.Module):
    """A layer that lets others know its mode."""

    def __init__(self, tell):
        super().__init__()
        self.weight, self.tell, self.seen = nn.Parameter(torch.ones(4)), tell, [True]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.tell(self, x * self.weight)


class Told(Net):
    """Has the mode from a layer."""

    def __init__(self, tell, hear):
        super().__init__()
        self.ahead, self.teller, self.hear = nn.Identity(), Teller(tell), hear

    def limited(self, x):
        x = self.ahead(x)
        return x.clamp(max=20.0 if self.hear(self.teller, self.teller(x)) else 40.0)


class Switched(Net):
    """Keeps its mode under a name of its own."""

    def __init__(self):
        super().__init__()
        self.is_on = True

    def train(self, mode=True):
        self.is_on = mode
        return super().train(mode)

    def is_training(self, x):
        return self.is_on


class Computed(Net):
    """Computes its mode."""

    @property
    def training(self):
        return vars(self).get("is_on", True)

    @training.setter
    def training(self, mode):
        vars(self)["is_on"] = mode

    def is_training(self, x):
        return self.training


class Borrowing(Net):
    """Sets the mode of a layer for a while."""

    def forward(self, x):
        was = self.__dict__["_modules"]["drop"].training
        self.drop.eval()
        x = super().forward(x)
        self.drop.train(was)
        return x


class Slicing(Net):
    """Makes a list of some of its layers."""

    def forward(self, x):
        for layer in self.layers[:3]:
            x = self.drop(layer(self.limited(x)))
        return x


def by(ask):
    return type("By", (Net,), {"is_training": ask})


def asked_of(module):
    return module.training


ASKED = {
    "itself": lambda self, x: self.training,
    "by name": lambda self, x: getattr(self, "training"),  # noqa: B009
    "in its attributes": lambda self, x: vars(self)["training"],
    "by an operator": lambda self, x: operator.attrgetter("training")(self),
    "of a layer": lambda self, x: self.layers[1].training,
    "of any": lambda self, x: any(m.training for m in self.modules()),
    "of a copy": lambda self, x: copy.copy(self).training,
    "elsewhere": lambda self, x: asked_of(self),
}
TOLD = {
    "a value": (lambda self, x: (x, self.training), lambda teller, y: y[1]),
    "a number": (lambda self, x: (x, 1.5 + self.training), lambda teller, y: y[1] > 2),
    "a size": (lambda self, x: x if self.training else x[:2], lambda teller, y: y.shape[0] > 2),
    "a dtype": (lambda self, x: x if self.training else x.double(), lambda teller, y: y.dtype is torch.float),
    "a gradient": (lambda self, x: x if self.training else x.detach(), lambda teller, y: y.requires_grad),
    "strides": (lambda self, x: x if self.training else x.mT.contiguous().mT, lambda _, y: y.is_contiguous()),
    "a structure": (lambda self, x: x if self.training else [x], lambda teller, y: not isinstance(y, list)),
    "an attribute": (
        lambda self, x: (setattr(self, "mode", self.training), x)[1],
        lambda teller, y: teller.mode,
    ),
    "a list": (lambda self, x: (operator.setitem(self.seen, 0, self.training), x)[1], lambda t, y: t.seen[0]),
}


def n_recordings(model, monkeypatch):
    """How often the model is recorded."""
    counted, original = [], Runs.run_recorded

    def run_recorded(self, attempt, training, *args, **kwargs):
        counted.append(training)
        return original(self, attempt, training, *args, **kwargs)

    monkeypatch.setattr(Runs, "run_recorded", run_recorded)
    return capture(model, (torch.randn(3, 4),), dynamic=False), counted


def check(found, model):
    for training in (False, True):
        model.train(training)
        for scale in (1, 100):
            x = scale * torch.randn(3, 4)
            torch.manual_seed(0)
            expected = model(x)
            torch.manual_seed(0)
            torch.testing.assert_close(found(x), expected)


@pytest.mark.parametrize(("cls", "n_draws"), [(Net, 4), (Slicing, 3)])
def test_code_that_asks_no_mode_is_recorded_once(cls, n_draws, monkeypatch):
    model = cls()
    found, recorded = n_recordings(model, monkeypatch)
    assert recorded == [True]
    assert found.graphs[True] is found.graphs[False]
    assert sum(op.is_random for op in found.ops.ops) == n_draws
    check(found, model)


@pytest.mark.parametrize(
    ("cls", "dynamic", "n_asked"), [(Net, False, 2), (Net, "auto", 2), (Moded, "auto", 4)]
)
def test_gradients_of_a_form_for_both_modes_are_compared_once(cls, dynamic, n_asked, monkeypatch):
    asked, original = [], torch.autograd.grad

    def grad(outputs, *args, **kwargs):
        asked.append(outputs)
        return original(outputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    capture(cls(), (torch.randn(3, 4),), dynamic=dynamic)
    assert len(asked) == n_asked


def test_what_takes_gradients_in_training_is_looked_at_where_they_are_not_compared(monkeypatch):
    graph = Referee._run_graph

    def cut_off(referee, training, *given):
        given, spec = graph(referee, training, *given)
        return ([v.detach() for v in given] if training else given), spec

    monkeypatch.setattr(Referee, "_run_graph", cut_off)
    with pytest.raises(CaptureError, match=r"in training.* other outputs take gradients"):
        capture(Net(), (torch.randn(3, 4),), dynamic=False)


def test_each_outcome_is_recorded_once(monkeypatch):
    model = Masked()
    found, recorded = n_recordings(model, monkeypatch)
    assert recorded == [True, True]
    check(found, model)


def test_outcomes_that_lead_to_one_form_are_looked_at_in_evaluation_once(monkeypatch):
    asked = []
    is_for_both = Runs.is_for_both

    def noting(runs, attempt, recording, sharing=()):
        asked.append(recording)
        return is_for_both(runs, attempt, recording, sharing)

    monkeypatch.setattr(Runs, "is_for_both", noting)
    found = capture(MaskedInSteps(), (torch.rand(2, 4),), dynamic=False)
    assert len(asked) == 1  # the first form is looked at by who holds it against the model
    assert len(found.forms[True]) == 2
    assert found.forms[True] == found.forms[False]


def test_what_is_held_against_the_model_in_evaluation_is_not_run_there_before(monkeypatch):
    asked, is_for_both = [], Runs.is_for_both
    monkeypatch.setattr(Runs, "is_for_both", lambda *given: asked.append(0) or is_for_both(*given))
    model = Net()
    found = capture(model, (torch.randn(3, 4),), dynamic=False)
    assert found.graphs[True] is found.graphs[False]
    assert not asked
    check(found, model)


@pytest.mark.parametrize("tell", [pytest.param(tell, id=name) for name, (tell, _) in TOLD.items()])
def test_what_is_not_held_against_the_model_is_run_in_evaluation_on_the_example(tell, monkeypatch):
    monkeypatch.setattr(Referee, "fault", lambda self: None)
    recorded = n_recordings(Told(tell, lambda teller, y: True), monkeypatch)[1]
    assert False in recorded


@pytest.mark.parametrize("name", ["itself", "in its attributes", "elsewhere", "by a hook"])
def test_what_code_that_stays_whole_does_in_evaluation_on_the_example_alone_is_seen(name, monkeypatch):
    torch.manual_seed(5)
    example = float(torch.randn(3, 4)[0, 0])
    is_training = ASKED.get(name, ASKED["itself"])

    def tell(self, x):
        return [x] if not is_training(self, x) and float(x.detach()[0, 0]) == example else x

    model = Told(tell, lambda teller, y: not isinstance(y, list))
    if name == "by a hook":
        model.teller = Teller(lambda self, x: x)
        model.teller.register_forward_hook(lambda module, given, result: tell(module, result))
    torch.manual_seed(5)
    assert n_recordings(model, monkeypatch)[1] == [True, False, True]


def read(x):
    return float(x.detach()[0, 0])


def tried(x):
    try:
        return read(x)
    except RuntimeError:
        return None


BESIDE = {
    "errors that it goes on after": tried,
    "a device": lambda x: None if x.device.type == "meta" else read(x),
    "a flag of tensors": lambda x: None if x.is_meta else read(x),
    "gradients": lambda x: read(x) if torch.is_grad_enabled() else None,
    "where gradients begin": lambda x: None if (x * torch.ones((), requires_grad=True)).is_leaf else read(x),
}


@pytest.mark.parametrize("name", [*BESIDE, "one of its kind that does not"])
def test_what_can_tell_that_it_runs_without_data_is_run_again_on_the_example(name, monkeypatch):
    torch.manual_seed(5)
    example = read(torch.randn(3, 4))
    first = BESIDE.get(name, read)

    def tell(self, x):
        return [x] if not self.training and first(x) == example else x

    model = Told(tell, lambda teller, y: not isinstance(y, list))
    if name not in BESIDE:
        model.ahead = Teller(lambda self, x: x.clamp(max=20.0 if self.training else 30.0))
    torch.manual_seed(5)
    assert n_recordings(model, monkeypatch)[1] == [True, False, True]


@pytest.mark.parametrize("is_asked", [lambda: True, lambda: torch.is_grad_enabled()], ids=["it", "gradients"])
def test_what_names_the_mode_and_runs_without_data_is_not_run_again_on_the_example(is_asked, monkeypatch):
    asked, is_for_both = [], Runs.is_for_both
    monkeypatch.setattr(Runs, "is_for_both", lambda *given: asked.append(0) or is_for_both(*given))

    def tell(self, x):
        return nn.functional.dropout(x, 0.2, self.training and is_asked())

    model = Told(tell, lambda teller, y: True)
    assert n_recordings(model, monkeypatch)[1] == [True]
    assert not asked


def test_what_takes_other_ways_where_nobody_looks_on_is_run_again_on_the_example(monkeypatch):
    asked, is_for_both = [], Runs.is_for_both
    monkeypatch.setattr(Runs, "is_for_both", lambda *given: asked.append(0) or is_for_both(*given))
    model = Told(lambda self, x: self.attend(x * int(self.training or 1)), lambda teller, y: True)
    model.teller.attend = nn.TransformerEncoderLayer(4, 2, 8)
    assert n_recordings(model, monkeypatch)[1] == [True]
    assert asked


def test_numbers_that_follow_from_data_are_looked_at_on_the_example(monkeypatch):
    def tell(self, x):
        return x, float(x.detach().sum())

    recorded = n_recordings(Told(tell, lambda teller, y: True), monkeypatch)[1]
    assert recorded == [True]


class MaskedInside(Net):
    """A layer is given a limit for some inputs alone."""

    def __init__(self):
        super().__init__()
        self.clamp = Clamped()

    def forward(self, x):
        return super().forward(self.clamp(x, None if (x > -9).all() else x.min()))


class Clamped(nn.Module):
    def forward(self, x, least):
        return x if least is None else x.clamp(min=least)


@pytest.mark.parametrize(("cls", "n_alike"), [(Masked, 1), (MaskedInSteps, 3), (MaskedInside, 0)])
def test_what_modules_are_given_tells_forms_apart(cls, n_alike, monkeypatch):
    recorded = []
    are_for_both = Session.are_for_both

    def noting(session, found):
        recorded.extend(found)
        return are_for_both(session, found)

    monkeypatch.setattr(Session, "are_for_both", noting)
    capture(cls(), (torch.rand(2, 4),), dynamic=False)
    pairs = [*itertools.combinations(recorded, 2)]
    assert sum(may_be_same(a, b) for a, b in pairs) == n_alike
    assert all(may_be_same(a, b) for a, b in pairs if is_same(prune(a), prune(b)))


@pytest.mark.parametrize("before", [0, 700, 1 << 20])
def test_python_searches_for_garbage_no_more_often_than_it_did(before, monkeypatch):
    seen = []
    run_recorded = Runs.run_recorded

    def looking(*args, **kwargs):
        seen.append(gc.get_threshold())
        return run_recorded(*args, **kwargs)

    monkeypatch.setattr(Runs, "run_recorded", looking)
    found = gc.get_threshold()
    gc.set_threshold(before, *found[1:])
    try:
        capture(Net(), (torch.rand(2, 4),), dynamic=False)
        assert gc.get_threshold() == (before, *found[1:])
    finally:
        gc.set_threshold(*found)
    ((during, *older),) = seen
    assert during > before if before == 700 else during == before
    assert tuple(older) == found[1:]


@pytest.fixture
def searched():
    found = gc.get_threshold()
    gc.set_threshold(700, *found[1:])
    yield (700, *found[1:])
    gc.set_threshold(*found)


def test_recordings_of_two_threads_leave_searches_as_they_were(searched):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(seldom_searched())
    second.enter_context(seldom_searched())
    first.close()
    assert gc.get_threshold()[0] > searched[0]
    second.close()
    assert gc.get_threshold() == searched


def test_searches_that_are_set_meanwhile_stay(searched):
    with seldom_searched():
        gc.set_threshold(900, *searched[1:])
    assert gc.get_threshold() == (900, *searched[1:])


def test_statistics_are_written_in_training_alone(monkeypatch):
    model = Normed()
    found, recorded = n_recordings(model, monkeypatch)
    assert recorded == [True]
    assert [op.mutated_buffers for op in found.ops.ops if op.mutated_buffers]
    check(found, model)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_code_that_asks_for_its_mode_is_recorded_in_both(ask):
    model = by(ask)()
    check(capture(model, (torch.randn(3, 4),), dynamic=False), model)


def test_a_function_within_one_beside_the_model_may_spell_the_mode(monkeypatch):
    beside = types.ModuleType("beside")
    code = """
def ask(module):
    def asked():
        return vars(module)["training"]
    return asked()
"""
    exec(code, vars(beside))
    monkeypatch.setitem(sys.modules, "beside", beside)
    cls = by(lambda self, x: beside.ask(self))
    cls.__module__ = "beside"
    model = cls()
    check(capture(model, (torch.randn(3, 4),), dynamic=False), model)


@pytest.mark.parametrize(("tell", "hear"), TOLD.values(), ids=TOLD)
def test_code_that_a_layer_tells_its_mode_is_recorded_in_both(tell, hear):
    model = Told(tell, hear)
    check(capture(model, (torch.randn(3, 4),), dynamic=False), model)


@pytest.mark.parametrize("cls", [Switched, Computed, Borrowing])
def test_modes_of_a_models_own_are_recorded_in_both(cls):
    model = cls()
    check(capture(model, (torch.randn(3, 4),), dynamic=False), model)


def test_hooks_that_ask_for_the_mode_are_recorded_in_both():
    model = Net()
    model.register_forward_pre_hook(lambda m, args: (args[0].clamp(max=15.0 if m.training else 10.0),))
    check(capture(model, (torch.randn(3, 4),), dynamic=False), model)


def test_what_a_layer_does_in_evaluation_alone_is_recorded():
    def counts(self, x):
        if not self.training:
            self.count.add_(0)
        return x

    def draws(self, x):
        return x if self.training else x + 0 * torch.randn_like(x)

    for tell, of in ((counts, "mutated_buffers"), (draws, "is_random")):
        model = Told(tell, lambda teller, y: True)
        found = capture(model, (torch.randn(3, 4),), dynamic=False)
        assert [op for op in found.ops.ops if op.target == "teller" and getattr(op, of)]
        check(found, model)


def test_memory_that_is_shared_in_evaluation_alone_is_written_as_the_model_does():
    class Adding(Net):
        def forward(self, x):
            x = self.layers[0](x)
            y = self.drop(x)
            y += 1
            return super().forward(x * y)

    model = Adding()
    check(capture(model, (torch.randn(3, 4),), dynamic=False), model)


class Seeded(Net):
    def forward(self, x):
        return super().forward(x * (torch.initial_seed() % 7))


def test_recordings_made_again_start_from_the_seed_that_was_found():
    torch.manual_seed(3)
    model = Seeded()
    x = torch.randn(3, 4)
    with contextlib.suppress(AutopipeError):  # comparisons set other seeds
        found = capture(model, (x,), dynamic=False)
        torch.manual_seed(4)
        expected = model(x)
        torch.manual_seed(4)
        torch.testing.assert_close(found(x), expected)


class Settling(nn.Module):
    """Settles on a kind of loss in its first call, as classifiers of transformers do in their config."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(kind=None)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind = "one label"
        return self.head(self.norm(x))


def test_what_is_settled_in_the_first_call_takes_no_run_twice(monkeypatch):
    runs, run = [], Runs.run
    monkeypatch.setattr(
        Runs, "run", lambda self, training, *a: runs.append(training) or run(self, training, *a)
    )
    capture(Settling(), (torch.randn(3, 4),), dynamic=False)
    # a second call, two on other data and three with other weights; batch norm is as found for the former
    # what evaluation leaves is what training leaves: a second call alone is made there
    assert (runs.count(True), runs.count(False)) == (7, 1)


def test_what_a_run_leaves_is_looked_at_once(monkeypatch):
    looks, look = [], Glance.is_kept_but_tensors
    monkeypatch.setattr(Glance, "is_kept_but_tensors", lambda self: looks.append(0) or look(self))
    monkeypatch.setattr(Referee, "fault", lambda self: setattr(self, "did_as_recorded", True))
    capture(Net(), (torch.randn(3, 4),), dynamic=False)
    # before the first run, behind it, and when all is put back
    assert len(looks) == 3


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.n_calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.n_calls += 1
        return self.layer(x)


def test_what_other_runs_leave_is_put_back():
    model = Counting()
    with preserved(model) as snapshot:
        runs = Runs(model, (torch.randn(3, 4),), {}, snapshot, sizes_vary=False)
        runs.start(True)
        assert runs.is_as_begun()
        runs.run(True)
        runs.start(True)
        assert model.n_calls == 0
        assert runs.is_as_begun()
        runs.start(False)
        runs.run(False)
        runs.start(True)
        assert (model.n_calls, model.training) == (0, True)


def test_statistics_alone_are_put_back_without_all_else(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    restored, restore = [], Snapshot.restore
    monkeypatch.setattr(Snapshot, "restore", lambda self: restored.append(0) or restore(self))
    before = copy.deepcopy(model.state_dict())
    with preserved(model) as snapshot:
        snapshot.start(True)
        model(torch.randn(3, 4))
        assert model[1].num_batches_tracked == 1
        snapshot.start(False)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        snapshot.start(True)
        model(torch.randn(3, 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not restored


def test_a_capture_lets_go_of_what_it_has_noted_and_copied_at_its_end(monkeypatch):
    """Without a search for what holds one another: copies of buffers lie on the model's device."""
    ended, end = [], Recorder.end

    def noting(recorder):
        seen = [value for value, _ in recorder.ledger.refs.values() if isinstance(value, torch.Tensor)]
        ended.extend(weakref.ref(value) for value in seen if not isinstance(value, nn.Parameter))
        end(recorder)

    monkeypatch.setattr(Recorder, "end", noting)

    def held():
        return {id(o) for o in gc.get_objects() if type(o) in (Snapshot, Runs)}

    gc.collect()
    gc.disable()
    try:
        before = held()
        found = capture(MaskedInSteps(), (torch.rand(2, 4),), dynamic=False)
        assert held() <= before
        assert ended
        assert not any(seen() is not None for seen in ended)
    finally:
        gc.enable()
    assert len(found.forms[True]) == 2
