"""Tells which calls draw random numbers.

Keeping those calls in order is left to ``opgraph``, seeding them to ``stages``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Draws"]


class Draws:
    """Tells which calls draw random numbers: by the generators' state, on meta by the ops' tags."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tagged = _Tagged() if device.type == "meta" else None
        self.state = self._read()

    def _read(self) -> bytes:
        state = torch.default_generator.get_state().numpy().tobytes()
        if self.device.type == "cuda":
            state += torch.cuda.get_rng_state(self.device).numpy().tobytes()
        return state

    def drawn(self) -> bool:
        """Whether random numbers were drawn since the last question."""
        if self.tagged is not None:
            was, self.tagged.seen = self.tagged.seen, False
            return was
        before, self.state = self.state, self._read()
        return self.state != before

    def __enter__(self) -> Draws:
        if self.tagged is not None:
            self.tagged.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.tagged is not None:
            self.tagged.__exit__(*error)


class _Tagged(TorchDispatchMode):
    """Notes ops that draw random numbers; on the meta device no generator moves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
