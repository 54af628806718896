"""State that its user changes between steps: each step is the model's own, in process and on ranks."""

import copy
import pathlib
import pickle

import changing_ranks
import pytest
import torch
from changing_models import batch, check_step, model_and_twin, states
from processes import run_ranks
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError


@pytest.mark.parametrize(
    ("n_stages", "n_microbatches"),
    [
        (2, 1),
        (3, 2),
        (2, 4),
        *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((3, 1), (2, 2), (3, 4))),
    ],
)
def test_steps_are_of_the_state_that_the_model_has(n_stages, n_microbatches):
    model, twin = model_and_twin()
    pipe = autopipe.split(model, n_stages, (batch(0),), n_microbatches=n_microbatches, costs="estimated")
    rt = pipe.runtime(loss_fn=F.mse_loss)
    for seed, state in enumerate(states()):
        vars(model).update(state)
        vars(twin).update(state)
        check_step(rt, twin, seed)
        torch.testing.assert_close(pipe(batch(seed)), twin(batch(seed)))
    numbers = [{*kind.inputs.held} for kind in pipe.graph.kinds]
    assert numbers[-1] == {"temperature", "factor", "step"}
    assert len(numbers) < len(states())


def test_a_copy_is_of_the_present_state():
    model, twin = model_and_twin()
    pipe = autopipe.split(model, 2, (batch(0),), costs="estimated")
    for held in (model, twin):
        held.act = "sigmoid"
    pipe(batch(0))
    with pytest.raises(InputError, match="put it back"):
        copy.deepcopy(pipe)
    for held in (model, twin):
        held.act = "tanh"
    copied = pickle.loads(pickle.dumps(pipe))
    torch.testing.assert_close(copied(batch(1)), twin(batch(1)))


def test_weights_that_are_taken_over_leave_each_kind_its_state():
    model, twin = model_and_twin()
    pipe = autopipe.split(model, 2, (batch(0),), costs="estimated")
    for is_plain in (False, True):
        model.is_plain = twin.is_plain = is_plain
        pipe(batch(0))
    model.is_plain = twin.is_plain = False
    weights = {name: 2 * value for name, value in twin.state_dict().items()}
    pipe.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
    twin.load_state_dict(weights)
    torch.testing.assert_close(pipe(batch(1)), twin(batch(1)))


def test_on_ranks():
    run_ranks(pathlib.Path(changing_ranks.__file__), 2, timeout_s=120)
