"""Runs a captured graph piece by piece on one microbatch, each piece under an autograd tape of its own.

What is observed while a piece runs (seconds, bytes, kernels) is left to the caller.

A piece is one heavy op, or a run of neighbouring light ones. Running pieces in program order, all tapes
alive, and then their backwards in reverse, is the model's own forward and backward with cuts in between:
each op sees the cache, the allocator and the inputs it sees in training, which an op replayed in a loop
does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from .. import accelerator
from ..errors import CostError, InputError
from ..graph import TensorSpec
from ..torch_private import pytree
from ..tracing.calls.regions import recomputed
from ..tracing.code.checks import expect, expect_nothing
from ..tracing.inputs.structure import flatten, unflatten
from ..tracing.members import registered, submodule
from ..tracing.sizes.dims import resize
from .alike_ops import stood_for

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["Piece", "Replay", "Tape", "leaf", "reads"]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring nodes that run under one tape, the values it takes and the values it gives."""

    nodes: tuple[fx.Node, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.nodes[0].name


@dataclasses.dataclass(slots=True)
class Tape:
    """What a piece's forward leaves for its backward: its outputs, and the detached leaves others take."""

    roots: dict[str, Any]
    leaves: dict[str, Any]
    feed: dict[str, Any]


class Replay:
    """One microbatch's walk through a capture.

    Parameters
    ----------
    capture: the model's capture; its example gives the inputs, cut (or repeated) to ``dims``.
    dims: input dims of the microbatch; those not named keep their example's value.
    device: where to run; ``"meta"`` gives shapes without data.
    training: which form of the graph.

    Use within :func:`standins.stand_ins`, which puts parameters on the device.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        dims: Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        training: bool = True,
    ):
        self.capture, self.ops, self.model = capture, capture.ops, capture.model
        self.device = torch.device(device)
        self.graph: fx.Graph = capture.graphs[training]
        self.dims = {**self.ops.example_dims, **(dims or {})}
        unknown = sorted(set(self.dims) - set(self.ops.example_dims))
        if unknown:
            raise InputError(f"the graph has no dims {unknown}; it has {sorted(self.ops.example_dims)}")
        self.dtype = dtype
        self._modules: dict[str, Callable[..., Any]] = {}
        self._calls: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
        self.skipped = stood_for(self.graph, self.ops, self.dims, runs=self.device.type != "meta")
        self.nodes = tuple(
            n for n in self.graph.nodes if n.op.startswith("call") and n.name not in self.skipped
        )
        self.output = next(n for n in self.graph.nodes if n.op == "output")
        self.failures: dict[str, str] = {}
        self.made_up: dict[str, Any] = {}

    @functools.cached_property
    def unfed(self) -> set[str]:
        """Values that an op which is not run, or has failed, would have used: their gradient is made up."""
        return {
            self.ran(p.name) for n in self.graph.nodes if n.name in self.skipped for p in n.all_input_nodes
        }

    @functools.cached_property
    def _reaching(self) -> frozenset[str]:
        """Executed values that the output depends on, with stand-ins in the place of what is not run.

        What they hang on through an op that has failed is none of them.
        """
        found: set[str] = set()
        ahead = [self.output]
        while ahead:
            for read in ahead.pop().all_input_nodes:
                name = self.ran(read.name)
                if name not in found:
                    found.add(name)
                    ahead += [self.node(name)] * (name not in self.failures)
        return frozenset(found)

    def cut_off(self, env: Mapping[str, Any]) -> list[Tensor]:
        """Tensors that would get their gradient only through ops that are not run.

        Without a gradient of their own, a backward from the outputs would leave out the ops that made them.
        """
        names = sorted(self.unfed - self._reaching)
        leaves = pytree.tree_leaves([env[name] for name in names if name in env])
        tensors = (t for t in leaves if isinstance(t, Tensor) and t.requires_grad and not t.is_leaf)
        return list({id(t): t for t in tensors}.values())

    def over(self) -> dict[str, list[str]]:
        """By node, the values that nothing reads once it has run: what a stage keeps no longer then."""
        kept = {self.ran(n.name) for n in self.output.all_input_nodes} | (self.unfed - self._reaching)
        last = {n.name: n.name for n in self.nodes}
        for node in self.nodes:
            last.update(
                {self.ran(p.name): node.name for p in node.all_input_nodes if p.op.startswith("call")}
            )
        found: dict[str, list[str]] = {}
        for name, reader in last.items():
            if name not in kept:
                found.setdefault(reader, []).append(name)
        return found

    def inputs(self) -> dict[str, Any]:
        """The example's leaves at the microbatch's dims, on the device, by placeholder name."""
        example = self.capture.arguments(*self.capture.example)
        other = {d: n for d in self.ops.dims if (n := self.dims[d.name]) != d.example}
        # not Capture.bind, which holds the model against what it was: stand-ins are in place of its weights
        leaves = resize(self.capture.inputs.bind(self.capture.model, *example), other)
        return {name: self._place(name, leaf) for name, leaf in leaves.items()}

    def _place(self, name: str, leaf: Tensor) -> Tensor:
        leaf = leaf.detach()
        if self.dtype is not None and leaf.is_floating_point():
            leaf = leaf.to(self.dtype)
        spec = self.ops.by_name[name].outputs if name in self.ops.by_name else ()
        leaf = leaf.to(self.device, copy=True)
        return leaf.requires_grad_(bool(spec and spec[0].requires_grad))

    def pieces(self, is_heavy: Callable[[str], bool]) -> tuple[Piece, ...]:
        """The executed nodes cut into pieces: every heavy op alone, light neighbours together."""
        bound = {name: i for i, g in enumerate(self.ops.groups) for name in g}
        parts: list[list[fx.Node]] = []
        alone = True
        for node in self.nodes:
            glued = bool(parts) and bound.get(node.name) == bound.get(parts[-1][-1].name, -1)
            heavy = is_heavy(node.name)
            if not parts or ((heavy or alone) and not glued):
                parts.append([])
            parts[-1].append(node)
            alone = heavy and not glued
        return tuple(self.piece(part) for part in parts)

    def piece(self, nodes: Sequence[fx.Node]) -> Piece:
        """Neighbouring nodes as one piece."""
        inside = {n.name for n in nodes}
        read = (p for n in nodes for p in n.all_input_nodes if p.op != "get_attr")
        takes = dict.fromkeys(p.name for p in read if self.ran(p.name) not in inside)
        stood_for = set(self.skipped.values())
        gives = tuple(
            n.name for n in nodes if n.name in stood_for or any(u.name not in inside for u in n.users)
        )
        return Piece(tuple(nodes), tuple(takes), gives)

    def value(self, node: fx.Node, env: Mapping[str, Any]) -> Any:
        """The value a node reads: computed, stood in for by a like op's, or an attribute of the model."""
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        return env[node.name if node.name in env else self.ran(node.name)]

    def ran(self, name: str) -> str:
        """The op whose value is used for this one's: itself, unless it is not run."""
        return self.skipped.get(name, name)

    def _attribute(self, target: str) -> Any:
        if target == "_device":
            return self.device
        if target in self.capture.constants:
            constant = self.capture.constants[target]
            return constant.to(self.device) if isinstance(constant, Tensor) else self._on_device(constant)
        return registered(self.model, target)

    def call(self, node: fx.Node, env: Mapping[str, Any]) -> Any:
        """Runs one node on the values in ``env``."""
        run = self._calls.get(node.name)
        if run is None:
            run = self._calls[node.name] = self._prepared(node)
        return run(env)

    def _prepared(self, node: fx.Node) -> Callable[[Mapping[str, Any]], Any]:
        """What runs a node on values: nothing that the graph says is looked up while it is timed.

        Checks of the data are not made: values here may stand in for others. On the meta device, what the
        model's own code makes of sizes alone is made there.
        """
        args, kwargs = self._on_device(node.args), self._on_device(node.kwargs)
        target: Any = node.target
        if target in (expect, expect_nothing):
            return lambda env: None
        if node.op == "call_module":
            path = str(target)
            target = self._modules.get(path, submodule(self.model, path))
            if node.meta.get("recompute"):
                target = functools.partial(recomputed, target)
        elif node.op == "call_method":
            target = functools.partial(_method, target)
        elif self.device.type == "meta":
            target = functools.partial(_made_on, self.device, target)

        def run(env: Mapping[str, Any]) -> Any:
            read = functools.partial(self.value, env=env)
            given = fx.node.map_arg(args, read)
            return target(*given, **fx.node.map_arg(kwargs, read)) if kwargs else target(*given)

        return run

    def _on_device(self, tree: Any) -> Any:
        """Device literals follow the device that the replay runs on."""
        return fx.node.map_aggregate(tree, lambda a: self.device if isinstance(a, torch.device) else a)

    @functools.cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose own parameters and buffers the executed nodes read."""
        found: dict[int, nn.Module] = {}
        for node in self.nodes:
            for read in node.all_input_nodes:
                owner = str(read.target).rpartition(".")[0]
                if read.op == "get_attr" and str(read.target) not in (*self.capture.constants, "_device"):
                    value = self._attribute(str(read.target))
                    inside = [*value.modules()] if isinstance(value, nn.Module) else []
                    found.update((id(m), m) for m in (registered(self.model, owner), *inside))
            if node.op == "call_module":
                found.update((id(m), m) for m in submodule(self.model, str(node.target)).modules())
        return tuple(found.values())

    @functools.cached_property
    def _by_name(self) -> Mapping[str, fx.Node]:
        return {n.name: n for n in self.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """The node of an op."""
        return self._by_name[name]

    def has(self, name: str) -> bool:
        """Whether this form of the graph has an op."""
        return name in self._by_name

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters in use now, each once: stand-ins within :func:`stand_ins`."""
        own = (p for m in self.modules for p in m._parameters.values() if p is not None)
        return tuple({id(p): p for p in own if p.requires_grad}.values())

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        """Autocast to ``dtype`` on the replay's device; nothing for None."""
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    @contextlib.contextmanager
    def attempt(self, piece: Piece, env: dict[str, Any]) -> Iterator[None]:
        """Within it an error of the piece is noted, the piece is taken out, and its value made up."""
        try:
            yield
        except InputError:  # what a user gave to count with
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            names = {n.name for n in piece.nodes}
            self.failures.update(dict.fromkeys(sorted(names), reason))
            self.nodes = tuple(n for n in self.nodes if n.name not in names)
            trained = (n for n in piece.nodes if self.ops.by_name[n.name].requires_grad)
            self.unfed.update(self.ran(p.name) for n in trained for p in n.all_input_nodes)
            self.__dict__.pop("_reaching", None)  # is of what has failed before
            if isinstance(error, torch.OutOfMemoryError):
                accelerator.empty_cache(self.device)
            for node in piece.nodes:
                if node.name not in env:
                    self._make_up(node, env)
                else:
                    self.made_up[node.name] = env[node.name]

    def _make_up(self, node: fx.Node, env: dict[str, Any]) -> None:
        """Zeros in the shape of a value where that is known; of one without tensors what the example gave."""
        specs = self.ops.by_name[node.name].outputs
        zeros = [self._zeros(spec) for spec in specs]
        leaves, structure = flatten(node.meta.get("val"))
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        if sum(is_tensor) == len(zeros) > 0:
            made = iter(zeros)
            env[node.name] = unflatten(
                structure, [next(made) if t else v for t, v in zip(is_tensor, leaves, strict=True)]
            )
        elif len(zeros) == 1:
            env[node.name] = zeros[0]
        elif not (zeros or any(is_tensor)):
            env[node.name] = node.meta.get("val")
        else:
            return
        self.made_up[node.name] = env[node.name]

    def _zeros(self, spec: TensorSpec) -> Tensor:
        shape = [int(n) for n in spec.shape_at(self.dims)]
        zeros = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)
        return zeros.requires_grad_(spec.requires_grad)

    def compile(self) -> None:
        """From now on leaf modules run through ``torch.compile``.

        Not while counting: the compiler lets code that a dispatch mode watches run as it is, for good.
        """
        paths = {str(n.target) for n in self.nodes if n.op == "call_module"}
        self._modules = {path: torch.compile(submodule(self.model, path)) for path in paths}
        self._calls.clear()

    def forward(
        self,
        piece: Piece,
        env: dict[str, Any],
        around: Around,
        over: Mapping[str, Sequence[str]] = MappingProxyType({}),
        seen: Callable[[str, Any], object] | None = None,
    ) -> Tape:
        """Runs a piece on ``env`` inside ``around`` and adds the values it gives, detached, to ``env``.

        Of what is ``over`` behind a node nothing is kept that the piece does not give: see :meth:`over`.
        ``seen`` is shown each node's value, by name.
        """
        missing = [name for name in piece.takes if name not in env and self.ran(name) not in env]
        if missing:
            raise CostError(f"takes the value of {', '.join(missing)}, which could not be run")
        local = {name: self._feed(env, name) for name in piece.takes}
        feed = dict(local)
        with around:
            for node in piece.nodes:
                local[node.name] = self.call(node, local)
                if seen is not None:
                    seen(node.name, local[node.name])
                for name in over.get(node.name, ()):
                    if name not in piece.gives:
                        local.pop(name, None)
        roots = {name: local[name] for name in piece.gives}
        leaves = {name: pytree.tree_map_only(Tensor, leaf, value) for name, value in roots.items()}
        env.update(leaves)
        return Tape(roots, leaves, feed)

    def _feed(self, env: Mapping[str, Any], name: str) -> Any:
        value = env[name if name in env else self.ran(name)]
        return pytree.tree_map_only(Tensor, torch.clone, value) if name in self._mutable else value

    @functools.cached_property
    def _mutable(self) -> frozenset[str]:
        """Values whose memory an op writes: autograd forbids that on leaves, so they are copied first."""
        writers = {n.name for n in self.graph.nodes if _writes(n)}
        return frozenset(name for group in self.ops.groups if writers & set(group) for name in group)

    def gradients(self, tape: Tape) -> tuple[list[Tensor], list[Tensor]]:
        """The roots a piece's backward starts from, and the gradient that reached each."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for name, value in tape.roots.items():
            pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(tape.leaves[name]), strict=True)
            for root, leaf in pairs:
                if not isinstance(root, Tensor) or not root.requires_grad:
                    continue
                if leaf.grad is None and name in self.unfed:
                    leaf.grad = torch.ones_like(leaf)
                if leaf.grad is not None:
                    roots.append(root)
                    gradients.append(leaf.grad)
        return roots, gradients

    def seed(self, env: Mapping[str, Any]) -> list[Tensor]:
        """Gives the model's outputs their gradient, and returns the tensors that have one.

        A model that returns its loss gets gradients from there alone, as in training; any other from every
        output that can carry one. Numbers that data decide are not there where there are no data.
        """
        returned = self.output.all_input_nodes
        made = (n for n in returned if n.op == "get_attr" or n.name in env or self.ran(n.name) in env)
        outputs = [self.value(n, env) for n in made]
        tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        losses = [t for t in tensors if t.dim() == 0]
        seeds = list({id(t): t for t in losses or tensors}.values())
        for tensor in seeds:
            if tensor.is_leaf:
                tensor.grad = torch.ones_like(tensor)
        return seeds


Around = contextlib.AbstractContextManager[Any]


def _made_on(device: torch.device, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with device:
        return function(*args, **kwargs)


def reads(node: fx.Node) -> list[fx.Node]:
    """What a node reads, place by place: ops of one signature have as many, though values may be the same."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("setitem", "__setitem__") or bool(node.kwargs.get("inplace"))


def _method(name: str, this: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(this, name)(*args, **kwargs)


def leaf(value: Tensor) -> Tensor:
    """A leaf of its own: the gradient that a pass leaves is nobody else's."""
    return value.detach().requires_grad_(value.requires_grad)
