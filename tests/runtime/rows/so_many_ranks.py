"""Batches of more rows than were asked about on two ranks, each given the batch or fed it."""

import copy

import pytest
import torch
import torch.distributed as dist
from so_many_models import Images, centred, expected, images, laid_out

import autopipe
from autopipe.errors import InputError

WAYS: tuple[dict, ...] = ({}, {"feed": 0}, {"release": True})
"""What runtimes are told beside the defaults."""


def check(then, options: dict) -> None:
    torch.manual_seed(0)
    model = Images(then)
    twin = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, images(8), costs="estimated", n_microbatches=4, closed=["enlarge"])
    assert pipe.graph.variation.mixing.unasked == (64,)
    rt = pipe.runtime(**options)
    is_given = "feed" not in options or dist.get_rank() == 0
    for n in (8, 66, 8):
        given = images(n) if is_given else ()
        for parameter in rt.parameters():
            parameter.grad = None
        if n > 8 and then is centred:
            with pytest.raises(InputError, match="depend on one another"):
                rt.step(*given)
            continue
        loss, gradients = expected(twin, *images(n))
        assert rt.step(*given).loss.item() == pytest.approx(loss, rel=1e-5)
        wanted = dict(zip((name for name, _ in twin.named_parameters()), gradients, strict=True))
        for name, parameter in rt.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in WAYS:
        for then in (laid_out, centred):
            check(then, way)
    dist.destroy_process_group()
