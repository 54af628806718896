"""The surroundings that a model's code asks for: the grad mode, and which inputs take gradients.

Recording in each of them is left to ``session``, asking at run time to ``questions``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..calls.call import Branch, Call, Recording, Setting
from ..calls.named import Named

__all__ = ["settings", "under"]


def settings(asked: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Iterator[Setting]:
    """The settings to record in for what was ``asked``, that of the example's ``tensors`` first."""
    given = frozenset(n for n, t in tensors.items() if t.requires_grad)
    floats = frozenset(n for n, t in tensors.items() if t.is_floating_point())
    others = [frozenset[str]() if given else floats] if "inputs" in asked and floats else []
    modes = (True, False) if "grad" in asked else (True,)
    for grad, requiring in itertools.product(modes, [given, *others]):
        yield Setting(grad, requiring)


def under(recording: Recording, asked: Mapping[str, str], setting: Setting, names: list[str]) -> Recording:
    """The recording as one of several, told apart first by the setting it was made in."""
    branches = []
    if "grad" in asked:
        read = Call("call_function", _GRAD, hint="whether gradients are enabled")
        branches.append(_branch((read,), setting.grad, asked["grad"]))
    if "inputs" in asked:
        assert setting.requiring is not None
        inputs = tuple(Call("placeholder", n) for n in names)
        read = Call("call_function", _REQUIRING, inputs, hint="which inputs take gradients")
        outcome = [n in setting.requiring for n in names]
        branches.append(_branch((*inputs, read), outcome, asked["inputs"]))
    recording.branches = (*branches, *recording.branches)
    recording.setting, recording.asked = setting, asked
    return recording


def _branch(calls: tuple[Call, ...], outcome: object, source: str) -> Branch:
    return Branch(calls[-1], calls, outcome, "", source, is_forceable=False, of_setting=True)


def _requiring(*tensors: Tensor) -> list[bool]:
    return [t.requires_grad for t in tensors]


_GRAD = Named(torch.is_grad_enabled)
_REQUIRING = Named(_requiring)
