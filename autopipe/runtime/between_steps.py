"""What users do with a runtime between its steps: save and load, cut it anew, ask how it goes.

Training and what goes with each step is left to ``runtime``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from ..arguments import flag, number, place
from ..plans import Plan
from ..simulator import Report
from ..units import parse_bytes
from . import step_records
from .engine import Engine
from .rebalance import Cutter
from .save_load import Checkpoints, Saving

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """Every rank calls each of these alike; threads that share one process's take turns."""

    _engine: Engine
    _checkpoints: Checkpoints
    _cutter: Cutter

    def save(
        self,
        path: str | pathlib.Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        max_shard_bytes: str | int = "5GB",
        keep_last: int | None = None,
        background: bool = False,
        **states: Any,
    ) -> Saving:
        """Save the whole model under its own names, and what trains it; every rank calls it alike.

        Parameters
        ----------
        path: a directory for safetensors shards with an index, as Hugging Face lays them out, each rank
            writing its own. It appears whole, by one rename: whatever fails before leaves an earlier save
            there as it was. A path that ends as torch's files do (``model.pt``, ``.pth``, ``.bin``,
            ``.ckpt``) gets one file instead, which ``model.load_state_dict(torch.load(…))`` reads.
        optimizer, states: what else to save (``scheduler=``, ``scaler=``, ``loader=``, further optimizers):
            anything with ``state_dict``. Optimizers are saved by parameter name, so that another cut or
            number of ranks can go on from them. Other objects are saved per rank, except what they keep by
            weights' names, as an average of ``rt.named_parameters()`` does: that goes where the weights go.
        max_shard_bytes: the most that one shard holds, such as ``"5GB"``.
        keep_last: with a number, ``path`` becomes a row of saves, ``step-00000120`` and so on, of which so
            many are kept; :meth:`resume` goes on from the last.
        background: copy everything, return, and write while training goes on. ``wait()`` on what is returned
            says how it ended; where nobody waited, the next save does.

        Saved as well: the number of steps, the seed, the user's random generators, what modules keep beside
        their tensors (``get_extra_state``), and a ``loss_fn`` with weights of its own. Not saved: gradients,
        so save after the optimizer's step.

        Who reads it: :meth:`load`; transformers' ``from_pretrained``; ``torch.distributed.checkpoint.load``,
        all of it through :func:`autopipe.exports.dcp_reader` and its weights through torch's
        ``HuggingFaceStorageReader``. It has no ``.metadata``, as torch's own layout, which is pickles, would
        hold every weight a second time; :func:`autopipe.exports.to_dcp` makes that layout.

        An optimizer whose class has a ``state_dict`` of its own is saved through that (a
        ``ZeroRedundancyOptimizer`` after ``consolidate_state_dict()``), and refused where it is not laid out
        as torch's. One made around another is given with that one, each under a name. Data-parallel replicas'
        objects and generators are saved one by one where they differ, and return to as many replicas.

        Raises :class:`StoreError` on every rank when one could not write (training may go on),
        :class:`InputError` for a place or an object that cannot be saved.
        """
        objects = {"optimizer": optimizer, **states}

        def look() -> tuple[pathlib.Path, bool, int, bool]:
            is_aside = flag("background", background)
            found, is_single = self._checkpoints.target(place("path", path), objects, keep_last, is_aside)
            return found, is_single, parse_bytes(max_shard_bytes), is_aside

        with self._engine.turn:
            found, is_single, max_bytes, is_aside = self._engine.called("save", look)
            return self._checkpoints.save(
                found,
                objects,
                is_single=is_single,
                max_bytes=max_bytes,
                keep_last=keep_last,
                background=is_aside,
            )

    def load(
        self,
        path: str | pathlib.Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        strict: bool = True,
        **states: Any,
    ) -> None:
        """Load what :meth:`save` wrote, or a plain model's checkpoint: Hugging Face's layout, or one file.

        So is what ``torch.distributed.checkpoint`` saved of a plain or an FSDP2 model, under whichever key,
        with an optimizer's ``get_optimizer_state_dict`` and other objects by their keys. Names may have what
        DDP (``module.``) or ``torch.compile`` put before them, or lack what a head put before a base model.

        Each rank reads the tensors it holds, whatever the cut, schedule or number of ranks were. What
        :meth:`save` wrote also restores the number of steps, so that random streams go on, the user's random
        generators, and the state of ``optimizer`` and ``states``. Everything is checked first, checksums
        included, and nothing is changed unless all of it fits on every rank. ``strict=False`` passes over
        weights that the model does not have. Of what others saved there are but names, shapes and dtypes to
        go by: a square weight stored transposed, or equal layers under one another's names, are taken as they
        are, as by a module's ``load_state_dict``.

        Raises :class:`StoreError` saying what is damaged, missing or differs.
        """
        with self._engine.turn:
            found, is_strict = self._engine.called(
                "load", lambda: (place("path", path), flag("strict", strict))
            )
            self._checkpoints.load(found, {"optimizer": optimizer, **states}, strict=is_strict)

    def resume(
        self, path: str | pathlib.Path, *, optimizer: torch.optim.Optimizer | None = None, **states: Any
    ) -> int:
        """Load the last whole save of a row made with ``keep_last``; the number of steps it had made.

        Each :meth:`Runtime.step` is one, and each :meth:`Runtime.accumulate`, whatever its batches.
        Returns 0 where there is no save yet. A damaged save is passed over for the one before, with a
        warning. Raises the last one's :class:`StoreError` where none can be loaded, :class:`InputError` where
        ``path`` is a save itself.
        """
        with self._engine.turn:
            found = self._engine.called("resume", lambda: place("path", path))
            return self._checkpoints.resume(found, {"optimizer": optimizer, **states})

    @property
    def plan(self) -> Plan:
        """The plan it runs: the one it was made with, or the last that :meth:`rebalance` made."""
        return self._engine.plan

    def rebalance(
        self,
        *,
        plan: Plan | None = None,
        least_gain: float = 1.05,
        speeds: Mapping[int, float] | None = None,
        time_limit_s: float | None = None,
        **optimizers: torch.optim.Optimizer,
    ) -> bool:
        """Cut anew from what the stages were measured to take, and move weights to where they now belong.

        Between steps every rank calls it alike, and passes every optimizer there is (``optimizer=``, each
        under a name of its own, one that another is made around too): it moves what their ``state`` keeps of
        a parameter, and changes their groups in place. Schedulers, the number of steps and random streams
        stay: the run goes on as if cut so from its start. Returns whether it was cut anew: not where a step
        would not become ``least_gain`` times faster.

        ``plan`` is cut to instead where one is given: for the same graph, ranks and microbatches. ``speeds``
        (rank → factor) says which devices became slower or faster; drift is else laid on the ops.

        Raises :class:`InputError` on every rank, with nothing moved, for stages that :meth:`wrap` changed,
        for optimizers whose groups are not alike on every rank or that keep something of their parameters
        beside ``state``, and where there is nothing to plan from.
        """
        given = {key: optimizer for key, optimizer in optimizers.items() if optimizer is not None}

        def look() -> None:
            self._cutter.check(plan, given, least_gain=least_gain, speeds=speeds, time_limit_s=time_limit_s)

        self._engine.called("rebalance", look)
        by = self.report() if plan is None else plan
        with self._engine.together("cutting anew", waits=False):
            return self._cutter.cut(
                by,
                given,
                least_gain=least_gain,
                speeds=speeds,
                time_limit_s=time_limit_s,
            )

    def gather_weights(self) -> None:
        """Make the model whole on every rank: each weight as the rank that trains it has it now.

        Every rank calls it. Released weights, and those of a model made on the meta device, come to the CPU.
        Stages that were sharded (``fully_shard``) lose their shards to the model and train no more.
        """
        self._engine.called("gather_weights", lambda: None)
        with self._engine.together("gathering weights", waits=False):
            self._engine.gather_weights()

    def report(self) -> Report:
        """Predicted beside measured, and every action of the last step; every rank calls it.

        Its ``drift`` says when :meth:`rebalance` would pay. On an accelerator it has the most memory that
        each rank held since the runtime was made.
        """
        return step_records.report(self._engine)

    def publish(self, folder: str | pathlib.Path, every_s: float = 1.0) -> None:
        """From now on write what the last steps took to ``folder``, about every ``every_s`` seconds.

        ``autopipe watch folder`` shows it while the job runs, as does :func:`autopipe.watch` in a notebook:
        the step, idle time by cause, stragglers, drift from the plan. Every rank calls it, with a folder that
        whoever watches reaches too. What an earlier job wrote there is removed. Of several replicas the first
        is shown. Writing takes well under a millisecond, and a step never waits for it.

        Raises :class:`InputError` on every rank where one cannot write there.
        """

        def look() -> tuple[pathlib.Path, float]:
            return place("folder", folder), number("every_s", every_s, above=True, most=1e6, unit="seconds")

        step_records.publish(self._engine, *self._engine.called("publish", look))
