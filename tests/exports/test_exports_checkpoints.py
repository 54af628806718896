"""What a pipe saved trains on in plain torch by way of ``torch.distributed.checkpoint``, and comes back."""

import threading

import checkpoint_models
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError, StoreError
from autopipe.exports import dcp_reader, to_dcp
from autopipe.runtime.checkpoint import loading
from autopipe.runtime.files.safetensors_file import TensorFile

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is .*disabled, unavailable or uninit:UserWarning"
)
X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Net(checkpoint_models.Net):
    """One whose narrow weight is frozen too: torch's optimizers keep no state of it."""

    def __init__(self):
        super().__init__()
        self.low.requires_grad_(False)


def groups(named):
    """Two groups that no rank need have both of."""
    named = [(n, p) for n, p in named if p.requires_grad]
    biases = {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0}
    return [{"params": [p for n, p in named if not n.endswith("bias")]}, biases]


def saved(folder):
    """A pipe that trained for three steps, where it was saved, and what its next losses are."""
    torch.manual_seed(1)
    model = Net()
    model.n_seen = 7
    rt = autopipe.split(model, 2, (X,), costs="estimated", n_microbatches=1).runtime(F.mse_loss)
    optimizer = torch.optim.AdamW(groups(rt.named_parameters()), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step():
        optimizer.zero_grad()
        loss = rt.step(X, target=X).loss.item()
        optimizer.step()
        scheduler.step()
        return loss

    for _ in range(3):
        step()
    rt.save(folder, optimizer=optimizer, scheduler=scheduler)
    expected = {n: v.clone() for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    return expected, [step() for _ in range(3)]


def plain():
    torch.manual_seed(2)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model.named_parameters()), 0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.1)


@pytest.mark.parametrize("is_rewritten", [True, False], ids=["rewritten", "in place"])
@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
def test_plain_training_goes_on_from_what_a_pipe_saved(tmp_path, is_flat, is_rewritten):
    expected, losses = saved(tmp_path / "ours")
    source = {"storage_reader": dcp_reader(tmp_path / "ours", flat_optimizers=is_flat)}
    if is_rewritten:
        assert to_dcp(tmp_path / "ours", tmp_path / "theirs", flat_optimizers=is_flat) == tmp_path / "theirs"
        source = {"checkpoint_id": tmp_path / "theirs"}
    model, optimizer, scheduler = plain()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "scheduler": scheduler.state_dict(),
    }
    dcp.load(state, **source)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    scheduler.load_state_dict(state["scheduler"])
    assert model.n_seen == 7
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for loss in losses:
        optimizer.zero_grad()
        own = F.mse_loss(model(X), X)
        own.backward()
        optimizer.step()
        scheduler.step()
        assert own.item() == pytest.approx(loss, abs=1e-6)


def test_in_place_it_is_read_in_several_threads(tmp_path, monkeypatch):
    expected, _ = saved(tmp_path / "ours")
    read_into, names = TensorFile.read_into, set()

    def noted(*args):
        names.add(threading.current_thread().name)
        read_into(*args)

    monkeypatch.setattr(TensorFile, "read_into", noted)
    monkeypatch.setattr(loading, "threads_for", lambda n_bytes: 3)
    model = plain()[0]
    state = {"model": get_model_state_dict(model)}
    reader = dcp_reader(tmp_path / "ours")
    names.clear()
    dcp.load(state, storage_reader=reader)
    set_model_state_dict(model, state["model"])
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert names
    assert all(name.startswith("autopipe files") for name in names)


def test_it_comes_back_into_a_pipe(tmp_path):
    expected, losses = saved(tmp_path / "ours")
    to_dcp(tmp_path / "ours", tmp_path / "theirs")
    torch.manual_seed(3)
    model = Net()
    rt = autopipe.split(model, 3, (X,), costs="estimated", n_microbatches=1).runtime(F.mse_loss)
    optimizer = torch.optim.AdamW(groups(rt.named_parameters()), 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.1)
    rt.load(tmp_path / "theirs", optimizer=optimizer, scheduler=scheduler)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for loss in losses:
        optimizer.zero_grad()
        assert rt.step(X, target=X).loss.item() == pytest.approx(loss, abs=1e-6)
        optimizer.step()
        scheduler.step()


def test_damage_and_a_target_in_use_are_refused(tmp_path):
    saved(tmp_path / "ours")
    file = next((tmp_path / "ours").glob("model-*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match="is damaged"):
        to_dcp(tmp_path / "ours", tmp_path / "theirs")
    file.write_bytes(whole)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        to_dcp(tmp_path / "ours", tmp_path / "theirs")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "theirs"]
    with pytest.raises(InputError, match="a checkpoint itself"):
        to_dcp(tmp_path / "ours", tmp_path / "ours")

    class Kept:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

    rt = autopipe.split(Net(), 2, (X,), costs="estimated", n_microbatches=1).runtime(F.mse_loss)
    rt.save(tmp_path / "same key", model=Kept({"a": 1}))
    with pytest.raises(InputError, match="has other state under 'model'"):
        to_dcp(tmp_path / "same key", tmp_path / "more")
    rt.save(tmp_path / "same names", thing=Kept({"a.b": 1, "a": {"b": 2}}))
    with pytest.raises(StoreError, match=r"more was not written: .*thing\.a\.b"):
        to_dcp(tmp_path / "same names", tmp_path / "more")
    assert not (tmp_path / "more").exists()
    with pytest.raises(StoreError, match="holds no checkpoint"):
        to_dcp(tmp_path / "theirs", tmp_path / "more")


def test_what_is_read_in_place_is_checked_first(tmp_path):
    saved(tmp_path / "ours")
    model, optimizer, _ = plain()
    before = {n: v.clone() for n, v in get_model_state_dict(model).items() if isinstance(v, torch.Tensor)}
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    file = next((tmp_path / "ours").glob("model-*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointException, match="is damaged"):
        dcp.load(state, storage_reader=dcp_reader(tmp_path / "ours"))
    assert all(torch.equal(state["model"][n], v) for n, v in before.items())
    alone = {"optimizer": state["optimizer"]}
    dcp.load(alone, storage_reader=dcp_reader(tmp_path / "ours"))  # of which nothing is damaged
    (tmp_path / "ours" / "autopipe.json").unlink()
    with pytest.raises(StoreError, match="is missing"):
        dcp_reader(tmp_path / "ours")
