"""The module of one stage: generated code over the model's own submodules, under their own names.

Working out what each stage computes, takes and gives is left to ``build``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from ..errors import InputError
from ..plans import Plan
from ..torch_private import CALL_HOOK, is_called_plainly
from ..tracing.code.leaves import is_compiled
from ..tracing.graphs.scope import OWN, Scope, twin_of
from .recompute import Block

__all__ = ["HIDDEN", "RECOMPUTED", "Section", "Stage", "StageForm"]

RECOMPUTED = "_recomputed"
"""The method of a stage that runs one of its blocks."""

_counter = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class StageForm:
    """One form of a stage, for one mode and kind of inputs: its fx graph, source and compiled forward.

    ``blocks`` are the parts of it that run again in backward; their sources follow the form's own.
    """

    graph: fx.Graph
    code: str
    forward: Callable[..., tuple[Any, ...]]
    blocks: tuple[Block, ...] = ()

    @classmethod
    def compile(cls, graph: fx.Graph, title: str) -> StageForm:
        """Source and function of a graph whose calls are attributes of ``self``."""
        python = graph.python_code("self")
        # whatever a plan or a class is called, its title stays one comment
        title = "".join(c if c.isprintable() else "?" for c in title)
        code = f"# {title}\n{_index_numbers(python.src.strip())}\n"
        filename = f"<autopipe stage {next(_counter)}>"
        namespace = dict(python.globals)
        exec(compile(code, filename, "exec"), namespace)
        forward = namespace["forward"]
        # tracebacks through generated code show its lines as long as there is such code
        linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
        weakref.finalize(forward.__code__, linecache.cache.pop, filename, None).atexit = False
        return cls(graph, code, forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForm:
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a stage is generated code, which cannot be pickled: pickle the pipe it is of, or the plan, or "
            "save the stage's state_dict"
        )


def _index_numbers(code: str) -> str:
    """``getattr(self.h, "0")`` as a person writes it: ``self.h[0]``."""
    pattern = re.compile(r'getattr\((self[\w.\[\]]*), "(0|[1-9][0-9]*)"\)')
    while pattern.search(code):
        code = pattern.sub(r"\1[\2]", code)
    return code


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """What of a stage one call of it runs, with what that takes and gives.

    ``name`` is ``""`` for all of it. The last stage of a model that mixes rows late has two more: ``body``,
    which runs on microbatches, and ``tail``, which runs on all of them together and has the index after it.
    """

    name: str
    index: int
    rank: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_last: bool


Forms = Mapping[bool, Sequence[StageForm]]
"""By training flag, the forms by number."""


class Stage(Scope):
    """One stage of a pipeline.

    Attributes
    ----------
    index, rank: its place in the plan.
    inputs: names of the values ``forward`` takes, in order: model inputs and ops of earlier stages.
    outputs: names of the ops whose values it returns, in order. The last stage returns the model's flat
        output leaves instead (``is_last``), and its ``outputs`` are empty.
    sections: what may be run of it in one call, by name.
    """

    index: int
    rank: int
    is_last: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sections: Mapping[str, Section]
    _plan: Plan
    _forms: dict[tuple[str, bool], tuple[StageForm, ...]]
    _anchor: Tensor

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        sections: Sequence[tuple[Section, Forms]],
        *,
        device: torch.device,
    ) -> None:
        """``sections`` begin with all of the stage."""
        super().__init__(model)
        self._plan = plan
        whole = sections[0][0]
        self.index, self.rank, self.is_last = whole.index, whole.rank, whole.is_last
        self.inputs, self.outputs = whole.inputs, whole.outputs
        self.sections = {section.name: section for section, _ in sections}
        self._forms = {
            (section.name, flag): tuple(found) for section, forms in sections for flag, found in forms.items()
        }
        self.register_buffer("_anchor", torch.empty(0, device=device), persistent=False)

    def n_forms(self, training: bool) -> int:
        """How many forms it has in a mode."""
        return len(self._forms["", training])

    @functools.cached_property
    def paths(self) -> dict[int, str]:
        """The first name in the model of each of its modules that the stage holds, by id."""
        names = {id(m): n for n, m in twin_of(self).named_modules()}
        return {id(m): names[id(m)] for m in self.modules() if id(m) in names}

    @property
    def is_plain(self) -> bool:
        """Whether nothing in the whole model is compiled code, whose single draws cannot be followed."""
        return not any(getattr(m, CALL_HOOK) or is_compiled(m) for m in twin_of(self).modules())

    @property
    def _device(self) -> torch.device:
        """What generated code names where the model's own code named its device."""
        return self._anchor.device

    def forward(self, *values: Any, form: int = 0, section: str = "") -> tuple[Any, ...]:
        """The stage's values in the order of ``outputs`` (or the model's flat output leaves).

        ``form`` is the number of the form that the model's inputs ask for (:meth:`Capture.form_of`);
        ``section`` what is run, which takes and gives what its :class:`Section` says.
        """
        forms = self._forms[section, self.training]
        if form >= len(forms):
            raise InputError(
                f"inputs of this kind were met after {self._get_name()} was made; make it anew from the pipe"
            )
        return forms[form].forward(self, *values)

    def as_called(self) -> Callable[..., tuple[Any, ...]]:
        """What calling it with nothing but values comes to as it stands now, for many calls in a row.

        Where that is its forward and nothing else, the code of the example's form; else the stage itself.
        """
        if not is_called_plainly(self):
            return self
        return functools.partial(self._forms["", self.training][0].forward, self)

    def _recomputed(self, section: str, training: bool, form: int, block: int, *values: Any) -> Any:
        """What a block of a form makes of what it takes."""
        return self._forms[section, training][form].blocks[block](self, *values)

    @property
    def recomputes(self) -> bool:
        """Whether blocks run again in backward in the mode it is in now."""
        return any(form.blocks for form in self._forms["", self.training])

    @property
    def code(self) -> str:
        """The generated source of the example's form in the mode it is in now."""
        return self._forms["", self.training][0].code

    @property
    def graph(self) -> fx.Graph:
        """The fx graph of the example's form in the mode it is in now."""
        return self._forms["", self.training][0].graph

    @property
    def sources(self) -> tuple[str, ...]:
        """The generated source of every form."""
        return tuple(form.code for forms in self._forms.values() for form in forms)

    def _get_name(self) -> str:
        return f"Stage{self.index}"

    def extra_repr(self) -> str:
        return f"{', '.join(self.inputs)} -> {', '.join(self.outputs) or 'output'}"


HIDDEN = frozenset({*dir(Stage), *Stage.__annotations__, *Scope.__annotations__} - {*OWN, RECOMPUTED})
"""Names under which a stage has something of its own, beside what of the model it has registered."""
