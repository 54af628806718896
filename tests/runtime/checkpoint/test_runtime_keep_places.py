"""Where saves go and come from: paths of every kind, saves replaced while they are read, odd values."""

import collections
import os
import pathlib
import threading

import numpy as np
import pytest
import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError, StoreError
from autopipe.exports import to_dcp
from autopipe.runtime import Runtime
from autopipe.runtime.checkpoint import loading
from autopipe.runtime.checkpoint.loading import open_checkpoint
from autopipe.runtime.files.torch_save import unpickled
from autopipe.runtime.wire.plain_values import Unfit, dumps, loads


def runtime_of(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, Runtime(
        *make(model, (torch.randn(4, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss, schedule="gpipe"
    )


@pytest.mark.parametrize("name", ["run-1.5", "a b", "n\nl", "ü", ".hidden", "%s", "x.tmp"])
def test_a_folder_may_have_any_name(tmp_path, name):
    model, runtime = runtime_of()
    runtime.save(str(tmp_path / name))
    assert (tmp_path / name).is_dir()
    other, again = runtime_of(1)
    again.load(tmp_path / name)
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("path", [None, 3, b"x", "", "a\0b", ["a"]])
def test_what_is_no_path_is_named(path):
    _, runtime = runtime_of()
    for call in (runtime.save, runtime.load, runtime.resume):
        with pytest.raises(InputError, match=r"path is .* must be the path of a file or folder"):
            call(path)


def test_a_save_that_would_be_of_another_kind_is_refused(tmp_path, monkeypatch):
    _, runtime = runtime_of()
    with pytest.raises(InputError, match=r"model\.safetensors names one file .* or .*model\.pt for one file"):
        runtime.save(tmp_path / "model.safetensors")
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    with pytest.raises(InputError, match=r"saved in a folder, such as .*model$"):
        runtime.save(tmp_path / "model.pt", optimizer=optimizer)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StoreError, match="is the working directory"):
        runtime.save(".")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here"]
    for wrong in ({"background": "yes"}, {"keep_last": True}):
        with pytest.raises(InputError):
            runtime.save(tmp_path / "c", **wrong)


def test_what_is_read_while_others_save_is_all_of_one_save(tmp_path):
    """Every weight of a save is its number."""
    model, runtime = runtime_of()

    def save(number):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        runtime.save(tmp_path / "c")

    save(0)
    done = threading.Event()

    def keep_saving():
        for number in range(1, 20):
            save(number)
        done.set()

    writer = threading.Thread(target=keep_saving)
    writer.start()
    other, again = runtime_of(1)
    n_loads = 0
    while not done.is_set() or not n_loads:
        again.load(tmp_path / "c")
        n_loads += 1
        assert len({value.item() for p in other.parameters() for value in p.flatten()}) == 1
    writer.join()


def test_a_save_replaced_after_a_part_was_opened_is_opened_anew(tmp_path, monkeypatch):
    """The manifest is the earlier save's, the files the later one's: both have the same headers."""
    model, runtime = runtime_of()
    runtime.save(tmp_path / "c")
    whole, n_calls = loading.open_files, 0

    def replaced(*args):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            with torch.no_grad():
                model[0].weight += 1.0
            runtime.save(tmp_path / "c")
        return whole(*args)

    monkeypatch.setattr(loading, "open_files", replaced)
    other, again = runtime_of(1)
    again.load(tmp_path / "c")
    assert n_calls == 2
    assert torch.equal(other[0].weight, model[0].weight)
    monkeypatch.setattr(loading, "open_files", lambda *args: runtime.save(tmp_path / "c") and whole(*args))
    with pytest.raises(StoreError, match="replaced by others faster than it can be opened"):
        open_checkpoint(tmp_path / "c")


def test_an_optimizer_of_another_kind_is_refused(tmp_path):
    _, runtime = runtime_of()
    x = torch.randn(4, 4)
    kinds = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, 0.01),
        "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
    }
    for was, make_was in kinds.items():
        optimizer = make_was(runtime.parameters())
        runtime.step(x, target=x)
        optimizer.step()
        runtime.save(tmp_path / was, optimizer=optimizer)
        for now, make_now in kinds.items():
            other = make_now(runtime.parameters())
            if now == was:
                runtime.load(tmp_path / was, optimizer=other)
                continue
            with pytest.raises(
                StoreError, match=f"optimizer was saved as {was}, without .*, and is {now} here"
            ):
                runtime.load(tmp_path / was, optimizer=other)
            assert not other.state
    runtime.load(tmp_path / "AdamW", optimizer=torch.optim.Adam(runtime.parameters(), 0.01))


def test_a_file_of_more_than_a_model_says_what_to_save(tmp_path):
    model, runtime = runtime_of()
    torch.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "all.pt")
    with pytest.raises(StoreError, match=r"under 'model'; save that by itself: torch\.save"):
        runtime.load(tmp_path / "all.pt")


VALUES = [
    np.float32(0.1),
    np.int64(-3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.float64("nan"),
    collections.defaultdict(int, {"a": 1, 2: "b"}),
    collections.defaultdict(list, {(1, 2): [np.uint8(3)]}),
    collections.defaultdict(None, {"a": None}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_what_they_were(value):
    found = loads(dumps(value))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"~":"number","v":["object",1]}',
        '{"~":"number","v":["float32","x"]}',
        '{"~":"number","v":3}',
        '{"~":"default","v":["eval",[]]}',
        '{"~":"default","v":["int",[3]]}',
        '{"~":"default","v":["int"]}',
        '{"~":"queue","v":[]}',
        '{"~":"parameter","v":["x",true]}',
        '{"~":"parameter","v":["x"]}',
    ],
)
def test_values_that_name_what_they_may_not_are_refused(text):
    with pytest.raises(Unfit):
        loads(text)


def test_what_was_read_of_a_file_is_the_same_when_the_file_is_written_anew(tmp_path):
    path = tmp_path / "rest.pt"
    torch.save({"best": torch.ones(3)}, path)
    found = unpickled(path)["best"]
    torch.save({"best": torch.zeros(3)}, path)
    assert found.tolist() == [1.0, 1.0, 1.0]


class Kept:
    """What a user keeps beside the model; ``takes`` says whether it takes any state."""

    def __init__(self, state, takes=True):
        self.state, self.takes = state, takes

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if not self.takes:
            raise RuntimeError("another kind")
        self.state = state


def test_parameters_in_what_users_keep_stay_such(tmp_path):
    _, runtime = runtime_of()
    mine = {"scale": nn.Parameter(torch.ones(2)), "frozen": [nn.Parameter(torch.zeros(3), False)]}
    runtime.save(tmp_path / "c", kept=Kept({**mine, "plain": torch.ones(1)}))
    other = Kept({})
    runtime.load(tmp_path / "c", kept=other)
    found = [other.state["scale"], other.state["frozen"][0]]
    assert [(type(p), p.requires_grad, p.sum().item()) for p in found] == [
        (nn.Parameter, True, 2.0),
        (nn.Parameter, False, 0.0),
    ]
    assert type(other.state["plain"]) is torch.Tensor


def test_an_object_that_takes_no_state_leaves_all_else_as_it_was(tmp_path, caplog):
    _, runtime = runtime_of()
    runtime.save(tmp_path / "c", first=Kept({"a": 1}), second=Kept({"b": 2}))
    first = Kept({"a": 3})
    with pytest.raises(
        StoreError, match="second does not take the state saved for it: RuntimeError: another"
    ):
        runtime.load(tmp_path / "c", first=first, second=Kept({"b": 4}, takes=False))
    assert first.state == {"a": 3}
    assert "second does not take back what it had: RuntimeError: another kind" in caplog.text


class Slow(torch.optim.SGD):
    """Keeps a second copy of the weights beside ``state``, which its ``state_dict`` has in ``layout``."""

    def __init__(self, parameters, layout):
        super().__init__(parameters, 0.1)
        self.layout = layout

    def state_dict(self):
        plain = super().state_dict()
        return {**plain, "slow": [1.0]} if self.layout == "more" else {"fast": plain, "slow": [1.0]}


@pytest.mark.parametrize("layout", ["more", "other"])
def test_an_optimizer_that_keeps_more_than_states_of_parameters_is_refused(layout, tmp_path):
    _, runtime = runtime_of()
    with pytest.raises(InputError, match=r"Slow lays out its state_dict in a way of its own \(.*slow\)"):
        runtime.save(tmp_path / "c", optimizer=Slow(runtime.parameters(), layout))
    assert not (tmp_path / "c").exists()


def test_a_function_that_makes_missing_values_is_named():
    with pytest.raises(Unfit, match=r"counts is a collections\.defaultdict"):
        dumps({"counts": collections.defaultdict(lambda: os.getpid())})


def test_a_path_may_be_any_that_says_where_it_is(tmp_path):
    class Where:
        def __fspath__(self):
            return str(tmp_path / "c")

    model, runtime = runtime_of()
    wanted = model.state_dict()
    runtime.save(Where())
    other, again = runtime_of(1)
    again.load(pathlib.PurePath(tmp_path / "c"))
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())


def test_a_working_directory_that_is_gone_is_told_and_training_goes_on(tmp_path, monkeypatch):
    _, runtime = runtime_of()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="x was not saved"):
        runtime.save("x")
    with pytest.raises(
        InputError, match="path is x, in a working directory that is gone; give one that begins"
    ):
        runtime.save("x", background=True)
    runtime.save(tmp_path / "c", background=True).wait()
    assert (tmp_path / "c").is_dir()


def test_a_home_is_the_users_and_no_folder_of_that_name_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    _, runtime = runtime_of()
    runtime.save("~/runs/a")
    runtime.save("~/runs/row", keep_last=1)
    runtime.load(pathlib.Path("~/runs/a"))
    assert runtime.resume("~/runs/row") == 0
    to_dcp("~/runs/a", "~/dcp")
    runtime.save("~x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "~x"]
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == ["dcp", "runs"]
