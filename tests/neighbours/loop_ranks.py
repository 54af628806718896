"""A split GPT-2 in loops of other libraries: ``python loop_ranks.py CHECK FOLDER``.

In a process of its own the plain model is trained, by the same library, and its weights go to the folder.
"""

import os
import pathlib
import sys
import warnings

import pytest
import torch
from generating_models import make

import autopipe

IS_PLAIN = "RANK" not in os.environ
BATCHES, SIZE, N_PIECES = 4, 4, 2


def dataset():
    ids = torch.randint(3, 61, (BATCHES * SIZE, 7), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loader(shuffle=False):
    return torch.utils.data.DataLoader(dataset(), SIZE, shuffle=shuffle, collate_fn=collate)


class Stream(torch.utils.data.IterableDataset):
    """The samples one after another, of a length that nobody knows."""

    def __iter__(self):
        return iter(dataset())


def stream():
    return torch.utils.data.DataLoader(Stream(), SIZE, collate_fn=collate)


def model():
    return make("gpt2").train()


def piped(autocast=None):
    from autopipe.neighbours.module import PipelineModule

    ids = next(iter(loader()))
    pipe = autopipe.split(model(), 2, (), ids, n_microbatches=2, costs="estimated", balance="uniform")
    return pipe, PipelineModule(pipe.runtime(autocast=autocast))


def hold(folder, name, weights, atol=1e-5):
    file = pathlib.Path(folder) / f"{name}.pt"
    if IS_PLAIN:
        torch.save({k: v.clone() for k, v in weights.items()}, file)
        return
    torch.testing.assert_close(dict(weights), torch.load(file), atol=atol, rtol=atol)


def upstream(folder):
    """What the module's inputs are made of gets its gradients in the loss's backward, with its factor."""
    from autopipe.neighbours.module import PipelineModule

    def body():
        torch.manual_seed(1)
        return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    torch.manual_seed(0)
    ahead, x, error = torch.nn.Linear(8, 8), torch.randn(4, 8), torch.nn.functional.mse_loss
    if IS_PLAIN:
        (3 * error(body()(ahead(x)), x)).backward()
    else:
        pipe = autopipe.split(body(), 2, (x,), n_microbatches=2, costs="estimated", balance="uniform")
        loss = 3 * PipelineModule(pipe.runtime(error))(ahead(x), target=x)
        assert ahead.weight.grad is None
        loss.backward()
    hold(folder, "upstream", {name: p.grad for name, p in ahead.named_parameters()})


def plainly(folder):
    """The user's own loop: accumulation by dividing the loss, and a scaled loss."""
    pipe, module = (None, model()) if IS_PLAIN else piped()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for i, batch in enumerate(loader()):
        loss = module(**batch)
        loss = loss.loss if IS_PLAIN else loss
        (3 * loss / N_PIECES).backward()
        if (i + 1) % N_PIECES == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if not IS_PLAIN:
        before = [p.grad for p in module.parameters()]
        unused = module(**batch)
        assert all(p.grad is b for p, b in zip(module.parameters(), before, strict=True))
        del unused
        with torch.no_grad():
            assert not module(**batch).requires_grad
        for wrapped in (module, torch.nn.Sequential(module)):
            with pytest.raises(autopipe.InputError, match="PipelineAccelerator"):
                torch.nn.parallel.DistributedDataParallel(wrapped)
        with pytest.raises(autopipe.InputError, match=r"runtime\.load"):
            module.load_state_dict({})
    hold(folder, "plainly", module.state_dict() if IS_PLAIN else pipe.merge().state_dict())
    upstream(folder)


def accelerated(folder, precision="no"):
    """Accelerate's own loop: accumulation, clipping, a schedule, precision, saved and loaded state."""
    from accelerate import Accelerator

    from autopipe.neighbours.acceleration import PipelineAccelerator

    kind = Accelerator if IS_PLAIN else PipelineAccelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=N_PIECES, mixed_precision=precision)
    pipe, module = (None, model()) if IS_PLAIN else piped(torch.bfloat16 if precision == "bf16" else None)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    torch.manual_seed(7)
    module, optimizer, shuffled, scheduler = accelerator.prepare(module, optimizer, loader(True), scheduler)
    for epoch, batches in enumerate((shuffled, accelerator.prepare(stream()))):
        for batch in batches:
            with accelerator.accumulate(module):
                loss = module(**batch)
                accelerator.backward(loss.loss if IS_PLAIN else loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0 and not IS_PLAIN:
            best = torch.nn.BatchNorm1d(2)  # what has a state of its own
            accelerator.register_for_checkpointing(best)
            accelerator.save_state(f"{folder}/epoch0.{precision}")
            optimizer.step()
            best.running_mean.fill_(3.0)
            accelerator.load_state(f"{folder}/epoch0.{precision}")
            assert not best.running_mean.any()
    atol = 1e-5 if precision == "no" else 2e-3
    weights = module.state_dict() if IS_PLAIN else pipe.merge().state_dict()
    hold(folder, f"accelerated{precision}", weights, atol)


class OfOwnWeights:
    """Something that a loop keeps of each weight of its rank."""

    def __init__(self, module, factor=3.0):
        self.kept = {name: p.detach() * factor for name, p in module.named_parameters()}

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]

    def is_equal(self, other):
        same = (torch.equal(t, other.kept[name]) for name, t in self.kept.items())
        return self.kept.keys() == other.kept.keys() and all(same)


def fabric(folder):
    """Fabric's own loop, with its clipping and its checkpoints."""
    from lightning.fabric import Fabric

    from autopipe.neighbours.lightning import FabricPipelineStrategy

    options = {"devices": 1} if IS_PLAIN else {"devices": 2, "strategy": FabricPipelineStrategy()}
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    pipe, module = (None, model()) if IS_PLAIN else piped()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, eps=1e-4)
    module, optimizer = fabric.setup(module, optimizer)
    batches = fabric.setup_dataloaders(loader())
    for i, batch in enumerate(batches):
        loss = module(**batch)
        fabric.backward((loss.loss if IS_PLAIN else loss) / N_PIECES)
        if (i + 1) % N_PIECES == 0:
            fabric.clip_gradients(module, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            if i + 1 == N_PIECES and not IS_PLAIN:
                average = OfOwnWeights(module)
                state = {"module": module, "optimizer": optimizer, "step": i, "average": average}
                fabric.save(f"{folder}/fabric", state)
                state["step"], state["average"] = -1, OfOwnWeights(module, 0.0)
                optimizer.step()
                fabric.load(f"{folder}/fabric", state)
                assert state["step"] == i
                assert average.is_equal(state["average"])
    hold(folder, "fabric", module.state_dict() if IS_PLAIN else pipe.merge().state_dict())


def lit_module():
    import lightning
    import torchmetrics

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.module = None
            self.total = torchmetrics.SumMetric()

        def configure_model(self):
            if self.module is None:
                pipe, self.module = (None, model()) if IS_PLAIN else piped()
                self.pipes = (pipe,)

        def training_step(self, batch, index):
            loss = self.module(**batch)
            loss = loss.loss if IS_PLAIN else loss
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, index):
            loss = self.module(**batch)
            loss = loss.loss if IS_PLAIN else loss
            self.log("val_loss", loss, sync_dist=True)
            self.total.update(loss)
            self.log("val_total", self.total)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-4)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    return Lit()


def lit_trainer(folder, epochs, precision):
    import lightning
    from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from autopipe.neighbours.lightning import PipelineStrategy

    class OwnAverage(Callback):
        """Of this rank's weights; it goes on from one of the same."""

        kept = None

        def on_train_start(self, trainer, lit):
            now = {name: p.detach().clone() for name, p in lit.module.named_parameters()}
            assert self.kept is None or self.kept.keys() == now.keys()
            self.kept = now

        def state_dict(self):
            return {"kept": self.kept}

        def load_state_dict(self, state):
            self.kept = state["kept"]

    options = {"devices": 1} if IS_PLAIN else {"devices": 2, "strategy": PipelineStrategy()}
    keeper = ModelCheckpoint(
        dirpath=f"{folder}/kept{IS_PLAIN}{precision}", monitor="val_loss", save_last=True
    )
    return lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=N_PIECES, gradient_clip_val=0.5,
        callbacks=[keeper, EarlyStopping("val_loss", patience=9), LearningRateMonitor(), OwnAverage()],
        logger=CSVLogger(f"{folder}/logs{IS_PLAIN}"), enable_progress_bar=False, log_every_n_steps=1,
        enable_model_summary=False, precision=precision, use_distributed_sampler=False, **options,
    )  # fmt: skip


def lightning_trainer(folder, precision="32-true"):
    """Lightning's Trainer with its callbacks, logger, precision, checkpoints; and going on from one."""
    made = lit_trainer(folder, 2, precision)
    lit = lit_module()
    before = lit_trainer(folder, 1, precision).validate(lit_module(), loader(), verbose=False)[0]["val_total"]
    made.fit(lit, loader(), loader())
    metrics = {k: float(v) for k, v in made.callback_metrics.items()}
    last = f"{folder}/kept{IS_PLAIN}{precision}/last.ckpt"
    again = lit_module()
    lit_trainer(folder, 3, precision).fit(again, loader(), loader(), ckpt_path=last)
    weights = again.module.state_dict() if IS_PLAIN else again.pipes[0].merge().state_dict()
    metrics["before"] = before
    found = {**weights, **{k: torch.tensor(v) for k, v in metrics.items()}}
    hold(folder, f"lightning{precision}", found, 1e-5 if precision == "32-true" else 5e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    globals()[sys.argv[1]](*sys.argv[2:])
