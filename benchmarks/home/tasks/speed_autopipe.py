import time

import torch
from common import SPEED_PROMPTS, make_large, report

import autopipe

torch.set_num_threads(1)
model = make_large().eval()
example = torch.ones(8, 32, dtype=torch.int64)
pipe = autopipe.split(model, 2, kwargs={"input_ids": example, "labels": example})
pipe.runtime()
found = {}
for n in SPEED_PROMPTS:
    ids = torch.randint(1, 257, (n, 32), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True}
    times = {1: [], 2: []}
    for _ in range(4):
        for n_microbatches, taken in times.items():  # in turn, whatever else the machine does
            start = time.perf_counter()
            tokens = pipe.generate(ids, max_new_tokens=24, n_microbatches=n_microbatches, **options)
            taken.append(time.perf_counter() - start)
    one, two = (n * 24 / float(torch.tensor(taken[1:]).median()) for taken in times.values())
    found[n] = {"tokens": tokens, "in one piece": one, "in two pieces": two}
report(found)
