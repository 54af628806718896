"""torch's CSV format: what we write torch reads, what torch writes we read, and our orders are theirs."""

import csv
import io
import itertools
import pathlib

import pytest
from hypothesis import given, settings
from strategies import schedules
from torch.distributed.pipelining import schedules as theirs

from autopipe.errors import ScheduleError, StoreError
from autopipe.schedule import NAMES, SPLIT, Action, build, check, from_csv, to_csv


@settings(max_examples=100)
@given(schedules())
def test_round_trip(schedule):
    back = from_csv(to_csv(schedule), name=schedule.name)
    assert back == schedule


def test_from_a_file(tmp_path: pathlib.Path):
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(build("zbv", 2, 4, 5)))
    assert from_csv(path).actions == build("zbv", 2, 4, 5).actions
    with pytest.raises(StoreError, match=r"cannot read a schedule from .*absent\.csv"):
        from_csv(tmp_path / "absent.csv")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_torch_parses_what_we_write(name):
    schedule = build(name, 2, 4, 5)
    for row, ours in zip(csv.reader(io.StringIO(to_csv(schedule))), schedule.actions, strict=True):
        parsed = [a for cell in map(theirs._Action.from_str, row) for a in cell.sub_actions or (cell,)]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in parsed] == [
            (a.stage, a.kind, a.microbatch) for a in ours
        ]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("n_microbatches", [2, 5, 8])
def test_torch_accepts_our_schedules_and_adds_its_sends(name, n_microbatches):
    """Its validator passes, and its lowering finds an order of sends and receives that gets to the end."""
    schedule = build(name, 3, 6, n_microbatches, placement=(0, 1, 2, 2, 1, 0) if name in SPLIT else None)
    rows = {
        rank: [theirs._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(to_csv(schedule))))
    }
    theirs._validate_schedule(rows, 3, 6, n_microbatches)
    lowered = theirs._add_send_recv(rows, stage_to_rank=lambda s: schedule.placement[s], num_stages=6)
    sends = [a for row in lowered.values() for a in row if "SEND" in str(a)]
    crossing = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    assert len(sends) == 2 * crossing * n_microbatches


def torch_text(cls, n_ranks, n_stages, n_microbatches, **attributes):
    """The CSV of a schedule of torch's, made without the process group its constructor wants."""
    schedule = object.__new__(cls)
    schedule.pp_group_size, schedule.num_stages, schedule._num_stages = n_ranks, n_stages, n_stages
    schedule.n_local_stages, schedule._n_microbatches = n_stages // n_ranks, n_microbatches
    schedule._stages = [None] * schedule.n_local_stages
    for key, value in attributes.items():
        setattr(schedule, key, value)
    out = io.StringIO()
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(n_ranks)]
    csv.writer(out).writerows([["" if a is None else str(a) for a in row] for row in rows])
    return out.getvalue()


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("times", [2, 4, 5])
def test_we_read_what_torch_writes_and_order_alike(n_ranks, times):
    n_stages, n_microbatches = 2 * n_ranks, n_ranks * times
    rounds = {"number_of_rounds": times, "microbatches_per_round": n_ranks}
    for cls, name, more in (
        (theirs.ScheduleInterleaved1F1B, "interleaved", rounds),
        (theirs.ScheduleZBVZeroBubble, "zbv", {}),
        (theirs.ScheduleDualPipeV, "dualpipev", {}),
    ):
        text = torch_text(cls, n_ranks, n_stages, n_microbatches, **more)
        ours, read = build(name, n_ranks, n_stages, n_microbatches), from_csv(text)
        assert read.actions == ours.actions, name
        assert read.overlapped == ours.overlapped, name
        assert bool(ours.overlapped) == (name == "dualpipev")


def test_looped_bfs_of_torch_is_read():
    text = torch_text(theirs.ScheduleLoopedBFS, 2, 4, 3)
    schedule = from_csv(text)
    assert schedule.placement == (0, 1, 0, 1)
    check(schedule)


def test_communication_and_overlap_are_read_as_the_actions_they_hold():
    text = "0UNSHARD,0F0,0SEND_F0,,0F1,0SEND_F1,0RECV_B0,0B0,0B1,0REDUCE_GRAD\n"
    text += "0RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1I1,1W1,1SEND_B0,1RESHARD\n"
    schedule = from_csv(text)
    assert schedule.actions[0] == tuple(Action(0, k, m) for k, m in (("F", 0), ("F", 1), ("B", 0), ("B", 1)))
    assert "".join(map(str, schedule.actions[1])) == "1F01F11B01I11W1"
    assert schedule.overlapped == {Action(1, "B", 0)}
    assert "1F0,(1F1;1B0)OVERLAP_F_B,1I1" in to_csv(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions"),
        (",,\n", "no actions"),
        ("0F0,0X0\n", "row 1, cell 2: cannot read '0X0'"),
        ("0F0\n2F0\n", "no rank of the schedule runs stage 1"),
        ("0F0,0B0\n1B0,1F0\n", "1B0 runs before its F"),
        ("0F0\n0F0\n", "0F0 belongs on rank 0"),
        ("(0F0;0B0)OVERLAP_F_B\n", "0B0 cannot overlap what is before it"),
    ],
)
def test_bad_files_say_where(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)
