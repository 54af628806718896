"""Hostile checkpoints and strangers at ports: nothing runs, nothing else is read, and nothing changes."""

import json
import pathlib
import pickle

import pytest
import stranger_ranks
import torch
from processes import finish, start
from runtime_models import make
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from autopipe.errors import StoreError
from autopipe.runtime import Runtime


class Touch:
    """Unpickled it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def runtime():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    return model, Runtime(*make(model, (torch.randn(2, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss)


def refused(model, rt, path):
    """The error that loading ``path`` raises; the model is as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StoreError) as told:
        rt.load(path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(told.value)


@pytest.mark.parametrize("form", ["zip", "old", "bare"])
@pytest.mark.parametrize("name", ["model.pt", "folder/pytorch_model.bin"])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, form, name):
    model, rt = runtime()
    path, ran = tmp_path / name, tmp_path / "ran"
    path.parent.mkdir(exist_ok=True)
    thing = {**model.state_dict(), "extra": Touch(ran)}
    if form == "bare":
        path.write_bytes(pickle.dumps(thing))
    else:
        torch.save(thing, path, _use_new_zipfile_serialization=form == "zip")
    told = refused(model, rt, path if path.parent == tmp_path else path.parent)
    assert ("no pickle of such" if form == "bare" else "to load it would run") in told
    assert "weights_only" not in told
    assert not ran.exists()
    if form != "bare":  # it would have run
        torch.load(path, weights_only=False)
        assert ran.exists()


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "sub/../../other.safetensors", "absolute", "..", ".", ""]
)
def test_an_index_names_nothing_outside_its_folder(tmp_path, name):
    model, rt = runtime()
    folder, outside = tmp_path / "folder", tmp_path / "other.safetensors"
    (folder / "sub").mkdir(parents=True)
    save_file({key: value + 1 for key, value in model.state_dict().items()}, outside)
    name = str(outside) if name == "absolute" else name
    index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "which is no name of a file beside it" in refused(model, rt, folder)


@pytest.mark.parametrize("weight_map", [[], "model", {"0.weight": 3}, {"0.weight": ["a"]}, None])
def test_an_index_of_another_make_is_refused(tmp_path, weight_map):
    model, rt = runtime()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "no index of a checkpoint" in refused(model, rt, tmp_path)


@pytest.mark.timeout(150)
def test_strangers_at_every_port_change_nothing():
    """A slice; ``python -m benchmarks.kept strangers`` goes on for longer."""
    ((code, output),) = finish(start(pathlib.Path(stranger_ranks.__file__), 0), 120)
    assert code == 0, output[-3000:]
    assert "met" in output
