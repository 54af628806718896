from common import make_encoded, prompts, report

model = make_encoded().eval()
report(model.generate(**prompts(), num_beams=3))
