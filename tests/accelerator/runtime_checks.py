"""What the runtime does on the simulated accelerator; ``python runtime_checks.py CHECK ...`` is one rank.

Every rank works on the device after its own number while device 0 is current. Each check runs eagerly under
the order check, and lazily, and its results equal the CPU's.
"""

import copy
import datetime
import os
import sys

import simulated
import simulated.group
import torch
import torch.distributed as dist
from runtime_models import Adversary, adversary_batch, adversary_loss, make, worst
from torch import nn

from autopipe.runtime import Runtime

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("sim", RANK + 1)
WAYS = {"eager": {"races": 2}, "lazy": {"races": 0, "lazy": True}}
BATCHES = ((8, 6, 4), (7, 5, 4), (3, 6, 4), (8, 6, 4), (8, 6, 4), (8, 6, 4), (8, 6, 4))
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "looped-bfs": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zbv": 2,
    "dualpipev": 2,
}
EXACT = 1e-12


def train(step, parameters, clip):
    """Losses and norms of the batches, and the host's waits within each step."""
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    torch.manual_seed(7)
    losses, norms, waits = [], [], []
    for rows, length, m in BATCHES:
        batch = adversary_batch(rows, length)
        optimizer.zero_grad()
        with simulated.waits("autopipe") as found:
            losses.append(step(*batch, m))
            norms.append(clip(0.05))
        optimizer.step()
        waits.append(dict(found))
    return [x.item() for x in losses], [x.item() for x in norms], waits


def plain(model):
    def step(args, kwargs, target, m):
        loss = adversary_loss(model(*args, **kwargs), target)
        loss.backward()
        return loss.detach()

    return train(step, model.parameters(), lambda n: nn.utils.clip_grad_norm_(model.parameters(), n))


def schedules(*names):
    """The adversarial program: every schedule equals the plain model, no race, no wait after warm-up."""
    for i, name in enumerate(names or SCHEDULES):
        again = ({}, {"recompute": (0,)}, {"block_size": 3})[i % 3]
        torch.manual_seed(0)
        model = Adversary().double()
        args, kwargs, _ = adversary_batch(4, 5)
        n = WORLD * SCHEDULES[name]
        wanted_model = copy.deepcopy(model)
        wanted = plain(wanted_model)
        for way, settings in WAYS.items():
            made = make(copy.deepcopy(model), args, kwargs, n_stages=n, n_ranks=WORLD, schedule=name, **again)
            with simulated.settings(**settings):
                runtime = Runtime(*made, loss_fn=adversary_loss, device=DEVICE)
                assert torch.accelerator.current_device_index() == 0

                def step(args, kwargs, target, m, runtime=runtime):
                    return runtime.step(*args, **kwargs, target=target, n_microbatches=m).loss

                losses, norms, waits = train(step, runtime.parameters(), runtime.clip_grad_norm_)
                own = {name: p.detach().cpu() for name, p in runtime.named_parameters()}
            where = name, way, RANK
            assert max(abs(a - b) for a, b in zip(losses, wanted[0], strict=True)) < EXACT, where
            assert max(abs(a - b) for a, b in zip(norms, wanted[1], strict=True)) < EXACT, where
            assert worst(own, dict(wanted_model.named_parameters())) < EXACT, where
            assert not any(waits[3:]), (where, waits)
    assert not simulated.take_races()


def main(check, *arguments):
    if WORLD > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    globals()[check](*arguments)
    print("done", flush=True)
    if WORLD > 1:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
