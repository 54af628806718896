"""The model as a graph: recorded now, recorded already, or recorded again as a plan had it.

Recording itself is left to ``tracing``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import InputError
from ..plans import Plan
from ..tracing import Capture
from ..tracing import capture as _capture
from .agree import make_alike
from .checks import check_model, check_names, checked

__all__ = ["capture", "captured", "captured_for"]


def capture(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Capture:
    """Record ``model`` as a graph by running it on example inputs, in training and in evaluation mode.

    Parameters
    ----------
    args, kwargs: example inputs, a whole batch, as in ``torch.export``; by default those that the model
        itself provides, as in :func:`split`.
    open, closed: dotted paths of modules to record the inside of, or to keep whole as one op.
    dynamic: ``"auto"`` lets each input size vary where the model allows it; False fixes them all.

    Returns the :class:`~autopipe.tracing.Capture`: ``.ops`` is the op graph, ``.module`` the model as a
    linted ``torch.fx.GraphModule``. It can be given in place of the model to the other functions, which then
    record nothing. The model is left as it was.

    Raises :class:`ModelError` when the model itself fails on the inputs, :class:`CaptureError` with file and
    line when it cannot be recorded, and :class:`InputError` for inputs or paths that do not fit.
    """
    check_model(model, args, kwargs)
    check_names("capture", options, _capture)
    return _capture(model, tuple(args), dict(kwargs or {}), **checked(options))


def captured(
    model: nn.Module | Capture,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    stall_limit_s: float | None,
    asked: Mapping[str, str],
) -> Capture:
    """The model recorded so on every rank, all alike; or as the caller had it recorded already.

    ``asked``: what else is to be the same on every rank, by name.
    """
    return make_alike(
        "the captured graph",
        lambda: _given_or_recorded(model, args, kwargs, options),
        lambda made: made.ops.digest,
        stall_limit_s,
        asked,
    )


def captured_for(
    plan: Plan,
    model: nn.Module | Capture,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    stall_limit_s: float | None,
) -> Capture:
    """The capture that ``plan`` was made for: leaves that were opened then are opened again."""
    opened = plan.settings.get("opened", ())

    def made() -> Capture:
        if not isinstance(model, Capture):
            return capture(model, args, kwargs, **{**options, "open": (*options.get("open", ()), *opened)})
        found = _given_or_recorded(model, args, kwargs, options)
        return found if found.ops.digest == plan.graph_digest else found.open(*opened)

    return make_alike(
        "the plan",
        made,
        lambda _: hashlib.sha256(plan.to_json().encode()).hexdigest()[:16],
        stall_limit_s,
    )


def _given_or_recorded(
    model: nn.Module | Capture,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Capture:
    if not isinstance(model, Capture):
        return capture(model, args, kwargs, **options)
    ignored = [name for name, value in options.items() if value not in ("auto", (), [])]
    if ignored:
        raise InputError(
            f"model is a capture already, for which {', '.join(ignored)} would be ignored; give that to "
            "autopipe.capture, or pass the model itself"
        )
    return model
