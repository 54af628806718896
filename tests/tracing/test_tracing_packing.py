"""Batches of packed rows: the image patches of all samples, beside a grid that says whose they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo.models_multimodal import PackedCrops, PackedPatches, documents
from zoo.observe import seed

from autopipe.errors import InputError
from autopipe.graph import OpGraph, Packed
from autopipe.measure.replay import Replay
from autopipe.tracing import Capture, capture

EVEN = [(1, 4, 4), (1, 4, 4)]
RAGGED = [(1, 4, 4), (1, 2, 4), (2, 4, 4)]


def patches(grids: list[tuple[int, int, int]]) -> Capture:
    seed()
    return capture(PackedPatches().eval(), kwargs=documents(grids, 24))


def agrees(found: Capture, grids: list[tuple[int, int, int]]) -> bool:
    kwargs = documents(grids, 24)
    return torch.equal(found(**kwargs)["logits"], found.model(**kwargs)["logits"])


@pytest.mark.parametrize("grids", [EVEN, EVEN[:1], RAGGED], ids=["even", "one", "ragged"])
def test_patches_grow_with_the_batch_as_their_grid_says(grids: list[tuple[int, int, int]]) -> None:
    found = patches(grids)
    batch = next(d for d in found.ops.dims if d.name == "batch")
    n_patches = found.example[1]["pixel_values"].shape[0]
    assert batch.example == len(grids)
    assert batch.packed == (Packed("pixel_values", n_patches, ("image_grid_thw",)),)
    assert agrees(found, [*EVEN, (1, 4, 4)])
    assert agrees(found, [(1, 2, 2), (2, 2, 4), (1, 4, 4), (1, 2, 2)])


def test_shapes_of_packed_rows_are_formulas_of_the_batch() -> None:
    ops = patches(EVEN).ops
    assert str(ops.by_name["pixel_values"].outputs[0].shape[0]) == "16*batch"
    assert str(ops.by_name["cat"].outputs[0].shape[0]) == "4*batch"
    assert OpGraph.from_dict(ops.to_dict()) == ops


def test_a_microbatch_to_be_measured_has_the_patches_of_its_samples() -> None:
    inputs = Replay(patches(RAGGED), dims={"batch": 2}).inputs()
    assert inputs["pixel_values"].shape[0] == inputs["image_grid_thw"].prod(-1).sum() == 24


def test_rows_without_a_grid_must_be_as_many_to_each() -> None:
    seed()
    crops, ids = torch.randn(6, 3, 16, 16), torch.zeros(2, 9, dtype=torch.long)
    found = capture(PackedCrops().eval(), (crops, ids))
    with pytest.raises(InputError, match=r"crops grows with dim 0 of ids, 6 rows for 2 .* must be 12"):
        found(crops.repeat(3, 1, 1, 1), ids.repeat(2, 1))


def test_a_batch_of_one_keeps_its_rows_together() -> None:
    seed()
    crops, ids = torch.randn(4, 3, 16, 16), torch.zeros(1, 9, dtype=torch.long)
    found = capture(PackedCrops().eval(), (crops, ids))
    assert str(found.ops.by_name["stem"].outputs[0].shape[0]) == "4*batch"


class Table(nn.Module):
    """A table beside rows that are packed: it has a multiple of the batch's rows by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.layer(x + rows.view(x.shape[0], -1, 4).sum(1)) @ table.T.mean(1)


def test_only_what_must_grow_does() -> None:
    found = capture(Table(), (torch.randn(2, 4), torch.randn(6, 4), torch.randn(8, 4)))
    (batch,) = [d for d in found.ops.dims if d.name == "batch"]
    assert batch.packed == (Packed("rows", 6),)
