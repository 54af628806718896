"""Calls that one of three ranks alone is refused, or makes alone; ``refused_ranks.py FOLDER`` is one rank."""

import os
import pathlib
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import AutopipeError, InputError, StepError

ODD = 1
LIMIT_S = 60.0
WITHIN_S = LIMIT_S / 2
"""Well ahead of the limit, however busy the machine is."""


class Failing:
    """An object whose state cannot be had or taken, for a ``cause``."""

    def __init__(self, cause=ValueError):
        self.cause = cause

    def state_dict(self):
        raise self.cause("has no state")

    load_state_dict = state_dict


def layers():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])


class Job:
    """A pipeline of three ranks that has made a step."""

    def __init__(self, **options):
        torch.manual_seed(0)
        model = layers()
        self.x, self.rank = torch.randn(6, 8), dist.get_rank()
        self.pipe = autopipe.split(model, 3, (self.x,), n_ranks=3, costs="estimated", n_microbatches=2)
        self.rt = self.pipe.runtime(F.mse_loss, stall_limit_s=LIMIT_S, **options)
        self.optimizer = torch.optim.SGD(self.rt.parameters(), 0.1, momentum=0.9)
        self.step()
        self.optimizer.step()

    def step(self):
        self.rt.step(self.x, target=self.x)

    def of(self, others, odd):
        """What this rank gives where one gives something ``odd``."""
        return odd if self.rank == ODD else others


def unwritable(job, folder):
    """A folder that one rank cannot make anything in."""
    (path := folder / "file").touch()
    return job.of(folder / "place", path / "place")


REFUSED = {
    "clip by text": (lambda j, _: j.rt.clip_grad_norm_(j.of(1.0, "x")), "max_norm is 'x'"),
    "clip by NaN": (lambda j, _: j.rt.clip_grad_norm_(j.of(1.0, float("nan"))), "max_norm is nan"),
    "clip by an order": (lambda j, _: j.rt.clip_grad_norm_(1.0, j.of(2.0, -1)), "norm_type is -1"),
    "clip by a flag": (
        lambda j, _: j.rt.clip_grad_norm_(1.0, 2.0, j.of(True, "no")),
        "error_if_nonfinite is",
    ),
    "clip by more": (lambda j, _: j.rt.clip_grad_norm_(j.of(1.0, 2.0)), "another with other values"),
    "save nowhere": (lambda j, f: j.rt.save(j.of(f / "a", 3)), "path is 3"),
    "save by net": (lambda j, f: j.rt.save(j.of(f / "a", "s3://a")), "path is 's3://a'"),
    "save a shard": (lambda j, f: j.rt.save(f / "a", max_shard_bytes=j.of("5GB", "x")), "cannot read 'x'"),
    "save so many": (lambda j, f: j.rt.save(f / "a", keep_last=j.of(2, 0)), "keep_last is 0"),
    "save aside": (lambda j, f: j.rt.save(f / "a", background=j.of(False, 1)), "background is 1"),
    "save a file": (
        lambda j, f: j.rt.save(j.of(f / "a", f / "a.safetensors")),
        "names one file of safetensors",
    ),
    "save elsewhere": (lambda j, f: j.rt.save(f / str(j.rank)), "a save is one folder of all ranks"),
    "save beside": (
        lambda j, f: j.rt.save(f / "a", background=j.of(False, True)),
        "background=True.*give every rank the same",
    ),
    "save fewer": (
        lambda j, f: j.rt.save(f / "a", keep_last=j.of(2, 3)),
        "keep_last=3.*give every rank the same",
    ),
    "save a fault": (
        lambda j, f: j.rt.save(f / "a", optimizer=j.optimizer, more=j.of(None, Failing())),
        "has no state|call it alike everywhere",
    ),
    "save unwritably": (lambda j, f: j.rt.save(unwritable(j, f)), "a save is one folder of all ranks"),
    "load nothing": (lambda j, f: j.rt.load(j.of(f / "good", None)), "path is None"),
    "load loosely": (lambda j, f: j.rt.load(f / "good", strict=j.of(True, 0)), "strict is 0"),
    "load elsewhere": (lambda j, f: j.rt.load(j.of(f / "good", f / "none")), "holds no checkpoint"),
    "load as others do not": (
        lambda j, f: j.rt.load(f / "good", strict=j.of(True, False)),
        "strict=False: all ranks do it together",
    ),
    "load a fault": (
        lambda j, f: j.rt.load(f / "good", optimizer=j.of(j.optimizer, Failing())),
        "gave an optimizer and rank",
    ),
    "resume nothing": (lambda j, f: j.rt.resume(j.of(f / "row", "")), "path is ''"),
    "resume a save": (lambda j, f: j.rt.resume(j.of(f / "row", f / "good")), "is no row of saves"),
    "publish nowhere": (lambda j, f: j.rt.publish(j.of(f, b"x")), "folder is b'x'"),
    "publish unwritably": (lambda j, f: j.rt.publish(unwritable(j, f)), "steps cannot be published"),
    "publish so often": (lambda j, f: j.rt.publish(f, j.of(1.0, 0)), "every_s is 0"),
    "cut for a gain": (lambda j, _: j.rt.rebalance(least_gain=j.of(1.0, "x")), "least_gain is 'x'"),
    "cut by speeds": (lambda j, _: j.rt.rebalance(speeds=j.of(None, {7: 1.0})), "a rank in speeds is 7"),
    "cut in time": (lambda j, _: j.rt.rebalance(time_limit_s=j.of(1.0, -1)), "time_limit_s is -1"),
    "cut to no plan": (lambda j, _: j.rt.rebalance(plan=j.of(j.rt.plan, 3)), "plan is 3"),
    "cut with a list": (
        lambda j, _: j.rt.rebalance(plan=j.rt.plan, optimizer=j.of(j.optimizer, [])),
        r"optimizer is \[\]",
    ),
}
"""What one rank alone is given wrong, and what all ranks are told: each goes on with the next."""

ALONE = {
    "clip_grad_norm_": lambda j, _: j.rt.clip_grad_norm_(1.0),
    "save": lambda j, f: j.rt.save(f / "alone"),
    "load": lambda j, f: j.rt.load(f / "good"),
    "resume": lambda j, f: j.rt.resume(f / "row"),
    "publish": lambda j, f: j.rt.publish(f),
    "report": lambda j, _: j.rt.report(),
    "rebalance": lambda j, _: j.rt.rebalance(),
    "gather_weights": lambda j, _: j.pipe.merge(),
}
"""Calls that one rank makes where the others step, or make the call after it."""

STOPPED = {
    "a save": lambda j, f: j.rt.save(f / "stopped", more=Failing(j.of(ValueError, KeyboardInterrupt))),
    "a report": lambda j, _: j.rt.report(),
}
"""Calls that one rank alone is stopped in, by the user or by what nobody expects."""

STEPS = {
    "a factor": (lambda j: j.rt.scaled(j.of(1.0, "x")), "factor is 'x'"),
    "microbatches": (lambda j: j.rt.step(j.x, target=j.x, n_microbatches=j.of(2, 0)), "n_microbatches is 0"),
    "outputs": (
        lambda j: j.rt.evaluate(j.x, target=j.x, return_outputs=j.of(True, "x")),
        "return_outputs is",
    ),
    "batches": (lambda j: j.rt.accumulate(j.of([{"input": j.x, "target": j.x}], None)), "batches is None"),
    "a batch": (lambda j: j.rt.forward(j.of(j.x, None)), "differs|must be"),
}
"""Steps that one rank alone is refused: they end with its cause on all."""


def split(job, **options):
    """A pipe of three stages, with options of its own."""
    given = {"n_stages": 3, "args": (job.x,), "costs": "estimated", "n_microbatches": 2, **options}
    return autopipe.split(layers(), **given)


def stop(*args):
    raise KeyboardInterrupt


def on_meta(job, **options):
    """A runtime of a model that each rank fills its stages of."""
    with torch.device("meta"):
        model = layers()
    pipe = autopipe.split(
        model, 3, (job.x.to("meta"),), balance="parameters", device="H200", costs="estimated"
    )
    return pipe.runtime(F.mse_loss, **options)


MADE = {
    "split no model": (lambda j: autopipe.split(j.of(layers(), 3), 3, (j.x,)), "model is 3"),
    "split by a word": (lambda j: split(j, n_stages=j.of(3, "x")), "n_stages is 'x'"),
    "split by an unknown": (lambda j: split(j, **j.of({}, {"stages": 3})), "no option 'stages'"),
    "split with a limit": (lambda j: split(j, stall_limit_s=j.of(60.0, -1)), "stall_limit_s is -1"),
    "split by precision": (
        lambda j: split(j, optimizer="sgd", **j.of({}, {"optimizer_bytes_per_parameter_byte": 2})),
        "give it or them",
    ),
    "split by a file": (lambda j: split(j, **j.of({}, {"plan": "none.json"})), "none.json"),
    "split stopped": (lambda j: split(j, args=j.of((j.x,), (Stops(),))), "KeyboardInterrupt"),
    "split by other data": (lambda j: split(j, args=(j.of(j.x, j.x[:, :3]),)), "failed|mat1"),
    "split into others": (lambda j: split(j, n_stages=j.of(3, 6)), "disagree on n_stages"),
    "split for another": (lambda j: split(j, optimizer=j.of("adam", "sgd")), "disagree on optimizer"),
    "split as pinned": (lambda j: split(j, pin={"5": j.of(2, 1)}), "disagree on pin"),
    "plan by a word": (
        lambda j: autopipe.plan(layers(), 3, (j.x,), n_microbatches=j.of(2, 0)),
        "n_microbatches is 0",
    ),
    "probe": (lambda j: autopipe.probe(j.of(3, 0)), "n_ranks is 0"),
    "run by an unknown": (lambda j: j.pipe.runtime(**j.of({}, {"limit": 3})), "no option 'limit'"),
    "run a loss": (lambda j: j.pipe.runtime(j.of(F.mse_loss, 3)), "loss_fn is 3"),
    "run on a mesh": (lambda j: j.pipe.runtime(F.mse_loss, mesh=j.of(None, 3)), "mesh is 3"),
    "run on a device": (lambda j: j.pipe.runtime(F.mse_loss, device=j.of("cpu", "x")), "device is 'x'"),
    "run a schedule": (lambda j: j.pipe.runtime(F.mse_loss, schedule=j.of(None, "x")), "schedule is 'x'"),
    "run a changed model": (lambda j: changed(j).runtime(F.mse_loss), "put in, or taken out"),
    "run stopped": (lambda j: j.pipe.runtime(F.mse_loss, autocast=j.of(None, Stops())), "KeyboardInterrupt"),
    # by every rank: which fails first is chance, and a stage that is filled by then does not wait
    "run without weights": (lambda j: on_meta(j, weights=lambda module, path: 1 / 0), "ZeroDivision"),
}
"""What one rank alone is refused, or stopped in, before there is a pipeline: each goes on with the next."""


class Stops:
    """What stops its rank as soon as it is looked at."""

    __class__ = property(stop)


def changed(job):
    """A pipe of a model that one rank alone has changed since."""
    pipe = split(job)
    if job.rank == ODD:
        pipe.model.append(nn.Linear(8, 8))
    return pipe


def check(call, kinds, says):
    began_s = time.monotonic()
    with pytest.raises(kinds) as caught:
        call()
    assert isinstance(caught.value, KeyboardInterrupt) or re.search(says, str(caught.value)), caught.value
    assert time.monotonic() - began_s < WITHIN_S


def main(folder):
    job = Job()
    job.rt.save(folder / "good", optimizer=job.optimizer)
    for call, says in REFUSED.values():
        check(lambda call=call: call(job, folder), AutopipeError, says)
        job.step()
    for call in ({"max_norm": "x"}, {"max_norm": -1}):  # by every rank
        with pytest.raises(InputError, match=r"^max_norm is"):
            job.rt.clip_grad_norm_(**call)
        job.step()
    names = list(ALONE)
    for i, name in enumerate(names):
        job = Job()
        own = name if job.rank == ODD else names[i - 1] if i % 2 else "step"
        call = job.step if own == "step" else lambda own=own, job=job: ALONE[own](job, folder)
        check(call, StepError, r"rank \d (is at|begins step).*rank \d (is at|begins step)")
    for call in STOPPED.values():
        job = Job()
        if job.rank == ODD:
            job.rt.engine.peers.clock_offset_s = lambda: 1 / 0
        kinds = (KeyboardInterrupt, StepError) if job.rank == ODD else StepError
        check(
            lambda call=call, job=job: call(job, folder),
            kinds,
            r"has no state|KeyboardInterrupt|ZeroDivision",
        )
    job = Job()
    for call, says in MADE.values():
        kinds = (AutopipeError, ArithmeticError, KeyboardInterrupt) if job.rank == ODD else AutopipeError
        check(lambda call=call: call(job), kinds, says)
    for call, says in STEPS.values():
        job = Job()
        check(lambda call=call, job=job: (call(job), job.step()), AutopipeError, says)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(pathlib.Path(sys.argv[1]))
    print("done")
    sys.stdout.flush()
    os._exit(0)
