"""Whether some ranks alone stepped an optimizer between steps is seen of their weights."""

import torch
from torch import nn

from autopipe.runtime.reduce.unstepped import Unstepped


def with_gradient():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_a_rank_that_is_left_out_once_says_so_once(caplog):
    parameters, watched = [with_gradient(), nn.Parameter(torch.ones(2))], Unstepped()
    optimizer = torch.optim.SGD(parameters, 0.1)
    watched.note(parameters)
    watched.tell(1, 1)
    assert not caplog.records  # that of this rank may not have begun
    optimizer.step()
    assert watched.was_changed
    watched.note(parameters)
    assert not watched.was_changed
    watched.tell(1, 2)
    watched.tell(1, 3)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["rank 1"]
    assert "since step 1" in caplog.text


def test_a_rank_without_gradients_is_never_left_out(caplog):
    watched, parameter = Unstepped(), with_gradient()
    watched.note([parameter])
    torch.optim.SGD([parameter], 0.1).step()
    assert watched.was_changed
    watched.note([nn.Parameter(torch.ones(2))])
    watched.tell(0, 2)
    assert not caplog.records
