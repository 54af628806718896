"""Every place that reads a file which a user names refuses what is no file of that kind, and at once."""

import contextlib
import os
import pathlib
import resource
import signal
import socket
import stat
import subprocess
import time

import pytest
import torch

import autopipe
from autopipe import files
from autopipe.errors import AutopipeError, StoreError
from autopipe.measure import device
from autopipe.plans import Plan
from autopipe.runtime.checkpoint.loading import open_checkpoint
from autopipe.schedule import from_csv
from autopipe.schema import load
from autopipe.simulator import watched

LONGEST_S = 60


@pytest.fixture(autouse=True)
def soon():
    """What waits for a pipe's other end is ended."""

    def end(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def planned(**options):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    return autopipe.plan(model, 1, (torch.ones(4, 2),), **{"costs": "estimated", **options})


READERS = {
    "plan": Plan.from_json,
    "schedule": from_csv,
    "device": device,
    "costs": lambda path: planned(costs=path),
    "cluster": lambda path: planned(cluster=path),
    "given plan": lambda path: autopipe.split(torch.nn.Linear(2, 2), args=(torch.ones(4, 2),), plan=path),
    "weights": open_checkpoint,
    "published": lambda path: watched(path.parent),
}
NAMES = {"weights": "weights.safetensors", "published": "rank-0.json"}


def a_pipe(path):
    os.mkfifo(path)


def a_device(path):
    path.symlink_to("/dev/null")


def a_folder(path):
    path.mkdir()


def a_circle_of_links(path):
    path.symlink_to(path.name)


def a_hole(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def other_bytes(path):
    path.write_bytes(b"\xff\xfe{\x00}\x00")


def nothing(path):
    path.write_bytes(b"")


def brackets(path):
    path.write_text("[" * 100_000)


def overlaps(path):
    path.write_text("(" * 8_000 + "0F0" + ")OVERLAP_F_B" * 8_000)


ODD = [a_pipe, a_device, a_folder, a_circle_of_links, a_hole, other_bytes, nothing, brackets, overlaps]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_its_kind_is_refused_by_name(reader, odd, tmp_path):
    path = tmp_path / NAMES.get(reader, "it.json")
    odd(path)
    with pytest.raises(AutopipeError) as raised:
        READERS[reader](path)
    if odd in (a_pipe, a_device, a_circle_of_links, a_hole, other_bytes):
        assert str(tmp_path) in str(raised.value)


def absent(path):
    pass


def under_a_file(path):
    path.write_text("")
    return path / "it.json"


@pytest.mark.parametrize(
    ("odd", "remedy"),
    [
        (absent, "give the path of one that is there"),
        (under_a_file, "give the path of one that is there"),
        (a_folder, "give the file itself"),
        (a_hole, "at most [0-9]+; give another"),
        (a_circle_of_links, "give another"),
        (other_bytes, "give one of text in UTF-8"),
    ],
)
def test_what_cannot_be_read_says_what_to_give_instead(odd, remedy, tmp_path):
    path = tmp_path / "it.json"
    path = odd(path) or path
    with pytest.raises(StoreError, match=f"cannot read the plan from .*{remedy}"):
        load(path, "the plan")
    with pytest.raises(StoreError, match=f"cannot read a schedule from .*{remedy}"):
        from_csv(path)


def test_a_socket_is_refused(tmp_path):
    path = tmp_path / "it.json"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        with pytest.raises(StoreError, match=r"cannot read the plan from .*it\.json"):
            load(path, "the plan")


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="there are no such files here")
def test_a_file_is_read_to_its_end_and_no_further_whatever_size_it_says_it_has():
    path = "/proc/self/status"
    assert files.open_regular(path)[1] == 0
    assert "Name:" in files.read_text(path, 1 << 20)
    with pytest.raises(StoreError, match="at most 64"):
        files.read_text(path, 64)


def test_the_mark_that_editors_put_before_utf_8_is_no_part_of_the_text(tmp_path):
    made = planned()
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + made.to_json().encode())
    assert Plan.from_json(path) == Plan.from_json(made.to_json())


def test_bytes_of_as_many_as_may_be_are_read(tmp_path):
    path = tmp_path / "it"
    path.write_bytes(bytes(3 << 20))
    assert len(files.read_bytes(path, 3 << 20)) == 3 << 20
    with pytest.raises(StoreError, match="at most"):
        files.read_bytes(path, (3 << 20) - 1)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_what_cannot_be_written_whole_leaves_what_was_there(size, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))  # as a disk that is full, also by the last bytes
    try:
        with pytest.raises(StoreError, match=r"cannot write .*plan\.json: File too large; give a place"):
            files.write_text(path, "x" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_of_a_link_the_target_is_written_with_the_permissions_it_has(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    files.write_text(link, "\u00e9")
    assert link.is_symlink()
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == ("\u00e9".encode(), 0o600)


def test_a_pipe_is_written_to_where_somebody_reads_it(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(StoreError, match="cannot write"):
        files.write_text(path, "x")
    text = "x" * (1 << 18)  # more than a pipe holds
    read = tmp_path / "read"
    with read.open("w") as file, subprocess.Popen(["cat", path], stdout=file):
        for _ in range(1000):  # until it has opened the pipe
            with contextlib.suppress(StoreError):
                files.write_text(path, text)
                break
            time.sleep(0.01)
    assert read.read_text() == text
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize(
    "write", [lambda plan, path: plan.to_json(path), lambda plan, path: plan.to_html(path)]
)
def test_whatever_is_written_for_a_user_is_written_whole(write, tmp_path):
    path = tmp_path / "a" / "b"
    with pytest.raises(StoreError, match=r"cannot write .* No such file"):
        write(planned(), path)
    path.parent.mkdir()
    path.write_text("before")
    inode = path.stat().st_ino
    write(planned(), path)
    assert path.stat().st_ino != inode
    assert [entry.name for entry in path.parent.iterdir()] == ["b"]
