"""`wcache engines setup`: what systemd has to be told of one engine, in drop-ins of the units that packages bring."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import PermissionRefused, WeightcacheError
from weightcache.standby import engine_config
from weightcache.standby.places import SLOTS, SlotName

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from weightcache.standby.engine_config import EngineConfig

FOLDER = Path("/etc/systemd/system")
NAME = "10-weightcache.conf"
"""Before an operator's own drop-ins, which are read later and win."""
BESIDE_DRAINING = 120
"""Seconds that a stop may take besides the time that running requests get: memory is unmapped, processes end."""


def run(options: argparse.Namespace) -> int:
    """Write the drop-ins, or show them."""
    config = engine_config.load(options.engine)
    texts = drop_ins(config)
    if options.dry_run:
        print("\n".join(f"# {path}\n{text}" for path, text in texts.items()), end="")
        return 0
    for path, text in texts.items():
        _write(options.root / path.relative_to("/"), text)
    units = " ".join([listener(config.name), *(service(SlotName(config.name, slot)) for slot in SLOTS)])
    print(f"\nnow start it:\n  systemctl daemon-reload\n  systemctl enable --now {units}")
    return 0


def service(slot: SlotName) -> str:
    """The unit of a slot."""
    return f"weightcache-engine@{slot}.service"


def listener(engine: str) -> str:
    """The unit of the socket that both slots share."""
    return f"weightcache-http@{engine}.socket"


def drop_ins(config: EngineConfig) -> Mapping[Path, str]:
    """The files by their places."""
    made = f"# Made by `wcache engines setup {config.name}` from {config.path}.\n"
    slots = [SlotName(config.name, slot) for slot in SLOTS]
    stop = f"{config.standby.drain_seconds + BESIDE_DRAINING:.0f}"
    found = {
        FOLDER / f"{listener(config.name)}.d" / NAME: (
            f"{made}[Socket]\nListenStream=\nListenStream={config.listen}\nService={service(slots[0])}\n"
        )
    }
    for slot in slots:
        text = f"{made}[Service]\nSockets={listener(config.name)}\nTimeoutStopSec={stop}\n"
        found[FOLDER / f"{service(slot)}.d" / NAME] = text
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == text:
                print(f"unchanged: {path}")
                return
        fd, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w") as file:
                os.fchmod(fd, 0o644)
                file.write(text)
            Path(made).replace(path)
        except BaseException:
            Path(made).unlink(missing_ok=True)
            raise
    except PermissionError:
        raise PermissionRefused(f"this user may not write {path}: run it as root, or see --dry-run") from None
    except OSError as error:
        raise WeightcacheError(f"{path} cannot be written ({error.strerror})") from None
    print(f"wrote: {path}")
