"""``generate`` of a split causal model: tokens are chosen on one rank, and every rank runs its layers.

The rank with the logits runs transformers' own ``generate``; each of its forwards is told to the other ranks,
which serve it with caches of their own layers. The batch goes through in microbatches, so that ranks work on
several at a time. What lies where is left to ``causal``, a forward to ``relay``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import whole
from ..errors import InputError, StepError
from ..runtime import Runtime
from ..runtime.data.outputs import share
from ..runtime.engine import Engine
from ..runtime.reduce.precision import autocast_context
from .causal import INSTEAD, Layout, lay_out, refuse
from .relay import Relay

__all__ = ["generate"]

# fmt: off
NOT_TAKEN = (
    "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "past_key_values",
    "cache_implementation", "output_attentions", "output_hidden_states", "synced_gpus", "inputs_embeds",
)
FORWARD_ARGUMENTS = frozenset((
    "input_ids", "attention_mask", "position_ids", "token_type_ids", "use_cache", "logits_to_keep",
    "return_dict", "output_attentions", "output_hidden_states",
))
# fmt: on


def generate(
    model: nn.Module,
    runtime: Runtime | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n_microbatches: int | None = None,
) -> Any:
    """What ``model.generate(*args, **kwargs)`` gives, on every rank; see :meth:`autopipe.Pipe.generate`."""
    if not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} has no generate method; only transformers' models have one")
    if n_microbatches is not None:
        whole("n_microbatches", n_microbatches)
    engine = None if runtime is None else runtime.engine
    if engine is None or engine.peers is None:
        return model.generate(*args, **kwargs)  # type: ignore[operator]
    with engine.turn:
        call = _Call(engine, n_microbatches)
        given = call.given(args, dict(kwargs))
        call.check(*given)
        try:
            with engine.peers.together("generating", waits=False):
                result = call.run(*given)
        except Exception as error:
            engine.peers.fail(error)
    if call.failure is not None:
        raise call.failure
    return result


_layouts: weakref.WeakKeyDictionary[Engine, Layout] = weakref.WeakKeyDictionary()


class _Call:
    """One call of generate, on one rank.

    ``failure`` is what went wrong between two forwards, as all ranks then know: the pipeline can go on.
    """

    def __init__(self, engine: Engine, n_microbatches: int | None) -> None:
        assert engine.peers is not None
        self._engine, self._peers, self._asked = engine, engine.peers, n_microbatches
        is_known = engine in _layouts
        self._layout = _layouts[engine] if is_known else lay_out(engine)
        self._relay = Relay(engine, self._layout)
        self._autocast = autocast_context(engine.options.autocast, engine.device)
        self._n_forwards = 0
        self.failure: Exception | None = None
        if not is_known:
            with engine.peers.together("checking that it can generate", waits=False), torch.no_grad():
                found = engine.peers.gather(self._relay.try_out(), str)
            for why in filter(None, found):
                raise refuse(engine.capture.ops.model, why)
            _layouts[engine] = self._layout

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's arguments, or those of the rank that feeds the pipeline."""
        for name in NOT_TAKEN:
            if kwargs.get(name):
                raise InputError(f"generate stage by stage does not take {name}; leave it out, or {INSTEAD}")
        feed = self._engine.options.feed
        if feed is None:
            return args, kwargs
        if self._engine.rank != feed and (args or kwargs):
            raise InputError(
                f"rank {self._engine.rank} was given arguments, but only rank {feed} feeds this pipeline; "
                "call generate() without any here"
            )
        try:
            with self._peers.together("sharing the prompts", waits=False):
                told = share([list(args), kwargs], self._peers, feed, self._engine.device)
        except StepError as error:  # of what one rank cannot tell the others, who wait for it
            self._peers.fail(error)
        return tuple(told[0]), told[1]

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise on every rank where one was given other prompts; see whether generators stand alike."""
        capture = self._engine.capture
        if capture.model.training and any(op.is_random for op in capture.ops.compute):
            raise InputError(
                f"{capture.ops.model} is in training mode, and dropout would draw otherwise than in one "
                "process; call pipe.eval() before generate()"
            )
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        mine = (_checksum(tensors), _checksum([torch.get_rng_state()]))
        everyone = self._peers.gather(mine, tuple[int, int])
        odd = next((r for r, (prompts, _) in enumerate(everyone) if prompts != everyone[0][0]), None)
        if odd is not None:
            raise InputError(
                f"rank {odd} was given other prompts than rank 0; give generate() the same on every rank, or "
                "make the runtime with feed=0 and give them on rank 0 only"
            )
        self._draws_alike = len({draws for _, draws in everyone}) == 1

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; None where ``failure`` says why there is none."""
        is_driver = self._engine.rank == self._layout.driver
        with torch.no_grad(), self._autocast(), self._relay.standing_in():
            result = self._drive(args, kwargs) if is_driver else self._serve()
        if self._draws_alike:
            # whoever draws next draws alike on every rank, as before
            (state,) = self._share([torch.get_rng_state()])
            torch.set_rng_state(state.cpu())
        return result

    def _share(self, values: list[Any] | None) -> list[Any]:
        return share(values, self._peers, self._layout.driver, self._engine.device)

    # -- the rank that chooses ----------------------------------------------------------------------

    def _drive(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the library's own generate here, over all ranks."""
        model, core = self._engine.capture.model, self._layout.core
        prompts = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        caches = _caches_class()(core, prompts.shape[0] if isinstance(prompts, Tensor) else 1)
        is_running = False

        @functools.wraps(self._relay.forward)
        def forward(**inputs: Any) -> Any:
            nonlocal is_running
            is_running = True
            made = self._forward(caches, inputs)
            is_running = False
            return made

        if kwargs.get("use_cache", True) is not False:
            kwargs["past_key_values"] = caches
        try:
            with _attribute(core, "forward", forward):
                made = model.generate(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            if is_running:
                raise
            # no rank is in the midst of anything: the pipeline goes on
            self._share(["failed", f"{type(error).__name__}: {error}"])
            self.failure = error
            return None
        if isinstance(made, Tensor):
            self._share(["done", None, made])
            return made
        plain = dict(made) | {"past_key_values": None}
        self._share(["done", type(made).__name__, plain])
        return type(made)(**plain)

    def _forward(self, caches: Any, inputs: dict[str, Any]) -> Any:
        """One forward of the whole batch: told to all, and this rank's part of it."""
        given = {k: v for k, v in inputs.items() if v is not None and k != "past_key_values"}
        odd = sorted(set(given) - FORWARD_ARGUMENTS)
        if odd or any(isinstance(v, dict) for v in given.values()):
            raise refuse(
                self._engine.capture.ops.model, f"its forward is given {', '.join(odd) or 'several masks'}"
            )
        rows = self._cut(given["input_ids"].shape[0], caches.n_prompts)
        uses_cache = inputs.get("past_key_values") is not None
        self._share(["forward", given, rows, uses_cache, caches.take_noted()])
        outs = list(self._run(caches, given, rows, uses_cache))
        logits = torch.cat([out.logits for out in outs])
        return type(outs[0])(logits=logits, past_key_values=caches if uses_cache else None)

    def _cut(self, n_rows: int, n_prompts: int) -> list[int]:
        """Rows of each microbatch: whole prompts, whose beams stay together."""
        wanted = self._asked or (self._peers.n_ranks if self._layout.overlaps else 1)
        per_prompt = n_rows // n_prompts if n_rows % n_prompts == 0 else n_rows
        n_units = n_rows // per_prompt
        n = min(wanted, n_units)
        return [per_prompt * (n_units * (m + 1) // n - n_units * m // n) for m in range(n)]

    # -- every rank ---------------------------------------------------------------------------------

    def _serve(self) -> Any:
        """Run this rank's layers in each forward that the choosing rank tells of, until it is through."""
        caches = _caches_class()(self._layout.core, 1)
        while True:
            self._peers.position.waits_for = self._layout.driver
            word, *rest = self._share(None)
            self._peers.position.waits_for = -1
            if word == "forward":
                *inputs, noted = rest
                for beams in noted:
                    caches.reorder(beams)
                collections.deque(self._run(caches, *inputs), maxlen=0)
            elif word == "failed":
                self.failure = StepError(f"rank {self._layout.driver}, choosing tokens: {rest[0]}")
                return None
            else:
                return _output(*rest)

    def _run(
        self,
        caches: Any,
        given: dict[str, Any],
        rows: Sequence[int],
        uses_cache: bool,
    ) -> Iterator[Any]:
        """The model's forward of each microbatch, as far as it runs here."""
        self._n_forwards += 1
        self._peers.position.index = -1000 - self._n_forwards
        given = {k: v.to(self._engine.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        caches.begin(rows)
        start, n = 0, sum(rows)
        for m, size in enumerate(rows):
            piece = {k: _rows(v, n, start, size) for k, v in given.items()}
            if uses_cache:
                piece["past_key_values"] = caches.each[m]
            yield self._relay.forward(**piece)
            start += size
        self._relay.flush()


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Of the values, alike wherever they are."""
    plain = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in tensors)
    return zlib.crc32(b"".join(t.numpy().tobytes() for t in plain))


def _rows(value: Any, n: int, start: int, size: int) -> Any:
    """A microbatch's rows of what has a row for each sequence."""
    is_whole = not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != n
    return value if is_whole else value[start : start + size]


def _output(name: str | None, plain: Any) -> Any:
    """A result as the choosing rank has it."""
    if name is None:
        return plain
    from transformers.generation import utils

    return getattr(utils, name)(**plain)


@functools.cache
def _caches_class() -> type:
    """What needs transformers to be there."""
    from transformers import DynamicCache

    class Caches(DynamicCache):
        """A cache for each microbatch; to the library's generate, one of the whole batch.

        How beams are reordered is noted, and told to the other ranks with the next forward.
        """

        is_compileable = False
        is_croppable = False

        def __init__(self, core: Any, n_prompts: int) -> None:
            super().__init__()
            self._config = core.config.get_text_config(decoder=True)
            self.n_prompts = n_prompts
            self.each: list[Any] = []
            self._rows: tuple[int, ...] = ()
            self._noted: list[Tensor] = []

        def begin(self, rows: Sequence[int]) -> None:
            """Be of so many rows; the caches are made at first."""
            if not self.each:
                self.each = [DynamicCache(config=self._config) for _ in rows]
            self._rows = tuple(rows)

        def take_noted(self) -> list[Tensor]:
            noted, self._noted = self._noted, []
            return noted

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

    return Caches


@contextlib.contextmanager
def _attribute(holder: nn.Module, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Within it ``holder`` itself has this attribute, in the place of its class's."""
    before = holder.__dict__.get(name)
    holder.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del holder.__dict__[name]
        else:
            holder.__dict__[name] = before
