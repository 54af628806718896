"""A plan against another: what moved, what crosses otherwise, whether it is worse."""

import dataclasses
import json

import pytest
from plans import make_plan

from autopipe.errors import InputError, StoreError
from autopipe.plans import Boundary, Plan, Tie


def moved_plan(plan):
    """``op1`` computed by stage 2, its value sent no more, the tie's ends on one stage."""
    first, second, third, *rest = plan.stages
    stages = (
        first,
        dataclasses.replace(second, ops=()),
        dataclasses.replace(third, ops=("op1", *third.ops), memory_bytes=5000),
        *rest,
    )
    tie = Tie("weight", ("weight", "head.weight"), (3,), 200, "colocate")
    boundaries = (Boundary("op0", 0, (2,), 500), *plan.boundaries[2:])
    return dataclasses.replace(plan, stages=stages, boundaries=boundaries, ties=(tie,), step_s=2.0)


def test_a_plan_does_not_differ_from_itself():
    plan = make_plan()
    diff = plan.diff(plan)
    assert diff.is_empty
    assert diff.worse() == ()
    assert "equal" in str(diff)


def test_what_changed_is_named_both_ways():
    plan = make_plan(step_s=1.0)
    diff = plan.diff(moved_plan(plan))
    assert diff.moved == (("op1", (1,), (2,)),)
    assert diff.crossing == (("op0", (0, 1, 2), (0, 2)), ("op1", (1, 2), ()))
    assert diff.ties == (("weight", ("sync", 0, 3), ("colocate", 3)),)
    back = moved_plan(plan).diff(plan)
    assert {(n, b, a) for n, a, b in back.moved + back.crossing + back.ties} == {
        *diff.moved, *diff.crossing, *diff.ties,
    }  # fmt: skip


def test_worse_is_step_or_memory_beyond_the_threshold():
    plan = make_plan(step_s=1.0)
    other = dataclasses.replace(plan, step_s=1.1, schedule="gpipe")
    assert plan.diff(other).worse() == ("step",)
    assert plan.diff(other).worse(0.2) == ()
    assert other.diff(plan).worse() == ()
    assert plan.diff(moved_plan(plan)).worse(0.5) == ("step", "fullest rank")


def test_a_difference_is_shown_and_written():
    plan = make_plan(step_s=1.0)
    other = moved_plan(dataclasses.replace(plan, schedule="gpipe"))
    diff = plan.diff(other)
    shown = str(diff)
    for words in ("1f1b → gpipe", "+100.0%", "1 op moved", "2 values crossing", "1 parameter tied"):
        assert words in shown
    told = json.loads(json.dumps(diff.to_dict()))
    assert told["schedule"] == ["1f1b", "gpipe"]
    assert told["moved"] == [{"op": "op1", "before": [1], "after": [2]}]
    assert "another model" not in shown


def test_a_plan_of_another_model_is_told():
    plan = make_plan()
    diff = plan.diff(dataclasses.replace(plan, model="Other"))
    assert not diff.is_empty
    assert f"another model, Other for {plan.model}" in str(diff)
    assert diff.to_dict()["model"] == [plan.model, "Other"]


def test_what_was_asked_for_and_where_stages_run_is_told():
    plan = make_plan(settings={"memory_limit": [1, 2, 3, 4], "pin": {"head": 3}, "costs": "measured"})
    settings = {"memory_limit": 9, "pin": {"head": 3}, "costs": "estimated"}
    ranks = (1, 0, 2, 3)
    stages = tuple(dataclasses.replace(s, rank=r) for s, r in zip(plan.stages, ranks, strict=True))
    diff = plan.diff(dataclasses.replace(plan, settings=settings, stages=stages))
    assert diff.asked == (
        ("memory_limit", ("1", "2", "3", "4"), (9,)),
        ("ranks of stages", (0, 1, 2, 3), ranks),
    )
    assert not diff.is_empty
    assert "2 settings asked for differently" in str(diff)
    assert diff.to_dict()["asked"][1] == {
        "setting": "ranks of stages", "before": [0, 1, 2, 3], "after": [1, 0, 2, 3],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["bounds"].update(bottleneck_s=1.0, bottleneck_lower_s=2.0), "bounds"),
        (lambda d: d["bounds"].update(bottleneck_s=2.0, bottleneck_lower_s=1.0, proved=True), "bounds"),
        (lambda d: d["boundaries"][0].update(destinations=[1, 1]), "boundaries[0].destinations"),
        (lambda d: d["ties"][0].update(seconds=-1.0), "ties[0].seconds"),
        (lambda d: d["settings"].update(ties="synk"), "ties"),
        (lambda d: d["settings"].update(recompute="sometimes"), "recompute"),
        (lambda d: d["settings"].update(recompute="always"), "settings.recompute"),
        (
            lambda d: (d["settings"].update(recompute="never"), d["stages"][1].update(recompute=True)),
            "stage 1",
        ),
        (lambda d: d["settings"].update(ties="colocate"), "settings.ties"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_by_its_place(change, named):
    data = json.loads(make_plan().to_json())
    change(data)
    with pytest.raises(StoreError) as told:
        Plan.from_json(json.dumps(data))
    assert named in str(told.value)


def test_a_plan_is_read_and_written_where_a_path_says(tmp_path, monkeypatch):
    plan = make_plan()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[v2]").mkdir()
    for path in ("~/plan.json", "[v2]/plan.json"):
        plan.to_json(path)
        assert Plan.from_json(path) == plan
    assert sorted(p.name for p in tmp_path.iterdir()) == ["[v2]", "plan.json"]
    plan.to_html("~/page.html")
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("source", [{}, b"{}", None, "", 3])
def test_what_is_neither_text_nor_a_path_is_no_plan(source):
    with pytest.raises(InputError, match="must be the path of a file"):
        Plan.from_json(source)
