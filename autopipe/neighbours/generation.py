"""``generate`` of a split model: tokens are chosen on one rank, and every rank runs its layers.

The rank with the logits runs transformers' own ``generate``; each of its forwards is told to the other ranks,
which serve it with caches of their own layers. So is the encoder's, where there is one. The batch may go
through in microbatches, so that ranks work on several at a time. What lies where is left to
``generation_ranks``, a forward to ``generation_forward``, caches to ``generation_caches``.
"""

from __future__ import annotations

import collections
import functools
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import accelerator
from ..arguments import whole
from ..errors import InputError, StepError
from ..runtime import Runtime
from ..runtime.data.outputs import share
from ..runtime.engine import Engine
from ..runtime.reduce.precision import autocast_context
from .generation_caches import Caches, cache_name, caches_class
from .generation_forward import ChainPart, Forms, Wire, lent, swapped
from .generation_ranks import INSTEAD, Layout, lay_out, refuse

__all__ = ["generate"]

# fmt: off
NOT_TAKEN = (
    "assistant_model", "prompt_lookup_num_tokens", "custom_generate", "past_key_values", "cache",
    "cache_implementation", "output_attentions", "output_hidden_states", "synced_gpus", "inputs_embeds",
    "guidance_scale",
)
FORWARD_ARGUMENTS = frozenset((
    "input_ids", "attention_mask", "position_ids", "token_type_ids", "use_cache", "logits_to_keep",
    "return_dict", "output_attentions", "output_hidden_states",
    "decoder_input_ids", "decoder_attention_mask", "decoder_position_ids",
))
# fmt: on
TOKENS_OF_A_PIECE = 16
"""Tokens of a forward from which its work outweighs reading the weights for it, so that pieces pay."""


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
    engine = None if runtime is None else runtime.engine
    if engine is None or engine.peers is None:
        _pieces(n_microbatches)
        return model.generate(*args, **kwargs)  # type: ignore[operator]
    with engine.turn:
        engine.called("generate", lambda: _check_given(engine, args, kwargs, n_microbatches), str)
        call = _Call(engine, _pieces(n_microbatches))
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


_tried: weakref.WeakKeyDictionary[Engine, tuple[Layout, list[Forms]]] = weakref.WeakKeyDictionary()


class _Call:
    """One call of generate, on one rank.

    ``failure`` is what went wrong between two forwards, as all ranks then know: the pipeline can go on.
    """

    def __init__(self, engine: Engine, n_microbatches: int | None) -> None:
        assert engine.peers is not None
        self._engine, self._peers, self._asked = engine, engine.peers, n_microbatches
        self._layout, forms = _tried[engine] if engine in _tried else (lay_out(engine), [])
        self._wire = Wire(engine)
        self._decoder = ChainPart(engine, self._layout.decoder, self._wire)
        encoder = self._layout.encoder
        self._encoder = None if encoder is None else ChainPart(engine, encoder, self._wire)
        self._autocast = autocast_context(engine.options.autocast, engine.device)
        self._n_forwards = 0
        self._caches: Caches | None = None
        self._n_prompts = 1
        self._states: Tensor | None = None
        self._is_running = False
        self.failure: Exception | None = None
        if not forms:
            with engine.peers.together("checking that it can generate", waits=False), torch.no_grad():
                forms = self._try_out()
            _tried[engine] = self._layout, forms
        for part, form in zip(self._parts, forms, strict=True):
            part.forms = form

    @property
    def _parts(self) -> list[ChainPart]:
        return [self._decoder] if self._encoder is None else [self._decoder, self._encoder]

    def _try_out(self) -> list[Forms]:
        """Run the chains once, on two tokens or, of what is no text, a row of the example."""
        core: Any = self._layout.decoder.root
        tokens = torch.ones(1, 2, dtype=torch.int64, device=self._engine.device)
        with self._autocast(), lent(self._engine, self._layout.loans, self._wire):
            if self._encoder is None:
                self._decoder.try_out(input_ids=tokens, attention_mask=tokens, use_cache=False)
            else:
                inputs = {"input_ids": tokens, "attention_mask": tokens}
                if core.main_input_name not in inputs:
                    inputs = {core.main_input_name: self._example(core.main_input_name)}
                states = self._encoder.try_out(**inputs)[0]
                given: dict[str, Any] = {k: v for k, v in inputs.items() if k == "attention_mask"}
                given |= {"decoder_input_ids": tokens, "encoder_outputs": _encoded(torch.zeros_like(states))}
                self._decoder.try_out(**given, use_cache=False)
        return [part.forms for part in self._parts]

    def _example(self, name: str) -> Tensor:
        args, kwargs = self._engine.capture.example
        value = kwargs.get(name, args[0] if args else None)
        if not isinstance(value, Tensor):
            raise refuse(self._engine.capture.ops.model, f"the example inputs have no {name}")
        return value[:1].to(self._engine.device)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's arguments, or those of the rank that feeds the pipeline."""
        feed = self._engine.options.feed
        if feed is None:
            return args, kwargs
        try:
            with self._peers.together("sharing the prompts", waits=False):
                told = share([list(args), kwargs], self._peers, feed, self._engine.device)
        except StepError as error:  # of what one rank cannot tell the others, who wait for it
            self._peers.fail(error)
        return tuple(told[0]), told[1]

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise on every rank where one was given different prompts; see whether generators stand alike."""
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        mine = (_checksum(tensors), _checksum([torch.get_rng_state()]))
        everyone = self._peers.gather(mine, tuple[int, int])
        odd = next((r for r, (prompts, _) in enumerate(everyone) if prompts != everyone[0][0]), None)
        if odd is not None:
            raise InputError(
                f"rank {odd} was given different prompts from rank 0; give generate() the same on every "
                "rank, or make the runtime with feed=0 and give them on rank 0 only"
            )
        self._draws_alike = len({draws for _, draws in everyone}) == 1

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; None where ``failure`` says why there is none."""
        is_driver = self._engine.rank == self._layout.driver
        with torch.no_grad(), self._autocast(), lent(self._engine, self._layout.loans, self._wire):
            result = self._drive(args, kwargs) if is_driver else self._serve()
            self._wire.flush()
        if self._draws_alike:
            # whoever draws next draws alike on every rank, as before
            (state,) = self._share([torch.get_rng_state()])
            torch.set_rng_state(state.cpu())
        return result

    def _share(self, values: list[Any] | None) -> list[Any]:
        return share(values, self._peers, self._layout.driver, self._engine.device)

    def _tell(self, *values: Any) -> None:
        """Have the other ranks begin what ``values`` say; until it is done this one cannot go another way."""
        self._is_running = True
        self._share(list(values))

    # -- the rank that chooses ----------------------------------------------------------------------

    def _drive(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the library's own generate here, over all ranks."""
        model: Any = self._engine.capture.model
        others = [
            (self._layout.decoder.root, "forward", self._told(self._decoder, self._forward)),
            (self._layout.decoder.root, "_prepare_cache_for_generation", self._prepare_cache),
        ]
        if self._encoder is not None:
            others.append((self._encoder.chain.root, "forward", self._told(self._encoder, self._encode)))
        try:
            with swapped(*others):
                made = model.generate(*args, **kwargs)
        except Exception as error:
            if self._is_running:
                raise
            # no rank is in the midst of anything: the pipeline goes on
            self._share(["failed", f"{type(error).__name__}: {error}"])
            self.failure = error
            return None
        if not isinstance(made, dict) or type(made) is dict:
            self._share(["done", None, made])
            return made
        plain = dict(made) | {cache_name(): None}
        self._share(["done", type(made).__name__, plain])
        return type(made)(**plain)

    def _told(self, part: ChainPart, run: Any) -> Any:
        """A forward that all ranks run, with the signature of the module's own."""

        @functools.wraps(part.forward)
        def forward(**inputs: Any) -> Any:
            made = run(inputs)
            self._is_running = False
            return made

        return forward

    def _prepare_cache(self, config: Any, model_kwargs: dict[str, Any], *rest: Any, **named: Any) -> None:
        """What the library calls once for each of its loops, with the number of prompts beside the rest."""
        _check_taken(_settings(config))
        self._n_prompts = named["batch_size"] if "batch_size" in named else rest[1]
        self._caches = None
        if config.use_cache is not False:
            self._caches = model_kwargs[cache_name()] = caches_class()(self._layout.decoder.root)

    def _encode(self, inputs: dict[str, Any]) -> Any:
        """The encoder's forward of the whole batch; its states come to this rank."""
        assert self._encoder is not None
        given = {k: v for k, v in inputs.items() if v is not None}
        leads = given[next(k for k, v in given.items() if isinstance(v, Tensor) and v.ndim > 1)]
        n = leads.shape[0]
        rows = self._cut(self._encoder, n, n, n * leads.shape[-1])
        self._tell("encode", given, rows)
        outs = list(self._run(self._encoder, None, given, rows))
        states = torch.cat([out[0] for out in outs])
        source = self._encoder.chain.ranks[-1]
        if source != self._engine.rank:
            states = self._wire.recv(states.shape, states.dtype, source)
        return type(outs[0])(last_hidden_state=states)

    def _forward(self, inputs: dict[str, Any]) -> Any:
        """One forward of the whole batch: told to all, and this rank's part of it."""
        caches = inputs.pop(cache_name(), None)
        given = {k: v for k, v in inputs.items() if v is not None}
        states = None if self._encoder is None else self._states_of(given)
        name = "input_ids" if self._encoder is None else "decoder_input_ids"
        odd = sorted(set(given) - FORWARD_ARGUMENTS)
        if odd or name not in given or any(isinstance(v, dict) for v in given.values()):
            why = ", ".join(odd) or ("several masks" if name in given else f"no {name}")
            raise refuse(self._engine.capture.ops.model, f"its forward is given {why}")
        is_foreign = given.get("use_cache") if caches is None else caches is not self._caches
        if is_foreign:
            raise refuse(self._engine.capture.ops.model, "its forward is to use a cache of another's making")
        n = given[name].shape[0]
        rows = self._cut(self._decoder, n, self._n_prompts, n)
        is_new, noted = (False, []) if caches is None else caches.take_noted()
        told = None if states is self._states else states
        self._tell("forward", given, rows, None if caches is None else is_new, noted, told)
        self._states = states
        outs = list(self._run(self._decoder, caches, given, rows))
        logits = torch.cat([out.logits for out in outs])
        return type(outs[0])(logits=logits, **{cache_name(): caches})

    def _states_of(self, given: dict[str, Any]) -> Tensor:
        """The encoder's states among a forward's inputs, or of these."""
        assert self._encoder is not None
        known = given.pop("encoder_outputs", None)
        if known is None:
            core: Any = self._layout.decoder.root
            inputs = {core.main_input_name: given.pop(core.main_input_name)}
            if core.main_input_name == "input_ids" and "attention_mask" in given:
                inputs["attention_mask"] = given["attention_mask"]
            known = self._encode(inputs)
        states: Tensor = known[0]
        return states

    def _cut(self, part: ChainPart, n_rows: int, n_prompts: int, n_tokens: int) -> list[int]:
        """Rows of each microbatch: whole prompts, whose beams stay together.

        By default one for each rank, as far as each has tokens enough that two take longer than one.
        """
        most = self._peers.n_ranks if part.chain.overlaps else 1
        wanted = self._asked or max(1, min(most, n_tokens // TOKENS_OF_A_PIECE))
        per_prompt = n_rows // n_prompts if n_rows % n_prompts == 0 else n_rows
        n_units = n_rows // per_prompt
        n = min(wanted, n_units)
        return [per_prompt * (n_units * (m + 1) // n - n_units * m // n) for m in range(n)]

    # -- every rank ---------------------------------------------------------------------------------

    def _serve(self) -> Any:
        """Run this rank's layers in each forward that the choosing rank tells of, until it is through."""
        while True:
            self._peers.position.waits_for = self._layout.driver
            word, *rest = self._share(None)
            self._peers.position.waits_for = -1
            if word == "encode":
                self._serve_encoder(*rest)
            elif word == "forward":
                self._serve_decoder(*rest)
            elif word == "failed":
                self.failure = StepError(f"rank {self._layout.driver}, choosing tokens: {rest[0]}")
                return None
            else:
                return _output(*rest)

    def _serve_encoder(self, given: dict[str, Any], rows: list[int]) -> None:
        assert self._encoder is not None
        outs = list(self._run(self._encoder, None, given, rows))
        if self._engine.rank == self._encoder.chain.ranks[-1]:
            self._wire.send(torch.cat([out[0] for out in outs]), self._layout.driver)

    def _serve_decoder(
        self,
        given: dict[str, Any],
        rows: list[int],
        is_new: bool | None,
        noted: list[Tensor],
        states: Tensor | None,
    ) -> None:
        """``is_new``: whether caches are to be made first; None where none are used."""
        if is_new:
            self._caches = caches_class()(self._layout.decoder.root)
        caches = None if is_new is None else self._caches
        if caches is not None:
            for beams in noted:
                caches.reorder(beams)
        self._states = self._states if states is None else states
        collections.deque(self._run(self._decoder, caches, given, rows), maxlen=0)

    def _run(
        self, part: ChainPart, caches: Caches | None, given: dict[str, Any], rows: Sequence[int]
    ) -> Iterator[Any]:
        """The forward of each microbatch, as far as it runs here."""
        self._n_forwards += 1
        self._peers.position.index = -1000 - self._n_forwards
        given = {k: v.to(self._engine.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        if caches is not None:
            caches.begin(rows)
        states = self._states if part is self._decoder else None
        start, n = 0, sum(rows)
        for m, size in enumerate(rows):
            piece = {k: _rows(v, n, start, size) for k, v in given.items()}
            if states is not None:
                piece["encoder_outputs"] = _encoded(states[start : start + size])
            if caches is not None:
                piece[cache_name()] = caches.each[m]
            with part.standing_in():
                made = part.forward(**piece)
            yield made
            start += size
        self._wire.flush()


def _pieces(n_microbatches: int | None) -> int | None:
    return None if n_microbatches is None else whole("n_microbatches", n_microbatches)


def _check_given(engine: Engine, args: Sequence[Any], kwargs: Mapping[str, Any], n: int | None) -> str:
    """What is to be given alike on every rank, in words: all that is plain; the rest counts on one rank.

    Raises :class:`InputError` for what no rank generates from, or not this one.
    """
    feed, capture = engine.options.feed, engine.capture
    if feed not in (None, engine.rank) and (args or kwargs):
        raise InputError(
            f"rank {engine.rank} was given arguments, but only rank {feed} feeds this pipeline; call "
            "generate() without any here"
        )
    config: Any = kwargs.get("generation_config")
    _check_taken(kwargs)
    _check_taken(_settings(config))
    if capture.model.training and any(op.is_random for op in capture.ops.compute):
        raise InputError(
            f"{capture.ops.model} is in training mode, and dropout would draw other numbers than in one "
            "process; call pipe.eval() before generate()"
        )
    if feed is not None:
        return ""
    told = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    given = {**told, **kwargs, "n_microbatches": _pieces(n)}
    return ", ".join(f"{k}={v}" for k, v in sorted(given.items()) if isinstance(v, (str, int, float)))


def _check_taken(given: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` for what generating stage by stage does not do."""
    for name in NOT_TAKEN:
        value = given.get(name)
        if value and not (name == "guidance_scale" and value == 1):
            raise InputError(f"generate stage by stage does not take {name}; leave it out, or {INSTEAD}")


def _settings(config: Any) -> dict[str, Any]:
    """Those of a GenerationConfig; what kind of cache it asks for changes no token."""
    found = {name: getattr(config, name, None) for name in NOT_TAKEN}
    return {name: value for name, value in found.items() if name != "cache_implementation"}


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Of the values, alike wherever they are."""
    plain = (accelerator.raw(t.detach().cpu().contiguous()) for t in tensors)
    return zlib.crc32(b"".join(t.numpy().tobytes() for t in plain))


def _rows(value: Any, n: int, start: int, size: int) -> Any:
    """A microbatch's rows of what has a row for each sequence."""
    is_whole = not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != n
    return value if is_whole else value[start : start + size]


def _encoded(states: Tensor) -> Any:
    """States as an encoder gives them."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=states)


def _output(name: str | None, plain: Any) -> Any:
    """A result as the choosing rank has it."""
    if name is None:
        return plain
    from transformers.generation import utils

    return getattr(utils, name)(**plain)
