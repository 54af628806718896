"""What classes and files lead to is followed once, as long as all that was looked at for it is the same."""

from __future__ import annotations

import concurrent.futures
import contextvars
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from autopipe.tracing.state import reach
from autopipe.tracing.state.cells import SlotCell, VariableCell, content
from autopipe.tracing.state.reach import Reached, reached

_FILE = """
import contextvars
import functools
import threading
from torch import nn

TABLE = {"a": [1]}
VARIABLE = contextvars.ContextVar("variable")
VARIABLE.set([1])
LOCAL = threading.local()

class Scale:
    pass

SCALE = Scale()

def made():
    held = [1]
    def inner(x):
        return x * held[0]
    return inner

INNER = made()

def helper(x):
    import imported_in_tests
    return x * len(TABLE) * len(vars(SCALE)) * len(vars(LOCAL)) * len(imported_in_tests.HELD)

def other(x):
    return len(OTHERS) + x

OTHERS = [[1], [2]]

class Layer(nn.Module):
    rows = [[1]]

    def forward(self, x, *, by={"a": 1}):
        return helper(INNER(x)) + len(self.rows) + len(VARIABLE.get()) + LATE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, x):
        return self.b(self.a(x))
"""


@pytest.fixture
def file() -> Iterator[Any]:
    made = types.ModuleType("followed_in_tests")
    sys.modules[made.__name__] = made
    exec(compile(_FILE, "followed_in_tests.py", "exec"), vars(made))
    yield made
    del sys.modules[made.__name__]
    sys.modules.pop("imported_in_tests", None)


def _outline(found: Reached) -> Any:
    """All places by path and name, with what tells each from others."""

    def told(part: Any) -> Any:
        if isinstance(part, (str, frozenset)):
            return part
        is_made = isinstance(part, (SlotCell, VariableCell))  # anew for each
        return (type(part), id(content(part))) if is_made else id(part)

    return [[[*map(told, row)] for row in held] for held in found.lists], sorted(found.sources), found.first


def _set(owner: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda file: setattr(eval(owner, vars(file), {"file": file}), name, value)


def _with_cell(file: Any) -> None:
    file.INNER.__closure__[0].cell_contents = [[3]]


def _in_table(file: Any) -> None:
    file.TABLE["b"] = [2]


def _in_inner_list(file: Any) -> None:
    file.Layer.rows.append([5])


def _as_other(file: Any) -> None:
    file.helper.__code__ = file.other.__code__


def _by_variable(file: Any) -> None:
    file.VARIABLE.set([[7]])


def _imported(file: Any) -> None:
    made = types.ModuleType("imported_in_tests")
    made.__dict__["HELD"] = [1]
    sys.modules[made.__name__] = made


CHANGES = {
    "a global": _set("file", "TABLE", {"c": [3]}),
    "a global that was not there": _set("file", "LATE", [3]),
    "what a global holds": _in_table,
    "an attribute of a class": _set("Layer", "rows", [[2], [3]]),
    "what such an attribute holds": _in_inner_list,
    "a new attribute of a class": _set("Layer", "more", [[2]]),
    "an attribute of an object": _set("SCALE", "by", [2]),
    "an attribute of a function": _set("helper", "note", [2]),
    "a default": _set("Layer.forward", "__kwdefaults__", {"by": {"b": [2]}}),
    "a closure": _with_cell,
    "the code of a function": _as_other,
    "a context variable": _by_variable,
    "a module that code imports": _imported,
}


@pytest.mark.parametrize("changed", CHANGES)
def test_what_has_changed_is_followed_anew(file: Any, changed: str) -> None:
    net = file.Net()
    reached(net)
    with mock.patch.object(reach, "Walk", side_effect=AssertionError):
        before = _outline(reached(net))
    CHANGES[changed](file)
    found = _outline(reached(net))
    reach._followed.clear()
    assert found == _outline(reached(net))
    assert found != before


def test_other_models_of_the_same_classes_are_followed_as_the_first() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), Own()) for _ in range(2)]
    models[1][1].table = {"of one alone": [1]}
    reached(models[0])
    with mock.patch.object(reach, "Walk", side_effect=AssertionError):
        found = reached(models[1])
    reach._followed.clear()
    assert _outline(found) == _outline(reached(models[1]))


def test_what_one_model_has_of_it_in_attributes_is_its_own() -> None:
    first, second = Own(), Own()
    second.table = TABLE  # which is said to be the model's, not the file's
    reached(first)
    found = reached(second)
    reach._followed.clear()
    assert _outline(found) == _outline(reached(second))
    assert _outline(reached(first)) != _outline(found)


TABLE: dict[str, Any] = {"of all": [1]}


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(TABLE)


def test_what_leads_to_weights_is_not_held_on_to() -> None:
    layer = nn.Linear(2, 2)

    class Around(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x)

    reach._followed.clear()
    reached(Around())
    assert not reach._followed
    reached(Own())
    assert len(reach._followed) == 1


def test_what_a_variable_is_set_to_elsewhere_is_looked_at_there(file: Any) -> None:
    net = file.Net()
    reached(net)
    found = contextvars.Context().run(lambda: _outline(reached(net)))
    reach._followed.clear()
    assert found == contextvars.Context().run(lambda: _outline(reached(net)))


def test_what_is_local_to_another_thread_is_looked_at_there(file: Any) -> None:
    net = file.Net()
    file.LOCAL.held = [1]
    reached(net)
    here = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(here.run, lambda: _outline(reached(net))).result()
        reach._followed.clear()
        assert found == pool.submit(here.run, lambda: _outline(reached(net))).result()
