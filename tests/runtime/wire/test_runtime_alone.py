"""What one rank or one replica finds alone, all of them hear: losses, overflows, calls, failed loads."""

import pathlib
from types import SimpleNamespace

import alone_ranks
import pytest
import torch
from processes import run_ranks

from autopipe.runtime.data.microbatch import AT_A_GLANCE, Batch
from autopipe.runtime.reduce.data_parallel import replicas_of


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "check", ["losses", "partly", "causes", "scaled", "calls", "rows", "meshes", "shared_states"]
)
def test_of_replicas(check, tmp_path):
    run_ranks(pathlib.Path(alone_ranks.__file__), 4, check, str(tmp_path), timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["lets_go", "rates", "crossed", "ends"])
def test_of_ranks(check, tmp_path):
    run_ranks(pathlib.Path(alone_ranks.__file__), 2, check, str(tmp_path), timeout_s=100)


def checksums(value, n_steps):
    batch = Batch((len(value),), {}, (), {}, {}, given={"x": value})
    return [batch.checksum(AT_A_GLANCE, step) for step in range(n_steps)]


def test_one_value_tells_batches_apart():
    """At once in a batch of usual size, such as ids or a mask; in a large one within some steps."""
    for shape, most in (((8, 2048), 1), ((64, 2048), 4096)):
        mask = torch.ones(shape, dtype=torch.int64)
        other = mask.clone()
        other[3, 77] = 0
        for change in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2].contiguous()):
            is_same = torch.equal(change(mask), change(other))
            assert (checksums(change(mask), most) == checksums(change(other), most)) == is_same


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[2, 0], [3, 1]]])
def test_replicas_are_the_other_pipelines_in_whatever_order_a_mesh_has_ranks(ranks):
    own, other = (tuple(sorted(row)) for row in ranks)
    names = ("dp", "pp")
    mesh = SimpleNamespace(mesh=torch.tensor(ranks), ndim=2, mesh_dim_names=names, get_group=names.index)
    assert replicas_of(mesh, own) == ([other], [0])
