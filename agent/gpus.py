"""Which GPUs this host has, as the driver lists them in /proc: nothing of NVIDIA is loaded, and no GPU is opened."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

ROOT = Path("/proc/driver/nvidia/gpus")
SECONDS = 5.0
"""Reading there hangs where the driver does."""

_MOST = 4096
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", re.MULTILINE | re.ASCII | re.IGNORECASE)


def installed(root: Path = ROOT, seconds: float = SECONDS) -> tuple[str, ...]:
    """The UUIDs of this host's GPUs in the order of the PCI bus; none without a driver that answers.

    A GPU whose UUID the driver does not know yet is an empty text.

    That is nvidia-smi's order, and CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID. MIG slices are not listed.
    """
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(_read(root)), name="gpus", daemon=True)
    reader.start()
    reader.join(seconds)
    return tuple(found)


def _read(root: Path) -> list[str]:
    try:
        folders = sorted(root.iterdir(), key=_position)
    except OSError:
        return []
    return [_uuid(folder) for folder in folders]


def _uuid(folder: Path) -> str:
    # A GPU that nobody has opened yet has question marks there; its place counts nevertheless.
    with contextlib.suppress(OSError), (folder / "information").open(errors="replace") as file:
        if match := _UUID.search(file.read(_MOST)):
            return "GPU-" + match[1][4:].lower()
    return ""


def _position(folder: Path) -> tuple[list[int], str]:
    """``0000:18:00.0`` as numbers: the domain may have more digits than another one's."""
    parts = re.split(r"[:.]", folder.name)
    return [int(part, 16) for part in parts if re.fullmatch("[0-9a-fA-F]+", part)], folder.name
