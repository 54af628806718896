"""Tells what others saved apart: the model among other things, optimizers' state by parameter name, the rest.

Reading it is left to ``dcp`` and ``loading``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import StoreError
from ..files.stored_tensor import EXTRA, Stored, is_extra

__all__ = ["Found", "renamed", "sort_out"]

N_TRIED = 64
"""How many of the model's names are looked for to find it."""
COMPILED = "_orig_mod."
USUAL = ("", "model.", "module.", "state_dict.", "model_state_dict.")
"""Keys under which people save a model; where several models are held, the first of these is meant."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Weights by the model's names; optimizers, objects and what modules keep beside their tensors."""

    weights: dict[str, Stored]
    optimizers: dict[str, dict[str, Any]]
    objects: dict[str, Any]
    extras: dict[str, Any]


def sort_out(tree: dict[str, Any], known: Collection[str], path: Path) -> Found:
    """What is what in a nested mapping that somebody saved; ``known`` are the names of the model's weights.

    Raises :class:`StoreError` where it may be meant in two ways.
    """
    optimizers: dict[str, dict[str, Any]] = {}
    rest = _without_optimizers(tree, "", optimizers)
    leaves = dict(_leaves(rest, ""))
    prefix = _prefix([name for name, leaf in leaves.items() if isinstance(leaf, Stored)], known, path)
    own = leaves if prefix else {key: value for key, value in rest.items() if isinstance(value, Stored)}
    weights = {
        name.removeprefix(prefix): leaf
        for name, leaf in own.items()
        if name.startswith(prefix) and isinstance(leaf, Stored) and f".{EXTRA}." not in f".{name}."
    }
    extras = dict(_extras(_under(rest, prefix), ""))
    inner = [value for value in rest.values() if isinstance(value, dict)]
    return Found(weights, optimizers, {**(inner[0] if len(inner) == 1 else {}), **rest}, extras)


def _without_optimizers(
    tree: Mapping[str, Any], name: str, optimizers: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The tree, its optimizers taken out and put in ``optimizers`` by their key."""
    heads = {key.partition(".")[0] for key in tree}
    if "param_groups" in heads and heads <= {"state", "param_groups"}:
        optimizers[name] = _nested(tree)
        return {}
    rest = {}
    for key, value in tree.items():
        rest[key] = _without_optimizers(value, key, optimizers) if isinstance(value, dict) else value
    return rest


def _nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as ours is: by parameter name, with groups of names.

    torch's may be flat, ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``.
    """
    state: dict[str, Any] = dict(_mapping(tree.get("state", {})))
    groups: list[Any] = [*_list(tree.get("param_groups", []))]
    flat: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        head, _, rest = key.partition(".")
        name, _, kind = rest.rpartition(".")
        if rest and head == "state":
            state.setdefault(name, {})[kind] = value
        elif rest:
            flat.setdefault(name, {"params": [name]})[kind] = value
    return {"state": state, "groups": [*map(_group, groups), *flat.values()]}


def _group(found: Any) -> dict[str, Any]:
    group = dict(_mapping(found))
    return {**group, "params": [str(name) for name in _list(group.get("params", []))]}


def _mapping(found: Any) -> Mapping[Any, Any]:
    # what was an empty mapping is not there; one numbered from 0 looks like a list
    return found if isinstance(found, dict) else {str(i): each for i, each in enumerate(_list(found))}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield name, tree
        return
    for key, value in items:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _prefix(names: Collection[str], known: Collection[str], path: Path) -> str:
    """What comes before the model's own names."""
    there, wanted = set(names), list(known)[:N_TRIED]
    counts: collections.Counter[str] = collections.Counter()
    for first in wanted:
        tried = {n.removesuffix(first) for n in names if n == first or n.endswith(f".{first}")}
        for prefix in tried:
            counts[prefix] = sum(prefix + name in there for name in wanted)
        if counts:
            break
    best = [prefix for prefix, n in counts.items() if n == max(counts.values())]
    usual = [prefix for prefix in USUAL if prefix in best]
    if len(best) > 1 and not usual:
        raise StoreError(
            f"{path} holds several models of these names ({', '.join(sorted(best)[:4])}); save the one that "
            "is meant by itself, or under the key 'model'"
        )
    return (usual or best or [""])[0]


def _under(tree: dict[str, Any], prefix: str) -> Any:
    at: Any = tree
    for key in prefix.split(".")[:-1]:
        at = at.get(key, {}) if isinstance(at, dict) else {}
    return at


def _extras(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What modules keep beside their tensors, nested as it was."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        inner = f"{name}.{key}" if name else str(key)
        if is_extra(inner):
            yield inner, value
        else:
            yield from _extras(value, inner)


def renamed(names: Collection[str], known: Collection[str]) -> dict[str, str]:
    """The model's own name for each of ``names``, where all have what a wrapper puts before them, or lack it.

    ``module.`` of DDP, say, ``_orig_mod.`` of ``torch.compile``, or the ``transformer.`` that the weights of
    a base model have in one with a head. Where some are the model's own already, or there are two ways, all
    are left as they are.
    """
    there = set(known)
    if there & set(names):
        return {name: name for name in names}
    plain = {name: name.replace(COMPILED, "") for name in names}
    heads, own = ({name.partition(".")[0] + "." for name in each} for each in (plain.values(), known))
    ways = [plain, *({n: head + short for n, short in plain.items()} for head in own)]
    if len(heads) == 1:
        ways.append({n: short.partition(".")[2] for n, short in plain.items()})
    fitting = [len(there & set(way.values())) for way in ways]
    most = max(fitting)
    found = ways[fitting.index(most)]
    is_clear = most > 0 and fitting.count(most) == 1 and len(set(found.values())) == len(found)
    return found if is_clear else {name: name for name in names}
