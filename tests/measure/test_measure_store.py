"""The store and the ledger: nothing lost, nothing half-used, corrections that correct."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.costs import CostTable, OpCost
from autopipe.errors import CostError, StoreError
from autopipe.hardware import Cluster, Device
from autopipe.measure import Store, entries, recalibrate, record
from autopipe.plans import Bounds, Plan, StagePlan

KEY = {"signature": "a", "torch": "2.13"}
TABLE = CostTable(
    {"a": OpCost(1.0, 2.0, 1.0, 1.0), "b": OpCost(3.0, 4.0, 2.0, 2.0), "c": OpCost(1.0, 1.0, 1.0)},
    dims={"batch": 2},
    device="cpu",
)


def plan(recompute: bool = False, recomputed: tuple[tuple[str, ...], ...] = ()) -> Plan:
    first = StagePlan(0, 0, ("a", "b"), recompute=recompute, recomputed=recomputed)
    stages = (first, StagePlan(1, 1, ("c",)))
    bounds = Bounds(1.0, 1.0, 1.0, proved=True)
    return Plan("M", "digest", stages, (), (), "1f1b", 2, 1.0, bounds, Cluster.uniform(2))


def report(*measured: dict[str, float]) -> dict[str, object]:
    rows = [
        {"index": i, "predicted": dict.fromkeys("FBIW", 1.0), "measured": m} for i, m in enumerate(measured)
    ]
    return {"stages": rows}


def test_what_is_put_is_got(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    store.put("op", KEY, {"F": [0.5]})
    store.put("op", KEY, {"F": [0.5, 0.25]})
    assert Store(tmp_path).get("op", dict(reversed(KEY.items()))) == {"F": [0.5, 0.25]}
    assert store.get("op", {**KEY, "torch": "2.14"}) is None
    assert store.get("ledger", KEY) is None
    assert list(store.entries("op")) == [(KEY, {"F": [0.5, 0.25]})]
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".json"]


@given(st.data())
def test_no_damage_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    store.put("op", KEY, {"F": [0.5]})
    path = store.path("op", KEY)
    text = path.read_text()
    at = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from(["cut", "7", "x", ""]))
    damaged = text[:at] if change == "cut" else text[:at] + change + text[at + 1 :]
    path.write_text(damaged)
    if _reads_like(damaged, text):
        assert store.get("op", KEY) == {"F": [0.5]}
    else:
        with pytest.raises(StoreError, match=path.name):
            store.get("op", KEY)


def _reads_like(damaged: str, text: str) -> bool:
    """White space is no damage."""
    try:
        return bool(json.loads(damaged) == json.loads(text))
    except ValueError:
        return False


def test_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    store.put("op", KEY, 1)
    path = store.path("op", KEY)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(StoreError, match="version 99"):
        store.get("op", KEY)


def test_a_file_under_a_wrong_name_is_refused(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    store.put("op", KEY, 1)
    other = store.path("op", {"signature": "b"})
    other.parent.mkdir(parents=True, exist_ok=True)
    store.path("op", KEY).rename(other)
    with pytest.raises(StoreError, match="something else"):
        store.get("op", {"signature": "b"})


def test_recalibrated_stages_come_out_as_measured(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    made = record(store, plan(), TABLE, report({"F": 8.0, "B": 3.0}, {"F": 2.0, "I": 3.0, "W": 1.0}))
    assert made == entries(store, "digest", TABLE)
    assert made[0].error("F") == 7.0
    table = recalibrate(TABLE, made)
    first, second = table.total(("a", "b")), table.total(("c",))
    assert (first.forward_s, first.backward_s) == pytest.approx((8.0, 3.0))
    assert (second.forward_s, second.backward_s) == pytest.approx((2.0, 4.0))
    assert table["a"].forward_s / table["b"].forward_s == pytest.approx(1 / 3)
    again = recalibrate(table, made)
    assert again.total(("a", "b", "c")).seconds == pytest.approx(table.total(("a", "b", "c")).seconds)
    assert len(again.notes) == 1


def test_what_a_devices_speed_explains_is_no_error_of_the_costs(tmp_path: pathlib.Path) -> None:
    cluster = Cluster((Device(speed=0.5), Device()))
    made = record(
        Store(tmp_path),
        dataclasses.replace(plan(), cluster=cluster),
        TABLE,
        report({"F": 8.0, "B": 12.0}, {"F": 1.0, "B": 1.0}),
    )
    assert recalibrate(TABLE, made).costs == TABLE.costs


def test_recomputed_forward_is_not_counted_as_backward(tmp_path: pathlib.Path) -> None:
    made = record(Store(tmp_path), plan(recompute=True), TABLE, report({"F": 4.0, "B": 10.0}, {}))
    assert len(made) == 1
    table = recalibrate(TABLE, made)
    assert table.total(("a", "b")).backward_s == pytest.approx(6.0)
    assert table["c"].forward_s == TABLE["c"].forward_s


def test_forward_of_recomputed_blocks_is_not_counted_as_backward(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    made = record(store, plan(recomputed=(("b",),)), TABLE, report({"F": 4.0, "B": 10.0}, {}))
    assert entries(store, "digest", TABLE) == made
    table = recalibrate(TABLE, made)
    assert table["b"].forward_s == pytest.approx(3.0)
    assert table.total(("a", "b")).backward_s == pytest.approx(7.0)


def test_runs_add_up_and_their_median_counts(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    for seconds in (4.0, 8.0, 100.0):
        record(store, plan(), TABLE, report({"F": seconds, "B": 6.0}, {}))
    table = recalibrate(TABLE, entries(store, "digest", TABLE))
    assert table.total(("a", "b")).forward_s == pytest.approx(8.0)
    assert entries(store, "another model", TABLE) == ()


def test_an_empty_ledger_says_what_to_do() -> None:
    with pytest.raises(CostError, match=r"record rt\.report"):
        recalibrate(TABLE, ())
