"""A runtime's saves and loads: what it holds, who does what, and all ranks of one mind.

Files are left to ``saving`` and ``loading``, training state to ``training``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import AutopipeError, InputError, StoreError
from .byname import Holding
from .cargo import Cargo, Told, owned, staged
from .extra import extra_modules, held_extras, named_tensors
from .folder import MANIFEST, step_path, steps_in
from .replicas import Replica, Words
from .saving import save, save_single
from .training import Restoring, collect

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Keeper", "Saving"]

SINGLES = (".pt", ".pth", ".th", ".bin", ".ckpt", ".pkl", ".tar")
"""What paths of one file end with, as people name those of ``torch.save``."""
_logger = logging.getLogger(__name__)


class Saving:
    """A save that may still be under way. ``path`` is where it will be."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a thread of its own, which the interpreter waits for before it ends."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                _logger.warning("the save in the background failed: %s", error)  # if nobody waits for it

        self._thread = threading.Thread(target=run, name="autopipe save")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def settle(self) -> None:
        """Come back once it is whole, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> pathlib.Path:
        """Where it is, once it is whole. Raises what went wrong."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self.path


class Keeper:
    """Saves and loads what one rank of a pipeline holds, together with the others."""

    def __init__(self, engine: Engine, named: Callable[[], Iterator[tuple[str, nn.Parameter]]]) -> None:
        self._engine, self._named = engine, named
        self._last: Saving | None = None
        self._n_saves = 0
        self._words: Words | None = None

    # -- saving -------------------------------------------------------------------------------------

    def save(
        self,
        path: pathlib.Path,
        objects: Mapping[str, Any],
        *,
        max_bytes: int,
        keep_last: int | None,
        background: bool,
    ) -> Saving:
        """See :meth:`Runtime.save`."""
        engine, peers = self._engine, self._engine.peers
        if keep_last is not None:
            if type(keep_last) is not int or keep_last < 1:
                raise InputError(f"keep_last is {keep_last!r}; it is how many saves to keep, at least 1")
            path = step_path(path, engine.n_steps)
        is_single = path.suffix in SINGLES and keep_last is None
        if path.suffix == ".safetensors":
            raise InputError(
                f"{path} names one file of safetensors, and each rank writes its own: give a folder for "
                f"them, or {path.with_suffix('.pt')} for one file"
            )
        if is_single and any(thing is not None for thing in objects.values()):
            raise InputError(
                f"{path} is one file of weights; training state is saved in a folder, such as "
                f"{path.with_suffix('')}"
            )
        if self._last is not None:
            last, self._last = self._last, None
            last.wait()
        saving = Saving(path)
        with self.together("saving a checkpoint"):
            state, fault = self._collect(objects, is_single)
            weights = owned(engine.all_stages, engine.rank) if peers else self._everything()
            cargo = Cargo(
                weights,
                state,
                {} if is_single else _texts(engine.capture.model),
                self._writes,
                type(engine.capture.model).__name__,
                engine.n_steps,
                engine.seed,
                max_bytes,
                fault,
                {alias: name for name in weights for alias in self.names(name) if alias != name},
            )
            if is_single:
                with self._all_replicas(path):
                    save_single(path, cargo, engine.rank, self._exchange, self.names)
            elif not background:
                with self._all_replicas(path):
                    save(path, cargo, engine.rank, self._exchange, keep_last)
            else:
                copied = staged(cargo)
                self._n_saves += 1
                self._words = self._words or self._replica.words(lambda: engine.patience.limit_s)
                name = f"save/{self._n_saves}"  # where the program may go meanwhile, this path stays
                saving.start(functools.partial(self._save_aside, path.absolute(), copied, name, keep_last))
                self._last = saving
        return saving

    def _save_aside(self, path: pathlib.Path, cargo: Cargo, name: str, keep_last: int | None) -> None:
        """Write a copied cargo in a thread beside the one that trains; further replicas wait for its end."""
        peers, rank, words = self._engine.peers, self._engine.rank, self._words
        if words is not None and not self._writes:
            words.hear(name, path, lambda: None if peers is None else peers.watch.raise_if_failed())
            return
        with contextlib.nullcontext() if words is None else words.told(name):
            if peers is None:
                save(path, cargo, rank, _alone, keep_last, is_aside=True)
                return
            with peers.watch.shown():
                exchange = peers.exchange_aside(Told, name, "writing a save in the background")
                save(path, cargo, rank, exchange, keep_last, is_aside=True)

    def _settle(self) -> None:
        """Let a save in the background come to its end, whatever that is: who waits for it is told."""
        if self._last is not None:
            self._last.settle()

    def _collect(self, objects: Mapping[str, Any], is_single: bool) -> tuple[Any, str]:
        """This rank's training state, or what is wrong with what it was given: others wait to be told.

        For one file what modules keep beside their tensors alone.
        """
        engine, state, fault = self._engine, dict[str, Any](), ""
        rank = engine.rank if engine.peers else None
        extras = extra_modules(engine.capture.model, engine.all_stages, rank)
        try:
            if is_single:
                return {name: module.get_extra_state() for name, module in extras.items()}, ""
            state = collect(objects, list(self._named()), engine.device, extras)
            state |= {"holding": self._holding.told(), "counts": {"forwards": engine.n_forwards}}
        except Exception as error:  # of the user's own objects
            if engine.peers is None and self._replica.n == 1:
                raise
            fault = str(error) if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            if is_single:
                return {}, fault
        try:
            return self._replica.collect(state, fault, engine.device), ""
        except StoreError as error:
            return None, str(error)

    @property
    def _holding(self) -> Holding:
        engine, own = self._engine, list(self._named())
        specs = engine.capture.ops.parameter
        return Holding(
            specs,
            frozenset(specs[n].name for s in engine.stages for n in named_tensors(s) if n in specs),
            tuple(name for name, _ in own),
            tuple(name for name, parameter in own if parameter.requires_grad),
        )

    def _everything(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for rank in range(self._engine.plan.n_ranks):
            tensors |= owned(self._engine.all_stages, rank)
        return tensors

    # -- loading ------------------------------------------------------------------------------------

    def load(self, path: pathlib.Path, objects: Mapping[str, Any], *, strict: bool) -> None:
        """See :meth:`Runtime.load`."""
        self._settle()
        with self.together("loading a checkpoint"):
            self._load(path, objects, strict)
            self._engine.part_with_weights()

    def resume(self, root: pathlib.Path, objects: Mapping[str, Any]) -> int:
        """See :meth:`Runtime.resume`."""
        self._settle()
        first: StoreError | None = None
        tried: set[str] = set()
        while fresh := [name for name in self._row(root) if name not in tried]:
            for name in fresh:  # a run that goes on may remove them meanwhile, and make others
                tried.add(name)
                try:
                    self.load(root / name, objects, strict=True)
                    return self._engine.n_steps
                except StoreError as error:
                    first = first or error
                    _logger.warning("%s; going on from the save before it", error)
        if first is not None:
            raise first
        return 0

    def _row(self, root: pathlib.Path) -> list[str]:
        """The whole saves of a row, newest first, as rank 0 sees them."""
        with self.together("looking for the last checkpoint"):
            found: list[str] = []
            with self._agreed(root, "nothing was changed"):
                found = [p.name for p in steps_in(root)]
                if not found and (root.is_file() or (root / MANIFEST).is_file()):
                    raise InputError(
                        f"{root} is no row of saves, but a save itself: load() reads it; resume() "
                        "takes the folder that save(folder, keep_last=...) was given"
                    )
            names = self._exchange(Told(draft="/".join(found)))[0].draft
        return names.split("/") if names else []

    def _load(self, path: pathlib.Path, objects: Mapping[str, Any], strict: bool) -> None:
        from .loading import differences, open_checkpoint  # torch.distributed.checkpoint imports slowly

        engine = self._engine
        wanted = {n: t for stage in engine.stages for n, t in named_tensors(stage).items()}
        restoring: Restoring | None = None
        with self._agreed(path, "nothing was changed"):
            known = [n for s in engine.all_stages for n in named_tensors(s)]
            known += [n for n, _ in engine.capture.model.named_buffers()]
            checkpoint = open_checkpoint(path, known)
            own = checkpoint.manifest
            found, faults = differences(
                checkpoint.weights,
                wanted,
                known,
                self.names,
                exact=own is not None,
                ignored=_ignored(engine.capture.model) if own is None else (),
            )
            if not strict:
                faults = [f for f in faults if not f.startswith("not of this model: ")]
            restoring = Restoring(
                checkpoint,
                objects,
                list(self._named()),
                engine.rank,
                self.names,
                extras=held_extras(engine.capture.model, engine.stages, engine.all_stages),
                replica=self._replica,
                device=engine.device if own is not None else None,
                holding=self._holding,
            )
            faults += restoring.check()
            if not faults:
                faults = checkpoint.faults(dict.fromkeys(found.values()), restoring.stored())
            if faults:
                raise StoreError(f"{path} does not fit: {'; '.join(faults[:6])}; load what this model saved")
        self._check_same(path, checkpoint.fingerprint)
        with self._agreed(path, "everything is as it was", restoring.undo):
            restoring.apply()
        with torch.no_grad(), self._agreed(path, "some weights may have been read", restoring.undo):
            distinct = {id(tensor): (found[name], tensor) for name, tensor in wanted.items()}
            checkpoint.read(dict(distinct.values()))
        if own is not None:
            engine.n_steps, engine.seed = own.steps, own.seed
            engine.n_forwards = checkpoint.n_forwards

    def _check_same(self, path: pathlib.Path, fingerprint: int) -> None:
        """Raise :class:`StoreError` on every rank where not all have opened the same save."""
        told = self._exchange(Told(draft=str(fingerprint)))
        numbers = [int(t.draft) for t in told]
        least, most = self._least(min(numbers)), -self._least(-max(numbers))
        if least != most:
            raise StoreError(
                f"{path} is not the same save for every rank (by rank: "
                f"{', '.join(f'{n:08x}' for n in numbers)}): it was replaced meanwhile, or each host has one "
                "of its own; load from a folder that all ranks share; nothing was changed"
            )

    @contextlib.contextmanager
    def _agreed(
        self, path: pathlib.Path, otherwise: str, undo: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Within it each rank does its part; where one fails, all do ``undo`` and raise the same."""
        own: AutopipeError | None = None
        try:
            yield
        except OSError as error:
            own = StoreError(f"cannot read {path}: {error.strerror or error}")
        except AutopipeError as error:
            own = error
        except Exception as error:  # what a hostile checkpoint ends in; others wait to be told
            own = StoreError(f"{path} cannot be used: {type(error).__name__}: {error}")
            own.__cause__ = error
        told = self._exchange(Told(fault="" if own is None else str(own)))
        is_fine = self._replicas_fine(own is None and not any(t.fault for t in told))
        if is_fine:
            return
        undo()
        faults = [
            f"rank {rank}: {t.fault}" if len(told) > 1 else t.fault for rank, t in enumerate(told) if t.fault
        ]
        same = len({t.fault for t in told}) == 1 and own is not None
        text = str(own) if same else "; ".join(faults) or "another replica could not load it"
        kind = type(own) if isinstance(own, InputError) else StoreError
        raise kind(f"{text}; {otherwise}") from own

    # -- ranks --------------------------------------------------------------------------------------

    def _exchange(self, mine: Told) -> Sequence[Told]:
        peers = self._engine.peers
        return [mine] if peers is None else peers.gather(mine)

    def together(self, words: str) -> contextlib.AbstractContextManager[None]:
        """Within it others that wait for this rank are told that it does what ``words`` says."""
        peers = self._engine.peers
        return contextlib.nullcontext() if peers is None else peers.together(words, waits=False)

    def names(self, name: str) -> tuple[str, ...]:
        """Every name the model has for a weight."""
        known = self._engine.capture.ops.parameter
        return known[name].names if name in known else (name,)

    @functools.cached_property
    def _replica(self) -> Replica:
        return Replica(self._engine.options.mesh, self._other_dims)

    @property
    def _writes(self) -> bool:
        """False on all but the first replica of a mesh's other dims."""
        mesh = self._engine.options.mesh
        return all(mesh.get_local_rank(n) == 0 for n in self._other_dims) if mesh is not None else True

    @property
    def _other_dims(self) -> tuple[str, ...]:
        mesh = self._engine.options.mesh
        if mesh is None or mesh.ndim == 1:
            return ()
        return tuple(n for n in mesh.mesh_dim_names or () if n != "pp")

    @contextlib.contextmanager
    def _all_replicas(self, path: pathlib.Path) -> Iterator[None]:
        """Within it the first replica saves; the others wait for how it ends."""
        is_fine = False
        try:
            yield
            is_fine = True
        finally:
            are_fine = self._replicas_fine(is_fine)
        if not are_fine:
            raise StoreError(f"{path} was not saved by the first replica, which says why")

    def _replicas_fine(self, is_fine: bool) -> bool:
        """Whether all is well on this rank's replicas too."""
        return bool(self._least(int(is_fine)))

    def _least(self, number: int) -> int:
        """The least of what this rank's replicas have."""
        mesh = self._engine.options.mesh
        least = torch.tensor([number], dtype=torch.int64, device=self._engine.device)
        with self._engine.outside("telling the other replicas how its save or load went"):
            for dim in self._other_dims:
                assert mesh is not None
                dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dim))
            return int(least)


def _alone(mine: Told) -> list[Told]:
    return [mine]


def _ignored(model: nn.Module) -> Collection[str]:
    """What of others' checkpoints a transformers model does without: patterns of names."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def _texts(model: nn.Module) -> dict[str, str]:
    """The files beside its weights that a transformers model is known by."""
    texts = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string") and hasattr(config, "architectures"):
        before = config.architectures
        config.architectures = [type(model).__name__]
        texts["config.json"] = config.to_json_string()
        config.architectures = before
    generation: Any = getattr(model, "generation_config", None)
    if texts and hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    return texts
