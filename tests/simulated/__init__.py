"""Builds and loads the simulated accelerator: importing this package adds the torch device ``sim``.

Its process group is left to ``group``. It becomes ``torch.accelerator`` of the whole process, so only
processes of their own import it. ``SIM_DEVICES`` is the number of devices (2). A build takes about half a
minute of one core and is kept in ``build/simulated`` beside the tests.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._meta_registrations
from torch.utils import cpp_extension

__all__ = ["native", "settings", "take_races", "waits"]

HERE = pathlib.Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "simulated"

SOURCES = tuple(str(HERE / name) for name in ("device.cpp", "ops.cpp"))


def _load() -> Any:
    """The extension: that of these sources and this torch where it was built before, else built now."""
    text = b"".join((HERE / name).read_bytes() for name in ("device.h", "device.cpp", "ops.cpp"))
    key = hashlib.sha256(text + torch.__version__.encode() + sys.version.encode()).hexdigest()[:12]
    built = BUILD / key / "simulated.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one builds for all
        if not built.exists():
            return _build(built)
    spec = importlib.util.spec_from_file_location("simulated_native", built)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _build(built: pathlib.Path) -> Any:
    # ninja comes with the interpreter that runs the tests, which need not be on the path
    os.environ["PATH"] = os.pathsep.join(
        [str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        flags = ["-O1", "-g0", "-w"]
        made = cpp_extension.load("simulated_native", SOURCES, extra_cflags=flags, build_directory=folder)
        pathlib.Path(made.__file__).replace(built)
    return made


native = _load()
take_races: Callable[[], list[str]] = native.take_races


@contextlib.contextmanager
def settings(**given: Any) -> Iterator[None]:
    """Other settings for a while: delay_us, lazy, poison, races and others (``device.h`` has them)."""
    before = native.settings(**given)
    try:
        yield
    finally:
        native.settings(**before)


@contextlib.contextmanager
def waits(under: str = "") -> Iterator[collections.Counter[tuple[str, str]]]:
    """Counts each implicit wait of the host: (what, file:line of the innermost frame below ``under``)."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def note(what: str) -> None:
        frames = [f for f in traceback.extract_stack() if under in f.filename and str(HERE) not in f.filename]
        at = f"{frames[-1].filename.rpartition(under)[2]}:{frames[-1].lineno}" if frames else "elsewhere"
        found[what, at] += 1

    native.on_wait(note)
    try:
        yield found
    finally:
        native.on_wait(None)


# -- what torch looks up in the device's own module, ``torch.sim`` ------------------------------------------


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(native.current_device()) if index is None else index


def _card() -> str:
    """Devices of one number are one device to processes that say they have the same card."""
    return os.environ.get("SIM_CARD", str(os.getpid()))


def _properties(device: Any = None) -> types.SimpleNamespace:
    """What tells devices apart; with ``SIM_BUS`` also where their card is, as of the instances of one."""
    bus = os.environ.get("SIM_BUS")
    address = {} if bus is None else {"pci_domain_id": 0, "pci_bus_id": int(bus), "pci_device_id": 0}
    return types.SimpleNamespace(uuid=f"{_card()}/{_index(device)}", **address)


@contextlib.contextmanager
def _on(device: Any) -> Iterator[None]:
    before = native.exchange_device(-1 if device is None else _index(device))
    try:
        yield
    finally:
        native.exchange_device(before)


def _generator(device: Any = None) -> torch.Generator:
    return native.default_generator(_index(device))


def _seed_all(seed: int) -> None:
    for index in range(native.device_count()):
        native.default_generator(index).manual_seed(seed)


module: Any = types.ModuleType("torch.sim")
vars(module).update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    init=lambda: None,
    device_count=native.device_count,
    current_device=native.current_device,
    set_device=lambda d: native.exchange_device(_index(d)) and None,
    device=_on,
    synchronize=torch.accelerator.synchronize,
    current_stream=torch.accelerator.current_stream,
    stream=lambda s: s,
    Stream=torch.Stream,
    Event=torch.Event,
    default_generators=[native.default_generator(i) for i in range(native.device_count())],
    get_rng_state=lambda device=None: _generator(device).get_state(),
    set_rng_state=lambda state, device=None: _generator(device).set_state(state) and None,
    manual_seed=lambda seed: _generator().manual_seed(seed) and None,
    manual_seed_all=_seed_all,
    get_device_properties=_properties,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    memory_allocated=lambda d=None: torch.accelerator.memory_allocated(_index(d)),
    max_memory_allocated=lambda d=None: torch.accelerator.max_memory_allocated(_index(d)),
    reset_peak_memory_stats=lambda d=None: torch.accelerator.reset_peak_memory_stats(_index(d)),
    empty_cache=torch.accelerator.empty_cache,
)
torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", module)
sys.modules["torch.sim"] = module
torch.utils.generate_methods_for_privateuse1_backend()
atexit.register(native.close)
