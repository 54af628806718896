"""The job's key: one for each user of a host, which no other can read; where there is none, a warning."""

import os
import pathlib

import pytest

from autopipe.runtime.wire.job_key import KEY_VARIABLE, job_key


@pytest.fixture(autouse=True)
def one_host(monkeypatch, tmp_path):
    for name in (KEY_VARIABLE, "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_is_the_same_for_all_ranks_and_another_for_another_user(monkeypatch, tmp_path, caplog):
    first = job_key()
    assert job_key() == first
    assert (tmp_path / "autopipe" / "job-key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert job_key() != first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert job_key() != first
    monkeypatch.setenv(KEY_VARIABLE, "ours")
    given = job_key()
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert job_key() == given
    assert not caplog.records


def short(path):
    path.write_bytes(b"")


def read_by_others(path):
    path.chmod(0o644)


def link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [short, read_by_others, link, folder])
def test_a_secret_that_is_none_is_told(tmp_path, caplog, spoil):
    first = job_key()
    spoil(tmp_path / "autopipe" / "job-key")
    assert job_key() != first
    assert "no secret of this user can be kept" in caplog.text
    assert KEY_VARIABLE in caplog.text


def test_a_user_without_a_home_is_told(monkeypatch, caplog):
    """As in a container that runs under any number."""
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", home)
    assert len(job_key()) == 32
    assert "Could not determine home directory" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_home_that_cannot_be_written_is_told(tmp_path, caplog):
    tmp_path.chmod(0o500)
    assert len(job_key()) == 32
    assert "Permission denied" in caplog.text
