"""Those that are compared: our runtime, torch's schedules, a hand-written loop and compute alone.

Each is made from the same model, cuts and batch, as a function that runs one step and the parameters whose
gradients it leaves. Measuring them is left to ``measurements``.
"""

from __future__ import annotations

import copy
import itertools
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from autopipe.accelerator import memory
from autopipe.runtime import Runtime
from autopipe.torch_private import backward

from . import models

__all__ = ["CONTENDERS", "Contender"]

Contender = tuple[Callable[[], object], list[nn.Parameter]]


def ours(model: models.Chain, x: Tensor, target: Tensor, cuts: list[int], schedule: str, m: int) -> Contender:
    made = models.split(
        copy.deepcopy(model), x[: len(x) // m], cuts, max(2, dist.get_world_size()), schedule, m
    )
    runtime = Runtime(*made, loss_fn=models.loss)
    return lambda: runtime.step(x, target=target), list(runtime.parameters())


def torchs(
    model: models.Chain, x: Tensor, target: Tensor, cuts: list[int], schedule: str, m: int
) -> Contender:
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    pieces = _pieces(model, cuts)
    own = {s: piece for s, piece in enumerate(pieces) if s % n_ranks == rank}
    stages = [PipelineStage(p, s, len(pieces), torch.device("cpu")) for s, p in own.items()]
    if schedule == "1f1b":
        runner: Any = Schedule1F1B(stages[0], m, models.loss, scale_grads=True)
    else:
        runner = ScheduleInterleaved1F1B(stages, m, models.loss, scale_grads=True)

    def step() -> None:
        given = (x,) if rank == 0 else ()
        wanted: dict[str, Any] = {"target": target, "losses": []} if rank == n_ranks - 1 else {}
        runner.step(*given, **wanted)

    return step, [p for piece in own.values() for p in piece.parameters()]


def by_hand(
    model: models.Chain, x: Tensor, target: Tensor, cuts: list[int], schedule: str, m: int
) -> Contender:
    """The least code that runs 1F1B on two ranks."""
    rank, pieces = dist.get_rank(), _pieces(model, cuts)
    piece = pieces[rank]
    xs, ts = x.chunk(m), target.chunk(m)
    shape = pieces[0](xs[0]).shape

    def first() -> None:
        outs: list[Any] = []
        sends = []

        def forward(i: int) -> None:
            outs.append(piece(xs[i]))
            sends.append(dist.isend(outs[i].detach(), 1))

        def backward(i: int) -> None:
            grad = torch.empty(shape)
            dist.recv(grad, 1)
            outs[i].backward(grad)
            outs[i] = None

        forward(0)
        for i in range(1, m):
            forward(i)
            backward(i - 1)
        backward(m - 1)
        for send in sends:
            send.wait()

    def last() -> None:
        sends = []
        buffer = torch.empty(shape)
        coming = dist.irecv(buffer, 0)
        for i in range(m):
            coming.wait()
            given = buffer.requires_grad_()
            if i + 1 < m:
                buffer = torch.empty(shape)
                coming = dist.irecv(buffer, 0)
            (models.loss(piece(given), ts[i]) / m).backward()
            sends.append(dist.isend(given.grad, 0))
        for send in sends:
            send.wait()

    return (first if rank == 0 else last), list(piece.parameters())


def by_hand_over_a_socket(
    model: models.Chain, x: Tensor, target: Tensor, cuts: list[int], schedule: str, m: int
) -> Contender:
    """The same over a Unix socket: what is left where nothing is checked, agreed on, timed or recorded."""
    rank, pieces = dist.get_rank(), _pieces(model, cuts)
    piece, xs, ts = pieces[rank], x.chunk(m), target.chunk(m)
    shape = pieces[0](xs[0]).shape
    seeds = torch.full((m,), 1 / m).unbind()
    connection = _socket(rank)

    def send(tensor: Tensor) -> None:
        connection.sendall(memory(tensor))

    def receive() -> Tensor:
        tensor = torch.empty(shape)
        connection.recv_into(memory(tensor), tensor.nbytes, socket.MSG_WAITALL)
        return tensor

    def first() -> None:
        outs: list[Any] = []
        for i in range(m + 1):
            if i < m:
                outs.append(piece(xs[i]))
                send(outs[i].detach())
            if i:
                backward((outs[i - 1],), (receive(),))
                outs[i - 1] = None

    def last() -> None:
        for i in range(m):
            given = receive().requires_grad_()
            backward((models.loss(piece(given), ts[i]),), (seeds[i],))
            assert given.grad is not None
            send(given.grad)

    return (first if rank == 0 else last), list(piece.parameters())


def _socket(rank: int) -> socket.socket:
    """A connection between ranks 0 and 1."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        path = [f"{folder}/door"]
        if rank == 0:
            door.bind(path[0])
            door.listen()
        dist.broadcast_object_list(path, 0)
        if rank == 0:
            return door.accept()[0]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path[0])
        return connection


def ceiling(
    model: models.Chain, x: Tensor, target: Tensor, cuts: list[int], schedule: str, m: int
) -> Contender:
    """What two ranks with one stage each compute, both at once, with nothing sent and no bubble."""
    rank, pieces = dist.get_rank(), _pieces(model, cuts)
    piece, xs, ts = pieces[rank], x.chunk(m), target.chunk(m)
    with torch.no_grad():
        given = xs if rank == 0 else [pieces[0](part) for part in xs]
    grad = torch.randn_like(pieces[0](xs[0]))

    def step() -> None:
        for part, wanted in zip(given, ts, strict=True):
            out = piece(part.detach().requires_grad_(rank > 0))
            if rank == 0:
                out.backward(grad)
            else:
                (models.loss(out, wanted) / m).backward()

    return step, list(piece.parameters())


def accumulate(
    model: models.Chain, x: Tensor, target: Tensor, cuts: list[int], schedule: str, m: int
) -> Contender:
    """The plain model in one process, its gradients accumulated over microbatches."""
    plain = copy.deepcopy(model)

    def step() -> None:
        for part, wanted in zip(x.chunk(m), target.chunk(m), strict=True):
            (models.loss(plain(part), wanted) / m).backward()

    return step, list(plain.parameters())


def _pieces(model: models.Chain, cuts: list[int]) -> list[nn.Sequential]:
    own = copy.deepcopy(model)
    edges = [0, *cuts, len(own.layers)]
    return [nn.Sequential(*own.layers[a:b]) for a, b in itertools.pairwise(edges)]


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "ours": ours,
    "torch": torchs,
    "by hand": by_hand,
    "by hand over a socket": by_hand_over_a_socket,
    "ceiling": ceiling,
    "plain": accumulate,
}
