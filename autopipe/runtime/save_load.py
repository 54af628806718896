"""Saves and loads of a runtime: what it holds, and in what order things are done.

That all ranks end alike is left to ``agreement``, files to ``saving`` and ``loading``, training state to
``training_state``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import AutopipeError, InputError, StoreError
from .agreement import Agreement, CallSignature
from .checkpoint.background_save import Saving
from .checkpoint.extra_state import extra_modules, held_extras, named_tensors
from .checkpoint.rank_contents import RankContents, SaveStatus, owned, staged
from .checkpoint.replica_state import Words
from .checkpoint.saving import save, save_single
from .checkpoint.state_by_weight import Holding
from .checkpoint.training_state import Restoring, collect
from .files.folder import MANIFEST, step_path, steps_in
from .files.safetensors_file import Spec
from .reduce.ties import own_of

if TYPE_CHECKING:
    from .checkpoint.loading import Checkpoint
    from .engine import Engine

__all__ = ["Checkpoints", "Saving"]

SINGLES = (".pt", ".pth", ".th", ".bin", ".ckpt", ".pkl", ".tar")
"""What paths of one file end with, as people name those of ``torch.save``."""
LOSS = "loss_fn()"
"""The name of a loss that trains, where it is given under none."""
_logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and loads what one rank of a pipeline holds, together with the others."""

    def __init__(self, engine: Engine, named: Callable[[], Iterator[tuple[str, nn.Parameter]]]) -> None:
        self._engine, self._named = engine, named
        self._agreement = Agreement(engine)
        self._last: Saving | None = None
        self._n_saves = 0
        self._words: Words | None = None

    def names(self, name: str) -> tuple[str, ...]:
        """Every name the model has for a weight."""
        known = self._engine.capture.ops.parameter
        return known[name].names if name in known else (name,)

    # -- saving -------------------------------------------------------------------------------------

    def target(
        self, path: pathlib.Path, objects: Mapping[str, Any], keep_last: int | None, background: bool
    ) -> tuple[pathlib.Path, bool]:
        """Where a save of these objects goes, and whether that is one file.

        In the ``background`` it goes there whatever the working directory is by then.
        Raises :class:`InputError` for a place that cannot hold them, and for what is no number of saves.
        """
        if keep_last is not None:
            if type(keep_last) is not int or keep_last < 1:
                raise InputError(f"keep_last is {keep_last!r}; it is how many saves to keep, at least 1")
            path = step_path(path, self._engine.progress.n_steps)
        is_single = path.suffix in SINGLES and keep_last is None
        _check_place(path, objects, is_single)
        return _absolute(path) if background else path, is_single

    def save(
        self,
        path: pathlib.Path,
        objects: Mapping[str, Any],
        *,
        is_single: bool,
        max_bytes: int,
        keep_last: int | None,
        background: bool,
    ) -> Saving:
        """See :meth:`Runtime.save`; to its :meth:`target`."""
        agreement, rank = self._agreement, self._engine.rank
        last, self._last = self._last, None
        if last is not None:
            last.settle()
        saving = Saving(path)
        with agreement.together("saving a checkpoint"):
            if last is not None and agreement.anywhere(last.is_unheard):
                last.wait()
                raise StoreError(f"{last.path} was not saved, as another rank says; save it again")
            manner = f"background={background} and keep_last={keep_last}"
            agreement.check_alike(self._asked(objects, str(path), manner))
            with agreement.agreed(path, "nothing was saved"):
                self._engine.written.check()
            if keep_last is not None:
                self._notice_another_run(path)
            contents = self._contents({**objects, **self._loss_beside(objects)}, is_single, max_bytes)
            if is_single:
                with agreement.first_replica_saves(path):
                    save_single(path, contents, rank, agreement.exchange, self.names)
            elif not background:
                with agreement.first_replica_saves(path):
                    save(path, contents, rank, agreement.exchange, keep_last)
            else:
                self._begin(saving, staged(contents), keep_last)
        return saving

    def _notice_another_run(self, path: pathlib.Path) -> None:
        """Warn, on the rank that puts it there, where this save takes the place of another run's."""
        known, place = self._engine.progress.saves, os.path.realpath(path)
        if (
            self._engine.rank == 0
            and self._agreement.writes
            and place not in known
            and os.access(place, os.F_OK)
        ):
            _logger.warning(
                "%s is there, and this run neither made it nor found it when it went on: another run saves "
                "in this folder, and each replaces what the other made; give every run a folder of its own",
                path,
            )
        known.add(place)

    def _contents(self, objects: Mapping[str, Any], is_single: bool, max_bytes: int) -> RankContents:
        """What this rank saves; of a pipeline in one process, what all of its ranks would."""
        engine = self._engine
        state, fault = self._collect(objects, is_single)
        ranks = [engine.rank] if engine.peers else range(engine.plan.n_ranks)
        weights: dict[str, Tensor] = {}
        for rank in ranks:
            weights |= owned(engine.all_stages, rank)
        return RankContents(
            weights=weights,
            state=state,
            texts={} if is_single else _texts(engine.capture.model),
            writes=self._agreement.writes,
            model=type(engine.capture.model).__name__,
            steps=engine.progress.n_steps,
            seed=engine.seed,
            max_bytes=max_bytes,
            fault=fault,
            aliases={alias: name for name in weights for alias in self.names(name) if alias != name},
        )

    def _collect(self, objects: Mapping[str, Any], is_single: bool) -> tuple[Any, str]:
        """This rank's training state, or what is wrong with what it was given: others wait to be told.

        For one file what modules keep beside their tensors alone.
        """
        engine, state, fault = self._engine, dict[str, Any](), ""
        rank = engine.rank if engine.peers else None
        extras = extra_modules(engine.capture.model, engine.all_stages, rank)
        replica = self._agreement.replica
        try:
            if is_single:
                return {name: module.get_extra_state() for name, module in extras.items()}, ""
            state = collect(
                objects,
                list(engine.stepped()),
                engine.device,
                extras,
                elsewhere=engine.elsewhere,
                is_kept=self._agreement.writes,
            )
            counts = {"forwards": engine.progress.n_forwards, "backwards": engine.progress.n_backwards}
            state |= {"holding": self._holding.told(), "counts": counts}
        except Exception as error:  # of the user's own objects
            if engine.peers is None and replica.n == 1:
                raise
            fault = str(error) if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            if is_single:
                return {}, fault
        try:
            return replica.collect(state, fault, engine.device), ""
        except StoreError as error:
            return None, str(error)

    def _loss_beside(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """The loss, by a name of its own, where it has weights of its own and is none of ``objects``."""
        loss_fn = self._engine.options.loss_fn
        is_given = any(thing is loss_fn for thing in objects.values())
        return {} if is_given or not own_of(loss_fn, self._engine.capture.model) else {LOSS: loss_fn}

    def _asked(self, objects: Mapping[str, Any], path: str = "", manner: str = "") -> CallSignature:
        """What this rank was called with, as far as ranks are to be called alike."""
        given = any(isinstance(thing, torch.optim.Optimizer) for thing in objects.values())
        trains = any(parameter.requires_grad for _, parameter in self._named())
        names = tuple(sorted(name for name, thing in objects.items() if thing is not None))
        return CallSignature(path, given, trains, names, manner)

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

    # -- saving in the background -------------------------------------------------------------------

    def _begin(self, saving: Saving, copied: RankContents, keep_last: int | None) -> None:
        """Start writing copied contents beside the training, under a name that all ranks count alike."""
        self._n_saves += 1
        self._words = self._words or self._agreement.replica.words(lambda: self._engine.patience.limit_s)
        name = f"save/{self._n_saves}"
        saving.start(functools.partial(self._save_beside, saving.path, copied, name, keep_last))
        self._last = saving

    def _save_beside(
        self, path: pathlib.Path, contents: RankContents, name: str, keep_last: int | None
    ) -> None:
        """Write what was copied in a thread beside the one that trains; further replicas wait for its end."""
        peers, rank, words = self._engine.peers, self._engine.rank, self._words
        if words is not None and not contents.writes:
            words.hear(name, path, lambda: None if peers is None else peers.watch.raise_if_failed())
            return
        with contextlib.nullcontext() if words is None else words.told(name):
            if peers is None:
                save(path, contents, rank, _alone, keep_last, is_aside=True)
                return
            with peers.watch.shown():
                exchange = peers.exchange_aside(SaveStatus, name, "writing a save in the background")
                save(path, contents, rank, exchange, keep_last, is_aside=True)

    def _settle(self) -> None:
        """Let a save in the background come to its end, whatever that is: who waits for it is told."""
        if self._last is not None:
            self._last.settle()

    # -- loading ------------------------------------------------------------------------------------

    def load(self, path: pathlib.Path, objects: Mapping[str, Any], *, strict: bool) -> None:
        """See :meth:`Runtime.load`."""
        self._settle()
        with self._agreement.together("loading a checkpoint"):
            self._agreement.check_alike(self._asked(objects, manner=f"strict={strict}"))
            self._load(path, objects, strict)
            self._engine.part_with_weights()
            if self._engine.rank == 0 and os.access(path.parent, os.R_OK):
                self._note_row(path.parent, with_save=path)

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
                    return self._engine.progress.n_steps
                except StoreError as error:
                    first = first or error
                    _logger.warning("%s; going on from the save before it", error)
        if first is not None:
            raise first
        return 0

    def _row(self, root: pathlib.Path) -> list[str]:
        """The whole saves of a row, newest first, as rank 0 of the first replica sees them."""
        agreement = self._agreement
        with agreement.together("looking for the last checkpoint"):
            found: list[str] = []
            with agreement.agreed(root, "nothing was changed"):
                found = self._note_row(root)
                if not found and (root.is_file() or (root / MANIFEST).is_file()):
                    raise InputError(
                        f"{root} is no row of saves, but a save itself: load() reads it; resume() "
                        "takes the folder that save(folder, keep_last=...) was given"
                    )
            names = agreement.as_first(agreement.exchange(SaveStatus(draft="/".join(found)))[0].draft)
        return names.split("/") if names else []

    def _note_row(self, root: pathlib.Path, with_save: pathlib.Path | None = None) -> list[str]:
        """The names of a row's whole saves, newest first; they are this run's, which goes on from one.

        Nothing is noted where they are not ``with_save``, if one is given.
        """
        found = steps_in(root)
        if with_save is None or with_save in found:
            self._engine.progress.saves.update(map(os.path.realpath, found))
        return [p.name for p in found]

    def _load(self, path: pathlib.Path, objects: Mapping[str, Any], strict: bool) -> None:
        """Check all of it on every rank; then take the training state, then the weights."""
        agreement, engine = self._agreement, self._engine
        wanted = {n: t for stage in engine.stages for n, t in named_tensors(stage).items()}
        beside = engine.written.read_elsewhere()
        with agreement.agreed(path, "nothing was changed"):
            checkpoint, found, faults = self._opened(path, wanted, strict)
            there = {n: t for n, t in beside.items() if checkpoint.weights.get(n) == Spec.of(t)}
            wanted, found = wanted | there, found | {n: n for n in there}
            restoring = self._restoring(checkpoint, {**objects, **self._loss_in(checkpoint, objects, path)})
            faults += restoring.check()
            if not faults:
                faults = checkpoint.faults(dict.fromkeys(found.values()), restoring.stored())
            if faults:
                raise StoreError(f"{path} does not fit: {'; '.join(faults[:6])}; load what this model saved")
        agreement.check_same(path, checkpoint.fingerprint)
        with agreement.agreed(path, "everything is as it was", restoring.undo):
            restoring.apply()
        with torch.no_grad(), agreement.agreed(path, "some weights may have been read", restoring.undo):
            distinct = {id(tensor): (found[name], tensor) for name, tensor in wanted.items()}
            checkpoint.read(dict(distinct.values()))
            engine.written.note(wanted.values())
        if checkpoint.manifest is not None:
            engine.progress.n_steps, engine.seed = checkpoint.manifest.steps, checkpoint.manifest.seed
            engine.progress.n_forwards = checkpoint.counted("forwards", 0)
            engine.progress.n_backwards = checkpoint.counted("backwards", checkpoint.manifest.steps)

    def _loss_in(
        self, checkpoint: Checkpoint, objects: Mapping[str, Any], path: pathlib.Path
    ) -> dict[str, Any]:
        """The loss that is to have its weights from a checkpoint though nobody gave it; said where there are
        none of a run's own."""
        loss = self._loss_beside(objects)
        if not loss or any(LOSS in state.get("objects", {}) for state in checkpoint.states):
            return loss
        if checkpoint.manifest is not None:
            _logger.warning(
                "%s holds no weights of loss_fn, whose own stay as they are; where they were saved under "
                "another name, as in rt.save(..., loss=loss_fn), load them by it",
                path,
            )
        return {}

    def _opened(
        self, path: pathlib.Path, wanted: Mapping[str, Tensor], strict: bool
    ) -> tuple[Checkpoint, dict[str, str], list[str]]:
        """A checkpoint, its name for each weight wanted, and in what its weights are not the model's."""
        from .checkpoint.loading import differences, open_checkpoint

        engine = self._engine
        known = [n for s in engine.all_stages for n in named_tensors(s)]
        known += [n for n, _ in engine.capture.model.named_buffers()]
        checkpoint = open_checkpoint(path, known)
        is_own = checkpoint.manifest is not None
        ignored = () if is_own else _ignored(engine.capture.model)
        found, faults = differences(
            checkpoint.weights, wanted, known, self.names, exact=is_own, ignored=ignored
        )
        if not strict:
            faults = [f for f in faults if not f.startswith("not of this model: ")]
        return checkpoint, found, faults

    def _restoring(self, checkpoint: Checkpoint, objects: Mapping[str, Any]) -> Restoring:
        """The training state of a checkpoint on its way into this rank's objects."""
        engine = self._engine
        return Restoring(
            checkpoint,
            objects,
            list(engine.stepped()),
            engine.rank,
            self.names,
            extras=held_extras(engine.capture.model, engine.stages, engine.all_stages),
            replica=self._agreement.replica,
            device=engine.device if checkpoint.manifest is not None else None,
            holding=self._holding,
            elsewhere=engine.elsewhere,
        )


def _absolute(path: pathlib.Path) -> pathlib.Path:
    try:
        return path.absolute()
    except OSError as error:
        raise InputError(
            f"path is {path}, in a working directory that is gone; give one that begins at the root"
        ) from error


def _check_place(path: pathlib.Path, objects: Mapping[str, Any], is_single: bool) -> None:
    """Raise :class:`InputError` for a place that cannot hold what is to be saved there."""
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


def _alone(mine: SaveStatus) -> list[SaveStatus]:
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
