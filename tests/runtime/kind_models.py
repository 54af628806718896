"""Calls that differ in kind from the example that a model was captured with, and what it makes of them."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, N_TOKENS, N_ROWS = 8, 12, 8


class Flexible(nn.Module):
    """Takes labels, a mask, an image and more where they are given, and answers as it is asked to.

    Where it ``mixes`` its loss is made of all rows together.
    """

    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes
        self.embed = nn.Embedding(N_TOKENS, WIDTH)
        self.see = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, N_TOKENS)

    def forward(
        self,
        ids,
        mask=None,
        image=None,
        labels=None,
        mode="full",
        extras=(),
        as_dict=True,
        all_states=False,
        beta=1.0,
        epoch=0,
        times=1,
        level=0.0,
        shift=False,
        drop=0.0,
    ):
        if shift:
            shifted = ids.new_zeros(ids.shape)
            shifted[:, 1:] = ids[:, :-1].clone()
            shifted[:, 0] = 1
            ids = shifted.masked_fill_(shifted == 2, 3)
        kept = torch.zeros(*ids.shape, WIDTH, dtype=self.see.weight.dtype) if shift else None
        x = self.embed(ids)
        if drop:
            x = F.dropout(x, drop, self.training)
        if image is not None:
            x = x + self.see(image)[:, None]
        for extra in extras:
            x = x + extra[:, None]
        x = x + float(str(level))
        states = []
        order = {"full": 1, "back": -1}.get(mode, 2)
        for layer in [*self.layers][::order]:
            x = torch.tanh(layer(x)) * (1 + beta / 2) + x
            if epoch > 2:
                x = x / epoch
            for _ in range(times - 1):
                x = x + torch.sin(x)
            if mask is not None:
                x = x * mask[..., None]
            states.append(x)
            if kept is not None and len(states) in (1, 3):
                kept[:, len(states) :] = x[:, : -len(states)]
                x = torch.where(kept > 0, x, kept) if len(states) == 3 else x
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            if self.mixes:
                loss = loss + logits.std(0).mean()
        out = {"loss": loss, "logits": logits, "states": states if all_states else None}
        return out if as_dict else tuple(v for v in out.values() if v is not None)


def given(*names, rows=N_ROWS, seed=0, **more):
    """The arguments of a call that gives the tensors of these names."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, N_TOKENS, (rows, 6), generator=chance)
    tensors = {
        "ids": ids,
        "labels": ids.roll(1, 0),
        "mask": torch.rand(rows, 6, generator=chance, dtype=torch.float64),
        "image": torch.randn(rows, 3, generator=chance, dtype=torch.float64),
        "extra": torch.randn(rows, WIDTH, generator=chance, dtype=torch.float64),
    }
    return {name: tensors[name] for name in ("ids", *names)} | more


EXTRA = given("extra")["extra"]
KINDS = {
    "labels left out": (given("labels"), [given(), given(rows=5), given("labels", seed=1)]),
    "labels given": (given(), [given("labels"), given("labels", rows=5, seed=1), given(seed=1)]),
    "None for a tensor": (
        given("labels", "mask"),
        [given("labels", mask=None), given("labels", "mask", seed=1)],
    ),
    "a tensor for None": (given("labels", mask=None), [given("labels", "mask"), given("labels", mask=None)]),
    "a missing modality": (given("labels", "image"), [given("labels", image=None), given("labels")]),
    "a new modality": (given("labels"), [given("labels", "image"), given("labels", "image", seed=1)]),
    "an option": (given("labels"), [given("labels", mode="fast"), given("labels", mode="full", seed=1)]),
    "a list of others": (
        given("labels", extras=[EXTRA]),
        [
            given("labels", extras=[EXTRA, EXTRA * 2]),
            given("labels", extras=[]),
            given("labels", extras=[EXTRA]),
        ],
    ),
    "flags of outputs": (
        given("labels"),
        [
            given("labels", as_dict=False),
            given("labels", all_states=True),
            given(as_dict=False, all_states=True),
        ],
    ),
    "a number each step": (
        given("labels", beta=0.5),
        [given("labels", beta=b, epoch=n, seed=n) for n, b in enumerate((0.25, 0.75, 0.5, 1.0, 0.125))],
    ),
    "memory written": (
        given("labels"),
        [given("labels", shift=True), given(shift=True, rows=5), given("labels", shift=True, seed=1)],
    ),
    "several at once": (
        given("labels"),
        [given("mask", mode="fast", as_dict=False), given("labels", "mask")],
    ),
}
"""By what of it changes, the arguments of an example and of calls after it."""


def model_and_twin(mixes=False):
    torch.manual_seed(0)
    model = Flexible(mixes).double()
    return model, copy.deepcopy(model)


def loss_of(output):
    return output["loss"] if isinstance(output, dict) else output[0]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def check_calls(rt, model, twin, calls, is_quiet=False):
    """Each call as a step, where it has labels, and forward and evaluation: equal to the model's own.

    One that ``is_quiet`` is fed: it gives nothing itself.
    """
    mine = dict(rt.named_parameters())
    for kwargs in calls:
        own = {} if is_quiet else kwargs
        if "labels" in kwargs:
            model.zero_grad()
            twin.zero_grad()
            loss = rt.step(**own).loss
            wanted = loss_of(twin(**kwargs))
            wanted.backward()
            close(loss.detach().as_subclass(torch.Tensor), wanted.detach())
            for name, parameter in twin.named_parameters():
                if name in mine:
                    close(mine[name].grad, parameter.grad)
            close(rt.evaluate(**own).loss.detach().as_subclass(torch.Tensor), wanted.detach())
        for training in (False, True):
            model.train(training)
            twin.train(training)
            with torch.no_grad():
                close(rt.forward(**own), twin(**kwargs))
