"""DeepSpeed's lists of layers, by stand-ins of its own classes."""

import functools

import pytest
import torch
from torch import nn

import autopipe
from autopipe.exports import from_layer_specs


class LayerSpec:
    """As DeepSpeed's: what to build, and with what."""

    def __init__(self, typename, *module_args, **module_kwargs):
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log=False):
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    def __init__(self, key, typename, *args, forward_fn=None, tied_weight_attr="weight", **kwargs):
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        hidden, mask = pair
        return hidden + torch.tanh(self.linear(hidden)) * mask, mask


class Embed(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) * 0.1)

    def forward(self, pair):
        ids, mask = pair
        return nn.functional.embedding(ids, self.weight), mask[..., None]


def specs(tied="same kind"):
    head = {
        "same kind": TiedLayerSpec("words", Embed, 11, 8, forward_fn=lambda m, pair: pair[0] @ m.weight.T),
        "another": TiedLayerSpec("words", nn.Linear, 8, 11, bias=False),
    }[tied]
    take = [lambda pair: pair[0]] if tied == "another" else []
    return [TiedLayerSpec("words", Embed, 11, 8), *(LayerSpec(Block, 8) for _ in range(4)), *take, head]


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("tied", ["same kind", "another"])
def test_a_list_trains_as_its_layers_do(tied):
    torch.manual_seed(0)
    chain = from_layer_specs(specs(tied)).double()
    ids, mask = torch.randint(0, 11, (8, 6)), torch.ones(8, 6).double()
    loss = cross_entropy(chain(ids, mask), ids)
    expected = torch.autograd.grad(loss, list(chain.parameters()))
    pipe = autopipe.split(chain, 3, (ids, mask), n_microbatches=4, costs="estimated")
    rt = pipe.runtime(cross_entropy)
    torch.testing.assert_close(rt.step(ids, mask, target=ids).loss, loss.detach())
    for parameter, gradient in zip(chain.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert len(list(chain.parameters())) == 1 + 2 * 4
    assert "tied_modules.words.weight" in chain.state_dict()


def test_a_pipeline_module_brings_its_loss():
    class PipelineModule(nn.Module):
        def __init__(self, layers, loss_fn):
            super().__init__()
            self._layer_specs, self.loss_fn = list(layers), loss_fn

    chain = from_layer_specs(PipelineModule(specs(), cross_entropy))
    assert chain.loss_fn is cross_entropy


def test_a_layer_that_is_none():
    with pytest.raises(autopipe.InputError, match="layer 1 is a int; it must be a LayerSpec"):
        from_layer_specs([nn.Linear(2, 2), 3])
    with pytest.raises(autopipe.InputError, match="no layers"):
        from_layer_specs([])
    with pytest.raises(autopipe.InputError, match="list of layers"):
        from_layer_specs(nn.Linear(2, 2))


def test_there_and_back():
    """A split's layers, as specs, are a list again: what it computes stays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(8, 4)
    layers = autopipe.split(model, 2, (x,), n_microbatches=2, costs="estimated").to_layers()
    chain = from_layer_specs(LayerSpec(functools.partial(lambda m: m, layer)) for layer in layers)
    torch.testing.assert_close(chain(x), model(x))
