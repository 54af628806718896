"""Rows of saves and odd file systems: what is in the way stays, what is meant otherwise is said."""

import errno
import os
import stat
import types

import pytest
import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError, StoreError
from autopipe.runtime import Runtime
from autopipe.runtime.files import folder


def runtime_of(*more, seed=0, n_stages=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), *more, nn.Linear(4, 4))
    made = make(model, (torch.randn(8, 4),), {}, n_stages=n_stages, n_ranks=1)
    return model, Runtime(*made, loss_fn=F.mse_loss, schedule="gpipe")


def row_of(runtime, root, *numbers, keep_last=9):
    for n in numbers:
        runtime._engine.progress.n_steps = n
        runtime.save(root, keep_last=keep_last)


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_a_save_and_a_row_of_them_are_told_apart(tmp_path):
    """Beginning from nothing because of a slip in a path would lose a run without a word."""
    _, runtime = runtime_of()
    row_of(runtime, tmp_path / "run", 3)
    runtime.save(tmp_path / "c")
    runtime.save(tmp_path / "one.pt")
    for path in (tmp_path / "c", tmp_path / "one.pt", tmp_path / "run" / "step-00000003"):
        with pytest.raises(InputError, match=r"but a save itself: load\(\) reads it"):
            runtime.resume(path)
    with pytest.raises(StoreError, match=r"is a row of saves: resume\(\) .* step-00000003"):
        runtime.load(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert runtime.resume(tmp_path / "empty") == runtime.resume(tmp_path / "none") == 0


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://a/b", "hf://x"])
def test_a_place_that_is_no_folder_here_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    _, runtime = runtime_of()
    for call in (runtime.save, runtime.load, runtime.resume):
        with pytest.raises(InputError, match="would be a folder of that name here"):
            call(path)
    assert not names(tmp_path)


def test_what_others_put_in_a_row_stays(tmp_path, caplog):
    _, runtime = runtime_of()
    row_of(runtime, tmp_path, 1, 2, 3)
    (tmp_path / "step-00000001" / "samples").mkdir()
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    (tmp_path / "step-7").symlink_to("step-00000003")
    (tmp_path / "log.txt").write_text("")
    row_of(runtime, tmp_path, 4, 5, keep_last=1)
    assert names(tmp_path) == [
        "log.txt", "step-00000001", "step-00000005", "step-00000008", "step-00000009", "step-7",
    ]  # fmt: skip
    assert "it holds folders that no save makes (samples)" in caplog.text
    _, again = runtime_of(seed=1)
    assert again.resume(tmp_path) == 5
    with pytest.raises(StoreError, match="is a file"):
        row_of(runtime, tmp_path, 8)
    assert again.resume(tmp_path) == 5


@pytest.fixture
def without_exchange(monkeypatch):
    """A file system, such as NFS, on which two directories cannot be swapped at once."""
    monkeypatch.setattr(folder, "ctypes", types.SimpleNamespace(CDLL=lambda *_, **__: object()))


@pytest.mark.usefixtures("without_exchange")
def test_a_row_goes_on_from_what_a_kill_left_set_aside(tmp_path):
    _, runtime = runtime_of()
    row_of(runtime, tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.12345678.old")
    _, again = runtime_of(seed=1)
    assert again.resume(tmp_path) == 2
    row_of(runtime, tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.12345678.old")
    row_of(runtime, tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.usefixtures("without_exchange")
def test_a_swap_that_fails_halfway_is_taken_back(tmp_path, monkeypatch):
    model, runtime = runtime_of()
    runtime.save(tmp_path / "c")
    wanted = model[0].weight.detach().clone()
    rename = folder.pathlib.Path.rename

    def fails(self, target):
        if self.name.endswith(".part"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(folder.pathlib.Path, "rename", fails)
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(StoreError, match="was not saved, and what was there is as it was"):
        runtime.save(tmp_path / "c")
    assert names(tmp_path) == ["c"]
    runtime.load(tmp_path / "c")
    assert torch.equal(model[0].weight, wanted)


def test_a_file_system_without_locks_or_flushed_folders(tmp_path, monkeypatch):
    """As of Lustre mounted without locks, or of what a user's program serves."""
    fsync = os.fsync

    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def files_only(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(folder.fcntl, "flock", no_locks)
    monkeypatch.setattr(os, "fsync", files_only)
    _, runtime = runtime_of()
    runtime.save(tmp_path / "c")
    runtime.save(tmp_path / "c")
    row_of(runtime, tmp_path / "run", 1, 2, 3, keep_last=2)
    assert runtime.resume(tmp_path / "run") == 3
    assert names(tmp_path) == ["c", "run"]
    assert names(tmp_path / "run") == ["step-00000002", "step-00000003"]


def test_a_folder_that_cannot_be_flushed_after_the_rename_is_told(tmp_path, monkeypatch, caplog):
    """The save is in its place by then: to say that it is not would be false."""
    _, runtime = runtime_of()
    sync = folder.sync

    def fails(path):
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(folder, "sync", fails)
    runtime.save(tmp_path / "c")
    assert "is whole, but may go with a crash of its host" in caplog.text
    monkeypatch.undo()
    runtime.load(tmp_path / "c")


def test_draws_of_forwards_go_on_too(tmp_path):
    _, runtime = runtime_of(nn.Dropout(0.5))
    x = torch.randn(8, 4)
    seen = [runtime.forward(x) for _ in range(2)]
    runtime.save(tmp_path / "c")
    wanted = [runtime.forward(x) for _ in range(2)]
    _, again = runtime_of(nn.Dropout(0.5), seed=1, n_stages=1)
    again.load(tmp_path / "c")
    found = [again.forward(x) for _ in range(2)]
    torch.testing.assert_close(found, wanted)
    assert not any(torch.equal(a, b) for a in found for b in seen)
