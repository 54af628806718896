"""Every benchmark can be started as its README says: from the root, with nothing on the path but that."""

import dataclasses
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from plans import make_plan
from torch import nn

import autopipe
from autopipe.simulator import plan_schedule
from autopipe.tracing.referee import referee
from autopipe.tracing.rows import mixing
from autopipe.tracing.sizes import trials
from benchmarks.capture import times
from benchmarks.capture.libraries import catalogue
from benchmarks.capture.libraries.training import steps
from benchmarks.capture.libraries.walk import ASKED, outcome
from benchmarks.capture.workers import OVER
from benchmarks.costs.causes import CAUSES, Ran, causes
from benchmarks.costs.table import table
from benchmarks.kept.rank import PLACES

ROOT = pathlib.Path(__file__).parents[1]


def test_results_name_no_folder_of_the_machine_that_they_are_from():
    found = {
        str(path.relative_to(ROOT)): re.findall(r"(?<![\w.:/])(?:/[\w.+-]+){2,}\.py\b", path.read_text())
        for path in (ROOT / "benchmarks").rglob("*.json")
    }
    assert found
    assert {name: places for name, places in found.items() if places} == {}


def test_every_module_of_the_benchmarks_can_be_imported():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
        and path.parent.name != "tasks"  # scripts as users write them, which run when imported
    ]
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("moment", PLACES)
def test_a_fault_has_its_place(moment):
    where, name, _ = PLACES[moment]
    module, _, cls = where.partition(":")
    holder = importlib.import_module(module)
    assert callable(getattr(getattr(holder, cls) if cls else holder, name))


def test_what_judges_a_recording_is_told_from_recording(monkeypatch):
    asked = set()

    def noting(place, run, *args, **kwargs):
        asked.add((place, refereed.is_within))
        return run(*args, **kwargs)

    for place, name in ((mixing, "replay"), (referee, "replay"), (trials, "flatten")):
        monkeypatch.setattr(place, name, functools.partial(noting, place, getattr(place, name)))
    judges = [getattr(place, name) for place, name in times.JUDGES]
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with times.Refereed() as refereed:
        autopipe.capture(model, (torch.randn(4, 4),))
    assert asked == {(mixing, True), (referee, True), (trials, True)}
    assert refereed.spent_s > 0
    assert [getattr(place, name) for place, name in times.JUDGES] == judges


def test_what_ranks_wait_for_one_another_by_chance_is_told_from_messages():
    """Two stages whose microbatches take as long as foreseen in the median, one in each step twice."""
    plan = make_plan(n_stages=2, n_microbatches=4, ties=(), settings={"jitter_s": 0.05})
    plan = dataclasses.replace(plan, step_s=autopipe.simulate(plan).step_s)
    rows = plan_schedule(plan).actions

    def ran(rank: int, step: int) -> Ran:
        now, marks = 0.0, []
        for x, action in enumerate(rows[rank]):
            end = now + (1.0 if action.kind == "F" else 2.0) * (2.0 if x == (step + rank) % 8 else 1.0)
            marks.append((action, False, now, end))
            now = end
        return Ran(0.0, tuple(marks), now, now)

    measured_s = 21.0
    found = causes(plan, [[ran(rank, step) for step in range(8)] for rank in range(2)], measured_s)
    assert list(found) == list(CAUSES)
    assert sum(c["measured_s"] for c in found.values()) == pytest.approx(measured_s)
    assert sum(c["predicted_s"] for c in found.values()) == pytest.approx(plan.step_s)
    assert found["compute"]["measured_s"] == pytest.approx(found["compute"]["predicted_s"]) == 15.0
    assert 1.0 <= found["chance"]["measured_s"] <= 4.0
    assert found["chance"]["predicted_s"] > 0.0


def test_the_table_says_to_which_side_predictions_lean():
    def row(error: float, disturbed: bool = False) -> dict:
        cause = {"share": error / len(CAUSES), "measured_s": 0.5}
        return {
            "n_ranks": 1,
            "n_microbatches": 4,
            "stages": [{"first_error": error}],
            "step": {"first_error": error, "measured_s": 2.0},
            "uniform": {"error": error},
            "causes": dict.fromkeys(CAUSES, cause),
            "run": {"other_load": 0.0, "disturbed": disturbed},
        }

    told = table({"summary": {}, "elsewhere": {"a": row(-0.07), "b": row(-0.07, True), "c": row(0.0)}})
    all_three = "steps 2 too short and 1 too long, -4.7% on average, 4.7% off, -7.0% at worst"
    assert f"All: {all_three}. Not disturbed: steps 1 too short and 1 too long, -3.5% on average" in told
    assert f"| **on average** |{' -0.7% (25.0%) |' * len(CAUSES)}" in told


ALL_RIGHT = dict.fromkeys(ASKED, True)


@pytest.mark.parametrize(
    ("found", "became"),
    [
        (ALL_RIGHT, "right"),
        ({**ALL_RIGHT, "died": "exit code 1"}, "right"),  # all had been asked
        ({"parity": True, "died": f"{OVER} of 90 s"}, "late"),
        ({"parity": True, "died": "exit code -11"}, "raw"),
        ({"died": "exit code -11"}, "raw"),
        ({**ALL_RIGHT, "steps": False, "steps_problem": "train: IndexError: out of range"}, "raw"),
        ({**ALL_RIGHT, "steps": False, "steps_problem": "train: InputError: rows depend"}, "right"),
        ({**ALL_RIGHT, "steps": False, "steps_problem": "eval: output loss: off by 1.0"}, "different"),
        ({**ALL_RIGHT, "data": False, "data_problem": "eval: InputError: no"}, "refused"),
    ],
)
def test_the_walk_calls_a_model_right_only_where_all_was_asked_and_right(found, became):
    assert outcome(found) == became


def test_a_walk_that_goes_on_tries_what_it_was_begun_with(monkeypatch):
    monkeypatch.setattr(catalogue, "CASES", {f"{p}/{i}": f"{p}/{i}" for p in "ba" for i in range(5)})
    begun = catalogue.chosen(("",), 3, ())
    assert begun == ["a/0", "a/3", "b/1", "b/4"]
    for n_done in range(5):
        assert catalogue.chosen(("",), 3, begun[:n_done]) == begun[n_done:]
    assert catalogue.chosen(("b/",), 2, ["b/2"]) == ["b/0", "b/4"]


def test_a_walk_loads_nothing_more_within_the_first_model_s_time():
    code = (
        "import sys, torch, autopipe\n"
        "from benchmarks.capture import workers\n"
        "workers.warm()\n"
        "before = {*sys.modules}\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "autopipe.split(model, 2, (torch.zeros(2, 4),), costs='estimated')\n"
        "print(sorted({*sys.modules} - before))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


class Mean(nn.Module):
    """Returns its loss as a tensor of one place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(x).mean().reshape(1)


def test_the_walk_steps_on_a_loss_of_one_place_as_it_is():
    def inputs(sizes):
        torch.manual_seed(sizes.batch)
        return (torch.randn(sizes.batch, 4),), {}

    model = Mean()
    pipe = autopipe.split(model, 2, (torch.randn(2, 4),), costs="estimated")
    assert steps(model, pipe, inputs) == (True, "")
