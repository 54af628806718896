"""When actions start and end where ranks share the network interface of their host."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import boundaries, clusters, schedules, stage_times

from autopipe.hardware import Cluster, Link
from autopipe.schedule import StageTimes, Transfer, build
from autopipe.schedule.clock import Edges, _run_shared, run
from autopipe.simulator import simulate_schedule


@st.composite
def runs(draw):
    schedule = draw(schedules())
    edges = Edges.of(schedule, draw(boundaries(schedule.n_stages)))
    return schedule, draw(stage_times(schedule.n_stages)), edges, draw(clusters(schedule.n_ranks))


@settings(max_examples=60)
@given(runs())
def test_following_time_is_following_dependencies_where_nothing_is_shared(given_run):
    """Two ways through the actions, one clock; each message may leave when its link is free."""
    one, other = run(*given_run), _run_shared(*given_run, None)
    assert (one.starts_s, one.ends_s) == (other.starts_s, other.ends_s)
    assert sorted(one.sent) == sorted(other.sent)


@settings(max_examples=60)
@given(runs(), st.data())
def test_messages_of_a_shared_interface_go_one_after_another(given_run, data):
    schedule, times, edges, cluster = given_run
    n = schedule.n_ranks
    nics = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    shared = dataclasses.replace(cluster, nics=tuple(nics))
    clock = run(schedule, times, edges, shared)
    assert max(map(max, clock.ends_s)) >= max(map(max, run(schedule, times, edges, cluster).ends_s)) - 1e-9
    held: dict[int, list[tuple[float, float]]] = {}
    for a, b, _, _, start, end, n_bytes in clock.sent:
        here, there = schedule.placement[a], schedule.placement[b]
        link = shared.link(here, there)
        for wire in shared.wires(here, there) if n_bytes else ():
            held.setdefault(wire, []).append((start, end - link.latency_s))
    for spans in held.values():
        spans.sort()
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("overlap", [True, False])
def test_two_ranks_that_send_to_another_host_at_once_take_turns(overlap):
    """Stages 0 and 1 on one host, 2 and 3 on the other; 100 bytes at 100 a second from 0 to 2 and 1 to 3."""
    schedule = build("forward-only", 4, 4, 1)
    transfers = (Transfer(0, 2, 100, False), Transfer(1, 3, 100, False))
    times = (StageTimes(1.0, 0.0),) * 4
    apart = Cluster.of_hosts(2, 2, remote=Link(0.0, 100.0))
    shared = Cluster.of_hosts(2, 2, remote=Link(0.0, 100.0), nics_per_host=1)
    each, both = (
        simulate_schedule(schedule, times, transfers, cluster, overlap=overlap) for cluster in (apart, shared)
    )
    spans = [sorted((m.start_s, m.end_s) for m in t.transfers) for t in (each, both)]
    assert spans[0] == [(1.0, 2.0), (1.0, 2.0)]
    assert spans[1] == [(1.0, 2.0), (2.0, 3.0)]
    assert both.step_s == each.step_s + 1.0
