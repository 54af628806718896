"""Models made on the meta device: each rank makes its own stages, alike whatever the cut."""

import pytest
import torch
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError
from autopipe.runtime import Runtime

transformers = pytest.importorskip("transformers")

NAMES = ("llama", "gpt2", "bert", "qwen3", "t5")


def language_model(name):
    """A small model of a family on the meta device, and an example batch for it."""
    small = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 50}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=1, intermediate_size=24),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=16
        ),
        "bert": lambda: transformers.BertConfig(**small, intermediate_size=24, max_position_embeddings=16),
        "qwen3": lambda: transformers.Qwen3Config(
            **small, num_key_value_heads=1, intermediate_size=24, head_dim=8, tie_word_embeddings=True
        ),
        "t5": lambda: transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2
        ),
    }
    config = configs[name]()
    config.pad_token_id = config.decoder_start_token_id = 0
    autos = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    with torch.device("meta"):
        model = autos.get(name, transformers.AutoModelForCausalLM).from_config(config)
    ids = torch.randint(1, 50, (4, 8))
    labels = ids.masked_fill(torch.rand(4, 8) < 0.3, -100)
    return model, {"input_ids": ids, "labels": labels}


def runtime_of(name, n_stages, **options):
    torch.manual_seed(3)
    model, batch = language_model(name)
    example = {key: value.to("meta") for key, value in batch.items()}
    made = make(model, (), example, n_stages=n_stages, n_ranks=1, n_microbatches=2)
    torch.manual_seed(7)
    return model, batch, Runtime(*made, **options)


def state_of(runtime):
    return {n: t.clone() for s in runtime.stages for n, t in [*s.named_parameters(), *s.named_buffers()]}


@pytest.mark.parametrize("name", NAMES)
def test_trains_at_the_first_try_from_the_models_own_init(name, caplog):
    model, batch, runtime = runtime_of(name, 2)
    assert "cannot be weighed" not in caplog.text
    found = runtime.step(**batch).loss
    model.zero_grad()
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.train()
    if name in ("llama", "qwen3"):  # without dropout the plain model says the same
        torch.testing.assert_close(found, plain(**batch).loss.detach(), rtol=1e-5, atol=1e-6)
    for path, buffer in plain.named_buffers():  # tables that no checkpoint has
        torch.testing.assert_close(model.get_buffer(path), buffer, msg=path)
    for path, parameter in plain.named_parameters():
        torch.manual_seed(1)
        fresh = type(model)(model.config).get_parameter(path)
        assert parameter.std().isclose(fresh.std(), rtol=0.5, atol=1e-3), path
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
    for _ in range(8):
        optimizer.zero_grad()
        last = runtime.step(**batch).loss
        optimizer.step()
    assert last < found


@pytest.mark.parametrize("name", NAMES)
def test_values_do_not_depend_on_the_cut(name):
    (_, _, one), (_, _, three) = runtime_of(name, 1), runtime_of(name, 3)
    a, b = state_of(one), state_of(three)
    common = [n for n in a if n in b and not n.endswith("_anchor")]
    assert len(common) > 10
    assert all(torch.equal(a[n], b[n]) for n in common)


class Table(nn.Module):
    """Parameters and a table that nothing in the module makes again."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.lin(x) * self.scale * self.table


def fill(module, path):
    if isinstance(module, Table):
        module.scale.fill_(2.0)
        module.table.copy_(torch.arange(4.0))
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_what_has_no_init_of_its_own_is_asked_for(tmp_path):
    def runtime(**options):
        with torch.device("meta"):
            empty = nn.Sequential(Table(), nn.Linear(4, 2))
        made = make(empty, (torch.empty(8, 4, device="meta"),), {}, n_stages=2, n_ranks=1)
        torch.manual_seed(1)
        return empty, Runtime(*made, loss_fn=F.mse_loss, **options)

    x, y = torch.randn(8, 4), torch.randn(8, 2)
    model, bare = runtime()
    with pytest.raises(InputError, match=r"0\.scale, 0\.table have no values"):
        bare.step(x, target=y)
    with torch.no_grad():
        model[0].scale.fill_(2.0)
        model[0].table.copy_(torch.arange(4.0))
    expected = bare.step(x, target=y).loss
    _, filled = runtime(weights=fill)
    assert filled.step(x, target=y).loss == expected
    filled.save(tmp_path / "c")
    other, read = runtime(weights=tmp_path / "c")
    with pytest.raises(InputError, match=r"0\.table have no values"):
        read.step(x, target=y)
    other[0].table.copy_(torch.arange(4.0))
    assert read.step(x, target=y).loss == expected


def test_weights_come_straight_from_a_checkpoint(tmp_path):
    """Only the tables are made; the values of the rest are the checkpoint's."""
    model, batch, runtime = runtime_of("llama", 2)
    runtime.save(tmp_path / "c")
    expected = runtime.evaluate(**batch).loss
    torch.manual_seed(8)
    other, _, read = runtime_of("llama", 3, weights=tmp_path / "c")
    assert read.evaluate(**batch).loss == pytest.approx(expected.item(), rel=1e-6)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in other.state_dict().items())
