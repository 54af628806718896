"""Keeps generation caches out of a capture: training has no use for them, and they grow from call to call.

Putting everything else about a model back is left to ``state``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from .arguments import signature

__all__ = ["switched_off", "without_cache"]

_logger = logging.getLogger("autopipe")


def without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` that ask a transformers model for no key-value cache, where it takes such an argument."""
    if "use_cache" in kwargs or not any(map(_decodes, _configs(model))):
        return kwargs
    _say_once(f"{type(model).__name__} is captured without its key-value cache (use_cache=False)")
    takes = "use_cache" in signature(model.forward).parameters
    return {**kwargs, "use_cache": False} if takes else kwargs


@contextlib.contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """While it lasts, no config that a module of ``model`` reads asks for a cache."""
    configs = list(_configs(model))
    for config in configs:
        vars(config)["use_cache"] = False
    try:
        yield
    finally:
        for config in configs:
            vars(config)["use_cache"] = True


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every config that the modules of a transformers model hold and that asks for a cache, once."""
    queue = [vars(m)["config"] for m in model.modules() if "config" in vars(m)]
    seen: set[int] = set()
    while queue:
        config = queue.pop()
        if id(config) in seen or not hasattr(config, "to_dict") or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        queue += [v for v in vars(config).values() if hasattr(v, "to_dict")]
        if vars(config).get("use_cache") is True:
            yield config


def _decodes(config: Any) -> bool:
    """Whether a config that asks for a cache gets one: an encoder's says that it is no decoder."""
    is_encoder = getattr(config, "is_decoder", None) is False
    return not is_encoder or bool(getattr(config, "is_encoder_decoder", False))


@functools.cache
def _say_once(message: str) -> None:
    _logger.warning(message)
