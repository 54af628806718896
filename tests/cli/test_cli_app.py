"""The command line as people and scripts use it: output, JSON, exit codes, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import pty
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from processes import run_ranks
from typer.testing import CliRunner

import autopipe
from autopipe import measure
from autopipe.api import probing
from autopipe.cli import main
from autopipe.cli.app import app as command_line
from autopipe.cli.models import load
from autopipe.cli.options import Making, Planning
from autopipe.cli.output import EXIT_CODES, Output, _in_options, emit, table
from autopipe.cli.planning import planned
from autopipe.cli.sample import small
from autopipe.errors import InputError, PlanError, StoreError
from autopipe.hardware import Cluster
from autopipe.look.table import Column, Table, count
from autopipe.schedule import build, to_csv

SAMPLE = str(pathlib.Path(autopipe.__file__).parent / "cli" / "sample.py") + ":small"
VERBS = (
    "profile", "plan", "simulate", "compare", "explain", "diff", "report", "watch", "probe", "run", "doctor",
)  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 100,
}
ESTIMATED = ["--device", "H100", "--costs", "estimated"]


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "plan.json"
    done = invoke("plan", SAMPLE, "-n", "2", "-m", "4", *ESTIMATED, "--out", str(path))
    assert done.exit_code == 0, done.output
    return path


def invoke(*words):
    return CliRunner().invoke(command_line, list(map(str, words)))


def command(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "autopipe", *map(str, words)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_help_lists_every_verb_and_the_exit_codes_without_torch():
    code = (
        "import sys; sys.argv = ['autopipe', '--help']\n"
        "from autopipe.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: print('code', e.code, 'torch' in sys.modules, 'sympy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith("code 0 False False")
    for verb in VERBS:
        assert f" {verb} " in done.stdout
    assert "Exit codes" in done.stdout


def test_plan_prints_a_table_and_writes_json(plan_path):
    plan = autopipe.Plan.from_json(plan_path)
    assert plan.n_stages == 2
    assert plan.n_microbatches == 4
    assert plan.ties[0].parameter == "embed.weight"


def test_plan_as_json_is_the_plan():
    done = invoke("plan", SAMPLE, "-n", "2", *ESTIMATED, "--json")
    assert autopipe.Plan.from_json(done.stdout).n_stages == 2


def test_a_meta_model_is_planned_without_weights(tmp_path):
    done = invoke("plan", SAMPLE, "--meta", "--device", "A100", "-n", "2", "--html", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    assert "2 stages on 2 ranks" in done.output
    assert "Op graph" in (tmp_path / "r.html").read_text()


def test_a_transformers_config_is_planned_on_the_meta_device(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    out = tmp_path / "plan.json"
    words = ("--meta", "--device", "H200", "-n", "2", "--batch", "4", "--seq", "16", "--out", out)
    for name in (tmp_path, tmp_path / "config.json"):
        done = invoke("plan", f"hf:{name}", *words)
        assert done.exit_code == 0, done.output
        assert autopipe.Plan.from_json(out).model == "LlamaForCausalLM"


def publish_a_step(folder):
    x = torch.ones(4, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    runtime = autopipe.split(model, 2, (x,), costs="estimated").runtime(torch.nn.functional.mse_loss)
    runtime.publish(folder)
    runtime.step(x, target=x)


def test_the_readmes_commands_do_what_it_says(tmp_path, monkeypatch):
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    block = readme.split("### From the command line")[1].split("```")[1]
    lines = [
        shlex.split(line, comments=True)[1:] for line in block.splitlines() if line.startswith("autopipe")
    ]
    assert len(lines) == 10
    monkeypatch.chdir(tmp_path)
    publish_a_step("runs/a/live")
    pathlib.Path("config.json").write_text(json.dumps(LLAMA))
    pathlib.Path("my_model.py").write_text("from autopipe.cli.sample import small as make\n")
    for words in lines:
        done = invoke(*words, *(["--once"] if words[0] == "watch" else []))
        assert done.exit_code == 0, (words, done.output)
        if words[0] == "plan":
            pathlib.Path("before.json").write_text(pathlib.Path("plan.json").read_text())
    assert json.loads(pathlib.Path("trace.json").read_text())["traceEvents"]
    assert pathlib.Path("report.html").is_file()


def test_the_readme_lists_every_exit_code():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    told = [int(n) for n in re.findall(r"^\| (\d+) \| ", readme, re.MULTILINE)]
    assert told == list(EXIT_CODES)


def test_ctrl_c_before_a_verb_has_begun_has_its_exit_code(monkeypatch):
    def pressed():
        raise KeyboardInterrupt

    monkeypatch.setattr("autopipe.cli.app.app", pressed)
    with pytest.raises(SystemExit) as told:
        main()
    assert told.value.code in EXIT_CODES
    assert told.value.code == 130


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_is_named_with_its_remedy(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    done = invoke("plan", f"{library}:resnet18", "-n", "2")
    assert done.exit_code == 2
    assert f"pip install {library}" in done.stderr


@pytest.mark.parametrize("name", ["timm:tiny", "torchvision:tiny"])
def test_models_of_vision_libraries_get_images_of_their_size(name, monkeypatch):
    class Tiny(torch.nn.Sequential):
        default_cfg = {"input_size": (3, 32, 32)}  # noqa: RUF012 - as timm has it

    def make(wanted, **options):
        assert wanted == "tiny"
        return Tiny(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=make))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=SimpleNamespace(get_model=make)))
    told = json.loads(invoke("profile", name, "--meta", "--device", "H100", "--batch", "2", "--json").stdout)
    side = 32 if name.startswith("timm") else 224
    assert told["costs"]["_1"]["saved_bytes"] == 4 * 2 * 4 * (side - 2) ** 2
    done = invoke("profile", name, "--meta", "--device", "H100", "--seq", "2")
    assert done.exit_code == 2
    assert "--seq 2 would change nothing" in done.stderr


def test_a_library_built_for_another_torch_is_named(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    done = invoke("plan", "timm:resnet18", "-n", "2")
    assert done.exit_code == 2
    assert "torchvision::nms" in done.stderr
    assert f"torch {torch.__version__}" in done.stderr


def probed_in_few_turns(n_ranks, folder):
    script, out = pathlib.Path(__file__).parents[1] / "few_turns.py", folder / "probed.json"
    run_ranks(script, n_ranks, f"file://{folder}/store", n_ranks, out)
    return autopipe.Cluster.read(out)


@pytest.mark.parametrize("turns", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_probe_writes_a_cluster_that_plans_take(turns, tmp_path, monkeypatch):
    if turns == "few":
        monkeypatch.setattr(probing, "among", lambda n_ranks, _: probed_in_few_turns(n_ranks, tmp_path))
    out = tmp_path / "cluster.json"
    done = invoke("probe", "--ranks", "2", "--nics", "1", "--json", "--out", out)
    assert done.exit_code == 0, done.output
    cluster = autopipe.Cluster.from_dict(json.loads(out.read_text()))
    assert cluster.n_ranks == 2
    assert cluster.nics == (0, 0)
    assert 0 < cluster.link(0, 1).bandwidth_bytes_s < 1e12
    speeds = {d.speed for d in cluster.devices}
    assert len(speeds) == 1
    assert 0.05 < speeds.pop() <= 1.0  # of the pace that the stages of a pipeline have alone
    assert invoke("plan", SAMPLE, "-n", "2", *ESTIMATED, "--cluster", out).exit_code == 0


@pytest.mark.parametrize("launcher", ["its environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_under_torchrun_each_rank_runs_a_stage(launcher, tmp_path):
    drawn = tmp_path / "drawn.py"  # seeds nothing, yet every rank has the same model and batch
    drawn.write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n"
        "    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.randn(8, 8),)\n"
    )
    words = ["run", f"{drawn}:make", "--steps", "2", "--device", "cpu", "--json"]
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*start, "-m", "autopipe", *words], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        output = done.stdout
    else:
        output, other = run_ranks(pathlib.Path(__file__).with_name("command_ranks.py"), 2, *words)
        assert "{" not in other
    told = json.loads(output[output.index("{") :])
    assert told["n_ranks"] == 2
    assert "probed" in told["links"]
    assert told["predicted_s"] > 1e-4  # messages between processes take longer than these layers


def test_profile_measures_or_estimates(tmp_path):
    out = tmp_path / "costs.json"
    done = invoke("profile", SAMPLE, "--device", "H100", "--json", "--out", out)
    costs = autopipe.CostTable.from_dict(json.loads(done.stdout))
    assert costs.source == "estimated"
    assert autopipe.CostTable.from_dict(json.loads(out.read_text())) == costs
    assert invoke("plan", SAMPLE, "-n", "2", "--costs", out).exit_code == 0


def test_simulate_another_schedule_and_trace(plan_path, tmp_path):
    trace = tmp_path / "trace.json"
    done = invoke("simulate", plan_path, "--schedule", "gpipe", "-m", "6", "--json", "--trace", trace)
    told = json.loads(done.stdout)
    assert (told["schedule"], told["n_microbatches"]) == ("gpipe", 6)
    assert json.loads(trace.read_text())["traceEvents"]
    assert "rank 1" in invoke("simulate", plan_path).stdout


def test_simulate_a_schedule_in_torchs_csv(plan_path, tmp_path):
    plan = autopipe.Plan.from_json(plan_path)
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build("zb-h1", plan.n_ranks, plan.n_stages, 3)))
    told = json.loads(invoke("simulate", plan_path, "--schedule", path, "--json").stdout)
    assert (told["schedule"], told["n_microbatches"]) == ("csv", 3)
    done = invoke("simulate", plan_path, "--schedule", tmp_path / "absent.csv")
    assert done.exit_code == 2
    assert "cannot read a schedule" in done.stderr


def test_compare_sorts_by_time_per_microbatch(plan_path):
    rows = json.loads(invoke("compare", plan_path, "--microbatches", "2,8", "--json").stdout)
    times = [r["per_microbatch_s"] for r in rows]
    assert len(rows) == 6
    assert times == sorted(times)
    by = {(r["schedule"], r["n_microbatches"]): r["bubble_fraction"] for r in rows}
    assert by["1f1b", 8] < by["1f1b", 2]


def test_compare_counts_memory_by_the_costs_it_is_given(plan_path, tmp_path):
    costs = tmp_path / "costs.json"
    assert invoke("profile", SAMPLE, "-m", "4", *ESTIMATED[:2], "--out", costs).exit_code == 0
    table = json.loads(costs.read_text())
    for cost in table["costs"].values():
        cost["saved_bytes"] = 10**6
    costs.write_text(json.dumps(table))

    def peak(*words):
        told = json.loads(invoke(*words, "--json").stdout)
        return max(told["peak_bytes"]) if words[0] == "simulate" else told[0]["peak_bytes"]

    known = peak("compare", plan_path, "--schedules", "1f1b", "--costs", costs)
    assert known == peak("simulate", plan_path, "--costs", costs)
    assert known != peak("compare", plan_path, "--schedules", "1f1b")


def test_compare_of_a_plan_refuses_what_it_has_decided_and_schedules_may_end_in_a_comma(plan_path):
    refused = invoke("compare", plan_path, "-n", "3")
    assert refused.exit_code == 2
    assert "--stages is already decided" in refused.stderr
    assert len(json.loads(invoke("compare", plan_path, "--schedules", "gpipe, ", "--json").stdout)) == 1
    assert "--schedules names none" in invoke("compare", plan_path, "--schedules", ",").stderr


def test_estimates_for_a_cluster_are_of_its_devices(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(Cluster.uniform(2, measure.device("H100")).to_dict()))
    words = ("plan", SAMPLE, "-n", "2", "--cluster", file, "--costs", "estimated", "--json")
    on_cluster, named = (json.loads(invoke(*words, *more).stdout) for more in ((), ("--device", "H100")))
    assert on_cluster == named


def test_an_input_without_a_dtype_is_of_the_models(tmp_path):
    source = "from torch import nn\n\nmodel = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
    (tmp_path / "bare.py").write_text(source)
    words = ("-n", "2", "--input", "16x8", "--dtype", "bfloat16", *ESTIMATED)
    assert invoke("plan", f"{tmp_path / 'bare.py'}:model", *words).exit_code == 0


def test_a_plan_whose_step_is_not_as_it_stands_is_told(plan_path, tmp_path):
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps({**json.loads(plan_path.read_text()), "n_microbatches": 8}))
    for words in (("simulate", changed), ("diff", plan_path, changed)):
        told = command(*words)
        assert f"{changed} says that a step takes" in told.stderr
        assert "plan again" in told.stderr
    assert command("simulate", plan_path).stderr == ""


def test_compare_plans_a_model_for_each_stage_count():
    words = ("compare", SAMPLE, "--stages", "2,3", "--microbatches", "4", "--schedules", "1f1b")
    rows = json.loads(invoke(*words, *ESTIMATED, "--json").stdout)
    assert sorted(r["n_stages"] for r in rows) == [2, 3]


def test_explain_says_each_cut(plan_path, tmp_path):
    costs = tmp_path / "costs.json"
    assert invoke("profile", SAMPLE, "-m", "4", *ESTIMATED[:2], "--out", costs).exit_code == 0
    assert "slowest stage" in invoke("explain", plan_path, "--costs", costs).stdout
    for words in (("--costs", costs), ("--device", "H100")):
        priced = invoke("explain", plan_path, "--model", SAMPLE, *words)
        assert "bottleneck: stage" in priced.stdout
        assert "step +" in priced.stdout or "step −" in priced.stdout
    others = tmp_path / "others.json"
    others.write_text(json.dumps({**json.loads(costs.read_text()), "ops": "0" * 16}))
    for verb in ("explain", "compare"):
        refused = invoke(verb, plan_path, "--costs", others)
        assert refused.exit_code == 2
        assert "of other ops" in refused.stderr
    told = json.loads(invoke("explain", plan_path, "--json").stdout)
    assert len(told["cuts"]) == 1
    assert told["bounds"]["bottleneck_s"] > 0
    assert invoke("explain", plan_path, "--cut", "7").exit_code == 2


def test_a_plan_whose_pins_were_moved_by_hand_is_told(plan_path, tmp_path):
    data, moved = json.loads(plan_path.read_text()), tmp_path / "moved.json"
    for stage, code in ((0, 0), (1, 3), (-1, 3)):
        moved.write_text(json.dumps({**data, "settings": {**data["settings"], "pin": {"embed": stage}}}))
        for verb in ("explain", "report"):
            told = invoke(
                verb,
                moved,
                "--model",
                SAMPLE,
                *ESTIMATED,
                *(("--out", tmp_path / "page.html") * (verb == "report")),
            )
            assert told.exit_code == code
            assert ("pins 'embed' to stage" in told.stderr) is (code == 3)
    model, args = small()
    with pytest.raises(PlanError, match="pins 'embed' to stage -1"):
        autopipe.split(model, args=args, plan=moved)


def test_diff_is_1_only_when_worse_by_more_than_the_threshold(plan_path, tmp_path):
    plan = json.loads(plan_path.read_text())
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps({**plan, "step_s": plan["step_s"] * 1.1}))
    assert invoke("diff", plan_path, plan_path).exit_code == 0
    assert invoke("diff", plan_path, slower).exit_code == 1
    assert invoke("diff", slower, plan_path).exit_code == 0
    assert invoke("diff", plan_path, slower, "--threshold", "0.2").exit_code == 0
    assert json.loads(invoke("diff", plan_path, slower, "--json").stdout)["worse"] == ["step"]


def test_report_with_the_model_has_its_op_graph(plan_path, tmp_path):
    page = tmp_path / "report.html"
    assert invoke("report", plan_path, "--out", page).exit_code == 0
    assert "Op graph" not in page.read_text()
    assert invoke("report", plan_path, "--out", page, "--model", SAMPLE, *ESTIMATED).exit_code == 0
    assert "Op graph" in page.read_text()


@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="needs a folder that takes no files")
@pytest.mark.parametrize("options", [("simulate", "--trace"), ("report", "--out")])
def test_what_cannot_be_written_says_where_and_what_to_do(plan_path, options):
    verb, option = options
    done = invoke(verb, plan_path, option, "/proc/page")
    assert done.exit_code == 2
    assert re.search(r"cannot write /proc/page: .*; give a place that can be written to", done.output)


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "plan.json", "--trace", "./plan.json"),
        ("report", "plan.json", "--out", "link.json"),
        ("report", "plan.json", "--out", "page.html", "--model", "page.html:make"),
        ("plan", "page.html", "-n", "2", "--out", "page.html"),
    ],
)
def test_no_verb_writes_over_what_it_reads(words, plan_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_bytes(plan_path.read_bytes())
    (tmp_path / "link.json").symlink_to("plan.json")
    (tmp_path / "page.html").write_text("before")
    done = invoke(*words)
    assert done.exit_code == 2
    assert "would replace what this command reads" in done.output
    assert (tmp_path / "plan.json").read_bytes() == plan_path.read_bytes()
    assert (tmp_path / "page.html").read_text() == "before"


def test_a_file_that_is_part_of_a_package_says_how_to_name_it(tmp_path):
    (tmp_path / "model.py").write_text("from .parts import make")
    done = invoke("plan", f"{tmp_path / 'model.py'}:make", "-n", "2")
    assert done.exit_code == 2
    assert "is part of a package, from which it imports; give package.module:factory" in done.output


@pytest.mark.parametrize("verb", ["simulate", "explain", "report", "compare"])
def test_verbs_that_look_at_a_plan_also_plan_a_model(verb, tmp_path):
    out = ("--out", tmp_path / "page.html") if verb == "report" else ()
    done = invoke(verb, SAMPLE, "--meta", "--device", "H100", "-n", "2", "--memory", "80GB", "--json", *out)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    if verb != "compare":
        assert invoke(verb, SAMPLE, "--device", "H100").exit_code == 2  # into how many stages?


def test_a_plan_is_looked_at_under_another_limit_and_on_other_links(plan_path, tmp_path):
    plan = autopipe.Plan.from_json(plan_path)
    most = max(s.memory_bytes for s in plan.stages)
    assert invoke("simulate", plan_path, "--memory", f"{4 * most}").exit_code == 0
    over = invoke("simulate", plan_path, "--memory", "1KB")
    assert over.exit_code == 1
    assert "limit 1000 B" in over.stderr
    slow = autopipe.Cluster.uniform(2, link=autopipe.Link(latency_s=1.0))
    (tmp_path / "slow.json").write_text(json.dumps(slow.to_dict()))
    told = json.loads(invoke("simulate", plan_path, "--cluster", tmp_path / "slow.json", "--json").stdout)
    assert told["step_s"] > 1.0 > plan.step_s
    before = json.loads(invoke("simulate", plan_path, "--json").stdout)["step_s"]
    devices = [dataclasses.replace(d, speed=d.speed / 1000) for d in plan.cluster.devices]
    late = dataclasses.replace(plan.cluster, devices=tuple(devices))
    (tmp_path / "late.json").write_text(json.dumps(late.to_dict()))
    told = json.loads(invoke("simulate", plan_path, "--cluster", tmp_path / "late.json", "--json").stdout)
    assert told["step_s"] > 10 * before
    (tmp_path / "wide.json").write_text(json.dumps(autopipe.Cluster.uniform(3).to_dict()))
    assert invoke("simulate", plan_path, "--cluster", tmp_path / "wide.json").exit_code == 3


@pytest.mark.parametrize("option", ["--memory", "--cluster"])
def test_what_was_proved_of_a_plan_is_not_told_of_it_elsewhere(option, plan_path, tmp_path):
    plan = autopipe.Plan.from_json(plan_path)
    devices = [dataclasses.replace(d, speed=d.speed / 8) for d in plan.cluster.devices]
    slow = dataclasses.replace(plan.cluster, devices=tuple(devices))
    (tmp_path / "slow.json").write_text(json.dumps(slow.to_dict()))
    other = "64GB" if option == "--memory" else tmp_path / "slow.json"
    before, after = (
        json.loads(invoke("explain", plan_path, *given, "--json").stdout)["bounds"]
        for given in ((), (option, other))
    )
    assert before["bottleneck_lower_s"] > 0 == after["bottleneck_lower_s"] == after["step_lower_s"]
    assert not after["proved"]
    assert after["gap"] is after["step_gap"] is None
    assert (after["bottleneck_s"] > 4 * before["bottleneck_s"]) is (option == "--cluster")
    page = tmp_path / "page.html"
    assert invoke("report", plan_path, option, other, "--out", page).exit_code == 0
    text = page.read_text()
    assert "step without a bound, bottleneck without a bound" in text
    assert "no cut can beat" not in text


def test_run_trains_and_agrees_with_the_model():
    done = invoke("run", SAMPLE, "--steps", "3", "--lr", "0.1", *ESTIMATED[2:], "--json")
    told = json.loads(done.stdout)
    assert told["worst_relative_difference"] < 1e-5
    assert told["losses"][-1] < told["losses"][0]
    assert told["measured_s"] > 0


def test_what_a_run_publishes_is_watched(tmp_path):
    live = tmp_path / "live"
    assert invoke("watch", live).exit_code == 2
    live.mkdir()
    early = invoke("watch", live)
    assert early.exit_code == 1
    assert "was told" in early.stderr
    assert invoke("run", SAMPLE, "--steps", "3", *ESTIMATED[2:], "--publish", live).exit_code == 0
    told = json.loads(invoke("watch", live, "--json").stdout)
    assert 1 <= told["step"] <= 3
    assert set(told["bubble"]) == {"warmup_s", "drain_s", "imbalance_s", "communication_s"}
    shown = invoke("watch", live).stdout
    assert "predicted, ratio" in shown
    assert "Idle" in shown
    assert json.loads(on_a_terminal("watch", live, "--json"))["step"] == told["step"]


def on_a_terminal(*words):
    """What a command that ends by itself prints on a terminal."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "autopipe", *map(str, words)]
    subprocess.run(words, stdout=theirs, timeout=60, check=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal ends with
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    return shown.decode()


def test_a_plan_over_a_mesh(plan_path, tmp_path):
    page = tmp_path / "page.html"
    done = invoke("report", plan_path, "--mesh", "dp=2,pp=2", "--per-host", "2", "--out", page)
    assert "4 processes on 2 hosts" in done.stdout
    assert "Gradients summed over replicas" in done.stdout
    assert 'id="mesh"' in page.read_text()
    assert invoke("report", plan_path, "--mesh", "pp=3", "--out", page).exit_code == 2
    assert invoke("report", plan_path, "--per-host", "2", "--out", page).exit_code == 2


def test_counts_are_found_and_what_is_planned_is_as_asked():
    words = (
        "--ranks",
        "2",
        "-n",
        "auto",
        "-m",
        "auto",
        "--recompute",
        "always",
        "--no-overlap",
        "--device-order",
        "auto",
    )
    told = json.loads(invoke("plan", SAMPLE, *words, *ESTIMATED, "--json").stdout)
    assert told["settings"]["recompute"] == "always"
    assert told["settings"]["overlap"] is False
    assert all(s["recompute"] for s in told["stages"])
    assert len({c["n_stages"] for c in told["candidates"]}) > 1
    steps = told["settings"]["steps_by_microbatches"]
    assert len(steps) > 1
    assert min(steps.values()) == steps[str(told["n_microbatches"])] == told["step_s"]


@pytest.mark.parametrize(
    "words", [("-n", "0"), ("-n", "many"), ("-m", "0"), ("-m", "1.5"), ("-n", "٣"), ("-m", "9" * 5000)]
)
def test_counts_are_whole_numbers_or_auto(words):
    done = invoke("plan", SAMPLE, *words)
    assert done.exit_code == 2
    assert "nor auto" in done.output


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("plan", "nothing", "-n", "2"), 2, "package.module:factory"),
        (("plan", "no.such:thing", "-n", "2"), 2, "cannot import"),
        (("plan", SAMPLE.replace("small", "large"), "-n", "2"), 2, "it has Small, small"),
        (("plan", "absent.py:f", "-n", "2"), 2, "no file absent.py"),
        (("plan", "hf:absent.json", "-n", "2"), 2, "no such config.json"),
        (("plan", SAMPLE, "--meta", "-n", "2"), 2, "--device"),
        (("plan", SAMPLE, "-n", "2", *ESTIMATED, "--memory", "1KB"), 3, "fit"),
        (("plan", SAMPLE, "-n", "2", *ESTIMATED, "--memory", "many"), 2, "70GB"),
        (("plan", SAMPLE, "-n", "2", "--dtype", "int8"), 2, "bfloat16"),
        (("plan", SAMPLE, "-n", "2", "--input", "a,b"), 2, "8x3x224x224"),
        (("simulate", "absent.json"), 2, "absent.json"),
        (("compare", "absent:x"), 2, "cannot import"),
        (("plan", SAMPLE.replace("small", "Small"), "-n", "2"), 2, "--input 8x128:int64"),
        (("plan", SAMPLE), 2, "--stages"),
        (("plan", SAMPLE, "-n", "auto", *ESTIMATED), 2, "--ranks"),
        (("plan", SAMPLE, "-n", "2", "--recompute", "some", *ESTIMATED), 2, "'never', 'auto', 'always'"),
        (("simulate", "plan.json", "-m", "auto"), 2, "plan it anew"),
        (("simulate", "plan.json", "--no-overlap"), 2, "plan it anew"),
        (("run", SAMPLE, "--meta"), 2, "no weights to train"),
        *((("run", SAMPLE, "--lr", lr), 2, "--lr is") for lr in ("-1", "nan", "inf", "1e9")),
        *((("watch", ".", "--every", every), 2, "--every is") for every in ("0", "nan", "inf")),
        (("diff", "a.json", "b.json", "--threshold", "nan"), 2, "--threshold is"),
        (("simulate", "plan.json", "--stages", "3"), 2, "plan it anew"),
        (("explain", SAMPLE, "--model", SAMPLE), 2, "leave it out"),
        (("plan", SAMPLE, "-n", "2", "--batch", "4", *ESTIMATED), 2, "--batch 4 would change nothing"),
        (("plan", "hf:.", "-n", "2", "--input", "4x16:int64", "--seq", "4"), 2, "gives every size"),
    ],
)
def test_errors_are_short_say_the_remedy_and_have_their_code(words, code, says):
    done = invoke(*words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_what_arguments_of_python_are_on_the_command_line_is_said(tmp_path):
    made = tmp_path / "made.py"
    made.write_text(MODELS)
    done = invoke("run", f"{made}:diverging", "-n", "2", "--steps", "2", *ESTIMATED[2:])
    assert done.stderr.splitlines()[1:] == [
        "  loss_on, check_finite: of pipe.runtime() in Python; the command line has no such option"
    ]
    found = _in_options("it fits with n_stages=5, memory_limit='20GB' or schedule='zbv', and batch=4")
    assert found == "it fits with --stages 5, --memory 20GB or schedule='zbv', and batch=4"


def test_names_of_files_and_of_what_is_in_them_stay():
    text = "a/n_stages.py has no model; the plan, settings.memory_limit: cannot be; n_ranks/b is no file"
    assert _in_options(text) == text
    assert _in_options("n_ranks is 3 and n_stages.") == "--ranks is 3 and --stages."


def test_what_nobody_foresaw_is_said_shortly_too(tmp_path, monkeypatch):
    monkeypatch.setattr(autopipe.Plan, "from_json", lambda source: 1 / 0)
    done = invoke("diff", "a.json", "b.json")
    assert done.exit_code == 5
    assert "ZeroDivisionError" in done.stderr
    assert "--debug" in done.stderr
    assert invoke("report", SAMPLE, "-n", "2", *ESTIMATED, "--out", tmp_path / "no" / "p.html").exit_code == 2


def test_what_ran_must_be_what_was_planned(plan_path, tmp_path):
    ran = tmp_path / "ran.json"
    invoke("run", SAMPLE, "-n", "3", *ESTIMATED[2:], "--out", ran)
    done = invoke("report", plan_path, "--measured", ran, "--out", tmp_path / "page.html")
    assert done.exit_code == 2
    assert "what ran had 3 stages on 3 ranks" in done.stderr


@pytest.mark.parametrize("option", [("--batch", "4"), ("--costs", "measured"), ("--costs", "estimated")])
def test_options_of_a_model_need_one(plan_path, option):
    done = invoke("explain", plan_path, *option)
    assert done.exit_code == 2
    assert "--model" in done.stderr


@pytest.mark.parametrize(
    ("option", "given"),
    [
        (f.name, True)
        for f in dataclasses.fields(Planning)
        if f.name not in ("schedule", "memory", "microbatches")
    ]
    + [("microbatches auto", "auto")],
)
def test_what_a_plan_has_decided_is_refused_by_the_options_name(option, given):
    how = Planning(**{option.split()[0]: given})
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} is already decided in made.json"):
        planned("made.json", Making(), how)


def test_debug_shows_the_traceback():
    done = invoke("plan", "no.such:thing", "-n", "2", "--debug")
    assert isinstance(done.exception, autopipe.AutopipeError)


def test_a_name_may_be_of_the_model_itself(tmp_path):
    odd = tmp_path / "odd_things.py"
    odd.write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "exampled = model, (torch.ones(2, 4),)\nby_name = model, (), {'input': torch.ones(2, 4)}\n"
        "text = 'model'\ntwo_lists = model, (torch.ones(2, 4),), [1]\nempty = ()\n"
    )
    for name, n_args, n_kwargs in (("exampled", 1, 0), ("by_name", 0, 1)):
        found = load(f"{odd}:{name}")
        assert (len(found.args), len(found.kwargs)) == (n_args, n_kwargs)
    for name, says in (("text", "is a str"), ("empty", "is a tuple"), ("two_lists", "a dict of arguments")):
        with pytest.raises(autopipe.InputError, match=says):
            load(f"{odd}:{name}")


def test_a_model_that_fails_says_whose_error_it_is(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def make():\n    raise RuntimeError('weights went missing')\n")
    done = invoke("plan", f"{bad}:make", "-n", "2")
    assert done.exit_code == 4
    assert "because RuntimeError: weights went missing" in done.stderr


def test_a_cause_that_is_told_is_not_told_again():
    done = invoke("simulate", "absent.json")
    assert done.stderr.count("No such file") == 1


def test_without_the_extra_one_line_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None\nfrom autopipe.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == 'autopipe: the command line needs typer: pip install "autopipe-torch[cli]"'


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_takes_what_is_said(name, plan_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["autopipe", "explain", str(plan_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    getattr(sys, name).close()
    assert ("cut 0|1" in capsys.readouterr().out) is (name == "stderr")


def test_signs_that_the_output_has_not_are_replaced(plan_path, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(sys, "argv", ["autopipe", "explain", str(plan_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert b"loads " in narrow.buffer.getvalue()
    assert b"?s" in narrow.buffer.getvalue()


def test_an_output_without_room_is_told(plan_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    with pytest.raises(StoreError, match="cannot write the result to the output: No space left"):
        emit(Output({}, "text"), as_json=False)


def test_numbers_are_whole_on_a_narrow_terminal(monkeypatch):
    columns = (Column("name", "name"), Column("n", "n", count), Column("more", "more", count))
    rows = Table("All", columns, (("a long name of something", 123456, 7654321),))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for width, is_cut in ((80, False), (34, True), (20, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        told = table(rows)
        assert "123,456" in told
        assert "7,654,321" in told
        assert ("…" in told) is is_cut


def test_in_a_pipe_only_the_result_is_written(plan_path):
    done = command("simulate", plan_path, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    json.loads(done.stdout)


def test_completion_offers_the_verbs():
    done = command(_AUTOPIPE_COMPLETE="complete_bash", COMP_WORDS="autopipe ex", COMP_CWORD="1")
    assert "explain" in done.stdout


def test_doctor_is_well_here():
    done = invoke("doctor", "--json")
    checks = {c["what"]: c for c in json.loads(done.stdout)}
    assert done.exit_code == 0, checks
    assert checks["end to end"]["ok"] is True


def test_stages_left_out_are_found_for_the_ranks():
    words = ("--ranks", "2", *ESTIMATED, "--memory", "1GB,2GB", "--device-order", "auto", "--json")
    done = invoke("plan", SAMPLE, *words)
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert {c["n_stages"] for c in plan["candidates"]} == {1, 2}
    assert plan["settings"]["memory_limit"] in ([10**9, 2 * 10**9], 10**9)


def test_json_knows_no_infinity(capsys):
    emit(Output({"gap": float("inf"), "rows": [(1.5, float("nan")), pathlib.Path("a")]}, ""), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"gap": None, "rows": [[1.5, None], "a"]}


ODD_MODELS = """
import sys, torch
from torch import nn

print("imported")


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        print("ran")
        return self.last(self.first(x))


def printing():
    print("made")
    return Printing(), (torch.randn(4, 4),)


def ending():
    sys.exit(3)


class Ending(nn.Module):
    def forward(self, x):
        sys.exit(0)


def ending_late():
    return Ending(), (torch.randn(4, 4),)


def raising():
    raise ValueError


def needing(n):
    return nn.Linear(n, n)
"""


@pytest.fixture
def odd(tmp_path):
    """A file of models whose name is a package's that all else goes on with."""
    folder = tmp_path / "my models"
    folder.mkdir()
    path = folder / "torch.py"
    path.write_text(ODD_MODELS)
    (folder / "to nowhere").symlink_to(folder / "nowhere" / "plan.json")
    yield path
    for name in [name for name in sys.modules if name.startswith("torch of ")]:
        del sys.modules[name]


def test_what_a_model_prints_is_no_result(odd):
    for verb in (
        ("plan", "-n", "2"),
        ("profile",),
        ("simulate", "-n", "2"),
        ("run", "-n", "2", "--steps", "1"),
    ):
        done = invoke(verb[0], f"{odd}:printing", *verb[1:], "--costs", "estimated", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)
        assert {"imported", "made", "ran"} <= {*done.stderr.split()}
    assert sys.modules["torch"] is torch


def test_a_pipe_that_closes_early_ends_it_quietly(odd):
    words = f"{sys.executable} -m autopipe plan '{odd}:printing' -n 2 --device H100 --json | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert "autopipe:" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("plan", "{odd}:ending", "-n", "2"), 4, "because SystemExit: 3"),
        (("plan", "{odd}:ending_late", "-n", "2"), 4, "ended the process with SystemExit: 0"),
        (("plan", "{odd}:raising", "-n", "2"), 4, "because ValueError"),
        (("plan", "{odd}:needing", "-n", "2"), 2, "needs n; name a function"),
        (("plan", ":make", "-n", "2"), 2, "no name of a package"),
        (("plan", "builtins:dict", "-n", "2"), 2, "made a dict"),
        (("plan", SAMPLE, "-n", "2", "--input", "0x8"), 2, "8x3x224x224"),
        (("plan", SAMPLE, "-n", "2", "--input", "9" * 18), 2, "cannot make input"),
        (("plan", SAMPLE, "-n", "2", "--input", "9" * 5000), 2, "cannot read input '9999"),
        (("compare", SAMPLE, "--stages", "9" * 5000, *ESTIMATED), 2, "--stages has '9999"),
        (("compare", SAMPLE, "--microbatches", "2,²", *ESTIMATED), 2, "--microbatches has '²'"),
        (("plan", SAMPLE, "-n", "2", "--dtype", "float8_e4m3fn"), 2, "no model can be made in float8_e4m3fn"),
        (("run", SAMPLE, "-n", "2", "--steps", "9" * 30), 2, "1000000"),
        (("probe", "--ranks", "2", "--nics", "3"), 2, "--nics is 3; it can be at most 2"),
        (("plan", SAMPLE, "-n", "2", "--device", "cuda:77"), 2, "is not available here"),
        (("plan", SAMPLE, "-n", "2", *ESTIMATED, "--out", "{folder}"), 2, "is a folder; give a file in it"),
        (("plan", SAMPLE, "-n", "2", *ESTIMATED, "--html", "{folder}/a/b.html"), 2, "there is no folder"),
        (("plan", SAMPLE, "-n", "2", *ESTIMATED, "--out", "-"), 2, "--json prints the result"),
        (("profile", SAMPLE, "--recalibrate", *ESTIMATED), 2, "corrects costs that are measured"),
        (("plan", SAMPLE, "-n", "2", *ESTIMATED, "--out", "{folder}/to nowhere"), 2, "there is no folder"),
        (("simulate", "{folder}"), 2, "neither a plan"),
        (("compare", SAMPLE, "--schedules", "1F1B,gpip", *ESTIMATED), 2, "did you mean '1f1b'?"),
        (("compare", SAMPLE, "--stages", "99", *ESTIMATED), 3, "can be cut into"),
    ],
)
def test_odd_input_is_told_before_any_work(odd, words, code, says):
    done = invoke(*(word.format(odd=odd, folder=odd.parent) for word in words))
    assert done.exit_code == code, done.output
    assert says in done.stderr.replace("\n", " ")


def test_a_file_that_fails_leaves_no_half_of_itself(odd):
    path = odd.parent / "failing_half.py"
    path.write_text("x = 1\nraise ValueError('half')\n")
    assert invoke("plan", f"{path}:x", "-n", "2").exit_code == 4
    assert "failing_half" not in sys.modules
    package = odd.parents[1] / "failing_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError('whole')\n")
    paths = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    told = command("plan", "failing_package:x", "-n", "2", PYTHONPATH=paths)
    assert told.returncode == 4
    assert "because ValueError: whole" in told.stderr


def test_a_count_of_stages_that_cannot_be_is_a_row_beside_those_that_can():
    words = ("compare", SAMPLE, "--stages", "2,99", "--microbatches", "4", "--schedules", "1f1b", *ESTIMATED)
    rows = json.loads(invoke(*words, "--json").stdout)
    assert [(r["n_stages"], bool(r["step_s"])) for r in rows] == [(2, True), (99, False)]
    assert "can be cut into" in rows[1]["problem"]
    assert "can be cut into" in invoke(*words).stdout


MODELS = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.n_calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

class Counting(Chain):
    def forward(self, x):
        self.n_calls += 1
        return None, {"y": self.second(self.first(x)), "rows": len(x)}

class Choosing(Chain):
    def forward(self, x):
        return self.second(self.first(x)).argmax(-1)

def diverging():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (1e30 * torch.ones(8, 4),)

def counting():
    return Counting(), (torch.ones(8, 4),)

def choosing():
    return Choosing(), (torch.ones(8, 4),)
"""


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("counting", 0, ""),
        ("choosing", 2, "have its forward return its loss"),
        ("diverging", 4, "the loss is inf"),
    ],
)
def test_a_run_trains_any_output_or_says_what_is_missing(tmp_path, name, code, says):
    made = tmp_path / "made.py"
    made.write_text(MODELS)
    done = invoke("run", f"{made}:{name}", "-n", "2", "--steps", "2", *ESTIMATED[2:])
    assert done.exit_code == code, done.output
    assert says in done.stderr
