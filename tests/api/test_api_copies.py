"""Pipes copied and pickled are pipes of their own; cells run again, and two pipes on one model, are right."""

import copy
import gc
import io
import linecache
import pickle
import traceback

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import InputError


class Net(nn.Module):
    """A tie, a buffer, a size that the code reads and a draw."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        if ids.shape[1] > 2:
            h = h + 1
        for layer in self.body:
            h = torch.tanh(layer(h))
        h = self.norm(h.flatten(0, 1)).view(ids.shape[0], ids.shape[1], 8)
        return self.head(self.drop(h))


IDS = torch.arange(24).view(4, 6) % 11


def split(model=None):
    torch.manual_seed(0)
    return autopipe.split(model or Net(), 2, (IDS,), costs="estimated")


def saved(pipe):
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), saved])
def test_a_copy_is_a_pipe_of_its_own(again):
    pipe = split().eval()
    wanted = pipe(IDS)
    other = again(pipe)
    assert torch.equal(other(IDS), wanted)
    assert other.model.head.weight is other.model.embed.weight
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(other(IDS), other.model(IDS))
    assert not torch.equal(other(IDS), wanted)
    assert torch.equal(pipe(IDS), wanted)
    other.train().verify()
    other.eval()
    assert torch.equal(other(IDS[:, :2]), other.model(IDS[:, :2]))


def test_runtimes_and_stages_say_what_to_pickle_instead():
    pipe = split()
    for thing in (pipe.runtime(lambda output, _: output.mean()), pipe.stages[0]):
        with pytest.raises(InputError, match="the pipe"):
            pickle.dumps(thing)
    assert copy.deepcopy(pipe.stages[0]).code == pipe.stages[0].code
    assert pickle.loads(pickle.dumps(pipe.plan)).to_json() == pipe.plan.to_json()


def test_a_cell_run_again_leaves_nothing_behind():
    def sources():
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<autopipe")}

    before = sources()
    pipe = split()
    with pytest.raises(RuntimeError) as caught:
        pipe.stages[0](IDS.float())
    assert "self.embed(" in "".join(traceback.format_exception(caught.value))
    assert sources() - before
    del pipe, caught
    assert sources() == before


def test_two_pipes_on_one_model_train_one_model():
    model, batch = Net().eval(), IDS.clone()
    plain = copy.deepcopy(model)

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    ours = torch.optim.SGD(model.parameters(), 0.1)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    first = split(model)
    for pipe in (first, split(model), split(model), first):  # as a cell that is run again does
        rt = pipe.runtime(loss_fn)
        ours.zero_grad(), theirs.zero_grad()
        loss = rt.step(batch, target=batch).loss
        wanted = loss_fn(plain(batch), batch)
        wanted.backward()
        ours.step(), theirs.step()
        torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
