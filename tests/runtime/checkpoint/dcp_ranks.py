"""Trains with FSDP2 on two ranks, saves with plain DCP; a pipeline on the same ranks trains on, and back."""

import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import autopipe
from autopipe.exports import dcp_reader, to_dcp


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(4)]).double()


def sharded():
    model = net()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def main(folder):
    dist.init_process_group("gloo")
    x = torch.linspace(-1, 1, 56, dtype=torch.float64).reshape(8, 7)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "theirs")

    rt = autopipe.split(net(), 2, (x,), costs="estimated", n_microbatches=2).runtime(F.mse_loss)
    own = torch.optim.AdamW(rt.parameters(), 0.5)
    rt.load(folder / "theirs", optimizer=own)
    for _ in range(3):
        own.zero_grad()
        loss = rt.step(x, target=x).loss.item()
        own.step()
        assert abs(loss - step()) < 1e-12

    rt.save(folder / "ours", optimizer=own)
    again = sharded()
    state = get_model_state_dict(again)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "ours")))
    for name, value in get_model_state_dict(model).items():
        assert torch.allclose(state[name].full_tensor(), value.full_tensor(), atol=1e-12), name

    if rt.rank == 0:
        to_dcp(folder / "ours", folder / "converted")
    dist.barrier()
    reference = [step() for _ in range(3)]
    for source in (
        {"checkpoint_id": folder / "converted"},
        {"storage_reader": dcp_reader(folder / "ours")},
    ):
        again = sharded()
        theirs = torch.optim.AdamW(again.parameters(), 0.5)
        state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, theirs)}
        dcp.load(state, **source)
        set_model_state_dict(again, state["model"])
        set_optimizer_state_dict(again, theirs, state["optimizer"])
        for wanted in reference:
            theirs.zero_grad()
            loss = F.mse_loss(again(x), x)
            loss.backward()
            theirs.step()
            assert abs(loss.item() - wanted) < 1e-12
    print("as FSDP trained on")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
