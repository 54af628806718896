from common import loader, make, prompts, report

import autopipe

model = make().eval()
pipe = autopipe.split(model, 2, kwargs=next(iter(loader())))
pipe.runtime()
report(pipe.generate(**prompts(), use_cache=True))
