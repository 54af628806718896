"""From the options of a planning verb to a captured model, its costs and a pipe.

Loading models is left to ``models``, planning itself to ``api``. This is where torch is first imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import TYPE_CHECKING, Any

from ..errors import InputError, StoreError
from ..hardware import Cluster

if TYPE_CHECKING:
    from ..api import Pipe
    from ..costs import CostTable
    from ..tracing import Capture
    from .models import Loaded

__all__ = ["Request", "read_json"]

TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu")


@dataclasses.dataclass(frozen=True)
class Request:
    """What the options ask for; each step is made when asked."""

    model: str
    meta: bool = False
    batch: int = 8
    seq: int = 128
    inputs: tuple[str, ...] = ()
    dtype: str | None = None
    device: str | None = None
    costs: str | None = None
    cluster: pathlib.Path | None = None

    def load(self) -> Loaded:
        """The model and its inputs."""
        from .models import Sizes, load

        sizes = Sizes(self.batch, self.seq, self.inputs, self.dtype)
        device = self.device if self._is_torch_device else None
        return load(self.model, meta=self.meta, device=device, sizes=sizes)

    def capture(self) -> Capture:
        """The model, captured."""
        import autopipe

        loaded = self.load()
        return autopipe.capture(loaded.model, loaded.args, loaded.kwargs)

    def profile(self, n_microbatches: int, recalibrate: bool = False) -> tuple[Capture, CostTable]:
        """The captured model and what each op costs for one microbatch.

        Measurements are kept in the user's store, so that an interrupted profile goes on from there.
        ``recalibrate`` corrects them by the stage times that earlier runs left in the ledger.
        """
        import autopipe

        from .. import measure
        from ..measure import described, device_name, estimate

        source, captured = self.source, self.capture()
        if source == "measured":
            store = measure.Store.default()
            table = autopipe.profile(captured, n_microbatches=n_microbatches, device=self.device, store=store)
            if recalibrate:
                table = measure.recalibrate(table, measure.entries(store, captured.ops.digest, table))
            return captured, table
        dims = captured.ops.example_dims
        if "batch" in dims:
            dims["batch"] = math.ceil(dims["batch"] / n_microbatches)
        device = self.hardware or described(device_name(self.device or "cpu"))
        return captured, estimate(captured, device, dims=dims)

    def split(self, n_stages: int, **options: Any) -> Pipe:
        """The model, planned and split."""
        import autopipe

        source, loaded = self.source, self.load()
        given = {"costs": source, "device": self.hardware or self.device, "cluster": self.cluster, **options}
        known = {k: v for k, v in given.items() if v is not None}
        return autopipe.split(loaded.model, n_stages, loaded.args, loaded.kwargs, **known)

    @property
    def _is_torch_device(self) -> bool:
        return self.device is not None and self.device.partition(":")[0] in TORCH_DEVICES

    @property
    def hardware(self) -> Any:
        """The described device to estimate for: the one named, or the cluster's for a meta model."""
        from ..measure import device

        if self.device is not None:
            return None if self._is_torch_device else device(self.device)
        if self.meta and self.cluster is not None:
            return Cluster.from_dict(read_json(self.cluster)).devices[0]
        return None

    @property
    def source(self) -> str:
        """Where costs come from: as asked, else measured where that can be."""
        if self.meta and self.hardware is None:
            from ..measure import DEVICES

            raise InputError(
                f"--meta has nothing to measure; say what to estimate for: --device {' or '.join(DEVICES)}, "
                "a device file, or --cluster FILE"
            )
        if self.costs is not None:
            return self.costs
        return "estimated" if self.meta or self.hardware is not None else "measured"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file. Raises :class:`StoreError` where there is none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{path} does not hold a JSON object")
    return data
