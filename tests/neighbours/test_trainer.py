"""``PipelineTrainer`` reaches what transformers' Trainer does, and refuses what it cannot take."""

import pathlib

import pytest
import torch
from processes import run_ranks

import autopipe

pytest.importorskip("transformers", reason="needs the transformers extra")
pytest.importorskip("accelerate", reason="needs the accelerate extra")

SCRIPT = pathlib.Path(__file__).parent / "trainer_ranks.py"


def test_a_causal_model(tmp_path):
    """On two ranks, and resumed on four from a checkpoint of two."""
    for n_ranks in (0, 2, 4):
        run_ranks(SCRIPT, n_ranks, "causal", tmp_path)


def test_a_classifier_in_bf16(tmp_path):
    for n_ranks in (0, 2):
        run_ranks(SCRIPT, n_ranks, "classifier", tmp_path)


def test_adapters(tmp_path):
    pytest.importorskip("peft", reason="needs the peft extra")
    for n_ranks in (0, 2):
        run_ranks(SCRIPT, n_ranks, "adapters", tmp_path)


def test_what_is_not_taken(tmp_path):
    from causal_models import make
    from trainer_ranks import arguments, pad, rows

    from autopipe.neighbours.trainer import PipelineTrainer

    example = pad(rows(4))
    model = make("llama")
    args = {"label_smoothing_factor": 0.1, "activation_checkpointing": True}
    with pytest.raises(autopipe.AutopipeError, match=r"autopipe\.split"):
        PipelineTrainer(model, arguments(tmp_path))
    pipe = autopipe.split(model, 2, (), example, costs="estimated")
    with pytest.raises(
        autopipe.AutopipeError, match=r"activation_checkpointing.*label_smoothing_factor"
    ) as error:
        PipelineTrainer(pipe, arguments(tmp_path, **args))
    assert "loss_fn" in str(error.value)

    class Own(PipelineTrainer):
        def compute_loss(self, *args, **kwargs):
            return 0

    with pytest.raises(autopipe.AutopipeError, match=r"Own\.compute_loss would not be called"):
        Own(pipe, arguments(tmp_path))
    plain = arguments(tmp_path, eval_strategy="no", load_best_model_at_end=False)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(autopipe.AutopipeError, match="optimizers="):
        PipelineTrainer(pipe, plain, optimizers=(other, None))
