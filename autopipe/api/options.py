"""What a plan is asked for, by concern; the one place where these options have their types and defaults.

Users read what they mean in ``verbs``; what values they may have is left to ``checks``. An option of none of
the concerns here is the solver's alone: it is passed on, and ``solve`` has its default.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..costs import CostTable
from ..graph import Op
from ..hardware import Cluster
from .cluster import DeviceLike
from .training import Training

__all__ = ["CONCERNS", "Options"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How the model is recorded; the options of :func:`autopipe.capture`."""

    dynamic: Any = "auto"
    open: Sequence[str] = ()
    closed: Sequence[str] = ()

    @property
    def written(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the stages are to run."""

    n_ranks: int | None = None
    min_ranks: int = 1
    cluster: Cluster | str | pathlib.Path | None = None
    device: DeviceLike = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Where the ops' costs come from, and the folder that keeps them."""

    costs: str | CostTable | pathlib.Path = "measured"
    store: str | pathlib.Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What the cut is: into how much, run how, by what measure, found in what time."""

    n_stages: int | str | None = None
    n_microbatches: int | str | None = None
    schedule: str = "1f1b"
    balance: str | Callable[[Op], float] = "cost"
    time_limit_s: float | None = None

    @property
    def wanted(self) -> int | None:
        """How many stages, None where any number will do."""
        return self.n_stages if isinstance(self.n_stages, int) else None


CONCERNS = Recording, Place, Pricing, Training, Cut


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """All options of a plan. ``solver`` are those that nothing but the solver looks at."""

    recording: Recording
    place: Place
    pricing: Pricing
    training: Training
    cut: Cut
    solver: Mapping[str, Any]

    @classmethod
    def of(cls, **given: Any) -> Options:
        """The options that a caller gave by name, sorted; the others have their defaults."""
        left = dict(given)

        def taken(concern: type[T]) -> T:
            names = [name for name in inspect.signature(concern).parameters if name in left]
            return concern(**{name: left.pop(name) for name in names})

        return cls(taken(Recording), taken(Place), taken(Pricing), taken(Training), taken(Cut), left)

    @property
    def asked(self) -> dict[str, str]:
        """By name, in words, what ranks that make one plan are to be given alike.

        Where costs come from, on what device and within what time is the affair of the rank that decides.
        """
        cut, place = self.cut, self.place
        found = {
            "n_stages": cut.n_stages,
            "n_microbatches": cut.n_microbatches,
            "schedule": cut.schedule,
            "balance": cut.balance,
            "n_ranks": place.n_ranks,
            "min_ranks": place.min_ranks,
            **{f.name: getattr(self.training, f.name) for f in dataclasses.fields(self.training)},
            **self.solver,
        }
        return {name: _in_words(value) for name, value in sorted(found.items())}


def _in_words(value: Any) -> str:
    """A plain value in words that are the same in every process; of others, what they are."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_in_words(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_in_words, value)) + "]"
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value) if is_plain else getattr(value, "__qualname__", type(value).__qualname__)
