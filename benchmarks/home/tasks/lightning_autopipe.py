import sys

import lightning
import torch
from common import loader, make, report

import autopipe
from autopipe.neighbours.lightning import PipelineStrategy
from autopipe.neighbours.module import PipelineModule


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.pipe = [autopipe.split(make(), 2, kwargs=next(iter(loader())))]
            self.model = PipelineModule(self.pipe[0].runtime())

    def training_step(self, batch, index):
        loss = self.model(**batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-5)


lit = Lit()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, max_epochs=1, gradient_clip_val=1.0, enable_progress_bar=False,
    default_root_dir=sys.argv[1] + ".runs", strategy=PipelineStrategy(),
    use_distributed_sampler=False,
)  # fmt: skip
trainer.fit(lit, loader())
report(lit.pipe[0].merge().state_dict())
