"""The training and the evaluation form of a model under common names, as one graph where they agree.

Recording each form is left to ``recorder``, making graphs of them to ``emit``.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx, nn

from ...torch_private import fx_graph
from ..calls.call import Call, Guard, Recording, map_calls
from ..calls.likeness import is_equal, key
from ..calls.named import held_by
from ..inputs.names import Namer
from ..members import submodule

__all__ = ["merge", "name_like", "select", "settled", "share_constants", "union"]


def select(flag: bool, training: Any, evaluation: Any) -> Any:
    """The constant of the form that ``flag`` (a module's ``training``) asks for."""
    return training if flag else evaluation


def settled(graph: fx.Graph, model: nn.Module) -> fx.Graph:
    """A graph with modules' ``training`` flags, and what is chosen by them, as they are now."""
    out = fx_graph()
    values: dict[fx.Node, Any] = {}

    def of(node: fx.Node) -> Any:
        return values[node]

    for node in graph.nodes:
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "get_attr" and name == "training":
            values[node] = submodule(model, owner).training
            continue
        args, kwargs = fx.map_arg(node.args, of), fx.map_arg(node.kwargs, of)
        if node.target is select:
            values[node] = select(*args)
            continue
        values[node] = out.create_node(node.op, node.target, args, kwargs, name=node.name)
        values[node].meta = node.meta
    return out


def merge(
    train: Recording, evaluation: Recording, named: Sequence[Call] = (), taken: Collection[str] = ()
) -> dict[bool, Recording]:
    """Both forms with calls named: equal names are the same op. One object twice where one form serves both.

    Calls are matched by what they call and where, with those that are ``named`` too, and get no name that is
    ``taken``; constants that differ follow the module's ``training`` flag.
    """
    if train is evaluation:
        name_like(named, train, taken)
        return dict.fromkeys((True, False), train)
    pairs = _match(train.calls, evaluation.calls)
    twins = {id(e): t for t, e in pairs}
    whole = len(pairs) == len(train.calls) == len(evaluation.calls) and train.output == evaluation.output
    whole = whole and not (train.modes or evaluation.modes)  # flags that are set say nothing of the model's
    if whole and all(_agrees(t, e, twins) for t, e in pairs):
        _do_as_in_either(pairs)
        both = dataclasses.replace(
            _follow_mode(train, pairs),
            guards=_guards(train, evaluation, twins),
            carried=train.carried | evaluation.carried,
        )
        name_like(named, both, taken)
        return dict.fromkeys((True, False), both)
    name_like(named, train, taken)
    if named:
        name_like(union(named, train.calls), evaluation, taken)
    else:
        _name(evaluation, pairs, train.calls, taken)
    return {True: train, False: evaluation}


def share_constants(forms: Iterable[Recording]) -> dict[str, Any]:
    """One name for each constant of several recordings, and the constants by name."""
    out: dict[str, Any] = {}
    for form in forms:
        names: dict[str, str] = {}
        for name, value in form.constants.items():
            equal = (n for n, v in out.items() if n not in names.values() and is_equal(v, value))
            names[name] = next(equal, None) or f"_constant{len(out)}"
            out.setdefault(names[name], value)
        read = {id(c): c for c in (*form.calls, *(c for b in form.branches for c in b.calls))}
        for call in read.values():
            if call.op == "get_attr" and call.target in names:
                call.target = call.hint = names[call.target]
        form.constants = {names[n]: v for n, v in form.constants.items()}
    return out


def union(named: Sequence[Call], calls: Sequence[Call]) -> list[Call]:
    """Calls and those of another form that they lack, by name, in an order that keeps that of both.

    What both have stands in the same order in both, but for inputs; the output, which both have, last.
    """
    known = {c.name for c in named}
    out = [c for c in calls if c.op == "placeholder" and c.name not in known]
    others = _without_inputs(calls)
    common = known & {c.name for c in others}
    rest = iter(others)
    for call in named:
        if call.name in common:
            out += itertools.takewhile(lambda other: other.name != call.name, rest)  # noqa: B023
        out.append(call)
    assert len(out) == len(known | {c.name for c in calls}), "forms name calls in another order"
    return out


def name_like(named: Sequence[Call], form: Recording, taken: Collection[str] = ()) -> None:
    """Name the calls of a further form: what is one of the ``named`` as that, none as what is ``taken``."""
    pairs = _match(_without_inputs(named), _without_inputs(form.calls)) if named else ()
    _name(form, pairs, named, taken)


def _without_inputs(calls: Sequence[Call]) -> list[Call]:
    return [c for c in calls if c.op != "placeholder"]


def _name(
    form: Recording, pairs: Iterable[tuple[Call, Call]], named: Sequence[Call], taken: Collection[str]
) -> None:
    """Name calls that are paired with one that is named as that, and others otherwise than any.

    Inputs have their names.
    """
    for call in form.calls:
        call.name = call.target if call.op == "placeholder" else call.name
    for known, call in pairs:
        call.name = known.name
    namer = Namer([*taken, *(c.name for c in (*named, *form.calls) if c.name)])
    for call in form.calls:
        if not call.name:
            call.name = namer(call.hint)


def _match(train: Sequence[Call], evaluation: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Calls of two recordings that are one op, in the order of both.

    Inputs and what a plan cannot place freely first, then what lies between those: masks and sizes that one
    makes early and the other late let nothing that holds weights go unmatched.
    """
    keys = [key(c) for c in train], [key(c) for c in evaluation]
    if keys[0] == keys[1]:
        return list(zip(train, evaluation, strict=True))
    a, b = ([i for i, c in enumerate(calls) if _is_fixed(c)] for calls in (train, evaluation))
    ends = [(-1, -1), *_aligned(a, b, keys), (len(train), len(evaluation))]
    pairs: list[tuple[int, int]] = []
    for (start, begin), (stop, end) in itertools.pairwise(ends):
        pairs += [*_aligned(range(start + 1, stop), range(begin + 1, end), keys), (stop, end)]
    return [(train[i], evaluation[j]) for i, j in pairs[:-1]]


def _is_fixed(call: Call) -> bool:
    """Whether a call is an input, holds weights, draws or writes."""
    if call.op in ("placeholder", "output"):
        return True
    reads_state = call.op != "get_attr" and any(c.op == "get_attr" and c.depends for c in call.inputs)
    return not call.is_check and (not call.is_pure or reads_state)


def _aligned(
    a: Sequence[int], b: Sequence[int], keys: tuple[Sequence[Any], Sequence[Any]]
) -> list[tuple[int, int]]:
    """Places of two sequences whose keys are equal, in the order of both."""
    chosen = [keys[0][i] for i in a], [keys[1][i] for i in b]
    blocks = difflib.SequenceMatcher(None, *chosen, autojunk=False).get_matching_blocks()
    return [(a[block.a + n], b[block.b + n]) for block in blocks for n in range(block.size)]


def _agrees(train: Call, evaluation: Call, twins: dict[int, Call]) -> bool:
    """Whether two matched calls take matching values, whatever their constants are."""
    if train.region != evaluation.region or held_by(train.target) != held_by(evaluation.target):
        return False
    return _same_shape((train.args, train.kwargs), (evaluation.args, evaluation.kwargs), twins)


def _same_shape(a: Any, b: Any, twins: dict[int, Call]) -> bool:
    if isinstance(a, Call) or isinstance(b, Call):
        return isinstance(a, Call) and isinstance(b, Call) and twins.get(id(b)) is a
    if isinstance(a, (tuple, list)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(_same_shape, a, b, [twins] * len(a)))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same_shape(a[k], b[k], twins) for k in a)
    if isinstance(a, slice):
        return isinstance(b, slice) and _same_shape(
            (a.start, a.stop, a.step), (b.start, b.stop, b.step), twins
        )
    return not isinstance(b, (tuple, list, dict, slice))


def _guards(train: Recording, evaluation: Recording, twins: dict[int, Call]) -> list[Guard]:
    """The guards of the training form, and those that the code asks for in evaluation alone."""
    known = {(g.function, g.outcome, g.source) for g in train.guards}
    twins = dict(twins)

    def twin(call: Call) -> Call:
        if id(call) not in twins:
            args, kwargs = map_calls(call.args, twin), map_calls(call.kwargs, twin)
            twins[id(call)] = dataclasses.replace(call, args=args, kwargs=kwargs, _inputs=None)
        return twins[id(call)]

    more = [g for g in evaluation.guards if (g.function, g.outcome, g.source) not in known]
    return train.guards + [dataclasses.replace(g, operands=map_calls(g.operands, twin)) for g in more]


def _do_as_in_either(pairs: Sequence[tuple[Call, Call]]) -> None:
    """Let the first of two matched calls do what either does: in one mode alone a layer may draw or write.

    Memory that two values share in one mode, as what dropout is given and gives, is one memory.
    """
    same: dict[int, frozenset[int]] = {}
    for t, e in pairs:
        same.update({s: same.get(s, frozenset()) | t.storages for s in e.storages})
    for t, e in pairs:
        t.is_random, t.keeps = t.is_random or e.is_random, t.keeps or e.keeps
        t.shares, t.draws_anew = t.shares | e.shares, t.draws_anew or e.draws_anew
        t.derives |= e.derives
        t.stream = t.stream or e.stream
        if t.stream is not None and e.stream is not None and e.stream.is_outside:
            t.stream = dataclasses.replace(t.stream, is_outside=True)
        t.mutated = tuple(dict.fromkeys((*t.mutated, *e.mutated)))
        t.storages, t.reads, t.writes = (
            ours.union(*(same.get(s, ()) for s in theirs))
            for ours, theirs in ((t.storages, e.storages), (t.reads, e.reads), (t.writes, e.writes))
        )


def _follow_mode(train: Recording, pairs: list[tuple[Call, Call]]) -> Recording:
    """The training form with constants that differ in evaluation replaced by ones that follow the flag."""
    calls: list[Call] = []
    flags: dict[str, Call] = {}
    for t, e in pairs:
        made: list[Call] = []
        args = _blend(t.args, e.args, t, flags, made)
        t.take(args, _blend(t.kwargs, e.kwargs, t, flags, made))
        calls += [*made, t]
    return dataclasses.replace(train, calls=calls)


def _blend(a: Any, b: Any, call: Call, flags: dict[str, Call], made: list[Call]) -> Any:
    if isinstance(a, Call):
        return a
    if isinstance(a, (tuple, list)):
        return type(a)(_blend(x, y, call, flags, made) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {k: _blend(a[k], b[k], call, flags, made) for k in a}
    if isinstance(a, slice) or (type(a) is type(b) and (a == b or a != a)):
        return a
    target = f"{call.path}.training".lstrip(".")
    if target not in flags:
        flags[target] = Call("get_attr", target, hint=target, value=True)
        made.append(flags[target])
    if (a, b) == (True, False):
        return flags[target]
    chosen = Call("call_function", select, (flags[target], a, b), hint="select", path=call.path)
    chosen.source, chosen.value, chosen.is_size = call.source, a, True
    made.append(chosen)
    return chosen
