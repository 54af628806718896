"""Between runs everything is put back that a run changed, though only a glance tells whether it did."""

import collections
import contextvars
import dis
import random
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopipe.tracing import preserved
from autopipe.tracing.code.leaves import eager
from autopipe.tracing.patches import memos
from autopipe.tracing.state import loads, quick_check
from autopipe.tracing.state.quick_check import are_same
from autopipe.tracing.state.reach import reached
from autopipe.tracing.state.state import _Held, generators, seed

COUNTS = {"calls": 0}
NUMBER = 0
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def closure():
    cell = 0

    def count():
        nonlocal cell
        cell += 1
        return cell

    return count, lambda: cell


class Slotted:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


class Slotless:
    pass


class Changing(nn.Module):
    """Changes something of each kind that a forward can change."""

    shared = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.kept = []
        self.register_buffer("seen", torch.zeros(2))
        self.number, self.slotted, self.array = 0, Slotted(), np.zeros(3)
        self.filled, self.empty, self.marks = {"a": 1}, {}, {1}
        self.ordered, self.queue = collections.OrderedDict(), collections.deque([1])
        self.count, self.counted = closure()

    def forward(self, x):
        return self.layer(x)


def replaced_global(model):
    global NUMBER
    NUMBER = 1 << 20


CHANGES = {
    "attribute": lambda m: setattr(m, "number", 1),
    "attribute of a layer": lambda m: m.layer.kept.append(1),
    "value of a dict": lambda m: m.filled.update(a=2),
    "key of a dict": lambda m: m.filled.update(b=m.filled.pop("a")),
    "what was empty": lambda m: m.empty.update(a=1),
    "set": lambda m: m.marks.add(2),
    "ordered dict": lambda m: m.ordered.update(a=1),
    "deque": lambda m: m.queue.append(2),
    "array": lambda m: m.array.fill(1),
    "slot": lambda m: setattr(m.slotted, "number", 1),
    "closure": lambda m: m.count(),
    "class": lambda m: setattr(type(m), "shared", 1),
    "global": replaced_global,
    "dict of the file": lambda m: COUNTS.update(calls=1),
    "variable": lambda m: VARIABLE.set(1),
    "buffer": lambda m: m.seen.add_(1),
    "weight, behind torch's back": lambda m: m.layer.weight.data.view(-1)[:1].mul_(2),
    "weight that is no number": lambda m: m.layer.bias.data.fill_(float("nan")),
    "module": lambda m: setattr(m, "layer", nn.Linear(3, 3)),
    "hook": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "mode of a layer": lambda m: m.layer.train(not m.layer.training),
    "mode": lambda m: m.train(not m.training),
    "nothing": lambda m: None,
}


Changing.uses = lambda self: (COUNTS, NUMBER, VARIABLE, replaced_global)


def outline(model):
    """All of it, in values and identities."""
    held = [
        (path, name, id(value), value.copy() if isinstance(value, (dict, list, set, np.ndarray)) else None)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    ]
    tensors = {n: t.tolist() for n, t in model.state_dict().items()}
    beside = model.slotted.number, model.counted(), [*model.queue], Changing.shared, NUMBER, {**COUNTS}
    return repr((held, tensors, beside, VARIABLE.get()))


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_starts_from_the_same_state_whatever_the_one_before_did(name, given, counts, monkeypatch):
    if not counts:
        monkeypatch.setattr(quick_check, "dict_version", None)
    model = Changing().train(given)
    before = outline(model)
    with preserved(model) as snapshot:
        starts = {}
        for training in (True, False, False, True, True, False):
            snapshot.start(training)
            assert all(m.training is training for m in model.modules())
            assert starts.setdefault(training, outline(model)) == outline(model)
            assert snapshot.is_unchanged
            CHANGES[name](model)
            assert name == "mode" or snapshot.is_unchanged == (name == "nothing")
    assert outline(model) == before


def test_what_dicts_hold_is_looked_at_again_where_one_has_changed_alone():
    model = Changing()
    with preserved(model) as snapshot:
        snapshot.start(model.training)
        held = snapshot.glance.seen().in_dicts
        assert snapshot.glance.seen().in_dicts is held
        model.number = 2
        assert snapshot.glance.seen().in_dicts is not held
        assert not snapshot.is_unchanged
        model.number = 0
        assert snapshot.is_unchanged


def test_what_classes_hold_is_looked_at_again_where_one_has_changed_alone():
    class Counted:
        calls, other = 0, 1

    glance = quick_check.Glance([], [(vars(Counted), ("calls", "other"), None)], [], [])
    before = glance.seen()
    assert before.in_dicts == (0, 1)
    assert glance.seen().in_dicts is before.in_dicts
    Counted.calls += 1
    assert glance.seen().in_dicts == (1, 1)
    assert not glance.put(glance.seen(), before)
    Counted.calls = 0
    assert glance.seen().is_same(before)


def test_a_stance_of_the_compiler_is_put_back():
    frames = pytest.importorskip("torch._dynamo.eval_frame")
    with torch.compiler.set_stance("fail_on_recompile"):
        before = frames._stance
        with eager():
            assert frames._stance.stance == "force_eager"
        assert frames._stance is before


def test_modes_are_told_by_the_rows_that_runs_start_from():
    model = Changing()
    with preserved(model) as snapshot:
        for training in (True, False) * 4 + (True,):
            snapshot.start(training)
            assert snapshot.glance.seen().in_dicts is snapshot.begun[training].in_dicts
        assert len(snapshot.glance._ways) == 2
        assert model.training
        assert model.layer.training
        vars(model.layer)["training"] = False
        snapshot.start(True)
        assert model.layer.training


def test_what_has_changed_since_a_look_is_seen_by_the_next():
    held, other = {"a": 1, "b": 2}, object()
    glance = quick_check.Glance([held], [], [], [])
    start = glance.seen()
    held["a"] = 3
    looked = glance.seen()
    held["b"] = other
    assert glance.put(looked, start)
    assert held == {"a": 1, "b": other}
    assert not glance.seen().is_same(start)


def test_a_tensor_that_has_moved_is_seen_where_another_is_looked_at_from_then_on():
    moved, more = torch.arange(8.0), torch.ones(3)
    glance = quick_check.Glance([], [], [], [(moved, moved.clone())])
    kept_alive = moved.data
    moved.data = moved.data + 1
    glance.include(more, more.clone())
    assert [tensor is moved for tensor, _ in glance.written()] == [True]
    assert not glance.is_kept()
    moved.data = kept_alive
    assert glance.is_kept()
    more.add_(1)
    assert [tensor is more for tensor, _ in glance.written()] == [True]


def test_whoever_looks_at_a_run_is_told_nothing_of_what_starts_it():
    asked = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    model = Changing()
    with preserved(model) as snapshot, Watching(), Watching():
        snapshot.start(model.training)
        del asked[:]
        model.layer.weight.data.mul_(2)
        n_asked = len(asked)
        snapshot.start(model.training)
        assert not {torch.equal, torch.Tensor.copy_, torch.Tensor.data_ptr} & {*asked[n_asked:]}
        assert n_asked > 0


def test_generators_are_seeded_anew_where_something_has_drawn_alone(monkeypatch):
    seeds, plain = [], random.seed
    monkeypatch.setattr(random, "seed", lambda number: seeds.append(number) or plain(number))
    device, draws = torch.device("cpu"), (random.random, np.random.rand, lambda: random.gauss(0, 1))
    seed(device)
    first = [draw() for draw in draws]
    del seeds[:]
    for _ in range(3):
        seed(device)
    assert seeds == [0]
    for draw in draws:
        seed(device)
        draw()
    seed(device)
    assert len(seeds) == 4
    assert [draw() for draw in draws] == first


def test_what_files_hold_is_looked_at_again_where_one_has_changed_alone():
    kept, changing = {"a": 1, "b": 2}, {"a": 3}
    glance = quick_check.Glance([[0]], [(kept, ("a", "b"), None), (changing, ("a",), None)], [], [])
    before, other = glance.seen(), object()
    assert before.in_dicts == (1, 2, 3)
    changing["a"] = other
    assert glance.seen().in_dicts == (1, 2, other)
    kept["b"] = other
    assert glance.seen().in_dicts == (1, other, other)
    kept["b"], changing["a"] = 2, 3
    assert glance.seen().is_same(before)
    glance.know(changing, frozenset({"a"}))
    changing["a"] = other
    assert glance.seen().in_dicts == (1, 2, other)


@pytest.mark.parametrize("name", ["number", "unknown"])
def test_what_a_run_left_is_gone_by_the_next_one(name):
    model = Changing()
    with preserved(model) as snapshot:
        snapshot.start(model.training)
        left = Slotless()
        setattr(model, name, left)
        gone = weakref.ref(left)
        del left
        assert not snapshot.is_unchanged
        snapshot.start(model.training)
        assert gone() is None


class Empty(dict):
    """Is false whatever it holds."""

    def __bool__(self):
        return False


def test_what_holds_something_and_is_false_is_put_back_and_named():
    held = Empty(number=1)
    before = _Held({"held": held})
    held["number"] = 2
    assert before.differing({"held": held}) == ["held"]
    before.restore({"held": held})
    assert dict.items(held) == {"number": 1}.items()


def test_a_weight_that_is_no_number_is_no_change():
    model = Changing()
    model.layer.bias.data.fill_(float("nan"))
    with preserved(model) as snapshot:
        snapshot.start(False)
        model.layer.weight.data.mul_(2)
        snapshot.start(False)
        kept = model.layer.weight.detach().clone()
        snapshot.start(False)
        assert torch.equal(model.layer.weight, kept)


def everything(path):
    return True


def test_what_was_reached_once_is_looked_for_again_where_there_may_be_more():
    model = Changing()
    found = reached(model, everything)
    assert found.is_still(everything)
    assert not found.is_still(lambda path: path != "")
    for owner, name in ((sys.modules[__name__], "ADDED"), (Changing, "added")):
        setattr(owner, name, {})
        try:
            assert not found.is_still(everything)
        finally:
            delattr(owner, name)
    assert found.is_still(everything)
    model.slotted.number = {"a": 1}
    assert not found.is_still(everything)


MANY = "\n".join(["def many(x):", *(f"    x.a{i}" for i in range(700)), "    return x.last()"])


GLOBALS = "\n".join(
    [*(f"g{i} = {i}" for i in range(300)), "def sums(x):", *(f"    x.g{i} + g{i}" for i in range(300))]
)


def test_the_names_that_code_loads_are_those_that_dis_tells():
    space = {}
    exec(MANY, space)
    exec(GLOBALS, space)
    codes = [
        f.__code__
        for f in (space["many"], space["sums"], *vars(nn.Module).values())
        if isinstance(f, types.FunctionType)
    ]
    assert len(codes) > 20
    for code in codes:
        told = [*dis.get_instructions(code)]
        of_objects = [i.argval for i in told if i.opname in ("LOAD_ATTR", "LOAD_METHOD")]
        of_files = [i.argval for i in told if i.opname.endswith("_GLOBAL") or i.opname == "IMPORT_NAME"]
        assert [*loads.attributes_loaded(code)] == of_objects
        assert [*loads.globals_loaded(code)] == of_files


def test_cached_functions_are_found_where_names_were_added():
    import functools

    space = types.ModuleType("made_for_a_test")
    sys.modules["made_for_a_test"] = space
    try:
        assert not [n for held, n, _ in memos._SPACES.found() if held is vars(space)]
        space.kept = functools.lru_cache(lambda: 1)
        assert [n for held, n, _ in memos._SPACES.found() if held is vars(space)] == ["kept"]
        other = sys.modules["made_for_a_test"] = types.ModuleType("made_for_a_test")
        other.more = space.kept
        assert [n for held, n, _ in memos._SPACES.found() if held in (vars(space), vars(other))] == ["more"]
    finally:
        del sys.modules["made_for_a_test"]


def _in_place(tensor):
    tensor.data.add_(1)


def _by_numpy(tensor):
    tensor.detach().numpy()[0] = 7


def _laid_otherwise(tensor):
    tensor.data = tensor.data.T


def _elsewhere(tensor):
    tensor.data = tensor.data + 1


def _larger(tensor):
    tensor.data = torch.ones(5, 3)


def _as_another_type(tensor):
    tensor.data = tensor.data.abs().to(torch.int8)


@pytest.mark.parametrize(
    "write", [_in_place, _by_numpy, _laid_otherwise, _elsewhere, _larger, _as_another_type]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("is_dense", [True, False])
def test_what_a_tensor_holds_is_seen_however_it_is_written(write, dtype, is_dense):
    if write is _by_numpy and dtype is torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    module = nn.Module()
    module.register_buffer("seen", torch.arange(9).view(3, 3).to(dtype))
    module.seen.data = module.seen.data if is_dense else module.seen.data.T
    before = module.seen.clone()
    with preserved(module) as snapshot:
        assert snapshot.is_unchanged
        write(module.seen)
        assert not snapshot.is_unchanged
        snapshot.start(training=True)
        assert torch.equal(module.seen, before)
        assert module.seen.dtype is dtype
        assert snapshot.is_unchanged


def test_a_tensor_that_holds_no_number_is_as_it_was():
    module = nn.Module()
    module.register_buffer("seen", torch.tensor([float("nan"), 1.0]))
    with preserved(module) as snapshot:
        assert snapshot.is_unchanged
        module.seen.data.fill_(1)
        assert not snapshot.is_unchanged


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def test_nothing_is_compiled_within_a_context_from_when_it_is_entered():
    runs = []

    def backend(module, _):
        return lambda *args: runs.append(module) or module.forward(*args)

    inner, x = Doubled(), torch.ones(3, 2)
    model = nn.Sequential(nn.Sequential(inner), inner)
    wrapped = nn.Sequential(nn.Sequential(torch.compile(Doubled(), backend=backend)))
    inner.compile(backend=backend)
    for compiled in (model, wrapped):
        never_entered = eager()
        compiled(x)
        assert runs, "it compiles until a context is entered, whether or not one was made"
        runs.clear()
        with eager():
            compiled(x)
            with eager():
                compiled(x)
            compiled(x)
        assert not runs
        with pytest.raises(ZeroDivisionError), eager():
            1 / 0  # noqa: B018
        compiled(x)
        assert runs
        runs.clear()
        del never_entered


@pytest.mark.parametrize("now", [[1.0, 2], [True, 2], [1, 2.0]])
def test_equal_objects_are_not_the_same_object(now):
    assert now == [1, 2]
    assert not are_same(now, [1, 2])


def test_sequences_hold_the_same_where_each_object_is_the_other():
    one, other = object(), object()
    large = [int(f"{10**6 + i}") for i in range(3)]
    for same in ([], [one, other], large):
        assert are_same(same, tuple(same))
    for apart in ([one, other, one], [other, one], [one]):
        assert not are_same([one, other], apart)
    assert not are_same(large, [int(str(n)) for n in large])


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(1), np.random.rand],
)
def test_a_draw_shows_in_the_generators_until_it_is_put_back(draw):
    kept = random.getstate(), np.random.get_state()
    random.gauss(0, 1)  # of two that are made the second is kept
    python, before = random.getstate(), generators()
    assert generators() == before
    draw()
    assert generators() != before
    random.setstate(python)
    np.random.set_state(kept[1])
    assert generators() == before
    random.setstate(kept[0])
