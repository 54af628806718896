"""Runs a causal model's own forward on every rank, handing the hidden states from each to the next.

What lies where is left to ``causal``, choosing tokens to ``generation``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..runtime.engine import Engine
from ..runtime.stage.setup import exchange
from ..torch_private import pytree
from .causal import Layout, refuse

__all__ = ["Relay"]

LAG = 4
"""Messages under way before the host waits for the oldest."""


class Relay:
    """One rank's part in the forwards of one call of generate.

    Within :meth:`standing_in` the model's forward runs here with stand-ins for what other ranks run: they
    give values of the right shape that are no number, so that what must not be made of them is noticed.
    """

    def __init__(self, engine: Engine, layout: Layout) -> None:
        assert engine.peers is not None
        self._engine, self._layout, self._peers = engine, layout, engine.peers
        self._model, self._rank, self._device = engine.capture.ops.model, engine.rank, engine.device
        self._leaving: list[tuple[Any, Tensor]] = []
        self._shapes: dict[tuple[Any, ...], tuple[torch.Size, torch.dtype]] = {}
        self.forward: Callable[..., Any] = layout.core.forward

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within it the model's modules are this rank's or stand-ins; what it needs is lent to it."""
        with self._borrowed(), contextlib.ExitStack() as stack:
            for i, layer in enumerate(self._layout.layers):
                stack.enter_context(_forward_of(layer, self._layer(i, layer.forward)))
            self._stand_in(stack)
            yield
            self.flush()

    def flush(self) -> None:
        """Wait until all hidden states have left."""
        self._finish(0)

    # -- layers -------------------------------------------------------------------------------------

    def _layer(self, i: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """What runs in the place of layer ``i`` here: itself, between receiving and sending, or nothing."""
        before, here, after = self._layout.chain[i : i + 3]
        ends = i + 1 == len(self._layout.layers)

        def run(*args: Any, **kwargs: Any) -> Any:
            name, hidden = self._hidden(args, kwargs)
            if here != self._rank:
                if i == 0 and before == self._rank:
                    self._send(hidden, here)
                self._keep_length(i, hidden, args, kwargs)
                if ends and after == self._rank:
                    hidden = self._recv(hidden, here)
                return (hidden, None) if self._layout.returns_tuple else hidden
            if before != self._rank:
                hidden = self._recv(hidden, before)
                if name:
                    kwargs[name] = hidden
                else:
                    args = (hidden, *args[1:])
            out = own(*args, **kwargs)
            if isinstance(out, tuple) != self._layout.returns_tuple:
                raise refuse(self._model, f"layer {i} does not return what the others do")
            self._check_cache(i, hidden, args, kwargs)
            if after != self._rank:
                self._send(out[0] if isinstance(out, tuple) else out, after)
            return out

        return run

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Tensor]:
        name = "" if args else "hidden_states"
        hidden = args[0] if args else kwargs.get(name)
        if not isinstance(hidden, Tensor):
            raise refuse(self._model, "its layers do not take the hidden states first")
        return name, hidden

    def try_out(self) -> str:
        """Run the model's forward with no layer in it: why it cannot be relayed, or nothing.

        Nothing but the hidden states may reach layers from weights of another rank.
        """
        found: list[str] = []

        def look(i: int) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                name, hidden = self._hidden(args, kwargs)
                given = {str(n): v for n, v in enumerate(args) if n or name}
                given |= {key: v for key, v in kwargs.items() if key != name}
                for key, value in given.items():
                    leaves = pytree.tree_leaves(value)
                    if any(
                        isinstance(x, Tensor) and x.is_floating_point() and x.isnan().any() for x in leaves
                    ):
                        found.append(f"what layer {i} gets as {key} is made with weights of another rank")
                return (hidden, None) if self._layout.returns_tuple else hidden

            return run

        try:
            with self._borrowed(), contextlib.ExitStack() as stack:
                for i, layer in enumerate(self._layout.layers):
                    stack.enter_context(_forward_of(layer, look(i)))
                self._stand_in(stack)
                tokens = torch.ones(1, 2, dtype=torch.int64, device=self._device)
                self.forward(input_ids=tokens, attention_mask=tokens, use_cache=False)
        except InputError as error:
            found.append(str(error))
        return found[0] if found else ""

    def _stand_in(self, stack: contextlib.ExitStack) -> None:
        layout = self._layout
        for units, rank in ((layout.before, layout.chain[0]), (layout.after, layout.chain[-1])):
            for module in units if rank != self._rank else ():
                stack.enter_context(_forward_of(module, self._elsewhere(module, module.forward)))

    def _keep_length(self, i: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note in the cache how many tokens a layer elsewhere has had: masks and positions go by that."""
        cache = _cache(args, kwargs)
        if cache is not None:
            mark = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
            cache.update(mark, mark, i)

    def _check_cache(self, i: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _cache(args, kwargs)
        if cache is not None and cache.get_seq_length(i) < hidden.shape[1]:
            raise refuse(self._model, f"layer {i} does not keep its keys and values under its own number")

    # -- what is elsewhere --------------------------------------------------------------------------

    def _elsewhere(self, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """Values of the shape that ``module`` gives, and no numbers."""

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            key = (id(module), *((x.shape, x.dtype) for x in inputs))
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

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Within it this rank has what it needs of others' weights, as they are now."""
        model, lent = self._engine.capture.model, {}
        for loan in self._layout.loans:
            path, _, leaf = loan.name.rpartition(".")
            there = getattr(model.get_submodule(path), leaf)
            if hasattr(there, "to_local"):
                raise refuse(self._model, f"{loan.name} is sharded")
            if self._rank == loan.source:
                value = there.detach().to(self._device).contiguous()
                for peer in loan.borrowers:
                    self._send(value, peer)
            elif self._rank in loan.borrowers:
                shape = self._engine.capture.ops.parameter[loan.name].shape
                like = torch.empty(shape, dtype=there.dtype, device=self._device)
                lent[id(there)] = (there, self._recv(like, loan.source))
        self.flush()
        exchange((model,), {i: value for i, (_, value) in lent.items()})
        try:
            yield
        finally:
            exchange((model,), {id(value): there for there, value in lent.values()})

    # -- the wire -----------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, peer: int) -> None:
        tensor = tensor.contiguous()
        self._leaving.append((self._peers.group.send(tensor, peer), tensor))
        self._finish(LAG)

    def _finish(self, n_left: int) -> None:
        while len(self._leaving) > n_left:
            work, _ = self._leaving.pop(0)
            self._peers.group.wait(work)

    def _recv(self, like: Tensor, peer: int) -> Tensor:
        there = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._peers.position.waits_for = peer
        self._peers.group.wait(self._peers.group.recv(there, peer))
        self._peers.position.waits_for = -1
        return there


def _cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache among a layer's arguments."""
    from transformers import Cache

    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Cache)), None)


@contextlib.contextmanager
def _forward_of(module: nn.Module, other: Callable[..., Any]) -> Iterator[None]:
    """Within it ``module`` runs ``other``."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = other
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
