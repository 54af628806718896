"""How large what is run is, and on which device.

What is run is left to ``alone`` and ``ranks``.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import torch

__all__ = ["SIZES", "Size", "device_of"]

TESTS = pathlib.Path(__file__).parents[2] / "tests"


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A language model of ``blocks`` blocks ``d`` wide, its batch, and how often things are repeated."""

    blocks: int
    d: int
    vocab: int
    length: int
    rows: int
    n_microbatches: int
    rounds: int
    steps: int

    @property
    def model(self) -> dict[str, int]:
        """Options of ``benchmarks.runtime.models.language_model``."""
        return {"n_blocks": self.blocks, "d": self.d, "vocab": self.vocab, "length": self.length}


SIZES = {
    "full": Size(16, 2048, 32768, 1024, 16, 8, 8, 3),
    "exact": Size(8, 256, 4096, 128, 8, 8, 0, 3),
    "tiny": Size(6, 16, 64, 8, 8, 4, 2, 1),
}


def device_of(kind: str, rank: int = 0) -> torch.device:
    """The device of a rank: the one card that all share, or a simulated one, which is loaded."""
    if kind == "sim":
        os.environ.setdefault("SIM_CARD", "one")
        sys.path.insert(0, str(TESTS))
        import simulated
        import simulated.group  # noqa: F401

        return torch.device("sim", 0)
    return torch.device(kind, 0)
