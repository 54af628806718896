"""All ranks of one mind where they save, load or cut anew, and all replicas: who is told what, who raises.

What is saved and loaded is left to ``save_load``, what replicas have of their own to ``replica_state``.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..errors import AutopipeError, InputError, StoreError
from ..files import unreadable
from .checkpoint.rank_contents import SaveStatus
from .checkpoint.replica_state import Replica
from .reduce.data_parallel import largest

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Agreement", "CallSignature"]


class CallSignature(msgspec.Struct, frozen=True):
    """What a rank was called with: where to save, whether an optimizer came along, and whether it trains.

    ``objects`` are the names of all that came along, ``manner`` says how else it is to be done.
    """

    path: str
    has_optimizer: bool
    trains: bool
    objects: tuple[str, ...] = ()
    manner: str = ""


class Agreement:
    """One rank among those of its pipeline, and among the replicas that hold the same stages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # -- ranks --------------------------------------------------------------------------------------

    def exchange(self, mine: SaveStatus) -> Sequence[SaveStatus]:
        """What every rank of the pipeline tells, by rank."""
        peers = self._engine.peers
        return [mine] if peers is None else peers.gather(mine)

    def as_first(self, text: str) -> str:
        """What the first of this rank's replicas says in the place of ``text``; every one calls it."""
        with self._engine.outside("hearing what the first replica found"):
            return self.replica.first(text, self._engine.device)

    def together(self, words: str) -> contextlib.AbstractContextManager[None]:
        """Within it others that wait for this rank are told that it does what ``words`` says."""
        return self._engine.together(words, waits=False)

    @contextlib.contextmanager
    def agreed(
        self, path: pathlib.Path, otherwise: str, undo: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Within it each rank does its part; where one fails, all do ``undo`` and raise the same."""
        own: AutopipeError | None = None
        try:
            yield
        except OSError as error:
            own = unreadable(path, error)
        except AutopipeError as error:
            own = error
        except Exception as error:  # what a hostile checkpoint ends in; others wait to be told
            own = StoreError(f"{path} cannot be used: {type(error).__name__}: {error}")
            own.__cause__ = error
        told = self.exchange(SaveStatus(fault="" if own is None else str(own)))
        if self._replicas_fine(own is None and not any(t.fault for t in told)):
            return
        undo()
        faults = [
            f"rank {rank}: {t.fault}" if len(told) > 1 else t.fault for rank, t in enumerate(told) if t.fault
        ]
        same = len({t.fault for t in told}) == 1 and own is not None
        text = str(own) if same else "; ".join(faults) or "another replica could not load it"
        kind = type(own) if isinstance(own, InputError) else StoreError
        raise kind(f"{text}; {otherwise}") from own

    def check_same(self, path: pathlib.Path, fingerprint: int) -> None:
        """Raise :class:`StoreError` on every rank where not all have opened the same save."""
        told = self.exchange(SaveStatus(draft=str(fingerprint)))
        numbers = [int(t.draft) for t in told]
        least, most = self._least(min(numbers), -max(numbers))
        if least != -most:
            raise StoreError(
                f"{path} is not the same save for every rank (by rank: "
                f"{', '.join(f'{n:08x}' for n in numbers)}): it was replaced meanwhile, or each host has one "
                "of its own; load from a folder that all ranks share; nothing was changed"
            )

    def check_alike(self, asked: CallSignature) -> None:
        """Raise :class:`InputError` on every rank where one saves elsewhere or without its optimizer.

        A rank that trains nothing has none. Replicas of a rank are to give all the same, and hear of it
        where another's pipeline was called in unlike ways.
        """
        peers = self._engine.peers
        everyone = [asked] if peers is None else peers.gather(asked)
        fault = self._unlike(everyone)
        mark = zlib.crc32(repr([(a.path, a.objects, a.manner) for a in everyone]).encode())
        is_fine, least, most = self._least(int(not fault), mark, -mark)
        if not is_fine or least != -most:
            raise InputError(
                fault
                or "another replica makes a different call (another path, other objects), or ranks within it "
                f"do; this one is {_call(asked)}: call it alike everywhere"
            )

    def _unlike(self, everyone: Sequence[CallSignature]) -> str:
        """In words, what ranks of this pipeline were called with otherwise; empty where all is well."""
        paths = {a.path: rank for rank, a in enumerate(everyone)}
        if len(paths) > 1:
            places = ", ".join(f"rank {rank} gave {path}" for path, rank in paths.items())
            return f"{places}: a save is one folder of all ranks; give every rank the same"
        manners = {a.manner: rank for rank, a in enumerate(everyone)}
        if len(manners) > 1:
            shown = ", ".join(f"rank {rank} gave {manner}" for manner, rank in manners.items())
            return f"{shown}: all ranks do it together; give every rank the same"
        with_one = [rank for rank, a in enumerate(everyone) if a.has_optimizer]
        without = [rank for rank, a in enumerate(everyone) if a.trains and not a.has_optimizer]
        if with_one and without:
            return (
                f"rank {with_one[0]} gave an optimizer and rank {without[0]}, which trains parameters too, "
                "gave none, so that its state would be lost; give every rank's own"
            )
        return ""

    # -- replicas -----------------------------------------------------------------------------------

    @functools.cached_property
    def replica(self) -> Replica:
        """This process among those that hold the same stages."""
        return Replica(self._engine.options.mesh, self._other_dims)

    @property
    def writes(self) -> bool:
        """False on all but the first replica of a mesh's other dims."""
        mesh = self._engine.options.mesh
        return all(mesh.get_local_rank(n) == 0 for n in self._other_dims) if mesh is not None else True

    @contextlib.contextmanager
    def first_replica_saves(self, path: pathlib.Path) -> Iterator[None]:
        """Within it the first replica saves; the others wait for how it ends."""
        is_fine = False
        try:
            yield
            is_fine = True
        finally:
            are_fine = self._replicas_fine(is_fine)
        if not are_fine:
            raise StoreError(f"{path} was not saved by the first replica, which says why")

    @property
    def _other_dims(self) -> tuple[str, ...]:
        mesh = self._engine.options.mesh
        if mesh is None or mesh.ndim == 1:
            return ()
        return tuple(n for n in mesh.mesh_dim_names or () if n != "pp")

    def any(self, mine: bool) -> bool:
        """Whether it is so on any of this rank's replicas; every one of them calls it."""
        return not self._replicas_fine(not mine)

    def anywhere(self, mine: bool) -> bool:
        """Whether it is so on any rank of any replica; every one of them calls it."""
        return self.any(any(told.fault for told in self.exchange(SaveStatus(fault="so" if mine else ""))))

    def _replicas_fine(self, is_fine: bool) -> bool:
        """Whether all is well on this rank's replicas too."""
        return bool(self._least(int(is_fine))[0])

    def _least(self, *numbers: int) -> list[int]:
        """The least of each of what this rank's replicas have."""
        mesh, negated = self._engine.options.mesh, [-number for number in numbers]
        with self._engine.outside("telling the other replicas how its part went"):
            return [-n for n in largest(mesh, self._other_dims, negated, self._engine.device)]


def _call(asked: CallSignature) -> str:
    given = f"with {', '.join(asked.objects) or 'no objects'}"
    return f"{asked.path} {given}" if asked.path else given
