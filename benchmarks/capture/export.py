"""The same trial for torch.export with torch.distributed.pipelining.

What is compared, and how, is left to ``trial``.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .configs import walk
from .inputs import EXAMPLE
from .trial import N_STAGES, Report, Subject, compare, n_blocks

__all__ = ["switch_caches_off", "try_export"]


def try_export(subject: Subject, report: Report) -> None:
    """Exports the model in evaluation mode and cuts it before layers of its longest list; reports as it goes.

    ``seconds`` is the time inside ``torch.export.export``, which ``pipeline`` calls. Generation caches are
    switched off first, which autopipe does not need. Parity is asked in evaluation mode only, since an
    exported program keeps the mode that it was exported in.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = subject.model
    switch_caches_off(model)
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

    def run(*args: Any, **kwargs: Any) -> Any:
        # Pipe.forward detaches what crosses between stages, so its stages are called in turn instead
        return fx.Interpreter(pipe.split_gm).run(*_in_order(pipe.split_gm, args, kwargs))

    report(compare(subject, {"stages": run}, modes=(False,), is_flat=True)["stages"])


def _in_order(module: fx.GraphModule, args: Any, kwargs: Any) -> list[Any]:
    """The arguments in the order of the exported program: by name where all are named, else flat."""
    names = [n.target for n in module.graph.nodes if n.op == "placeholder"]
    if not args and all(name in kwargs for name in names):
        return [kwargs[name] for name in names]
    return [v for v in pytree.tree_leaves((args, kwargs)) if v is not None]


def _cuts(model: nn.Module) -> list[str]:
    """Layers to cut before: items of the outermost module lists, so that parameters are evenly spread."""
    items: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(
            name.startswith(f"{i}.") for i in items
        ):
            for key, item in module.named_children():
                items[f"{name}.{key}" if name else key] = 1 + sum(p.numel() for p in item.parameters())
    total = sum(items.values())
    cuts, done = [], 0
    for path, size in items.items():
        if done and len(cuts) < N_STAGES - 1 and done * N_STAGES >= total * (len(cuts) + 1):
            cuts.append(path)
        done += size
    return cuts


def switch_caches_off(model: nn.Module) -> None:
    """Let a transformers model and its parts give no generation caches, which torch.export does not take."""
    for _, part in walk(model.config) if hasattr(model, "config") else ():
        if getattr(part, "use_cache", False):
            part.use_cache = False
