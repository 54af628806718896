"""Settings every test shares: one thread, fixed seeds, helpers importable from this folder."""

import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import pytest

collect_ignore = ["simulated"]  # importing it makes it this process's accelerator


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
