"""Every trap comes out right or is refused in one clear sentence; never silently other, never a raw error."""

from __future__ import annotations

import pytest

from traps.registry import TRAPS
from traps.verdict import verdict

PENDING: frozenset[str] = frozenset()
"""What is known not to come out as wanted; an entry that does fails until it is taken out."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.xfail(reason="known", strict=True)) if n in PENDING else n
        for n in TRAPS
    ],
)
def test_trap(name: str) -> None:
    outcome, said = verdict(TRAPS[name])
    wanted = TRAPS[name].outcome
    assert outcome == wanted or (wanted == "safe" and outcome in ("right", "refused")), said
