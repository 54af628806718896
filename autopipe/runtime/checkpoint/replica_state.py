"""Training state of data-parallel replicas: what each has of its own, such as a loader's position.

Weights and optimizers are the same on all of them and left to the first.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...errors import StoreError
from ...torch_private import default_store
from ..files.safetensors_file import bytes_of, of_text, text_of
from ..wire.board import Board, StoreGone
from ..wire.plain_values import Unfit, dumps, loads
from .rank_contents import whole

__all__ = ["ALONE", "Replica", "Words"]

POLL_S = 0.05
HEARD_S = 2.0
"""How long the first replica stays at most until the others have heard: it may host the store."""
LONGER = 10.0
_made: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Replica:
    """This process among those that hold the same stages: ``mesh`` and the names of its dims but ``pp``."""

    mesh: DeviceMesh | None = None
    dims: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[int]:
        return [self.mesh.get_group(name).size() for name in self.dims] if self.mesh is not None else []

    @property
    def n(self) -> int:
        return math.prod(self.sizes)

    @property
    def index(self) -> int:
        """Its place among them, the last dim's changing fastest."""
        number = 0
        for name, size in zip(self.dims, self.sizes, strict=True):
            assert self.mesh is not None
            number = number * size + self.mesh.get_local_rank(name)
        return number

    def words(self, limit_s: Callable[[], float]) -> Words | None:
        """What they tell each other beside their training; each of them makes it at the same point."""
        if self.n == 1 or self.mesh is None:
            return None
        dim, at = (self.mesh.mesh_dim_names or ()).index("pp"), self.mesh.get_coordinate()
        assert at is not None
        ranks = self.mesh.mesh.select(dim, at[dim]).flatten().tolist()
        name = f"replicas/{'-'.join(map(str, ranks))}"
        _made[name] += 1
        return Words(Board(default_store(), f"{name}/{_made[name]}", limit_s), self.n - 1, limit_s)

    # -- saving -------------------------------------------------------------------------------------

    def collect(self, state: dict[str, Any], fault: str, device: torch.device) -> dict[str, Any]:
        """The state to save, with what replicas have otherwise; every one of them calls it.

        Only what differs goes from one to another, as text. ``fault`` says why there is no state; then, or
        where a replica has one, raises :class:`StoreError`.
        """
        if self.n == 1 and not fault:
            return state
        parts: dict[str, Any] = {}
        sums: dict[str, str] = {}
        try:
            if not fault:
                parts = {f"objects/{key}": value for key, value in state["objects"].items()}
                parts["random/all"] = state["random"]
                sums = {key: dumps(value, _digest) for key, value in parts.items()}
        except Unfit as error:
            fault = str(error)
        told = [loads(text) for text in self._gather(dumps((fault, sums)), device)]
        faults = [text for text, _ in told if text]
        if faults:
            raise StoreError(fault or faults[0])
        everyone = [each for _, each in told]
        names = sorted({key for each in everyone for key in each})
        unlike = [key for key in names if len({each.get(key) for each in everyone}) > 1]
        own = {key: parts[key] for key in unlike if key in parts}
        gathered = [loads(text, of_text) for text in self._gather(dumps(own, _text), device)]
        replicas = [
            {
                "objects": {k.partition("/")[2]: v for k, v in each.items() if k.startswith("objects/")},
                "random": each.get("random/all", {}),
            }
            for each in gathered
        ]
        return {**state, "replicas": {"n": self.n, "own": replicas if unlike else []}}

    def _gather(self, text: str, device: torch.device) -> list[str]:
        """Every replica's text, in their order."""
        texts = [text]
        for name in reversed(self.dims):
            assert self.mesh is not None
            group = self.mesh.get_group(name)
            data = torch.tensor(list(dumps(texts).encode()), dtype=torch.uint8, device=device)
            sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
            dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8, device=device)
            padded[: data.numel()] = data
            found = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(found, padded, group=group)
            cut = [f[: int(n)].cpu().numpy().tobytes() for f, n in zip(found, sizes, strict=True)]
            texts = [t for each in cut for t in loads(each)]
        return texts

    def first(self, text: str, device: torch.device) -> str:
        """What the first of them says; every one of them calls it."""
        return self._gather(text, device)[0]

    # -- loading ------------------------------------------------------------------------------------

    def was_there(self, state: Mapping[str, Any]) -> bool:
        """Whether there was such a replica when ``state`` was saved."""
        return self.index < state.get("replicas", {}).get("n", 1)

    def own(self, state: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """What this replica had of its own, of one kind."""
        saved = state.get("replicas", {}).get("own", [])
        found: dict[str, Any] = saved[self.index].get(kind, {}) if self.index < len(saved) else {}
        return found

    def faults(self, states: Sequence[Mapping[str, Any]], objects: Collection[str]) -> list[str]:
        """In words, what each replica had of its own where there were more or fewer of them."""
        found = []
        for state in states[:1]:
            saved = state.get("replicas", {}).get("own", [])
            own = sorted({key for each in saved for key in each.get("objects", {}) if key in objects})
            if own and len(saved) != self.n:
                found.append(
                    f"{', '.join(own)} was saved by {len(saved)} replicas, each with its own, and {self.n} "
                    "load it; load without it, and place it yourself"
                )
        return found


ALONE = Replica()


def _digest(tensor: Tensor, _: str) -> str:
    return hashlib.sha256(bytes_of(whole(tensor))).hexdigest()


def _text(tensor: Tensor, _: str) -> str:
    return text_of(whole(tensor))


class Words:
    """What the first of a rank's replicas tells the others of a save in the background, by the job's store.

    They train meanwhile, so that none of their groups can carry it.
    """

    def __init__(self, board: Board, n_others: int, limit_s: Callable[[], float]) -> None:
        self._board, self._n_others, self._limit_s = board, n_others, limit_s

    @contextlib.contextmanager
    def told(self, name: str) -> Iterator[None]:
        """Within it the save ``name`` is made; then the others are told how that ended."""
        fault = "it was stopped"
        try:
            yield
            fault = ""
        except Exception as error:
            fault = str(error)
            raise
        finally:
            with contextlib.suppress(StoreGone):  # whose host is gone tells nobody anything
                self._board.post(name, fault)
                until_s = time.monotonic() + HEARD_S
                while self._board.count(f"{name}/heard", 0) < self._n_others and time.monotonic() < until_s:
                    time.sleep(POLL_S)

    def hear(self, name: str, path: pathlib.Path, check: Callable[[], None]) -> None:
        """Wait for how the first replica's save ends; ``check`` raises where there is no use.

        Raises :class:`StoreError` for one that failed, or that nothing is heard of for ten times as long as
        a rank may make no progress.
        """
        began_s = time.monotonic()
        try:
            while (fault := self._board.look(name)) is None:
                check()
                waited_s = time.monotonic() - began_s
                if waited_s > LONGER * self._limit_s():
                    raise StoreError(
                        f"{path}: nothing was heard of the first replica's save for {waited_s:.0f} s; look "
                        "at its log"
                    )
                time.sleep(POLL_S)
            self._board.count(f"{name}/heard", 1)
        except StoreGone as error:
            raise StoreError(f"{path}: it is not known whether it was saved, since {error}") from error
        if fault:
            raise StoreError(fault)
