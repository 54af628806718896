"""Tries damaged checkpoints: each must be refused, saying so, or be harmless.

The ways to damage one are left to ``damages``. Outcomes: ``refused`` (one of our errors, and nothing
changed), ``harmless`` (loaded, and equal to what was saved), ``as written`` (a forger who can make checksums
wrote another valid value), ``untold`` (other values in a file whose format has no checksums), ``wrong``
(loaded, and not what was saved), ``changed`` (refused, but something had changed), ``raw`` (another error),
``stuck``.
"""

from __future__ import annotations

import collections
import pathlib
import random
import shutil
import signal
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint as dcp

from autopipe.errors import AutopipeError
from autopipe.runtime.files.folder import MANIFEST

from .damages import RAN, Damage, damages, rewrite_header
from .work import Trainer

__all__ = ["prepare", "walk"]

GOOD = frozenset(("refused", "harmless", "as written", "untold"))
UNTOLD = frozenset(("hf", "dcp"))
"""Layouts that lack checksums: all of Hugging Face's, and the description in torch's."""
LIMIT_S = 20


def prepare(root: pathlib.Path) -> Trainer:
    """Saves under ``root``: ``whole``, ``other`` (an earlier step), ``deeper`` (another model), ``hf``,
    ``dcp`` (torch's own layout) and ``one.pt``.

    Returns a trainer with another cut, as ``other`` left it.
    """
    made = Trainer(2)
    made.train(1)
    made.runtime.save(root / "other", **made.kept)
    made.train(2)
    made.runtime.save(root / "whole", max_shard_bytes=600, **made.kept)
    made.runtime.save(root / "one.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save({"model": made.model.state_dict()}, checkpoint_id=root / "dcp")
    deeper = Trainer(2, n_layers=5)
    deeper.train(1)
    deeper.runtime.save(root / "deeper", max_shard_bytes=600, **deeper.kept)
    shutil.copytree(root / "whole", root / "hf")
    (root / "hf" / MANIFEST).unlink()
    for state in (root / "hf").glob("state-*"):
        state.unlink()
    for file in (root / "hf").glob("*.safetensors"):
        rewrite_header(file, lambda head: head.update(__metadata__={"format": "pt"}))
    trainer = Trainer(3)
    trainer.runtime.load(root / "other", **trainer.kept)
    return trainer


class Stuck(BaseException):
    """A load did not end in time."""


def walk(
    root: pathlib.Path, trainer: Trainer, n: int, seed: int = 0, n_fixed: int | None = None
) -> tuple[Mapping[str, Mapping[str, int]], list[str]]:
    """({kind: {outcome: how often}}, what was not as it must be) of ``n`` damages to saves under ``root``."""
    before = trainer.state()
    wanted: dict[str, Any] = {}
    for name in ("whole", "hf", "dcp", "one.pt"):
        load(trainer, root, root / name)
        wanted[name] = trainer.state()
        trainer.runtime.load(root / "other", **trainer.kept)
    assert trainer.state() == before
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad = []
    for name, damage in damages(root, random.Random(seed), n, n_fixed):
        copy = root / f"copy{'.pt' if name.endswith('.pt') else ''}"
        (shutil.copytree if (root / name).is_dir() else shutil.copyfile)(root / name, copy)
        damage.do(copy)
        outcome, told = _outcome(trainer, root, copy, damage, before, wanted[name], name)
        table[damage.kind][outcome] += 1
        if outcome not in GOOD:
            bad.append(f"{damage.kind}, {damage.how}: {outcome}: {told}")
        _remove(copy)
    return table, bad


def load(trainer: Trainer, root: pathlib.Path, path: pathlib.Path) -> None:
    """Load a save with all it has: one of others has weights alone."""
    is_own = (path / MANIFEST).exists() or (path / MANIFEST).is_symlink()
    trainer.runtime.load(path, **(trainer.kept if is_own else {}))


def _outcome(
    trainer: Trainer,
    root: pathlib.Path,
    copy: pathlib.Path,
    damage: Damage,
    before: Any,
    wanted: Any,
    name: str,
) -> tuple[str, str]:
    def ring(*_: object) -> None:
        raise Stuck

    before_s = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)[0]
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        load(trainer, root, copy)
    except AutopipeError as error:
        outcome, told = "refused", str(error)
    except Stuck:
        outcome, told = "stuck", ""
    except Exception as error:
        outcome, told = "raw", f"{type(error).__name__}: {error}"
    else:
        outcome, told = "harmless", ""
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, before_s)  # a test's own limit goes on
    after = trainer.state()
    if outcome == "harmless" and after != wanted:
        outcome = "as written" if damage.is_forged else "untold" if name in UNTOLD else "wrong"
    elif outcome == "refused" and after != before:
        outcome = "changed"
    if (root / RAN).exists():
        (root / RAN).unlink()
        outcome = "wrong"
        told = "code of a checkpoint ran"
    if after != before:
        trainer.runtime.load(root / "other", **trainer.kept)
    return outcome, told


def _remove(copy: pathlib.Path) -> None:
    if copy.is_dir() and not copy.is_symlink():
        shutil.rmtree(copy)
    else:
        copy.unlink(missing_ok=True)
