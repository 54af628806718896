"""What autograd keeps of tensors that a later microbatch's forward writes to, kept as it was read.

Which these are is left to ``setup``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["kept_as_read"]


@contextlib.contextmanager
def kept_as_read(written: Iterable[Tensor]) -> Iterator[None]:
    """Within it autograd keeps copies of what lies in the memory of the ``written`` tensors.

    A model that is called once for a backward reads what it wrote before; one that several microbatches are
    in would find what the last of them wrote.
    """
    places = {t.untyped_storage()._cdata for t in written}

    def pack(tensor: Tensor) -> Tensor:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        is_written = is_plain and tensor.untyped_storage()._cdata in places
        return tensor.detach().clone() if is_written else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
