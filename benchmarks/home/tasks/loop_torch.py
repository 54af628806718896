import torch
import torch.distributed as dist
from common import loader, make, report
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

dist.init_process_group("gloo")
rank = dist.get_rank()
model = make()
example = next(iter(loader()))["input_ids"].chunk(4)[0]
pipe = pipeline(model, (example,), split_spec={"transformer.h.2": SplitPoint.BEGINNING})
stage = pipe.build_stage(rank, torch.device("cpu"))


def loss_fn(output, labels):
    logits = output if isinstance(output, torch.Tensor) else output[0]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


schedule = Schedule1F1B(stage, 4, loss_fn)
parameters = list(stage.submod.parameters())
optimizer = torch.optim.AdamW(parameters, 1e-3, eps=1e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
for batch in loader():
    if rank == 0:
        schedule.step(batch["input_ids"])
    else:
        schedule.step(target=batch["labels"])
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
    dist.all_reduce(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm.sqrt())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
names = {k.removeprefix("_orig_mod."): v for k, v in stage.submod.state_dict().items()}
everyone = [None, None]
dist.all_gather_object(everyone, names)
report({k: v for part in everyone for k, v in part.items()})
