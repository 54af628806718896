"""The model whose checkpoints are tried, of all that a checkpoint may have to hold."""

import torch
from torch import nn


class Net(nn.Module):
    """A tie, a frozen part, statistics, mixed dtypes and something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.a.weight
        self.low, self.n_seen = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), 3

    def get_extra_state(self):
        return {"n_seen": self.n_seen, "grid": torch.arange(3.0)}

    def set_extra_state(self, state):
        self.n_seen = state["n_seen"] + int(state["grid"].sum()) - 3

    def forward(self, x):
        return self.head(self.norm(self.frozen(torch.tanh(self.b(torch.tanh(self.a(x)))))) * self.low)
