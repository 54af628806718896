"""The ways to damage a checkpoint: its bytes, files, headers, pickles, and forgeries with checksums that fit.

What comes of them is left to ``judging``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import pickle
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopipe.runtime.files.folder import MANIFEST

__all__ = ["RAN", "Damage", "damages", "rewrite_header"]

RAN = "ran-by-a-pickle"


@dataclasses.dataclass(frozen=True)
class Damage:
    """One way to damage a copy of a checkpoint: its kind, how, and whether a forger set its checksums."""

    kind: str
    how: str
    do: Callable[[pathlib.Path], None]
    is_forged: bool = False


class Touch:
    """Unpickled it makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


# -- the damages --------------------------------------------------------------------------------------------


def damages(
    root: pathlib.Path, draw: random.Random, n: int, n_fixed: int | None = None
) -> Iterator[tuple[str, Damage]]:
    """(which save, what to do to a copy of it): the fixed ones, or so many, and random ones up to ``n``."""
    fixed = [*_fixed(root)]
    fixed = fixed if n_fixed is None else draw.sample(fixed, n_fixed)
    yield from fixed
    saves = ("whole", "hf", "dcp", "one.pt")
    makers = [*map(_bytes_of, saves), _forged_state, _forged_manifest]
    for i in range(max(0, n - len(fixed))):
        yield makers[i % len(makers)](root, draw)


def _bytes_of(name: str) -> Callable[[pathlib.Path, random.Random], tuple[str, Damage]]:
    """Damages to any byte of any file of a save."""

    def make(root: pathlib.Path, draw: random.Random) -> tuple[str, Damage]:
        files = [root / name] if (root / name).is_file() else sorted((root / name).iterdir())
        file = draw.choice(files)
        n_bytes, relative = file.stat().st_size, file.name if file != root / name else ""
        at = draw.randrange(n_bytes)
        kind, do = draw.choice(
            [
                ("truncated", lambda data: data[:at]),
                ("bit flipped", lambda data: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]),
                ("byte inserted", lambda data: data[:at] + b"\x00" + data[at:]),
                ("bytes lost", lambda data: data[:at] + data[at + 9 :]),
                ("zeros", lambda data: data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :]),
                ("doubled", lambda data: data + data[-at:]),
                ("noise", lambda data: data[:at] + draw.randbytes(len(data[at : at + 64])) + data[at + 64 :]),
            ]
        )
        changed = do(file.read_bytes())
        return name, Damage(
            f"{name}: {kind}",
            f"{relative} at byte {at}",
            lambda copy: _put(copy / relative if relative else copy, changed),
        )

    return make


def _put(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(data)


def _fixed(root: pathlib.Path) -> Iterator[tuple[str, Damage]]:
    for name in ("whole", "hf", "dcp"):
        files = sorted(p.name for p in (root / name).iterdir())
        for file in files:
            yield name, Damage(f"{name}: missing", file, lambda c, f=file: (c / f).unlink())
            yield name, Damage(f"{name}: empty", file, lambda c, f=file: _put(c / f, b""))
            for kind, put in _instead(root).items():
                yield name, Damage(f"{name}: {kind}", file, lambda c, f=file, put=put: put(c / f))
            for other in ("other", "deeper", "whole"):
                source = root / other / file
                if source.exists():
                    yield (
                        name,
                        Damage(
                            f"{name}: file of {other}",
                            file,
                            lambda c, f=file, s=source: _put(c / f, s.read_bytes()),
                        ),
                    )
        tensors = [f for f in files if f.endswith(".safetensors")]
        for a, b in itertools.pairwise(tensors):
            yield name, Damage(f"{name}: swapped", f"{a}, {b}", lambda c, a=a, b=b: _swap(c / a, c / b))
        for head in _HEADERS:
            for file in tensors:
                yield (
                    name,
                    Damage(
                        f"{name}: header",
                        f"{file} {head}",
                        lambda c, f=file, h=head: rewrite_header(c / f, _HEADERS[h]),
                    ),
                )
        for extra in ("model-00009-of-00009.safetensors", "pytorch_model.bin", "weights.pt"):
            data = next((root / "whole").glob("model-*.safetensors")).read_bytes()
            yield name, Damage(f"{name}: extra file", extra, lambda c, e=extra, d=data: _put(c / e, d))
    for outside in ("../other/" + MANIFEST, "/etc/passwd", "..", ".", "", "a/b", "x\0y", "\ud800"):
        yield "hf", Damage("hf: index", repr(outside), lambda c, o=outside: _index(c, o))
    index = "model.safetensors.index.json"
    for text in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": {}}}', "[" * 100_000, "\xff", "nan"):
        yield "hf", Damage("hf: index", text[:20], lambda c, t=text: _put(c / index, t.encode("latin1")))
    yield from _pickles(root)


def _instead(root: pathlib.Path) -> dict[str, Callable[[pathlib.Path], None]]:
    """What may be in the place of a file."""

    def instead(make: Callable[[pathlib.Path], object]) -> Callable[[pathlib.Path], None]:
        return lambda path: (path.unlink(), make(path))[0]

    return {
        "link out": instead(lambda p: p.symlink_to(root / "other" / p.name)),
        "link to itself": instead(lambda p: p.symlink_to(p.name)),
        "link to /dev/zero": instead(lambda p: p.symlink_to("/dev/zero")),
        "pipe": instead(os.mkfifo),
        "folder": instead(pathlib.Path.mkdir),
    }


def _swap(a: pathlib.Path, b: pathlib.Path) -> None:
    a.rename(a.parent / "c"), b.rename(a), (a.parent / "c").rename(b)


def _index(copy: pathlib.Path, name: str) -> None:
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    path.write_text(json.dumps(index))


def rewrite_header(path: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    change(head)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _first(head: dict[str, Any]) -> dict[str, Any]:
    return next((v for k, v in head.items() if k != "__metadata__"), {})


def _rename_first(head: dict[str, Any], new: str) -> None:
    name = next((k for k in head if k != "__metadata__"), None)
    if name is not None:
        head[new] = head.pop(name)


_HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape transposed and one": lambda h: _first(h).update(shape=[1, *_first(h).get("shape", [])[::-1]]),
    "shape flat": lambda h: _first(h).update(shape=[-1]),
    "shape huge": lambda h: _first(h).update(shape=[1 << 61, 1 << 61]),
    "shape true": lambda h: _first(h).update(shape=[True]),
    "dtype same size": lambda h: _first(h).update(
        dtype={"F32": "I32", "BF16": "F16"}.get(_first(h).get("dtype"))
    ),
    "dtype unknown": lambda h: _first(h).update(dtype="F31"),
    "dtype a list": lambda h: _first(h).update(dtype=["F32"]),
    "offsets shifted": lambda h: _first(h).update(data_offsets=[4, 36]),
    "offsets reversed": lambda h: _first(h).update(data_offsets=_first(h).get("data_offsets", [0, 0])[::-1]),
    "offsets negative": lambda h: _first(h).update(data_offsets=[-8, 0]),
    "offsets three": lambda h: _first(h).update(data_offsets=[0, 1, 2]),
    "a name more": lambda h: h.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a name less": lambda h: h.pop(next(iter(h)), None),
    "a name with a path": lambda h: _rename_first(h, "../../inner.0.lin.weight"),
    "a name with zeros": lambda h: _rename_first(h, "inner\x000"),
    "a name half a letter": lambda h: _rename_first(h, "\ud800"),
    "an empty name": lambda h: _rename_first(h, ""),
    "a note of numbers": lambda h: h.update(__metadata__=[3]),
    "a word more": lambda h: _first(h).update(run="me"),
}


def _pickles(root: pathlib.Path) -> Iterator[tuple[str, Damage]]:
    """Single files that are no plain mapping of names to tensors, or would run code."""
    state = torch.load(root / "one.pt", weights_only=True)
    ran = Touch(root / RAN)
    weight = state["head.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will do without them one day
        quantised = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    things: dict[str, Any] = {
        "code": {**state, "more": ran},
        "code alone": ran,
        "code as a name": {**state, ran: weight},
        "code as extra state": {**state, "inner.0._extra_state": ran},
        "a list": [*state.values()],
        "nested": {"model": state},
        "numbers": dict.fromkeys(state, 3),
        "a number as a name": {**state, 3: weight},
        "sparse": {**state, "head.weight": weight.to_sparse()},
        "meta": {**state, "head.weight": weight.to("meta")},
        "quantised": {**state, "head.weight": quantised},
        "complex": {**state, "head.weight": weight.to(torch.complex64)},
        "other shape": {**state, "head.weight": weight[:, :4].clone()},
        "whole numbers": {**state, "head.weight": weight.long()},
        "not a number": {**state, "head.weight": weight * float("nan")},
        "a name less": {k: v for k, v in state.items() if k != "frozen.bias"},
        "a name more": {**state, "more": weight},
        "extra state of another kind": {**state, "inner.0._extra_state": [1, 2]},
        "no extra state": {k: v for k, v in state.items() if k != "inner.1._extra_state"},
    }
    for how, thing in things.items():
        for form in ("zip", "old", "bare"):
            yield (
                "one.pt",
                Damage("one.pt: pickle", f"{how}, {form}", lambda c, t=thing, f=form: _pickled(c, t, f)),
            )


def _pickled(path: pathlib.Path, thing: Any, form: str) -> None:
    if form == "bare":
        path.write_bytes(pickle.dumps(thing))
    else:
        torch.save(thing, path, _use_new_zipfile_serialization=form == "zip")


# -- forgers: who can write files can make checksums --------------------------------------------------------


def seal(copy: pathlib.Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Write the manifest again, with the checksum and size of every text as it is now, after ``change``."""
    path = copy / MANIFEST
    found = json.loads(path.read_text())
    for name, record in found["files"].items():
        if name.endswith(".json"):
            data = (copy / name).read_bytes()
            record.update(n_bytes=len(data), checksum=zlib.crc32(data))
    change(found)
    found["checksum"] = 0
    bare = json.dumps(found, indent=1, ensure_ascii=False)
    found["checksum"] = zlib.crc32(bare.encode(errors="surrogatepass"))
    path.write_bytes(json.dumps(found, indent=1, ensure_ascii=False).encode(errors="surrogatepass"))


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1 << 40, 1 << 70, 1e308, "", "text", "../x", "\ud800", [], [[[]]], {}, {"a": 1},
    {"~": "tensor", "v": "no such"}, {"~": "tensor", "v": 3}, {"~": "array", "v": "random.torch"},
    {"~": "float", "v": "nan"}, {"~": "float", "v": "inf"}, {"~": "float", "v": []},
    {"~": "tuple", "v": [1]}, {"~": "tuple", "v": 3}, {"~": "bytes", "v": "%%"}, {"~": "bytes", "v": "AAAA"},
    {"~": "dtype", "v": "float32"}, {"~": "dtype", "v": "load"}, {"~": "dtype", "v": 3},
    {"~": "device", "v": "cuda:99"}, {"~": "device", "v": "nowhere"}, {"~": "range", "v": [0, 1 << 60, 1]},
    {"~": "slice", "v": [1]}, {"~": "complex", "v": ["a", 1]}, {"~": "set", "v": [[1]]}, {"~": "os.system"},
    {"~": "counter", "v": [["a", -1]]}, {"~": "dict", "v": [[1]]}, {"~": "dict", "v": [[{"a": 1}, 2]]},
    {"~": "number", "v": ["float32", 3]}, {"~": "number", "v": ["object", []]}, {"~": "number", "v": 3},
    {"~": "default", "v": ["int", []]}, {"~": "default", "v": ["eval", []]}, {"~": "queue", "v": []},
    {"~": "deque", "v": 3}, {"~": "size", "v": ["a"]}, {"~": ["a"], "v": 1}, {"~": "float"},
)  # fmt: skip


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from _places(tree[key], (*path, key))


def _forged_at(tree: Any, draw: random.Random) -> str:
    """Put something else at a place in a tree of JSON; where that was. Long lists are looked at in part."""
    places = [p for p in _places(tree) if not (isinstance(p[-1], int) and p[-1] > 3)]
    *path, last = draw.choice(places)
    inside = tree
    for key in path:
        inside = inside[key]
    before = inside[last]
    if draw.random() < 0.2:
        del inside[last]
        return f"{'.'.join(map(str, (*path, last)))} removed"
    choices = [v for v in VALUES if v != before]
    inside[last] = new = draw.choice(choices)
    return f"{'.'.join(map(str, (*path, last)))} = {json.dumps(new)[:40]}"


def _forged_state(root: pathlib.Path, draw: random.Random) -> tuple[str, Damage]:
    file = draw.choice(sorted(p.name for p in (root / "whole").glob("state-*.json")))
    tree = json.loads((root / "whole" / file).read_text())
    how = _forged_at(tree, draw)
    text = json.dumps(tree).encode()

    def do(copy: pathlib.Path) -> None:
        _put(copy / file, text)
        seal(copy)

    return "whole", Damage("forged state", f"{file} {how}", do, is_forged=True)


def _forged_manifest(root: pathlib.Path, draw: random.Random) -> tuple[str, Damage]:
    number = draw.random()
    tree = json.loads((root / "whole" / MANIFEST).read_text())
    how = _forged_at(tree, random.Random(number))
    return "whole", Damage(
        "forged manifest",
        how,
        lambda copy: seal(copy, lambda found: _forged_at(found, random.Random(number))),
        is_forged=True,
    )
