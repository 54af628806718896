import torch
from common import loader, make, report

import autopipe

model = make()
pipe = autopipe.split(model, 2, kwargs=next(iter(loader())))
rt = pipe.runtime()
optimizer = torch.optim.AdamW(rt.parameters(), 1e-3, eps=1e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
for batch in loader():
    rt.step(**batch)
    rt.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
report(pipe.merge().state_dict())
