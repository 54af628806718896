"""Every data type shows itself as text, in a notebook, as a page and as a frame."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import look_examples
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.hardware import Device
from autopipe.look import cut_reasons, gantt, memory, plan_memory, plan_tables, tables
from autopipe.look.graph_lanes import lanes
from autopipe.plans import Bounds, Candidate
from autopipe.schedule import build
from autopipe.simulator import Report, StageReport, simulate

GRAPH = look_examples.graph()
COSTS = look_examples.costs(GRAPH)
PLAN = look_examples.plan(GRAPH, COSTS)
TIMELINE = simulate(PLAN)
RAN = Report(
    (StageReport(0, 0, {"F": 1e-3}, {"F": 1.1e-3}),),
    PLAN.step_s,
    1.1 * PLAN.step_s,
    3,
    tuple(tuple(e) for e in TIMELINE.events if not isinstance(e.action, str)),
    PLAN,
)
SHOWN = {
    "graph": GRAPH,
    "costs": COSTS,
    "plan": PLAN,
    "schedule": build("1f1b", 4, 4, 6),
    "timeline": TIMELINE,
    "run": RAN,
    "diff": PLAN.diff(look_examples.plan(GRAPH, COSTS, 3)),
}


@pytest.mark.parametrize("name", SHOWN)
def test_every_type_shows_itself(name):
    item = SHOWN[name]
    assert len(str(item).splitlines()) > 1
    assert item._repr_html_().startswith("<style>")
    page = item.to_html()
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http://www.w3.org", "")
    assert len(item.to_frame())
    printed = []
    item._repr_pretty_(SimpleNamespace(text=printed.append), False)
    assert printed == [str(item)]


def test_alternatives_are_compared_by_their_steps():
    n, step_s = PLAN.n_microbatches, PLAN.step_s
    other = Candidate("slower", "gpipe", 4, n, 1.1 * step_s, 0)
    table = plan_tables.candidate_table(dataclasses.replace(PLAN, candidates=(*PLAN.candidates, other)))
    at = [column.key for column in table.columns].index("relative")
    assert table.rows[-1][at] == pytest.approx(1.1)
    assert not plan_tables.candidate_table(PLAN).note


def test_a_plan_as_text_has_each_stage_and_tie():
    text = str(PLAN)
    assert "4 stages on 4 ranks" in text
    assert f"step within {PLAN.step_gap:.1%} of the least, bottleneck within 3.1% of the least" in text
    assert "embed.weight, head.weight" in text.replace("model.", "")
    assert sum(line.strip().startswith(("0 ", "1 ", "2 ", "3 ")) for line in text.splitlines()) >= 4


@pytest.mark.parametrize("least_s", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("lower_s", "is_proved"), [(0.0, False), (0.8, False), (1.0, True)])
def test_what_a_plan_is_known_to_be_names_the_step_and_its_gap_first(least_s, lower_s, is_proved):
    bounds = Bounds(1.0, lower_s, least_s * PLAN.step_s, is_proved)
    step, bottleneck = plan_tables.certificate(dataclasses.replace(PLAN, bounds=bounds)).split(", ")
    within = f"within {1 / least_s - 1:.1%} of the least" if least_s else "without a bound"
    assert step == f"step {within}"
    assert bottleneck.startswith("bottleneck ")
    assert ("proved" in bottleneck, "25.0%" in bottleneck) == (is_proved, lower_s == 0.8)


def test_to_frame_sums_to_what_the_plan_says():
    frame = PLAN.to_frame()
    assert frame["forward_s"].sum() == pytest.approx(sum(s.forward_s for s in PLAN.stages))
    assert list(frame["stage"]) == [0, 1, 2, 3]


def test_gantt_draws_every_action_that_is_wide_enough_to_see():
    timeline = SHOWN["timeline"]
    root = ET.fromstring(gantt(timeline))
    rects = root.findall("rect")
    assert len(rects) >= sum(len(row) for row in timeline.schedule.actions)
    right = max(float(r.get("x")) + float(r.get("width")) for r in rects)
    assert right <= 900
    both = ET.fromstring(gantt(timeline, timeline))
    assert len(both.findall("rect")) == 2 * len(rects)


def test_memory_draws_a_curve_and_a_limit_per_rank():
    root = ET.fromstring(plan_memory(PLAN))
    assert len(root.findall("path")) == 4
    assert len(root.findall("line")) == 4
    assert len(ET.fromstring(memory(SHOWN["timeline"])).findall("line")) == 0


@given(st.integers(0, 30))
def test_no_lane_holds_two_values_at_once(n_blocks):
    graph = look_examples.graph(n_blocks)
    lane = lanes(graph)
    until: dict[int, int] = {}
    for row, op in enumerate(graph.ops):
        assert until.get(lane[row], -1) <= row
        until[lane[row]] = max([row, *(graph.position[c] for c in graph.consumers[op.name])])


def test_reasons_name_each_cut_and_judge_a_move_by_the_slowest_stage():
    plain, judged = cut_reasons(PLAN), cut_reasons(PLAN, COSTS)
    assert len(plain) == len(judged) == 3
    slowest = max(PLAN.stages, key=lambda s: s.seconds)
    assert slowest.index == 0
    left, right = PLAN.stages[:2]
    moved = COSTS[left.ops[-1]].seconds
    others = max(s.seconds for s in PLAN.stages[2:])
    after = max(left.seconds - moved, right.seconds + moved, others)
    assert f"slowest stage {after * 1e3:.1f} ms" in judged[0].splitlines()[1]
    assert f"{1 - after / slowest.seconds:.1%} faster" in judged[0].splitlines()[1]


def test_a_move_takes_as_long_as_its_new_rank_does():
    fast, slow = Device(speed=2.0), Device(speed=0.5)
    plan = dataclasses.replace(
        PLAN, cluster=dataclasses.replace(PLAN.cluster, devices=(fast, slow, fast, fast))
    )
    left, right = plan.stages[:2]
    moved_s = COSTS[left.ops[-1]].seconds
    others_s = max(s.seconds for s in plan.stages[2:])
    after_s = max(left.seconds - moved_s / 2, right.seconds + moved_s * 2, others_s)
    _, line, *_ = cut_reasons(plan, COSTS)[0].splitlines()
    assert (
        f"{left.ops[-1]} ({moved_s / 2 * 1e3:.1f} ms) to stage 1: slowest stage {after_s * 1e3:.1f} ms"
        in line
    )


def test_an_extra_column_goes_first_where_room_is_short():
    table = tables(PLAN)[0]
    narrow = table.fit(80)
    assert {c.key for c in table.columns} > {c.key for c in narrow.columns} >= {"stage", "memory_bytes"}
    assert table.fit(10_000).columns == table.columns
    assert all(len(row) == len(narrow.columns) for row in narrow.rows)


def test_data_loads_no_view_until_looked_at():
    code = (
        "import sys, autopipe.plans, autopipe.graph, autopipe.costs; "
        "print([m for m in sys.modules if m.startswith('autopipe.look')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
