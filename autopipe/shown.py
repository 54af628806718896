"""What lets plain data show itself: text, a notebook view, a data frame, a page.

How each type looks is left to ``look``, which is found by name when something is first shown, so data
imports nothing above itself and costs nothing until looked at.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

from .files import write_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Shown"]


class Shown:
    """Mixin of every data type that a person may look at."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # IPython prefers a class's own __repr__, which dataclasses write, to what a base class offers
        cls._repr_pretty_ = Shown._repr_pretty_  # type: ignore[method-assign]

    def __str__(self) -> str:
        return str(_look().text(self))

    def _repr_html_(self) -> str:
        return str(_look().html(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython's plain text: the table, not the dataclass with every field."""
        printer.text(str(self))

    def to_frame(self) -> pd.DataFrame:
        """The rows of the main table, unformatted: seconds and bytes as numbers. Needs pandas."""
        return _look().frame(self)

    def to_html(self, path: str | pathlib.Path | None = None, **context: Any) -> str:
        """One offline HTML page, also written to ``path`` when given.

        ``context`` adds what the object does not hold itself: for a plan ``graph``, ``costs``, ``timeline``
        and ``measured`` (see ``autopipe.look.report``).
        """
        page = str(_look().page(self, **context))
        if path is not None:
            write_text(path, page)
        return page


def _look() -> Any:
    return importlib.import_module(f"{__package__}.look")
