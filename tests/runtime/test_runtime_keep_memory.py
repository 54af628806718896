"""Loading a model made on the meta device holds its parameters once, and little beside them."""

import pytest
import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.runtime import Runtime


@pytest.mark.timeout(100)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_while_loading(tmp_path, dtype):
    """By the kernel's count of this process; two billion parameters are in ``benchmarks.kept``."""
    from benchmarks.kept.large import Resident

    def runtime(**options):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(3000, 3000, dtype=dtype) for _ in range(6)])
        x = torch.empty(8, 3000, dtype=dtype, device="meta")
        made = make(model, (x,), {}, n_stages=2, n_ranks=1)
        memory = Resident()
        return memory, Runtime(*made, loss_fn=F.mse_loss, device="cpu", **options)

    _, first = runtime()
    first.save(tmp_path / "c")
    total = {name: p.sum() for name, p in first.named_parameters()}
    own = sum(p.nbytes for p in first.parameters())
    del first
    memory, read = runtime(weights=tmp_path / "c")
    assert memory.peak < 1.15 * own
    assert memory.grown < 1.02 * own
    assert all(torch.equal(p.sum(), total[name]) for name, p in read.named_parameters())
    memory = Resident()
    read.save(tmp_path / "c")
    assert memory.peak < 0.15 * own
