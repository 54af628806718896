"""From a verb's options to a captured model, its costs, a plan, a pipe.

Loading models is left to ``models``, planning itself to ``api``. This is where torch is first imported.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..costs import CostTable
from ..errors import InputError, PlanError
from ..graph import OpGraph
from ..hardware import Cluster
from ..plans import Plan, check_between
from .options import MODEL_HELP, Making, Planning
from .output import aside

if TYPE_CHECKING:
    from ..api import Pipe
    from ..tracing import Capture
    from .models import Loaded

__all__ = ["ARGUMENTS", "Planned", "Request", "planned"]

SOURCES = ("measured", "estimated")
"""Ways to find costs that need the model; anything else is the path of a cost table."""

ARGUMENTS = {
    "stages": "n_stages",
    "microbatches": "n_microbatches",
    "ranks": "n_ranks",
    "memory": "memory_limit",
}
"""What options of :class:`Planning` are called as arguments of ``autopipe.split``, where not the same."""

_OF_ANY_PLAN = ("schedule", "microbatches", "memory")
"""Options that a plan which is made already can be looked at under."""

TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A model as the options ask for it; each step is made when asked."""

    model: str
    making: Making

    def load(self) -> Loaded:
        """The model and its inputs."""
        from .models import Sizes, load

        m = self.making
        sizes = Sizes(m.batch, m.seq, tuple(m.inputs or ()), m.dtype)
        device = m.device if self._is_torch_device else None
        with aside():
            return load(self.model, meta=m.meta, device=device, sizes=sizes)

    def capture(self) -> Capture:
        """The model, captured."""
        import autopipe

        loaded = self.load()
        with aside():
            return autopipe.capture(loaded.model, loaded.args, loaded.kwargs)

    def profile(self, n_microbatches: int, recalibrate: bool = False) -> tuple[Capture, CostTable]:
        """The captured model and what each op costs for one microbatch.

        ``recalibrate`` corrects them by the stage times that earlier runs left in the ledger, for the graph
        that those runs had: with the same leaves opened.
        """
        source = self.source  # refuses what does not fit before any work
        if recalibrate and source != "measured":
            raise InputError(
                f"--recalibrate corrects costs that are measured here, and these are {source}; leave it out, "
                "or --costs and --device"
            )
        captured = self.capture()
        costs = self.cost(captured, n_microbatches, source)
        if not recalibrate:
            return captured, costs
        from .. import measure

        store = measure.Store.default()
        if leaves := measure.opened(store, captured.ops.digest, costs):
            captured = captured.open(*leaves)
            costs = self.cost(captured, n_microbatches, source)
        return captured, measure.recalibrate(costs, measure.entries(store, captured.ops.digest, costs))

    def cost(
        self, captured: Capture, n_microbatches: int, source: str, dims: Mapping[str, int] | None = None
    ) -> CostTable:
        """What each op costs for one microbatch, of sizes ``dims`` where given; ``source`` says from where.

        Measurements are kept in the user's store, so that an interrupted profile goes on from there.
        """
        import autopipe

        from .. import measure
        from ..api.op_costs import microbatch_dims
        from ..measure import described, device_name, estimate

        if source not in SOURCES:
            return CostTable.read(source)
        where = self.making.device
        if source == "measured":
            store = measure.Store.default()
            with aside():
                options: dict[str, Any] = {"device": where, "store": store, "dims": dims}
                return autopipe.profile(captured, n_microbatches=n_microbatches, **options)
        sizes = dims or microbatch_dims(captured, n_microbatches)
        return estimate(captured, self.hardware or described(device_name(where or "cpu")), dims=sizes)

    @property
    def runs_here(self) -> bool:
        """Whether the plan is for this very job: its costs are measured, and no other links are given."""
        return self.making.cluster is None and self.source == "measured"

    def split(self, how: Planning, cluster: Cluster | None = None) -> Pipe:
        """The model, planned and split, for ``cluster`` where the options name none."""
        import autopipe

        if how.stages in (None, "auto") and how.ranks is None and self.making.cluster is None:
            raise InputError(
                "how many stages to cut the model into is not said; add --stages, such as -n 4, or --ranks "
                "or --cluster to find the best count on up to so many"
            )
        source, loaded = self.source, self.load()
        cut = {ARGUMENTS.get(name, name): value for name, value in dataclasses.asdict(how).items()}
        n_stages = cut.pop("n_stages")
        given = {
            **cut,
            "memory_limit": _limits(how.memory),
            "costs": source,
            "device": self.hardware or self.making.device,
            "cluster": self.making.cluster or cluster,
        }
        known: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        with aside():
            return autopipe.split(loaded.model, n_stages, loaded.args, loaded.kwargs, **known)

    @property
    def _is_torch_device(self) -> bool:
        device = self.making.device
        return device is not None and device.partition(":")[0] in TORCH_DEVICES

    @property
    def hardware(self) -> Any:
        """The described device to estimate for: the one named, or the cluster's first."""
        from ..measure import device

        m = self.making
        if m.device is not None:
            return None if self._is_torch_device else device(m.device)
        if m.cluster is not None and (m.meta or m.costs == "estimated"):
            first = Cluster.read(m.cluster).devices[0]
            return first if m.meta or first.flops_s else None
        return None

    @property
    def source(self) -> str:
        """Where costs come from: as asked, else measured where that can be."""
        m = self.making
        if m.meta and self.hardware is None:
            from ..measure import DEVICES

            raise InputError(
                f"--meta has nothing to measure; say what to estimate for: --device {' or '.join(DEVICES)}, "
                "a device file, or --cluster FILE"
            )
        if m.costs is not None:
            return m.costs
        return "estimated" if m.meta or self.hardware is not None else "measured"


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the op graph and costs behind it where they are known."""

    plan: Plan
    graph: OpGraph | None = None
    costs: CostTable | None = None


def planned(target: str, making: Making, how: Planning, model: str | None = None) -> Planned:
    """What ``target`` means: a plan's JSON, with what ``model`` adds to it, or a model, which is planned.

    Raises :class:`InputError` for options that do not go with a plan that is made already,
    :class:`PlanError` where the plan is for another graph than the model's.
    """
    if not is_plan(target):
        if ":" not in target:
            raise InputError(
                f"{target!r} is neither a plan, a file whose name ends in .json, nor a model: {MODEL_HELP}"
            )
        if model is not None:
            raise InputError(
                f"--model goes with a plan's JSON, and {target} is a model already; leave it out"
            )
        pipe = Request(target, making).split(how)
        return Planned(pipe.plan, pipe.graph.ops, pipe.costs)
    decided = {name: value for name, value in dataclasses.asdict(how).items() if name not in _OF_ANY_PLAN}
    decided["microbatches auto"] = True if how.microbatches == "auto" else None
    refused = [name.replace("_", "-") for name, value in decided.items() if value is not None]
    if refused:
        raise InputError(
            f"--{refused[0]} is already decided in {target}; name the model instead to plan it anew"
        )
    from ..simulator import warn_if_changed

    plan = Plan.from_json(pathlib.Path(target))
    warn_if_changed(plan, target)
    plan = _under(plan, how.memory, making.cluster)
    if model is None:
        alone = dataclasses.replace(
            making, costs=making.costs if making.costs in SOURCES else None, cluster=None
        )
        if alone != Making():
            raise InputError(f"{target} is a plan; options of the model need --model to say which it is")
        costs = None if making.costs is None else CostTable.read(making.costs)
        if costs is not None:
            from ..simulator import check_costs

            check_costs(plan, costs)
        return Planned(plan, None, costs)
    request = Request(model, making)
    source, captured = request.source, _opened(request, plan)
    # microbatches are those that the plan was made for, however many there are now
    dims = plan.settings.get("dims")
    return Planned(plan, captured.ops, request.cost(captured, plan.n_microbatches, source, dims))


def is_plan(target: str) -> bool:
    """Whether a verb's target names a plan's file, and not a model."""
    return target.endswith(".json") and not target.startswith("hf:")


def _limits(memory: str | None) -> str | list[str] | None:
    """One limit for all ranks, or by commas one for each."""
    return memory.split(",") if memory is not None and "," in memory else memory


def _under(plan: Plan, memory: str | None, path: pathlib.Path | None) -> Plan:
    """The plan as it stands, under another memory limit and on a cluster of other links and speeds.

    What its solver proved, and what else it tried, holds for the limit and the cluster that it was made for.
    """
    from ..simulator import on_cluster, simulate

    if memory is None and path is None:
        return plan
    unbounded = dataclasses.replace(plan.bounds, bottleneck_lower_s=0.0, step_lower_s=0.0, proved=False)
    plan = dataclasses.replace(plan, bounds=unbounded, candidates=(), n_candidates=0)
    if memory is not None:
        plan = dataclasses.replace(plan, settings={**plan.settings, "memory_limit": _limits(memory)})
    if path is not None:
        plan = on_cluster(plan, Cluster.read(path))
        bounds = dataclasses.replace(unbounded, bottleneck_s=max(plan.loads_s))
        plan = dataclasses.replace(plan, step_s=simulate(plan).step_s, bounds=bounds)
    return plan


def _opened(request: Request, plan: Plan) -> Capture:
    """The model captured, opened as it was when the plan was made.

    Raises :class:`PlanError` where the plan is for another graph, or contradicts this one.
    """
    captured = request.capture()
    for path in plan.settings.get("opened", ()):
        captured = captured.open(path)
    if captured.ops.digest != plan.graph_digest:
        raise PlanError(
            f"the plan was made for another graph ({plan.graph_digest}) than {request.model} has now "
            f"({captured.ops.digest}); give the same --batch, --seq, --input and --meta, or plan again"
        )
    check_between(plan, captured.ops)
    return captured
