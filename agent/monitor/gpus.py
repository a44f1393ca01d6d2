"""GPUs by their UUID, as the driver lists them in /proc: nothing of NVIDIA is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path("/proc/driver/nvidia/gpus")
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``index`` is NVML's, which counts in the order of the bus ids; ``bus`` is the id as NVML writes it."""

    index: int
    name: str
    bus: str


def find(root: Path = ROOT) -> Mapping[str, Gpu]:
    """The GPUs of this host; none without a driver. MIG slices are not listed. May hang where the driver does."""
    try:
        folders = sorted(root.iterdir())
    except OSError:
        return {}
    found = {}
    for index, folder in enumerate(folders):
        fields = _fields(folder / "information")
        if uuid := fields.get("GPU UUID"):
            found[uuid] = Gpu(index, fields.get("Model", ""), _bus(folder.name))
    return found


def _fields(file: Path) -> dict[str, str]:
    try:
        with file.open(errors="replace") as stream:
            lines = stream.read(_MOST).splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _bus(name: str) -> str:
    """``0000:18:00.0`` in NVML's spelling, with a domain of eight digits."""
    domain, _, rest = name.partition(":")
    return f"{domain:0>8}:{rest}".upper()
