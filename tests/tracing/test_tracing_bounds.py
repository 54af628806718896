"""Nothing is asked of torch that it would answer with what happens to lie in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.calls import bounds
from autopipe.tracing.calls.bounds import bounded

N_CLASSES = 7


class _Speech(nn.Module):
    """All its labels are read, whatever they are; a mean of rows, which no row of a batch has a say in."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head, self.direct = nn.Linear(6, N_CLASSES), direct

    def forward(self, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x).relu()
        said = self.head(x).log_softmax(-1).transpose(0, 1)
        wanted = torch.full((labels.shape[0],), labels.shape[1])
        if self.direct:
            return torch.ctc_loss(said, labels, lengths, wanted, 0, 1, True)
        return F.ctc_loss(said, labels, lengths, wanted, zero_infinity=True)


def _batch() -> tuple[Tensor, ...]:
    return torch.randn(4, 12, 6), torch.tensor([12, 10, 12, 9]), torch.arange(12).view(4, 3) % 6 + 1


@pytest.mark.parametrize("direct", [False, True])
def test_a_loss_is_asked_of_no_label_beyond_its_classes(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look(said: Tensor, labels: Tensor, lengths: Any) -> None:
        check(said, labels, lengths)
        seen.extend(labels.flatten().tolist() if type(labels) is Tensor else ())

    check = bounds._check_labels
    monkeypatch.setattr(bounds, "_check_labels", look)
    torch.manual_seed(0)
    assert not capture(_Speech(direct), _batch()).ops.tail
    assert {4, 5, 6} <= {*seen} <= {*range(N_CLASSES)}


@pytest.mark.parametrize("flat", [False, True])
def test_labels_in_the_padding_may_be_anything(flat: bool) -> None:
    said, counts = torch.randn(9, 2, N_CLASSES).log_softmax(-1), torch.tensor([2, 1])
    labels = torch.tensor([[1, 2, -100], [3, 99, 99]])
    if flat:
        labels = torch.tensor([1, 2, 3])
    told = labels, torch.tensor([9, 9]), counts
    with bounded():
        assert torch.equal(F.ctc_loss(said, *told), F.ctc_loss(said, labels, (9, 9), (2, 1)))
        with pytest.raises(IndexError, match=r"label -100 of a CTC loss is none of its 7 classes"):
            F.ctc_loss(said, torch.where(labels == 2, -100, labels), *told[1:])
    assert torch.isfinite(F.ctc_loss(said, *told))
