"""What the first capture in a process loads and notes, made where this is imported, for all forked from it.

Nothing in it trains: a backward knows the devices that there were at the first one, before the fork.
"""

import torch
from torch import nn

import autopipe

model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).requires_grad_(False)
autopipe.split(model, 2, (torch.ones(2, 2),), costs="estimated")
