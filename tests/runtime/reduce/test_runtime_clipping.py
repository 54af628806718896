"""The norm of all gradients, as each rank puts its part to it."""

import math

import torch
from torch import Tensor, nn

from autopipe.runtime.reduce.precision import clip_grad_norm


class Heard:
    """A group of two ranks that are alike, which keeps what was put to it."""

    ranks = 0, 1

    def all_reduce(self, tensor: Tensor, op: object = None) -> None:
        self.part = tensor.item()
        tensor *= 2


def test_a_rank_all_of_whose_parameters_are_fp32_sums_their_norms_in_fp64():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(7)) for _ in range(50)]
    for parameter in parameters:
        parameter.grad = torch.randn(7)
    norms = [torch.linalg.vector_norm(p.grad) for p in parameters]
    group = Heard()
    norm = clip_grad_norm(
        parameters,
        parameters,
        1.0,
        norm_type=2.0,
        error_if_nonfinite=False,
        group=group,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    wanted = sum(n.item() ** 2 for n in norms)
    assert math.isclose(group.part, wanted, rel_tol=1e-13)
    assert norm.dtype is torch.float32


def test_the_norm_of_complex_gradients_is_as_wide_as_they_are():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, dtype=torch.complex128))
    parameter.grad = torch.randn(7, dtype=torch.complex128)
    wanted = torch.linalg.vector_norm(parameter.grad)
    norm = clip_grad_norm(
        [parameter],
        [parameter],
        0.1,
        norm_type=2.0,
        error_if_nonfinite=False,
        group=None,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    assert norm.dtype is torch.float64
    assert math.isclose(norm.item(), wanted.item(), rel_tol=1e-14)
