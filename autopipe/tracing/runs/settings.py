"""The surroundings that a model's code asks for: the grad mode, which inputs take gradients, how they lie.

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


def under(
    recording: Recording, asked: Mapping[str, str], setting: Setting, tensors: Mapping[str, Tensor]
) -> Recording:
    """The recording as one of several, told apart first by the setting it was made in, on these inputs."""
    branches = []
    names = sorted(n for n, t in tensors.items() if t.is_floating_point())
    if "layout" in asked:
        all_names = sorted(tensors)
        inputs = tuple(Call("placeholder", n) for n in all_names)
        read = Call("call_function", _LAYOUT, inputs, hint="how inputs lie in memory")
        layouts = _layouts(*(tensors[n] for n in all_names))
        branches.append(_branch((*inputs, read), layouts, asked["layout"]))
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


def _layouts(*tensors: Tensor) -> list[str]:
    """The order of each one's dims in memory, told of those that are laid out otherwise than as new."""
    return [_layout(t) for t in tensors]


def _layout(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_contiguous():
        return "contiguous"
    steps = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-steps[dim], dim))
    kind = "dense" if tensor.permute(order).is_contiguous() else "with gaps"
    return f"{kind}, dims in the order {order}"


_GRAD = Named(torch.is_grad_enabled)
_REQUIRING = Named(_requiring)
_LAYOUT = Named(_layouts)
