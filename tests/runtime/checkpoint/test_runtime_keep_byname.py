"""What objects keep of weights: told from other state, put together, left whole; ranks are in keep_ranks."""

import pathlib

import keep_ranks
import torch
from processes import run_ranks
from runtime_models import make
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from autopipe.graph import ParameterSpec
from autopipe.runtime import Runtime
from autopipe.runtime.checkpoint.state_by_group import by_group
from autopipe.runtime.checkpoint.state_by_weight import Holding, by_position, fitting

SPECS = {n: ParameterSpec(n, (n,), shape, "float32") for n, shape in {"a": (2,), "b": (3,)}.items()}
SPECS |= dict.fromkeys(("c", "alias"), ParameterSpec("c", ("c", "alias"), (2,), "float32"))
A, B, C = torch.ones(2), torch.ones(3) * 2, torch.ones(2) * 3


def holding(*names):
    return Holding(SPECS, frozenset(names), names, names)


def nothing():
    return {}


def test_each_weight_comes_from_the_rank_that_had_it():
    trees = [{"n": 1, "of": {"a": A}}, {"n": 2, "of": {"b": B, "c": C}}]
    savers = [holding("a"), holding("b", "c")]
    assert fitting(trees, savers, holding("a", "b"), nothing) == {"n": 1, "of": {"a": A, "b": B}}
    assert fitting(trees, savers, holding("c"), nothing) == {"n": 1, "of": {"c": C}}
    assert fitting(trees[::-1], savers[::-1], holding(), nothing) == {"n": 2, "of": {}}
    wrapped = [{"n": 1, "module.a": A}, {"n": 1, "module.b": B}]
    assert fitting(wrapped, savers, holding("b"), nothing) == {"n": 1, "module.b": B}


def test_a_tied_weight_comes_under_the_name_that_the_object_has():
    trees, savers = [{"c": C}, {"alias": C + 1, "b": B}], [holding("c"), holding("b", "c")]
    assert fitting(trees, savers, holding("c"), lambda: {"alias": A}) == {"alias": C}
    assert fitting(trees, savers, holding("c"), lambda: {"c": A}) == {"c": C}
    assert fitting(trees, savers, holding("b", "c"), nothing) == {"c": C, "b": B}


def test_what_is_of_no_weight_or_of_the_whole_model_stays():
    savers = [holding("a"), holding("b")]
    other = [{"a": torch.ones(5), "rate": 0.1}, {"a": torch.zeros(5), "rate": 0.2}]
    assert fitting(other, savers, holding("b"), nothing) is other[0]
    whole = [{"a": A, "b": B}, {}]
    assert fitting(whole, savers, holding("b"), nothing) is whole[0]
    assert fitting([{"a": A}], [None], holding("b"), nothing) == {"a": A}
    alone = [{"a": A, "b": B, "c": C}]
    everything = holding("a", "b", "c")
    assert fitting(alone, [everything], holding("b"), nothing) == {"b": B}
    assert fitting(alone, [everything], holding("b"), lambda: {"a": A, "b": B}) == {"a": A, "b": B}


def test_items_of_groups_come_from_the_rank_that_had_the_group():
    def names(name):
        return SPECS[name].names

    def rates(*bases):
        return {"base_lrs": [*bases], "milestones": [3, 6], "_schedulers": [{"base_lrs": [*bases]}] * 2}

    savers, trees = [[["a"], ["b"]], [["b"], ["c"]]], [rates(1.0, 2.0), rates(2.0, 4.0)]
    assert by_group(trees, savers, [["a"], ["b"]], rates(0, 0), names) is trees[0]
    assert by_group(trees, savers, [["b"], ["alias"]], rates(0, 0), names) == rates(2.0, 4.0)
    three = by_group(trees, savers, [["a"], ["b"], ["c"]], rates(0, 0, 0), names)
    assert three == rates(1.0, 2.0, 4.0)
    assert by_group(trees, savers, [["c"]], rates(0), names) == rates(4.0)
    assert by_group(trees, savers, [["c"], []], rates(0, 7), names) == rates(4.0, 7)
    assert by_group([{"n": 1}], [[["a"]]], [["b"]], {"n": 0}, names) == {"n": 1}


def test_lists_of_a_tensor_for_each_parameter():
    assert by_position({"kept": [A, B]}, holding("a", "b"), holding("b", "c"))
    assert by_position([[A]], holding("a"), holding("c"))
    for tree in ({"kept": [A, B]}, [], {"kept": [B, A, 3]}, {"kept": [B]}, {"a": A}):
        assert not by_position(tree, holding("a", "b"), holding("a", "b"))
    assert not by_position({"kept": [A]}, holding("a", "b"), holding("b", "c"))
    assert not by_position({"kept": [A, B]}, None, holding("b", "c"))


def test_one_process_has_the_averages_of_all_ranks(tmp_path):
    run_ranks(pathlib.Path(keep_ranks.__file__), 3, "averages", str(tmp_path), timeout_s=100)
    model = keep_ranks.Deep().double()
    made = make(model, (torch.randn(8, 8, dtype=torch.float64),), {}, n_stages=2, n_ranks=1)
    runtime = Runtime(*made, loss_fn=F.mse_loss)
    average = keep_ranks.Average(runtime)
    runtime.load(tmp_path / "c", named=average)
    wanted = torch.load(tmp_path / "wanted")
    assert average.kept.keys() == wanted.keys()
    assert all(torch.equal(t, wanted[n]) for n, t in average.kept.items())


def test_an_average_of_the_whole_model_stays_one(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    runtime = Runtime(*make(model, (torch.randn(8, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss)
    average = AveragedModel(model, use_buffers=True)
    runtime.step(torch.randn(8, 4), target=torch.randn(8, 4))
    average.update_parameters(model)
    runtime.save(tmp_path / "c", average=average)
    other = AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        other.module[0].weight.zero_()
    runtime.load(tmp_path / "c", average=other)
    assert str(other.state_dict()) == str(average.state_dict())
