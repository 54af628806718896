from common import make, prompts, report

model = make().eval()
report(model.generate(**prompts(), use_cache=True))
