import sys

import peft
import torch
from common import loader, make, report
from safetensors.torch import load_file

base = make()
model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-5)
for batch in loader():
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(sys.argv[1] + ".adapters")
report(load_file(sys.argv[1] + ".adapters/adapter_model.safetensors"))
