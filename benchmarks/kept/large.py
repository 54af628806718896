"""A model of more than two billion parameters on four ranks, none of which ever holds it whole.

Made on the meta device: first by the model's own init and saved, then read back by ranks of their own. Each
reports how its resident memory grew, by the kernel's own high-water mark.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import autopipe
from autopipe.runtime.peak_memory import resident_bytes

from .faults import Ranks

__all__ = ["Resident", "measure"]

N_RANKS = 4
ROWS, LENGTH = 2, 8
GIVEN_UP_S = 280.0
SIZES = {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 24, "vocab_size": 32000}


class Resident:
    """Resident memory of this process that is not of files: its growth since this was made, and its peak."""

    def __init__(self) -> None:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._at_first = resident_bytes("RssAnon")
        self._files = resident_bytes("RssFile") + resident_bytes("RssShmem")

    @property
    def grown(self) -> int:
        """Bytes more than at first."""
        return resident_bytes("RssAnon") - self._at_first

    @property
    def peak(self) -> int:
        """The most bytes that were resident since, files mapped in between among them, beyond the first."""
        return resident_bytes("VmHWM") - self._at_first - self._files


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 20, "num_key_value_heads": 20, "max_position_embeddings": 64}
    config = LlamaConfig(**SIZES, **heads, tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def _rank(folder: pathlib.Path, is_first: bool) -> None:
    """One rank: make or read its stage, train a step, say what it took."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, ids = _model(), torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH))
    example = {"input_ids": ids.to("meta"), "labels": ids.to("meta")}
    pipe = autopipe.split(model, N_RANKS, (), example, costs="estimated", device="H200", n_microbatches=2)
    dist.barrier()
    path, began_s, memory = folder / "saved", time.perf_counter(), Resident()
    runtime = pipe.runtime(device="cpu", **({} if is_first else {"weights": path}))
    loaded_s, peak, rest = time.perf_counter() - began_s, memory.peak, memory.grown
    own = sum(p.nbytes for p in runtime.parameters())
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "own_bytes": own,
        "loading_peak": peak / own,
        "at_rest": rest / own,
        "loading_s": loaded_s,
    }
    if is_first:
        began_s, memory = time.perf_counter(), Resident()
        runtime.save(path)
        found |= {"saving_peak": memory.peak / own, "saving_s": time.perf_counter() - began_s}
    else:
        optimizer = torch.optim.SGD(runtime.parameters(), 1e-3)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(runtime.step(input_ids=ids, labels=ids).loss.item())
            optimizer.step()
        found |= {"losses": losses, "training_peak": memory.peak / own}
    (folder / f"{'made' if is_first else 'read'}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def measure(root: pathlib.Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """{"made" or "read": what each rank found}."""
    import transformers  # noqa: F401 - here once, for all ranks

    folder = pathlib.Path(tempfile.mkdtemp(prefix="autopipe-large-", dir=root))
    try:
        for is_first in (True, False):
            ranks, until_s = (
                Ranks(N_RANKS, lambda first=is_first: _rank(folder, first)),
                time.monotonic() + GIVEN_UP_S,
            )
            while not ranks.has_ended(range(N_RANKS)) and time.monotonic() < until_s:
                time.sleep(0.1)
            ranks.end()
        return {
            name: [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(N_RANKS)]
            for name in ("made", "read")
        }
    finally:
        shutil.rmtree(folder)
