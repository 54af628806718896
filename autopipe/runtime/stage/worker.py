"""Runs the actions of one stage: forward, whole backward, or its input and weight parts.

Splitting the backward is left to ``backward``, the order of actions to ``program``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...stages import Section, Stage, rng
from ...torch_private import backward
from ...tracing.calls.functions import storages
from ...tracing.code.leaves import is_torchs
from ..data.microbatch import Batch
from ..reduce.data_parallel import Replicas
from ..wire.boundary import REQUIRES_GRAD, Edge, flatten
from .backward import Root, WeightWork, backward_input, root_of
from .kept_as_read import kept_as_read
from .offload import offloaded

__all__ = ["Manner", "StepInputs", "Worker"]

NOTHING = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What every worker needs to know of the step under way.

    ``seeds(weights, loss)`` are the gradients that losses like this one start backward with: what each
    microbatch weighs, times the gradient scale. ``syncs`` says that gradients are reduced over ranks at the
    end. ``seed`` fixes the random numbers of the step; None leaves the generators alone. ``outside`` keeps
    Python's and numpy's where stages draw from them. ``tracked`` are the inputs whose gradients are wanted.
    ``outputs_on`` says which ranks are to have outputs: none (``""``), the last, all. ``scale`` is what a
    scaler multiplies losses by, where nothing has to wait to tell.
    """

    batch: Batch
    weights: Sequence[float | Tensor]
    seeds: Callable[[Sequence[float | Tensor], Tensor], Sequence[Tensor]]
    seed: int | None
    grad: bool
    want_loss: bool
    outputs_on: str
    syncs: bool = True
    tracked: frozenset[str] = frozenset()
    scale: float = 1.0
    outside: rng.Outside = dataclasses.field(default_factory=rng.Outside)


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How a section of a stage is run.

    Attributes
    ----------
    loss: that of a microbatch, from the last stage's outputs, the target and the microbatch's number; None
        where that of all is taken instead.
    forward_context: what forwards run in, as autocast.
    recompute: whether a forward keeps its inputs alone, and runs again in backward.
    mutated: the buffers that a forward writes, as (module, name in it).
    is_random: whether any of its ops draws. derives: whether its forward makes gradients itself.
    transforms: whether it does so by transforms of ``torch.func``, which take no hooks on what is saved.
    offloads: whether what autograd keeps is moved to the host's memory meanwhile.
    """

    loss: Callable[[tuple[Any, ...], Any, int], Tensor | None]
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]]
    recompute: bool
    mutated: Sequence[tuple[nn.Module, str]]
    is_random: bool
    derives: bool
    transforms: bool
    offloads: bool


class Worker:
    """One stage at work on microbatches.

    Attributes
    ----------
    stage: the plan's stage. section: what of it is run.
    module: what is called: the stage, or a data-parallel wrapper of it.
    losses, outputs: of the step under way, detached; on the last stage only.
    receivers: the workers of later stages in this process, by stage.
    replicas: how other processes hold the same stage, if any do.
    leaves: of the inputs whose gradients are wanted, those of each microbatch that gather them.
    """

    def __init__(self, stage: Stage, section: Section, edges: Sequence[Edge], manner: Manner) -> None:
        self.stage, self.section = stage, section
        self.module: nn.Module = stage
        self.edges_in = tuple(e for e in edges if e.destination == section.index)
        self.edges_out = tuple(e for e in edges if e.source == section.index)
        received = {name for e in self.edges_in for name in e.names}
        self._own = tuple((i, n) for i, n in enumerate(section.inputs) if n not in received)
        self._named: dict[str, Any] = {"section": section.name} if section.name else {}
        self._loss, self._forward_context = manner.loss, manner.forward_context
        self._recompute, self._mutated, self._is_random = manner.recompute, manner.mutated, manner.is_random
        self._derives, self._transforms = manner.derives, manner.transforms
        self._offloads = manner.offloads and not manner.recompute
        # of what layers of torch's write, as batch norms their statistics, autograd keeps nothing
        own = [held for held in self._mutated if type(held[0]) is nn.Module or not is_torchs(held[0])]
        self._rewritten = [] if manner.recompute else own
        self._flags: dict[Any, tuple[tuple[bool, ...], ...]] = {}
        self.replicas = Replicas(stage)
        self._probe: list[tuple[int, int, str]] | None = None
        self.receivers: dict[int, Worker] = {}

    def begin(self, step: StepInputs) -> None:
        """Forget the last step and take up the next."""
        n = step.batch.n_microbatches
        self._step: StepInputs = step
        self._n_left = n  # microbatches whose weight gradients are still to come
        self.replicas.begin()
        self._is_plain = self.replicas.is_plain
        # what decides, beside what arrives, which outputs require a gradient
        own = self.stage.parameters() if self._recompute else ()
        self._training = self.stage.training, *(p.requires_grad for p in own)
        needs_seed = step.seed is not None and self._is_random
        self._is_bare = (
            not needs_seed
            and self._is_plain
            and self._forward_context is contextlib.nullcontext
            and not self._offloads
            and not self._rewritten
            and not step.batch.forms
            and not self._named
            and not (self._derives and not step.grad)
        )
        self._code = self.stage.as_called() if self.module is self.stage else self.module
        self._scopes: dict[int, rng.Scope] = {}
        self._read: dict[int, list[Tensor | None]] = {}  # buffers, as a forward that runs again found them
        self._looks_ahead = False  # in a forward that runs again
        self.leaves: dict[str, list[Tensor]] = {
            name: [t.detach().requires_grad_() for t in step.batch.leaves[name]]
            for _, name in self._own
            if name in step.tracked
        }
        given = {**step.batch.leaves, **self.leaves}
        # no call has inputs of all kinds
        self._columns = [(i, tuple(given[name])) for i, name in self._own if name in given]
        takes_target = self.section.is_last and step.want_loss
        self._targets: tuple[Any, ...] = tuple(step.batch.targets) if takes_target else ()
        self._values: list[list[Any]] = [[None] * len(self.section.inputs) for _ in range(n)]
        self._roots: list[Tensor | None] = [None] * n
        self._seeds: Sequence[Tensor] = ()
        self._weight_work: list[WeightWork | None] = [None] * n
        self.losses: list[Tensor | None] = [None] * n
        self.outputs: list[list[Any] | None] = [None] * n

    @property
    def step(self) -> StepInputs:
        """The step under way."""
        return self._step

    @property
    def weights(self) -> Sequence[float | Tensor]:
        """What each of the ``losses`` weighs."""
        return self._step.weights

    def end(self) -> None:
        """Drop everything that belongs to a step, so that nothing holds a graph."""
        self._step = None  # type: ignore[assignment]
        self._columns, self._targets, self.leaves = [], (), {}
        self._values, self._roots, self._weight_work, self._scopes = [], [], [], {}
        self._read = {}
        self._seeds = ()
        self.losses, self.outputs = [], []

    def accept(self, edge: Edge, m: int, values: Sequence[Any]) -> None:
        """Put what an edge brought in its places among the inputs of microbatch ``m``."""
        mine = self._values[m]
        for i, value in zip(edge.inputs, values, strict=True):
            mine[i] = value

    def wrap(self, module: nn.Module) -> None:
        """Call ``module``, a data-parallel wrapper, instead of the stage."""
        self.module, self.replicas = module, Replicas(module)

    @property
    def is_replicated(self) -> bool:
        """Whether other processes hold the same stage and average gradients with it."""
        return not self.replicas.is_plain

    def reduce(self) -> None:
        """Reduce gradients over data-parallel replicas, once all microbatches are through."""
        self.replicas.after_step()

    @contextlib.contextmanager
    def probing(self, found: list[tuple[int, int, str]]) -> Iterator[None]:
        """Within it every forward notes (microbatch, stage, what) of a value that is not finite."""
        self._probe = found
        with _unchanged(self._mutated):
            yield
        self._probe = None

    # -- forward ------------------------------------------------------------------------------------

    def forward(self, m: int) -> None:
        """Run microbatch ``m`` through the stage and hand its values to stages in this process."""
        values = self._values[m]
        for i, column in self._columns:
            values[i] = column[m]
        if self._recompute and self._step.grad:
            self._forward_to_forget(values, m)
            return
        outputs = self._run(values, m)
        for edge in self.edges_out:
            self._emit(edge, m, outputs, values, None)
        self._values[m] = []

    def _forward_to_forget(self, values: list[Any], m: int) -> None:
        """Forward that keeps inputs only; the first of its kind learns which outputs require a gradient.

        The loss is left to the one that runs again: it is any Python, which may count its calls.
        """
        arrived = tuple(isinstance(v, Tensor) and v.requires_grad for v in values)
        key = self._step.batch.signature(m), self._training, arrived
        known = self._flags.get(key)
        self._read[m] = _copies(_held(self._mutated))
        self._looks_ahead = True
        with contextlib.nullcontext() if known is None or self._derives else torch.no_grad():
            outputs = self._run(values, m)
        self._looks_ahead = False
        if known is None:
            known = self._flags[key] = self._learn_flags(outputs, values)
        for edge, flags in zip(self.edges_out, known, strict=True):
            self._emit(edge, m, outputs, values, flags)
        self._roots[m] = None

    def _run(self, values: Sequence[Any], m: int) -> tuple[Any, ...]:
        """What the stage gives; the loss and outputs of the last one are kept.

        A forward that makes gradients itself has them enabled where the step makes none.
        """
        if self._is_bare:
            outputs = self._code(*values)
        else:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._draws(m))
                stack.enter_context(self.replicas.around_forward())
                stack.enter_context(self._forward_context())
                stack.enter_context(self._kept_away(values))
                if is_enabled := self._derives and not self._step.grad:
                    stack.enter_context(torch.enable_grad())
                outputs = self.module(*values, **self._options(m))
                if is_enabled:
                    outputs = tuple(v.detach() if isinstance(v, Tensor) else v for v in outputs)
        if self.section.is_last:
            self._keep_last(outputs, m)
        if self._probe is not None:
            self._probe += [(m, self.stage.index, what) for what in self._not_finite(outputs, m)[:1]]
        return outputs

    def _kept_away(self, values: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """What keeps what autograd wants of buffers that are written to as it was.

        Where it is planned, the rest goes into the host's memory, beside weights and what the stage took.
        """
        written = [b for m, name in self._rewritten if (b := m._buffers[name]) is not None]
        if not self._step.grad or not (self._offloads or written):
            return contextlib.nullcontext()
        if self._transforms:
            return _lent(self._rewritten)
        if not self._offloads:
            return kept_as_read(written)

        def staying() -> Iterator[Tensor]:
            kept = (b for b in self.module.buffers() if all(b is not w for w in written))
            yield from (*self.module.parameters(), *kept, *flatten(values)[0])

        return offloaded(self.stage._device, staying)

    @contextlib.contextmanager
    def _around_loss(self) -> Iterator[None]:
        with self._forward_context(), self._kept_away(()):
            yield

    def _options(self, m: int) -> dict[str, Any]:
        """What says which form microbatch ``m`` asks for, and which section is run; nothing where all is."""
        form = self._step.batch.form(m)
        return {**self._named, "form": form} if form else self._named

    def _draws(self, m: int) -> contextlib.AbstractContextManager[Any]:
        """What fixes the random numbers of microbatch ``m``, in forward and where parts of it run again."""
        seed = self._step.seed
        if seed is None or not self._is_random:
            return NOTHING
        if m not in self._scopes:
            stage = self.stage
            self._scopes[m] = rng.Scope(
                seed, m, stage.paths, stage._device, self._step.outside, follow=stage.is_plain
            )
        return self._scopes[m]

    def _keep_last(self, outputs: tuple[Any, ...], m: int) -> None:
        self._keep_outputs(outputs, m)
        if self._step.want_loss and not self._looks_ahead:
            if self._is_bare:
                loss = self._loss(outputs, self._targets[m], m)
            else:
                with self._around_loss():
                    loss = self._loss(outputs, self._targets[m], m)
            self.losses[m] = None if loss is None else loss.detach()
            self._roots[m] = loss if loss is not None and loss.requires_grad else None

    def _keep_outputs(self, outputs: Sequence[Any], m: int) -> None:
        if self._step.outputs_on:
            self.outputs[m] = [x.detach() if isinstance(x, Tensor) else x for x in outputs]

    def _not_finite(self, outputs: tuple[Any, ...], m: int) -> list[str]:
        bad = [f"parameter {n}" for n, p in self.stage.named_parameters() if not _is_finite(p)]
        names = self.section.outputs or ("the model's output",) * len(outputs)
        bad += [n for n, v in zip(names, outputs, strict=True) if not all(map(_is_finite, flatten([v])[0]))]
        loss = self.losses[m]
        return bad if loss is None or _is_finite(loss) else [*bad, "the loss"]

    def _learn_flags(self, outputs: tuple[Any, ...], values: list[Any]) -> tuple[tuple[bool, ...], ...]:
        """Which tensors of each edge require a gradient: a forward without grad mode cannot tell."""
        return tuple(tuple(map(REQUIRES_GRAD, e.pick(outputs, values)[0])) for e in self.edges_out)

    def _emit(
        self,
        edge: Edge,
        m: int,
        outputs: Sequence[Any],
        values: Sequence[Any],
        flags: tuple[bool, ...] | None,
    ) -> None:
        """Hand on what goes along an edge, detached; ``flags`` where grad mode does not tell them."""
        tensors, frame = edge.pick(outputs, values)
        has_grad = self._step.grad
        if flags is None:
            flags = tuple(map(REQUIRES_GRAD, tensors)) if has_grad else (False,) * len(tensors)
        if has_grad and not self._recompute:
            edge.roots[m] = list(map(root_of, itertools.compress(tensors, flags)))
        given = list(map(Tensor.detach, tensors))
        receiver = self.receivers.get(edge.destination)
        if receiver is None:
            edge.outbox[m] = given, frame, flags
        else:
            edge.keep_leaves(m, given, flags)
            receiver.accept(edge, m, given if frame is None else frame.fill(given))

    # -- backward -----------------------------------------------------------------------------------

    def backward(self, m: int) -> None:
        """The whole backward of microbatch ``m``: gradients of parameters and of what arrived."""
        self._n_left -= 1
        if not self._is_plain:
            self.replicas.before_backward(self._n_left == 0 and self._step.syncs)
        roots, grads = self._collect(m)
        if roots and self._is_bare:
            backward(roots, grads)
        elif roots:
            with self._draws(m):
                backward(roots, grads)
        if not self._is_plain:
            self.replicas.after_backward()
        for edge in self.edges_in:
            edge.harvest(m)

    def backward_input(self, m: int) -> None:
        """Only the gradients that earlier stages wait for; the rest stays for :meth:`backward_weight`."""
        roots, grads = self._collect(m)
        leaves = [leaf for edge in self.edges_in for leaf in edge.leaves[m] or ()]
        leaves += [column[m] for column in self.leaves.values()]
        # blocks would run again for every part of a split backward, and what ran again be kept until W
        if roots and not (self._recompute or self.stage.recomputes):
            with self._draws(m):
                self._weight_work[m] = backward_input(roots, grads, leaves)
        elif roots:
            with self._draws(m):
                backward(roots, grads)
        for edge in self.edges_in:
            edge.harvest(m)

    def backward_weight(self, m: int) -> None:
        """What :meth:`backward_input` left of microbatch ``m``."""
        self._n_left -= 1
        work, self._weight_work[m] = self._weight_work[m], None
        if not self._is_plain:
            self.replicas.before_backward(self._n_left == 0 and self._step.syncs)
        if work is not None:
            with self._draws(m):
                work.run()
        if not self._is_plain:
            self.replicas.after_backward()

    def _collect(self, m: int) -> tuple[list[Root], list[Tensor]]:
        if self._recompute:
            self._run_again(m)
        roots: list[Root] = []
        grads: list[Tensor] = []
        loss, self._roots[m] = self._roots[m], None
        if loss is not None:
            roots.append(loss)
            if not self._seeds or self._seeds[m].dtype is not loss.dtype:
                self._seeds = self._step.seeds(self._step.weights, loss)
            grads.append(self._seeds[m])
        for edge in self.edges_out:
            edge.take(m, roots, grads)
        return roots, grads

    def _run_again(self, m: int) -> None:
        """Forward once more, with grad, the same random numbers and buffers; those stay as they are."""
        values, self._values[m] = self._values[m], []
        with _unchanged(self._mutated, self._read.pop(m)):
            outputs = self._run(values, m)
        for edge in self.edges_out:
            tensors, _ = edge.pick(outputs, values)
            edge.roots[m] = [root_of(t) for t in tensors if t.requires_grad]


@contextlib.contextmanager
def _unchanged(
    buffers: Sequence[tuple[nn.Module, str]], values: Sequence[Tensor | None] | None = None
) -> Iterator[None]:
    """Within it the modules read and write ``values`` in the place of these buffers, else copies of them.

    The buffers themselves are not written back: autograd would take that for a change of what it saved.
    """
    kept = _held(buffers)
    lent = _copies(kept) if values is None else values
    _put(buffers, lent)
    try:
        yield
    finally:
        _put(buffers, kept)


@contextlib.contextmanager
def _lent(buffers: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Within it the modules have copies of these buffers, which autograd may keep; they are written back."""
    kept = _held(buffers)
    lent = _copies(kept)
    _put(buffers, lent)
    try:
        yield
    finally:
        for (module, name), buffer, copied in zip(buffers, kept, lent, strict=True):
            if buffer is not None and copied is not None and module._buffers[name] is copied:
                with torch.no_grad():
                    buffer.copy_(copied)
                module._buffers[name] = buffer


def _put(buffers: Sequence[tuple[nn.Module, str]], values: Sequence[Tensor | None]) -> None:
    for (module, name), value in zip(buffers, values, strict=True):
        module._buffers[name] = value


def _held(buffers: Sequence[tuple[nn.Module, str]]) -> list[Tensor | None]:
    return [module._buffers[name] for module, name in buffers]


def _copies(buffers: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies, of which those lie in one memory that do so themselves."""
    places = Counter(place for b in buffers for place in storages(b))
    memo: dict[int, Any] = {}
    is_alone = [all(places[place] == 1 for place in storages(b)) for b in buffers]
    pairs = zip(buffers, is_alone, strict=True)
    return [b if b is None else b.clone() if alone else _copied(b, memo) for b, alone in pairs]


def _copied(buffer: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(buffer) not in memo:
        memo[id(buffer)] = copy.deepcopy(buffer.detach(), memo)
    copied: Tensor = memo[id(buffer)]
    return copied


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
