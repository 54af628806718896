"""What a call takes and gives: arguments of every kind, and results that are more than tensors."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from .registry import WIDTH, buffers, sequences, trap


@dataclasses.dataclass
class Batch:
    """Arguments in one object."""

    x: Tensor
    scale: float = 2.0
    extra: Any = None


class Knob:
    """A plain object among the arguments."""

    def __init__(self) -> None:
        self.scale = 2.0


KNOB, TABLE, DIALS = Knob(), np.full(WIDTH, 2.0), {"scale": 2.0}


def second_by_keyword(batch: int, length: int, seed: int) -> dict[str, Any]:
    """Keywords alone, some left out where they are their defaults."""
    (x,) = sequences(batch, length, seed)
    return {"x": x} if seed % 2 else {"x": x, "scale": float("2.0"), "kind": "".join(("ta", "nh"))}


@trap(inputs=second_by_keyword)
def defaults_given_or_not(self: Any, x: Tensor, *, scale: float = 2.0, kind: str = "tanh") -> Tensor:
    return self.run(getattr(x * scale, kind)())


def nested(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A structure of everything."""
    (x,) = sequences(batch, length, seed)
    return ({"a": [x, (x * 2, None)], "name": "n", 3: True, "at": {"b": x.sum(-1)}}, 0.5)


@trap(inputs=nested)
def nested_arguments(self: Any, given: Any, scale: float) -> Any:
    first, (second, nothing) = given["a"]
    assert nothing is None
    assert given["name"] == "n"
    assert given[3]
    return self.run(first * scale + second + given["at"]["b"][..., None])


def in_an_object(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A dataclass with a tensor and more."""
    (x,) = sequences(batch, length, seed)
    return (Batch(x, 0.5, ["text", x * 2]),)


@trap(inputs=in_an_object)
def object_as_an_argument(self: Any, batch: Any) -> Tensor:
    return self.run(batch.x * batch.scale + batch.extra[1])


def several(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Three tensors in a row."""
    (x,) = sequences(batch, length, seed)
    return x, x * 2, x + 1


@trap(inputs=several)
def any_number_of_tensors(self: Any, first: Tensor, *rest: Tensor, scale: float = 1.0) -> Tensor:
    return self.run(first + sum(t * i for i, t in enumerate(rest)) * scale)


def of_like_names(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Two tensors in a list, and three more."""
    (x,) = sequences(batch, length, seed)
    return [x, x * 2], x + 1, x - 1, x.sin()


@trap(inputs=of_like_names)
def names_that_differ_by_little(self: Any, x: Any, x_: Tensor, x_1: Tensor, x_1_1: Tensor) -> Tensor:
    return self.run(x[0] + 2 * x[1] + 3 * x_ + 4 * x_1 + 5 * x_1_1)


def of_reserved_names(batch: int, length: int, seed: int) -> dict[str, Any]:
    """Keywords that generated code has for others."""
    (x,) = sequences(batch, length, seed)
    return {"x": x, "device": x * 2, "operator": x + 1, "pytree": x - 1, "form": x.sin()}


@trap(inputs=of_reserved_names)
def names_that_code_has_for_others(
    self: Any, x: Tensor, device: Tensor, operator: Tensor, pytree: Tensor, form: Tensor
) -> Tensor:
    return self.run(x + 2 * device + 3 * operator + 4 * pytree + 5 * form)


def by_name_too(batch: int, length: int, seed: int) -> dict[str, Any]:
    """Keywords that are numbered as arguments in a row are."""
    (x,) = sequences(batch, length, seed)
    return {"x": x, "rest_0": x * 2}


@trap(inputs=by_name_too)
def named_as_one_of_a_row(self: Any, x: Tensor, *rest: Tensor, rest_0: Any = 1.0) -> Tensor:
    return self.run(x + rest_0 + sum(rest))


def defaults_before_others(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A number that is the default, and a tensor behind it."""
    (x,) = sequences(batch, length, seed)
    return x, 2.0, x * 2


@trap(inputs=defaults_before_others)
def any_number_behind_a_default(self: Any, x: Tensor, scale: Any = 2.0, *rest: Tensor) -> Tensor:
    return self.run(x * scale + sum(rest))


@trap(inputs=defaults_before_others)
def position_behind_a_default(self: Any, x: Tensor, scale: Any = 2.0, more: Any = 1.0, /) -> Tensor:
    return self.run(x * scale + more)


def with_a_flag(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A flag, a number and a word that are others in some calls."""
    (x,) = sequences(batch, length, seed)
    return x, seed % 3 == 0, seed % 2, "sin" if seed % 2 else "cos"


@trap("safe", inputs=with_a_flag)
def flags_that_change(self: Any, x: Tensor, is_on: bool, n: int, kind: str) -> Tensor:
    return self.run(getattr(torch, kind)(x) * n if is_on else x)


def with_a_knob(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """An object that is changed between calls."""
    return (*sequences(batch, length, seed), KNOB)


@trap("safe", inputs=with_a_knob, later=lambda m: setattr(KNOB, "scale", KNOB.scale + 1))
def object_changed_between_calls(self: Any, x: Tensor, knob: Any) -> Tensor:
    return self.run(x * knob.scale)


def with_a_numpy_number(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A number of numpy's own that is another in some calls."""
    return (*sequences(batch, length, seed), np.float32(1 + seed % 2))


@trap("safe", inputs=with_a_numpy_number)
def numpy_number_that_changes(self: Any, x: Tensor, scale: Any) -> Tensor:
    return self.run(x * float(scale))


def with_a_python_number_of_numpy(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A number and a word of numpy's that are Python's too, others in some calls."""
    return (*sequences(batch, length, seed), np.float64(1 + seed % 2), np.str_("sin" if seed % 2 else "cos"))


@trap("safe", inputs=with_a_python_number_of_numpy)
def numpy_number_of_python_that_changes(self: Any, x: Tensor, scale: Any, kind: Any) -> Tensor:
    return self.run(getattr(torch, kind)(x) * float(scale))


class Slotted:
    """A number in a slot."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


SLOTTED, LEVELS = Slotted(2.0), bytearray(b"\x02")


def with_a_slotted_knob(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """An object that is changed between calls, where it has slots alone."""
    return (*sequences(batch, length, seed), SLOTTED)


@trap("safe", inputs=with_a_slotted_knob, later=lambda m: setattr(SLOTTED, "scale", SLOTTED.scale + 1))
def slotted_object_changed_between_calls(self: Any, x: Tensor, knob: Any) -> Tensor:
    return self.run(x * knob.scale)


def with_levels(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Bytes that are changed between calls."""
    return (*sequences(batch, length, seed), LEVELS)


@trap("safe", inputs=with_levels, later=lambda m: LEVELS.__setitem__(0, LEVELS[0] + 1))
def bytes_changed_between_calls(self: Any, x: Tensor, levels: Any) -> Tensor:
    return self.run(x * levels[0])


def with_a_table(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A numpy array that is changed between calls."""
    return (*sequences(batch, length, seed), TABLE)


@trap("safe", inputs=with_a_table, later=lambda m: TABLE.__iadd__(1))
def array_changed_between_calls(self: Any, x: Tensor, table: Any) -> Tensor:
    return self.run(x * torch.tensor(table).float() + float(table[0]))


def with_dials(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A dict that is changed between calls."""
    return (*sequences(batch, length, seed), DIALS)


@trap(inputs=with_dials, later=lambda m: DIALS.update(scale=DIALS["scale"] + 1))
def dict_changed_between_calls(self: Any, x: Tensor, dials: Any) -> Tensor:
    return self.run(x * dials["scale"])


def a_list(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """As many tensors as the seed says."""
    (x,) = sequences(batch, length, seed)
    return ([x] * (2 + seed % 2),)


@trap("safe", inputs=a_list)
def list_of_other_length(self: Any, parts: list[Tensor]) -> Tensor:
    return self.run(sum(parts))


def maybe(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A second tensor in some calls alone."""
    (x,) = sequences(batch, length, seed)
    return x, (x * 2 if seed % 2 else None)


@trap("safe", inputs=maybe)
def argument_that_may_be_none(self: Any, x: Tensor, more: Any = None) -> Tensor:
    return self.run(x if more is None else x + more)


def twice(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """One tensor given twice."""
    (x,) = sequences(batch, length, seed)
    return x, x


@trap(inputs=twice)
def one_tensor_given_twice(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(x * y + y)


@trap("safe", inputs=twice)
def asked_whether_it_is_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(x * 2 if x is y else x + y.sin())


def of_all_dtypes(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A tensor of each kind."""
    (x,) = sequences(batch, length, seed)
    z = torch.complex(x, x.flip(1))
    return x, x.double(), (x * 9).int(), x > 0, z, torch.tensor(0.5 + seed), x[:, :0], (x * 9).to(torch.uint8)


@trap(inputs=of_all_dtypes)
def arguments_of_all_dtypes(self: Any, x: Any, d: Any, i: Any, b: Any, z: Any, n: Any, e: Any, u: Any) -> Any:
    total = x + d.float() + i * b + z.abs() + n + e.sum() + u.float()
    return self.run(total), z.conj(), b & (i > 0), e, i // 2


# ------------------------------------------------------------ results


@trap("safe")
def text_of_its_sizes(self: Any, x: Tensor) -> Any:
    return {"out": self.run(x), "said": f"{x.size(0)} rows of {x.size(1)}"}


@trap("safe")
def text_of_its_shape(self: Any, x: Tensor) -> Any:
    return self.run(x), str(tuple(x.shape)), repr(x.shape)


@trap("refused")
def text_of_its_values(self: Any, x: Tensor) -> Any:
    return self.run(x), str(x.detach()[0, 0, 0])


@trap("refused")
def text_of_a_mean(self: Any, x: Tensor) -> Any:
    return self.run(x), f"{x.detach().mean():.3f}"


@trap("safe")
def digits_of_the_batch(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len(str(x.size(0))))


@trap("safe")
def named_by_its_length(self: Any, x: Tensor) -> Any:
    return {x.size(1): self.run(x), f"l{x.size(1)}": x}


@trap()
def sizes_and_numbers(self: Any, x: Tensor) -> Any:
    n = x.size(1)
    return self.run(x), n, n / 4, n > 7, (n * 2, [n // 2]), x.dim(), x.numel()


@trap()
def shape_and_kind(self: Any, x: Tensor) -> Any:
    return {"out": self.run(x), "shape": x.shape, "rest": x.shape[1:], "dtype": x.dtype, "device": x.device}


class Kind(enum.Enum):
    """A kind of result."""

    LONG = "long"
    SHORT = "short"


@trap("safe")
def kind_by_its_length(self: Any, x: Tensor) -> Any:
    return self.run(x), Kind.LONG if x.size(1) > 7 else Kind.SHORT


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A result in slots."""

    out: Tensor
    more: Any = None


@trap("safe")
def frozen_result(self: Any, x: Tensor) -> Any:
    return Frozen(self.run(x), {"x": [x, None, 3]})


@trap("safe")
def result_in_a_namespace(self: Any, x: Tensor) -> Any:
    return types.SimpleNamespace(out=self.run(x), name="n", inner=types.SimpleNamespace(x=x * 2))


@trap("safe")
def result_in_a_distribution(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return torch.distributions.Normal(out, out.exp(), validate_args=False)


@trap("safe")
def result_that_is_packed(self: Any, x: Tensor) -> Any:
    return pack_padded_sequence(self.run(x), torch.full((len(x),), x.size(1)), batch_first=True)


@trap("safe")
def result_that_is_a_function(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return out, lambda y: y + out


@trap(token=lambda: nn.Parameter(torch.ones(WIDTH)), prepare=lambda m: buffers(m, table=torch.arange(WIDTH)))
def weights_as_results(self: Any, x: Tensor) -> Any:
    return self.run(x), self.token, self.table, self.layers[0].weight, self.layers[1].bias.detach()


@trap()
def inputs_as_results(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return x, out, out, x[:, 0], out.transpose(0, 1), [out, {"x": x}]


@trap()
def unlike_containers(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    ordered = collections.OrderedDict([("b", out), ("a", x)])
    return ordered, {1: out, (2, "k"): x, None: 3}, (), [], {}, ((out,),)


@trap("safe")
def as_many_as_it_is_long(self: Any, x: Tensor) -> Any:
    return list(self.run(x).unbind(1))


@trap("safe")
def list_of_what_is_found(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return [out[i] for i in range(len(out)) if x[i].sum() > 0]


@trap()
def result_without_tensors_in_evaluation(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return (out, out.mean()) if self.training else (out, None)


@trap("safe")
def complex_and_sparse_results(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return torch.fft.rfft(out, dim=-1), (out > 0), out.argmax(-1), out.half(), out.sum(), out[:, :0]


@trap("safe")
def only_numbers_in_training(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return {"loss": out.mean(), "n": x.size(0)} if self.training else {"logits": out}


class Absent:
    """Stands for a library that is not installed, and says so whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not installed, so there is no {name}")

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError("not installed")


class Exact:
    """A number in a slot."""

    __slots__ = ("value",)


class Constant(Exact):
    """One that is worked out each time it is asked for."""

    @property
    def value(self) -> Any:
        return (object(), 2.0)


ABSENT, CONSTANT = Absent(), Constant()


@trap()
def library_that_is_not_installed(self: Any, x: Tensor, library: Any = ABSENT) -> Tensor:
    return self.run(x) if x is not None else library.run(ABSENT.head(x))


@trap()
def property_over_a_slot(self: Any, x: Tensor) -> Tensor:
    return self.run(x * CONSTANT.value[1])


class Leads:
    """An object that leads to another."""

    def __init__(self, on: Any) -> None:
        self.on = on


class Scales:
    """An object that is called."""

    def __init__(self) -> None:
        self.by = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


def far_away(value: Any, steps: int = 8) -> Any:
    """A value that an object leads to in several steps."""
    for _ in range(steps):
        value = Leads(value)
    return value


FAR, SCALES, BY = Knob(), Scales(), [2.0]
AT_LAST, CALLS, AROUND = far_away(FAR), Leads(torch.sin), Leads(lambda x: x * BY[0])
IN_A_RING = Leads(FAR)
FAR.back = IN_A_RING  # type: ignore[attr-defined]


def given_too(value: Any) -> Any:
    """Sequences and one more argument."""
    return lambda batch, length, seed: (*sequences(batch, length, seed), value)


def further(model: nn.Module) -> None:
    FAR.scale += 1


def otherwise(model: nn.Module) -> None:
    CALLS.on = torch.cos if CALLS.on is torch.sin else torch.tanh


@trap("safe", inputs=given_too(AT_LAST), later=further)
def object_that_leads_far(self: Any, x: Tensor, held: Any) -> Tensor:
    while isinstance(held, Leads):
        held = held.on
    return self.run(x) * held.scale


@trap("safe", inputs=given_too(IN_A_RING), later=further)
def objects_in_a_ring(self: Any, x: Tensor, held: Any) -> Tensor:
    return self.run(x) * held.on.back.on.scale


@trap("safe", inputs=given_too(CALLS), later=otherwise)
def function_in_an_object(self: Any, x: Tensor, held: Any) -> Tensor:
    return held.on(self.run(x))


@trap("safe", inputs=given_too(AROUND), later=lambda m: BY.__setitem__(0, BY[0] + 1))
def function_around_a_list(self: Any, x: Tensor, held: Any) -> Tensor:
    return held.on(self.run(x))


@trap("safe", inputs=given_too(SCALES), later=lambda m: setattr(SCALES, "by", SCALES.by + 1))
def object_that_is_called(self: Any, x: Tensor, scale: Any) -> Tensor:
    return scale(self.run(x))
