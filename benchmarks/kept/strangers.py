"""A stranger at the ports of a running job: random bytes at every one, keys set in its store beforehand.

Who knows no key of the job must change nothing: every loss is held against that of a run in one process.

Gloo takes whoever comes first for a rank while it connects, and a job then does not start, so that its ports
are left alone until all ranks have their pipeline; the store and autopipe's own sockets never are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import random
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from autopipe.runtime.wire.job_key import attempt

from .faults import Ranks
from .rank import told
from .soak import EXACT, undisturbed
from .work import Trainer

__all__ = ["Met", "listening", "meet"]

N_RANKS = 3
GIVEN_UP_S = 300.0
CORNERS = ("autopipe/0-1-2/0", "talk/3/1", "talk/3/2", "talk/3/3")
"""Where in the store the ranks of the first pipeline, and those that plan it, write."""
KEYS = ("error", "done with the store", "save/1/0/0", "save/1/1/1", *itertools.chain.from_iterable(
    (f"{word}/{rank}" for rank in range(N_RANKS))
    for word in ("card", "door", "knock/1", "left", "lost", "position", "alive", "decided", "alike")
))  # fmt: skip
VALUES = (b"", b"0", b"[]", b"{}", b"\xff" * 64, b"0" * 32 + b"{}", b"x" * (1 << 16))


@dataclasses.dataclass
class Met:
    """What came of it: how much was thrown at how many ports, and the largest difference of a loss."""

    n_ports: int = 0
    n_sockets: int = 0
    n_connections: int = 0
    n_bytes: int = 0
    n_keys: int = 0
    n_losses: int = 0
    worst: float = 0.0


def _train(folder: pathlib.Path, n_steps: int) -> None:
    trainer = Trainer(N_RANKS, dtype=torch.float64, stall_limit_s=60.0)
    (folder / f"connected-{trainer.runtime.rank}").touch()
    with (folder / f"losses-{trainer.runtime.rank}").open("a") as out:
        for n in range(n_steps):
            out.write(f"{json.dumps(trainer.train(1)[0])}\n")
            if n % 20 == 0:
                trainer.runtime.save(folder / "run", keep_last=1, background=n % 40 == 0, **trainer.kept)
    dist.barrier()


def meet(n_steps: int, seed: int = 0) -> Met:
    """Disturb a job of so many steps for as long as it runs. Raises ``AssertionError`` where it shows."""
    draw, found, seen = random.Random(seed), Met(), set[tuple[int, str | int]]()
    with tempfile.TemporaryDirectory(prefix="autopipe-strangers-") as name:
        folder = pathlib.Path(name)
        hosted = socket.create_server(("127.0.0.1", 0), backlog=128)  # before the ranks are: nobody takes it
        port = hosted.getsockname()[1]
        ranks = Ranks(
            N_RANKS,
            lambda: told(lambda: _train(folder, n_steps), folder / f"ended-{os.environ['RANK']}"),
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
        everyone, until_s = range(N_RANKS), time.monotonic() + GIVEN_UP_S
        try:
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=hosted.detach()
            )
            found.n_keys = _preset(store.port)
            while not ranks.has_ended(everyone) and time.monotonic() < until_s:
                are_connected = len([*folder.glob("connected-*")]) == N_RANKS
                for address in listening([os.getpid(), *ranks.pids]):
                    if not are_connected and address[0] == socket.AF_INET and address[1] != port:
                        continue
                    seen.add(address)
                    found.n_bytes += _throw(address, draw)
                    found.n_connections += 1
            stacks = ranks.stacks(everyone)
        finally:
            ranks.end()
        assert not stacks, "\n".join(stacks)
        for path in folder.glob("ended-*"):
            end = json.loads(path.read_text())
            assert end["kind"] == "done", f"{path.name} with {end['kind']}: {end['text']}"
        for path in folder.glob("losses-*"):
            losses = [json.loads(line) for line in path.read_text().splitlines()]
            assert len(losses) == n_steps
            for loss, wanted in zip(losses, undisturbed(), strict=False):
                found.worst = max(found.worst, abs(loss - wanted))
                found.n_losses += 1
    found.n_ports = sum(family != socket.AF_UNIX for family, _ in seen)
    found.n_sockets = len(seen) - found.n_ports
    assert found.worst < EXACT, f"a loss differs by {found.worst}"
    return found


def _preset(port: int) -> int:
    """Set keys, as far as nobody has yet, to what no rank would; how many."""
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    n_set = 0
    for corner, key in itertools.product(CORNERS, KEYS):
        value = VALUES[n_set % len(VALUES)]
        place = dist.PrefixStore(f"autopipe/{attempt()}/{corner}", store)  # type: ignore[attr-defined]
        place.compare_set(key, "", value.decode("latin1"))
        n_set += 1
    return n_set


def _throw(address: tuple[int, str | int], draw: random.Random) -> int:
    """Connect and say something; how many bytes."""
    family, at = address
    data = draw.randbytes(draw.choice((0, 1, 8, 64, 4096, 1 << 16)))
    if draw.random() < 0.3:  # what begins as a message of a length may
        data = draw.choice((0, 1, 40, 1 << 31, (1 << 64) - 1)).to_bytes(8, "little") + data
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(0.05)
        stranger.connect(at if family == socket.AF_UNIX else ("127.0.0.1", at))
        stranger.sendall(data)
        if draw.random() < 0.1:
            stranger.recv(64)
    return len(data)


def listening(pids: Sequence[int]) -> Iterator[tuple[int, str | int]]:
    """(family, port or path) of every socket at which one of these processes listens."""
    own = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    own.add(
                        str(pathlib.Path(entry.path).readlink()).removeprefix("socket:[").removesuffix("]")
                    )
    for kind in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                yield socket.AF_INET, int(fields[1].rpartition(":")[2], 16)
    for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[3] == "00010000" and fields[6] in own:
            yield socket.AF_UNIX, fields[7]
