import sys

from common import make, report, rows
from transformers import TrainingArguments

import autopipe
from autopipe.neighbours.trainer import PipelineTrainer

model = make()
args = TrainingArguments(
    sys.argv[1] + ".runs", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
    lr_scheduler_type="cosine", learning_rate=1e-3, adam_epsilon=1e-5, eval_strategy="steps",
    eval_steps=2, save_steps=2, load_best_model_at_end=True, report_to="none", disable_tqdm=True,
    use_cpu=True,
)  # fmt: skip
pipe = autopipe.split(model, 2, kwargs={k: v.expand(4, -1) for k, v in rows()[0].items()})
trainer = PipelineTrainer(pipe, args, train_dataset=rows(), eval_dataset=rows(8))
trainer.train()
trainer.save_model(sys.argv[1] + ".final")
report(pipe.merge().state_dict())
