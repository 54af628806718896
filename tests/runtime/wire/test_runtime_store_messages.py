"""Ranks that agree before there is a pipeline: nobody waits for who is gone, and nothing is unpickled."""

import re
import signal
import textwrap
import time

import pytest
from processes import finish, run_ranks, start

SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from autopipe.errors import AutopipeError
    from autopipe.runtime.wire import store_messages
    import autopipe, pickle

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    how, rank = sys.argv[1], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    pickle.loads = refuse
    store_messages.SILENCE_S, store_messages.LATE_FACTOR = 3.0, 2.0

    class Gone(nn.Linear):
        def forward(self, x):
            if rank == 1 and how != "whole":
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Gone(4, 4), nn.ReLU(), nn.Linear(4, 4))
    began = time.monotonic()
    try:
        pipe = autopipe.split(model, 2, (torch.randn(8, 4),), n_microbatches=2)
        print("planned", pipe.plan.graph_digest, flush=True)
    except AutopipeError as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)
    os._exit(0)
"""


ALONE = """
    import os
    import torch, autopipe
    from autopipe.errors import StepError

    os.environ["WORLD_SIZE"] = "2"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    try:
        autopipe.split(model, 2, (torch.randn(8, 4),), costs="estimated", stall_limit_s=1.0)
    except StepError as error:
        print("told:", error, flush=True)
    os._exit(0)
"""


@pytest.mark.timeout(60)
def test_the_limit_applies_before_there_is_a_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ALONE))
    (output,) = run_ranks(script, 1, timeout_s=40)
    assert "told: not all 2 ranks came to the process group" in output


def run(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ranks = start(script, 2, how, environment={"XDG_CACHE_HOME": str(tmp_path)})
    try:
        first = ranks[0].communicate(timeout=100)[0]
        if how == "stopped":
            ranks[1].send_signal(signal.SIGKILL)
        return first, ranks[1].communicate(timeout=20)[0]
    finally:
        for rank in ranks:
            rank.end()


@pytest.mark.timeout(130)
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_gone_in_split_is_told(how, tmp_path):
    began = time.monotonic()
    first, _ = run(how, tmp_path)
    assert "StepError after" in first
    assert "rank 1 shows no sign of life" in first
    assert time.monotonic() - began < 100


@pytest.mark.timeout(130)
def test_a_plan_crosses_as_text(tmp_path):
    told = run("whole", tmp_path)
    assert all("planned" in text for text in told), told
    assert told[0].split("planned")[1] == told[1].split("planned")[1]
    assert (tmp_path / "autopipe" / "job-key").stat().st_mode & 0o077 == 0


EARLY = """
    import os, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    import autopipe
    from autopipe.errors import AutopipeError

    where, rank, made = sys.argv[1], int(os.environ["RANK"]), os.environ.get("MAKES_GROUP")
    if made:
        dist.init_process_group("gloo")

    def fails(at):
        if rank == 1 and at == where:
            raise ValueError("bad weather")

    held = []  # dropped, the group would end under the other rank, which may not be through

    def connects_and_fails(*args, make=dist.ProcessGroupGloo, **kwargs):
        held.append(make(*args, **kwargs))
        fails("join")

    if rank == 1 and where == "join":
        dist.distributed_c10d.ProcessGroupGloo = connects_and_fails

    class Fails(nn.Linear):
        def forward(self, x):
            fails("split")
            return super().forward(x)

    began = time.monotonic()
    try:
        fails("before")
        torch.manual_seed(0)
        model = nn.Sequential(Fails(4, 4), nn.ReLU(), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2)
        fails("runtime")
        rt = pipe.runtime(lambda out, target: out.square().mean())
        fails("step")
        rt.step(x, target=x)
    except AutopipeError as error:
        print(f"told after {time.monotonic() - began:.1f} s: {error}", flush=True)
        raise
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "makes_group"),
    # in no group yet a rank can tell nobody
    [
        ("before", True),
        ("join", False),
        *((where, made) for where in ("split", "runtime", "step") for made in (True, False)),
    ],
)
def test_a_rank_that_ends_by_an_error_ends_the_others_at_once(where, makes_group, tmp_path):
    """With the store's host elsewhere, as under torchrun: nothing but its word tells that it is gone."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(EARLY))
    environment = {"XDG_CACHE_HOME": str(tmp_path), "MAKES_GROUP": "1" if makes_group else ""}
    (code, out), (_, other) = finish(start(script, 2, where, environment=environment), 80)
    assert code == 1
    assert "bad weather" in other
    found = re.search(r"told after ([\d.]+) s: (.*rank 1.*ValueError: bad weather.*)", out)
    assert found, out
    assert float(found[1]) < 30
