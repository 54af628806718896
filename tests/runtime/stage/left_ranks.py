"""One rank of two whose loss takes what layers of the other, or of both, have left in an attribute."""

import operator
import os
import sys

import pytest
import torch
from left_models import Net, loss_of

import autopipe
from autopipe.errors import AutopipeError


def main(name):
    torch.manual_seed(0)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    held, loss_fn = loss_of(operator.attrgetter(name))
    held["model"] = model = Net().double()
    model.levels = 0.0
    options = {"n_microbatches": 4, "costs": "estimated", "pin": {"gated": 0, "last.0": 1}}
    rt = autopipe.split(model, 2, (x,), **options).runtime(loss_fn)
    with pytest.raises(AutopipeError, match=f"loss_fn takes {name} of Net"):
        rt.step(x, target=y)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # the group is broken: its threads need not be waited for
