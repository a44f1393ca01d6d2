"""Which Python has SGLang."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import UsageError

if TYPE_CHECKING:
    from weightcache.config import Config


def choose(asked: str, config: Config) -> str:
    """``asked``, else this one if it has SGLang, else the loader's, else python3. Raises UsageError."""
    if asked:
        return asked
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    if config.loader.command and Path(config.loader.command[0]).name.startswith("python"):
        return config.loader.command[0]
    if found := shutil.which("python3"):
        return found
    raise UsageError("no Python with SGLang is known: name it with --wcache-python")
