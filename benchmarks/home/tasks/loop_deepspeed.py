import deepspeed
import torch
import torch.distributed as dist
from common import loader, make, report
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

deepspeed.init_distributed("gloo")
model = make()
body = model.transformer


class Words(torch.nn.Embedding):
    def __init__(self):
        super().__init__(*body.wte.weight.shape)
        self.weight = body.wte.weight


class Positions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = body.wpe

    def forward(self, hidden):
        return hidden + self.wpe(torch.arange(hidden.shape[1]))


class Block(torch.nn.Module):
    def __init__(self, i):
        super().__init__()
        self.block = body.h[i]

    def forward(self, hidden):
        made = self.block(hidden)
        return made if isinstance(made, torch.Tensor) else made[0]


def words_of(embedding, hidden):
    return hidden @ embedding.weight.T


def loss_fn(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


layers = [
    TiedLayerSpec("words", Words),
    LayerSpec(Positions),
    *(LayerSpec(Block, i) for i in range(len(body.h))),
    body.ln_f,
    TiedLayerSpec("words", Words, forward_fn=words_of),
]
net = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
optimizer = torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config)
batches = list(loader())
pieces = (p for b in batches for p in zip(b["input_ids"].chunk(4), b["labels"].chunk(4), strict=True))
for _ in batches:
    engine.train_batch(pieces)
own = {id(p) for p in net.parameters()}
mine = {name: p.detach() for name, p in model.named_parameters() if id(p) in own}
everyone = [None, None]
dist.all_gather_object(everyone, mine)
report(
    {
        **model.state_dict(),
        **everyone[0],
        **everyone[1],
        "lm_head.weight": everyone[1]["transformer.wte.weight"],
    }
)
