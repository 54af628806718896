"""Bad input: the fact, the place and the remedy, on every rank, and nothing hangs."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from processes import run_ranks
from torch import nn

import autopipe
from autopipe.errors import InfeasibleError, InputError, ModelError, PlanError, StepError, StoreError


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.parametrize("n_stages", [0, -1, 1.5, "2"])
def test_n_stages_must_be_a_positive_whole_number(n_stages):
    with pytest.raises(InputError, match=r"n_stages is .*at least 1"):
        autopipe.split(mlp(), n_stages, (torch.randn(2, 4),))


def test_more_stages_than_the_model_can_be_cut_into():
    with pytest.raises(InfeasibleError, match="40"):
        autopipe.split(mlp(), 40, (torch.randn(2, 4),), costs="estimated")


def test_no_memory_at_all_is_no_plan():
    with pytest.raises(
        InfeasibleError, match=r"the 2 ranks hold 0 B together.*at least .* on each rank would be needed"
    ):
        autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated", memory_limit=0)


def test_the_models_own_error_is_attributed_to_it():
    with pytest.raises(ModelError, match="shapes cannot be multiplied") as caught:
        autopipe.split(mlp(), 2, (torch.randn(2, 5),))
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("verb", ["split", "plan", "profile", "capture"])
def test_a_pipe_is_not_split_again(verb):
    pipe = autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated")
    with pytest.raises(InputError, match=r"model is a pipe, .* give pipe.graph or pipe.model"):
        getattr(autopipe, verb)(pipe, args=(torch.randn(2, 4),))


class FSDPModule:
    """What ``fully_shard`` has a module's class inherit is known by its name."""


@pytest.mark.parametrize("part", ["", "0"])
def test_a_pipe_that_was_wrapped_is_not_run(part):
    pipe = autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated")
    module = pipe.get_submodule(part)
    module.__class__ = type(f"Wrapped{type(module).__name__}", (FSDPModule, type(module)), {})
    with pytest.raises(
        InputError, match=f"{part or 'model'} is wrapped in FSDPModule.*split the model itself"
    ):
        pipe.runtime()


class WithoutInit(nn.Module):
    def __init__(self) -> None:
        pass


MODELS = {
    "has no forward; give the module that calls its parts": nn.ModuleList([nn.Linear(4, 4)]),
    r"a WithoutInit whose __init__ does not call super\(\).__init__\(\)": WithoutInit(),
}


@pytest.mark.parametrize("said", MODELS)
@pytest.mark.parametrize("verb", ["split", "plan", "profile", "capture"])
def test_what_is_not_yet_a_model_is_told_so(said, verb):
    with pytest.raises(InputError, match=said):
        getattr(autopipe, verb)(MODELS[said], args=(torch.randn(2, 4),))


def test_arguments_without_values_are_no_example_of_a_model_with_some():
    with pytest.raises(
        InputError, match="on the meta device and so without values, and Sequential is on cpu"
    ):
        autopipe.capture(mlp(), (torch.randn(2, 4, device="meta"),))
    autopipe.capture(mlp().to("meta"), (torch.randn(2, 4, device="meta"),))


def test_a_call_that_does_not_fit_is_told_what_the_model_takes():
    x = torch.randn(2, 4)
    with pytest.raises(InputError, match=r"too many positional arguments; it takes \(input\)"):
        autopipe.capture(mlp(), (x, x))
    with pytest.raises(InputError, match="it is a tuple: give what a loader's batch holds"):
        autopipe.split(mlp(), 2, (x,), costs="estimated").runtime(nn.MSELoss()).step((x, x))


LOSSES = {
    r"loss_fn takes \(output\), and is called with \(output, target\)": lambda output: output.mean(),
    r"loss_fn takes \(x, output, target\), and is called": lambda x, output, target: output.mean(),
    "loss_fn is the class MSELoss; give what it makes": nn.MSELoss,
}


@pytest.mark.parametrize("said", LOSSES)
def test_a_loss_of_other_arguments_is_told_what_it_is_called_with(said):
    x = torch.randn(2, 4)
    pipe = autopipe.split(mlp(), 2, (x,), costs="estimated")
    with pytest.raises(InputError, match=said):
        pipe.runtime(LOSSES[said]).step(x, target=x)


def test_a_loss_that_fails_for_other_reasons_than_its_shapes_is_told_nothing_of_rows():
    x = torch.randn(2, 4)
    rt = autopipe.split(mlp(), 2, (x,), costs="estimated").runtime(lambda output, target: output.logits)
    with pytest.raises(StepError, match="no attribute 'logits'") as caught:
        rt.step(x, target=x, n_microbatches=2)
    assert "row" not in str(caught.value)


def test_a_class_is_no_optimizer_to_save_or_load(tmp_path):
    x = torch.randn(2, 4)
    rt = autopipe.split(mlp(), 2, (x,), costs="estimated").runtime(nn.MSELoss())
    with pytest.raises(InputError, match="optimizer is the class Adam; give the object that was made of it"):
        rt.save(tmp_path / "save", optimizer=torch.optim.Adam)
    rt.save(tmp_path / "save", optimizer=torch.optim.Adam(rt.parameters()))
    with pytest.raises(InputError, match="optimizer is the class Adam"):
        rt.load(tmp_path / "save", optimizer=torch.optim.Adam)


def test_a_stage_that_is_pinned_to_is_a_number():
    with pytest.raises(InputError, match=r"pin\['0'\] is 'last'; it must be a stage's number: 0, or -1"):
        autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated", pin={"0": "last"})


@pytest.mark.parametrize("n_microbatches", [0, -2, 1.5, "many"])
def test_n_microbatches(n_microbatches):
    with pytest.raises(InputError, match="n_microbatches is"):
        autopipe.split(mlp(), 2, (torch.randn(2, 4),), n_microbatches=n_microbatches, costs="estimated")


def test_unknown_choices_name_the_known_ones():
    for option in ({"schedule": "2f2b"}, {"balance": "luck"}, {"ties": "knot"}):
        with pytest.raises(autopipe.AutopipeError, match=next(iter(option.values()))):
            autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated", **option)


@pytest.mark.parametrize("verb", ["split", "plan"])
def test_unknown_options_name_the_nearest(verb):
    with pytest.raises(InputError, match=rf"{verb}\(\) has no option 'schedul'; did you mean 'schedule'\?"):
        getattr(autopipe, verb)(mlp(), 2, (torch.randn(2, 4),), schedul="gpipe")
    with pytest.raises(InputError, match=r"no option 'xyz'; it has .*balance.*time_limit_s"):
        getattr(autopipe, verb)(mlp(), 2, (torch.randn(2, 4),), xyz="red")


def test_a_given_plan_takes_no_other_decisions():
    x = torch.randn(2, 4)
    plan = autopipe.plan(mlp(), 2, (x,), costs="estimated")
    with pytest.raises(InputError, match="n_stages is 3, but the given plan has 2"):
        autopipe.split(mlp(), 3, (x,), plan=plan)
    with pytest.raises(InputError, match="memory_limit would be ignored"):
        autopipe.split(mlp(), 2, (x,), plan=plan, memory_limit="1GB")


class Tied(nn.Module):
    """Embedding and head share a weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        first = self.first(self.embedding(ids))
        return self.head(self.second(first) + first)


EDITS = {
    "a value left out": lambda plan: {"boundaries": plan.boundaries[1:]},
    "all values left out": lambda plan: {"boundaries": ()},
    "another stage": lambda plan: {"boundaries": edited(plan.boundaries, "embedding", destinations=(2,))},
    "a stage too many": lambda plan: {
        "boundaries": edited(plan.boundaries, "embedding", destinations=(1, 2))
    },
    "an op moved alone": lambda plan: {"stages": moved(plan.stages, "second", 1)},
    "ties left out": lambda plan: {"ties": ()},
    "a tie's stages": lambda plan: {"ties": edited(plan.ties, "embedding.weight", stages=(0,))},
    "a tie's names": lambda plan: {
        "ties": edited(plan.ties, "embedding.weight", names=("embedding.weight", "second.weight"))
    },
    "a tie too many": lambda plan: {
        "ties": (*plan.ties, dataclasses.replace(plan.ties[0], parameter="x", names=("x",)))
    },
}


def edited(rows, name, **changes):
    is_it = [name in (getattr(row, "value", None), getattr(row, "parameter", None)) for row in rows]
    assert any(is_it)
    return tuple(dataclasses.replace(r, **changes) if it else r for r, it in zip(rows, is_it, strict=True))


def moved(stages, op, to):
    return tuple(
        dataclasses.replace(s, ops=(*s.ops, op) if s.index == to else tuple(o for o in s.ops if o != op))
        for s in stages
    )


@pytest.mark.parametrize("edit", EDITS)
def test_a_given_plan_that_says_other_boundaries_or_ties_than_its_stages_have(edit):
    model, x = Tied(), torch.arange(8).view(4, 2)
    plan = autopipe.plan(
        model, 3, (x,), costs="estimated", pin={"embedding": 0, "first": 1, "second": 2, "head": 2}
    )
    autopipe.split(model, args=(x,), plan=plan)
    changed = EDITS[edit](plan)
    contradicting = dataclasses.replace(plan, **changed)
    what = "ties" if "ties" in changed else "boundaries"
    for pipe in (
        lambda: autopipe.split(model, args=(x,), plan=contradicting),
        lambda: autopipe.Pipe(autopipe.capture(model, (x,)), contradicting),
    ):
        with pytest.raises(
            PlanError, match=rf"the plan's {what} have .*, and its stages make that .* plan again"
        ):
            pipe()


def test_the_demo_says_how_to_start_it():
    done = subprocess.run(
        [sys.executable, "-m", "autopipe.demo"],
        env={k: v for k, v in os.environ.items() if k != "RANK"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "torchrun --standalone" in done.stderr
    assert "Traceback" not in done.stderr


def test_costs_that_cannot_be_read():
    with pytest.raises(StoreError, match=r"nowhere\.json"):
        autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="nowhere.json")


def test_meta_models_cannot_be_measured():
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(InputError, match="costs='estimated'"):
        autopipe.split(model, 2, (torch.randn(2, 4, device="meta"),))


def test_loss_that_is_not_a_scalar():
    runtime = autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated").runtime(
        loss_fn=lambda output, target: output - target
    )
    with pytest.raises(autopipe.AutopipeError, match="scalar"):
        runtime.step(torch.randn(2, 4), target=torch.randn(2, 4))


def test_batch_smaller_than_n_microbatches_uses_fewer():
    model = mlp()
    pipe = autopipe.split(model, 2, (torch.randn(8, 4),), n_microbatches=8, costs="estimated")
    runtime = pipe.runtime(loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expected = nn.functional.mse_loss(model(x), y)
    assert torch.allclose(runtime.step(x, target=y).loss, expected.detach())


def test_fewer_microbatches_than_asked_for_are_said(caplog):
    pipe = autopipe.split(mlp(), 2, (torch.randn(8, 4),), n_microbatches=100, costs="estimated")
    assert pipe.plan.n_microbatches == 8
    assert "100 microbatches were asked for, but the example batch has 8 rows" in caplog.text


def test_call_with_the_wrong_structure():
    pipe = autopipe.split(mlp(), 2, (torch.randn(2, 4),), costs="estimated")
    with pytest.raises(InputError):
        pipe(torch.randn(2, 4), torch.randn(2, 4))
    with pytest.raises(InputError):
        pipe(torch.randn(2, 4).to(torch.int64))
    with pytest.raises(InputError, match="PipelineTrainer"):  # as transformers' Trainer calls what it trains
        pipe(torch.randn(2, 4), num_items_in_batch=torch.tensor(8))


def test_every_rank_gets_the_error_and_the_group_lives_on():
    script = pathlib.Path(__file__).with_name("bad_input_ranks.py")
    outputs = [
        dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
        for output in run_ranks(script, 2, timeout_s=90)
    ]
    for said in outputs:
        assert "ranks disagree on the captured graph" in said["other models"]
        assert "shapes cannot be multiplied" in said["one rank's model fails"]
        assert "InfeasibleError" in said["too many stages"]
        assert "2 ranks cannot share 1 stages" in said["more ranks than stages"]
        assert "nowhere.json" in said["missing cost file"]
        assert "3" in said["world size"]
        assert "Error" in said["world size"]
        assert "ModelError" in said["refused by the model"]
    assert "rank 1 failed" in outputs[0]["one rank's model fails"]
    assert outputs[0]["afterwards"] == outputs[1]["afterwards"]


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Identity()])
def test_a_model_that_computes_nothing_is_told_so(model):
    with pytest.raises(InfeasibleError, match="computes nothing that a stage could hold"):
        autopipe.split(model, 1, (torch.randn(2, 4),), costs="estimated")


def test_unknown_options_of_every_verb_name_the_nearest():
    x = (torch.randn(2, 4),)
    pipe = autopipe.split(mlp(), 2, x, costs="estimated")
    calls = {
        "capture": (lambda: autopipe.capture(mlp(), x, opne=["0"]), "open"),
        "profile": (lambda: autopipe.profile(mlp(), x, min_pass=1), "min_passes"),
        "simulate": (lambda: autopipe.simulate(pipe.plan, schedul="gpipe"), "schedule"),
        "runtime": (lambda: pipe.runtime(mixed_row="allow"), "mixed_rows"),
    }
    for verb, (call, near) in calls.items():
        with pytest.raises(InputError, match=rf"{verb}\(\) has no option '\w+'; did you mean '{near}'\?"):
            call()


def test_dynamic_is_a_flag_or_auto():
    with pytest.raises(InputError, match="dynamic is 'batch'; it must be True, False or 'auto'"):
        autopipe.capture(mlp(), (torch.randn(2, 4),), dynamic="batch")


def test_a_store_that_cannot_be_written_says_what_to_give(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot keep measurements in .*file.*AUTOPIPE_STORE"):
        autopipe.profile(
            mlp(), (torch.randn(2, 4),), store=tmp_path / "file" / "store", max_passes=1, min_passes=1
        )
