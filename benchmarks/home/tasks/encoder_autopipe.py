from common import loader, make_encoded, prompts, report

import autopipe

model = make_encoded().eval()
pipe = autopipe.split(model, 2, kwargs=next(iter(loader())))
pipe.runtime()
report(pipe.generate(**prompts(), num_beams=3))
