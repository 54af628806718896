"""Programs drawn at random from what users combine train as the plain model does; the walk is on demand."""

import dataclasses

import pytest
from drawn_programs import agrees, draw

SLICE, WALK = 12, 400


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # torch's, of reentrant checkpoints
@pytest.mark.parametrize(
    "seed", [*range(SLICE), *(pytest.param(s, marks=pytest.mark.slow) for s in range(SLICE, WALK))]
)
def test_a_drawn_program_trains_as_the_plain_model_does(seed, tmp_path):
    program = draw(seed)
    print(dataclasses.asdict(program))
    agrees(program, tmp_path)
