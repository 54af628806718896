"""What a forward goes by beside its inputs: files, code of classes and of torch, what it made of weights."""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, Net, trap

# ------------------------------------------------------------ files

_HERE = pathlib.Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, _HERE, ignore_errors=True)


def _gain(name: str, value: float) -> pathlib.Path:
    path = _HERE / name
    path.write_text(json.dumps({"gain": value}))
    return path


@trap(prepare=lambda m: _gain("read", 2.0), later=lambda m: _gain("read", 30.0))
def file_read(self: Any, x: Tensor) -> Tensor:
    with (_HERE / "read").open() as file:
        return self.run(x * json.load(file)["gain"])


def _read(name: str) -> Any:
    return json.loads((_HERE / name).read_text())["gain"]


@trap(prepare=lambda m: _gain("helper", 2.0), later=lambda m: _gain("helper", 30.0))
def file_read_by_a_helper(self: Any, x: Tensor) -> Tensor:
    return self.run(x * _read("helper"))


def _table(value: float) -> None:
    np.save(_HERE / "table.npy", np.full(WIDTH, value, dtype=np.float32))


@trap(prepare=lambda m: _table(2), later=lambda m: _table(3))
def table_read_by_numpy(self: Any, x: Tensor) -> Tensor:
    return self.run(x * torch.from_numpy(np.load(_HERE / "table.npy")))


def _weights(value: float) -> None:
    torch.save(torch.full((WIDTH,), value), _HERE / "weights.pt")


@trap("safe", prepare=lambda m: _weights(2), later=lambda m: _weights(3))
def weights_read_by_torch(self: Any, x: Tensor) -> Tensor:
    return self.run(x * torch.load(_HERE / "weights.pt"))


def _absent(name: str) -> None:
    (_HERE / name).unlink(missing_ok=True)


@trap(prepare=lambda m: _absent("flag"), later=lambda m: (_HERE / "flag").touch())
def file_that_comes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if (_HERE / "flag").exists() else x)


@trap("safe", prepare=lambda m: setattr(m, "path", _HERE / f"calls {id(m)}"))
def counter_in_a_file(self: Any, x: Tensor) -> Tensor:
    calls = int(self.path.read_text()) if self.path.exists() else 0
    self.path.write_text(str(calls + 1))
    return self.run(x * 2 if calls > 5 else x)


@trap("refused")
def file_written(self: Any, x: Tensor) -> Tensor:
    with (_HERE / "log").open("a") as file:
        file.write("called")
    return self.run(x)


# ------------------------------------------------------------ code


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * 2


@trap(later=lambda m: setattr(m, "__class__", Twice))
class ClassReplacedLater(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@trap(later=lambda m: setattr(m.layers[0], "__class__", Scaled))
def class_of_a_leaf_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@contextlib.contextmanager
def _patched(cls: str, name: str, make: Any) -> Iterator[None]:
    owner = getattr(sys.modules[__name__], cls)
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def _doubled(function: Any) -> Any:
    return lambda *args: function(*args) * 2


class Helped(Net):
    def helped(self, x: Tensor) -> Tensor:
        return x + 1

    @property
    def offset(self) -> float:
        return 1.0


@trap(around=lambda: _patched("Helped", "helped", _doubled))
class MethodOfTheClassPatchedLater(Helped):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.helped(x))


@trap(around=lambda: _patched("Helped", "offset", lambda _: property(lambda self: 3.0)))
class PropertyOfTheClassReplacedLater(Helped):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.offset)


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@trap("safe", around=lambda: _patched("Plain", "forward", _doubled))
class ForwardOfTheClassPatchedLater(Plain):
    pass


def _helper(x: Tensor) -> Tensor:
    return x + 1


@trap(around=lambda: mock.patch.object(sys.modules[__name__], "_helper", torch.neg))
def helper_of_the_file_patched_later(self: Any, x: Tensor) -> Tensor:
    return self.run(_helper(x))


@trap(around=lambda: mock.patch.object(F, "gelu", torch.neg))
def function_of_torch_patched_later(self: Any, x: Tensor) -> Tensor:
    return self.run(F.gelu(x))


@trap(around=lambda: mock.patch.object(torch.Tensor, "relu", lambda x: -x))
def method_of_torch_patched_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x.relu())


# ------------------------------------------------------------ what is made of weights once


def _double_a_weight(model: Any) -> None:
    with torch.no_grad():
        model.layers[0].weight.mul_(2)


@trap("safe", later=_double_a_weight, kept=lambda: None)
def weight_of_the_first_call(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    if self.kept is None:
        self.kept = self.layers[0].weight.detach().clone()
    return self.run(x), (self.layers[0].weight - self.kept).square().sum()


@trap("safe", later=_double_a_weight, kept=dict)
def norm_kept_in_a_dict(self: Any, x: Tensor) -> Tensor:
    if "norm" not in self.kept:
        self.kept["norm"] = self.layers[0].weight.detach().norm()
    return self.run(x / self.kept["norm"])


@trap("safe", later=_double_a_weight)
class NormKeptByAProperty(Net):
    @functools.cached_property
    def norm(self) -> Tensor:
        return self.layers[0].weight.detach().norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x / self.norm)


@trap()
class NormKeptUntilItTrains(Net):
    norm: Tensor | None = None

    def train(self, mode: bool = True) -> Net:
        self.norm = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.run(x / self.layers[0].weight.norm())
        if self.norm is None:
            self.norm = self.layers[0].weight.detach().norm()
        return self.run(x / self.norm)


# ------------------------------------------------------------ bytes


def _set_first(model: Any) -> None:
    model.n[0] = 3


@trap("safe", n=lambda: bytearray(1))
def counter_in_a_bytearray(self: Any, x: Tensor) -> Tensor:
    self.n[0] += 1
    return self.run(x * 2 if self.n[0] > 4 else x)


@trap(n=lambda: bytearray(1), later=_set_first)
def bytearray_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + self.n[0]))


@trap(n=lambda: array.array("l", [0]), later=_set_first)
def array_of_python_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (1 + self.n[0]))
