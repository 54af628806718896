import time

import torch
from common import SPEED_PROMPTS, make_large, report

torch.set_num_threads(1)
model = make_large().eval()
found = {}
for n in SPEED_PROMPTS:
    ids = torch.randint(1, 257, (n, 32), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True}
    times = []
    for _ in range(4):
        start = time.perf_counter()
        tokens = model.generate(ids, max_new_tokens=24, **options)
        times.append(time.perf_counter() - start)
    found[n] = {"tokens": tokens, "one process": n * 24 / float(torch.tensor(times[1:]).median())}
report(found)
