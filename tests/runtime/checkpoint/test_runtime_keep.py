"""Saves and loads: whole or not at all, whatever happens in between and whatever is in the way."""

import copy
import errno
import os
import pathlib
import random
import types

import numpy as np
import pytest
import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError, StoreError
from autopipe.runtime import Runtime
from autopipe.runtime.checkpoint import saving
from autopipe.runtime.checkpoint.loading import open_checkpoint
from autopipe.runtime.checkpoint.training_state import Restoring, collect
from autopipe.runtime.files import folder, safetensors_file


class Net(nn.Module):
    """A tie, dropout, a frozen part, statistics, mixed dtypes and a table that no checkpoint has."""

    def __init__(self, d=8, n=4):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.frozen = nn.Linear(d, d).requires_grad_(False)
        self.norm, self.drop = nn.BatchNorm1d(d), nn.Dropout(0.3)
        self.head = nn.Linear(d, d, bias=False)
        self.head.weight = self.inner[0].weight
        self.low = nn.Parameter(torch.ones(d, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("table", torch.arange(float(d)), persistent=False)

    def forward(self, x):
        for layer in self.inner:
            x = self.drop(torch.tanh(layer(x))) + x
        return self.head(self.norm(self.frozen(x)) + self.table * self.low)


def net():
    """In fp64, so that the order in which gradients add up does not show, but for what is half."""
    made = Net().double()
    made.low.data = made.low.data.bfloat16()
    return made


def runtime_of(n_stages=2, model=None, **options):
    torch.manual_seed(0)
    model = net() if model is None else model
    made = make(model, (torch.randn(8, 8, dtype=torch.float64),), {}, n_stages=n_stages, n_ranks=1, **options)
    return model, Runtime(*made, loss_fn=F.mse_loss)


class Loader:
    """Batches in a random order, with a position."""

    def __init__(self):
        self.generator, self.n = torch.Generator().manual_seed(5), 0

    def __iter__(self):
        while True:
            self.n += 1
            yield torch.randn(8, 8, generator=self.generator, dtype=torch.float64)

    def state_dict(self):
        return {"n": self.n, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.n = state["n"]
        self.generator.set_state(state["generator"])


def trainer(n_stages=2, **options):
    """A runtime and everything a loop keeps beside it."""
    _, runtime = runtime_of(n_stages, **options)
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
    kept = {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        "loader": Loader(),
    }
    return runtime, kept


def train(runtime, kept, n):
    losses = []
    for _, x in zip(range(n), kept["loader"], strict=False):
        kept["optimizer"].zero_grad()
        losses.append(runtime.step(x, target=x + random.random() + np.random.rand()).loss.item())
        kept["optimizer"].step()
        kept["scheduler"].step()
    return losses


def weights(runtime):
    return {n: t.clone() for s in runtime.stages for n, t in s.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(("n_stages", "schedule"), [(1, "1f1b"), (3, "gpipe"), (4, "zb-h1")])
def test_training_goes_on_exactly_under_another_cut(tmp_path, n_stages, schedule):
    runtime, kept = trainer(2)
    train(runtime, kept, 3)
    runtime.save(tmp_path / "c", **kept)
    expected = train(runtime, kept, 4)
    other, new = trainer(n_stages, schedule=schedule)
    train(other, new, 1)
    random.random(), torch.rand(3), np.random.rand()
    other.load(tmp_path / "c", **new)
    assert train(other, new, 4) == pytest.approx(expected, rel=1e-12)
    assert new["scheduler"].state_dict() == kept["scheduler"].state_dict()
    assert new["loader"].n == 7
    found = weights(other)
    assert all(torch.allclose(t, found[n], rtol=0, atol=1e-12) for n, t in weights(runtime).items())


def test_a_save_may_replace_what_was_just_loaded(tmp_path):
    """Nothing that was loaded stays mapped to the files."""
    runtime, kept = trainer()
    train(runtime, kept, 2)
    runtime.save(tmp_path / "c", **kept)
    for _ in range(3):
        runtime, kept = trainer()
        runtime.load(tmp_path / "c", **kept)
        train(runtime, kept, 1)
        runtime.save(tmp_path / "c", **kept)
    found = weights(runtime)
    other, new = trainer(3)
    other.load(tmp_path / "c", **new)
    assert all(torch.equal(found[n], t) for n, t in weights(other).items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def _in_child(work):
    """Whether ``work`` ended by itself in a process of its own, rather than in ``os._exit(9)``."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 0


@pytest.mark.parametrize(
    ("is_first", "swaps"),
    [(True, True), (False, True), (False, False)],
    ids=["first save", "overwriting", "overwriting by two renames"],
)
def test_a_crash_at_any_moment_leaves_the_earlier_save_whole(tmp_path, monkeypatch, is_first, swaps):
    """The process ends at the k-th system call of a save, for all k until one gets through."""
    if not swaps:
        monkeypatch.setattr(folder, "ctypes", types.SimpleNamespace(CDLL=lambda *_, **__: object()))
    runtime, kept = trainer()
    train(runtime, kept, 1)
    if not is_first:
        runtime.save(tmp_path / "c", **kept)
    before = weights(runtime)
    train(runtime, kept, 1)
    after, outcomes = weights(runtime), []

    def save_and_die_at(k):
        calls = iter(range(10_000))

        def counted(function):
            def run(*args, **kwargs):
                if next(calls) == k:
                    os._exit(9)
                return function(*args, **kwargs)

            return run

        monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 100)
        for module, name in ((safetensors_file, "_write_all"), (saving, "_write_text"), (folder, "sync")):
            monkeypatch.setattr(module, name, counted(getattr(module, name)))
        monkeypatch.setattr(os, "fsync", counted(os.fsync))
        monkeypatch.setattr(folder, "_exchange", counted(folder._exchange))
        monkeypatch.setattr(folder.shutil, "rmtree", counted(folder.shutil.rmtree))
        monkeypatch.setattr(pathlib.Path, "rename", counted(pathlib.Path.rename))
        runtime.save(tmp_path / "c", **kept)

    k = 0
    other, new = trainer()
    while not _in_child(lambda k=k: save_and_die_at(k)):
        k += 1
        if is_first and not (tmp_path / "c").exists():
            outcomes.append("none")
            with pytest.raises(StoreError, match="holds no checkpoint"):
                other.load(tmp_path / "c")
            continue
        other.load(tmp_path / "c", **new)
        found = weights(other)
        outcomes.append("before" if equal(found, before) else "after")
        assert outcomes[-1] == "before" or equal(found, after)
    assert outcomes == sorted(outcomes, key="after".__eq__)
    assert len(outcomes) > 10
    runtime.save(tmp_path / "c", **kept)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]  # drafts of the dead are gone


def test_a_full_disk_is_told_where_torch_writes(tmp_path, monkeypatch):
    """Its own file format ends in another error, about a position."""

    def save(merged, file):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904

    runtime, _ = trainer()
    monkeypatch.setattr(saving.torch, "save", save)
    with pytest.raises(StoreError, match="as it was: No space left on device"):
        runtime.save(tmp_path / "model.pt")
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_the_earlier_save_whole_and_training_goes_on(tmp_path, monkeypatch):
    runtime, kept = trainer()
    train(runtime, kept, 1)
    runtime.save(tmp_path / "c", **kept)
    before = weights(runtime)
    train(runtime, kept, 1)
    whole = safetensors_file._write_all
    room = iter([True, True, True])

    def write(fd, view, at):
        if not next(room, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model")
        return whole(fd, view, at)

    monkeypatch.setattr(safetensors_file, "_write_all", write)
    with pytest.raises(StoreError, match="was not saved, and what was there is as it was: No space left"):
        runtime.save(tmp_path / "c", **kept)
    monkeypatch.undo()
    train(runtime, kept, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    other, _ = trainer()
    other.load(tmp_path / "c")
    assert equal(weights(other), before)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_says_so(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        runtime_of()[1].save(tmp_path / "c")


def test_a_failed_load_changes_nothing(tmp_path):
    runtime, kept = trainer()
    train(runtime, kept, 2)
    runtime.save(tmp_path / "c", **kept)
    file = next((tmp_path / "c").glob("model-*"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    other, new = trainer()
    train(other, new, 1)
    before, state = weights(other), copy.deepcopy({k: o.state_dict() for k, o in new.items()})
    with pytest.raises(StoreError, match="is damaged"):
        other.load(tmp_path / "c", **new)
    assert equal(weights(other), before)
    assert str({k: o.state_dict() for k, o in new.items()}) == str(state)
    assert other._engine.progress.n_steps == 1


def test_state_that_an_object_refuses_is_taken_back_from_the_others(tmp_path):
    runtime, kept = trainer()
    train(runtime, kept, 2)
    runtime.save(tmp_path / "c", **kept)
    other, new = trainer()
    before = weights(other)

    class Refuses(Loader):
        def load_state_dict(self, state):
            if state["n"]:
                raise KeyError("not mine")

    new["loader"] = Refuses()
    with pytest.raises(StoreError, match="loader does not take the state saved for it: KeyError"):
        other.load(tmp_path / "c", **new)
    assert equal(weights(other), before)
    assert not new["optimizer"].state
    assert new["scheduler"].last_epoch == 0


def test_a_row_of_saves_keeps_the_last_and_goes_on_from_the_last_whole_one(tmp_path, caplog):
    runtime, kept = trainer()
    assert runtime.resume(tmp_path / "run", **kept) == 0
    for _ in range(4):
        train(runtime, kept, 1)
        runtime.save(tmp_path / "run", keep_last=2, **kept)
    names = [f"step-{n:08d}" for n in (3, 4)]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == names
    other, new = trainer(3)
    assert other.resume(tmp_path / "run", **new) == 4
    found = train(other, new, 2)
    assert runtime.resume(tmp_path / "run", **kept) == 4
    assert found == pytest.approx(train(runtime, kept, 2), rel=1e-12)
    file = next((tmp_path / "run" / names[1]).glob("state-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert other.resume(tmp_path / "run", **new) == 3
    assert "going on from the save before it" in caplog.text
    file = next((tmp_path / "run" / names[0]).glob("model-*.safetensors"))
    file.unlink()
    with pytest.raises(StoreError, match="step-00000004"):
        other.resume(tmp_path / "run", **new)


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path):
    runtime, kept = trainer()
    train(runtime, kept, 2)
    at, started = weights(runtime), runtime.save(tmp_path / "c", background=True, **kept)
    train(runtime, kept, 3)
    assert started.wait() == tmp_path / "c"
    assert started.is_done
    other, new = trainer()
    other.load(tmp_path / "c", **new)
    assert equal(weights(other), at)
    assert new["loader"].n == 2
    (tmp_path / "file").write_text("")
    runtime.save(tmp_path / "file" / "inner", background=True)
    with pytest.raises(StoreError, match="was not saved"):
        runtime.save(tmp_path / "other")
    failed = runtime.save(tmp_path / "file" / "inner", background=True)
    with pytest.raises(StoreError, match="was not saved"):
        failed.wait()
    runtime.save(tmp_path / "other")  # who waited has heard of it


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("file", "is a file"),
        ("link", "is a symbolic link"),
        ("other", "holds notes.txt and is no checkpoint"),
        ("nested", "holds folders"),
    ],
)
def test_a_save_destroys_nothing_but_an_earlier_one(tmp_path, there, message):
    _, runtime = runtime_of()
    target, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if there == "file":
        target.write_text("mine")
    elif there == "link":
        target.symlink_to(elsewhere)
    elif there == "other":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        runtime.save(target)
        (target / "inner").mkdir()
    with pytest.raises(StoreError, match=message):
        runtime.save(target)
    assert not list(elsewhere.iterdir())
    assert {p.name for p in tmp_path.iterdir()} == {"c", "elsewhere"}


def test_what_was_added_to_a_save_stays_when_it_is_replaced(tmp_path):
    _, runtime = runtime_of()
    runtime.save(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    runtime.save(tmp_path / "c")
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"
    runtime.load(tmp_path / "c")


def test_one_file_is_the_models_own_state_dict(tmp_path):
    model, runtime = runtime_of(3)
    runtime.save(tmp_path / "model.pt")
    plain = net()
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert equal(plain.state_dict(), model.state_dict())
    assert (tmp_path / "model.pt").stat().st_size < 1.2 * sum(p.nbytes for p in model.parameters()) + 8000
    with pytest.raises(InputError, match="one file of weights"):
        runtime.save(tmp_path / "model.pt", optimizer=torch.optim.SGD(runtime.parameters(), 0.1))
    other, again = runtime_of()
    with torch.no_grad():
        other.low.zero_()
    again.load(tmp_path / "model.pt")
    assert equal(other.state_dict(), model.state_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "low", nn.Parameter(torch.ones(8), requires_grad=False)),
            r"low is bfloat16\[8\] there and float32",
        ),
        (
            lambda m: setattr(m, "norm", nn.LayerNorm(8).double()),
            r"not of this model: norm\.num_batches_tracked",
        ),
        (lambda m: m.inner.append(nn.Linear(8, 8).double()), r"missing: inner\.4\.weight, inner\.4\.bias"),
        (lambda m: m.inner.__delitem__(3), r"not of this model: inner\.3"),
    ],
    ids=["dtype", "other module", "more layers", "fewer layers"],
)
def test_another_model_is_told_by_what_differs(tmp_path, change, message):
    runtime_of()[1].save(tmp_path / "c")
    model = net()
    change(model)
    _, other = runtime_of(model=model)
    before = weights(other)
    with pytest.raises(StoreError, match=message):
        other.load(tmp_path / "c")
    assert equal(weights(other), before)


def test_weights_of_others_are_converted_but_never_taken_with_holes(tmp_path):
    model, runtime = runtime_of()
    state = {n: t.float() if t.is_floating_point() else t for n, t in net().state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    runtime.load(tmp_path)
    assert equal({n: t.to(model.state_dict()[n].dtype) for n, t in state.items()}, model.state_dict())
    state["frozen.bias"][3] = float("nan")
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(StoreError, match=r"frozen\.bias has values that are no numbers"):
        runtime.load(tmp_path)


def test_state_that_cannot_be_kept_is_named(tmp_path):
    runtime, kept = trainer()

    class Odd(Loader):
        def state_dict(self):
            return {"inner": [1, {"made": lambda: 0}]}

    with pytest.raises(StoreError, match=r"objects\.loader\.inner\.1\.made is a builtins\.function"):
        runtime.save(tmp_path / "c", loader=Odd())
    with pytest.raises(InputError, match="scheduler is a int, which has no state_dict"):
        runtime.save(tmp_path / "c", scheduler=3)
    assert not list(tmp_path.iterdir())
    runtime.save(tmp_path / "c", optimizer=kept["optimizer"])
    with pytest.raises(StoreError, match="it holds no state of loader"):
        runtime.load(tmp_path / "c", loader=Loader())


def test_optimizer_state_of_a_rank_without_parameters():
    """Such a rank optimises one empty parameter; another rank has the rest."""
    weight = nn.Parameter(torch.ones(2))
    full = torch.optim.SGD([weight], 0.1, momentum=0.9)
    weight.grad = torch.ones(2)
    full.step()
    none = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    for placeholder in none:
        placeholder.is_placeholder = True
    empty = torch.optim.SGD(none[:1], 0.3)
    cpu = torch.device("cpu")
    states = [collect({"optimizer": full}, [("w", weight)], cpu), collect({"optimizer": empty}, [], cpu)]

    class Read:
        manifest, extras = None, {}

        def __init__(self):
            self.states = states

        def optimizer_states(self, key):
            return [state["optimizers"][key] for state in states]

        def read(self, wanted, stored):
            assert not wanted

    both = [none[1], nn.Parameter(torch.zeros(2))]
    other = torch.optim.SGD([{"params": both[:1]}, {"params": both[1:]}], 0.5)
    restoring = Restoring(Read(), {"optimizer": other}, [("w", both[1])], 0, lambda name: (name,))
    assert not restoring.check()
    restoring.apply()
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.1]
    torch.testing.assert_close(other.state[both[1]]["momentum_buffer"], torch.ones(2))
    with pytest.raises(InputError, match="not this rank's"):
        collect({"optimizer": full}, [], cpu)
    elsewhere = {id(weight)}  # as in an optimizer of model.parameters()
    kept = collect({"optimizer": full}, [], cpu, elsewhere=elsewhere)["optimizers"]["optimizer"]
    assert ([group["params"] for group in kept["groups"]], kept["state"]) == ([[]], {})


def test_dcp_reads_a_checkpoint_too(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, runtime = runtime_of()
    runtime.save(tmp_path / "c")
    state = {n: torch.zeros_like(t) for n, t in model.state_dict().items() if n != "head.weight"}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=open_checkpoint(tmp_path / "c"))
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in state.items())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_reads_a_checkpoint(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, intermediate_size=32)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (4, 8))
    captured = {"input_ids": ids, "labels": ids}
    runtime = Runtime(*make(model, (), captured, n_stages=2, n_ranks=1))
    runtime.save(tmp_path / "c", max_shard_bytes=5000)
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
    again.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    runtime.load(tmp_path / "theirs")
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
