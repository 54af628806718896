import sys

import lightning
import torch
from common import loader, make, report


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make()

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-5)


lit = Lit()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=1.0, enable_progress_bar=False,
    default_root_dir=sys.argv[1] + ".runs",
)  # fmt: skip
trainer.fit(lit, loader())
report(lit.model.state_dict())
