import sys

import peft
import torch
from common import loader, make, report
from safetensors.torch import load_file

import autopipe
from autopipe.neighbours.adapters import save_adapters

base = make()
model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
pipe = autopipe.split(model, 2, kwargs=next(iter(loader())))
rt = pipe.runtime()
optimizer = torch.optim.AdamW(rt.parameters(), 1e-2, eps=1e-5)
for batch in loader():
    rt.step(**batch)
    optimizer.step()
    optimizer.zero_grad()
save_adapters(rt, sys.argv[1] + ".adapters")
report(load_file(sys.argv[1] + ".adapters/adapter_model.safetensors"))
