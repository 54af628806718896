"""Code of a model that sets the generator which all draws come from, where stages draw numbers of their own.

Which calls draw is told by ``draws``, generators of the model's own by ``recorder``.
"""

from __future__ import annotations

from typing import Any

import torch

from .queries import Maker
from .route import Route

__all__ = ["SEEDING"]


def _seeding(name: str) -> Maker:
    """The generator is set that every draw comes from: where the draws that follow are is not known."""

    def make(route: Route, original: Any) -> Any:
        def seed(*args: Any, **kwargs: Any) -> Any:
            recorder = route.active
            if recorder is not None and recorder.at.is_own_code():
                recorder.at.keep_whole(
                    f"{recorder.at.source()}: {name} in a forward sets the generator that stages draw from "
                    "too; set it within `with torch.random.fork_rng():`, with what is drawn"
                )
            return original(*args, **kwargs)

        return seed

    return make


def _forked(route: Route, original: Any) -> Any:
    """Draws that leave the generator as it was stay together, with whatever seeds them."""

    def fork_rng(*args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            why = f"{recorder.at.source()}: what is drawn within torch.random.fork_rng has to stay together"
            recorder.at.keep_whole(why, recorder.at.running())
        return original(*args, **kwargs)

    return fork_rng


_NAMES = ("manual_seed", "seed", "set_rng_state")
SEEDING: tuple[tuple[Any, str, Maker], ...] = (
    *((home, name, _seeding(f"torch.{name}")) for home in (torch, torch.random) for name in _NAMES),
    (torch.random, "fork_rng", _forked),
)
"""(owner, name, what makes of a route and the original what stands there) of each function."""
