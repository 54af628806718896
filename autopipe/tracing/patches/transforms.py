"""Functions that take functions: ``torch.func``'s transforms, branches and loops, as a recording has them.

What lies in the closures of what they take is found by ``opaque_calls``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...torch_private import CONTROL, GRAD, GRAD_AND_VALUE, JVP, LINEARIZE, LOOPS, VJP, VMAP
from .queries import Maker
from .route import Route

__all__ = ["TRANSFORMS"]


def _grad_of(name: str) -> Maker:
    """``torch.func.grad`` and its like, which take what is given to the function in one piece."""

    def make(route: Route, original: Any) -> Any:
        def impl(func: Any, argnums: Any, has_aux: Any, args: Any, kwargs: Any) -> Any:
            recorder = route.active
            if recorder is None:
                return original(func, argnums, has_aux, args, kwargs)
            return recorder.opaque.mapped(original, func, (argnums, has_aux), (args, kwargs), {}, name)

        return impl

    return make


def _jvp(route: Route, original: Any) -> Any:
    def impl(func: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(func, *args, **kwargs)
        return recorder.opaque.mapped(original, func, (), args, kwargs, "jvp")

    return impl


def _vjp(route: Route, original: Any) -> Any:
    """What is computed, and a function of cotangents that computes it anew, as a graph holds no function."""

    def impl(func: Any, *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
        recorder = route.active
        if recorder is None:
            return original(func, *primals, argnums=argnums, has_aux=has_aux)
        how = argnums, has_aux
        value, pulled = functools.partial(_value, original), functools.partial(_pulled, original)
        made = recorder.opaque.mapped(value, func, how, primals, {}, "vjp")
        if recorder.ledger.calls[-1].is_random:
            recorder.opaque.refuse_function("vjp", " draws at random, and")

        def pull(cotangents: Any, **options: Any) -> Any:
            if (recorder := route.active) is None:
                return pulled(func, *how, cotangents, *primals, **options)
            return recorder.opaque.mapped(pulled, func, how, (cotangents, *primals), options, "vjp")

        return (made[0], pull, made[1]) if has_aux else (made, pull)

    return impl


def _value(original: Any, func: Any, argnums: Any, has_aux: bool, *primals: Any) -> Any:
    made = original(func, *primals, argnums=argnums, has_aux=has_aux)
    return (made[0], made[2]) if has_aux else made[0]


def _pulled(
    original: Any, func: Any, argnums: Any, has_aux: bool, cotangents: Any, *primals: Any, **options: Any
) -> Any:
    return original(func, *primals, argnums=argnums, has_aux=has_aux)[1](cotangents, **options)


def _refused_function(name: str) -> Maker:
    def make(route: Route, original: Any) -> Any:
        def transform(*args: Any, **kwargs: Any) -> Any:
            if (recorder := route.active) is not None:
                recorder.opaque.refuse_function(name)
            return original(*args, **kwargs)

        return transform

    return make


def _applied(name: str) -> Maker:
    """``torch.func.jacrev`` and its like, which give a function that others are called through."""

    def make(route: Route, original: Any) -> Any:
        at_once = functools.partial(_at_once, original)

        def transform(func: Any, *how: Any, **options: Any) -> Any:
            plainly = original(func, *how, **options)

            @functools.wraps(plainly)
            def call(*args: Any, **kwargs: Any) -> Any:
                recorder = route.active
                if recorder is None:
                    return plainly(*args, **kwargs)
                return recorder.opaque.mapped(at_once, func, (how, options), args, kwargs, name)

            return call

        return transform

    return make


def _at_once(original: Any, func: Any, how: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
    return original(func, *how, **options)(*args, **kwargs)


def _cond(route: Route, original: Any) -> Any:
    """A branch as a function, of which the model takes one side: as where Python itself branches."""

    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if route.active is None:
            return original(pred, true_fn, false_fn, operands)
        return (true_fn if pred else false_fn)(*operands)

    return cond


def _looped(name: str) -> Maker:
    """``while_loop`` and its like, which compile the functions that they are given first: kept whole."""
    n_functions = 2 if name == "while_loop" else 1

    def make(route: Route, original: Any) -> Any:
        over = functools.partial(_over, original)

        @functools.wraps(original)
        def loop(*args: Any, **kwargs: Any) -> Any:
            recorder = route.active
            if recorder is None:
                return original(*args, **kwargs)
            if len(args) < n_functions:
                recorder.opaque.refuse_named(name)
            functions, rest = args[:n_functions], args[n_functions:]
            for function in functions:
                recorder.ledger.lifted(function, with_modules=True)  # raises for what reaches the whole model
            with recorder.stepped_aside(), recorder.suspended():  # what compiles looks at both
                return recorder.opaque.mapped(over, functions, (), rest, kwargs, name)

        return loop

    return make


def _over(original: Any, functions: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*functions, *args, **kwargs)


def _vmap(route: Route, original: Any) -> Any:
    def vmap_impl(
        func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        how = (in_dims, out_dims, randomness, chunk_size)
        recorder = route.active
        if recorder is None:
            return original(func, *how, *args, **kwargs)
        return recorder.opaque.mapped(original, func, how, args, kwargs)

    return vmap_impl


TRANSFORMS: tuple[tuple[Any, str, Maker], ...] = (
    (*GRAD, _grad_of("grad")),
    (*GRAD_AND_VALUE, _grad_of("grad_and_value")),
    (*JVP, _jvp),
    (*VJP, _vjp),
    (*LINEARIZE, _refused_function("linearize")),
    (torch.func, "linearize", _refused_function("linearize")),
    *((torch.func, name, _applied(name)) for name in ("jacrev", "jacfwd", "hessian", "functionalize")),
    (*VMAP, _vmap),
    *((home, "cond", _cond) for home in (torch, CONTROL)),
    *(
        (home, name, _looped(name))
        for name in LOOPS
        for home in (torch, CONTROL)
        if vars(home).get(name) is vars(CONTROL)[name]
    ),
)
"""(owner, name, what makes of a route and the original what stands there) of each function."""
