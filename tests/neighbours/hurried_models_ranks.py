"""What people write in a hurry with a model of transformers: ``hurried_models_ranks.py``, as a rank.

As in ``tests/api/hurried_ranks``: each is right, or refused with the remedy.
"""

import copy
import functools
import os
import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
import transformers
from generating_models import make, prompts

import autopipe

RANK = int(os.environ.get("RANK", "0"))


def batch():
    ids, mask = prompts(4)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def split(model=None):
    """A model, its pipe and a runtime; of the small one, copies of what is recorded and planned once.

    Copies take calls of the kinds that there are.
    """
    pipe = _split(model) if model is not None else copy.deepcopy(_template())
    return pipe.model, pipe, pipe.runtime()


@functools.cache
def _template():
    return _split(small())


def _split(model):
    return autopipe.split(model, 2, (), batch(), n_microbatches=2, costs="estimated", balance="uniform")


def small():
    return make("gpt2", n_layer=2)


def trained(model, pipe, rt, n=2, **changes):
    """Weights after some steps, beside those of the plain model; the largest difference."""
    own = changes.pop("plain", None) or small()
    optimizers = [torch.optim.SGD(x.parameters(), 0.01) for x in (rt, own)]
    for _ in range(n):
        rt.step(**batch())
        own(**batch()).loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    pipe.merge()
    pairs = zip(model.state_dict().values(), own.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def vocabulary_resized():
    model, _, rt = split()
    model.resize_token_embeddings(70)
    rt.step(**batch())


def checkpointing_enabled():
    model, pipe, rt = split(small().train())
    model.gradient_checkpointing_enable()
    return trained(model, pipe, rt)


def weights_tied_again():
    model, pipe, rt = split()
    model.tie_weights()
    return trained(model, pipe, rt)


def saved_as_pretrained():
    model, _, rt = split()
    rt.step(**batch())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)


def pipe_saved_as_pretrained():
    split()[1].save_pretrained("nowhere")


def as_the_model(model=None, **rows):
    """How far the loss of a step is from the model's own."""
    return abs(float(split(model)[2].step(**rows).loss) - float(small()(**rows).loss))


def a_column_too_many():
    return as_the_model(small(), **batch(), length=torch.tensor([7, 7, 7, 7]))


def encoding_by_position():
    split()[2].step(transformers.BatchEncoding(batch()))


def encoding_by_name():
    return as_the_model(**transformers.BatchEncoding(batch()))


def without_the_mask():
    rows = batch()
    del rows["attention_mask"]
    return as_the_model(small(), **rows)


def labels_left_out():
    rows = batch()
    del rows["labels"]
    split(small())[2].step(**rows)


def adapters_after_the_split():
    peft = pytest.importorskip("peft")
    model, _, rt = split()
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    rt.step(**batch())


def adapters_merged():
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(small(), config)

    model, own = adapted(), adapted()
    model, pipe, rt = split(model)
    apart = trained(model, pipe, rt, plain=own)
    ids = batch()["input_ids"]
    logits = [m.merge_and_unload()(ids).logits for m in (model, own)]
    return max(apart, float((logits[0] - logits[1]).abs().max()) * 1e-3)


def plain_generate_after_merging():
    model, pipe, rt = split()
    rt.step(**batch())
    pipe.merge()
    rows = {k: v for k, v in batch().items() if k != "labels"}
    found = model.generate(**rows, max_new_tokens=3) if RANK == 0 else None
    dist.barrier()
    return 0.0 if found is None else float((found != small().generate(**rows, max_new_tokens=3)).sum())


def checkpoint_of_the_plain_model():
    plain = make("gpt2", seed=4, n_layer=2)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.pt"
        torch.save(plain.state_dict(), path)
        *_, rt = split()
        rt.load(path)
    return abs(float(rt.step(**batch()).loss) - float(plain(**batch()).loss))


REFUSED = {
    "vocabulary_resized": "capture again",
    "saved_as_pretrained": r"rt\.save",
    "pipe_saved_as_pretrained": r"rt\.save",
    "encoding_by_position": "missing attention_mask, labels",
    "labels_left_out": "a step needs a real scalar loss",
    "adapters_after_the_split": "capture again",
}
HABITS = [
    vocabulary_resized, checkpointing_enabled, weights_tied_again, saved_as_pretrained,
    pipe_saved_as_pretrained, a_column_too_many, encoding_by_position, encoding_by_name, without_the_mask,
    labels_left_out, adapters_after_the_split, adapters_merged, plain_generate_after_merging,
    checkpoint_of_the_plain_model,
]  # fmt: skip


def main():
    for habit in HABITS:
        name = habit.__name__
        if name in REFUSED:
            with pytest.raises((autopipe.AutopipeError, AttributeError), match=REFUSED[name]):
                habit()
        else:
            difference = habit()
            assert difference < 1e-5, (name, difference)
        print(name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
