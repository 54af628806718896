"""Checkpoints of others whose names are wrapped or lack a part: found, or refused as they are."""

import pytest
import torch
from runtime_models import make
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from autopipe.errors import StoreError
from autopipe.runtime import Runtime
from autopipe.runtime.checkpoint.foreign import renamed


@pytest.mark.parametrize(
    ("names", "known", "wanted"),
    [
        ("a.w b.w", "a.w b.w", "a.w b.w"),
        ("module.a.w module.b", "a.w b", "a.w b"),
        ("_orig_mod.a.w _orig_mod.b", "a.w b", "a.w b"),
        ("a._orig_mod.w b", "a.w c", "a.w b"),
        ("module._orig_mod.a.w", "a.w", "a.w"),
        ("h.0.w e.w", "body.h.0.w body.e.w head.w", "body.h.0.w body.e.w"),
        ("h.w e.w", "one.h.w two.h.w one.e.w two.e.w", "h.w e.w"),
        ("a.w x.b", "a.w b", "a.w x.b"),
        ("q.a r.b", "a b", "q.a r.b"),
        ("x y", "a b", "x y"),
        ("x", "", "x"),
    ],
)
def test_names_are_found(names, known, wanted):
    found = renamed(names.split(), known.split())
    assert [found[name] for name in names.split()] == wanted.split()


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model


def runtime_of(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return model, Runtime(*make(model, (torch.randn(8, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss)


@pytest.mark.parametrize("form", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("wrap", [Wrapped, torch.compile, lambda m: Wrapped(torch.compile(m))])
def test_weights_of_a_wrapped_model(tmp_path, form, wrap):
    model, _ = runtime_of(0)
    state = wrap(model).state_dict()
    assert not state.keys() & model.state_dict().keys()
    (torch.save if form == "model.pt" else save_file)(state, tmp_path / form)
    other, runtime = runtime_of(1)
    runtime.load(tmp_path / form)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in other.state_dict().items())
    state.popitem()
    (torch.save if form == "model.pt" else save_file)(state, tmp_path / form)
    with pytest.raises(StoreError, match="missing: "):
        runtime.load(tmp_path / form)


def test_a_base_model_as_the_hub_has_it(tmp_path):
    """Names without the head's part of them, and masks that later versions do without."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    base = transformers.GPT2Model(config)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool) for i in range(2)}
    save_file(base.state_dict() | masks, tmp_path / "model.safetensors")
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 64, (4, 8))
    runtime = Runtime(*make(model, (), {"input_ids": ids, "labels": ids}, n_stages=2, n_ranks=1))
    runtime.load(tmp_path)
    assert all(torch.equal(t, base.state_dict()[n]) for n, t in model.transformer.state_dict().items())
    deeper = transformers.GPT2Model(transformers.GPT2Config(**{**config.to_dict(), "n_layer": 3}))
    save_file(deeper.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(StoreError, match=r"not of this model: transformer\.h\.2"):
        runtime.load(tmp_path)


def test_weights_of_turned_layers(tmp_path):
    """What others wrote the other way round is told where shapes tell it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), torch.randn(8, 4)
    runtime = Runtime(*make(model, (x,), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss)
    torch.save({n: t.t() if t.ndim == 2 else t for n, t in model.state_dict().items()}, tmp_path / "model.pt")
    with pytest.raises(StoreError, match=r"float32\[4, 6\] there and float32\[6, 4\] here, maybe its transp"):
        runtime.load(tmp_path / "model.pt")


def test_a_training_state_among_other_things_is_refused_by_its_name(tmp_path):
    """Whatever comes first in it, and however it is called."""
    model, runtime = runtime_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    rest = {"epoch": 3, "optimizer": optimizer.state_dict(), "hyper_parameters": {"lr": 0.1}}
    for name in ("model", "state_dict", "net", "module"):
        held = {name: model.state_dict()}
        for state in (held, held | rest, rest | held):
            torch.save(state, tmp_path / "all.pt")
            with pytest.raises(StoreError, match=rf"which may be what it has under '{name}'; save that by"):
                runtime.load(tmp_path / "all.pt")
