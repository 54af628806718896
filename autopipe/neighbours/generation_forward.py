"""Runs a model's own forward on every rank, handing what each layer gives from its rank to the next one's.

What lies where is left to ``generation_ranks``, choosing tokens to ``generation``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..runtime.data.outputs import share
from ..runtime.engine import Engine
from ..runtime.stage.setup import exchange
from ..torch_private import pytree
from ..tracing.members import registered
from .generation_ranks import Chain, Loan, refuse

__all__ = ["ChainPart", "Forms", "Wire", "lent", "swapped"]

LAG = 4
"""Messages under way before the host waits for the oldest."""

Forms = tuple[tuple[torch.dtype | None, ...] | None, ...]
"""What each layer gives: None for the hidden states alone, else the dtypes of what follows them."""


class Wire:
    """Tensors from rank to rank between steps, in the order in which they are sent."""

    def __init__(self, engine: Engine) -> None:
        assert engine.peers is not None
        self._peers, self._device = engine.peers, engine.device
        self._leaving: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        tensor = tensor.contiguous()
        self._leaving.append((self._peers.group.send(tensor, peer), tensor))
        self._finish(LAG)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        there = torch.empty(shape, dtype=dtype, device=self._device)
        self._peers.position.waits_for = peer
        self._peers.group.wait(self._peers.group.recv(there, peer))
        self._peers.position.waits_for = -1
        return there

    def flush(self) -> None:
        """Wait until all has left."""
        self._finish(0)

    def _finish(self, n_left: int) -> None:
        while len(self._leaving) > n_left:
            work, _ = self._leaving.pop(0)
            self._peers.group.wait(work)


class ChainPart:
    """One rank's part in the forwards of a chain.

    Within :meth:`standing_in` the model's forward runs here with stand-ins for what other ranks run: they
    give values of the right shape that are no number, so that what must not be made of them is noticed.
    """

    def __init__(self, engine: Engine, chain: Chain, wire: Wire) -> None:
        assert engine.peers is not None
        self._engine, self.chain, self._wire, self._peers = engine, chain, wire, engine.peers
        self._model, self._rank, self._device = engine.capture.ops.model, engine.rank, engine.device
        self._shapes: dict[tuple[Any, ...], tuple[torch.Size, torch.dtype]] = {}
        self.forward: Callable[..., Any] = chain.root.forward
        self.forms: Forms = ()
        ends = ((chain.before, chain.ranks[0]), (chain.after, chain.ranks[-1]))
        self._elsewhere = [
            (module, "forward", self._stand_in(module, module.forward))
            for units, rank in ends
            for module in units
            if rank != self._rank
        ]
        self._layers = [
            (layer, "forward", self._layer(i, layer.forward)) for i, layer in enumerate(chain.layers)
        ]

    def standing_in(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model's modules are this rank's or stand-ins."""
        return swapped(*self._layers, *self._elsewhere)

    # -- layers -------------------------------------------------------------------------------------

    def _layer(self, i: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """What runs in the place of layer ``i`` here: itself, between receiving and sending, or nothing."""
        before, here, after = self.chain.ranks[i : i + 3]

        def run(*args: Any, **kwargs: Any) -> Any:
            name, hidden = self._hidden(args, kwargs)
            if i == 0 and before != here:
                if before == self._rank:
                    self._wire.send(hidden, here)
                if here == self._rank:
                    hidden = self._wire.recv(hidden.shape, hidden.dtype, before)
                    args, kwargs = _with_hidden(name, hidden, args, kwargs)
            if here != self._rank:
                self._keep_length(i, hidden, args, kwargs)
                return self._recv(i, hidden, here) if after == self._rank else self._nothing(i, hidden)
            out = own(*args, **kwargs)
            self._check_cache(i, hidden, args, kwargs)
            if after != self._rank:
                self._send(i, out, after)
            return out

        return run

    def _hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Tensor]:
        name = "" if args else "hidden_states"
        hidden = args[0] if args else kwargs.get(name)
        if not isinstance(hidden, Tensor):
            raise refuse(self._model, "its layers do not take the hidden states first")
        return name, hidden

    def _send(self, i: int, out: Any, peer: int) -> None:
        """What a layer gave: where tensors follow the hidden states, their sizes go first."""
        if _form(out) != self.forms[i]:
            raise refuse(self._model, f"layer {i} does not always return the same kinds of values")
        tensors = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        if len(tensors) > 1:
            sizes = [n for x in tensors[1:] for n in (x.ndim, *x.shape, *[0] * (_MOST_AXES - x.ndim))]
            self._wire.send(torch.tensor(sizes, device=self._device), peer)
        for tensor in tensors:
            self._wire.send(tensor, peer)

    def _recv(self, i: int, hidden: Tensor, peer: int) -> Any:
        form = self.forms[i]
        dtypes = [] if form is None else [dtype for dtype in form if dtype is not None]
        sizes: list[list[int]] = []
        if dtypes:
            told = self._wire.recv((len(dtypes), 1 + _MOST_AXES), torch.int64, peer)
            sizes = [row[1 : 1 + row[0]] for row in told.tolist()]
        hidden = self._wire.recv(hidden.shape, hidden.dtype, peer)
        if form is None:
            return hidden
        others = [self._wire.recv(size, dtype, peer) for size, dtype in zip(sizes, dtypes, strict=True)]
        return hidden, *(None if dtype is None else others.pop(0) for dtype in form)

    def _nothing(self, i: int, hidden: Tensor) -> Any:
        """What a layer gives where neither it nor the next one runs."""
        form = self.forms[i]
        return hidden if form is None else (hidden, *(None for _ in form))

    def _keep_length(self, i: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note in the cache how many tokens a layer elsewhere has had: masks and positions go by that."""
        cache = _cache(args, kwargs)
        if cache is not None:
            mark = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
            getattr(cache, "self_attention_cache", cache).update(mark, mark, i)

    def _check_cache(self, i: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        cache = _cache(args, kwargs)
        if cache is not None and cache.get_seq_length(i) < hidden.shape[1]:
            raise refuse(self._model, f"layer {i} does not keep its keys and values under its own number")

    # -- trying it out ------------------------------------------------------------------------------

    def try_out(self, **inputs: Any) -> Any:
        """Run the chain once, each layer on its rank for all, and note what it gives.

        Nothing but the hidden states, and what layers give beside them, may reach layers from weights of
        another rank. Raises :class:`InputError` on every rank for a model that is not so.
        """
        faults: list[str] = []

        def look(i: int, own: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                name, hidden = self._hidden(args, kwargs)
                others = {str(n): v for n, v in enumerate(args) if n or name}
                others |= {key: v for key, v in kwargs.items() if key != name}
                odd = [key for key, v in others.items() if any(map(_is_made_up, pytree.tree_leaves(v)))]
                faults.extend(
                    f"what layer {i} gets as {key} is made with another rank's weights" for key in odd
                )
                args, kwargs = _with_hidden(name, torch.zeros_like(hidden), args, kwargs)
                return self._shared(i, lambda: own(*args, **kwargs))

            return run

        tried = [(m, "forward", look(i, m.forward)) for i, m in enumerate(self.chain.layers)]
        self.forms, made = (), None
        try:
            with swapped(*tried, *self._elsewhere):
                made = self.forward(**inputs)
        except Exception as error:
            faults.append(str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")
        while len(self.forms) < len(self.chain.layers):
            # it failed here; where it goes on, ranks wait for each layer
            with contextlib.suppress(InputError):
                self._shared(len(self.forms), self._give_up)
        found = self._peers.gather(faults[0] if faults else "", str)
        for why in sorted(filter(None, found), key=lambda why: GIVEN_UP in why):
            raise refuse(self._model, why)
        return made

    def _give_up(self) -> None:
        raise InputError(GIVEN_UP)

    def _shared(self, i: int, run: Callable[[], Any]) -> Any:
        """What layer ``i`` gives on its rank, on every rank; :class:`InputError` on all where it fails."""
        told: list[Any] | None = None
        if self.chain.ranks[i + 1] == self._rank:
            try:
                out = run()
                told = ["", isinstance(out, tuple), *(out if isinstance(out, tuple) else (out,))]
            except Exception as error:
                told = [f"layer {i} raises {type(error).__name__}: {error}"]
        word, *values = share(told, self._peers, self.chain.ranks[i + 1], self._device)
        out = None if word else tuple(values[1:]) if values[0] else values[1]
        self.forms = (*self.forms, _form(out))
        if word or not isinstance(values[1], Tensor):
            raise InputError(word or f"layer {i} does not return the hidden states first")
        return out

    # -- what is elsewhere --------------------------------------------------------------------------

    def _stand_in(self, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """Values of the shape that ``module`` gives, and no numbers."""

        def run(*args: Any, **kwargs: Any) -> Any:
            key = (id(module), *map(_kind, pytree.tree_leaves((args, kwargs))))
            if key not in self._shapes:
                self._shapes[key] = self._shape(module, own, args, kwargs)
            shape, dtype = self._shapes[key]
            return torch.full(shape, torch.nan, dtype=dtype, device=self._device)

        return run

    def _shape(
        self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Size, torch.dtype]:
        sizes, named = self._engine.capture.ops.parameter, dict(self._engine.capture.model.named_modules())
        path = next(p for p, m in named.items() if m is module)
        there: dict[int, Tensor] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            spec = sizes.get(f"{path}.{name}")
            shape = tensor.shape if spec is None else spec.shape
            there[id(tensor)] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        back = {id(there[id(t)]): t for t in (*module.parameters(), *module.buffers())}

        def on_meta(value: Any) -> Any:
            return value.to("meta") if isinstance(value, Tensor) else value

        exchange((module,), there)
        try:
            out = own(*map(on_meta, args), **{k: on_meta(v) for k, v in kwargs.items()})
        finally:
            exchange((module,), back)
        if not isinstance(out, Tensor):
            raise refuse(self._model, f"{path} gives more than one tensor")
        return out.shape, out.dtype


_MOST_AXES = 7
GIVEN_UP = "another rank cannot run it so"


def _form(out: Any) -> tuple[torch.dtype | None, ...] | None:
    """The kinds of what a layer gives after the hidden states, or None where it gives these alone."""
    if not isinstance(out, tuple):
        return None
    return tuple(x.dtype if isinstance(x, Tensor) else None for x in out[1:])


def _kind(value: Any) -> Any:
    """What a module's shape may go by."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else repr(value)


def _is_made_up(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _with_hidden(
    name: str, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with other hidden states."""
    return (args, {**kwargs, name: hidden}) if name else ((hidden, *args[1:]), kwargs)


def _cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The cache among a layer's arguments."""
    from transformers import Cache

    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Cache)), None)


@contextlib.contextmanager
def lent(engine: Engine, loans: Sequence[Loan], wire: Wire) -> Iterator[None]:
    """Within it this rank has what it needs of others' weights, as they are now."""
    model, borrowed = engine.capture.model, {}
    for loan in loans:
        there = registered(model, loan.name)
        if hasattr(there, "to_local"):
            raise refuse(engine.capture.ops.model, f"{loan.name} is sharded")
        if engine.rank == loan.source:
            value = there.detach().to(engine.device)
            for peer in loan.borrowers:
                wire.send(value, peer)
        elif engine.rank in loan.borrowers:
            shape = engine.capture.ops.parameter[loan.name].shape
            borrowed[id(there)] = (there, wire.recv(shape, there.dtype, loan.source))
    wire.flush()
    exchange((model,), {i: value for i, (_, value) in borrowed.items()})
    try:
        yield
    finally:
        exchange((model,), {id(value): there for there, value in borrowed.values()})


@contextlib.contextmanager
def swapped(*others: tuple[nn.Module, str, Any]) -> Iterator[None]:
    """Within it each of the modules has this value of its own under a name, in the place of its class's."""
    before = [(module, name, module.__dict__.get(name, _ABSENT)) for module, name, _ in others]
    for module, name, value in others:
        module.__dict__[name] = value
    try:
        yield
    finally:
        for module, name, value in reversed(before):
            if value is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value


_ABSENT = object()
