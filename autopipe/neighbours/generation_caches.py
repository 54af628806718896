"""Keys and values of a batch that passes in microbatches: a cache for each, and how beams move between rows.

Which layers of it a rank fills is left to ``generation_forward``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Caches", "cache_name", "caches_class"]


class Caches(Protocol):
    """What :func:`caches_class` makes."""

    each: list[Any]

    def begin(self, rows: Sequence[int]) -> None:
        """Be of so many rows; the caches are made at first."""

    def take_noted(self) -> tuple[bool, list[Tensor]]:
        """Whether no rank was told of these caches, and how beams were reordered since they were."""

    def reorder(self, beam_idx: Tensor) -> None:
        """Reorder the rows of every microbatch."""


@functools.cache
def cache_name() -> str:
    """What transformers calls a cache among a forward's arguments and outputs: ``cache`` from 5.24 on."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    named = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    return "cache" if "cache" in named else "past_key_values"


@functools.cache
def caches_class() -> Any:
    """A class that needs transformers to be there."""
    from transformers import DynamicCache, EncoderDecoderCache

    class MicrobatchCaches(DynamicCache):
        """A cache for each microbatch; to the library's generate, one of the whole batch.

        How beams are reordered is noted, and told to the other ranks with the next forward.
        """

        is_compileable = False
        is_croppable = False

        def __init__(self, core: Any) -> None:
            super().__init__()
            self._config = core.config.get_text_config(decoder=True)
            self._attends_twice = core.config.is_encoder_decoder
            self.each: list[Any] = []
            self._rows: tuple[int, ...] = ()
            self._noted: list[Tensor] = []
            self._is_new = True

        def _make(self) -> Any:
            own = DynamicCache(config=self._config)
            return EncoderDecoderCache(own, DynamicCache(config=self._config)) if self._attends_twice else own

        def begin(self, rows: Sequence[int]) -> None:
            if not self.each:
                self.each = [self._make() for _ in rows]
            self._rows = tuple(rows)

        def take_noted(self) -> tuple[bool, list[Tensor]]:
            is_new, noted = self._is_new, self._noted
            self._is_new, self._noted = False, []
            return is_new, noted

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.each[0].get_seq_length(layer_idx) if self.each else 0

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self._noted.append(beam_idx)
            self.reorder(beam_idx)

        def reorder(self, beam_idx: Tensor) -> None:
            start = 0
            for cache, size in zip(self.each, self._rows, strict=True):
                cache.reorder_cache(beam_idx[start : start + size] - start)
                start += size

    return MicrobatchCaches
