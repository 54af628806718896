"""What modules keep beside their tensors: ``get_extra_state``, saved once and put back wherever it is used.

Files are left to ``saving`` and ``loading``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...stages import Stage
from ..files.stored_tensor import EXTRA, is_extra

__all__ = ["extra_modules", "held_extras", "named_tensors"]


def named_tensors(stage: Stage) -> dict[str, Tensor]:
    """A stage's parameters and persistent buffers themselves, under the model's names, ties under each."""
    return {n: t for n, t in stage.state_dict(keep_vars=True).items() if not is_extra(n)}


def extra_modules(model: nn.Module, stages: Sequence[Stage], rank: int | None) -> dict[str, nn.Module]:
    """The modules that keep such state, by its name: those ``rank`` saves, or all with None.

    It is saved by the lowest rank whose stages hold the module, and by rank 0 where none does.
    """
    ranks: dict[int, int] = {}
    for stage in sorted(stages, key=lambda s: s.rank):
        for module in stage.modules():
            ranks.setdefault(id(module), stage.rank)
    return {
        f"{path}.{EXTRA}".lstrip("."): module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and rank in (None, ranks.get(id(module), 0))
    }


def held_extras(model: nn.Module, own: Sequence[Stage], stages: Sequence[Stage]) -> dict[str, nn.Module]:
    """Those this process uses: of its stages' modules, and of modules that no stage holds."""
    here = {id(m) for stage in own for m in stage.modules()}
    anywhere = {id(m) for stage in stages for m in stage.modules()}
    every = extra_modules(model, stages, None)
    return {name: m for name, m in every.items() if id(m) in here or id(m) not in anywhere}
