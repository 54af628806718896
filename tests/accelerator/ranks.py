"""Runs a script of this folder once per rank, each a process of its own on 127.0.0.1."""

import pathlib
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def run(environment, script, n_ranks, *arguments, timeout_s=100):
    """What each rank printed; every rank has to end well, and none is left behind."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n_ranks)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "SIM_DEVICES": str(n_ranks + 1)}
    command = [sys.executable, "-X", "faulthandler", str(HERE / script), *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_ranks)
    ]
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
    for rank, (code, out) in enumerate(results):
        assert code == 0, f"rank {rank} of {script} {arguments}:\n{out[-4000:]}"
    return [out for _, out in results]
