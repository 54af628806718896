"""``PipelineTrainer`` reaches what transformers' Trainer does, and refuses what it cannot take."""

import pathlib

import pytest
import torch
from processes import run_ranks

import autopipe

pytest.importorskip("transformers", reason="needs the transformers extra")
pytest.importorskip("accelerate", reason="needs the accelerate extra")

SCRIPT = pathlib.Path(__file__).parent / "trainer_ranks.py"
WAYS = (
    ("", {}),
    ("", {"gradient_accumulation_steps": 1}),
    ("LoraConfig", {}),
    ("", {"label_smoothing_factor": 0.1}),
    ("PromptTuningConfig", {}),
    ("PromptEncoderConfig", {"gradient_accumulation_steps": 1}),
)
"""Adapters and arguments; each always runs with one family of models, and on demand with the other too."""


def test_a_causal_model(tmp_path):
    """On two ranks, and resumed on four from a checkpoint of two."""
    for n_ranks in (0, 2, 4):
        run_ranks(SCRIPT, n_ranks, "causal", tmp_path)


def test_a_classifier(tmp_path):
    for n_ranks in (0, 2):
        run_ranks(SCRIPT, n_ranks, "classifier", tmp_path)


def test_smoothed_labels_of_a_stream(tmp_path):
    for n_ranks in (0, 2):
        run_ranks(SCRIPT, n_ranks, "smoothed", tmp_path)


def test_whether_a_loss_counts_items():
    import transformers
    from generating_models import make

    from autopipe.neighbours.losses import takes_count

    ids = torch.ones(3, 5, dtype=torch.int64)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=9, num_labels=3, **sizes)
    classifier = transformers.BertForSequenceClassification(config)
    assert takes_count(make("llama"), ((), {"input_ids": ids, "labels": ids}))
    assert not takes_count(classifier, ((), {"input_ids": ids, "labels": ids[:, 0]}))
    assert not takes_count(torch.nn.Linear(5, 5), ((ids.float(),), {}))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "adapter", "options"),
    [
        pytest.param(family, *way, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, way in enumerate(WAYS)
        for j, family in enumerate(("gpt2", "llama"))
    ],
)
def test_losses_are_divided_by_the_labels_that_the_trainer_counts(tmp_path, family, adapter, options):
    """It counts the first of each row, too, of causal models whose classes it does not know to be such.

    That one is compared behind a learned prompt alone.
    """
    import transformers
    from generating_models import make
    from trainer_ranks import arguments, logged, pad, rows

    from autopipe.neighbours.trainer import PipelineTrainer

    peft = pytest.importorskip("peft", reason="needs the peft extra") if adapter else None
    is_prompt = adapter.startswith("Prompt")
    sizes = {"num_virtual_tokens": 3} if is_prompt else {"r": 2, "fan_in_fan_out": family == "gpt2"}

    def made():
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
        model = make(family, **dropout)
        torch.manual_seed(0)
        if peft is None:
            return model
        return peft.get_peft_model(model, getattr(peft, adapter)(task_type="CAUSAL_LM", **sizes))

    def trained(is_plain):
        args = arguments(tmp_path, max_steps=3, eval_steps=1, load_best_model_at_end=False, **options)
        data = {"train_dataset": rows(10), "eval_dataset": rows(3, seed=1), "data_collator": pad}
        if is_plain:
            trainer = transformers.Trainer(made(), args, **data)
        else:
            pipe = autopipe.split(made(), 2, (), pad(rows(4)), n_microbatches=2, costs="estimated")
            trainer = PipelineTrainer(pipe, args, **data)
        trainer.train()
        return trainer

    plain, own = trained(True), trained(False)
    numbers = [[v for entry in logged(made) for _, v in sorted(entry.items())] for made in (plain, own)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


def test_adapters(tmp_path):
    pytest.importorskip("peft", reason="needs the peft extra")
    for n_ranks in (0, 2):
        run_ranks(SCRIPT, n_ranks, "adapters", tmp_path)


def test_what_is_not_taken(tmp_path):
    from generating_models import make
    from trainer_ranks import arguments, pad, rows

    from autopipe.neighbours.trainer import PipelineTrainer

    example = pad(rows(4))
    model = make("llama")
    args = {"neftune_noise_alpha": 0.1, "activation_checkpointing": True}
    with pytest.raises(autopipe.AutopipeError, match=r"autopipe\.split"):
        PipelineTrainer(model, arguments(tmp_path))
    pipe = autopipe.split(model, 2, (), example, costs="estimated")
    with pytest.raises(
        autopipe.AutopipeError, match=r"neftune_noise_alpha.*activation_checkpointing_enable\(\) before split"
    ):
        PipelineTrainer(pipe, arguments(tmp_path, **args))
    with pytest.raises(autopipe.AutopipeError, match="label_smoothing_factor: smooth in the loss_fn"):
        PipelineTrainer(pipe, arguments(tmp_path, label_smoothing_factor=0.1), loss_fn=torch.add)

    class Own(PipelineTrainer):
        def compute_loss(self, *args, **kwargs):
            return 0

    with pytest.raises(autopipe.AutopipeError, match=r"Own\.compute_loss would not be called"):
        Own(pipe, arguments(tmp_path))
    plain = arguments(tmp_path, eval_strategy="no", load_best_model_at_end=False)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(autopipe.AutopipeError, match="optimizers="):
        PipelineTrainer(pipe, plain, optimizers=(other, None))


class Forced(torch.nn.Module):
    """Its layers are given the labels too, as a decoder's are, where there are some."""

    def __init__(self):
        super().__init__()
        self.embed, self.force = torch.nn.Embedding(9, 4), torch.nn.Embedding(9, 4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 9)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        if labels is None:
            return {"logits": self.head(self.layers(x))}
        logits = self.head(self.layers(x + self.force(labels)))
        return {
            "loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


def test_predictions_without_labels_are_the_models(tmp_path):
    import transformers
    from trainer_ranks import arguments

    from autopipe.neighbours.trainer import PipelineTrainer

    torch.manual_seed(0)
    model, ids = Forced(), torch.randint(0, 9, (8, 5))
    options = {"eval_strategy": "no", "load_best_model_at_end": False, "per_device_eval_batch_size": 4}
    args, data = arguments(tmp_path, **options), [{"input_ids": row} for row in ids]
    wanted = transformers.Trainer(model, args).predict(data).predictions
    example = {"input_ids": ids[:4], "labels": ids[:4].clone()}
    pipe = autopipe.split(model, 2, (), example, n_microbatches=2, costs="estimated")
    found = PipelineTrainer(pipe, args).predict(data).predictions
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted))
