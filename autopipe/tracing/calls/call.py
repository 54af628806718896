"""What a recording is made of: one ``Call`` per node, and which of its sources a value depends on.

Making calls is left to ``recorder``; turning them into fx graphs and ops to ``emit`` and ``opgraph``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..inputs.structure import Spec
from .regions import Region
from .streams import Stream

__all__ = [
    "Branch", "Call", "Depends", "Guard", "Recording", "Setting", "behind", "calls_in", "map_calls",
]  # fmt: skip


class Depends:
    """What a value can change with, as bits of an ``int``: flags of ``enum`` take long to join.

    With SHAPE alone, or nothing, it is safe to read in Python.
    """

    NOTHING = 0
    INPUT = 1
    """the data of the model's inputs"""
    RANDOM = 2
    """random draws"""
    STATE = 4
    """parameters and buffers"""
    SHAPE = 8
    """the sizes of the model's inputs"""
    DATA = 16
    """its very shape depends on data"""
    NUMBER = 32
    """it is a number, and depends on one among the model's inputs"""


UNSAFE = Depends.INPUT | Depends.RANDOM | Depends.STATE | Depends.DATA | Depends.NUMBER


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One recorded node. ``args`` and ``kwargs`` nest other calls and plain constants.

    Attributes
    ----------
    op, target, args, kwargs: as in :class:`torch.fx.Node`.
    hint: what to build the node's name from.
    path: the module whose forward makes the call (for a leaf, the leaf itself).
    source: ``file:line`` in the model's code.
    region: grad mode and autocast, where they differ from those around the model.
    value: its example value with tensors on the meta device.
    accessor: it only takes a piece or a size of an earlier value.
    is_size: its value is a Python number.
    storages: ids of the memory its value lies in; ``reads`` and ``writes`` those of its arguments it touches.
    mutated: names of buffers it writes.
    recompute: the model checkpoints it: a leaf whose inside is computed again in backward.
    keeps: the leaf has kept something of an earlier call of this run, which this one goes by.
    shares: what it changes that others may: random generators of the model's own, what classes hold; by name.
    stream: where its random numbers come from, where it draws any.
    draws_anew: it draws numbers that it cannot have again: of the system, or from a generator made within it.
    is_check: it raises where its argument is not what it was at capture, and gives nothing.
    is_frozen: it gives or holds weights that take no gradient, and could.
    uncounted: the places of tuples, lists and dicts in its value that are read by written places alone.
    frees: ids of the memory of what it is given that it gives back.
    derives: it takes derivatives, also where that is in code that stays whole.
    """

    op: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    hint: str = ""
    path: str = ""
    source: str = ""
    region: Region | None = None
    value: Any = None
    depends: int = Depends.NOTHING
    accessor: bool = False
    is_size: bool = False
    is_random: bool = False
    storages: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    mutated: tuple[str, ...] = ()
    has_effect: bool = False
    name: str = ""
    is_check: bool = False
    recompute: bool = False
    keeps: bool = False
    shares: frozenset[str] = frozenset()
    stream: Stream | None = None
    draws_anew: bool = False
    is_frozen: bool = False
    uncounted: frozenset[tuple[int | str, ...]] = frozenset()
    frees: frozenset[int] = frozenset()
    derives: bool = False

    _inputs: list[Call] | None = None

    @property
    def inputs(self) -> list[Call]:
        """The calls whose values this one takes, each once, in order; found once, so ``take`` others."""
        if self._inputs is None:
            self._inputs = list(dict.fromkeys(calls_in((self.args, self.kwargs))))
        return self._inputs

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the call have other arguments."""
        self.args, self.kwargs, self._inputs = args, kwargs, None

    @property
    def is_pure(self) -> bool:
        """Whether the call may be dropped when nothing uses its value."""
        return self.op != "call_module" and not (
            self.is_random or self.is_check or self.has_effect or self.writes or self.mutated
        )

    @property
    def leaves_more(self) -> bool:
        """Whether the call leaves more than its value: in tensors, in modules, or in what others share."""
        return bool(self.has_effect or self.writes or self.mutated or self.keeps or self.shares or self.frees)


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """A number made from sizes that the model's Python turned into a plain value.

    ``function(*operands)`` gave ``outcome``; operands are the calls that compute them, or plain numbers.
    ``inside`` is the function of the model's code which asks, where that could stay whole instead. One that
    ``stays`` is as captured though other answers seem to do no harm.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    outcome: Any
    path: str
    source: str
    inside: Any = None
    stays: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A value of the inputs that the model's Python read, and may have gone one way or another by.

    ``calls`` make it from the inputs, ``read`` is the last of them; it gave ``outcome``. ``in_function`` says
    that a function which can stay whole reads it; what is not ``is_forceable`` needs other data to come out
    otherwise; what is ``of_setting`` asks for the grad mode, or for gradients or layout of inputs, not for
    their values.
    """

    read: Call
    calls: tuple[Call, ...]
    outcome: Any
    path: str
    source: str
    in_function: bool = False
    is_forceable: bool = True
    of_setting: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The grad mode that a model is called in, and the names of the inputs that take gradients.

    None: those of the example that do.
    """

    grad: bool = True
    requiring: frozenset[str] | None = None

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs, each taking gradients or not."""
        if self.requiring is None:
            return dict(tensors)
        return {
            n: t.detach().requires_grad_(n in self.requiring) if t.is_floating_point() else t
            for n, t in tensors.items()
        }


@dataclasses.dataclass(slots=True)
class Recording:
    """One run of the model: its calls in program order, inputs first; the output call last.

    It holds for inputs whose ``branches`` come out alike, and for surroundings like the ``setting`` as far as
    the code ``asked`` for them: ``"grad"``, the grad mode, ``"inputs"``, which inputs take gradients,
    ``"layout"``, how they lie in memory, each with the line that does; ``dtypes`` tells whether the code
    asked for what autocast has a say in, and ``flags`` are questions to torch and the process, each with how
    to ask again and the answer; ``keeps`` whether a leaf has set, beside buffers, what its own code reads,
    and ``begun`` the leaves whose first call has;
    ``swapped`` are the leaves that ran with other weights than their own, so that their own code is recorded;
    ``left`` are the attributes in which glue leaves what it computes; ``filled`` those of open
    modules, by path and name, in which hooks of leaves put what the leaves gave, or that a call changes and
    no code reads; ``set_first`` those that the run sets before it reads them; ``goes_by_mode`` whether the
    code may do otherwise in the other mode, ``reads_mode`` whether it has asked for the mode; ``carried`` the
    attributes, with the training flag of the calls that leave them, which calls in the other mode go by;
    ``modes`` the training flag, the path and the mode left there of each module that glue sets to a mode;
    ``replaced`` the buffers that glue puts others in the place of, which the calls write to, and ``rebuilt``
    those in whose place it puts others of other sizes, as tables are, which stages leave as they are;
    ``moved`` the parameters that the calls write to otherwise each time, as a moving average of others is;
    ``given`` the inputs it was made on, where those are not the example; ``yet_to_evaluate`` says that it was
    made in training and is taken for that of evaluation too, which whoever judges it is to see. ``program``
    is how it was last run again.
    """

    training: bool
    calls: list[Call]
    output: Spec
    guards: list[Guard]
    constants: dict[str, Any]
    branches: tuple[Branch, ...] = ()
    asked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    setting: Setting = dataclasses.field(default_factory=Setting)
    dtypes: bool = False
    flags: Mapping[str, tuple[Callable[[], Any], Any]] = dataclasses.field(default_factory=dict)
    keeps: bool = False
    begun: frozenset[str] = frozenset()
    left: tuple[str, ...] = ()
    swapped: frozenset[str] = frozenset()
    filled: frozenset[tuple[str, str]] = frozenset()
    set_first: frozenset[tuple[str, str]] = frozenset()
    goes_by_mode: bool = True
    reads_mode: bool = True
    carried: frozenset[tuple[bool, str]] = frozenset()
    modes: frozenset[tuple[bool, str, bool]] = frozenset()
    replaced: frozenset[str] = frozenset()
    rebuilt: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    given: Mapping[str, torch.Tensor] | None = dataclasses.field(default=None, repr=False, compare=False)
    yet_to_evaluate: bool = dataclasses.field(default=False, compare=False)
    program: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def takes_grad_mode(self) -> bool:
        """Whether the recording is to be run with gradients enabled to do what it does."""
        needs = any(c.derives or c.hint == "register_hook" for c in self.calls)
        return self.setting.grad and (needs or "grad" in self.asked)

    def leaves_anything(self, call: Call) -> bool:
        """Whether a call of it may leave something for others, or go by what it has left."""
        return call.leaves_more or call.path in self.begun


_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def behind(call: Call) -> set[Call]:
    """A call and all that it is made of."""
    found, left = {call}, [call]
    while left:
        new = {c for c in left.pop().inputs if c not in found}
        found |= new
        left += new
    return found


def calls_in(value: Any) -> list[Call]:
    """Every call nested in an argument."""
    found: list[Call] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Call]) -> None:
    if isinstance(value, Call):
        found.append(value)
    elif isinstance(value, slice):
        _gather((value.start, value.stop, value.step), found)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in _PLAIN:
                _gather(item, found)


def map_calls(value: Any, function: Callable[[Call], Any]) -> Any:
    """An argument with every call in it replaced."""
    cls = type(value)
    if cls in _PLAIN:
        return value
    if cls is Call:
        return function(value)
    if isinstance(value, (tuple, list)):
        new = [v if type(v) in _PLAIN else map_calls(v, function) for v in value]
        return new if cls is list else cls(new)
    if isinstance(value, dict):
        return {k: map_calls(v, function) for k, v in value.items()}
    if cls is slice:
        return slice(*(map_calls(v, function) for v in (value.start, value.stop, value.step)))
    return value


def meta(value: Any) -> Any:
    """A tensor as a meta tensor of the same shape, strides, dtype and gradient flag; anything else as is."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    except (RuntimeError, NotImplementedError):
        new = torch.empty(value.shape, dtype=value.dtype, device="meta")
    if value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex):
        new.requires_grad_(True)
    return new
