"""A plan over a mesh: who is where, what crosses between hosts, and what was planned otherwise."""

import dataclasses
import json

import look_examples
import pytest
from plans import make_plan

from autopipe import InputError
from autopipe.hardware import Cluster, Link
from autopipe.look import Mesh, report, tables
from autopipe.look.table import nbytes
from autopipe.plans import rank_bytes
from autopipe.simulator import simulate


def plan(cluster=None):
    graph = look_examples.graph(12)
    made = look_examples.plan(graph, look_examples.costs(graph), 4, 8)
    return made if cluster is None else dataclasses.replace(made, cluster=cluster)


def test_replicas_are_numbered_as_a_device_mesh_numbers_them():
    mesh = Mesh.parse(plan(), "dp=2,pp=4", per_host=4)
    assert [p.rank for p in mesh.replica(1)] == [4, 5, 6, 7]
    assert [p.host for p in mesh.processes] == [0] * 4 + [1] * 4
    turned = Mesh.parse(plan(), "pp=4, dp=2", per_host=4)
    assert [p.rank for p in turned.replica(1)] == [1, 3, 5, 7]
    assert [p.host for p in turned.replica(1)] == [0, 0, 1, 1]
    assert Mesh(plan(), {"dp": 3}).dims == {"dp": 3, "pp": 4}


def test_what_crosses_and_how():
    made = plan()
    mesh = Mesh.parse(made, "pp=4,dp=2", per_host=4)
    sent = sum(mesh.step_bytes.values())
    expected = sum(b.n_bytes * len(b.destinations) * (1 + b.differentiable) for b in made.boundaries)
    assert sent == expected * made.n_microbatches
    text = str(mesh)
    assert "between hosts" in text
    assert "not as planned" in text
    assert "not as planned" not in str(Mesh.parse(made, "dp=2,pp=4", per_host=4))
    _, _, sums = tables(mesh)
    assert [row[1] for row in sums.rows] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_hosts_of_the_cluster():
    mesh = Mesh(plan(Cluster.of_hosts(2, 2)), {})
    assert [p.host for p in mesh.processes] == [0, 0, 1, 1]
    assert mesh.n_replicas == 1


def test_in_the_report_and_in_a_cell():
    mesh = Mesh.parse(plan(), "dp=2,pp=4", per_host=2)
    page = report(plan(), mesh=mesh)
    assert 'id="mesh"' in page
    assert page.count("rank 7, host 3") == 1
    assert "replica 1" in mesh._repr_html_()
    assert len(json.loads(json.dumps(mesh.to_dict()))["processes"]) == 8


@pytest.mark.parametrize(
    ("dims", "word"),
    [
        ("dp=2,pp=3", "pp=4"),
        ("dp", "no dim"),
        ("dp=0", "mesh dim dp"),
        ("dp=" + "9" * 5000, "no dim"),
        ("dp=²", "no dim"),
        ("dp=2,dp=2", "two dims 'dp'"),
        ("pp=4,tp=60000", "size"),
    ],
)
def test_dims_that_do_not_fit(dims, word):
    with pytest.raises(InputError, match=word):
        Mesh.parse(plan(), dims)


def folded(**changes):
    """Four stages folded over two ranks, so that values stay on a rank or go there once for two stages."""
    made = make_plan(schedule="zbv")
    stages = (
        dataclasses.replace(s, rank=rank, in_flight=2, memory_bytes=4 * 400 + 2 * 1000 + 50, **changes)
        for s, rank in zip(made.stages, (0, 1, 1, 0), strict=True)
    )
    cluster = Cluster.uniform(2, link=Link(0.01, 1e5))
    return dataclasses.replace(made, stages=tuple(stages), cluster=cluster)


def test_what_stays_on_a_rank_is_not_sent_and_a_value_goes_to_a_rank_once():
    made = folded()
    mesh = Mesh(made, {})
    # forward op0 to rank 1 and op2 back to rank 0, and a gradient of each: of op0 and op1 the rest stays
    assert mesh.step_bytes == {(0, 1): 1000 * 8, (1, 0): 1000 * 8}
    sent = sum(t.n_bytes for t in simulate(made).transfers)
    assert sum(mesh.step_bytes.values()) == sent
    figures = {what: value for what, value, _, _ in made.diff(made).figures}
    assert figures["sent forward per microbatch"] == 1000
    assert f"<dd>{nbytes(sent)}<small>" in report(made)
    _, messages = tables(mesh)
    assert [row[-1] for row in messages.rows] == pytest.approx([2 * 8 * (0.01 + 500 / 1e5)] * 2)


def test_a_ranks_memory_is_its_peak_and_what_replicas_sum_are_its_gradients():
    made = folded(gradient_bytes=300)
    processes, _, sums = tables(Mesh(made, {"dp": 2}))
    peaks = [rank_bytes(made, rank) for rank in range(2)]
    assert max(peaks) < 2 * made.stages[0].memory_bytes
    # the tied parameter of 200 bytes is in both stages of rank 0
    assert [row[-2:] for row in processes.rows] == [(600, peaks[0]), (800, peaks[1])] * 2
    assert [row[2] for row in sums.rows] == [400, 600]
    assert [t.title for t in tables(Mesh(folded(gradient_bytes=0), {"dp": 2}))] == [
        "Processes",
        "Messages within a pipeline",
    ]
