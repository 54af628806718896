"""Starts a script on several ranks over loopback and ends them all, whatever happens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

__all__ = ["Ready", "finish", "free_port", "run_ranks", "start"]

ROOT = pathlib.Path(__file__).parents[1]
PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "runtime", ROOT / "tests" / "accelerator")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(
    script: pathlib.Path, n_ranks: int, *args: object, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """The processes of all ranks, with torchrun's environment and what ``environment`` adds."""
    return [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), *map(str, args)],
            env=ranked,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for ranked in environments(n_ranks, environment)
    ]


def environments(n_ranks: int, environment: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Each rank's, as torchrun makes it; of no ranks, that of one process alone."""
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        **(environment or {}),
    }
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n_ranks)}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)]
    return [{**common, **rank} for rank in ranks or [{}]]


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """(exit code, output) of each; those that are not done in time are ended, and say so.

    All are read at once: a rank whose pipe is full stands still, and with it those that wait for it.
    """
    deadline = time.monotonic() + timeout_s

    def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\n(still running after {timeout_s} s)"
        return process.returncode, output

    try:
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as readers:
            return list(readers.map(ended, processes))
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_ranks(
    script: pathlib.Path,
    n_ranks: int,
    *args: object,
    timeout_s: float = 120,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``script`` once per rank; each rank's output, in order.

    Fails the test with the output of every rank when one exits non-zero or the time is up; only processes
    started here are ended.
    """
    results = finish(start(script, n_ranks, *args, environment=environment), timeout_s)
    return outputs(results, f"{script.name} {' '.join(map(str, args))}")


def outputs(results: Sequence[tuple[int, str]], what: str) -> list[str]:
    """Each rank's output; fails the test with all of them where one exited non-zero."""
    text = "\n".join(f"--- rank {r}\n{output[-3000:]}" for r, (_, output) in enumerate(results))
    failed = [f"rank {r} exited with {code}" for r, (code, _) in enumerate(results) if code]
    assert not failed, f"{what}: {'; '.join(failed)}\n{text}"
    return [output for _, output in results]


class Ready:
    """A process that has imported ``imports`` and forks ranks: importing takes longer than most scripts.

    What a script sees is as in a process of its own, but for what is decided when Python starts (the hash
    seed, which ranks then share). It ends with :meth:`close`.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self.imports = tuple(imports)
        self._process: subprocess.Popen[bytes] | None = None

    def run_ranks(
        self, script: pathlib.Path, n_ranks: int, *args: object, timeout_s: float = 120
    ) -> list[str]:
        """As the function of this name; with no ranks, one process alone."""
        with tempfile.TemporaryDirectory(prefix="ranks") as folder:
            ranks = [
                {
                    "script": str(script),
                    "args": [str(arg) for arg in args],
                    "environment": environment,
                    "folder": str(pathlib.Path.cwd()),
                    "output": f"{folder}/{rank}",
                }
                for rank, environment in enumerate(environments(n_ranks))
            ]
            codes = self._ask(
                {"imports": self.imports, "beside": str(script.parent), "ranks": ranks}, timeout_s
            )
            said = [pathlib.Path(rank["output"]).read_text() for rank in ranks]
        if None in codes:
            said = [f"{words}\n(still running after {timeout_s} s)" for words in said]
        results = [
            (-signal.SIGKILL if code is None else code, words)
            for code, words in zip(codes, said, strict=True)
        ]
        return outputs(results, f"{script.name} {' '.join(map(str, args))}")

    def _ask(self, asked: object, timeout_s: float) -> list[int | None]:
        """The exit code of each rank, None where all were ended because the time was up."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(ROOT / "tests" / "forking.py")],
                env=environments(0)[0],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        process, deadline = self._process, time.monotonic() + timeout_s
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        pids = self._line(process, deadline)
        if pids is None:
            process.kill()
            self.close()
            raise AssertionError(f"importing {', '.join(self.imports)} took over {timeout_s} s")
        codes = self._line(process, deadline)
        if codes is not None:
            return list(codes)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._line(process, time.monotonic() + 10)
        return [None] * len(pids)

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> list[int] | None:
        """The next answer; None where there is none in time."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.1, deadline - time.monotonic()))
        if not ready:
            return None
        line = process.stdout.readline()
        if not line:
            self.close()
            raise AssertionError(f"the process that forks ranks ended, importing {', '.join(self.imports)}")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End it: it forks no more."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            process.wait(timeout=30)
            process.stdout.close()
