"""Settings every test shares: one thread, fixed seeds, helpers importable from this folder."""

import gc
import os
import pathlib
import socket
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import hypothesis
import pytest
import tqdm

hypothesis.settings.register_profile("any pace", deadline=None)  # how fast a machine is fails no property
hypothesis.settings.load_profile("any pace")
gc.set_threshold(50_000)  # most of what imports and captures make stays; the search for garbage took a tenth
tqdm.tqdm.monitor_interval = 0  # its thread outlives the test that shows progress, and may warn in another


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Workers tell which test runs next at once: small messages in a row would wait 40 ms for one another."""
    told = getattr(getattr(config, "failures_db", None), "sock", None)
    if told is not None:
        told.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_finish():
    """What is imported stays for good; searching it for garbage is a seventh of small tests."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path):
    """Only tests are collected, not what they import or start: doctests would import all of that here."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


@pytest.fixture(autouse=True)
def _seeded():
    import torch
    from zoo.observe import seed_torch

    seed_torch(0)
    torch.set_num_threads(1)
