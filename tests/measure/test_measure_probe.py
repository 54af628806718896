"""Links probed between processes, and cluster files."""

from __future__ import annotations

import math

import pytest

from autopipe.errors import CostError, InputError
from autopipe.hardware import Cluster
from autopipe.measure import probe
from autopipe.measure import probe as probe_function


@pytest.mark.timeout(120)
def test_two_ranks_of_this_machine() -> None:
    cluster = probe(2)
    assert cluster.n_ranks == 2
    assert cluster.host(0) == cluster.host(1)
    link = cluster.link(0, 1)
    assert link == cluster.link(1, 0) == cluster.links[0, 1]
    assert 0 < link.latency_s < 1
    assert 0 < link.bandwidth_bytes_s < math.inf
    assert "probed" in link.source
    assert 0 <= link.host_s < 1
    assert 0 <= link.host_s_per_byte < 1e-6
    assert 0 < link.direct_s <= link.latency_s
    assert 0 <= link.direct_host_s <= link.host_s
    assert len(cluster.cores) == 1
    assert cluster.cores[0] >= 1
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_failing_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(CostError, match="probing rank 0 of 1 failed"):
        probe_function(1)


@pytest.mark.parametrize("n_ranks", [0, -1, 10**11, 2.5, True, "two"])
def test_ranks_to_probe_are_a_few(n_ranks) -> None:
    with pytest.raises(InputError, match="n_ranks"):
        probe(n_ranks)
