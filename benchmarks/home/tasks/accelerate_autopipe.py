import sys

import torch
from common import loader, make, report

import autopipe
from autopipe.neighbours.acceleration import PipelineAccelerator
from autopipe.neighbours.module import PipelineModule

accelerator = PipelineAccelerator(cpu=True, gradient_accumulation_steps=2)
pipe = autopipe.split(make(), 2, kwargs=next(iter(loader())))
model = PipelineModule(pipe.runtime())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
for batch in batches:
    with accelerator.accumulate(model):
        loss = model(**batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state(sys.argv[1] + ".state")
report(pipe.merge().state_dict())
