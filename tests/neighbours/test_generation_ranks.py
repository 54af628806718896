"""Where the parts of a model that generates lie, and which models cannot be laid out."""

import types

import pytest

import autopipe

transformers = pytest.importorskip("transformers", reason="needs the transformers extra")


def laid_out(family, **options):
    from generate_ranks import split
    from generating_models import make

    from autopipe.neighbours.generation_ranks import lay_out

    return lay_out(split(make(family), **options).runtime().engine)


def names(modules):
    return [type(m).__name__ for m in modules]


def test_layers_and_what_is_around_them():
    layout = laid_out("gpt2")
    decoder = layout.decoder
    assert decoder.ranks == (0, 0, 0, 1, 1, 1)
    assert layout.driver == 1
    assert decoder.overlaps
    assert names(decoder.before) == ["Embedding", "Embedding"]
    assert names(decoder.after) == ["LayerNorm", "Linear"]
    assert layout.loans == ()
    assert layout.encoder is None


def test_ranks_that_are_visited_twice_do_not_overlap():
    decoder = laid_out("llama", n_stages=4, n_ranks=2, schedule="zbv").decoder
    assert decoder.ranks[0] == decoder.ranks[-1]
    assert not decoder.overlaps


def test_what_a_rank_lacks_of_its_part_is_lent():
    layout = laid_out("llama", pin={"model.norm": 0})
    assert layout.driver == 1
    (loan,) = (loan for loan in layout.loans if loan.name == "model.norm.weight")
    assert (loan.source, loan.borrowers) == (0, (1,))


@pytest.mark.parametrize(("family", "around"), [("t5", ["T5LayerNorm"]), ("whisper", ["LayerNorm"])])
def test_an_encoder_has_a_chain_of_its_own(family, around):
    layout = laid_out(family)
    assert (len(layout.encoder.layers), layout.encoder.ranks[0]) == (3, 0)
    assert layout.driver == 1
    assert names(layout.encoder.after) == around
    assert names(layout.decoder.after) == [*around, "Linear"]
    inputs = {"t5": ["Embedding"], "whisper": ["Conv1d", "Conv1d", "Embedding"]}
    assert names(layout.encoder.before) == inputs[family]


def test_caches_of_another_kind_are_refused():
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    from autopipe.neighbours.generation_ranks import lay_out

    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    capture = types.SimpleNamespace(model=model, ops=types.SimpleNamespace(model="Mamba"))
    with pytest.raises(autopipe.InputError, match=r"a cache of its own kind; .*pipe\.merge"):
        lay_out(types.SimpleNamespace(capture=capture))
