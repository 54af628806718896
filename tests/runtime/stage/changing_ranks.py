"""State changed between steps on two ranks, each given the batch or fed it; ``changing_ranks.py``."""

import counting_models
import pytest
import torch
import torch.distributed as dist
from changing_models import batch, check_step, model_and_twin, states
from torch.nn import functional as F

import autopipe
from autopipe.errors import AutopipeError


def check(**options: object) -> None:
    """Every rank sets the state alike."""
    model, twin = model_and_twin()
    pipe = autopipe.split(model, 2, (batch(0),), n_microbatches=2, costs="estimated")
    rt = pipe.runtime(loss_fn=F.mse_loss, **options)
    for seed, state in enumerate(states()):
        vars(model).update(state)
        vars(twin).update(state)
        check_step(rt, twin, seed, is_quiet="feed" in options and dist.get_rank() != 0)


def check_counts(name: str, **options: object) -> None:
    """Every rank counts alike, also where one feeds the others."""
    model, twin = counting_models.model_and_twin(name)
    x = counting_models.batch(0)
    pipe = autopipe.split(model, 2, (x,), n_microbatches=2, costs="estimated")
    rt = pipe.runtime(**options)
    is_quiet = "feed" in options and dist.get_rank() != 0
    counting_models.check_steps(rt, model, twin, n_steps=4, is_quiet=is_quiet)


def check_unlike() -> None:
    """One rank alone sets the state: all hear of it."""
    model, _ = model_and_twin()
    pipe = autopipe.split(model, 2, (batch(0),), n_microbatches=2, costs="estimated")
    rt = pipe.runtime(loss_fn=F.mse_loss)
    if dist.get_rank() == 0:
        model.temperature = 2.0
    with pytest.raises(AutopipeError, match="rank"):
        rt.step(batch(0), target=batch(0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check()
    check(feed=0)
    check(schedule="gpipe", release=True)
    check_unlike()
    check_counts("EveryOther")
    check_counts("Seeing", feed=0)
    dist.destroy_process_group()
