"""transformers' Trainer, plain or of a split model: ``python trainer_ranks.py CHECK FOLDER``.

In a process of its own the plain Trainer writes what it reaches to the folder; ranks hold theirs against it.
"""

import os
import pathlib
import sys
import warnings

import numpy as np
import torch
import transformers
from generating_models import make
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import autopipe
from autopipe.neighbours.trainer import PipelineTrainer

IS_PLAIN = "RANK" not in os.environ
N_RANKS = int(os.environ.get("WORLD_SIZE", "2"))


def rows(n, n_labels=None, seed=0):
    """Samples of unequal lengths; labels per token, or one of ``n_labels``."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        length = int(torch.randint(3, 9, (), generator=generator))
        ids = torch.randint(3, 61, (length,), generator=generator)
        label = ids if n_labels is None else torch.randint(n_labels, (), generator=generator)
        found.append({"input_ids": ids, "labels": label})
    return found


def pad(samples):
    ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if "labels" not in samples[0]:
        return batch
    if samples[0]["labels"].ndim == 0:
        batch["labels"] = torch.stack([s["labels"] for s in samples])
    else:
        batch["labels"] = torch.where(ids == 0, -100, ids)
    return batch


def accuracy(prediction):
    """How often the label is in the better half."""
    logits, labels = prediction.predictions, prediction.label_ids
    if labels.ndim > 1:
        logits, labels = logits[:, :-1], labels[:, 1:]
    own = np.take_along_axis(logits, labels.clip(0)[..., None], -1)
    is_better = (logits > own).mean(-1) < 0.5
    return {"accuracy": float(is_better[labels != -100].mean())}


def arguments(folder, **changes):
    return TrainingArguments(
        str(folder),
        **{
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 5,
            "gradient_accumulation_steps": 2,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **changes,
        },
    )


def trainer(model, folder, n_labels=None, callbacks=(), data=None, **changes):
    """The plain Trainer, or ours around a split of the model."""
    samples = rows(18, n_labels)
    data = {"train_dataset": data or samples, "eval_dataset": rows(8, n_labels, seed=1)}
    options = {**data, "data_collator": pad, "compute_metrics": accuracy, "callbacks": list(callbacks)}
    args = arguments(folder, **changes)
    if IS_PLAIN:
        return Trainer(model, args, **options)
    example = pad(samples[:4])
    pipe = autopipe.split(model, N_RANKS, (), example, n_microbatches=2, costs="estimated", balance="uniform")
    return PipelineTrainer(pipe, args, **options)


def weights(made):
    model = made.model if IS_PLAIN else made.pipe.merge()
    return {name: value.clone() for name, value in model.state_dict().items()}


def logged(made):
    """What was logged at each step, without times."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "step")
    return [{k: v for k, v in entry.items() if k in keys} for entry in made.state.log_history]


def hold(folder, name, found, rtol=1e-5):
    """Write what the plain run found, or compare with it."""
    file = pathlib.Path(folder) / f"{name}.pt"
    if IS_PLAIN:
        torch.save(found, file)
        return
    expected = torch.load(file)
    assert len(found["logs"]) == len(expected["logs"])
    for mine, other in zip(found["logs"], expected["logs"], strict=True):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert abs(value - other[key]) <= 20 * rtol * max(1.0, abs(value)), (key, mine, other)
    torch.testing.assert_close(found["weights"], expected["weights"], atol=rtol, rtol=rtol)


def causal(folder):
    """Padding, accumulation, cosine, decay, clipping, evaluation, the best checkpoint, early stopping.

    Four ranks go on from the first checkpoint of two, with other weights of their own.
    """
    folder = pathlib.Path(folder)
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    goes_on = N_RANKS == 4
    made = trainer(make("llama", seed=9 * goes_on), folder / f"runs{IS_PLAIN}{N_RANKS}", callbacks=[stop])
    result = made.train(
        resume_from_checkpoint=str(folder / "runsFalse2" / "checkpoint-2") if goes_on else None
    )
    metrics = made.evaluate()
    prediction = made.predict(rows(5, seed=2))
    found = {"weights": weights(made), "logs": logged(made)}
    found["logs"] += [{"eval_loss": metrics["eval_loss"]}]
    found["weights"]["predictions"] = torch.from_numpy(prediction.predictions)
    hold(folder, "causal", found)
    if not goes_on:
        hold(folder, "loss", {"logs": [], "weights": {"loss": torch.tensor(result.training_loss)}})
    if not IS_PLAIN:
        made.save_model()
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"runs{IS_PLAIN}{N_RANKS}")
        torch.testing.assert_close(dict(again.state_dict()), weights(made))


def classifier(folder):
    """A sequence classifier, in fp32 and under autocast; the Trainer adds its accumulated pieces up."""
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    for bf16 in (False, True):
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
        path = pathlib.Path(folder) / f"classes{IS_PLAIN}{N_RANKS}{bf16}"
        # gradients of keys' biases are zero but for rounding, of which Adam would make steps
        made = trainer(model, path, 3, bf16=bf16, max_steps=6, adam_epsilon=1e-4)
        made.train()
        logs = logged(made)
        for entry in logs if bf16 else ():
            entry.pop("eval_accuracy", None)  # of eight samples, some of which are as good as tied in bf16
        hold(
            folder, f"classifier{bf16}", {"weights": weights(made), "logs": logs}, rtol=2e-3 if bf16 else 1e-5
        )


class Stream(torch.utils.data.IterableDataset):
    """Samples one after another, of a number that nobody knows."""

    def __iter__(self):
        return iter(rows(18))


def smoothed(folder):
    """Smoothed labels, the model's own checkpointing, a stream of samples, samples without labels."""
    path = pathlib.Path(folder) / f"smoothed{IS_PLAIN}{N_RANKS}"
    model = make("llama")
    if not IS_PLAIN:
        model.activation_checkpointing_enable()
    options = {"label_smoothing_factor": 0.2, "activation_checkpointing": True, "max_steps": 6}
    made = trainer(model, path, data=Stream(), **options)
    made.evaluate()
    made.train()
    prediction = made.predict([{"input_ids": row["input_ids"]} for row in rows(5, seed=2)])
    found = {"weights": weights(made), "logs": logged(made)}
    found["weights"]["predictions"] = torch.from_numpy(prediction.predictions)
    hold(folder, "smoothed", found)


def adapters(folder):
    """LoRA: trained as plain, adapters alone saved, checkpoints resumed."""
    import peft
    from safetensors.torch import load_file

    folder = pathlib.Path(folder)
    path = folder / f"lora{IS_PLAIN}"

    def wrapped():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(make("llama"), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, and gradients of lora_A with it
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    made = trainer(wrapped(), path, load_best_model_at_end=False)
    made.train()
    made.save_model()
    files = sorted(f.name for f in path.iterdir() if f.is_file())
    assert "adapter_model.safetensors" in files, files
    assert not [f for f in files if f.startswith("model")], files
    saved = load_file(path / "adapter_model.safetensors")
    assert len(saved) == 4 * 2 * 2
    hold(folder, "lora", {"weights": saved, "logs": logged(made)})
    if not IS_PLAIN:
        again = peft.PeftModel.from_pretrained(make("llama"), path)
        torch.testing.assert_close(dict(again.state_dict()), weights(made))
        resumed = trainer(wrapped(), path, load_best_model_at_end=False)
        resumed.train(resume_from_checkpoint=str(path / "checkpoint-2"))
        torch.testing.assert_close(weights(resumed), weights(made), atol=1e-6, rtol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    globals()[sys.argv[1]](*sys.argv[2:])
