"""Checkpoints of ``torch.distributed.checkpoint`` and ours: each reads what the other saved."""

import os
import pathlib
import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import Net
from runtime_models import make
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import functional as F

from autopipe.errors import StoreError
from autopipe.runtime import Runtime
from autopipe.runtime.checkpoint.loading import open_checkpoint
from autopipe.runtime.files.dcp import Distcp

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is .*disabled, unavailable or uninit:UserWarning"
)


def trained(seed=1, n=3):
    """A model that a plain loop trained, its optimizer and its scheduler."""
    torch.manual_seed(seed)
    model = Net()
    model.n_seen = 7
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(n):
        plain_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


X = torch.linspace(-1, 1, 64).reshape(8, 8)


def plain_step(model, optimizer, scheduler):
    optimizer.zero_grad()
    loss = F.mse_loss(model(X), X)
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


def pipe(n_stages=2):
    """A runtime of a model of its own, in one process."""
    torch.manual_seed(0)
    model = Net()
    made = make(model, (torch.randn(8, 8),), {}, n_stages=n_stages, n_ranks=1)
    return model, Runtime(*made, loss_fn=F.mse_loss, schedule="gpipe", n_microbatches=1)


class App(Stateful):
    """As torch's tutorial has it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return {"model": get_model_state_dict(self.model), "optim": flat(self.model, self.optimizer)}

    def load_state_dict(self, state):
        raise AssertionError("not asked for")


def flat(model, optimizer, is_flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    return get_optimizer_state_dict(model, optimizer, options=options)


FORMS = {
    "model and optimizer": lambda m, o: {"model": get_model_state_dict(m), "optimizer": flat(m, o)},
    "another key": lambda m, o: {"net": get_model_state_dict(m), "optim": flat(m, o)},
    "flat": lambda m, o: {"model": get_model_state_dict(m), "optim": flat(m, o, True)},
    "an app": lambda m, o: {"app": App(m, o)},
    "beside an average": lambda m, o: {
        "ema": get_model_state_dict(Net()), "model": get_model_state_dict(m), "optim": flat(m, o),
    },
    "bare": lambda m, o: {**get_model_state_dict(m), "optim": flat(m, o)},
}  # fmt: skip


def same(model, other):
    theirs = other.state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_what_plain_dcp_saved_trains_on_in_a_pipe(tmp_path, form):
    model, optimizer, scheduler = trained()
    dcp.save({**FORMS[form](model, optimizer), "scheduler": scheduler.state_dict()}, checkpoint_id=tmp_path)
    other, runtime = pipe()
    own = torch.optim.AdamW(runtime.parameters(), 0.5)
    own_scheduler = torch.optim.lr_scheduler.StepLR(own, 7, 0.1)
    runtime.load(tmp_path, optimizer=own, scheduler=own_scheduler)
    same(other, model)
    assert other.n_seen == 7
    assert own_scheduler.state_dict() == scheduler.state_dict()
    for _ in range(3):
        own.zero_grad()
        loss = runtime.step(X, target=X).loss.item()
        own.step()
        own_scheduler.step()
        assert loss == pytest.approx(plain_step(model, optimizer, scheduler), abs=1e-6)
    same_to = dict(model.named_parameters())
    assert all(torch.allclose(p, same_to[n], atol=1e-5) for n, p in other.named_parameters())


def test_weights_alone(tmp_path):
    model, _, _ = trained()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    other, runtime = pipe(3)
    runtime.load(tmp_path)
    same(other, model)


def test_torchs_own_reader_reads_what_is_saved(tmp_path):
    """The directory is of the layout that torch's Hugging Face reader knows, training state beside it."""
    model, runtime = pipe()
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
    runtime.step(X, target=X)
    optimizer.step()
    runtime.save(tmp_path / "c", optimizer=optimizer, max_shard_bytes=600)
    state = {n: torch.zeros_like(t) for n, t in Net().state_dict().items() if isinstance(t, torch.Tensor)}
    del state["head.weight"]  # tied: kept once, under its first name
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "c")))
    assert state
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in state.items())
    again = {n: torch.zeros_like(t) for n, t in state.items()}
    dcp.load(again, storage_reader=open_checkpoint(tmp_path / "c"))
    assert all(torch.equal(t, state[n]) for n, t in again.items())


# -- what nobody should have made -------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    model, optimizer, _ = trained()
    dcp.save(FORMS["model and optimizer"](model, optimizer), checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


class Runs:
    """Unpickled it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Looks:
    """Unpickled it looks a function up and calls it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return getattr(os, "mkdir"), (str(self.path),)  # noqa: B009


def described(path, change):
    """Write the description again after ``change``."""
    found = FileSystemReader(path).read_metadata()
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def put(found, name, **changes):
    index = next(i for i in found.storage_data if i.fqn == name)
    found.storage_data[index] = _StorageInfo(**{**found.storage_data[index].__dict__, **changes})


def place_of(found, name):
    return next(place for index, place in found.storage_data.items() if index.fqn == name)


def chunks_of(found, name, *boxes):
    place = place_of(found, name)
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    found.state_dict_metadata[name].chunks = chunks
    found.storage_data.update({MetadataIndex(name, at): place for at, _ in boxes})


A = "model.a.weight"
CHANGES = {
    "out of the folder": lambda f: put(f, A, relative_path="../c/__0_0.distcp"),
    "an absolute path": lambda f: put(f, A, relative_path="/etc/passwd"),
    "no file": lambda f: put(f, A, relative_path="__1_0.distcp"),
    "no name": lambda f: put(f, A, relative_path=3),
    "before the beginning": lambda f: put(f, A, offset=-1),
    "beyond the end": lambda f: put(f, A, offset=1 << 40),
    "longer than it is": lambda f: put(f, A, length=1 << 40),
    "shifted": lambda f: put(f, A, offset=1),
    "packed": lambda f: put(f, A, transform_descriptors=["stream.zstd"]),
    "another tensor's": lambda f: put(f, A, **place_of(f, "model.a.bias").__dict__),
    "a gap": lambda f: chunks_of(f, A, ((0, 0), (4, 8))),
    "an overlap": lambda f: chunks_of(f, A, ((0, 0), (4, 8)), ((2, 0), (4, 8))),
    "outside": lambda f: chunks_of(f, A, ((0, 4), (8, 8))),
    "other dims": lambda f: chunks_of(f, A, ((0,), (64,))),
    "no shape": lambda f: setattr(f.state_dict_metadata[A], "size", "8x8"),
    "another shape": lambda f: setattr(f.state_dict_metadata[A], "size", torch.Size([4, 16])),
    "huge": lambda f: setattr(f.state_dict_metadata[A], "size", torch.Size([1 << 60, 1 << 60])),
    "no dtype": lambda f: setattr(f.state_dict_metadata[A].properties, "dtype", "float32"),
    "another dtype": lambda f: setattr(f.state_dict_metadata[A].properties, "dtype", torch.int32),
    "missing": lambda f: f.state_dict_metadata.pop("model.b.weight"),
    "no places": lambda f: setattr(f, "storage_data", None),
    "no tensors": lambda f: setattr(f, "state_dict_metadata", [1]),
    "deep": lambda f: f.planner_data.update({A: ("a",) * 100}),
    "a place of no kind": lambda f: f.planner_data.update({A: (None,)}),
    "one place for two": lambda f: f.planner_data.update({A: ("model", "b.weight")}),
    "within another": lambda f: f.planner_data.update({A: ("model", "b.weight", "x")}),
    "runs": lambda f: setattr(f, "planner_data", Runs(pathlib.Path("ran"))),
    "runs as a name": lambda f: f.storage_data.update({Runs(pathlib.Path("ran")): 3}),
    "looks up": lambda f: f.planner_data.update({A: Looks(pathlib.Path("ran"))}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_forged_description_is_refused(saved, how, monkeypatch):
    monkeypatch.chdir(saved.parent)
    described(saved, CHANGES[how])
    refused(saved)
    assert not (saved.parent / "ran").exists()


PICKLES = {
    "a memo of two billion": b"\x80\x04r\xff\xff\xff\x7f.",
    "bytes of their own": b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    "a registered class": b"\x80\x02\x82\x01.",
    "an old global": b"cos\nsystem\n(S'true'\ntR.",
    "a persistent one": b"Pname\n.",
    "copies of copies": b"\x80\x04" + b"]" + b"2" * 40 + b".",
    "nothing": b"",
    "no end": b"\x80\x04}",
    "a number": pickle.dumps(3),
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("how", PICKLES)
def test_a_hostile_pickle_is_refused(saved, how):
    (saved / ".metadata").write_bytes(PICKLES[how])
    refused(saved)


def refused(path):
    """With one clear error, and nothing has changed."""
    other, runtime = pipe()
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.5)
    before = {n: t.clone() for n, t in other.state_dict().items() if isinstance(t, torch.Tensor)}
    with pytest.raises(StoreError):
        runtime.load(path, optimizer=optimizer)
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items() if n in before)
    assert not optimizer.state


def test_hostile_tensors_are_refused(saved, tmp_path):
    """A pickle in the place of a tensor's, with a description that fits it."""
    torch.save(Runs(tmp_path / "ran"), saved / "evil.distcp")
    n_bytes = (saved / "evil.distcp").stat().st_size
    described(saved, lambda f: put(f, A, relative_path="evil.distcp", offset=0, length=n_bytes))
    refused(saved)
    assert not (tmp_path / "ran").exists()


def test_a_link_in_a_checkpoint_is_refused(saved, tmp_path):
    file = next(saved.glob("*.distcp"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(saved)


def test_descriptions_have_no_other_opcodes(saved):
    """Python's pickler writes those that are read, and of every one of them a description is made."""
    data = (saved / ".metadata").read_bytes()
    for protocol in (2, 3, 4, 5):
        again = pickle.dumps(pickle.loads(data), protocol=protocol)
        assert Distcp(saved, again).specs.keys() == Distcp(saved, data).specs.keys(), protocol
        assert pickletools.optimize(again)


@pytest.mark.timeout(100)
def test_shards_of_fsdp_come_into_a_pipe(tmp_path):
    import dcp_ranks
    from processes import run_ranks

    outputs = run_ranks(pathlib.Path(dcp_ranks.__file__), 2, str(tmp_path), timeout_s=80)
    assert all("as FSDP trained on" in output for output in outputs)
