"""Which rank runs what of a causal language model, one decoder layer after another with caches.

Running it that way is left to ``relay``, choosing tokens to ``generation``.

A training stage is one captured forward. Generation runs the model's own code instead, so that caches, masks
and positions are the library's: every rank runs all of ``forward``, with the decoder layers it owns, and
stand-ins for what comes before the first (embeddings), the other layers, and what comes after (norm, head).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import InputError
from ..graph import Op
from ..runtime.engine import Engine

__all__ = ["INSTEAD", "Layout", "Loan", "lay_out", "refuse"]

INSTEAD = "gather the weights with model = pipe.merge() and call model.generate(...) in one process"


@dataclasses.dataclass(frozen=True, slots=True)
class Loan:
    """A parameter or buffer, by name, that ``borrowers`` need for the time of a call and ``source`` has."""

    name: str
    source: int
    borrowers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where a causal model's parts run.

    Attributes
    ----------
    core: the module whose forward goes from tokens to logits.
    layers: its decoder layers in order.
    before, after: the modules with weights that run before the first layer, and after the last.
    chain: the rank that runs ``before``, each layer's, and the rank that runs ``after``.
    loans: what a rank needs for its part of the chain and does not train.
    returns_tuple: whether layers return a tuple that begins with the hidden states.
    """

    core: nn.Module
    layers: tuple[nn.Module, ...]
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    chain: tuple[int, ...]
    loans: tuple[Loan, ...]
    returns_tuple: bool

    @property
    def driver(self) -> int:
        """The rank that has the logits, and chooses the tokens."""
        return self.chain[-1]

    @property
    def overlaps(self) -> bool:
        """Whether a microbatch passes each rank once, so that ranks can work on several at a time."""
        visits = [r for r, previous in zip(self.chain, (-1, *self.chain), strict=False) if r != previous]
        return len(visits) == len(set(visits))


def refuse(model: str, why: str) -> InputError:
    """What stands in the way, and what to do instead."""
    return InputError(f"{model} cannot generate stage by stage: {why}; {INSTEAD}")


def lay_out(engine: Engine) -> Layout:
    """The layout of an engine's model. Raises :class:`InputError` with the remedy for what has none."""
    model, ops = engine.capture.model, engine.capture.ops
    core, path, layers = _decoder(model, ops.model)
    rank_of = {name: engine.plan.placement[s.index] for s in engine.plan.stages for name in s.ops}
    placed = [(i, op) for i, op in enumerate(ops.ops) if op.name in rank_of]
    inside: dict[int, list[int]] = collections.defaultdict(list)
    for i, op in placed:
        if op.module_path.startswith(f"{path}."):
            inside[int(op.module_path[len(path) + 1 :].split(".")[0])].append(i)
    if set(inside) != set(range(len(layers))):
        raise refuse(ops.model, f"not all of the {len(layers)} layers of {path} run in its forward")
    first, last = min(map(min, inside.values())), max(map(max, inside.values()))
    outside = [(i, op) for i, op in placed if not op.module_path.startswith(f"{path}.") and op.parameters]
    for i, op in outside:
        if first < i < last:
            raise refuse(ops.model, f"{op.parameters[0]} is used between its layers")
    before = _units(model, ops.model, path, (op for i, op in outside if i < first))
    after = _units(model, ops.model, path, (op for i, op in outside if i > last))
    if set(before) & set(after):
        raise refuse(ops.model, f"{', '.join(set(before) & set(after))} is used before and after its layers")
    holders = _holders(engine)
    groups = [before, *({f"{path}.{i}": layer} for i, layer in enumerate(layers)), after]
    names = [_names(group, holders) for group in groups]
    sizes = {p.name: p.bytes for p in ops.parameters}
    chain = _owners(names, holders, sizes)
    loans = [
        Loan(n, min(holders[n]), (r,))
        for r, own in zip(chain, names, strict=True)
        for n in own
        if r not in holders[n]
    ]
    shared = {
        p: m for p, m in model.named_modules() if m._buffers and not _within(p, (*before, *after, path))
    }
    everyone = range(engine.plan.n_ranks)
    for name in _names(shared, holders, own_only=True):
        loans.append(Loan(name, min(holders[name]), tuple(r for r in everyone if r not in holders[name])))
    return Layout(
        core,
        layers,
        tuple(before.values()),
        tuple(after.values()),
        chain,
        tuple(loan for loan in loans if loan.borrowers),
        _returns_tuple(engine, [op for _, op in placed], path),
    )


def _decoder(model: nn.Module, name: str) -> tuple[nn.Module, str, tuple[nn.Module, ...]]:
    """The module that generates, and its decoder layers with their path in the model."""
    from transformers import GenerationMixin

    core: Any = next((m for m in model.modules() if isinstance(m, GenerationMixin)), None)
    if core is None:
        raise InputError(f"{name} does not generate: it is no model of transformers with a generate method")
    config = core.config
    if config.is_encoder_decoder:
        raise refuse(name, "it has an encoder beside its decoder")
    if not core._supports_default_dynamic_cache():
        raise refuse(name, "it keeps a cache of its own kind")
    n_layers = config.get_text_config(decoder=True).num_hidden_layers
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    if not lists:
        raise refuse(name, f"no list of {n_layers} decoder layers was found in it")
    path, found = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return core, path, tuple(found)


def _units(model: nn.Module, name: str, layers: str, ops: Iterable[Op]) -> dict[str, nn.Module]:
    """The modules that call these ops, by path."""
    found: dict[str, nn.Module] = {}
    for op in ops:
        if f"{layers}.".startswith(f"{op.module_path}.") or not op.module_path:
            raise refuse(name, f"{op.parameters[0]} is used outside of modules that can be passed over")
        found[op.module_path] = model.get_submodule(op.module_path)
    return found


def _holders(engine: Engine) -> Mapping[str, set[int]]:
    """First name of each parameter and buffer → the ranks whose stages have it."""
    first = engine.capture.ops.parameter
    found: dict[str, set[int]] = collections.defaultdict(set)
    for stage in engine.all_stages:
        named = [
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        ]
        for name, _ in named:
            if name in first:
                found[first[name].name].add(stage.rank)
                for other in first[name].names:
                    found[other].add(stage.rank)
    return found


def _names(
    units: Mapping[str, nn.Module], holders: Mapping[str, set[int]], own_only: bool = False
) -> list[str]:
    """The names of what some rank holds of these modules' tensors."""
    found: dict[str, None] = {}
    for path, module in units.items():
        tensors: Iterator[Any] = iter(module._buffers) if own_only else iter(())
        if not own_only:
            tensors = (n for n, _ in (*module.named_parameters(), *module.named_buffers()))
        found |= {f"{path}.{n}".lstrip("."): None for n in tensors if f"{path}.{n}".lstrip(".") in holders}
    return list(found)


def _owners(
    names: list[list[str]], holders: Mapping[str, set[int]], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """For each group of tensors the rank that holds the most of it; for one without, its neighbour's."""
    chain: list[int | None] = []
    for own in names:
        held: collections.Counter[int] = collections.Counter()
        for name in own:
            for rank in holders[name]:
                held[rank] += sizes.get(name, 1)
        most = max(held.values(), default=0)
        near = chain[-1] if chain else None
        best = sorted(r for r, n in held.items() if n == most)
        chain.append(near if near in best or not best else best[0])
    known = next(r for r in chain if r is not None)
    return tuple(known if r is None else r for r in chain)


def _within(path: str, roots: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{root}.") for root in roots)


def _returns_tuple(engine: Engine, ops: Iterable[Op], path: str) -> bool:
    """As the capture saw it: what is made of a whole layer's value is a piece of it."""
    graph = engine.capture.ops
    whole = {f"{path}.{i}" for i in range(len(engine.capture.model.get_submodule(path)))}  # type: ignore[arg-type]
    for op in ops:
        if op.kind == "module" and op.module_path in whole:
            users = [graph.by_name[c] for c in graph.consumers[op.name]]
            if users:
                return all(user.target.endswith("getitem") for user in users)
    return False
