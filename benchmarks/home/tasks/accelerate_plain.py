import sys

import torch
from accelerate import Accelerator
from common import loader, make, report

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = make()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
for batch in batches:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state(sys.argv[1] + ".state")
report(model.state_dict())
