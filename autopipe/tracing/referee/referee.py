"""Compares a capture with its model: outputs, gradients, buffers and generators, in both modes.

Making the data is left to ``redraw``; what follows from a difference, to ``capture``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import AutopipeError
from ...graph import Dim
from ..calls.call import Call, Recording
from ..calls.faults import of_models
from ..code.leaves import asking
from ..inputs.arguments import Inputs
from ..inputs.contents import are_told_alike, is_whole
from ..inputs.structure import Spec, flatten
from ..inputs.writes import called
from ..members import parameters_in, submodule
from ..runs.runs import Runs
from ..runs.same_in_eval import Evaluation
from ..sizes import dims as sizing
from ..sizes.rerun import replay
from ..sizes.trials import first_line
from ..sizes.variation import Variation
from ..state.example_data import projected
from ..state.fills import without_fills
from ..state.redraw import redrawn
from ..state.state import draw_alike, generators, seed

__all__ = ["Fault", "Referee"]

_Given = tuple[Sequence[Any], Spec]
"""What a run gives, flat, and what that lies in."""
_Run = Callable[[Mapping[str, Tensor]], _Given]
_DRAWS = "another number of random draws is made"
_MOST_OFF = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-3, torch.complex64: 1e-3}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A difference between graph and model: in which module's own code, and what."""

    path: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Shown:
    """What one run showed: its tensors, the ``rest`` of what it gave and what that lies in, and what it did.

    ``requiring`` tells which of the tensors take gradients; ``leaves`` holds (path, inputs, outputs) of each
    leaf's call, when asked for.
    """

    outputs: list[Tensor]
    requiring: list[bool]
    rest: list[Any]
    spec: Spec
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    drawn: tuple[Any, ...]
    leaves: list[tuple[str, list[Tensor], list[Tensor]]]


class Referee:
    """The runs that a comparison takes. ``start`` puts the model back as it was given, in a mode.

    ``is_asked_for`` tells whether inputs ask for these forms, in a mode, where there are others. ``by_data``
    are the paths of leaves that give tensors of other sizes for other data of the sizes recorded;
    ``has_idle_draws`` tells whether the model draws what nothing goes by, and the graph does not.

    Gradients of one form that serves both modes are those of the same calls in each: they are compared in
    evaluation, at other sizes too, and in training only whether outputs take any.

    Of one that is ``yet_to_evaluate`` it is told whether in evaluation it ``did_as_recorded`` in training, by
    the ``runs`` that it was made by. Which leaves give what ``has_its_sizes`` in evaluation, whatever the
    data, is asked where no size varies.
    """

    def __init__(
        self,
        model: nn.Module,
        forms: Mapping[bool, Recording],
        inputs: Inputs,
        given: Mapping[str, Tensor],
        variation: Variation,
        device: torch.device,
        start: Callable[[bool], None],
        is_asked_for: Callable[[bool, Mapping[str, Tensor]], bool],
        runs: Runs,
        has_its_sizes: Callable[[Call], bool] = lambda leaf: False,
    ) -> None:
        self.is_asked_for, self.runs, self.has_its_sizes = is_asked_for, runs, has_its_sizes
        self.model, self.forms, self.inputs, self.given = model, forms, inputs, given
        self.variation, self.device, self.start = variation, device, start
        self.named = dict(parameters_in(model))
        self.by_data: set[str] = set()
        self.has_idle_draws = self.did_as_recorded = False
        self._knows_gradients = False

    @asking()
    def fault(self) -> Fault | None:
        """The first difference in either mode; None where there is none."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not self.variation.dims:
                self._see_sizes()
            found = self._fault(False, self._sizes()) or self._fault(True, {})
            return found or self._again(False) or self._again(True)

    def faster_without_gradients(self) -> list[str]:
        """The paths of torch's own layers, recorded inside, that may give other outputs where none are asked.

        Then they may take ways of their own in evaluation, as an encoder that leaves out what is padded does,
        which they do not while they are recorded. Empty where the model's outputs are the graph's.
        """
        paths = [p for p in self._open_paths(False) if _is_layer_of_torch(submodule(self.model, p))]
        if not paths or "grad" in self.forms[False].asked:
            return []
        data = (self.given, *(_with_an_end(self.given, filled) for filled in (True, False)))
        return sorted(paths) if any(map(self._is_other_without_gradients, data)) else []

    def _is_other_without_gradients(self, given: Mapping[str, Tensor]) -> bool:
        shown: list[list[Tensor]] = []
        try:
            for run in (self._run_model, functools.partial(self._run_graph, False)):
                self.start(False)
                seed(self.device)
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    shown.append([t for t in run(given)[0] if isinstance(t, Tensor)])
        except of_models():  # whatever it is: the model does not take these data
            return False
        return any(map(_apart, *shown))

    def _see_sizes(self) -> None:
        """Run the graph on data of other signs, to see what sizes leaves give, if any may give others."""
        self.start(False)
        if all(self.has_its_sizes(c) for c in self.forms[False].calls if c.op == "call_module"):
            return
        seed(self.device)
        # whatever it raises: then the model does not take these data
        with contextlib.suppress(Exception), torch.no_grad():
            self._run_graph(False, {name: _turned(t.detach()) for name, t in self.given.items()})

    def _sizes(self) -> dict[Dim, int]:
        """All sizes that may vary, each at another than the example's, where the model decides alike."""
        dims = [d for d in self.variation.dims if not d.packed]
        sizes = {d: sizing.trial_sizes(d)[0] for d in dims if d.name != "batch"}
        sizes |= {d: d.example + 1 for d in dims if d.name == "batch"}
        named = {d.name: sizes.get(d, d.example) for d in self.variation.dims}
        return sizes if all(c.holds(named) for c in self.variation.checks) else {}

    def _fault(self, training: bool, sizes: Mapping[Dim, int]) -> Fault | None:
        if self.forms[True] is not self.forms[False] and self.forms[training].training is not training:
            return None  # the model refuses to train on the example
        for given in self._data(sizes):
            if not self.is_asked_for(training, given):
                continue
            try:
                expected = self._model(training, given)
            except of_models():  # whatever it is: then the model does not take these data
                continue
            return self._judge(training, given, expected)
        return None

    def _again(self, training: bool) -> Fault | None:
        """A difference in a second call, which goes by what the first has left in the leaves."""
        form = self.forms[training]
        if not form.keeps or form.training is not training:
            return None
        given = next(redrawn(self.given, seed=2), self.given)
        try:
            expected = self._second(self._run_model, training, given)
        except of_models():  # whatever it is: then the model takes no second call of these data
            return None
        try:
            got = self._second(functools.partial(self._run_graph, training), training, given)
        except AutopipeError:
            return None
        except of_models() as error:
            return self._placed(training, None, f"in a second call it fails where the model runs: {error}")
        said = "; ".join(filter(None, map(_apart, expected, got)))
        again = self._second(self._run_model, training, given)
        if not said or any(map(_apart, expected, again)):
            return None
        why = "code outside of a layer sets what its next call goes by"
        return self._placed(training, None, f"in a second call an output {said}: {why}")

    def _second(self, run: _Run, training: bool, given: Any) -> list[Tensor]:
        """The outputs of the second of two calls."""
        self.start(training)
        with torch.enable_grad():
            for _ in range(2):
                seed(self.device)
                outputs, _ = run({n: _fresh(t) for n, t in given.items()})
        return [t.detach() for t in outputs if isinstance(t, Tensor)]

    def _data(self, sizes: Mapping[Dim, int]) -> Iterator[Mapping[str, Tensor]]:
        before = self.inputs.as_before()
        if sizes:
            yield from ({**g, **before} for g in redrawn(sizing.resize(self.given, sizes), seed=1))
        yield from ({**g, **before} for g in redrawn(self.given, seed=2))
        if before:
            yield {**self.given, **before}
        yield self.given

    def _judge(self, training: bool, given: Mapping[str, Tensor], expected: _Shown) -> Fault | None:
        mode = "training" if training else "evaluation"
        try:
            got = self._graph(training, given)
            said = _difference(expected, got)
            if said == _DRAWS and expected.drawn[-1] == got.drawn[-1]:  # torch's generators
                self.has_idle_draws |= (is_idle := self._is_idle(training, given, expected))
                said = "" if is_idle else said
        except AutopipeError:
            return None  # the graph itself refuses these data
        except of_models() as error:  # whatever it is, the model does not raise it
            said = f"the captured graph fails where the model runs ({first_line(error)})"
        if not said:
            self._knows_gradients |= self.forms[True] is self.forms[False]
            return None
        try:
            first, second = (self._model(training, given, watched=True) for _ in range(2))
        except of_models() as error:
            return self._placed(training, None, f"it fails when it is called again: {error}")
        if again := _difference(first, second):
            place = _first_apart(first, second)
            if place is not None and place.is_own:
                return None  # a leaf that never answers alike runs in the pipe as it does in the model
            return self._placed(training, place, f"it answers twice differently under equal seeds ({again})")
        try:
            place = _first_apart(first, self._graph(training, given, watched=True))
        except of_models():
            place = None
        return self._placed(training, place, f"in {mode}, on other data than the example, {said}")

    def _is_idle(self, training: bool, given: Mapping[str, Tensor], expected: _Shown) -> bool:
        """Whether the model gives the same whatever it draws from Python's and numpy's generators.

        So do checks of types, which look at an item of a list by chance.
        """

        def run(greatest: bool, tensors: Mapping[str, Tensor]) -> _Given:
            draw_alike(greatest=greatest)
            return self._run_model(tensors)

        try:
            shown = [self._shown(functools.partial(run, g), training, given, False) for g in (False, True)]
        except of_models():  # whatever it is: the model goes by what it draws
            return False
        return all(
            _difference(expected, s) in ("", _DRAWS) and s.drawn[-1] == expected.drawn[-1] for s in shown
        )

    def _placed(self, training: bool, place: _Place | None, said: str) -> Fault:
        """The fault with the module and the line it comes from."""
        calls = self.forms[training].calls
        leaves = [i for i, c in enumerate(calls) if c.op == "call_module"]
        if place is None or place.index >= len(leaves):
            between: Sequence[Call] = calls[leaves[-1] + 1 :] if place is not None and leaves else ()
        else:
            between = calls[leaves[place.index - 1] + 1 if place.index else 0 : leaves[place.index]]
        own = [c for c in between if _is_own(c)]
        inner = next((c.path for c in reversed(own) if c.path), "")
        path = inner or next(self._open_paths(training), "") if place is None else inner
        where = next((c.source for c in reversed(own) if c.path == path and c.source), "")
        name = f"{path or type(self.model).__name__}"
        at = f"{where}: " if where else ""
        return Fault(path, f"{at}the captured graph of {name} is not the model: {said}")

    def _open_paths(self, training: bool) -> Iterator[str]:
        """Modules below the root whose own code was recorded, then those around leaves, the deepest first."""
        calls = self.forms[training].calls
        own = {c.path for c in calls if _is_own(c) and c.path}
        around = {str(c.target).rpartition(".")[0] for c in calls if c.op == "call_module"} - own
        for found in (own, around):
            yield from sorted(filter(None, found), key=lambda p: (-p.count("."), p))

    # ---------------------------------------------------------------- runs

    def _model(self, training: bool, given: Mapping[str, Tensor], watched: bool = False) -> _Shown:
        return self._shown(self._run_model, training, given, watched)

    def _run_model(self, tensors: Mapping[str, Tensor]) -> _Given:
        with asking():
            return flatten(called(self.model, *self.inputs.rebuild(self.model, tensors)))

    def _graph(self, training: bool, given: Mapping[str, Tensor], watched: bool = False) -> _Shown:
        if watched or training or not self.forms[False].yet_to_evaluate:
            return self._shown(functools.partial(self._run_graph, training), training, given, watched)
        seen: list[Evaluation] = []

        def run(tensors: Mapping[str, Tensor]) -> _Given:
            seen.append(self.runs.evaluation())
            result = self._run_graph(False, tensors, seen[0].look)
            seen[0].end()
            return result

        shown = self._shown(run, False, given, watched)
        self.did_as_recorded = self.runs.did_as_recorded(seen[0])
        return shown

    def _run_graph(
        self,
        training: bool,
        tensors: Mapping[str, Tensor],
        too: Callable[[Call, Any], None] = lambda call, value: None,
    ) -> _Given:
        """What the graph gives; each call with its value is shown to ``too`` as well."""
        form = self.forms[training]
        is_as_given = all(t.shape == self.given[n].shape for n, t in tensors.items())

        def look(call: Call, value: Any) -> None:
            too(call, value)
            if is_as_given:
                self._note_sizes(call, value)

        return replay(self.model, form, tensors, self.device, look=look, notes=False).result, form.output

    def _note_sizes(self, call: Call, value: Any) -> None:
        """Note a leaf whose result has other sizes than were recorded."""
        if call.op == "call_module" and _shapes(value) != _shapes(call.value):
            self.by_data.add(call.target)

    def _shown(self, run: _Run, training: bool, given: Any, watched: bool) -> _Shown:
        self.start(training)
        seed(self.device)
        tensors = {n: _fresh(t) for n, t in given.items()}
        paths = {c.target for c in self.forms[training].calls if c.op == "call_module"} if watched else ()
        with torch.enable_grad(), _watching(self.model, paths) as leaves:
            given_out, spec = run(tensors)
            outputs = [t for t in given_out if isinstance(t, Tensor)]
            drawn = generators(self.device)
            gradients = {} if self._knows_gradients else self._gradients(outputs, tensors)
        rebuilt = self.forms[training].rebuilt
        held = ((n, b) for n, b in self.model.named_buffers() if n not in rebuilt)
        moved = ((n, self.named[n]) for n in self.forms[training].moved)
        buffers = {n: t.detach().clone() for n, t in (*held, *moved)}
        rest = [v for v in given_out if not isinstance(v, Tensor)]
        plain, requiring = [t.detach() for t in outputs], [t.requires_grad for t in outputs]
        return _Shown(plain, requiring, rest, spec, gradients, buffers, drawn, leaves)

    def _gradients(
        self, outputs: Sequence[Tensor], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """Of a fixed projection of every output; nothing where the model's backward cannot be asked for."""
        named: dict[str, Tensor] = {n: p for n, p in self.named.items() if p.requires_grad}
        named |= {f"input {n}": t for n, t in tensors.items() if t.requires_grad}
        if not any(t.requires_grad for t in outputs):
            return {}
        return dict(zip(named, projected(outputs, [*named.values()]), strict=True))


def _is_layer_of_torch(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's own, or derived from one; containers are none."""
    layers = (c for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules."))
    return any(not c.__module__.endswith((".container", ".module")) for c in layers)


def _with_an_end(given: Mapping[str, Tensor], filled: bool) -> dict[str, Tensor]:
    """The tensors, of which each with whole numbers or truths has nought or ``filled`` at the end of a row.

    So masks and tokens have that say how long it is.
    """
    out = dict(given)
    for name, tensor in given.items():
        if tensor.ndim > 1 and tensor.numel() and is_whole(tensor):
            out[name] = tensor.clone()
            out[name][0, ..., -1] = filled if tensor.dtype is torch.bool else 0
    return out


def _fresh(tensor: Tensor) -> Tensor:
    """A copy that gradients are asked of, where it can have one."""
    new = tensor.detach().clone()
    return new.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _watching(model: nn.Module, paths: Any) -> Iterator[list[tuple[str, list[Tensor], list[Tensor]]]]:
    """What the modules at ``paths`` take and give meanwhile."""
    seen: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((path, _copies((args, kwargs)), _copies(output)))

        return hook

    handles = [
        submodule(model, p).register_forward_hook(note(p), with_kwargs=True)
        for p in sorted(paths)
        if not isinstance(submodule(model, p), torch.jit.ScriptModule)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _turned(tensor: Tensor) -> Tensor:
    """Numbers of other signs, no numbers where they are whole, other truths."""
    if tensor.dtype is torch.bool:
        return ~tensor
    return torch.zeros_like(tensor) if is_whole(tensor) else -tensor


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in flatten(value)[0] if isinstance(t, Tensor)]


def _copies(value: Any) -> list[Tensor]:
    return [t.detach().clone() for t in flatten(value)[0] if isinstance(t, Tensor)]


# -------------------------------------------------------------------- differences


def _difference(expected: _Shown, got: _Shown) -> str:
    """The first difference in words; "" where there is none."""
    if len(expected.outputs) != len(got.outputs):
        return f"the model gives {len(expected.outputs)} tensors, the graph {len(got.outputs)}"
    for i, (x, y) in enumerate(zip(expected.outputs, got.outputs, strict=True)):
        if said := _apart(x, y):
            return f"output {i} {said}"
    for a, b in zip(expected.rest, got.rest, strict=False):
        if not are_told_alike(a, b):
            return f"the model gives {_short(a)}, the graph {_short(b)}"
    if expected.spec != got.spec:
        return "the model gives what it gives under other names"
    for name, a in expected.gradients.items():
        if said := _apart(a, got.gradients.get(name)):
            return f"the gradient of {name} {said}"
    if not (expected.gradients or got.gradients) and expected.requiring != got.requiring:
        return "other outputs take gradients than the model's"
    for name, buffer in expected.buffers.items():
        if said := _apart(buffer, got.buffers.get(name)):
            return f"buffer {name} {said} afterwards"
    return "" if expected.drawn == got.drawn else _DRAWS


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _apart(a: Any, b: Any) -> str:
    """How a tensor of the graph differs from the model's; "" up to rounding."""
    if a is None or b is None:
        return "" if a is b else f"is {'missing' if b is None else 'there'} and should not be"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
    if a.layout is not torch.strided or a.is_quantized or not a.numel() or torch.equal(a, b):
        return ""
    if is_whole(a):
        return f"differs in {int((a != b).sum())} of {a.numel()} elements"
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return "is finite at other places"
    if not finite.any():
        return ""
    most = _MOST_OFF.get(a.dtype, 5e-2)
    x, y = without_fills(x[finite], y[finite], most)
    scale, off = (float(v.abs().max()) if v.numel() else 0.0 for v in (x, x - y))
    return "" if off <= 1e-6 + most * scale else f"is off by {off:.1e} of {scale:.1e}"


def _is_own(call: Call) -> bool:
    """Whether a call is of an open module's own code, and does not just take a piece of a leaf's result."""
    return call.op in ("call_function", "call_method") and not call.accessor


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The number of the first leaf call that is apart; ``is_own`` where it was given the same."""

    index: int
    is_own: bool


def _first_apart(a: _Shown, b: _Shown) -> _Place | None:
    """Where two runs part, by their leaves; None where only gradients or buffers differ."""
    for i, (x, y) in enumerate(zip(a.leaves, b.leaves, strict=False)):
        if x[0] != y[0] or _differ(x[1], y[1]):
            return _Place(i, False)
        if _differ(x[2], y[2]):
            return _Place(i, True)
    same = len(a.outputs) == len(b.outputs) and not _differ(a.outputs, b.outputs)
    return None if same else _Place(len(a.leaves), False)


def _differ(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) != len(b) or any(map(_apart, a, b))
