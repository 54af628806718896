"""Descriptions of devices and links by name: rates as their makers publish them, with the document named.

Measuring how much of a peak is reached is left to ``efficiency``, measuring links to ``probe``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from ..errors import InputError
from ..hardware import Device, Link
from ..schema import build, differs, load

__all__ = ["DEVICES", "LINKS", "described", "device", "link"]

_T = 1e12
_LAUNCH_S = 5e-6
"""Host time to launch one small kernel from eager PyTorch: assumed, fitted where there are measurements."""


_CONTEXT_BYTES = 512 << 20
"""The driver's context and PyTorch's kernels: assumed."""
_COMMUNICATOR_BYTES = 2 * 32 * (4 << 20)
"""NCCL user guide: NCCL_BUFFSIZE 4 MiB a channel, at most 32 channels, to and from a neighbour each."""
_WORKSPACE_BYTES = 2 * (32 << 20)
"""PyTorch's default of CUBLAS_WORKSPACE_CONFIG on Hopper, for cuBLAS and cuBLASLt."""
_FRAGMENTATION = 0.03
"""Share of memory reserved by PyTorch's allocator but unusable: assumed."""


def reserved(memory_bytes: int) -> int:
    """Bytes of an NVIDIA or AMD GPU's memory that no tensor of a pipeline's rank gets."""
    return _CONTEXT_BYTES + _COMMUNICATOR_BYTES + _WORKSPACE_BYTES + round(_FRAGMENTATION * memory_bytes)


_PCIE = {4: 31.5e9, 5: 63e9}
"""PCI-SIG: 16 lanes at 16 and 32 GT/s, 128b/130b coding, each way."""


def _gpu(
    name: str,
    gb: int,
    flops_s: Mapping[str, float],
    bandwidth_bytes_s: float,
    source: str,
    pcie: int,
) -> Device:
    return Device(
        name=name,
        memory_bytes=gb * 10**9,
        flops_s={dtype: rate * _T for dtype, rate in flops_s.items()},
        bandwidth_bytes_s=bandwidth_bytes_s,
        launch_s=_LAUNCH_S,
        source=f"{source}; host over PCIe {pcie}.0 x16; launch time, context and fragmentation assumed",
        attention="cuda",
        reserved_bytes=reserved(gb * 10**9),
        launches_ahead=True,
        host_bandwidth_bytes_s=_PCIE[pcie],
    )


_HOPPER = {"float8_e4m3fn": 1979, "bfloat16": 989, "float16": 989, "float32": 67, "float64": 67}

DEVICES: Mapping[str, Device] = {
    "H200": _gpu(
        "NVIDIA H200",
        141,
        _HOPPER,
        4.8e12,
        "NVIDIA H200 Tensor Core GPU datasheet, H200 SXM: 141 GB, 4.8 TB/s, FP32 67 and FP64 tensor core 67 "
        "TFLOPS, BF16 and FP16 1,979 and FP8 3,958 with sparsity, halved here to dense",
        pcie=5,
    ),
    "H100": _gpu(
        "NVIDIA H100 80GB HBM3",
        80,
        _HOPPER,
        3.35e12,
        "NVIDIA H100 Tensor Core GPU datasheet, H100 SXM: 80 GB, 3.35 TB/s, FP32 67 and FP64 tensor core 67 "
        "TFLOPS, BF16 and FP16 1,979 and FP8 3,958 with sparsity, halved here to dense",
        pcie=5,
    ),
    "A100": _gpu(
        "NVIDIA A100-SXM4-80GB",
        80,
        {"bfloat16": 312, "float16": 312, "float32": 19.5, "float64": 19.5},
        2.039e12,
        "NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM: 80 GB, 2,039 GB/s, FP32 19.5, FP64 tensor "
        "core 19.5, BF16 and FP16 312 TFLOPS dense",
        pcie=4,
    ),
    "L40S": _gpu(
        "NVIDIA L40S",
        48,
        {"float8_e4m3fn": 733, "bfloat16": 362.05, "float16": 362.05, "float32": 91.6},
        8.64e11,
        "NVIDIA L40S datasheet: 48 GB, 864 GB/s, FP32 91.6, BF16 and FP16 362.05, FP8 733 TFLOPS dense",
        pcie=4,
    ),
    "RTX4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        24,
        {"float8_e4m3fn": 330.3, "bfloat16": 165.2, "float16": 165.2, "float32": 82.6},
        1.008e12,
        "NVIDIA Ada GPU Architecture whitepaper, appendix A: 24 GB, 1,008 GB/s, FP32 82.6, BF16 and FP16 "
        "165.2, FP8 330.3 TFLOPS dense, accumulating in FP32",
        pcie=4,
    ),
    "MI300X": _gpu(
        "AMD Instinct MI300X",
        192,
        {
            "float8_e4m3fnuz": 2614.9,
            "bfloat16": 1307.4,
            "float16": 1307.4,
            "float32": 163.4,
            "float64": 163.4,
        },
        5.3e12,
        "AMD Instinct MI300X accelerator data sheet: 192 GB, 5.3 TB/s, matrix FP64 and FP32 163.4, BF16 and "
        "FP16 1,307.4, FP8 2,614.9 TFLOPS dense",
        pcie=5,
    ),
    "CPU": Device(
        name="generic CPU, one thread",
        flops_s={"float32": 96e9, "float64": 48e9},
        bandwidth_bytes_s=10e9,
        launch_s=2e-6,
        source="arithmetic: 3 GHz × 2 FMA units × 8 float32 lanes × 2; bandwidth and launch time assumed",
        attention="cpu",
    ),
}


def _link(latency_s: float, gigabytes_s: float, source: str) -> Link:
    return Link(latency_s, gigabytes_s * 1e9, f"{source}; latency assumed")


LINKS: Mapping[str, Link] = {
    "NVLink4": _link(5e-6, 450, "NVIDIA H100 Tensor Core GPU datasheet: 900 GB/s, both directions together"),
    "NVLink3": _link(5e-6, 300, "NVIDIA A100 Tensor Core GPU datasheet: 600 GB/s, both directions together"),
    "PCIe5": _link(
        1e-5, _PCIE[5] / 1e9, "PCI-SIG, PCI Express 5.0: 32 GT/s per lane, 16 lanes, 128b/130b coding"
    ),
    "PCIe4": _link(
        1e-5, _PCIE[4] / 1e9, "PCI-SIG, PCI Express 4.0: 16 GT/s per lane, 16 lanes, 128b/130b coding"
    ),
    "InfiniBand-NDR": _link(1e-5, 50, "NVIDIA ConnectX-7 user manual: NDR, 400 Gb/s"),
    "InfiniBand-HDR": _link(1e-5, 25, "NVIDIA ConnectX-6 user manual: HDR, 200 Gb/s"),
    "Ethernet-100G": _link(3e-5, 12.5, "IEEE 802.3ba: 100 Gb/s"),
    "Ethernet-25G": _link(3e-5, 3.125, "IEEE 802.3by: 25 Gb/s"),
    "Ethernet-10G": _link(3e-5, 1.25, "IEEE 802.3ae: 10 Gb/s"),
    "loopback": Link(5e-5, 2e9, "assumed for gloo between processes of one host; use `probe` to measure it"),
}
"""One direction each. Latencies are orders of magnitude for a message sent from PyTorch, launch included."""


def device(name: str | pathlib.Path) -> Device:
    """A device by its name here, by the driver's name for it, or from a JSON file of :class:`Device` fields.

    A name may leave words of these out or add the memory, as in ``"H100 SXM"``, but be of no other device.

    Raises :class:`InputError` for an unknown name, :class:`StoreError` for a file that is not a device.

    >>> device("H200").memory_bytes, device("NVIDIA H100 80GB HBM3").name
    (141000000000, 'NVIDIA H100 80GB HBM3')
    """
    text = str(name)
    if text.endswith(".json"):
        return _device_file(pathlib.Path(text))
    for key, found in DEVICES.items():
        if _plain(text) in (_plain(key), _plain(found.name)) or _is_of(_words(text), key, found):
            return found
    raise InputError(f"no device {text!r}; known are {', '.join(DEVICES)}, or give a JSON file of your own")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


_ADDED = {"nvidia", "amd", "geforce", "instinct", "tesla", "gpu", "rtx", "sxm", "sxm4", "sxm5", "oam"}
"""Words that names of the devices here may have, and of no other that is called like one of them."""


def _is_of(words: Sequence[str], key: str, found: Device) -> bool:
    """Whether words name a device by its key, and say nothing that another, a variant of it, is called by."""
    size = f"{(found.memory_bytes or 0) // 10**9}gb"
    own = {*_ADDED, *_words(found.name), *_words(key), size}
    pairs = {"".join(pair) for pair in itertools.pairwise(words)}
    return _plain(key) in {*words, *pairs} and all(w in own or w == _plain(key) for w in words)


def described(name: str, memory_bytes: int | None = None) -> Device:
    """The description nearest to a device as its driver names it; a generic CPU where there is none.

    ``memory_bytes`` is what the driver says that it has: the lesser counts, as variants of one name differ.

    >>> described("AMD EPYC, 1 thread").name, described("NVIDIA A100-SXM4-80GB").name
    ('generic CPU, one thread', 'NVIDIA A100-SXM4-80GB')
    """
    plain = _plain(name)
    found = next((d for key, d in DEVICES.items() if key != "CPU" and _plain(key) in plain), DEVICES["CPU"])
    if memory_bytes is None or memory_bytes >= (found.memory_bytes or math.inf):
        return found
    return dataclasses.replace(found, memory_bytes=memory_bytes, reserved_bytes=reserved(memory_bytes))


def link(name: str) -> Link:
    """A link by its name here. Raises :class:`InputError` for an unknown one.

    >>> link("nvlink4").bandwidth_bytes_s
    450000000000.0
    """
    for key, found in LINKS.items():
        if _plain(key) == _plain(name):
            return found
    raise InputError(f"no link {name!r}; known are {', '.join(LINKS)}")


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")


def _device_file(path: pathlib.Path) -> Device:
    what = f"the device {path}"
    data = load(path, "the device")
    found = build(Device, data, what)
    differs(data, {name: value for name, value in dataclasses.asdict(found).items() if name in data}, what)
    return found
