"""What a plan and a report say of a loss that takes the whole batch: what runs, and what it keeps."""

import pytest
from torch.nn import functional as F
from whole_losses import EXACT, WIDTH, compare, info_nce, numbers, split, trained_on

import autopipe


def test_a_report_is_of_the_schedule_that_ran():
    pipe, _ = split()
    x, target = numbers(10, 5), numbers(10, WIDTH)
    runtime = pipe.runtime(lambda output, target: info_nce(output, target))
    runtime.step(x, target=target)
    report = runtime.report()
    assert not report.is_as_planned
    assert report.predicted.schedule.in_flight == (4, 4)
    wanted = autopipe.simulate(pipe.plan, schedule="gpipe")
    assert report.predicted.step_s == pytest.approx(wanted.step_s)
    assert report.predicted_peak_bytes == wanted.peak_bytes > autopipe.simulate(pipe.plan).peak_bytes
    assert "predicted is what ran: 4 microbatches, every forward ahead of the first backward" in str(report)
    plain = pipe.runtime(lambda output, target: F.mse_loss(output, target), loss_on="microbatches")
    plain.step(x, target=target)
    assert plain.report().is_as_planned
    assert "predicted is" not in str(plain.report())


def test_a_last_step_of_fewer_microbatches_is_held_against_its_like():
    pipe, _ = split()
    x, target = numbers(10, 5), numbers(10, WIDTH)
    runtime = pipe.runtime(F.mse_loss, loss_on="microbatches")
    for _ in range(3):
        runtime.step(x, target=target)
    runtime.step(x[:1], target=target[:1])
    report = runtime.report()
    records = [length_s for _, length_s, _ in runtime.engine.records]
    assert report.measured_step_s == records[-1]
    one = sum(times.forward_s + times.backward_s for times in pipe.plan.stages)
    assert report.predicted_step_s == pytest.approx(one)
    assert "predicted is what ran: 1 microbatch; the plan is for 1f1b with 4" in str(report)


def test_a_plan_may_be_for_such_a_loss():
    pipe, twin = split(loss_on="batch")
    usual, _ = split(schedule="gpipe")
    assert pipe.plan.schedule == "gpipe"
    kept = [s.saved_bytes for s in pipe.plan.stages]
    outputs = 2 * 10 / 4 * WIDTH * 8  # of a microbatch, with their gradients
    assert kept[-1] >= usual.plan.stages[-1].saved_bytes + outputs - 1
    x, target = numbers(10, 5), numbers(10, WIDTH)
    runtime = pipe.runtime(info_nce)
    found = runtime.step(x, target=target).loss.item()
    assert trained_on(twin, info_nce, [(x, target)]) == pytest.approx([found], rel=EXACT)
    compare(pipe.model, twin)
    assert runtime.report().is_as_planned
    with pytest.raises(autopipe.errors.InputError, match=r"loss_on.*'gpipe' or 'looped-bfs'"):
        split(loss_on="batch", schedule="zb-h1")
