"""Folders, files and sockets of another user: what may not be touched is told, and is as it was."""

import os
import pathlib
import socket
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import AutopipeError
from autopipe.runtime import Runtime
from autopipe.runtime.wire.board import Board
from autopipe.runtime.wire.host_links import connect
from autopipe.runtime.wire.job_key import job_key

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


@pytest.fixture
def place():
    """A folder that all may enter."""
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name)
        path.chmod(0o755)
        yield path


def as_another_user(work):
    """What ``work`` returns or raises, as text, in a process of a user who may do nothing."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode()[:4000])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        said = told.read()
    os.waitpid(pid, 0)
    return said


def runtime_of(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = make(model, (torch.randn(4, 4),), {}, n_stages=2, n_ranks=1)
    return model, Runtime(*made, loss_fn=F.mse_loss, schedule="gpipe")


def changes_nothing(call):
    """``call``, which must raise and leave the model as it was."""
    model, runtime = runtime_of(1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    try:
        call(runtime)
    except AutopipeError as error:
        same = all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        return f"{type(error).__name__}, {'the same' if same else 'changed'}: {error}"
    return "nothing was raised"


def test_a_folder_that_may_only_be_read(place):
    model, mine = runtime_of()
    mine.save(place / "c")
    mine.save(place / "run", keep_last=2)

    def work():
        other, runtime = runtime_of(1)
        runtime.load(place / "c")
        assert torch.equal(other[0].weight, model[0].weight)
        assert runtime.resume(place / "run") == 0
        saves = [
            changes_nothing(lambda rt: rt.save(place / "d")),
            changes_nothing(lambda rt: rt.save(place / "c")),
            changes_nothing(lambda rt: rt.save(place / "one.pt")),
            changes_nothing(lambda rt: rt.save(place / "run", keep_last=1)),
            changes_nothing(lambda rt: rt.save(place / "e", background=True).wait()),
        ]
        return all("StoreError, the same" in s and "Permission denied" in s for s in saves) or saves

    before = sorted(p.relative_to(place) for p in place.rglob("*"))
    assert as_another_user(work) == "True"
    assert sorted(p.relative_to(place) for p in place.rglob("*")) == before


@pytest.mark.parametrize("what", ["c", "c/autopipe.json", "c/model-00001-of-00001.safetensors", "one.pt"])
def test_what_may_not_be_read(place, what):
    _, mine = runtime_of()
    mine.save(place / "c")
    mine.save(place / "one.pt")
    (place / what).chmod(0o700 if what == "c" else 0o600)
    path = place / what.partition("/")[0]
    said = as_another_user(lambda: changes_nothing(lambda rt: rt.load(path)))
    assert said.startswith("StoreError, the same: cannot read"), said
    if what == "c":
        said = as_another_user(lambda: changes_nothing(lambda rt: rt.resume(path / "run")))
        assert said.startswith("StoreError, the same: cannot read"), said
        said = as_another_user(lambda: changes_nothing(lambda rt: rt.save(path / "run")))
        assert "StoreError, the same" in said, said


@pytest.mark.parametrize("is_sticky", [True, False])
def test_a_save_of_another_user_is_replaced_whole_or_not_at_all(place, is_sticky):
    """As in ``/tmp``, where nobody may rename what is another's, or in a folder of a group."""
    model, mine = runtime_of()
    mine.save(place / "c")
    place.chmod(0o1777 if is_sticky else 0o777)
    other, theirs = runtime_of(1)
    said = as_another_user(lambda: theirs.save(place / "c").path)
    after, runtime = runtime_of(2)
    runtime.load(place / "c")
    expected = model if is_sticky else other
    assert torch.equal(after[0].weight, expected[0].weight), said
    assert ("StoreError" in said) == is_sticky
    runtime.save(place / "c")
    assert [p.name for p in place.iterdir()] == ["c"]


def test_the_key_of_another_user(place, monkeypatch):
    for name in ("AUTOPIPE_JOB_KEY", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    key = job_key().hex()
    assert as_another_user(lambda: job_key().hex()) != key
    for mode in (0o644, 0o666):
        (place / "autopipe").chmod(0o755)
        (place / "autopipe" / "job-key").chmod(mode)
        assert as_another_user(lambda: job_key().hex()) != key
    os.chown(place / "autopipe" / "job-key", NOBODY, NOBODY)
    (place / "autopipe" / "job-key").chmod(0o600)
    planted = as_another_user(lambda: job_key().hex())
    assert job_key().hex() != planted, "a secret that another user put there is none"


@pytest.mark.timeout(30)
def test_another_user_does_not_reach_the_door():
    board, links = Board(dist.HashStore(), "door", lambda: 10.0), {}
    thread = threading.Thread(target=lambda: links.update(connect(board, 0, 2, lambda rank: None)))
    thread.start()
    while (path := board.look("door/0")) is None:
        pass

    def work():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
        return "in"

    assert "Permission" in as_another_user(work)
    board.post("knock/1/0", "")  # rank 1 is of another host
    thread.join(10)
    assert not links
    assert not pathlib.Path(path).parent.exists()
