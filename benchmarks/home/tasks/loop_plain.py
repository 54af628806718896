import torch
from common import loader, make, report

model = make()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
for batch in loader():
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
report(model.state_dict())
