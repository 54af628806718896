"""The verbs: capture, profile, plan, simulate, and ``split``, which does them all and builds the stages.

Each verb's work is left to its own room; what is here are defaults and the order of things.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import operator
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import accelerator, measure
from ..arguments import brief, number, whole
from ..costs import CostTable
from ..errors import InputError
from ..graph import Op
from ..hardware import Cluster, Device, Link
from ..measure.load import places
from ..plans import Plan
from ..schema import load
from ..simulator import Timeline
from ..simulator import simulate as _simulate
from ..solve import SEVERAL_PER_RANK, solve
from ..tracing import Capture, device_of
from ..tracing import capture as _capture
from .agree import decide_once, in_group, join_group, make_alike
from .checks import MOST_MICROBATCHES, check_model, check_names, check_options, check_plan
from .pipe import Pipe
from .refine import Planned, refine
from .training import Training

__all__ = ["capture", "plan", "profile", "simulate", "split"]

_logger = logging.getLogger(__name__)

MICROBATCHES_PER_STAGE = 4
"""Default microbatches per stage: a uniform 1F1B then idles at most a fifth of the time."""


def capture(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Capture:
    """Record ``model`` as a graph by running it once on example inputs, as in ``torch.export``.

    Without inputs they are inferred where the model tells them. Options are those of
    :func:`autopipe.tracing.capture`: ``open``, ``closed``, ``dynamic``.
    """
    check_model(model, args, kwargs)
    check_names("capture", options, _capture)
    check_options(options)
    return _capture(model, tuple(args), dict(kwargs or {}), **options)


def profile(
    model: nn.Module | Capture,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n_microbatches: int = 1,
    **options: Any,
) -> CostTable:
    """Measure what each op of the model costs on its device, for one of ``n_microbatches`` microbatches.

    Options are those of :func:`autopipe.measure.profile`.
    """
    check_model(model, args, kwargs)
    pieces = whole("n_microbatches", n_microbatches, most=MOST_MICROBATCHES)
    check_names("profile", options, measure.profile)
    check_options(options)
    where = options.get("device")
    if isinstance(where, Device) or (isinstance(where, str) and not _is_torch_device(where)):
        raise InputError(f"device is {brief(where)}; measuring needs a torch device of this machine")
    captured = model if isinstance(model, Capture) else capture(model, args, kwargs)
    dims = {**_microbatch_dims(captured, pieces), **(options.pop("dims", None) or {})}
    return measure.profile(captured, dims=dims, **options)


def simulate(plan: Plan, **options: Any) -> Timeline:
    """Predict a step of ``plan``: every action, the bubble by cause and memory over time.

    Options are those of :func:`autopipe.simulator.simulate`, such as another ``schedule`` or
    ``n_microbatches``.
    """
    check_plan(plan)
    check_names("simulate", options, _simulate)
    return _simulate(plan, **options)


def plan(
    model: nn.Module | Capture,
    n_stages: int | str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """Plan without building stages; works on the meta device. Options are those of :func:`split`."""
    check_model(model, args, kwargs)
    _check_options("plan", {**options, "n_stages": n_stages})
    join_group()
    return _plan(model, n_stages, args, kwargs, **options).plan


def split(
    model: nn.Module,
    n_stages: int | str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | str | pathlib.Path | None = None,
    stall_limit_s: float | None = None,
    **options: Any,
) -> Pipe:
    """Split an unmodified model into ``n_stages`` balanced pipeline stages.

    Parameters
    ----------
    model: any ``nn.Module``; it is not changed, and the stages hold its own parameters.
    n_stages: how many stages in all, at least 1; ``"auto"`` (or None) for as many as make the fastest step on
        at most the ranks there are, of the cluster, ``n_ranks`` or the process group (all of which take
        part). ``plan.candidates`` has what was tried.
    args, kwargs: example inputs, a whole batch, as in ``torch.export``; inferred for models that tell
        them (transformers' ``dummy_inputs``, Lightning's ``example_input_array``, and such).
    n_ranks: how many processes share the stages; by default the cluster's, else the process group's, else
        what the schedule needs for ``n_stages``.
    n_microbatches: pieces of a batch per step, or ``"auto"``; by default four per stage, at most the batch.
    schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``looped-bfs``, ``zb-h1``, ``zb-h2``, ``zbv``,
        ``dualpipev``, ``cost-aware`` (made from the plan's times) or ``auto``.
    balance: what to balance: ``"cost"``, ``"parameters"``, ``"uniform"`` (leaf modules), or a callable
        from :class:`autopipe.graph.Op` to a weight.
    costs: ``"measured"`` on the device, ``"estimated"`` from FLOPs and bytes, or a
        :class:`CostTable` or the path of one saved.
    cluster: a :class:`Cluster` or the path of a cluster file; by default equal devices on one host.
    device_order: ``"hosts"`` lays the stages on the cluster's ranks host by host, ``"given"`` in the ranks'
        order, ``"auto"`` in the best.
    device: where to measure; or, to estimate, a :class:`Device`, the name of a described one (``"H200"``)
        or a JSON file; by default the model's own, and of a model that is on the CPU or nowhere the rank's
        accelerator in a job that has some, where its stages will train.
    memory_limit: per rank, such as ``"70GB"``, or a list of one for each rank.
    recompute: what runs again in backward instead of being kept: ``"never"``, ``"auto"`` (the cheapest
        blocks, leaf modules or groups, that let a stage fit) or ``"always"`` (whole stages).
    ties: tied parameters: ``"sync"`` (a copy per stage, gradients summed), ``"colocate"``, or ``"auto"``.
    pin: module path → stage, such as ``{"lm_head": 3}``.
    store: a folder that keeps measurements between runs and models; by default nothing is kept.
    precision: how its parameters are kept: ``"fp32"``, ``"bf16-mixed"`` (fp32 master and gradients: 18 bytes
        a parameter with Adam), ``"bf16"`` (nothing else) or ``"fp8"``; by default as the model's own are.
    optimizer: whose state is counted: ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"muon"`` or
        ``"adam-8bit"``.
    offload: what is in the host's memory, priced by what crosses the device's link to it.
        ``"activations"``: what a microbatch's forward keeps for its backward; the runtime moves it.
        ``"optimizer"``: the optimizer's state and master weights; moving those is left to the optimizer that
        the user takes. ``"all"``: both.
    optimizer_bytes_per_parameter_byte: what there is beside weights and gradients, in place of these three.
    time_limit_s: how long the solver may look for a proof, over all grains of the graph that are tried; past
        it the plan says how far from optimal the cut can be at most. By default 2 s for each, more for large
        graphs, up to 20 s. Ctrl-C does the same at once.
    dynamic: ``"auto"`` lets every input size vary that the model lets vary; False fixes them all.
    open, closed: lists of paths of modules to record the inside of, or to keep whole.
    plan: build the stages of this plan instead of solving.
    stall_limit_s: how long a rank may give no sign of life while ranks plan together; by default 60 s, and
        five times as long until its first.

    Returns the :class:`Pipe`. On several ranks every one must call it: one measures and solves, all hold the
    same plan. A process that ``torchrun`` started and that is in no process group yet joins the others.

    Raises
    ------
    ModelError: the model refuses the example inputs; its own error is the cause.
    CaptureError: the model cannot be recorded; says file and line.
    InfeasibleError: no plan meets the limits; says the smallest change that would.
    PlanError: a given plan is for another graph, or ranks disagree on the model.

    Example
    -------
    >>> import torch, autopipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> pipe = autopipe.split(model, 2, (torch.randn(6, 8),), costs="estimated")
    >>> len(pipe.stages), tuple(pipe(torch.randn(3, 8)).shape)
    (2, (3, 4))
    """
    check_model(model, args, kwargs)
    if stall_limit_s is not None:
        number("stall_limit_s", stall_limit_s, above=True, most=1e9, unit="seconds")
    join_group(stall_limit_s)
    if plan is not None:
        if not isinstance(plan, (Plan, str, pathlib.Path)):
            check_plan(plan)
        given = plan if isinstance(plan, Plan) else Plan.from_json(plan)
        _check_decided(given, n_stages, options)
        check_options(options)
        captured = _capture_for(given, model, args, kwargs, options, stall_limit_s)
        return Pipe(captured, given)
    _check_options("split", {**options, "n_stages": n_stages})
    planned = _plan(model, n_stages, args, kwargs, stall_limit_s=stall_limit_s, **options)
    return Pipe(planned.capture, planned.plan, planned.costs)


def _check_options(verb: str, options: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` for a name that is none of the verb's options, or a value it cannot have."""
    check_names(verb, options, _plan, solve)
    check_options(options)


def _check_decided(given: Plan, n_stages: int | str | None, options: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` for what a given plan has already decided otherwise, or would ignore."""
    if n_stages not in (None, "auto", given.n_stages):
        raise InputError(
            f"n_stages is {n_stages}, but the given plan has {given.n_stages} stages; leave n_stages out, or "
            "plan again"
        )
    ignored = sorted(set(options) - {"dynamic", "open", "closed"})
    if ignored:
        raise InputError(
            f"a given plan has decided everything, so {', '.join(ignored)} would be ignored; leave it out or "
            "plan again with it"
        )


def _capture_for(
    given: Plan,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    limit_s: float | None,
) -> Capture:
    """The capture a plan was made for: leaves that were opened then are opened again."""
    how = {**options, "open": (*options.get("open", ()), *given.settings.get("opened", ()))}
    return make_alike(
        "the plan",
        lambda: capture(model, args, kwargs, **how),
        lambda _: hashlib.sha256(given.to_json().encode()).hexdigest()[:16],
        limit_s,
    )


def _plan(
    model: nn.Module | Capture,
    n_stages: int | str | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n_ranks: int | None = None,
    n_microbatches: int | str | None = None,
    schedule: str = "1f1b",
    balance: str | Callable[[Op], float] = "cost",
    costs: str | CostTable | pathlib.Path = "measured",
    cluster: Cluster | str | pathlib.Path | None = None,
    device: str | torch.device | Device | None = None,
    memory_limit: str | int | Sequence[str | int] | None = None,
    ties: str = "auto",
    pin: Mapping[str, int] | None = None,
    dynamic: Any = "auto",
    open: Sequence[str] = (),
    closed: Sequence[str] = (),
    store: str | pathlib.Path | None = None,
    time_limit_s: float | None = None,
    precision: str | None = None,
    optimizer: str = "adam",
    offload: str = "never",
    stall_limit_s: float | None = None,
    **solver: Any,
) -> Planned:
    training = Training(precision, optimizer, offload, solver.pop("optimizer_bytes_per_parameter_byte", None))
    wanted = None if n_stages in (None, "auto") else operator.index(n_stages)  # type: ignore[arg-type]
    captured = make_alike(
        "the captured graph",
        lambda: _captured(model, args, kwargs, dynamic=dynamic, open=open, closed=closed),
        lambda made: made.ops.digest,
        stall_limit_s,
    )
    device = _of_the_job(captured) if device is None else device

    here: list[Capture] = []

    def decide() -> tuple[Plan, CostTable, tuple[str, ...]]:
        ranks = _cluster(captured, cluster, n_ranks, wanted, schedule, device)
        if training.moves_activations and solver.get("recompute") == "always":
            raise InputError(
                f"offload is {offload!r} and recompute is 'always': stages that run again keep nothing to "
                "offload; use recompute='never' or 'auto'"
            )
        if training.moves_activations and cluster is None and _is_host(captured, device):
            raise InputError(
                f"offload is {offload!r}, but the stages run on this machine's processor, whose memory is "
                "the host's already; leave it out, or name what to plan for: device='H200', or a cluster"
            )
        most = ranks.n_ranks * _stages_per_rank(schedule)
        pieces = _n_microbatches(captured, n_microbatches, most if wanted is None else wanted)
        planned = refine(
            captured,
            lambda c: training.priced(
                _costs(c, costs, device, _microbatch_dims(c, pieces), store, training.autocast(c)),
                ranks,
                c.ops,
            ),
            lambda c, table, left_s: solve(
                c.ops,
                table,
                ranks,
                n_stages=wanted,
                min_ranks=ranks.n_ranks if in_group() else 1,
                n_microbatches="auto" if n_microbatches == "auto" else pieces,
                schedule=schedule,
                balance=balance,
                memory_limit=memory_limit,
                ties=ties,
                pin=pin,
                time_limit_s=left_s,
                optimizer_bytes_per_parameter_byte=training.ratio(c.ops),
                **solver,
            ),
            may_open=balance == "cost" and costs in ("measured", "estimated"),
            time_limit_s=time_limit_s,
        )
        here.append(planned.capture)
        opening: dict[str, Any] = {"opened": list(planned.opened), "opened_from": captured.ops.digest}
        opening |= training.written
        uncounted = [note for note in planned.costs.notes if measure.UNCOUNTED in note]
        if uncounted and planned.costs.source == "estimated":
            opening["uncounted"] = uncounted[0]
            _logger.warning("the plan rests on estimates in which %s", uncounted[0])
        settings = {**planned.plan.settings, **opening}
        return dataclasses.replace(planned.plan, settings=settings), planned.costs, planned.opened

    made, table, opened = decide_once(decide, _decision_to_text, _decision_of_text, stall_limit_s)
    if here:
        captured = here[0]
    elif opened:
        captured = captured.open(*opened)
    return Planned(captured, table, made, opened)


def _captured(
    model: nn.Module | Capture, args: Sequence[Any], kwargs: Mapping[str, Any] | None, **how: Any
) -> Capture:
    """The model recorded so, or as it was recorded already."""
    if not isinstance(model, Capture):
        return capture(model, args, kwargs, **how)
    given = [name for name, value in how.items() if value not in ("auto", (), [])]
    if given:
        raise InputError(
            f"model is a capture already, for which {', '.join(given)} would be ignored; give that to "
            "autopipe.capture, or pass the model itself"
        )
    return model


def _decision_to_text(decided: tuple[Plan, CostTable, tuple[str, ...]]) -> str:
    made, table, opened = decided
    return json.dumps([made.to_json(), table.to_dict(), opened])


def _decision_of_text(text: str) -> tuple[Plan, CostTable, tuple[str, ...]]:
    made, table, opened = json.loads(text)
    return Plan.from_json(made), CostTable.from_dict(table), tuple(opened)


def _microbatch_dims(captured: Capture, n_microbatches: int) -> dict[str, int]:
    """The example's dims with the batch cut into ``n_microbatches``; the largest piece counts."""
    dims = captured.ops.example_dims
    if "batch" in dims:
        dims["batch"] = math.ceil(dims["batch"] / n_microbatches)
    return dims


def _n_microbatches(captured: Capture, asked: int | str | None, n_stages: int) -> int:
    batch = captured.ops.example_dims.get("batch", 1)
    if asked is None or asked == "auto":
        return max(1, min(batch, MICROBATCHES_PER_STAGE * n_stages))
    n = min(operator.index(asked), batch)  # type: ignore[arg-type]
    if n < operator.index(asked):  # type: ignore[arg-type]
        _logger.warning(
            "%s microbatches were asked for, but the example batch has %s rows: planned for %s; give a batch "
            "with at least as many rows as microbatches",
            asked,
            batch,
            n,
        )
    return n


def _cluster(
    captured: Capture,
    given: Cluster | str | pathlib.Path | None,
    n_ranks: int | None,
    n_stages: int | None,
    schedule: str,
    device: str | torch.device | Device | None,
) -> Cluster:
    if given is not None:
        cluster = (
            given
            if isinstance(given, Cluster)
            else Cluster.from_dict(load(given, "the cluster"), f"the cluster {given}")
        )
        if n_ranks not in (None, cluster.n_ranks):
            raise InputError(f"n_ranks is {n_ranks} but the cluster has {cluster.n_ranks} ranks; give one")
        return cluster
    if n_ranks is None and in_group():
        n_ranks = dist.get_world_size()
    if n_ranks is None and n_stages is not None:
        n_ranks = max(1, n_stages // _stages_per_rank(schedule))
    if n_ranks is None:
        raise InputError(
            "n_stages is left free, but on how many devices at most is not said; pass n_ranks=8, a cluster, "
            "or n_stages"
        )
    if n_stages is None and n_ranks < 1:
        raise InputError(f"n_ranks is {n_ranks}; it must be at least 1")
    if n_stages is not None and not 1 <= n_ranks <= n_stages:
        raise InputError(
            f"{n_ranks} ranks cannot share {n_stages} stages: each rank holds at least one; "
            f"set n_stages to {n_ranks} or more, or n_ranks to {n_stages} or fewer"
        )
    described, link = _hardware(captured, device)
    cluster = Cluster.uniform(n_ranks, described, link)
    return dataclasses.replace(cluster, cores=(places(),)) if _is_host(captured, device) else cluster


def _of_the_job(captured: Capture) -> torch.device | None:
    """The accelerator on which this rank will train a model that is on none; None to go by the model."""
    is_on_one = accelerator.is_async(device_of(captured.model))
    return accelerator.of_rank() if in_group() and not is_on_one else None


def _is_host(captured: Capture, device: str | torch.device | Device | None) -> bool:
    """Whether ranks are to compute on this machine's own processor."""
    if isinstance(device, Device) or (isinstance(device, str) and not _is_torch_device(device)):
        return False
    return (torch.device(device) if device is not None else device_of(captured.model)).type == "cpu"


def _stages_per_rank(schedule: str) -> int:
    return 2 if schedule in SEVERAL_PER_RANK else 1


def _hardware(captured: Capture, device: str | torch.device | Device | None) -> tuple[Device, Link]:
    """The description of a device, and of the link that ranks of one host most often have with it."""
    if isinstance(device, str) and not _is_torch_device(device):
        device = measure.device(device)
    if not isinstance(device, Device):
        where = torch.device(device) if device is not None else device_of(captured.model)
        device = measure.described(measure.device_name(where))
        if where.type == "cpu":
            return dataclasses.replace(device, memory_bytes=None), measure.link("loopback")
    return device, measure.link("NVLink4" if "NVIDIA H" in device.name else "PCIe4")


def _is_torch_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _costs(
    captured: Capture,
    costs: str | CostTable | pathlib.Path,
    device: str | torch.device | Device | None,
    dims: Mapping[str, int],
    store: str | pathlib.Path | None,
    autocast: torch.dtype | None = None,
) -> CostTable:
    if isinstance(costs, CostTable):
        return costs
    if costs == "estimated":
        if device is None and device_of(captured.model).type == "meta":
            raise InputError(
                "the model is on the meta device; name the device to estimate for, such as device='H200'"
            )
        return measure.estimate(captured, _hardware(captured, device)[0], dims=dims, dtype=autocast)
    if costs != "measured":
        return CostTable.from_dict(load(costs, "the cost table"), f"the cost table {costs}")
    if any(p.is_meta for p in captured.model.parameters()):
        raise InputError(
            "the model is on the meta device, which cannot be measured; pass costs='estimated' and the "
            "device to estimate for, or a saved cost table"
        )
    if isinstance(device, Device) or (isinstance(device, str) and not _is_torch_device(device)):
        raise InputError(
            f"costs='measured' runs on this machine, but device describes another, {device}; pass "
            "costs='estimated', or a torch device"
        )
    return measure.profile(
        captured,
        device=device,
        dims=dims,
        autocast=autocast,
        n_peers=_busy_peers(captured, device),
        store=store,
    )


def _busy_peers(captured: Capture, device: str | torch.device | None) -> int:
    """Ranks that will compute beside this one on its processor: they share its memory bandwidth."""
    where = torch.device(device) if device is not None else device_of(captured.model)
    if not in_group() or where.type != "cpu":
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) - 1
