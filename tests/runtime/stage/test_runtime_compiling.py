"""What compiles as it runs, as ``torch.cond`` does, is captured without being compiled; so a pipe runs."""

import copy

import torch
from torch import nn

import autopipe


class Branching(nn.Module):
    """Goes one way or another by a buffer, in its own forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("flag", torch.ones(()))

    def forward(self, x):
        h = torch.cond(self.flag > 0, lambda h: h * 2, lambda h: -h, (self.a(x),))
        return self.b(h).square().mean()


def test_a_branch_on_a_buffer_trains_as_the_model_does_and_can_be_compiled_later(recwarn):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Branching().double()
    model, x = copy.deepcopy(plain), torch.randn(6, 4, dtype=torch.float64)
    runtime = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=3).runtime()
    for flag in (1.0, -1.0):
        plain.flag.fill_(flag)
        model.flag.fill_(flag)
        expected = plain(x)  # compiles: what it meets in a capture torch would not compile again
        expected.backward()
        torch.testing.assert_close(runtime.step(x).loss, expected.detach(), check_stride=False)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
            ours.grad = theirs.grad = None
    assert not [w for w in recwarn if "autopipe" in str(w.message)]


def test_a_compiled_pipe_runs_as_it_is():
    torch.manual_seed(0)
    model, graphs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
    pipe = autopipe.split(model, 2, (torch.randn(6, 4),), costs="estimated")
    compiled = torch.compile(pipe, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for rows in (6, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert not graphs
