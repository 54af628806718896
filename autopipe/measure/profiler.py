"""Measures what every op of a captured model costs, in context, and calibrates the sum against the whole.

Running the graph is left to ``replay``, counting bytes and kernels to ``survey``, keeping results to
``store``.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping

import torch
from tqdm import tqdm

from .. import accelerator
from ..costs import CostTable, OpCost
from ..tracing import Capture, device_of, preserved
from ..tracing.code.leaves import eager
from .alike_ops import INSTANCES, MOST_INSTANCES, OUT_OF_CACHE
from .busy_cores import Peers, busy, places
from .devices import described
from .efficiency import fit
from .estimate import estimate
from .passes import ALONE, FIRST, Passes
from .replay import Replay
from .samples import Samples
from .standins import stand_ins
from .step_overheads import beginning_s, optimizer_cost
from .store import Store
from .survey import Survey, describe, survey
from .timers import device_name, device_settings

__all__ = ["profile"]


def profile(
    capture: Capture,
    *,
    dims: Mapping[str, int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    compiled: bool = False,
    training: bool = True,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    n_peers: int = 0,
    min_passes: int = 5,
    max_passes: int = 25,
    min_s: float = 1.0,
    store: Store | str | os.PathLike[str] | None = None,
    progress: bool = True,
    begin: Callable[[], object] | None = None,
) -> CostTable:
    """Costs of every op of ``capture`` for one microbatch of ``dims``, measured.

    Parameters
    ----------
    capture: what to measure. Its example gives the inputs, cut or repeated to ``dims``.
    dims: input dims of one microbatch, such as ``{"batch": 2}``; others keep their example's value.
    device: where to measure; default the device of the model's first parameter.
    dtype: measure as if the model had been cast to it.
    autocast: measure under ``torch.autocast`` to this dtype.
    compiled: time leaf modules as ``torch.compile`` makes them. Bytes stay those of the code as written.
    training: which form of the model.
    optimizer: its step is timed, per parameter and per parameter byte.
    n_peers: other processes to keep busy with the same work meanwhile, as the other ranks on this machine
        will be; they share its memory bandwidth and caches. No more than there are cores for, as seconds are
        those of a rank that has one. Where caches may hold a rank's part of the model, as many parts as there
        are processes also run by themselves beside the others, for how ops share the whole. CPU only.
    min_passes, max_passes, min_s: passes go on until there are ``min_passes`` and ``min_s`` is spent.
    store: a :class:`Store` or its folder; what it holds is not measured again, and what this run measures
        is left in it, also when it is interrupted, so that the next run goes on from there.
    progress: show a bar with the time left where the output is a terminal.
    begin: what a rank does with a batch before a step's first action, which is timed too; by default the
        example is bound.

    On an accelerator the seconds are the device's own, and beside them are those that the host takes to
    launch it: a stage costs the larger of their sums.

    Ops of one signature share their figures, and once more has run than caches hold no more than a few of
    them are run: a model of 96 equal blocks costs little more than one of 4. The model, its gradients and
    the random state are left as they were, also where a forward changes them: an initialisation from the
    first data, a counter, a cache.

    Raises :class:`CostError` for a model without data; ops that fail are reported in the table's ``notes``
    and estimated.
    """
    device = torch.device(device or device_of(capture.model))
    n_peers = min(n_peers, places() - 1)
    replay = Replay(capture, dims=dims, device=device, dtype=dtype, training=training)
    context = {
        "dims": replay.dims,
        "device": device_name(device),
        "dtype": str(dtype),
        "autocast": str(autocast),
        "compiled": compiled,
        "training": training,
        "n_peers": n_peers,
        "optimizer": optimizer.__qualname__,
        "torch": torch.__version__,
        "settings": device_settings(device),
        "instances": [INSTANCES, MOST_INSTANCES, OUT_OF_CACHE],
        **({"seconds": "of device and host apart"} if accelerator.is_async(device) else {}),
    }
    samples = Samples(context, capture.ops.digest, _store(store))
    with accelerator.using(device), preserved(capture.model), stand_ins(replay, training=training):
        with eager():  # code that a mode watches is not compiled, nor ever after in this process
            surveyed = survey(replay, autocast)
        touched_bytes = _touched_bytes(replay, surveyed)
        if compiled:
            replay.compile()
        passes = Passes(replay, surveyed, samples, autocast)
        samples.load(["", *(passes.key(n.name) for n in replay.nodes)])
        try:
            if n_peers and not replay.skipped and touched_bytes < (n_peers + 1) * OUT_OF_CACHE:
                passes.divide(n_peers + 1)
            with busy(passes.work, n_peers, device) as peers:
                _run(passes, peers, min_passes, max_passes, min_s, progress)
                if not samples.of("", "F of part 0"):
                    _run_parts(passes, peers, min_s)
                if not passes.is_async and not samples.of("", f"F{FIRST}"):
                    _begin_steps(passes, touched_bytes, min_s)
            if not samples.of("", "optimizer of one"):
                found = optimizer_cost(optimizer, replay.parameters, device, touched_bytes, n_peers)
                for part, value in zip(_OPTIMIZER, found, strict=True):
                    samples.add("", part, value)
        finally:
            samples.save()
    if not samples.of("", _START):
        samples.add("", _START, beginning_s(begin or functools.partial(_bind, capture), touched_bytes))
        samples.save([""])
    return _table(capture, passes, _COMPILED if compiled else ())


def _table(capture: Capture, passes: Passes, notes: tuple[str, ...]) -> CostTable:
    """What was measured, and estimates of what failed."""
    replay, samples = passes.replay, passes.samples
    costs = {
        op.name: passes.cost(op.name)
        for op in capture.ops.compute
        if not op.is_size and replay.has(op.name) and replay.ran(op.name) not in replay.failures
    }
    guessed, failures = _estimated(capture, replay, costs, passes.surveyed)
    microbatch_s = sum(cost.forward_s + cost.backward_s for cost in (*costs.values(), *guessed.values()))
    # what this form does not run is free, and says so
    rows = dict.fromkeys((op.name for op in capture.ops.compute if not op.is_size), OpCost())
    return CostTable(
        costs={**rows, **costs, **guessed},
        dims=replay.dims,
        device=device_name(replay.device),
        source="measured",
        residual=passes.residual,
        alone=passes.alone,
        optimizer_s_per_byte=samples.median("", _OPTIMIZER[0]),
        optimizer_s_per_tensor=samples.median("", _OPTIMIZER[1]),
        optimizer_workspace_bytes=round(samples.median("", _OPTIMIZER[2])),
        start_s=samples.median("", _START) + passes.first_longer * microbatch_s,
        jitter_s=samples.jitter_s("", "FB"),
        versions={"torch": torch.__version__},
        notes=(*samples.notes, *passes.notes, *passes.surveyed.notes, *failures, *notes),
        ops=capture.ops.ops_digest,
    )


_OPTIMIZER = ("optimizer of a byte", "optimizer of one", "optimizer bytes")
_START = "beginning"
_MOST_BEGUN, _BEGUN_SHARE = 9, 0.25
"""How many beginnings of a step are run at most, and the share of ``min_s`` after which no more are."""
_LEAST_OVER_PARTS, _MOST_OVER_PARTS, _PARTS_SHARE = 5, 25, 0.5
"""How often parts are gone over at least and at most, and the share of ``min_s`` after which no more are."""
_COMPILED = ("seconds are those of compiled leaf modules; bytes and FLOPs those of the code as written",)


def _touched_bytes(replay: Replay, surveyed: Survey) -> int:
    """What a microbatch's passes at least read or write: weights, their gradients, what backward keeps."""
    saved = sum(account.saved_bytes for account in surveyed.accounts.values())
    return 2 * sum(p.nbytes for p in replay.parameters) + saved


def _bind(capture: Capture) -> None:
    """Bind the example's arguments, whatever has changed about the model since."""
    capture.assumptions.changed()
    capture.form_of(capture.inputs.bind(capture.model, *capture.arguments(*capture.example)))


def _estimated(
    capture: Capture, replay: Replay, costs: Mapping[str, OpCost], surveyed: Survey
) -> tuple[dict[str, OpCost], tuple[str, ...]]:
    """Costs of the ops that failed, from a roofline fitted to those that did not, and the reasons why."""
    failed = [op.name for op in capture.ops.compute if replay.ran(op.name) in replay.failures]
    if not failed:
        return {}, ()
    peaks = described(device_name(replay.device))
    pairs = [(a.forward, costs[n].forward_s) for n, a in surveyed.accounts.items() if n in costs]
    guess = estimate(capture.ops, peaks, dims=replay.dims, efficiency=fit(pairs, peaks))
    notes = tuple(f"{describe(replay, n)}: {why}; estimated" for n, why in replay.failures.items())
    return {name: guess[name] for name in failed}, notes


def _run(
    passes: Passes, peers: Peers, min_passes: int, max_passes: int, min_s: float, progress: bool
) -> None:
    done = passes.done
    if done >= min_passes:
        return
    passes.warm_up()
    start = time.perf_counter()
    with tqdm(total=max_passes, desc="measuring", unit="pass", disable=None if progress else True) as bar:
        bar.update(done)
        for i in range(done, max_passes):
            passes.round()
            if peers.pids:
                # right after the same with them at work: a machine's speed changes from second to second
                with peers.resting():
                    passes.whole(beside=ALONE)
            bar.update()
            if i + 1 >= min_passes and time.perf_counter() - start > min_s:
                bar.total = i + 1
                break


def _run_parts(passes: Passes, peers: Peers, min_s: float) -> None:
    """Go over the parts that ranks may have, again and again for a part of the time that passes may take."""
    start = time.perf_counter()
    for done in range(_MOST_OVER_PARTS):
        passes.by_parts(peers)
        if done + 1 >= _LEAST_OVER_PARTS and time.perf_counter() - start > _PARTS_SHARE * min_s:
            break


def _begin_steps(passes: Passes, touched_bytes: int, min_s: float) -> None:
    """Run the first passes of a step, again and again for a part of the time that passes may take."""
    start = time.perf_counter()
    for _ in range(_MOST_BEGUN):
        passes.first(touched_bytes)
        if time.perf_counter() - start > _BEGUN_SHARE * min_s:
            break


def _store(store: Store | str | os.PathLike[str] | None) -> Store | None:
    return store if store is None or isinstance(store, Store) else Store(store)
