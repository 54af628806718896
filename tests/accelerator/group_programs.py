"""What two ranks do on the simulated process group, wrong and right; this script is one rank.

Prints one JSON line: whether each program's right and wrong form gave what it should.
"""

import contextlib
import datetime
import json
import os
import sys

import simulated
import simulated.group
import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
DEVICE = torch.device("sim", RANK)
PEER = 1 - RANK
PATIENCE = datetime.timedelta(seconds=30)


def late(x, times=10):
    for _ in range(times):
        x += 1
    return x


def send_buffer_overwritten(group, is_right):
    x = torch.zeros(1000, device=DEVICE)
    if RANK == 0:
        work = group.send([late(x)], PEER)
        if is_right:
            work.wait()
        x.fill_(99.0)
        work.wait()
    else:
        group.recv([x], PEER).wait()
    return x[0].item() == (99.0 if RANK == 0 else 10.0)


def receive_not_awaited(group, is_right):
    x = torch.zeros(1000, device=DEVICE)
    if RANK == 0:
        group.send([late(x)], PEER).wait()
        return True
    work = group.recv([x], PEER)
    if is_right:
        work.wait()
    return (x * 1)[0].item() == 10.0


def both_send_first(group, is_right):
    mine, theirs = torch.full((4,), float(RANK), device=DEVICE), torch.zeros(4, device=DEVICE)
    order = [lambda: group.send([mine], PEER), lambda: group.recv([theirs], PEER)]
    for work in [call() for call in (order[::-1] if is_right and RANK else order)]:
        work.wait(PATIENCE if is_right else datetime.timedelta(seconds=0.5))
    return theirs[0].item() == PEER


def host_blocks_in_a_wait(group, is_right):
    x = torch.ones(4, device=DEVICE)
    work = group.allreduce([x])
    with simulated.waits("accelerator") as found:
        work.wait() if is_right else work.wait(PATIENCE)
    return not found and x[0].item() == 2.0


def refused(group, is_right):
    x = torch.zeros(2, dtype=torch.uint8 if is_right else torch.int16, device=DEVICE)
    (group.recv if RANK else group.send)([x], PEER).wait()
    return True


def on_the_host(group, is_right):
    x = torch.zeros(2, device=DEVICE if is_right else "cpu")
    (group.recv if RANK else group.send)([x], PEER).wait()
    return True


def lost(group, is_right):
    x = torch.zeros(4, device=DEVICE)
    if RANK == 0:
        work = group.send([late(x)], PEER)
        if is_right:
            work.wait(PATIENCE)
        else:
            group.abort()
        return True
    work = group.recv([x], PEER)
    if not is_right:
        group.abort()
    work.wait()
    return x[0].item() == 10.0


PROGRAMS = [thing for thing in list(vars().values()) if getattr(thing, "__code__", None)]
PROGRAMS = [p for p in PROGRAMS if p.__code__.co_varnames[:2] == ("group", "is_right")]


def outcome(program, word, store):
    name = f"{program.__name__} {word}"
    group = simulated.group.Group(dist.PrefixStore(name, store), RANK, 2, PATIENCE)
    try:
        return program(group, word == "right")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(RuntimeError):  # a race told twice
            torch.accelerator.synchronize(DEVICE)


def torn_down(store):
    """A group as torch makes it, aborted with a message under way: does not come back."""
    group = simulated.group.Group(store, RANK, 2, PATIENCE)
    group.recv([torch.zeros(4, device=DEVICE)], PEER)
    group.abort()


def main():
    torch.accelerator.set_device_index(DEVICE.index)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if "torn_down" in sys.argv:
        torn_down(store)
    os.environ["TORCH_SIMCCL_ASYNC_ERROR_HANDLING"] = "0"
    found = {p.__name__: {word: outcome(p, word, store) for word in ("right", "wrong")} for p in PROGRAMS}
    print(json.dumps(found), flush=True)
    store.set(f"done {RANK}", "")
    store.wait([f"done {PEER}"])
    os._exit(0)  # what a wrong program left behind may never end


if __name__ == "__main__":
    main()
