"""Odd arguments of the public functions: each is refused by an error that names it, or is what it says."""

import contextlib
import functools
import inspect
import os
import random
import re
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import autopipe
from autopipe.api.options import CONCERNS
from autopipe.errors import AutopipeError, InputError, PlanError
from autopipe.hardware import Cluster, Device, Link
from autopipe.runtime import Runtime
from autopipe.solve import solve

ODD = (
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**30, -(10**30), np.int64(2), "", "x", "auto",
    b"x", [], ["x"], {}, {"x": 1}, {1: 2}, (), object(), lambda *_: 1, torch.ones(2), "9" * 5000,
)  # fmt: skip
N_ODD = int(os.environ.get("AUTOPIPE_ODD_ARGUMENTS", "6"))
"""Odd values per argument, drawn anew each day of a seed; 24 are all of them."""
SLOWEST_S = 20.0

SPLIT = (
    "model", "n_stages", "args", "kwargs", "plan", "n_ranks", "n_microbatches", "schedule", "balance",
    "costs", "cluster", "device", "memory_limit", "ties", "pin", "dynamic", "store", "time_limit_s",
    "together", "uncut", "recompute", "clone", "overlap", "sender_pays", "device_order",
    "optimizer_bytes_per_parameter_byte", "min_ranks", "stall_limit_s", "open", "closed", "precision",
    "optimizer", "offload", "loss_on",
)  # fmt: skip
RUNTIME = (
    "loss_fn", "n_microbatches", "schedule", "device", "mesh", "autocast", "scaler", "loss_reduction",
    "loss_weight", "loss_on", "release", "batch_dims", "stall_limit_s", "check_finite", "feed",
)  # fmt: skip
PROFILE = (
    "n_microbatches", "dims", "device", "dtype", "autocast", "compiled", "training", "optimizer", "n_peers",
    "min_passes", "max_passes", "min_s", "progress",
)  # fmt: skip
VERIFY = ("rtol", "seed")
SIMULATE = ("plan", "schedule", "n_microbatches", "overlap", "costs", "cluster")
VERBS = {
    "split": SPLIT,
    "runtime": RUNTIME,
    "profile": PROFILE,
    "simulate": SIMULATE,
    "verify": VERIFY,
}


def test_every_option_of_split_is_tried_here():
    known = {*inspect.signature(autopipe.split).parameters} - {"options"}
    takes = [p for what in (*CONCERNS, solve) for p in inspect.signature(what).parameters.values()]
    known |= {p.name for p in takes if p.kind is p.KEYWORD_ONLY}
    assert known == {*SPLIT}


def test_a_runtime_shows_its_options_by_name():
    assert {*RUNTIME} <= {*inspect.signature(Runtime).parameters}


@pytest.mark.parametrize(
    ("what", "options"), [(autopipe.split, SPLIT), (Runtime, inspect.signature(Runtime).parameters)]
)
def test_help_says_what_each_option_is(what, options):
    text = inspect.getdoc(what)
    assert [n for n in options if not re.search(rf"^(\w+, )*{n}(, \w+)*: ", text, re.M)] == []


def test_a_plan_is_told_apart_from_plans_alone(pipe):
    for other in (None, 5, "x", pipe):
        with pytest.raises(InputError, match=r"other is .* must be a Plan"):
            pipe.plan.diff(other)


def test_the_path_of_no_module_pins_nothing(pipe):
    with pytest.raises(PlanError, match="pin '' matches no op"):
        autopipe.plan(pipe.graph, 2, costs="estimated", pin={"": 1})


def test_the_fewest_ranks_are_as_many_as_asked(pipe):
    options = {"costs": "estimated", "n_ranks": 3, "n_microbatches": 1}
    assert autopipe.plan(pipe.graph, "auto", **options).n_ranks == 1
    assert autopipe.plan(pipe.graph, "auto", min_ranks=2, **options).n_ranks >= 2


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture(scope="module")
def pipe():
    return autopipe.split(model(), 2, (torch.ones(4, 4),), costs="estimated")


NUMBERS = np.int64, np.float32, torch.tensor, Fraction, float
TAKEN = [
    ("split", "n_stages", 2), ("split", "n_ranks", 2), ("split", "min_ranks", 1),
    ("split", "n_microbatches", 2),
    ("split", "memory_limit", 1 << 20), ("split", "time_limit_s", 4), ("split", "stall_limit_s", 8),
    ("split", "optimizer_bytes_per_parameter_byte", 2), ("runtime", "n_microbatches", 2),
    ("runtime", "feed", 0),
    ("runtime", "stall_limit_s", 8), ("profile", "n_microbatches", 2), ("profile", "n_peers", 0),
    ("profile", "min_passes", 1), ("profile", "max_passes", 2), ("profile", "min_s", 0),
    ("simulate", "n_microbatches", 2), ("simulate", "shards", 2), ("simulate", "most_whole", 1),
    ("verify", "rtol", 1), ("verify", "seed", 1),
]  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda k: k.__name__)
@pytest.mark.parametrize(("verb", "name", "value"), TAKEN)
def test_a_number_is_taken_whatever_its_type(verb, name, value, kind, pipe):
    call(verb, name, kind(value), pipe)


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda k: k.__name__)
def test_a_plan_of_numbers_of_any_type_is_the_same(kind, pipe):
    def planned(number):
        device = Device(memory_bytes=number(1 << 20), speed=number(2), bandwidth_bytes_s=number(1 << 30))
        cluster = Cluster((device,) * 2, hosts=(number(0), number(1)), local=Link(number(1), number(1 << 30)))
        each, all_of = [number(1 << 19), number(1 << 18)], number(1 << 19)
        options = {"costs": "estimated", "n_microbatches": number(2), "pin": {"0": number(0)}}
        plans = [
            autopipe.plan(pipe.graph, 2, memory_limit=m, cluster=cluster, **options) for m in (each, all_of)
        ]
        return [plan.to_json() for plan in plans]

    assert planned(kind) == planned(int)


def call(verb, name, value, pipe):
    x = torch.ones(4, 4)
    given = {name: value}
    if verb == "split":
        autopipe.split(**{"model": model(), "n_stages": 2, "args": (x,), "costs": "estimated", **given})
    elif verb == "profile":
        quick = {"min_passes": 1, "max_passes": 1, "min_s": 0.0, "progress": False}
        autopipe.profile(model(), (x,), **{**quick, **given})
    elif verb == "simulate":
        autopipe.simulate(**{"plan": pipe.plan, **given})
    elif verb == "verify":
        pipe.verify(**given)
    else:
        runtime = pipe.runtime(**{"loss_fn": nn.functional.mse_loss, **given})
        runtime.step(x, target=x)


CASES = [(verb, name) for verb, names in VERBS.items() for name in names]


@pytest.mark.parametrize(("verb", "name"), CASES, ids=lambda t: t)
def test_an_odd_argument_is_refused_by_name_or_taken(verb, name, pipe, monkeypatch):
    """What profiles compile is not lowered to C++, which takes a compiler minutes on a new machine."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    draw = random.Random(f"{verb} {name} {os.environ.get('AUTOPIPE_ODD_SEED', '0')}")
    for value in draw.sample(ODD, min(N_ODD, len(ODD))):
        start_s = time.process_time()
        with contextlib.suppress(AutopipeError):
            call(verb, name, value, pipe)
        assert time.process_time() - start_s < SLOWEST_S, (verb, name, value)


@pytest.mark.parametrize(
    ("verb", "name", "value"),
    [
        ("split", "n_stages", True), ("split", "n_microbatches", 0), ("split", "n_microbatches", 10**30),
        ("split", "time_limit_s", float("nan")), ("split", "memory_limit", -1),
        ("split", "memory_limit", "-3GB"), ("split", "pin", {"0": "1"}), ("split", "overlap", "yes"),
        ("split", "memory_limit", float("nan")), ("split", "memory_limit", np.ones(2)),
        ("split", "n_stages", 2.5), ("split", "n_stages", np.True_), ("split", "n_ranks", Fraction(5, 2)),
        ("split", "memory_limit", torch.tensor(1.0, device="meta")), ("split", "ties", 3),
        ("split", "balance", 2), ("split", "recompute", True),
        ("split", "device_order", "best"), ("split", "costs", 3), ("split", "args", 5),
        ("runtime", "stall_limit_s", "x"), ("runtime", "stall_limit_s", 0),
        ("runtime", "n_microbatches", 0), ("runtime", "release", "no"), ("runtime", "feed", -1),
        ("runtime", "loss_reduction", "max"), ("runtime", "batch_dims", {"x": "0"}),
        ("runtime", "check_finite", 2), ("runtime", "mesh", 4), ("profile", "min_passes", 0),
        ("runtime", "device", "cuda:99"),
        ("profile", "n_microbatches", -3), ("profile", "dtype", "float32"),
        ("simulate", "n_microbatches", 0), ("simulate", "n_microbatches", 10**30),
        ("verify", "rtol", "1"), ("verify", "rtol", float("nan")), ("verify", "seed", None),
        ("verify", "seed", 1.5), ("verify", "seed", 10**30),
        ("simulate", "overlap", 1), ("simulate", "schedule", "2f2b"), ("simulate", "costs", {}),
    ],
)  # fmt: skip
def test_what_an_argument_cannot_be_is_told_with_its_name(verb, name, value, pipe):
    with pytest.raises(InputError, match=name):
        call(verb, name, value, pipe)
