"""Saves and loads in several threads: in order, bounded, all checked, and no thread left behind."""

import threading

import pytest
import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import StoreError
from autopipe.runtime import Runtime
from autopipe.runtime.checkpoint import loading, saving
from autopipe.runtime.checkpoint.rank_contents import RankContents, staged
from autopipe.runtime.files.threads import in_threads, threads_for


def test_results_come_in_order_and_no_more_are_under_way_than_asked():
    going, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def job(n):
        nonlocal going, most
        with lock:
            going += 1
            most = max(most, going)
        if n < 2:
            both.wait(60)  # two are under way at once, or this fails
        with lock:
            going -= 1
        return n

    drawn = []

    def jobs():
        for n in range(9):
            assert threading.current_thread() is threading.main_thread()
            drawn.append(n)
            yield lambda n=n: job(n)

    assert in_threads(jobs(), 2) == drawn == list(range(9))
    assert most == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("autopipe files")]


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_first_failure_is_raised_and_nothing_more_is_begun(n_threads):
    begun = []

    def job(n):
        begun.append(n)
        if n == 1:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        in_threads((lambda n=n: job(n) for n in range(100)), n_threads)
    assert len(begun) <= 1 + 2 * n_threads


def test_small_saves_take_no_threads():
    assert threads_for(1 << 20) == 1
    assert 1 <= threads_for(1 << 40) <= 4


def runtime_of(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(6)])
    runtime = Runtime(
        *make(model, (torch.randn(4, 9),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss, schedule="gpipe"
    )
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
    x = torch.linspace(-1, 1, 36).reshape(4, 9)
    runtime.step(x, target=x)
    optimizer.step()
    return model, runtime, optimizer


@pytest.mark.parametrize("background", [False, True])
def test_a_run_goes_through_several_threads_to_the_bit(tmp_path, monkeypatch, background):
    for module in (saving, loading):
        monkeypatch.setattr(module, "threads_for", lambda _: 3)
    model, runtime, optimizer = runtime_of(0)
    expected = {n: v.clone() for n, v in model.state_dict().items()}
    save = runtime.save(tmp_path / "c", optimizer=optimizer, background=background)
    with torch.no_grad():
        for parameter in runtime.parameters():
            parameter += 1.0
    if background:
        save.wait()
    other, again, own = runtime_of(1)
    again.load(tmp_path / "c", optimizer=own)
    assert all(torch.equal(v, expected[n]) for n, v in other.state_dict().items())
    first, second = optimizer.state_dict()["state"], own.state_dict()["state"]
    assert all(torch.equal(first[i][k], second[i][k]) for i in first for k in first[i])
    before = {n: v.clone() for n, v in other.state_dict().items()}
    file = next((tmp_path / "c").glob("state-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        again.load(tmp_path / "c", optimizer=own)
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())


class Replicated(torch.Tensor):
    """A distributed tensor all of which is here, and whose whole is the same memory."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)

    full_tensor = to_local


def test_what_cannot_be_copied_is_a_fault_to_tell():
    lost = RankContents({"a": torch.ones(2, device="meta")}, None, {}, True, "Net", 1, 0, 1 << 30)
    assert "no data" in staged(lost).fault
    odd = RankContents({"a": torch.ones(2)}, {"state": [len]}, {}, True, "Net", 1, 0, 1 << 30)
    assert "builtin_function" in staged(odd).fault


def test_what_is_copied_shares_no_memory_with_what_trains():
    plain = torch.ones(4)
    tensors = {
        "plain": plain,
        "replicated": torch.ones(4).as_subclass(Replicated),
        "strided": torch.ones(4, 4).t(),
        "tied": plain,
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "empty": torch.empty(0, 3),
    }
    contents = RankContents(tensors, {"state": [plain]}, {}, True, "Net", 1, 0, 1 << 30)
    copied = staged(contents)
    expected = {name: (t * 1).to_dense().as_subclass(torch.Tensor) for name, t in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    for name, tensor in copied.weights.items():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(next(iter(copied.state.tensors.values())), torch.ones(4))
