"""What ranks find in the process that they are forked from: modules, and what a first capture loads.

Nothing in it trains: a backward knows the devices that there were at the first one, before the fork. A fork
server that an error ended would leave an ``EOFError`` behind and no more: the error is kept for those who are
forked, which end by it.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback

__all__ = ["FAILURE", "check"]

MODULES = (
    "pytest",
    "autopipe.api",
    "autopipe.runtime.checkpoint.loading",
    "torch._dynamo",
    "torch._meta_registrations",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    "replica_checks",
)
OF_EXTRAS = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)


def _warm() -> None:
    for name in MODULES:
        importlib.import_module(name)
    for name in OF_EXTRAS:
        with contextlib.suppress(ImportError):  # which need not be installed
            importlib.import_module(name)
    import torch
    from torch import nn

    import autopipe

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).requires_grad_(False)
    autopipe.split(model, 2, (torch.ones(2, 2),), costs="estimated")


def check() -> None:
    """Raise what the modules or the capture failed with, if they did."""
    if FAILURE:
        raise RuntimeError(f"{__file__}, which is run ahead of all ranks, failed:\n{FAILURE}")


FAILURE = ""
try:
    _warm()
except Exception:
    FAILURE = traceback.format_exc()
