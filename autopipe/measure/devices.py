"""Descriptions of devices and links by name: peak rates as their makers publish them, each with its source.

Measuring how much of a peak is reached is left to ``efficiency``, measuring links to ``probe``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from ..errors import InputError, StoreError
from ..hardware import Device, Link

__all__ = ["DEVICES", "LINKS", "described", "device", "link"]

_T = 1e12
_LAUNCH_S = 5e-6
"""Host time to launch one small kernel from eager PyTorch, order of magnitude; fitted where measured."""

DEVICES: Mapping[str, Device] = {
    "H200": Device(
        name="NVIDIA H200",
        memory_bytes=141 * 10**9,
        flops_s={
            "float8_e4m3fn": 1979 * _T,
            "bfloat16": 989 * _T,
            "float16": 989 * _T,
            "float32": 67 * _T,
            "float64": 67 * _T,
        },
        bandwidth_bytes_s=4.8e12,
        launch_s=_LAUNCH_S,
        source="NVIDIA H200 datasheet, SXM; tensor-core rates halved from those given with sparsity",
    ),
    "H100": Device(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * 10**9,
        flops_s={
            "float8_e4m3fn": 1979 * _T,
            "bfloat16": 989 * _T,
            "float16": 989 * _T,
            "float32": 67 * _T,
            "float64": 67 * _T,
        },
        bandwidth_bytes_s=3.35e12,
        launch_s=_LAUNCH_S,
        source="NVIDIA H100 datasheet, SXM; tensor-core rates halved from those given with sparsity",
    ),
    "A100": Device(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * 10**9,
        flops_s={"bfloat16": 312 * _T, "float16": 312 * _T, "float32": 19.5 * _T, "float64": 19.5 * _T},
        bandwidth_bytes_s=2.039e12,
        launch_s=_LAUNCH_S,
        source="NVIDIA A100 datasheet, SXM 80GB; dense rates",
    ),
    "L40S": Device(
        name="NVIDIA L40S",
        memory_bytes=48 * 10**9,
        flops_s={
            "float8_e4m3fn": 733 * _T,
            "bfloat16": 362.05 * _T,
            "float16": 362.05 * _T,
            "float32": 91.6 * _T,
        },
        bandwidth_bytes_s=8.64e11,
        launch_s=_LAUNCH_S,
        source="NVIDIA L40S datasheet; dense rates",
    ),
    "RTX4090": Device(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * 10**9,
        flops_s={
            "float8_e4m3fn": 330.3 * _T,
            "bfloat16": 165.2 * _T,
            "float16": 165.2 * _T,
            "float32": 82.6 * _T,
        },
        bandwidth_bytes_s=1.008e12,
        launch_s=_LAUNCH_S,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A; dense, accumulating in float32",
    ),
    "MI300X": Device(
        name="AMD Instinct MI300X",
        memory_bytes=192 * 10**9,
        flops_s={
            "float8_e4m3fnuz": 2614.9 * _T,
            "bfloat16": 1307.4 * _T,
            "float16": 1307.4 * _T,
            "float32": 163.4 * _T,
            "float64": 163.4 * _T,
        },
        bandwidth_bytes_s=5.3e12,
        launch_s=_LAUNCH_S,
        source="AMD Instinct MI300X data sheet; dense rates",
    ),
    "CPU": Device(
        name="generic CPU, one thread",
        flops_s={"float32": 96e9, "float64": 48e9},
        bandwidth_bytes_s=10e9,
        launch_s=2e-6,
        source="arithmetic: 3 GHz × 2 FMA units × 8 float32 lanes × 2; bandwidth of one DDR4-class core",
    ),
}

LINKS: Mapping[str, Link] = {
    "NVLink4": Link(5e-6, 450e9, "NVIDIA H100 datasheet: 900 GB/s in both directions; latency of one launch"),
    "NVLink3": Link(5e-6, 300e9, "NVIDIA A100 datasheet: 600 GB/s in both directions; latency of one launch"),
    "PCIe5": Link(1e-5, 63e9, "PCI-SIG: 32 GT/s × 16 lanes, 128b/130b coding; latency of two launches"),
    "PCIe4": Link(1e-5, 31.5e9, "PCI-SIG: 16 GT/s × 16 lanes, 128b/130b coding; latency of two launches"),
    "InfiniBand-NDR": Link(
        1e-5, 50e9, "InfiniBand Trade Association: NDR 4x, 400 Gb/s; latency of two launches"
    ),
    "InfiniBand-HDR": Link(
        1e-5, 25e9, "InfiniBand Trade Association: HDR 4x, 200 Gb/s; latency of two launches"
    ),
    "Ethernet-100G": Link(3e-5, 12.5e9, "IEEE 802.3: 100 Gb/s; latency assumed for TCP in one rack"),
    "Ethernet-25G": Link(3e-5, 3.125e9, "IEEE 802.3: 25 Gb/s; latency assumed for TCP in one rack"),
    "Ethernet-10G": Link(3e-5, 1.25e9, "IEEE 802.3: 10 Gb/s; latency assumed for TCP in one rack"),
    "loopback": Link(5e-5, 2e9, "assumed for gloo between processes of one host; use `probe` to measure it"),
}


def device(name: str | pathlib.Path) -> Device:
    """A device by its name here, by the driver's name for it, or from a JSON file of :class:`Device` fields.

    Raises :class:`InputError` for an unknown name, :class:`StoreError` for a file that is not a device.

    >>> device("H200").memory_bytes, device("NVIDIA H100 80GB HBM3").name
    (141000000000, 'NVIDIA H100 80GB HBM3')
    """
    text = str(name)
    if text.endswith(".json"):
        return _device_file(pathlib.Path(text))
    wanted = _plain(text)
    for key, found in DEVICES.items():
        if wanted in (_plain(key), _plain(found.name)) or _plain(key) in wanted:
            return found
    raise InputError(f"no device {text!r}; known are {', '.join(DEVICES)}, or give a JSON file of your own")


def described(name: str) -> Device:
    """The description nearest to a device as its driver names it; a generic CPU where there is none.

    >>> described("AMD EPYC, 1 thread(s)").name, described("NVIDIA A100-SXM4-80GB").name
    ('generic CPU, one thread', 'NVIDIA A100-SXM4-80GB')
    """
    try:
        return device(name)
    except InputError:
        return DEVICES["CPU"]


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
    fields = ", ".join(f.name for f in dataclasses.fields(Device))
    try:
        return Device(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"cannot read a device from {path}: {error}; its fields are {fields}") from error
