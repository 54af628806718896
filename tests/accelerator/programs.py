"""Wrong programs that the simulated accelerator is to catch, each with its right twin; run as a script.

Prints one JSON line: what every program gave, run eagerly under the order check, late at random, and lazily.
"""

import ctypes
import json
import sys

import torch
from simulated import settings, take_races, waits

N = 1000


def stream():
    return torch.Stream(device="sim:0")


def now():
    return torch.accelerator.current_stream(0)


def counted(times=20):
    x = torch.zeros(N, device="sim:0")
    for _ in range(times):
        x += 1
    return x


def event_not_awaited(is_right):
    other = stream()
    x = counted()
    if is_right:
        other.wait_stream(now())
    with other:
        y = x * 1
    other.synchronize()
    return y[0].item()


def freed_while_in_use(is_right):
    other = stream()
    x = torch.ones(N, device="sim:0")
    other.wait_stream(now())
    with other:
        late = torch.zeros(N, device="sim:0")
        for _ in range(10):
            late += 1
        y = x + late
    if is_right:
        x.record_stream(other)
    del x
    again = torch.full((N,), 7.0, device="sim:0")
    now().synchronize()
    other.synchronize()
    return y[0].item() + 0 * again[0].item()


def overwritten_while_in_use(is_right):
    other = stream()
    x = torch.ones(N, device="sim:0")
    other.wait_stream(now())
    with other:
        late = torch.zeros(N, device="sim:0")
        for _ in range(10):
            late += 1
        y = x + late
    if is_right:
        now().wait_stream(other)
    x.fill_(100.0)
    now().synchronize()
    other.synchronize()
    return y[0].item()


def host_reads_too_early(is_right):
    there = torch.zeros(N).pin_memory()  # fresh memory may hold what an earlier run left there
    there.copy_(counted(), non_blocking=True)
    if is_right:
        now().synchronize()
    return there[0].item()


def pinned_source_overwritten(is_right):
    host = torch.ones(N).pin_memory()
    late = counted()
    y = host.to("sim:0", non_blocking=True)
    if is_right:
        now().synchronize()
    host.fill_(50.0)
    return (y + 0 * late)[0].item()


def another_device_is_awaited(is_right):
    x = torch.zeros(N, device="sim:1")
    for _ in range(20):
        x += 1
    there = torch.zeros(N).pin_memory()
    there.copy_(x, non_blocking=True)
    torch.accelerator.synchronize(1 if is_right else 0)
    return there[0].item()


def another_device_is_seeded(is_right):
    def draw():
        if is_right:
            torch.get_device_module("sim").default_generators[1].manual_seed(5)
        else:
            torch.get_device_module("sim").manual_seed(5)
        return torch.rand(3, device="sim:1").tolist()

    return draw() == draw()


def another_device_is_timed(is_right):
    on = torch.accelerator.current_stream(1 if is_right else 0)
    start, end = (torch.Event(on.device, enable_timing=True) for _ in range(2))
    x = torch.randn(300, 300, device="sim:1")
    torch.accelerator.synchronize(1)
    start.record(on)
    for _ in range(20):
        x = x @ x
    end.record(on)
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    return start.elapsed_time(end) > 1.0


def never_written(is_right):
    x = torch.zeros(4, device="sim:0") if is_right else torch.empty(4, device="sim:0")
    return x.sum().item()


def on_two_devices(is_right):
    return (torch.ones(2, device="sim:0") + torch.ones(2, device=f"sim:{int(not is_right)}")).sum().item()


def beside_a_cpu_tensor(is_right):
    other = torch.ones(2, device="sim:0") if is_right else torch.ones(2)
    return (torch.ones(2, device="sim:0") + other).sum().item()


def with_a_generator_of_the_host(is_right):
    device = "sim:0" if is_right else "cpu"
    return torch.rand(1, device="sim:0", generator=torch.Generator(device)).numel()


def index_out_of_range(is_right):
    x = torch.arange(4.0, device="sim:0")
    return x[torch.tensor([3 if is_right else 9], device="sim:0")].item()


def more_than_fits(is_right):
    room = 1 << 24
    with settings(capacity=torch.accelerator.memory_reserved(0) + room):
        return torch.zeros(room // (8 if is_right else 2), device="sim:0").numel() > 0


def host_waits_unasked(is_right):
    with waits("accelerator") as found:
        x = torch.ones(4, device="sim:0")
        if not is_right:
            x.sum().item(), x.tolist(), x.nonzero(), bool((x > 0).all()), x[x > 0]
        torch.accelerator.current_stream(0)
    return sum(found.values()) == 0


PROGRAMS = [thing for thing in list(vars().values()) if getattr(thing, "__code__", None)]
PROGRAMS = [p for p in PROGRAMS if p.__code__.co_varnames[:1] == ("is_right",)]
WAYS = {"eager": {"races": 2}, "late": {"races": 0, "delay_us": 2000}, "lazy": {"races": 0, "lazy": True}}


def outcome(program, is_right, options):
    """What a program gave, or what it raised, at once or at the next wait."""
    given, wait = None, torch.accelerator.synchronize
    for step in (lambda: program(is_right), lambda: wait(0), lambda: wait(1)):
        try:
            with settings(**options):
                found = step()
            given = found if given is None else given
        except Exception as error:
            has_failed = isinstance(given, str)
            given = given if has_failed else f"{type(error).__name__}: {error}"
    take_races()
    return given


def touch():
    """The host reads the device's memory: nothing comes after."""
    x = torch.ones(4, device="sim:0")
    torch.accelerator.synchronize()
    print(ctypes.c_float.from_address(x.data_ptr()).value)


def give_back():
    """What is in use stays where other memory of its page is given back."""
    held = [torch.full((8,), float(i), device="sim:0") for i in range(64)]
    kept = held[::2]
    del held
    torch.accelerator.empty_cache()
    assert [x.unique().tolist() for x in kept] == [[2.0 * i] for i in range(32)]


def main():
    results = {
        program.__name__: {
            word: {way: outcome(program, word == "right", options) for way, options in WAYS.items()}
            for word in ("right", "wrong")
        }
        for program in PROGRAMS
    }
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit({"touch": touch, "give_back": give_back}.get(sys.argv[-1], main)())
