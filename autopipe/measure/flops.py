"""FLOPs of one kernel from the shapes of its tensors: products, convolutions, attention, recurrences.

Watching kernels run is left to ``kernel_counts``. A multiplication and an addition count as two. What only
moves or combines elements (copies, sums, norms, activations) counts as none: its time is that of its bytes.
What has no formula here is told apart from that, so that a cost is never silently zero; see
:func:`count_flops`.

Sources: torch's flop counter for dense products and convolutions, but for their gradients, which it takes for
those of one group; attention as FlashAttention-2 (Dao, 2023) counts it, 2 products forward and 5 backward,
over the pairs that a causal mask lets through.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry

from ..arguments import brief, called
from ..errors import InputError

__all__ = ["count_flops", "flops_of", "has_formula", "operator_name"]

Formula = Callable[..., int]
"""``formula(*args, out=value, **kwargs)`` with the call's own arguments and what it returned."""

_given: dict[str, Formula] = {}


def count_flops(op: Any, formula: Formula) -> None:
    """From now on calls of a custom operator count as many FLOPs as ``formula`` says.

    Parameters
    ----------
    op: a ``torch.ops`` operator (or overload), what ``torch.library.custom_op`` made, or its name such as
        ``"mylib::experts"``. Its backward is an operator of its own. A formula given here goes before one
        that autopipe has.
    formula: ``formula(*args, out=value, **kwargs)`` → whole number, from the call's arguments and its value.

    Raises :class:`InputError` where ``op`` is no operator; so does whatever counts, once the formula fails or
    says what is no count.

    >>> count_flops("mylib::gated", lambda x, weight, out: 4 * x.shape[0] * weight.numel())
    """
    _given[operator_name(op)] = called("formula", formula, "a function of the call's arguments and out=")


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """FLOPs of one call; None where it may do matrix work and has no formula."""
    name = operator_name(func)
    if name in _given:
        return _said(name, args, kwargs, out)
    if name in _FORMULAS:
        return int(_FORMULAS[name](_named(func, args, kwargs), out))
    packet = getattr(func, "_overloadpacket", func)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    space, _, plain = name.partition("::")
    return 0 if space in ("aten", "prims") and (not _HEAVY.search(plain) or _LIGHT.search(plain)) else None


def has_formula(func: Any) -> bool:
    """Whether there is a formula for an operator."""
    packet = getattr(func, "_overloadpacket", func)
    name = operator_name(func)
    return name in _given or name in _FORMULAS or packet in flop_registry


def _said(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """What a formula that was given says. Raises :class:`InputError` where that is no count, or it fails."""
    try:
        found = _given[name](*args, **kwargs, out=out)
    except Exception as error:
        raise InputError(
            f"the formula that count_flops was given for {name} failed with {type(error).__name__}: {error}; "
            "it is called with the call's own arguments, and out= its value"
        ) from error
    is_number = isinstance(found, numbers.Real) and not isinstance(found, bool)
    if not is_number or not 0 <= found <= _MOST or found != int(found):
        raise InputError(
            f"the formula that count_flops was given for {name} says {brief(found)}; it must return a whole "
            "number of at least 0"
        )
    return int(found)


_MOST = 1 << 62
"""As many as files keep."""

_HEAVY = re.compile(
    r"mm|matmul|conv|linear|attention|multi_head|encoder_layer|rnn|lstm|gru|cdist|^v?dot$|mv$|inverse|solve"
    r"|(^|_)(fft|linalg|cholesky|svd|qr|lu|eig|det|ctc|pdist)|geqrf|orgqr|ormqr"
)
_LIGHT = re.compile(
    r"upsample|fused_(lstm|gru)_cell|comm|_nested|convert|nonlinear|gamma|detach"
    r"|linalg_(vector_norm|cross|check_errors)|fftfreq|fftshift"
)
"""Names among aten's that tell matrix work, and those that only sound like it."""


def operator_name(op: Any) -> str:
    """An operator's name, such as ``aten::mm``; raises :class:`InputError` for what is none."""
    if isinstance(op, str) and re.fullmatch(r"\w+::\w+", op):
        return op
    name = getattr(op, "_qualified_op_name", None) or getattr(op, "_qualname", None)  # packet; custom_op
    if name is None and hasattr(op, "_schema"):
        name = op._schema.name
    if name is None and callable(getattr(op, "name", None)):
        name = op.name()  # a higher-order operator
    if not isinstance(name, str):
        raise InputError(f"op is {op!r}; it must be an operator of torch.ops, or its name like 'mylib::op'")
    return name


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by the names of its schema; those left out have their default."""
    names = [a.name for a in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _grouped(call: dict[str, Any], out: Any) -> int:
    """Rows of one matrix, each with one of several others; or groups of rows of both (gradients)."""
    a, b = call["self"], call["mat2"]
    if a.dim() == 3 and b.dim() == 3:
        return 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
    return 2 * int(math.prod(a.shape[-2:])) * int(b.shape[-1])


def _experts(call: dict[str, Any], out: Any) -> int:
    """transformers' products of experts, where torch has none: rows sorted by expert, ``[rows, in]``."""
    rows, weight = call["input"], call["weight"]
    return 2 * int(rows.shape[0]) * int(weight.shape[1]) * int(weight.shape[2])


def _pairs(call: dict[str, Any]) -> int:
    """Queries times keys that attention goes through, of one head."""
    n, m = int(call["query"].shape[-2]), int(call["key"].shape[-2])
    if not call.get("is_causal"):
        return n * m
    whole = min(n, m)
    return whole * (whole + 1) // 2 + max(0, n - m) * m


def _attention(call: dict[str, Any], out: Any) -> int:
    query, value = call["query"], call["value"]
    heads = int(math.prod(query.shape[:-2]))
    return 2 * heads * _pairs(call) * int(query.shape[-1] + value.shape[-1])


def _attention_backward(call: dict[str, Any], out: Any) -> int:
    """Scores again, and gradients of values, probabilities, queries and keys."""
    query, value = call["query"], call["value"]
    heads = int(math.prod(query.shape[:-2]))
    return 2 * heads * _pairs(call) * int(3 * query.shape[-1] + 2 * value.shape[-1])


def _vectors(call: dict[str, Any], out: Any) -> int:
    """A product whose second factor is a vector."""
    matrix = call.get("mat", call["self"])
    return 2 * int(matrix.numel())


def _addbmm(call: dict[str, Any], out: Any) -> int:
    a, b = call["batch1"], call["batch2"]
    return 2 * int(a.numel()) * int(b.shape[-1])


def _product(call: dict[str, Any], out: Any) -> int:
    a, b = call.get("mat1", call["self"]), call["mat2"]
    return 2 * int(a.numel()) * int(b.shape[-1])


def _recurrent(call: dict[str, Any], out: Any) -> int:
    """A layer of a recurrent net: its input's and its state's products at each step."""
    x = call["input"]
    weights = call.get("weight") or [call[f"weight{i}"] for i in range(1, 3) if f"weight{i}" in call]
    if "weight0" in call:
        weights = [call["weight0"], call["weight1"]]
    return 2 * int(math.prod(x.shape[:-1])) * sum(int(w.numel()) for w in weights if w.dim() == 2)


def _twice(formula: Callable[[dict[str, Any], Any], int]) -> Callable[[dict[str, Any], Any], int]:
    return lambda call, out: 2 * formula(call, out)


def _fourier(call: dict[str, Any], out: Any) -> int:
    """5 N log2 N of a complex transform (Cooley and Tukey), half of that from or to real values."""
    x, is_real = call["self"], not (call["self"].is_complex() and out.is_complex())
    points = out if x.is_complex() else x
    n = math.prod(points.shape[d] for d in call["dim"])
    return round(5 * points.numel() * math.log2(max(n, 2)) / (1 + is_real))


def _convolution_backward(call: dict[str, Any], out: Any) -> int:
    """As many as forward for each of the gradients of input and weight: each weight meets every point."""
    points = call["input" if call["transposed"] else "grad_output"]
    batched = int(points.shape[0]) * math.prod(int(n) for n in points.shape[2:])
    return 2 * batched * int(call["weight"].numel()) * sum(map(bool, call["output_mask"][:2]))


def _distances(call: dict[str, Any], out: Any) -> int:
    """A subtraction and a sum for each coordinate of each distance."""
    points = call["self"] if "self" in call else call["x1"]
    distances = call.get("cdist", call.get("pdist", out))
    return 2 * int(distances.numel()) * int(points.shape[-1])


def _trilinear(call: dict[str, Any], out: Any) -> int:
    """A bilinear layer, ``[rows, in1] × [out, in1, in2] × [rows, in2]``, or one of its gradients."""
    shapes = []
    for i in "123":
        shape = [*call[f"i{i}"].shape]
        for dim in sorted(call[f"expand{i}"]):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * math.prod(map(max, zip(*shapes, strict=True)))


_ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_FORMULAS: dict[str, Callable[[dict[str, Any], Any], int]] = {
    **{f"aten::_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _experts,
    "transformers::grouped_mm_fallback_backward": _twice(_experts),
    "aten::convolution_backward": _convolution_backward,
    "aten::mv": _vectors,
    "aten::addmv": _vectors,
    "aten::dot": _vectors,
    "aten::vdot": _vectors,
    "aten::addbmm": _addbmm,
    "aten::_int_mm": _product,
    "aten::_addmm_activation": _product,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _twice(_recurrent),
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _twice(_recurrent),
    "aten::_fft_r2c": _fourier,
    "aten::_fft_c2r": _fourier,
    "aten::_fft_c2c": _fourier,
    "aten::_cdist_forward": _distances,
    "aten::_cdist_backward": _distances,
    "aten::_pdist_forward": _distances,
    "aten::_pdist_backward": _distances,
    "aten::_euclidean_dist": _distances,
    "aten::_trilinear": _trilinear,
}
