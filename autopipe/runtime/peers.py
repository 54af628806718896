"""The ranks of one pipeline: how they find each other, agree on every step, and end together.

Moving tensors is left to ``channel``, judging stalls to ``failure``.
"""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, PrefixStore, ProcessGroup, Store

from ..errors import InputError, PlanError, StepError
from .failure import Position, Watch, first_difference, roll_call

__all__ = ["Peers", "pipeline_ranks"]

LONG = datetime.timedelta(hours=12)
"""Timeout of our communicators: stalls are judged by the watch, which knows what is expected."""

_made: dict[str, int] = {}


def pipeline_ranks(mesh: DeviceMesh | None, n_ranks: int) -> tuple[int, ...]:
    """The global ranks of this process's pipeline in order; empty for all stages in this process.

    Raises :class:`InputError` when their number is not the plan's.
    """
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if "pp" in names:
            group = mesh.get_group("pp")
        elif mesh.ndim == 1:
            group = mesh.get_group()
        else:
            raise InputError(f"the mesh has dims {names}; name the pipeline's 'pp'")
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.group.WORLD
    else:
        return ()
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) != n_ranks:
        if len(ranks) == 1:
            return ()
        raise InputError(
            f"the plan is for {n_ranks} ranks but {len(ranks)} are running; start {n_ranks} processes, "
            f"plan for n_ranks={len(ranks)}, or pass a mesh with a 'pp' dim of {n_ranks}"
        )
    return ranks if len(ranks) > 1 else ()


class Peers:
    """This rank's ties to the other ranks of its pipeline.

    Attributes
    ----------
    rank, n_ranks: within the pipeline. group: carries tensors; its own communicator, so breaking it harms
    nobody else. control: carries small collectives on the CPU. watch: see :class:`Watch`.
    """

    def __init__(
        self, ranks: tuple[int, ...], device: torch.device, card: dict[str, Any], limit_s: Callable[[], float]
    ) -> None:
        self.ranks, self.rank, self.n_ranks = ranks, ranks.index(dist.get_rank()), len(ranks)
        self._device = device
        name = "-".join(map(str, ranks))
        _made[name] = _made.get(name, -1) + 1
        default = dist.distributed_c10d._get_default_store()
        self.store: Store = PrefixStore(f"autopipe/{name}/{_made[name]}", default.clone())
        self.cards = self._compare(card, limit_s())
        self.group = self.new_group(tuple(range(self.n_ranks)))
        # gloo groups serve as their own control plane
        self.control = self.group
        if device.type != "cpu":
            self.control = dist.new_group(
                list(ranks), LONG, "gloo", use_local_synchronization=True
            )
        self.position = Position()
        self.watch = Watch(
            self.store,
            self.rank,
            self.n_ranks,
            position=lambda: self.position,
            abort=self._abort,
            limit_s=limit_s,
        )

    def _compare(self, card: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        shared = {k: v for k, v in card.items() if not k.startswith("own ")}
        cards = roll_call(self.store, self.rank, self.n_ranks, json.dumps(card), limit_s)
        read = [json.loads(c) for c in cards]
        for key in shared:
            odd = first_difference([json.dumps(c[key]) for c in read])
            if odd is not None:
                raise PlanError(
                    f"ranks disagree on {key}: rank 0 has {read[0][key]}, rank {odd} has {read[odd][key]}; "
                    "run the same code with the same plan on every rank"
                )
        return read

    def new_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """A communicator of some of the pipeline's ranks; all of them must ask for it in the same order."""
        return dist.new_group([self.ranks[r] for r in ranks], LONG, use_local_synchronization=True)

    def agree(self, step: int, words: str) -> None:
        """Check that every rank begins the same step with the same kind of batch.

        ``words`` says all that must be equal. Raises :class:`StepError` on every rank when it is not.
        """
        self.watch.raise_if_failed()
        self.position.waits_for = (self.rank + 1) % self.n_ranks
        digest = torch.tensor([step, zlib.crc32(words.encode())])
        found = [torch.empty_like(digest) for _ in self.ranks]
        self.control.allgather([found], [digest]).wait()
        if all(torch.equal(f, digest) for f in found):
            return
        self.store.set(f"begins/{self.rank}", f"step {step}: {words}")
        said = [self.store.get(f"begins/{r}").decode() for r in range(self.n_ranks)]
        odd = first_difference(said) or 0
        message = (
            f"ranks began different steps: rank 0 {said[0]}; rank {odd} {said[odd]}; "
            "give every rank the same batches, in the same order and mode"
        )
        raise StepError(self.watch.publish(message))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` of pipeline rank ``source``, on every rank."""
        self.position.waits_for = source if source != self.rank else -1
        dist.broadcast(tensor, src=self.ranks[source], group=self.group)
        return tensor

    def share(self, thing: Any, source: int) -> Any:
        """A picklable object of pipeline rank ``source``, on every rank."""
        box = [thing]
        dist.broadcast_object_list(box, src=self.ranks[source], group=self.control)
        return box[0]

    def gather(self, thing: Any) -> list[Any]:
        """Every rank's picklable object, on every rank."""
        found: list[Any] = [None] * self.n_ranks
        dist.all_gather_object(found, thing, group=self.control)
        return found

    def _abort(self) -> None:
        """Break this pipeline's communicators; calls that wait on them raise."""
        for group in {id(g): g for g in (self.group, self.control)}.values():
            if "gloo" in group.name():
                # gloo has no abort, but a timed-out wait closes every connection of its group
                try:
                    other = (self.rank + 1) % self.n_ranks
                    group.recv([torch.empty(1)], other, 1 << 16).wait(datetime.timedelta(milliseconds=1))
                except RuntimeError:
                    continue
            else:
                group.abort()
