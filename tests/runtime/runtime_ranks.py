"""Runs a check on several ranks: each a process of its own on 127.0.0.1, with a time limit.

``python runtime_ranks.py CHECK`` is one rank; the checks themselves are in ``runtime_checks``.
"""

import datetime
import faulthandler
import os
import pathlib
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(check, n_ranks, *arguments):
    """The processes of all ranks of a check."""
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(HERE / "runtime_ranks.py"), check, *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_ranks)
    ]


def finish(processes, timeout_s):
    """(exit code, output) of each, ending those that are not done in time."""
    deadline = time.monotonic() + timeout_s
    results = []
    for process in processes:
        try:
            out, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            out += "\n(timed out)"
        results.append((process.returncode, out))
    return results


def run(check, n_ranks, *arguments, timeout_s=120):
    """Run a check that must pass on every rank."""
    results = finish(start(check, n_ranks, *arguments), timeout_s)
    for rank, (code, out) in enumerate(results):
        assert code == 0, f"rank {rank} of {check}:\n{out[-4000:]}"
    return [out for _, out in results]


def main():
    faulthandler.enable()
    if "STACKS_AFTER_S" in os.environ:
        faulthandler.dump_traceback_later(float(os.environ["STACKS_AFTER_S"]))
    import torch.distributed as dist

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import runtime_checks

    # rank 0 must outlive the others here: it hosts the store, as a launcher does otherwise
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    getattr(runtime_checks, sys.argv[1])(*sys.argv[2:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
