"""Where the parts of a causal model lie, and which models cannot be laid out."""

import pytest
import torch

import autopipe

transformers = pytest.importorskip("transformers", reason="needs the transformers extra")


def laid_out(family, **options):
    from causal_models import make
    from generate_ranks import split

    from autopipe.neighbours.causal import lay_out

    return lay_out(split(make(family), **options).runtime().engine)


def test_layers_and_what_is_around_them():
    layout = laid_out("gpt2")
    assert layout.chain == (0, 0, 0, 1, 1, 1)
    assert layout.driver == 1
    assert layout.overlaps
    assert [type(m).__name__ for m in layout.before] == ["Embedding", "Embedding"]
    assert [type(m).__name__ for m in layout.after] == ["LayerNorm", "Linear"]
    assert layout.loans == ()
    assert not layout.returns_tuple


def test_ranks_that_are_visited_twice_do_not_overlap():
    layout = laid_out("llama", n_stages=4, n_ranks=2, schedule="zbv")
    assert layout.chain[0] == layout.chain[-1]
    assert not layout.overlaps


def test_what_a_rank_lacks_of_its_part_is_lent():
    layout = laid_out("llama", pin={"model.norm": 0})
    assert layout.driver == 1
    (loan,) = (loan for loan in layout.loans if loan.name == "model.norm.weight")
    assert (loan.source, loan.borrowers) == (0, (1,))


def test_encoder_decoders_are_refused():
    from autopipe.neighbours.causal import lay_out

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    ids = torch.ones(2, 5, dtype=torch.int64)
    pipe = autopipe.split(model, 2, kwargs={"input_ids": ids, "labels": ids}, costs="estimated")
    with pytest.raises(autopipe.InputError, match=r"an encoder beside its decoder; .*pipe\.merge"):
        lay_out(pipe.runtime().engine)
