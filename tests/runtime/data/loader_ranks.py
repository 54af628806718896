"""Trains on two ranks from a DataLoader whose workers are forked and spawned while the runtime lives."""

import sys

import torch
from loader_data import Rows
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import autopipe


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]).double()


def losses(loader, step, optimizer):
    found = []
    for batch in loader:
        optimizer.zero_grad()
        found.append(step(batch))
        optimizer.step()
    return found


def main(context):
    rows = Rows(24)
    rt = autopipe.split(net(), 2, (rows[0].repeat(8, 1),), costs="estimated", n_microbatches=2).runtime(
        F.mse_loss, stall_limit_s=30.0
    )
    rt.step(rows[0].repeat(8, 1), target=rows[0].repeat(8, 1))  # its threads and links are at work
    loader = DataLoader(rows, batch_size=8, num_workers=1, multiprocessing_context=context, timeout=60)
    own = losses(loader, lambda x: rt.step(x, target=x).loss.item(), torch.optim.AdamW(rt.parameters(), 0.01))
    plain = net()

    def step(x):
        loss = F.mse_loss(plain(x), x)
        loss.backward()
        return loss.item()

    expected = losses(DataLoader(rows, batch_size=8), step, torch.optim.AdamW(plain.parameters(), 0.01))
    assert len(own) == 3
    assert all(abs(a - b) < 1e-12 for a, b in zip(own, expected, strict=True)), (own, expected)
    print("alike")


if __name__ == "__main__":
    main(sys.argv[1])
