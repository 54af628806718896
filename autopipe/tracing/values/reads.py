"""What the model's Python asks of tensors while it is recorded: sizes, kinds and values, and what it is told.

Which answers may be asked for again at run time is left to ``branches``.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import nn

from ..calls import describe, functions
from ..calls.call import UNSAFE, Call, Depends
from ..calls.likeness import is_twin
from ..calls.perform import Run, ask
from ..code import checks
from ..code.kept import NamesRead
from ..code.position import Position
from ..code.restart import CloseModule
from .branches import Branches, program
from .ledger import Ledger
from .numbers import TensorMethod
from .origin import held_now
from .refs import Ref
from .tracked import Expression, pin, plain, track

__all__ = ["Flag", "Reads"]

Flag = tuple[Callable[[], Any], Any]
_OF_LAYOUT = ("is_contiguous", "stride")
_TAKEN_OVER = torch.utils.dlpack.from_dlpack.__code__
_TORCH = str(pathlib.Path(torch.__file__).parent)


class Reads:
    """Answers the questions of the code that is being recorded.

    ``run`` performs one call outside of the recording; ``sets_grad`` says whether the code itself has set
    the grad mode it is in. ``asked`` tells what of the surroundings the code asked for, and where:
    ``"grad"``, the grad mode, ``"inputs"``, which of the inputs take gradients, and ``"layout"``, how they
    lie; ``dtypes`` whether it asked for what autocast has a say in, ``mode`` whether it asked a module for
    its mode, or set it; ``flags`` are questions to torch and the process, each with how to ask again and the
    answer, attributes ``of_leaves`` among them, which are here by path and name.
    What only goes into attributes ``kept`` for people, none of the ``names_read``, may be read.
    ``met_number`` says that a number in the data was asked for; with ``keeps_numbers`` such numbers stay in
    the graph as long as only torch takes them.
    """

    def __init__(
        self, at: Position, ledger: Ledger, branches: Branches, run: Run, sets_grad: Callable[[], bool]
    ) -> None:
        self.at, self.ledger, self.branches, self.run, self.sets_grad = at, ledger, branches, run, sets_grad
        self.asked: dict[str, str] = {}
        self.dtypes = self.mode = False
        self.keeps_numbers, self.met_number = False, False
        self.names_read: NamesRead | None = None
        self.kept: set[str] = set()
        self.flags: dict[str, Flag] = {}
        self.of_leaves: set[tuple[str, str]] = set()
        self.numbers: list[Call] = []
        self.constants_read: dict[str, list[torch.Tensor]] = {}

    def asks_a_leaf(self, module: nn.Module, name: str, ask: Callable[[], Any]) -> None:
        """The model's own code reads an attribute of a module that stays whole."""
        if not (self.at.is_recorded and self.at.stack):
            return
        path = self.at.modules.get(id(module), "")
        if path and self.at.is_in_leaf(path):
            shown = f"the mode of {path}" if name == "training" else f"{path}.{name}"
            self.flags[shown] = ask, ask()
            self.of_leaves.add((path, name))

    def asks_for_mode(self) -> None:
        """The model's own code asks a module whether it is in training."""
        self.mode |= self.at.is_recorded

    def asks_for_grad_mode(self) -> None:
        """The model's own code asks whether gradients are enabled."""
        if not self.sets_grad():
            self.asked.setdefault("grad", self.at.source())

    def metadata(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A question about a tensor's shape, type or place."""
        result = func(*map(plain, args), **kwargs)
        if name in _OF_LAYOUT and self.at.is_own_code():
            self.layout_asked(args[0])
            if name == "is_contiguous":
                self.contiguity(args[0], kwargs.get("memory_format"))
        tensor = args[0] if args else None
        if name == "grad" and (isinstance(result, torch.Tensor) or self.is_backward_awaited(tensor)):
            self.at.keep_whole(f"{self.at.source()}: .grad of a tensor is read, which only a backward makes")
        if name in functions.CASTING and self.at.is_own_code():
            self.dtypes = True
        if name in functions.REQUIRING and isinstance(tensor, torch.Tensor) and self.at.is_own_code():
            self.gradients_asked(tensor)
        if name in functions.MEMORY and isinstance(tensor, torch.Tensor) and self.at.is_own_code():
            self.told(tensor, "memory")
        if name in functions.PLACES and isinstance(tensor, torch.Tensor) and self.at.is_own_code():
            self.place_asked(tensor, name)
        if name in functions.TEXTS and isinstance(tensor, torch.Tensor):
            self.told(tensor)
        if not isinstance(tensor, torch.Tensor) or name not in functions.SIZES:
            return result
        ref = self.ledger.find(tensor)
        if not self.ledger.extent_depends(ref) & (Depends.SHAPE | Depends.DATA):
            self.ledger.numbers.hold(tensor, ref)
            return result
        if name in ("shape", "size"):
            if isinstance(result, torch.Size):
                return torch.Size([self.ledger.numbers.size(tensor, ref, i, n) for i, n in enumerate(result)])
            axis = plain(args[1] if len(args) > 1 else kwargs["dim"])
            return self.ledger.numbers.size(tensor, ref, axis % tensor.dim(), result)
        if name == "__len__":
            return self.ledger.numbers.size(tensor, ref, 0, result).settle()
        if name == "stride":
            return (
                result if isinstance(result, tuple) else self.tracked_answer("stride", ref, args[1:], result)
            )
        return self.tracked_answer("storage_offset" if name == "storage_offset" else "numel", ref, (), result)

    def told(self, tensor: torch.Tensor, what: str = "text") -> None:
        """A text or bytes are made of a tensor's values: refused where people alone are not told."""
        ref = self.ledger.find(tensor)
        if self.ledger.depends_of(ref) & UNSAFE and not self.at.is_said():
            call = self.ledger.materialise(ref)
            self.at.refuse(call.depends, f"the {what} of {describe.expression(call)}", self.at.source())

    def place_asked(self, tensor: torch.Tensor, name: str) -> None:
        """Where a tensor lies: of an address and of inputs' memory a graph knows nothing."""
        call = self.ledger.materialise(self.ledger.find(tensor))
        given = frozenset().union(*(c.storages for c in self.ledger.calls if c.op == "placeholder"))
        is_an_inputs = bool(functions.storages(tensor) & given)
        if call.depends & Depends.INPUT and (name == "data_ptr" or is_an_inputs) and not self.at.is_said():
            self.at.keep_whole(
                f"{self.at.source()}: {name} of {describe.expression(call)} tells where it lies in memory: "
                "a microbatch lies elsewhere; a clone() lies at the beginning of its own",
                self.at.running(),
            )

    def gradients_asked(self, tensor: torch.Tensor) -> None:
        """Whether a tensor takes gradients follows from the grad mode and from the inputs it is made of."""
        if id(tensor) in self.ledger.names:
            return
        call = self.ledger.materialise(self.ledger.find(tensor))
        if call.op == "get_attr":
            return
        if call.op != "placeholder":  # made in the mode that was in force then, whatever is now
            self.asked.setdefault("grad", self.at.source())
        if call.depends & Depends.INPUT:
            self.asked.setdefault("inputs", self.at.source())

    def layout_asked(self, tensor: torch.Tensor) -> None:
        """How a tensor lies in memory follows from sizes and from how the inputs that it is made of lie."""
        if self.ledger.materialise(self.ledger.find(tensor)).depends & Depends.INPUT:
            self.asked.setdefault("layout", self.at.source())

    def contiguity(self, tensor: torch.Tensor, kind: Any = None) -> None:
        """Whether a tensor lies densely in an order is asked of its sizes and steps, which leaves guards."""
        ref, expected = self.ledger.find(tensor), 1
        if not self.ledger.extent_depends(ref) & Depends.SHAPE:
            return
        is_last = kind in (torch.channels_last, torch.channels_last_3d)
        dims = [*range(tensor.dim())]
        for axis in reversed([0, *dims[2:], 1] if is_last else dims):
            size = self.ledger.numbers.size(tensor, ref, axis, tensor.shape[axis])
            if size == 1:
                continue
            if self.tracked_answer("stride", ref, (axis,), tensor.stride(axis)) != expected:
                break
            expected = expected * size

    def tried(self, call: Call, name: str, args: Any) -> None:
        """An operation within a ``try`` may fail by its data, which is unseen, or by how its tensor lies."""
        may_fail = bool(functions.may_fail(name) and call.depends & UNSAFE)
        if not (may_fail or name == "view") or not any(map(checks.is_tried, self.at.lines())):
            return
        if may_fail:
            self.at.keep_whole(f"{call.source}: {name} may fail by its data, and what follows is unseen")
        self.layout_asked(args[0])
        self.contiguity(args[0])

    def is_backward_awaited(self, tensor: Any) -> bool:
        """Whether the model's own code holds a tensor that may have a gradient by the next call."""
        if id(tensor) not in self.ledger.names:
            known = self.ledger.refs.get(id(tensor), (None, None))[1]
            if not (isinstance(known, Call) and known.op == "placeholder"):
                return False
        return not next(self.at.lines(), "").startswith(_TORCH)

    def tracked_answer(self, method: str, ref: Ref, rest: Any, result: int) -> Any:
        return track(result, Expression(TensorMethod(method), (ref, *rest), result), self.ledger.numbers)

    def read(self, call: Call, name: str, func: Callable[..., Any], actual: Any) -> Any:
        """The model's Python wants a tensor's value."""
        if name == "__dlpack__" and _is_within(_TAKEN_OVER):
            with self.at.hushed:
                return func(*actual[0], **actual[1])
        if name == "tolist" and not actual[0][0].ndim:  # of one number, that
            call.target, name, func = "item", "item", torch.Tensor.item
        is_unsafe = bool(call.depends & UNSAFE) and not self.is_settled(call, name)
        is_check = is_unsafe and name == "__bool__" and self.at.is_check(call.source)
        is_message = name == "__format__" and self.at.is_said()
        if is_unsafe and not is_check and not is_message and self.is_kept():
            with self.at.hushed:
                return func(*actual[0], **actual[1])
        if is_unsafe and not is_check and not is_message:
            if functions.is_one_number(name, actual):
                self.met_number = True
                if self.keeps_numbers and (number := self.data_number(call, name, func, actual)) is not None:
                    return number
            call.reads = frozenset().union(*map(functions.storages, functions.tensors(actual)))
            with self.at.hushed:
                is_meta = self.ledger.device.type == "meta"
                branch = self.branches.read(call, lambda: func(*actual[0], **actual[1]), is_meta)
            if branch is not None:
                return branch.outcome
            self.at.refuse(call.depends, self.describe_read(call, actual), call.source)
        with self.at.hushed:
            if not is_unsafe:  # else the graph checks it, or it goes into a message alone
                self.hold_values(call)
            result = self.answer(call, func, actual)
        if is_check:
            self.ledger.expect(call.args[0], result, call.source)
            return result
        if not call.depends & Depends.SHAPE:
            return result
        if not isinstance(result, (bool, int, float)):
            self.ledger.numbers.hold_sizes(call)
            return result
        is_cast = name in ("__int__", "__float__", "__index__")
        if is_cast:
            self.ledger.numbers.cast(name.strip("_"))
        call.is_size, call.value = True, result
        number = track(result, Expression(None, (), result, ref=self.ledger.add(call)), self.ledger.numbers)
        return pin(number) if is_cast else number  # whoever casts takes Python's own numbers alone

    def is_kept(self) -> bool:
        """Whether what is read of data goes to people alone, or where nothing that calls run reads it."""
        if self.names_read is None or self.ledger.device.type == "meta":
            return False
        if self.at.is_told():
            return True
        if name := self.at.keeps(self.names_read):
            self.kept.add(name)
        return bool(name)

    def hold_values(self, call: Call) -> None:
        """Tensors that a call's value is made of, and no call made, are to hold what they hold now."""
        waiting, seen = [call], {id(call)}
        while waiting:
            for given in waiting.pop().inputs:
                tensor = self.ledger.constants.get(given.target) if given.op == "get_attr" else None
                if isinstance(tensor, torch.Tensor) and self.ledger.is_lasting(tensor):
                    name = f"what the tensor holds whose values {call.source} reads"
                    known = self.constants_read.setdefault(name, [])
                    known += [] if any(tensor is each for each in known) else [tensor]
                    ask = functools.partial(held_now, *known)
                    self.flags[name] = ask, ask()
                if id(given) not in seen:
                    seen.add(id(given))
                    waiting.append(given)

    def is_settled(self, call: Call, name: str) -> bool:
        """Whether a read can come out one way only: values that are made alike are equal."""
        if name == "equal" and len(call.args) == 2 and all(isinstance(a, Call) for a in call.args):
            return not any(c.writes for c in self.ledger.calls) and is_twin(*call.args)
        return functions.is_settled(call)

    def data_number(self, call: Call, name: str, func: Callable[..., Any], actual: Any) -> Any:
        """A number in the data, read again at each run; None where it cannot be followed."""
        if name in ("__int__", "__float__"):
            self.ledger.numbers.cast(name.strip("_"))
        if name != "item" or self.ledger.device.type == "meta":
            return None
        with self.at.hushed:
            call.value = func(*actual[0], **actual[1])
            call.reads = frozenset().union(*map(functions.storages, functions.tensors(actual)))
        call.is_size, call.depends = True, call.depends | Depends.DATA
        self.ledger.numbers.has_data = True
        if not self.at.is_said():
            self.numbers.append(call)
        expression = Expression(None, (), call.value, ref=self.ledger.add(call))
        return track(call.value, expression, self.ledger.numbers)

    def free_number(self, tensor: torch.Tensor, *, as_float: bool = False) -> Any:
        """A number that is an input, read of the tensor that stands for it; here maybe ``as_float``."""
        given = self.ledger.materialise(self.ledger.find(tensor))
        call = Call("call_method", "item", (given,), hint=f"number_{given.name or given.target}")
        with self.at.hushed:
            call.value = float(tensor.item()) if as_float else tensor.item()
        call.reads, call.depends = functions.storages(tensor), given.depends | Depends.NUMBER
        call.is_size = self.ledger.numbers.has_data = True
        expression = Expression(None, (), call.value, ref=self.ledger.add(call))
        return track(call.value, expression, self.ledger.numbers)

    def check_numbers(self) -> None:
        """A number in the data that nothing recorded takes went where it is not seen: an index, a text.

        But for those that people alone are told.

        Raises :class:`CloseModule`.
        """
        taken = {id(c) for call in self.ledger.calls for c in call.inputs}
        taken |= {id(o) for g in self.ledger.numbers.guards.values() for o in g.operands}
        taken |= {id(c) for b in self.branches.found for call in b.calls for c in call.inputs}
        for call in self.numbers:
            if id(call) not in taken:
                shown = describe.expression(call)
                raise CloseModule(
                    call.path,
                    f"{call.source}: Python goes by {shown} ({call.value} here), which is in the data",
                )

    def answer(self, call: Call, func: Callable[..., Any], actual: Any) -> Any:
        """What a read gives; of a meta model by computing what it reads, which sizes alone may decide."""
        calls = program(self.ledger.calls, call) if self.ledger.device.type == "meta" else None
        if calls is None or call.depends & UNSAFE:
            return func(*actual[0], **actual[1])
        with torch.no_grad():
            return ask(calls, self.run)

    def describe_read(self, call: Call, actual: Any) -> str:
        """The value that Python wants, in words: how it is made and, where it is one number, which."""
        with self.at.hushed:
            number = describe.example_of(actual[0][0] if actual[0] else None)
        what = describe.expression(call.args if len(call.args) == 1 else call)
        return what + (f" ({number} here)" if number else "")

    def refuse_bytes(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be pickled: what comes back is not known for it."""
        ref = self.ledger.find(tensor)
        if self.ledger.depends_of(ref) & UNSAFE:
            call = self.ledger.materialise(ref)
            what = f"the bytes of {describe.expression(call)} (pickled)"
            self.at.refuse(call.depends, what, self.at.source())


def _is_within(code: Any) -> bool:
    """Whether one of the functions that run now is of this code."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
