"""Each private name of torch does what is relied on, and no other module of the package uses one."""

from __future__ import annotations

import ast
import copy
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import autopipe
from autopipe import torch_private as private

ROOT = pathlib.Path(autopipe.__file__).parent
TREES = {p: ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}
OTHERS = {str(p.relative_to(ROOT)): tree for p, tree in TREES.items() if p.name != "torch_private.py"}
LISTED = {name for names in private.ATTRIBUTES.values() for name in names}
ONE = torch.ones(1)
EXAMPLES = {
    "torch.nn.Module": nn.Linear(1, 1),
    "torch.Tensor": ONE,
    "torch.UntypedStorage": ONE.untyped_storage(),
    "torch._ops.OpOverload": torch.ops.aten.add.Tensor,
    "torch.ops.aten": torch.ops.aten,
}
"""One of each kind of object whose attributes are listed."""


def parts(node: ast.expr) -> list[str]:
    """``a.b.c`` as its parts; empty for what is no dotted name."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = parts(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.AST) -> dict[str, str]:
    """What the names that a module imports from torch stand for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                a.asname or "torch": a.name if a.asname else "torch" for a in node.names if is_torchs(a.name)
            }
            found |= {a.name: a.name for a in node.names if is_torchs(a.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and is_torchs(node.module or ""):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def is_torchs(name: str) -> bool:
    return name.split(".")[0] == "torch"


def reached(tree: ast.AST) -> set[str]:
    """Private names of torch that a module imports, or reaches by dots from what it imports."""
    aliases = imported(tree)
    found = set(aliases.values())
    for node in ast.walk(tree):
        chain = parts(node) if isinstance(node, ast.Attribute) else []
        if chain and chain[0] in aliases:
            found.add(".".join([aliases[chain[0]], *chain[1:]]))
    names = {n for n in found if any(map(is_private, n.split(".")))}
    return {n for n in names if n.rpartition(".")[2] not in LISTED}


def own_names() -> set[str]:
    """Every private name that the package itself defines."""
    names: set[str] = set()
    for node in (n for tree in TREES.values() for n in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def test_no_other_module_reaches_for_torchs_private_names() -> None:
    assert {path: names for path, tree in OTHERS.items() if (names := reached(tree))} == {}


def test_attributes_of_torchs_objects_are_listed() -> None:
    used = {
        node.attr
        for tree in OTHERS.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_private(node.attr)
    }
    torchs = {name for name in used if any(hasattr(example, name) for example in EXAMPLES.values())}
    assert torchs - own_names() - LISTED == set()


@pytest.mark.parametrize("owner", private.ATTRIBUTES)
def test_listed_attributes_are_there(owner: str) -> None:
    assert [n for n in private.ATTRIBUTES[owner] if not hasattr(EXAMPLES[owner], n)] == []


class Triple(Function):
    """Whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


BOUND = Triple.apply


def told(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What comes by a place from now on."""
    original: Any = getattr(owner, name)
    seen: list[Any] = []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
    return seen


def test_every_custom_function_ends_in_one_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def apply(cls: Any, *args: Any) -> Any:
        seen.append(cls)
        return super(private.CUSTOM_FUNCTION, cls).apply(*args)

    monkeypatch.setattr(private.CUSTOM_FUNCTION, "apply", classmethod(apply))
    x = torch.ones(2, requires_grad=True)
    (Triple.apply if private.APPLY_IS_C else BOUND)(x).sum().backward()
    assert seen == [Triple]
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5]


def test_an_apply_bound_before_calls_the_forward_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told(monkeypatch, Triple, "forward")
    BOUND(torch.ones(2))
    assert len(seen) == 1


def test_the_gradient_mode_is_as_it_was_afterwards() -> None:
    with private.grad_mode(False):
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_backward_and_grad_end_in_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told(monkeypatch, *private.BACKWARD)
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    torch.autograd.grad((x * 2).sum(), x)
    assert len(seen) == 2


def test_backward_is_torchs_in_the_modes_that_are_in_force() -> None:
    class Scaling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return 2 * func(*args, **(kwargs or {})) if func is torch.sin else func(*args, **(kwargs or {}))

    class Again(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return torch.sin(grad)

    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    root = Again.apply(x * y)  # type: ignore[no-untyped-call]
    with Scaling():
        private.backward([root], [torch.ones(2)], [x], keeps_graph=True)
        assert y.grad is None
        private.backward([torch.autograd.graph.get_gradient_edge(root)], [torch.ones(2)])
    assert torch.equal(x.grad, 4 * torch.ones(2).sin())  # type: ignore[arg-type]
    assert torch.equal(y.grad, 2 * torch.ones(2).sin())  # type: ignore[arg-type]


def test_gradients_are_torchs_in_the_modes_that_are_in_force() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Halved(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return torch.div(grad, 2)

    seen: list[Any] = []
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    with Seen():
        found = private.gradients([Halved.apply(x)], [torch.ones(2)], [x, y])  # type: ignore[no-untyped-call]
    assert torch.div in seen
    assert torch.equal(found[0], torch.full((2,), 0.5))  # type: ignore[arg-type]
    assert found[1] is x.grad is None


def test_what_a_node_saved_is_freed_whatever_holds_it() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    freed, kept, indexed = (x * 1).cos(), (x * 2), (x * 3)[torch.tensor([0])]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = kept.cos()
    for y in (freed, hooked, indexed, torch.layer_norm(x * 4, (2,))):
        assert y.grad_fn is not None
        private.release(y.grad_fn)  # indices lie in a tuple, a norm's weights are None
    with pytest.raises(TypeError, match="NoneType"):
        freed.grad_fn._saved_self  # type: ignore[union-attr]  # noqa: B018
    assert torch.equal(hooked.grad_fn._saved_self, kept)  # type: ignore[union-attr]


def test_a_checkpoint_ends_in_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told(monkeypatch, *private.CHECKPOINT)
    torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert len(seen) == 1


TRANSFORMED = {
    private.VMAP: lambda x: torch.vmap(torch.sin)(x),
    private.GRAD: lambda x: torch.func.grad(lambda t: t.sum())(x),
    private.GRAD_AND_VALUE: lambda x: torch.func.grad_and_value(lambda t: t.sum())(x),
    private.JVP: lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    private.VJP: lambda x: torch.func.vjp(torch.sin, x),
}


@pytest.mark.parametrize("place", TRANSFORMED, ids=lambda place: place[1])
def test_a_transform_ends_in_the_place(monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    seen = told(monkeypatch, *place)
    TRANSFORMED[place](torch.ones(2))
    assert seen


LOOPED = {
    "while_loop": lambda x: private.CONTROL.while_loop(lambda y: y.sum() < 9, lambda y: (y * 2,), (x,))[0],
    "map": lambda x: private.CONTROL.map(lambda y: y * 4, x),
    "scan": lambda x: private.CONTROL.scan(lambda a, y: (a + y, a * 4), torch.ones(()), x)[0] * 4 / 3,
    "associative_scan": lambda x: private.CONTROL.associative_scan(
        lambda a, b: a + b, x, 0, combine_mode="generic"
    ),
}


@pytest.mark.parametrize("name", private.LOOPS)
def test_a_loop_takes_its_functions_first(name: str) -> None:
    made = LOOPED[name](torch.ones(2))
    assert made.tolist() == {"while_loop": [8, 8], "map": [4, 4], "scan": 4, "associative_scan": [1, 2]}[name]


def test_a_branch_is_one_function_wherever_it_lies() -> None:
    assert private.CONTROL.cond is torch.cond


def test_linearize_is_there() -> None:
    assert callable(getattr(*private.LINEARIZE))


def test_a_module_with_the_hook_is_called_through_it() -> None:
    layer = nn.Linear(2, 2)
    assert getattr(layer, private.CALL_HOOK) is None
    vars(layer)[private.CALL_HOOK] = lambda x: x * 7
    assert layer(torch.ones(1)).item() == 7


def test_hooks_on_all_modules_are_seen() -> None:
    assert not any(private.GLOBAL_HOOKS)
    register = nn.modules.module
    handles = [
        register.register_module_forward_pre_hook(lambda m, a: None),
        register.register_module_forward_hook(lambda m, a, r: None),
        register.register_module_full_backward_pre_hook(lambda m, g: None),
        register.register_module_full_backward_hook(lambda m, g, h: None),
    ]
    try:
        assert [len(hooks) for hooks in private.GLOBAL_HOOKS] == [1, 1, 1, 1]
    finally:
        for handle in handles:
            handle.remove()


def test_a_module_is_called_plainly_unless_something_is_around_its_forward() -> None:
    layer, called = nn.Linear(1, 1), nn.modules.module
    assert private.is_called_plainly(layer)
    put: list[Any] = [
        lambda: layer.register_forward_pre_hook(lambda m, a: None),
        lambda: layer.register_forward_hook(lambda m, a, r: None),
        lambda: layer.register_full_backward_pre_hook(lambda m, g: None),
        lambda: layer.register_full_backward_hook(lambda m, g, h: None),
        lambda: called.register_module_forward_hook(lambda m, a, r: None),
    ]
    for register in put:
        handle = register()
        assert not private.is_called_plainly(layer)
        handle.remove()
        assert private.is_called_plainly(layer)
    layer.forward = layer.forward  # type: ignore[method-assign]
    assert not private.is_called_plainly(layer)
    del layer.forward
    vars(layer)[private.CALL_HOOK] = layer.forward
    assert not private.is_called_plainly(layer)


def test_a_dict_is_of_another_version_after_each_change() -> None:
    version = private.dict_version
    assert version is not None
    module = nn.Linear(1, 1)
    for held, change in (
        (vars(module), lambda: setattr(module, "training", False)),
        (vars(module), lambda: vars(module).update(new=1)),
        (vars(module), lambda: delattr(module, "new")),
        (module._parameters, lambda: setattr(module, "bias", None)),
        (module._buffers, lambda: module.register_buffer("kept", ONE)),
        (globals(), lambda: globals().update(NEW=1)),
        (globals(), lambda: globals().pop("NEW")),
    ):
        before = version(held)
        assert version(held) == before
        change()
        assert version(held) != before


def test_a_version_that_stays_is_none() -> None:
    assert private._counting(lambda held: 0) is None
    assert private._counting(lambda held: len(held)) is None
    assert private._counting(None) is None
    assert private._counting(private.dict_version) is private.dict_version


def test_function_modes_come_and_go() -> None:
    class Mode(TorchFunctionMode):
        pass

    mode = Mode()
    with mode:
        assert private.function_modes()[-1] is mode
        assert private.pop_function_mode() is mode
        assert not private.function_modes()
        private.push_function_mode(mode)
    assert not private.function_modes()


def test_export_flags_answer_as_set() -> None:
    before = private.export_flags()
    try:
        private.set_export_flags(True, False)
        assert torch.compiler.is_exporting()
        assert private.export_flags() == (True, False)
    finally:
        private.set_export_flags(*before)
    assert not torch.compiler.is_exporting()


def test_functions_have_homes_and_names() -> None:
    for name in ("add", "rand", "equal"):
        assert any(callable(getattr(home, name, None)) for home in private.FUNCTION_HOMES)
    assert private.qualified_name(torch.sin) == "torch.sin"
    assert private.is_operator(torch.ops.aten.add.Tensor)
    assert not private.is_operator(torch.add)


def test_many_tensors_at_once() -> None:
    a = [torch.ones(2), torch.ones(3)]
    assert [float(n) for n in private.foreach_norm(a, 1.0)] == [2, 3]


def test_a_subclass_is_not_asked_within_the_context() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    x = torch.ones(1).as_subclass(Loud)
    with private.UnseenByFunctions():
        assert torch.add(x, 1) is not None


def test_no_mode_is_asked_within_the_context() -> None:
    class Loud(TorchFunctionMode):
        def __torch_function__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with Loud(), private.Unwatched():
        assert torch.add(torch.ones(1), 1).tolist() == [2]


def test_tensors_tell_of_writes_views_and_memory() -> None:
    x = torch.ones(3)
    version, view = x._version, x[1:]
    view.add_(1)
    assert x._version == version + 1
    assert view._base is x
    assert x.untyped_storage()._cdata == view.untyped_storage()._cdata


def test_what_of_distributed_is_used_is_there(tmp_path: pathlib.Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        private.default_store().set("key", "value")
        assert private.default_store().get("key") == b"value"
        assert private.store_of_first_group(store).get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()
    assert private.backend_plugin("no such backend") is None
    assert hasattr(private.plugin_options(), "group_id")


@pytest.mark.parametrize("name", ["in", "²", 'a"b', "plain", "0"])
def test_code_of_a_graph_reaches_parts_of_any_name(name: str) -> None:
    root = nn.ModuleDict({name: nn.Linear(2, 2)})
    graph = private.fx_graph()
    x = graph.placeholder("x")
    y = graph.call_module(name, (x,))
    graph.output(graph.call_function(torch.mul, (y, graph.get_attr(f"{name}.bias"))))
    made = copy.deepcopy(torch.fx.GraphModule(root, graph))
    x = torch.ones(1, 2)
    assert made(x).equal(root[name](x) * root[name].bias)


@pytest.mark.parametrize("name", ["type", "own"])
def test_code_of_a_graph_reaches_parts_that_what_holds_them_hides(name: str) -> None:
    layer, root = nn.Linear(2, 2), nn.Module()
    root._modules[name] = layer
    graph = private.fx_graph(hidden={"own"})
    x = graph.placeholder("x")
    y = graph.call_module(name, (x,))
    graph.output(graph.call_function(torch.mul, (y, graph.get_attr(f"{name}.bias"))))
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    object.__setattr__(root, "own", None)
    x = torch.ones(1, 2)
    assert namespace["forward"](root, x).equal(layer(x) * layer.bias)


def test_a_tensor_that_is_not_to_be_read_tells_what_it_is_and_refuses_to_be() -> None:
    x = private.unread(torch.ones(2, 3, dtype=torch.float64), torch.device("cpu"))
    assert isinstance(x, private.Unread)
    assert (x.shape, x.dtype, x.device.type, x.dim()) == ((2, 3), torch.float64, "cpu", 2)
    assert torch.ones(2, 3).to(x.dtype).dtype is torch.float64
    one, other = x.sum(), torch.zeros(2, 3, dtype=torch.float64)
    for read in (
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.data_ptr,
        bool,
        float,
    ):
        with pytest.raises(RuntimeError):
            read(one)
    for ask in (x.nonzero, x.bool().any().__bool__, lambda: other[x > 0], lambda: x.equal(other)):
        with pytest.raises(RuntimeError):
            ask()
    for write in (lambda: other.copy_(x), lambda: other.add_(x), lambda: torch.add(x, 1, out=other), x.zero_):
        with pytest.raises(RuntimeError):
            write()
    assert not other.any()


@torch.no_grad()
def test_what_is_made_of_a_tensor_that_is_not_to_be_read_is_not_to_be_read_either() -> None:
    cpu = torch.device("cpu")
    x, places = private.unread(torch.ones(2, 8, 4), cpu), torch.arange(8)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    made = [
        x + places[:, None],
        x[0],
        x.mT,
        *x.split(4, 1),
        layer(x),
        attended,
        x.to(torch.float64),
        x.new_ones(1),
    ]
    made += [torch.cat([x, torch.ones(2, 8, 4)]), torch.where(x > 0, 1.0, x), *x.topk(2), x[:, places]]
    made += [nn.functional.embedding(x[..., 0].long(), torch.ones(3, 3)), x.flatten().view(2, -1)]
    assert all(isinstance(t, private.Unread) and t.device == cpu for t in made)
    assert made[4].shape == (2, 4, 4)
    assert not isinstance(torch.zeros(x.shape, device=x.device, dtype=x.dtype), private.Unread)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_of_groups_have_shapes_on_meta_in_any_dtype(dtype: torch.dtype) -> None:
    def made(device: str) -> list[Tensor]:
        rows = torch.zeros(16, 8, dtype=dtype, device=device, requires_grad=True)
        weights = torch.zeros(4, 16, 8, dtype=dtype, device=device, requires_grad=True)
        ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32).to(device)
        found = torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        return [found, *torch.autograd.grad(found.square().sum(), (rows, weights))]

    there = made("meta")
    assert [(t.shape, t.dtype) for t in there] == [
        ((16, 16), dtype),
        ((16, 8), dtype),
        ((4, 16, 8), dtype),
    ]
    if dtype is not torch.float64:
        assert [(t.shape, t.stride()) for t in there] == [(t.shape, t.stride()) for t in made("cpu")]


class Known(Tensor):
    """A tensor that overrides functions."""


def test_code_that_asks_for_overridden_functions_does_not_see_a_hidden_mode() -> None:
    class Seen(TorchFunctionMode):
        pass

    def is_overridden(*given: Tensor) -> bool:
        return torch.overrides.has_torch_function(given)

    torchs, own = torch.overrides.has_torch_function, ONE.as_subclass(Known)
    with private.HiddenMode() as outer, private.HiddenMode():
        assert (is_overridden(ONE), is_overridden(ONE, own)) == (False, True)
        assert len(private.function_modes()) == 2
        with Seen():
            assert is_overridden(ONE)
        with outer:
            assert not is_overridden(ONE)
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_overridden, ONE).result()
    with Seen(), private.HiddenMode():
        assert is_overridden(ONE)
    assert torch.overrides.has_torch_function is torchs


def test_weights_of_parametrizations_are_kept_for_as_long_as_they_are_cached() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    layer, other = (
        parametrize.register_parametrization(nn.Linear(2, 2), "weight", Doubled()) for _ in range(2)
    )
    with parametrize.cached():
        kept = layer.weight
        assert layer.weight is kept
        assert private.is_cached_weight(kept)
        assert not private.is_cached_weight(layer.bias)
        with private.weights_forgotten():
            assert layer.weight is kept
            inner = other.weight
            assert other.weight is inner
        assert layer.weight is kept
        assert other.weight is not inner
    assert not private.is_cached_weight(kept)


def test_nodes_are_numbered_as_they_are_made_and_leaves_last() -> None:
    class Twice(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    leaf = torch.ones(2, requires_grad=True)
    began = private.newest()
    first = leaf.exp()
    second = Twice.apply(first)
    ended = private.newest()
    assert began <= private.sequence_number(first.grad_fn) < private.sequence_number(second.grad_fn) < ended
    numbers = [private.sequence_number(t.grad_fn) for t in (first, second, second.sum())]
    assert numbers == sorted({*numbers})
    assert private.sequence_number(first.grad_fn.next_functions[0][0]) > numbers[-1]
