"""The modules, parameters and buffers of a model, listed in one go or found by their paths.

Torch's own generators take several times as long, and each part of a capture asks for all of them; its
look-up gives what a class has, or computes, under a name there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from ..torch_private import CALL_HOOK

__all__ = ["OF_ALL", "OF_COMPILED", "buffers_in", "modules_in", "parameters_in", "registered", "submodule"]

OF_ALL = frozenset(vars(nn.Module()))
"""The attributes that every module has, its registries among them."""
OF_COMPILED = OF_ALL | {CALL_HOOK}
"""And what ``Module.compile`` adds."""


def modules_in(model: nn.Module, prefix: str = "", *, is_once: bool = True) -> list[tuple[str, nn.Module]]:
    """What ``named_modules`` gives, be it a module's own: each once, or under all paths.

    >>> layer = nn.ReLU()
    >>> [path for path, _ in modules_in(nn.Sequential(layer, nn.Sequential(layer, nn.Tanh())), "net")]
    ['net', 'net.0', 'net.1', 'net.1.1']
    """
    out: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting, usual = [(prefix, model)], nn.Module.named_modules
    while waiting:
        path, module = waiting.pop()
        if is_once:
            if id(module) in seen:
                continue
            seen.add(id(module))
        if type(module).named_modules is not usual:
            return [*model.named_modules(prefix=prefix, remove_duplicate=is_once)]
        out.append((path, module))
        if held := module._modules:
            ahead = f"{path}." if path else ""
            waiting += [(ahead + n, m) for n, m in reversed(held.items()) if m is not None]
    return out


def parameters_in(
    model: nn.Module, prefix: str = "", *, is_once: bool = True
) -> list[tuple[str, nn.Parameter]]:
    """What ``named_parameters`` gives: each once, or under all names."""
    return _members(model, "named_parameters", lambda module: module._parameters, prefix, is_once)


def buffers_in(model: nn.Module, prefix: str = "", *, is_once: bool = True) -> list[tuple[str, torch.Tensor]]:
    """What ``named_buffers`` gives: each once, or under all names."""
    return _members(model, "named_buffers", lambda module: module._buffers, prefix, is_once)


def _members(
    model: nn.Module,
    method: Literal["named_parameters", "named_buffers"],
    held: Callable[[nn.Module], Any],
    prefix: str,
    is_once: bool,
) -> list[tuple[str, Any]]:
    if getattr(type(model), method) is not getattr(nn.Module, method):
        return [*getattr(model, method)(prefix=prefix, remove_duplicate=is_once)]
    out: list[tuple[str, Any]] = []
    seen: set[int] = set()
    for path, module in modules_in(model, prefix, is_once=is_once):
        if members := held(module):
            ahead = f"{path}." if path else ""
            for name, tensor in members.items():
                if tensor is not None and not (is_once and id(tensor) in seen):
                    seen.add(id(tensor))
                    out.append((ahead + name, tensor))
    return out


def submodule(model: nn.Module, path: str) -> nn.Module:
    """The module at a path of :func:`modules_in`, whatever a class has, or gives, under a name there.

    Raises :class:`AttributeError` where there is none.

    >>> submodule(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())), "1.0")
    Tanh()
    """
    found = model
    for name in path.split(".") if path else ():
        held: Any = found._modules
        if name not in held or held[name] is None:
            return model.get_submodule(path)  # a model may list modules that it does not hold itself
        found = held[name]
    return found


def registered(module: nn.Module, path: str) -> Any:
    """What lies at a dotted path, also where a class has, or gives, something else under a name there."""
    value: Any = module
    for name in path.split(".") if path else ():
        value = _registered(value, name) if isinstance(value, nn.Module) else getattr(value, name)
    return value


def _registered(module: nn.Module, name: str) -> Any:
    try:
        return nn.Module.__getattr__(module, name)
    except AttributeError:  # it computes what it has there, as a parametrized module does
        return getattr(module, name)
