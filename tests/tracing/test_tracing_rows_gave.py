"""What a form gave for rows is asked of it once, and is what it gives for them again."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.tracing import capture
from autopipe.tracing.rows import other_answers


class Tokens(nn.Module):
    """Masks what a layer gives, of which ``does`` makes something by the mode and the rows."""

    def __init__(self, does):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.does = does

    def forward(self, ids, mask):
        x = self.does(self, self.first(self.table(ids)))
        return self.last(x if mask.all() else x * mask[..., None])


def counted(model, x):
    model.count += 1
    return x + model.count


DOES = {
    "nothing": (lambda model, x: x, True),
    "dropout": (lambda model, x: F.dropout(x, 0.5, model.training), True),
    "another in training": (lambda model, x: x * 2 if model.training else x, True),
    "a count": (counted, False),
    "noise": (lambda model, x: x + torch.rand(()), False),
    "gradients held back": (lambda model, x: x - x.detach(), False),
}


@pytest.mark.parametrize("name", DOES)
def test_what_a_form_gave_for_rows_is_what_it_gives_beside_another_form(monkeypatch, name):
    pairs_of, taken, starts = other_answers.FormPairs, [], []
    gave, look = pairs_of._gave, pairs_of.look

    def given_again(pairs, form, batch, training):
        found = gave(pairs, form, batch, training)
        if found is not None:
            begin = functools.partial(starts[-1], training)
            made = pairs._given_by(form, batch, (), (), begin, False)
            assert pairs._model.training is training
            assert made.taken == found.taken
            assert all(torch.equal(made.values[k][1], found.values[k][1]) for k in made.taken)
            taken.append(form)
        return found

    def looking(pairs, form, beside, tail, start, training):
        starts.append(start)
        look(pairs, form, beside, tail, start, training)

    monkeypatch.setattr(pairs_of, "_gave", given_again)
    monkeypatch.setattr(pairs_of, "look", looking)
    does, is_taken = DOES[name]
    captured = capture(Tokens(does), (torch.arange(12).view(2, 6) % 9, torch.ones(2, 6).long()))
    assert len(captured.forms[False]) == 2
    assert bool(taken) is is_taken
