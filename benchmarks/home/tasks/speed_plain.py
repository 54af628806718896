import time

import torch
from common import make_large, report

torch.set_num_threads(1)
model = make_large().eval()
generate = model.generate
ids = torch.randint(1, 257, (16, 32), generator=torch.Generator().manual_seed(1))
options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True}
times = []
for _ in range(4):
    start = time.perf_counter()
    tokens = generate(ids, max_new_tokens=48, **options)
    times.append(time.perf_counter() - start)
report({"tokens": tokens, "tokens per second": 16 * 48 / torch.tensor(times[1:]).median()})
