"""A plan over a mesh: who is where, what crosses between hosts, and what was planned otherwise."""

import dataclasses
import json

import look_examples
import pytest

from autopipe import InputError
from autopipe.hardware import Cluster
from autopipe.look import Mesh, report, tables


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
        ("dp=2,dp=2", "two dims 'dp'"),
        ("pp=4,tp=60000", "size"),
    ],
)
def test_dims_that_do_not_fit(dims, word):
    with pytest.raises(InputError, match=word):
        Mesh.parse(plan(), dims)
