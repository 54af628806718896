"""The colours of stages: eight hues told apart by most eyes, taken in turn; small marks made of them.

They are readable on light and on dark; the report's style sheet has a pair of each for its two themes.
"""

from __future__ import annotations

__all__ = ["bar", "colour", "swatch"]

STAGES = ("#3f7fc4", "#c96a2e", "#2c958b", "#bd5590", "#8172c8", "#868c33", "#728495", "#a3713b")


def colour(stage: int) -> str:
    """A CSS colour for a stage: the report's own where a page defines it."""
    i = stage % len(STAGES)
    return f"var(--s{i},{STAGES[i]})"


def swatch(stage: int) -> str:
    """A small square of the stage's colour."""
    return (
        f'<i class="swatch" style="background:{colour(stage)};display:inline-block;width:.7em;height:.7em;'
        'border-radius:2px;margin-right:.45em"></i>'
    )


def bar(fraction: float) -> str:
    """A small bar, full at 1."""
    width = 100 * min(max(fraction, 0.0), 1.0)
    return (
        '<span class="bar" style="display:inline-block;width:4em;height:.5em;margin-right:.6em;'
        'background:rgba(128,128,128,.25)">'
        f'<i style="display:block;height:100%;width:{width:.1f}%;background:rgba(128,128,128,.85)"></i>'
        "</span>"
    )
