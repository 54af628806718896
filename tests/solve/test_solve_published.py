"""The published instances with proven optima, through the benchmark's own command, judged by their scorer."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from autopipe.solve import chain

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(os.environ.get("AUTOPIPE_INSTANCES", ""))
pytestmark = [
    pytest.mark.skipif(
        not (FOLDER / "optima.json").is_file(),
        reason="AUTOPIPE_INSTANCES names no folder with the published instances, optima.json and score.py",
    ),
    # the scorer leaves closing its files to the garbage collector
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@pytest.fixture(scope="module")
def scorer():
    spec = importlib.util.spec_from_file_location("score", FOLDER / "score.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments) -> list[dict]:
    command = [sys.executable, "-m", "benchmarks.solver", *map(str, arguments), "--json"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(out.stdout)


def assert_valid(scorer, row, n_devices=None):
    instance = scorer.load_instance(row["file"])
    instance["k"] = n_devices or instance["k"]
    result = scorer.score(instance, scorer.assignment_from_result(row))
    assert result["problems"] == []
    assert result["chain_plus"]
    assert result["max_load"] == pytest.approx(row["max_load"], rel=1e-12)


def test_published_optima_are_found_and_proved(scorer):
    optima = json.loads((FOLDER / "optima.json").read_text())
    rows = run(*(FOLDER / f"{name}.json" for name in optima))
    assert len(rows) == len(optima) == 6
    for row in rows:
        name = pathlib.Path(row["file"]).stem
        assert row["proved"], name
        assert row["max_load"] == pytest.approx(optima[name]["optimum_max_load"], rel=1e-9), name
        assert row["lower_bound"] == pytest.approx(row["max_load"], rel=1e-9)
        assert_valid(scorer, row)


@pytest.mark.parametrize("n_devices", [2, 5, 8, 16])
def test_other_device_counts_are_proved(scorer, n_devices):
    names = json.loads((FOLDER / "optima.json").read_text())
    for row in run(*(FOLDER / f"{name}.json" for name in names), "--devices", n_devices):
        assert row["proved"], row["file"]
        assert len(row["fpgas"]) <= n_devices
        assert_valid(scorer, row, n_devices)


def test_gradients_flow_against_the_order_of_their_classes(scorer):
    """On two devices every value but a few flows back; the answer is valid and no worse than one known."""
    (row,) = run(FOLDER / "operator_bert3_training.json", "--devices", 2)
    assert row["proved"]
    assert row["max_load"] <= 79.50086
    assert_valid(scorer, row, 2)


def test_what_is_no_instance_is_named_and_left_out():
    command = [sys.executable, "-m", "benchmarks.solver", str(FOLDER / "optima.json"), "--json"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(out.stdout) == []
    assert "optima.json" in out.stderr


def test_a_file_made_in_the_likeness_of_another_has_its_optimum():
    """BERT with three layers' forward nodes, three more like them: the six-layer file's optimum."""
    from benchmarks.solver.likeness import forward, repeated
    from benchmarks.solver.published import UNITS, from_dict

    three = json.loads((FOLDER / "operator_bert3_training.json").read_text())
    six = json.loads((FOLDER / "operator_bert6_inference.json").read_text())
    made = repeated(forward(three), 3)
    assert (len(made["nodes"]), len(made["edges"])) == (len(six["nodes"]), len(six["edges"]))
    answer = chain(from_dict(made).problem)
    optima = json.loads((FOLDER / "optima.json").read_text())
    assert answer.proved
    assert answer.bottleneck_ns / UNITS == pytest.approx(
        optima["operator_bert6_inference"]["optimum_max_load"], rel=1e-9
    )
