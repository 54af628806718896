"""What a form's graph checks of sizes that no formula tells, asked before it runs: on the meta device.

So inputs that it would refuse on its way are known to be of another kind, for which a form can be recorded.
Putting the checks into the graph is left to ``guards``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...graph import Dim
from ..calls.call import Call, Guard, Recording, meta
from ..calls.faults import of_models
from ..inputs.structure import flatten
from ..state.state import preserved
from .guards import ExpectSize
from .rerun import replay, with_guards

__all__ = ["Expected"]

_logger = logging.getLogger("autopipe")
_MOST_KNOWN = 1024
"""For how many sizes of inputs it is remembered what comes of them."""


class Expected:
    """The checks of sizes in a form's graph, with what they need of it; asked once for inputs of some shapes.

    What cannot be told on the meta device is left to the graph. Where inputs that had one size at capture, as
    ``dims`` says, have several, all that the model asked of sizes is asked, but for the guards that are
    ``harmless``: formulas know one size of them.
    """

    def __init__(self, form: Recording, dims: Sequence[Dim] = (), harmless: Collection[int] = ()) -> None:
        self.places = [d.where for d in dims if len(d.where) > 1 and not d.packed]
        asked = [g for g in form.guards if self.places and id(g) not in harmless]
        self.form = _asking(form, [])
        self.uneven = _asking(form, asked) if asked else self.form
        self.known: dict[Any, str] = {}

    def check(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Raise :class:`InputError` where the form's graph would, for inputs like these."""
        if len(self.uneven.calls) == 1:
            return
        is_uneven = any(len({values[n].shape[a] for n, a in where}) > 1 for where in self.places)
        form = self.uneven if is_uneven else self.form
        if len(form.calls) == 1:
            return
        shapes = tuple(tuple(t.shape) for t in values.values())
        if shapes not in self.known:
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[shapes] = self._asked(model, form, values, is_uneven)
        if fault := self.known[shapes]:
            raise InputError(fault)

    def _asked(self, model: nn.Module, form: Recording, values: Mapping[str, Any], is_uneven: bool) -> str:
        given, device = {name: meta(value) for name, value in values.items()}, torch.device("meta")
        # layers may make tensors beside those that they are given, and numbers be made of tensors
        for surroundings in (contextlib.nullcontext(), device):
            try:
                with torch.no_grad(), preserved(model), _on_meta(model), surroundings:
                    replay(model, form, given, device)
            except InputError as fault:
                return str(fault)
            except of_models() as error:  # what it is, the graph meets on data, or does not
                _logger.debug("what the model asks of sizes is not known ahead: %s", error)
            else:
                return ""
        if not is_uneven:
            return ""
        return "inputs of one size at capture have several, and what the model asks of them cannot be told"


def _asking(form: Recording, guards: list[Guard]) -> Recording:
    """The checks of sizes in a form's graph and those of more of its guards, with what they need of it."""
    checks = [Call("call_function", ExpectSize(g), g.operands, source=g.source) for g in guards]
    calls = [*with_guards(dataclasses.replace(form, guards=guards)), *checks]
    needed = _behind(calls, [c for c in calls if isinstance(c.target, ExpectSize)])
    output = Call("output", "output", ((),), hint="output")
    return Recording(form.training, [*needed, output], flatten(())[1], [], form.constants)


def _behind(calls: Sequence[Call], last: Sequence[Call]) -> list[Call]:
    """Some calls and all that they need, in order."""
    needed = {id(c) for c in last}
    for call in reversed(calls):
        if id(call) in needed:
            needed.update(id(c) for c in call.inputs)
    return [c for c in calls if id(c) in needed or (needed and c.op == "placeholder")]


@contextlib.contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Within it every parameter and buffer is one on the meta device."""
    places: list[dict[str, Any]] = [vars(m)[k] for m in model.modules() for k in ("_parameters", "_buffers")]
    before = [(held, dict(held)) for held in places]
    try:
        for held, own in before:
            held.update({name: meta(tensor) for name, tensor in own.items()})
        yield
    finally:
        for held, own in before:
            held.update(own)
