"""The verbs: capture, profile, plan, simulate, and ``split``, which does them all and builds the stages.

What options may be is left to ``checks``, how a plan is made to ``planning``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import measure
from ..arguments import brief, whole
from ..costs import CostTable
from ..errors import InputError
from ..plans import Plan, check_plan
from ..runtime.weights.stale import shapes_of
from ..simulator import Timeline, warn_if_changed
from ..simulator import simulate as _simulate
from ..solve import solve
from ..tracing import Capture
from .agree import join_group, one_call
from .checks import MOST_MICROBATCHES, check_model, check_names, checked
from .cluster import is_described
from .op_costs import microbatch_dims, profiled
from .options import CONCERNS, Options
from .pipe import Pipe
from .planning import make_plan
from .recording import capture, captured_for

__all__ = ["capture", "plan", "profile", "simulate", "split"]


def profile(
    model: nn.Module | Capture,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n_microbatches: int = 1,
    **options: Any,
) -> CostTable:
    """Measure what each op of the model costs on its device, for one of ``n_microbatches`` microbatches.

    ``args`` and ``kwargs`` are a whole batch, as in :func:`split`. Further options are those of
    :func:`autopipe.measure.profile`, such as ``device``, ``autocast`` and ``store``.

    Returns a :class:`CostTable`: seconds of forward and backward, bytes and FLOPs by op, and the source of
    each figure. It can be given to :func:`split` as ``costs``, and its ``dims`` say what sizes it holds for.

    Raises :class:`ModelError` or :class:`CaptureError` where the model cannot be captured,
    :class:`CostError` for a model without data (on the meta device), :class:`InputError` for options that do
    not fit.
    """
    check_model(model, args, kwargs)
    pieces = whole("n_microbatches", n_microbatches, most=MOST_MICROBATCHES)
    check_names("profile", options, measure.profile)
    options = checked(options)
    where = options.get("device")
    if is_described(where):
        raise InputError(f"device is {brief(where)}; measuring needs a torch device of this machine")
    with shapes_of(model.model if isinstance(model, Capture) else model):
        captured = model if isinstance(model, Capture) else capture(model, args, kwargs)
        dims = {**microbatch_dims(captured, pieces), **(options.pop("dims", None) or {})}
        return profiled(captured, dims=dims, **options)


def simulate(plan: Plan, **options: Any) -> Timeline:
    """Predict a step of ``plan``: every action, the bubble by cause and memory over time.

    Options are those of :func:`autopipe.simulator.simulate`: another ``schedule`` (a name or a
    :class:`Schedule`), another ``n_microbatches`` (of the size that the plan's have), another ``cluster`` of
    as many ranks, ``overlap``, ``costs``, ``shards`` and ``most_whole``. Neither the model nor a GPU is
    needed.

    Returns a :class:`~autopipe.simulator.Timeline`; ``to_chrome_trace()`` opens in Perfetto. Raises
    :class:`InputError` for a schedule or costs that are not for this plan, and :class:`ScheduleError` for a
    schedule that does not run.
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
    """Plan without building stages; works on the meta device, and while ranks train the model.

    Parameters and errors are those of :func:`split`, without ``plan`` and ``stall_limit_s``. On several ranks
    every one must call it, and all get the same :class:`Plan`.
    """
    join_group()
    with one_call("plan"):
        check_model(model, args, kwargs)
        asked = _options("plan", {**options, "n_stages": n_stages})
        with shapes_of(model.model if isinstance(model, Capture) else model):
            return make_plan(model, args, kwargs, asked).plan


def split(
    model: nn.Module | Capture,
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
    model: any ``nn.Module``, or a capture of it; it is not changed, and the stages hold its own parameters.
    n_stages: how many stages in all, at least 1. ``"auto"`` (or None) takes the count with the fastest step
        on at most the ranks there are: those of the cluster, ``n_ranks``, or the process group, all of which
        then take part. ``plan.candidates`` has what was tried.
    args, kwargs: example inputs, a whole batch, as in ``torch.export``; by default those that the model
        itself provides (transformers' ``dummy_inputs``, Lightning's ``example_input_array`` and such).
    n_ranks: how many processes share the stages; by default the cluster's, else the process group's, else
        what the schedule needs for ``n_stages``.
    min_ranks: with ``n_stages="auto"``, the fewest ranks that may share them; in a process group, all do.
    n_microbatches: pieces of a batch per step; by default four per stage, at most the batch's rows.
        ``"auto"`` plans the batch cut into so many, and into half and a quarter as many larger ones, each at
        its own costs, and takes the shortest step. A given cost table holds for one size of them.
    schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``looped-bfs``, ``zb-h1``, ``zb-h2``, ``zbv``,
        ``dualpipev``, ``cost-aware`` (made from the plan's times) or ``auto``.
    balance: what to balance: ``"cost"``, ``"parameters"``, ``"uniform"`` (leaf modules), or a callable
        from :class:`autopipe.graph.Op` to a weight.
    costs: ``"measured"`` on the device, ``"estimated"`` from FLOPs and bytes, or a
        :class:`CostTable` or the path of one saved.
    cluster: a :class:`Cluster` or the path of a cluster file; by default equal devices on one host. Costs are
        of one device, others take as long as their ``speed`` beside it says.
    device_order: ``"hosts"`` lays the stages on the cluster's ranks host by host, ``"given"`` in the ranks'
        order, ``"auto"`` in the best.
    device: where to measure; or, to estimate, a :class:`Device`, the name of a known one (``"H200"``) or a
        JSON file. By default the model's own; for a model on the CPU or on meta, in a job that has
        accelerators, the rank's accelerator, where its stages will train. To estimate for a cluster that says
        what its devices can do, its first.
    memory_limit: per rank, such as ``"70GB"``, or a list of one for each rank.
    recompute: what runs again in backward instead of being kept: ``"never"``, ``"auto"`` (the cheapest
        blocks, leaf modules or groups, that let a stage fit) or ``"always"`` (whole stages).
    ties: tied parameters: ``"sync"`` (a copy per stage, gradients summed), ``"colocate"``, or ``"auto"``.
    pin: module path → stage, such as ``{"lm_head": 3}``, or the name of an op, as the plan shows it: where
        ops are named no module is opened for balance, as names are others then.
    store: a folder that keeps measurements between runs and models; by default nothing is kept.
    precision: how its parameters are kept: ``"fp32"``, ``"bf16-mixed"`` (fp32 master and gradients: 18 bytes
        a parameter with Adam), ``"bf16"`` (nothing else) or ``"fp8"``; by default as the model's own are.
    optimizer: whose state is counted: ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"muon"`` or
        ``"adam-8bit"``.
    offload: what lies in the host's memory, at the cost of the copies over the device's link to it.
        ``"activations"``: what a microbatch's forward keeps for its backward; the runtime moves it.
        ``"optimizer"``: the optimizer's state and master weights; moving those is left to the user's
        optimizer. ``"all"``: both.
    optimizer_bytes_per_parameter_byte: memory beside weights and gradients, instead of ``precision``,
        ``optimizer`` and ``offload``.
    loss_on: ``"batch"`` to plan for a ``loss_fn`` that compares the rows of a batch: for a schedule that runs
        every forward first, and the outputs of all microbatches kept. ``runtime`` then calls it so.
    overlap, clone, sender_pays, together, uncut: what a stage's load counts, and further wishes for the cut,
        as in :func:`autopipe.solve.solve`.
    time_limit_s: how many seconds of the wall clock the solver may take in all; after that the plan says how
        far its bottleneck can be from the least. By default the limit is on processor time: 2 s, up to 20 s
        for large graphs, for each granularity of the graph that is tried (a third of it, at least 2 s, for
        the first look at each). Ctrl-C also ends the search, with the best plan so far.
    dynamic: ``"auto"`` lets each input size vary where the model allows it; False fixes them all.
    open, closed: lists of paths of modules whose inside to record, or which to keep whole.
    plan: build the stages of this plan instead of solving.
    stall_limit_s: how many seconds a rank may give no sign of life while ranks plan together; by default 60,
        and five times as long until its first sign. A rank whose process ended by an error is not waited for.

    Returns the :class:`Pipe`. On several ranks every one must call it: one measures and solves, all hold the
    same plan. A process that ``torchrun`` started and that is in no process group yet joins the others.

    Raises
    ------
    ModelError: the model refuses the example inputs; its own error is the cause.
    CaptureError: the model cannot be recorded; says file and line.
    InfeasibleError: no plan meets the limits; says the smallest change that would.
    UndecidedError: no plan was found in the time given, and none was ruled out.
    InputError: options or example inputs that do not fit, named with the values allowed.
    PlanError: a given plan is for another graph, or its boundaries or ties are not those of its stages; or
        ranks disagree on the model, or on what they ask for.

    Example
    -------
    >>> import torch, autopipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> pipe = autopipe.split(model, 2, (torch.randn(6, 8),), costs="estimated")
    >>> len(pipe.stages), tuple(pipe(torch.randn(3, 8)).shape)
    (2, (3, 4))
    """
    limit_s = _limit(stall_limit_s)
    join_group(limit_s)
    with one_call("split"):
        check_model(model, args, kwargs)
        checked({"stall_limit_s": stall_limit_s})
        if plan is not None:
            return _of_plan(plan, model, n_stages, args, kwargs, limit_s, options)
        asked = _options("split", {**options, "n_stages": n_stages})
        planned = make_plan(model, args, kwargs, asked, limit_s)
        return Pipe(planned.capture, planned.plan, planned.costs)


def _limit(given: Any) -> float | None:
    """The limit to wait by; the usual one where it is none that :func:`split` takes, as it will say."""
    try:
        limit_s: float | None = checked({"stall_limit_s": given})["stall_limit_s"]
    except InputError:
        return None
    return limit_s


def _of_plan(
    plan: Plan | str | pathlib.Path,
    model: nn.Module | Capture,
    n_stages: int | str | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    limit_s: float | None,
    options: Mapping[str, Any],
) -> Pipe:
    """The stages of a plan that was made before."""
    if not isinstance(plan, (str, pathlib.Path)):
        check_plan(plan)
    given = plan if isinstance(plan, Plan) else Plan.from_json(plan)
    _check_decided(given, n_stages, options)
    warn_if_changed(given, "the plan")
    captured = captured_for(given, model, args, kwargs, checked(options), limit_s)
    return Pipe(captured, given)


def _options(verb: str, given: Mapping[str, Any]) -> Options:
    """The options; :class:`InputError` for a name that is none of the verb's, or a value it cannot have."""
    check_names(verb, given, *CONCERNS, solve)
    return Options.of(**checked(given))


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
