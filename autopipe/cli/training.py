"""A few training steps of a pipe on its own example batch: the work of ``run`` and ``doctor``.

Splitting is left to ``api``; the steps themselves to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..api.agree import in_group, join_group
from ..errors import InputError
from ..look.table import seconds
from ..units import n_of

if TYPE_CHECKING:
    from ..api import Pipe
    from ..costs import CostTable

__all__ = ["job", "train"]

UNSTEADY = 0.04
"""Change of pace from which what was predicted before and what was measured after are told apart."""
WARM_UP = 2
"""Steps that are not among those measured, as far as there are others."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What some steps did: losses, parity before them, seconds predicted and measured.

    ``links``: where the prediction has those between ranks from. ``pace``: how many times as long the same
    work took on this machine's processor after the steps as when costs were measured; 1 where not known.
    """

    n_stages: int
    n_ranks: int
    losses: tuple[float, ...]
    worst_relative_difference: float
    predicted_s: float
    measured_s: float
    timeline: dict[str, Any]
    links: str = ""
    pace: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the timeline is left to ``--out``."""
        out = dataclasses.asdict(self)
        del out["timeline"]
        return {**out, "ratio": self.ratio}

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s if self.predicted_s else float("nan")

    def __str__(self) -> str:
        where = "in this process, one after another" if self.n_ranks == 1 else f"on {self.n_ranks} ranks"
        times = f"predicted {seconds(self.predicted_s)}, measured {seconds(self.measured_s)}"
        return (
            f"{n_of(self.n_stages, 'stage')} {where}\n"
            f"equal to the model within {self.worst_relative_difference:.1e}\n"
            f"loss {' '.join(f'{x:.4f}' for x in self.losses)}\n"
            f"step without the optimizer's {times}, ratio {self.ratio:.2f}"
        ) + self._at_another_pace

    @property
    def _at_another_pace(self) -> str:
        """The prediction for the pace that the processor had during the steps, where it is another."""
        if abs(self.pace - 1) < UNSTEADY:
            return ""
        return (
            f"\nthe processor changed its pace: the same work takes {self.pace:.2f} times as long as when "
            f"costs were measured; predicted for that {seconds(self.predicted_s * self.pace)}, "
            f"ratio {self.ratio / self.pace:.2f}"
        )


@contextlib.contextmanager
def job() -> Iterator[int]:
    """Under torchrun, be in its process group: ranks then plan and run together. Says how many they are."""
    was_in_one = in_group()
    join_group()
    joins = in_group() and not was_in_one
    if joins:
        torch.manual_seed(0)  # factories draw weights and inputs, which must be the same on every rank
    try:
        yield dist.get_world_size() if in_group() else 1
    finally:
        if joins and dist.is_initialized():
            dist.destroy_process_group()


def train(
    pipe: Pipe, steps: int, lr: float, publish: pathlib.Path | None = None, pace_s: float | None = None
) -> Trained:
    """Check parity, then take ``steps`` steps of SGD; the median step is what was measured.

    ``pace_s``: what :func:`autopipe.measure.busy_cores.pace` gave when costs were measured.
    """
    from ..measure.busy_cores import pace

    args, kwargs = pipe.graph.example
    parity = pipe.verify()
    runtime = pipe.runtime(loss_fn=None if _has_loss(pipe) else _mean_square)
    if publish is not None:
        runtime.publish(publish)
    optimizer = torch.optim.SGD(runtime.parameters(), lr=lr)
    losses = []
    for i in range(steps):
        result = runtime.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss))
        if i < min(WARM_UP, steps - 1):
            runtime.engine.records.clear()
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    plan = pipe.plan
    worst = max(parity.max_output_error, parity.max_loss_error, parity.max_gradient_error)
    report = runtime.report()
    if pipe.costs is not None and pipe.costs.source == "measured":
        _remember(pipe, pipe.costs, report)
    return Trained(
        n_stages=plan.n_stages,
        n_ranks=n_ranks,
        losses=tuple(losses),
        worst_relative_difference=worst,
        predicted_s=report.predicted_step_s,
        measured_s=report.measured_step_s,
        timeline=report.timeline.to_dict(),
        links=plan.cluster.local.source,
        pace=pace() / pace_s if pace_s is not None else 1.0,
    )


def _remember(pipe: Pipe, costs: CostTable, report: Any) -> None:
    """Leaves stage times in the ledger that `autopipe profile --recalibrate` reads; one rank does."""
    from ..measure import Store, record

    if not dist.is_initialized() or dist.get_rank() == 0:
        record(Store.default(), pipe.plan, costs, report.to_dict())


def _has_loss(pipe: Pipe) -> bool:
    from ..stages import own_loss, run_stages, undisturbed

    args, kwargs = pipe.graph.example
    with torch.no_grad(), undisturbed(pipe.model):
        leaves = run_stages(pipe.graph, pipe.stages, *pipe.graph.arguments(args, kwargs))
    return own_loss(pipe.graph, leaves) is not None


def _mean_square(output: Any, target: Any) -> torch.Tensor:
    """A stand-in loss of every output that can train."""
    from ..stages import tensors_of

    leaves = [x for x in tensors_of(output) if x.is_floating_point() or x.is_complex()]
    if not leaves:
        raise InputError(
            "the model gives no loss and no floating-point output, so that there is nothing to train it on; "
            "have its forward return its loss, or what a loss is made of"
        )
    return torch.stack([x.abs().square().mean() for x in leaves]).sum()
