"""The same trial for torch.export with torch.distributed.pipelining.

What is compared, and how, is left to ``trial``.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import nn

from .configs import walk
from .inputs import EXAMPLE
from .trial import N_STAGES, Report, Subject, compare, n_blocks

__all__ = ["try_export"]


def try_export(subject: Subject, report: Report) -> None:
    """Exports the model in evaluation mode and cuts it before layers of its longest list; reports as it goes.

    ``seconds`` is the time inside ``torch.export.export``, which ``pipeline`` calls. Generation caches are
    switched off first, which autopipe does not need. Parity is asked in evaluation mode only, since an
    exported program keeps the mode that it was exported in.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = subject.model
    _switch_caches_off(model)
    args, kwargs = subject.inputs(EXAMPLE)
    export = torch.export.export

    def timed(*given: Any, **options: Any) -> Any:
        start = time.perf_counter()
        program = export(*given, **options)
        seconds = time.perf_counter() - start
        report({"captured": True, "seconds": seconds, "nodes": len(program.graph.nodes)})
        return program

    split = dict.fromkeys(_cuts(model), SplitPoint.BEGINNING)
    with mock.patch("torch.export.export", timed):
        pipe = pipeline(model, mb_args=args, mb_kwargs=kwargs, split_spec=split)
    report({"n_stages": pipe.num_stages, "is_cut": pipe.num_stages >= min(N_STAGES, n_blocks(model))})

    def run(args: Any, kwargs: Any) -> Any:
        return pipe(*args, **{k: v for k, v in kwargs.items() if v is not None})

    report(compare(subject, run, modes=(False,), is_flat=True))


def _cuts(model: nn.Module) -> list[str]:
    """Layers to cut before: three, evenly spaced, of the module list that holds most parameters."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    lists = [(n, m) for n, m in lists if len(m) >= 2]
    if not lists:
        return []
    name, chosen = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    n = min(N_STAGES, len(chosen))
    places = sorted({round(i * len(chosen) / n) for i in range(1, n)})
    return [f"{name}.{place}" for place in places]


def _switch_caches_off(model: nn.Module) -> None:
    for _, part in walk(model.config) if hasattr(model, "config") else ():
        if getattr(part, "use_cache", False):
            part.use_cache = False
