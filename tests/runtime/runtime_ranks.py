"""One rank: ``python runtime_ranks.py CHECK``, one of ``runtime_checks`` or ``replica_checks``.

On ``DEVICE`` of the environment, where that is set: all ranks on that one.
"""

import datetime
import faulthandler
import os
import sys

import replica_checks
import runtime_checks
import torch.distributed as dist

ATOMIC = 1e-10
"""Sums by an accelerator's atomics come in another order each time."""


def main():
    if "STACKS_AFTER_S" in os.environ:
        faulthandler.dump_traceback_later(float(os.environ["STACKS_AFTER_S"]))
    if "DEVICE" in os.environ:
        runtime_checks.DEVICE, runtime_checks.EXACT = os.environ["DEVICE"], ATOMIC
    # rank 0 must outlive the others here: it hosts the store, as a launcher does otherwise
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found = vars(runtime_checks) | vars(replica_checks)
    found[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
