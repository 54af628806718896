"""The checks of ``tests/runtime`` on the simulated accelerator; ``shared_checks.py CHECK ...`` is one rank.

They run in turn eagerly under the order check, and lazily; all of them in both ways behind ``whole``. Checks
of replicas make the rank's device the current one, as their wrappers want it; the others leave device 0
current.
"""

import functools
import sys
import tempfile

import accelerated_checks
import replica_checks
import runtime_checks
import torch

OF_FILES = {"checkpoints", "weights_come_and_go"}
OF_REPLICAS = {"data_parallel", "tensor_parallel", "sharded_weights_come_back", "buckets", "gathers"}


def main(*checks):
    is_whole = checks[0] == "whole"
    checks = checks[is_whole:]
    runtime_checks.KIND, runtime_checks.DEVICE = "sim", accelerated_checks.DEVICE
    # what wraps stages looks up the group of the device's kind
    backend = None if OF_REPLICAS & {*checks} else "gloo"
    if backend is None:
        torch.accelerator.set_device_index(accelerated_checks.DEVICE.index)
    # FSDP orders the next use of what it frees, not the freeing
    calls = [
        (functools.partial(run, check), accelerated_checks.ways_of(place, is_whole))
        for place, check in enumerate(checks)
    ]
    accelerated_checks.in_ways(calls, backend, eager_reuse=bool(backend))


def run(check):
    found = vars(runtime_checks) | vars(replica_checks)
    if check not in OF_FILES:
        found[check]()
        return
    shared = [tempfile.mkdtemp() if accelerated_checks.RANK == 0 else None]
    torch.distributed.broadcast_object_list(shared, 0)
    found[check](shared[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
