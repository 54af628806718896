"""What a user should know of a model that was recorded: where steps in microbatches are less than its calls.

How it was recorded is noted where that is decided, in ``session``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .forms import CaptureForms
from .inputs.writes import names_written
from .sizes.variation import said_nearly

__all__ = ["notes_on"]


def notes_on(made: CaptureForms) -> Iterator[str]:
    """Of what a call does beside what it returns, all that a step does otherwise."""
    mixing = made.variation.mixing
    nearly = said_nearly(made.variation.tail.nearly if made.variation.tail.ops else mixing.nearly)
    yield from filter(None, (mixing.said_untold, nearly, mixing.said_by_call, mixing.said_in_evaluation))
    written = [name for forms in made.forms.values() for name in names_written(forms[0].output)]
    if written:
        yield (
            f"a forward writes {', '.join(dict.fromkeys(written))}, among its arguments: calls of the pipe "
            "write there too, steps of a runtime do not; return it, to have it"
        )
