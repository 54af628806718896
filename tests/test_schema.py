"""Files are data: what does not mean what it says is refused, with its path, and nothing is run."""

import dataclasses
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest
import torch
from files import damaged, kinds, table

import autopipe
from autopipe.costs import CostTable
from autopipe.errors import AutopipeError, StoreError
from autopipe.graph import OpGraph
from autopipe.hardware import Cluster
from autopipe.plans import Plan
from autopipe.schedule import from_csv

KINDS = kinds()
N_DAMAGED = int(os.environ.get("AUTOPIPE_DAMAGED_FILES", "120"))
"""Per kind of file; 900 makes more than five thousand in all."""
SLOWEST_S = 5.0


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_as_it_was(name):
    text, read, write = KINDS[name]
    assert write(read(text)) == text


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_means_what_it_says(name):
    text, read, write = KINDS[name]
    draw = random.Random(f"{name} {os.environ.get('AUTOPIPE_DAMAGED_SEED', '0')}")
    outcome, longest = {"refused": 0, "read": 0}, 0
    for _ in range(N_DAMAGED):
        bad = damaged(text, draw)
        start = time.process_time()
        try:
            found = read(bad)
        except AutopipeError as error:
            outcome["refused"] += 1
            longest = max(longest, len(str(error)))
        else:
            outcome["read"] += 1
            again = write(found)
            assert write(read(again)) == again
            assert name == "schedule" or json.loads(again) == json.loads(bad)
        assert time.process_time() - start < SLOWEST_S
    assert outcome["refused"] > N_DAMAGED / 3
    assert longest < 20_000


REFUSED = {
    "costs": [
        ("dims.batch", "__import__('os').system('touch {mark}')"),
        ("costs.first.forward_s", -1.0),
        ("costs.first.forward_s", "1"),
        ("costs.first.flops", 1.5),
        ("costs.first.saved_bytes", 10**30),
        ("costs.first.extra", 1),
        ("costs.first.source", "guessed"),
        ("notes", "one"),
    ],
    "plan": [
        ("model", "Small\nopen('{mark}', 'w')\n#"),
        ("graph_digest", "0\r__import__('os').system('touch {mark}')"),
        ("n_microbatches", 0),
        ("n_microbatches", 10**30),
        ("stages[1].forward_s", -2),
        ("stages[1].rank", 7),
        ("stages[1].rank", 0),
        ("degrees.tensor", 2),
        ("degrees.data", True),
        ("cluster.nics", [0]),
        ("stages[1].index", 0),
        ("stages[1].clones", ["nowhere"]),
        ("stages[1].ops", ["op0"]),
        ("boundaries[0].destinations", [0]),
        ("boundaries[0].value", "op3"),
        ("ties[0].stages", [0, 9]),
        ("cluster.local.bandwidth_bytes_s", 0),
        ("cluster.devices[0].speed", 0),
        ("settings.dims", {"batch": "2"}),
        ("settings.optimizer_s_per_byte", "fast"),
        ("settings.precision", "fp12"),
        ("settings.optimizer", "adam8"),
        ("settings.offload", "activation"),
        ("schedule", "fastest"),
        ("stages[1].recomputed", [[]]),
        ("stages[1].recomputed", [["op1"], ["op1"]]),
        ("stages[1].held_bytes", 2000),
        ("stages[1].in_flight", 9),
        ("boundaries[1].value", "op0"),
        ("ties[0].mode", "colocate"),
        ("ties[0].names", []),
        ("ties[0].parameter", "nowhere"),
        ("bounds.step_lower_s", 1e6),
        ("candidates[0].schedule", "fastest"),
        ("n_candidates", 0),
        ("settings.memory_limt", "16GB"),
        ("settings.memory_limit", "much"),
        ("settings.memory_limit", ["16GB"]),
        ("settings.pin.head", 4),
        ("settings.ranks", [0, 0, 1, 2]),
        ("cluster.devices[0].speed", 5e-324),
        ("cluster.local.bandwidth_bytes_s", 5e-324),
        ("model", "two\u202eeno"),
    ],
    "cluster": [
        ("hosts", [0]),
        ("links[0][0]", 5),
        ("links[0][2].latency_s", -1e-3),
        ("devices", []),
        ("devices[0].flops_s.bfloat16", -1),
        ("devices[0].memory_bytes", -1),
    ],
    "graph": [
        ("ops[1].outputs[0].shape[0]", "__import__('os').system('touch {mark}')"),
        ("ops[1].outputs[0].shape[0]", "9**9**9**9"),
        ("ops[1].outputs[0].shape[0]", "heads"),
        ("ops[1].outputs[0].dtype", "float99999"),
        ("ops[1].parameters", ["nowhere"]),
        ("edges[1]", ["second", "first"]),
        ("dims[0].where", [["nowhere", 0]]),
    ],
    "timeline": [
        ("n_microbatches", 10**6),
        ("n_ranks", 10**6),
        ("events[0][1]", "0F9"),
        ("events[0][3]", -1.0),
        ("step_s", -1),
        ("transfers[0][3]", 2),
        ("transfers[2][2]", False),
    ],
}


@pytest.mark.parametrize(
    ("kind", "path", "value"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows]
)
def test_a_fault_is_refused_where_it_is(kind, path, value, tmp_path):
    text, read, _ = KINDS[kind]
    mark = tmp_path / "ran"
    data = json.loads(text)
    keys = [int(k) if k.isdigit() else k for k in path.replace("]", "").replace("[", ".").split(".")]
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value.replace("{mark}", str(mark)) if isinstance(value, str) else value
    with pytest.raises(AutopipeError) as caught:
        read(json.dumps(data))
    assert not mark.exists()
    if "timeline" not in kind:
        assert str(keys[0]) in str(caught.value), caught.value


@pytest.mark.parametrize("label", ["uneven", "ties", "loss", "optimizer"])
def test_a_step_whose_actions_wait_for_its_end_is_refused(label):
    text, read, _ = KINDS["timeline"]
    data = json.loads(text)
    data["events"][1:1] = [[0, label, 1.0, 1.0]]
    data["events"].append([1, label, 9.1, 9.2])
    with pytest.raises(StoreError, match=r"events\[2\] .*had ended its step"):
        read(json.dumps(data))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"version": NaN}', '{"a": 1, "a": 2}', "[" * 10**6, "{" + '"a":{' * 10**5]
)
def test_what_is_no_object_is_refused(text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(StoreError):
        Plan.from_json(path)


@pytest.mark.parametrize("data", [None, [], 1, "x", {}, {"version": 1}, {"version": [1]}])
@pytest.mark.parametrize("cls", [CostTable, Cluster, OpGraph])
def test_what_is_no_file_of_ours_is_refused(cls, data):
    with pytest.raises(StoreError):
        cls.from_dict(data)


@pytest.mark.parametrize(("asked", "given"), [*itertools.permutations(("plan", "cluster", "cost table"), 2)])
def test_a_file_of_another_kind_is_told_by_its_kind(asked, given, tmp_path):
    """And not as one of another version, to be made again."""
    path = tmp_path / "given.json"
    path.write_text(KINDS[given.replace("cost table", "costs")][0])
    read = {"plan": Plan.from_json, "cluster": Cluster.read, "cost table": CostTable.read}[asked]
    with pytest.raises(StoreError, match=rf"^the {asked} .*given.json holds a {given}; give another file$"):
        read(path)


def test_the_name_among_many_is_found():
    data = table().to_dict()
    data["costs"] = {f"op{i}": dict(data["costs"]["second"]) for i in range(300)}
    data["costs"]["op211"]["workspace_bytes"] = -7
    with pytest.raises(StoreError, match=r"costs\.op211\.workspace_bytes is -7"):
        CostTable.from_dict(data)


def test_huge_numbers_in_a_schedule_end_at_once():
    for cell in ("99999999999999999999F0", "0F9999999", "9999999F0", "9" * 5000 + "F0"):
        with pytest.raises(AutopipeError):
            from_csv(f"0F0,{cell},0B0")


def test_a_plan_whose_name_breaks_its_line_runs_nothing(tmp_path):
    """Even a plan made in memory: the title of generated source stays one comment."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = autopipe.split(model, 2, (x,), costs="estimated")
    mark = tmp_path / "ran"
    for end in "\n\r\x0b\x0c\x85\u2028":
        plan = dataclasses.replace(pipe.plan, model=f"x{end}open({str(mark)!r}, 'w')")
        again = autopipe.split(model, args=(x,), plan=plan)
        assert again.stages[0].code.count("open(") == 1
        assert torch.equal(again(x), model(x))
    assert not mark.exists()


def test_reading_leaves_the_interpreter_whole(tmp_path):
    """msgspec 0.22 frees a union of limited texts and numbers twice when the interpreter ends."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import files\n"
    code += "for text, read, _ in files.kinds().values(): read(text)"
    here = str(pathlib.Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, here], timeout=120, check=True)
