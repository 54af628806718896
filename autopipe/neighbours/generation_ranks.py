"""Which rank runs what of a model that generates: its decoder's layers with caches, and its encoder's if any.

Running it that way is left to ``generation_forward``, choosing tokens to ``generation``.

A training stage is one captured forward. Generation runs the model's own code instead, so that caches, masks
and positions are the library's: every rank runs all of ``forward``, with the layers it owns, and stand-ins
for what comes before the first (embeddings), the other layers, and what comes after (norm, head).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import InputError
from ..graph import Op
from ..runtime.engine import Engine
from ..tracing.members import submodule

__all__ = ["INSTEAD", "Chain", "Layout", "Loan", "lay_out", "refuse"]

INSTEAD = "gather the weights with model = pipe.merge() and call model.generate(...) in one process"


@dataclasses.dataclass(frozen=True, slots=True)
class Loan:
    """A parameter or buffer, by name, that ``borrowers`` need for the time of a call and ``source`` has."""

    name: str
    source: int
    borrowers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Layers that run one after another, with what is around them: a decoder with its head, or an encoder.

    Attributes
    ----------
    root: the module whose forward runs them.
    layers: in order.
    before, after: the modules with weights that run before the first layer, and after the last.
    ranks: the rank that runs ``before``, each layer's, and the rank that runs ``after``.
    """

    root: nn.Module
    layers: tuple[nn.Module, ...]
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    ranks: tuple[int, ...]

    @property
    def overlaps(self) -> bool:
        """Whether a microbatch passes each rank once, so that ranks can work on several at a time."""
        visits = [r for r, previous in zip(self.ranks, (-1, *self.ranks), strict=False) if r != previous]
        return len(visits) == len(set(visits))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where a model's parts run.

    Attributes
    ----------
    decoder: from tokens to logits; its root is what generates.
    encoder: from inputs to the states that the decoder's layers attend to, in a model that has one.
    loans: what a rank needs for its part of a chain and does not train.
    """

    decoder: Chain
    encoder: Chain | None
    loans: tuple[Loan, ...]

    @property
    def driver(self) -> int:
        """The rank that has the logits, and chooses the tokens."""
        return self.decoder.ranks[-1]


def refuse(model: str, why: str) -> InputError:
    """What stands in the way, and what to do instead."""
    return InputError(f"{model} cannot generate stage by stage: {why}; {INSTEAD}")


def lay_out(engine: Engine) -> Layout:
    """The layout of an engine's model. Raises :class:`InputError` with the remedy for what has none."""
    model, ops = engine.capture.model, engine.capture.ops
    core = _core(model, ops.model)
    parts = [_Part(model, ops.model, core, "decoder")]
    if core.config.is_encoder_decoder:
        parts.append(_Part(model, ops.model, core, "encoder"))
    placed = {name for s in engine.plan.stages for name in s.ops}
    bare: dict[str, None] = {}
    for op in ops.ops:
        if op.name in placed and not any(part.takes(op) for part in parts) and op.parameters:
            bare |= dict.fromkeys(_add(parts, op))
    holders = _holders(engine)
    sizes = {p.name: p.bytes for p in ops.parameters}
    chains, loans = [], []
    for part in parts:
        names = [_names(group, holders) for group in part.groups()]
        ranks = _owners(names, holders, sizes)
        chains.append(part.chain(ranks))
        for rank, own in zip(ranks, names, strict=True):
            loans += [Loan(n, min(holders[n]), (rank,)) for n in own if rank not in holders[n]]
    around = [path for part in parts for path in (*part.before, *part.after, part.path)]
    shared = {p: m for p, m in model.named_modules() if m._buffers and not _within(p, around)}
    everyone = range(engine.plan.n_ranks)
    for name in dict.fromkeys((*bare, *_names(shared, holders, own_only=True))):
        loans.append(Loan(name, min(holders[name]), tuple(r for r in everyone if r not in holders[name])))
    needed = tuple(dict.fromkeys(loan for loan in loans if loan.borrowers))
    return Layout(chains[0], chains[1] if len(chains) > 1 else None, needed)


def _core(model: nn.Module, name: str) -> Any:
    """The module that generates."""
    from transformers import DynamicCache, GenerationMixin

    core: Any = next((m for m in model.modules() if isinstance(m, GenerationMixin)), None)
    if core is None:
        raise InputError(f"{name} does not generate: it is no model of transformers with a generate method")
    kept = DynamicCache(config=core.config.get_text_config(decoder=True))
    if not core._supports_default_dynamic_cache() or any(getattr(kept, "is_linear", ())):
        raise refuse(name, "it keeps a cache of its own kind")
    return core


class _Part:
    """A chain in the making: its list of layers, and the modules found around it, by path."""

    def __init__(self, model: nn.Module, name: str, core: Any, kind: str) -> None:
        self._model, self._name = model, name
        has_both = core.config.is_encoder_decoder
        stack = core.get_encoder() if kind == "encoder" else core.get_decoder() if has_both else model
        if has_both and stack is core:
            raise refuse(name, f"no {kind} was found in it")
        self.root = stack if kind == "encoder" else core
        n_layers = None if has_both else core.config.get_text_config(decoder=True).num_hidden_layers
        paths = {id(m): p for p, m in model.named_modules()}
        self.stack = paths[id(stack)] if has_both else None
        lists = [m for m in stack.modules() if isinstance(m, nn.ModuleList)]
        lists = [m for m in lists if n_layers in (None, len(m))]
        if not lists:
            raise refuse(name, f"no list of {n_layers or 'its'} {kind} layers was found in it")
        found = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
        self.path, self.layers = paths[id(found)], tuple(found)
        self.before: dict[str, nn.Module] = {}
        self.after: dict[str, nn.Module] = {}
        self._seen: set[int] = set()

    def takes(self, op: Op) -> bool:
        """Whether an op of the model is in one of the layers; noted where it is."""
        is_inside = op.module_path.startswith(f"{self.path}.")
        if is_inside:
            self._seen.add(int(op.module_path[len(self.path) + 1 :].split(".")[0]))
        return is_inside

    @property
    def has_begun(self) -> bool:
        return bool(self._seen)

    @property
    def has_ended(self) -> bool:
        return len(self._seen) == len(self.layers)

    def is_home_of(self, path: str) -> bool:
        """Whether the path is within the encoder's or the decoder's own module."""
        return self.stack is not None and _within(path, [self.stack])

    def add(self, op: Op) -> None:
        """The module that calls an op beside the layers, which come before it or after."""
        if self.has_begun and not self.has_ended:
            raise refuse(self._name, f"{op.parameters[0]} is used between its layers")
        group = self.after if self.has_begun else self.before
        group[op.module_path] = submodule(self._model, op.module_path)

    def groups(self) -> list[dict[str, nn.Module]]:
        """What is before the layers, each of these and what is after, by path."""
        if not self.has_ended:
            raise refuse(self._name, f"not all of the {len(self.layers)} layers of {self.path} run")
        if set(self.before) & set(self.after):
            twice = ", ".join(set(self.before) & set(self.after))
            raise refuse(self._name, f"{twice} is used before and after its layers")
        each = [{f"{self.path}.{i}": layer} for i, layer in enumerate(self.layers)]
        return [self.before, *each, self.after]

    def chain(self, ranks: tuple[int, ...]) -> Chain:
        return Chain(self.root, self.layers, tuple(self.before.values()), tuple(self.after.values()), ranks)


def _add(parts: Sequence[_Part], op: Op) -> tuple[str, ...]:
    """Note what calls an op beside all layers; where no module below a chain's does, what it reads.

    The encoder runs first: what the decoder's own module does not hold is the encoder's until it ended.
    """
    decoder, encoder = parts[0], parts[1] if len(parts) > 1 else None
    roots = [part.path for part in parts]
    if not op.module_path or any(_within(root, [op.module_path]) for root in roots):
        return op.parameters
    part = decoder
    if encoder is not None and not decoder.is_home_of(op.module_path) and not decoder.has_begun:
        is_known = op.module_path in encoder.before
        its_own = encoder.is_home_of(op.module_path) and not (encoder.has_ended and is_known)
        part = encoder if its_own or not encoder.has_ended else decoder
    part.add(op)
    return ()


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
