"""What is kept is refused or right, however it was damaged, and whatever is kept comes back exactly."""

import collections
import copy
import json
import logging
import resource
import threading

import pytest
import torch
from crossed import crossed
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError, StoreError
from autopipe.runtime import Runtime
from autopipe.runtime.files.folder import Draft


@pytest.mark.timeout(120)
def test_damaged_checkpoints_are_refused_or_right(tmp_path):
    """A slice; ``python -m benchmarks.kept damages`` walks thousands."""
    from benchmarks.kept.judging import prepare, walk

    table, bad = walk(tmp_path, prepare(tmp_path), 150, seed=0, n_fixed=60)
    assert sum(sum(outcomes.values()) for outcomes in table.values()) == 150
    assert not bad, bad[:5]


class Layered(nn.Module):
    """Keeps something beside its tensors, plain or a tensor."""

    def __init__(self, kept):
        super().__init__()
        self.lin, self.kept = nn.Linear(4, 4), kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        if state == "refused":
            raise KeyError("not mine")
        self.kept = state

    def forward(self, x):
        return torch.tanh(self.lin(x))


def runtime_of(layers, n_stages=2):
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    return model, Runtime(
        *make(model, (torch.randn(8, 4),), {}, n_stages=n_stages, n_ranks=1), loss_fn=F.mse_loss
    )


@pytest.mark.parametrize("name", ["c", "model.pt"])
def test_state_beside_tensors_comes_back(tmp_path, name):
    def layers(full):
        kept = [{"n": 3, "scale": torch.arange(3.0)}, torch.tensor([7]), None, "text"]
        return [Layered(k if full else copy.deepcopy(kept[0])) for k in kept]

    model, runtime = runtime_of(layers(True))
    runtime.save(tmp_path / name)
    other, again = runtime_of(layers(False), 3)
    again.load(tmp_path / name)
    assert str([m.kept for m in other]) == str([m.kept for m in model])
    if name == "model.pt":
        plain = nn.Sequential(*layers(False))
        plain.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        assert str([m.kept for m in plain]) == str([m.kept for m in model])
    torch.save(other.state_dict(), tmp_path / "plain.pt")
    for m in model:
        m.kept = 0
    runtime.load(tmp_path / "plain.pt")
    assert str([m.kept for m in other]) == str([m.kept for m in model])
    other[3].kept = "refused"
    again.save(tmp_path / name)
    before = str([m.kept for m in model])
    with pytest.raises(StoreError, match=r"3\._extra_state does not take the state saved for it: KeyError"):
        runtime.load(tmp_path / name)
    assert str([m.kept for m in model]) == before


class Odd(torch.optim.Optimizer):
    """Keeps nested, quantised and high-precision state, as optimizers from elsewhere do."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["codes"] = torch.zeros(p.shape, dtype=torch.uint8)
                    state["history"] = [torch.zeros(3), {"last": torch.zeros(2)}]
                    state["master"] = p.detach().double().clone()
                    state["queue"] = collections.deque([torch.ones(1)], 4)
                    state["n"] = 0
                state["codes"] += 3
                state["history"][0] += 1
                state["history"][1]["last"] -= 1
                state["master"] -= group["lr"] * p.grad.double() * state["history"][0].sum()
                state["n"] += 1
                p.copy_(state["master"])


def common(parameters):
    return [p for p in parameters if p.ndim == 2]


OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "adam with a tensor for a rate": lambda ps: torch.optim.Adam(ps, torch.tensor(0.01), foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, 0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, 0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.9, centered=True),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 0.01),
    "muon": lambda ps: torch.optim.Muon(common(ps), 0.01),
    "odd": Odd,
    "two groups": lambda ps: torch.optim.AdamW(
        [{"params": common(ps), "weight_decay": 0.1}, {"params": [p for p in ps if p.ndim != 2], "lr": 0.02}],
        0.01,
    ),
}


@crossed(name=OPTIMIZERS, dtype=[torch.float32, torch.bfloat16])
def test_every_optimizer_goes_on_exactly(tmp_path, name, dtype):
    def made(n_stages):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Dropout(0.2)).to(dtype)
        runtime = Runtime(
            *make(model, (torch.randn(8, 4, dtype=dtype),), {}, n_stages=n_stages, n_ranks=1),
            loss_fn=F.mse_loss,
        )
        return model, runtime, OPTIMIZERS[name](list(runtime.parameters()))

    def train(runtime, optimizer, n):
        for i in range(n):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
            optimizer.zero_grad()
            runtime.step(x, target=x)
            optimizer.step()

    model, runtime, optimizer = made(2)
    train(runtime, optimizer, 2)
    runtime.save(tmp_path / "c", optimizer=optimizer)
    train(runtime, optimizer, 2)
    other, again, fresh = made(3)
    again.load(tmp_path / "c", optimizer=fresh)
    train(again, fresh, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert str(fresh.state_dict()) == str(optimizer.state_dict())


def test_groups_that_were_otherwise_are_refused(tmp_path):
    _, runtime = runtime_of([nn.Linear(4, 4) for _ in range(4)])
    runtime.save(tmp_path / "c", optimizer=OPTIMIZERS["two groups"](list(runtime.parameters())))
    _, other = runtime_of([nn.Linear(4, 4) for _ in range(4)])
    one = torch.optim.AdamW(other.named_parameters(), 0.01)
    with pytest.raises(StoreError, match=r"0\.weight and 0\.bias in one group, and .* weight_decay 0.1"):
        other.load(tmp_path / "c", optimizer=one)
    other.save(tmp_path / "c", optimizer=one)
    two = OPTIMIZERS["two groups"](list(other.parameters()))
    other.load(tmp_path / "c", optimizer=two)
    assert {group["lr"] for group in two.param_groups} == {0.01}


def test_groups_without_weights_here_go_on_at_the_rates_they_had(tmp_path):
    def made():
        _, runtime = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
        groups = [{"params": [], "lr": 0.2}, {"params": [*runtime.parameters()]}, {"params": [], "lr": 0.3}]
        optimizer = torch.optim.SGD(groups, 0.1)
        return runtime, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    runtime, optimizer, rates = made()
    for _ in range(3):
        optimizer.step(), rates.step()
    runtime.save(tmp_path / "c", optimizer=optimizer, rates=rates)
    other, fresh, again = made()
    other.load(tmp_path / "c", optimizer=fresh, rates=again)
    for _ in range(3):
        assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]
        assert again.state_dict() == rates.state_dict()
        for each in (optimizer, rates, fresh, again):
            each.step()


def test_runs_that_save_in_one_row_are_told(tmp_path, caplog):
    def steps(*numbers, resumes=False):
        _, runtime = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
        caplog.clear()
        if resumes:
            assert runtime.resume(tmp_path) == 3
        for n in numbers:
            runtime.engine.progress.n_steps = n
            runtime.save(tmp_path, keep_last=3)
            yield [r.getMessage() for r in caplog.records if "another run saves" in r.getMessage()]

    assert [*steps(1, 2, 3, 3)] == [[]] * 4
    assert [*steps(3, 4, resumes=True)] == [[]] * 2
    first, second = steps(10, 20), steps(10, 20)
    assert next(first) == []
    assert "step-00000010 is there" in next(second)[0]
    assert next(second)
    assert "step-00000020 is there" in next(first)[-1]


def test_a_run_that_loads_a_save_of_a_row_goes_on_in_that_row(tmp_path, caplog):
    def made():
        return runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])[1]

    def save(runtime, *numbers):
        caplog.clear()
        for n in numbers:
            runtime.engine.progress.n_steps = n
            runtime.save(tmp_path / "row", keep_last=4)
        return [r.getMessage() for r in caplog.records if "another run saves" in r.getMessage()]

    first = made()
    assert save(first, 1, 2, 3) == []
    first.save(tmp_path / "alone")
    again = made()
    again.load(tmp_path / "row" / "step-00000001")
    assert save(again, 1, 2) == []
    other = made()
    other.load(tmp_path / "alone")
    assert len(save(other, 2)) == 1


def test_a_row_begun_anew_keeps_what_it_just_saved(tmp_path, caplog):
    _, old = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    old._engine.progress.n_steps = 100
    old.save(tmp_path, keep_last=2)
    _, new = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    with caplog.at_level(logging.WARNING):
        for n in range(1, 5):
            new._engine.progress.n_steps = n
            new.save(tmp_path, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (3, 4, 100)]
    assert "holds step-00000100, later than this save at step 4" in caplog.text


@pytest.mark.timeout(60)
def test_a_reader_of_a_row_that_goes_on(tmp_path):
    """Another run loads the last save while the first keeps one alone: always a whole one."""
    model, runtime = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    other, reader = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    ended, errors, seen = threading.Event(), [], set()

    def save():
        try:
            for n in range(1, 5000):
                if n > 20 and len(seen) > 3:
                    break
                with torch.no_grad():
                    for p in model.parameters():
                        p.fill_(n)
                runtime._engine.progress.n_steps = n
                runtime.save(tmp_path, keep_last=1)
        except Exception as error:
            errors.append(error)
        ended.set()

    thread = threading.Thread(target=save)
    thread.start()
    while not ended.is_set():
        n = reader.resume(tmp_path)
        assert n == 0 or {p.unique().item() for p in other.parameters()} == {n}
        seen.add(n)
    thread.join()
    assert not errors
    assert reader.resume(tmp_path) == runtime._engine.progress.n_steps
    assert len(seen) > 3


def test_a_save_mends_a_damaged_one_and_keeps_what_was_added(tmp_path):
    _, runtime = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    runtime.save(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    (tmp_path / "c" / "autopipe.json").write_text("{")
    runtime.save(tmp_path / "c", max_shard_bytes=64)
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"
    runtime.load(tmp_path / "c")


@pytest.mark.parametrize("name", ["a*", "[ab]", "a b", "ä\N{SNOWMAN}", "-c", "a\nb", "x" * 200])
def test_names_with_odd_characters(tmp_path, name):
    """None of them reaches what belongs to another."""
    for other in ("ab", "a", "a.b", "c"):
        (tmp_path / f".{other}.12345678.old").mkdir()
        (tmp_path / f".{other}.12345678.part").mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    _, runtime = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    runtime.save(tmp_path / name)
    runtime.save(tmp_path / name)
    runtime.load(tmp_path / name)
    assert {p.name for p in tmp_path.iterdir()} == before | {name}
    with pytest.raises((StoreError, InputError)):
        runtime.save(tmp_path / "a\0b")
    with pytest.raises(StoreError):
        runtime.load(tmp_path / ("y" * 300))


def test_what_another_name_set_aside_is_not_taken(tmp_path):
    (tmp_path / ".a.b.12345678.old").mkdir()
    draft = Draft(tmp_path / "a")
    draft.drop()
    assert [p.name for p in tmp_path.iterdir()] == [".a.b.12345678.old"]


def test_modules_with_odd_names(tmp_path):
    names = ["a/b", "x y", "ä", "state"]

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.of = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

        def forward(self, x):
            for layer in self.of.values():
                x = layer(x)
            return x

    model, runtime = runtime_of([Named(), nn.Linear(4, 4)])
    wanted = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    runtime.save(tmp_path / "c", optimizer=optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    runtime.load(tmp_path / "c", optimizer=optimizer)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_quota_leaves_the_earlier_save_whole(tmp_path):
    """The system itself refuses to write more than so many bytes of a file."""
    model, runtime = runtime_of([nn.Linear(4, 4) for _ in range(8)])
    runtime.save(tmp_path / "c")
    wanted = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(p.stat().st_size for p in (tmp_path / "c").iterdir())
    try:
        for limit, target in [(0, "one.pt"), (900, "one.pt"), (0, "c"), (size // 2, "c"), (size - 1, "c")]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(StoreError, match="was not saved"):
                runtime.save(tmp_path / target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    runtime.load(tmp_path / "c")
    assert all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items())


class Raises:
    def state_dict(self):
        raise ZeroDivisionError("no state")


def test_state_that_cannot_be_told_is_named(tmp_path):
    _, runtime = runtime_of([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(ZeroDivisionError):
        runtime.save(tmp_path / "c", loader=Raises())

    class Live:
        def __init__(self):
            self.seen = {"counts": collections.Counter(a=1), "rows": [1]}

        def state_dict(self):
            return self.seen

        def load_state_dict(self, state):
            self.seen = state

    live = Live()
    saving = runtime.save(tmp_path / "c", loader=live, background=True)
    live.seen["counts"]["a"] += 5
    live.seen["rows"].append(2)
    saving.wait()
    runtime.load(tmp_path / "c", loader=live)
    assert live.seen == {"counts": {"a": 1}, "rows": [1]}
    assert json.loads((tmp_path / "c" / "autopipe.json").read_text())["version"] == 2
