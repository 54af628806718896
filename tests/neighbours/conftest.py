"""The process that has imported the libraries these tests are about, and forks their ranks."""

import pytest
from processes import Ready

IMPORTS = (
    "autopipe.api",
    "autopipe.neighbours.generation",
    "causal_models",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture(scope="session")
def ready():
    forks = Ready(IMPORTS)
    yield forks
    forks.close()
