"""Where tests/env/build.sh put the environments, and what an engine on the CPU needs around it."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SHIM = REPOSITORY / "tests" / "env" / "shim"
NEWEST = "0.5.23"
VERSIONS = (NEWEST, "0.5.17")
"""The supported SGLang releases that the tests run."""


def folder() -> Path:
    """The folder of the environments and of the models, as build.sh computes it."""
    if chosen := os.environ.get("WEIGHTCACHE_ENVS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightcache-dev"


@dataclass(frozen=True, slots=True)
class Environments:
    """The interpreters of the environments."""

    root: Path

    def engine(self, version: str = NEWEST) -> Path:
        """The interpreter with SGLang ``version``."""
        return self._interpreter(f"engine-{version}")

    @property
    def agent(self) -> Path:
        """The interpreter of the agent and of ``wcache``: no torch, no SGLang."""
        return self._interpreter("agent")

    def script(self, name: str, version: str = NEWEST) -> Path:
        """A console script of the project (``wcache-launch``, say) in an engine's environment."""
        return self.engine(version).with_name(name)

    def _interpreter(self, name: str) -> Path:
        if not (self.root / name / ".stamp").is_file():
            raise FileNotFoundError(f"{self.root / name} is not built: run `make env`")
        return self.root / name / "bin" / "python"


def environments() -> Environments:
    """The environments of this machine."""
    return Environments(folder())


def engine_variables() -> dict[str, str]:
    """This process's variables as an engine on the CPU needs them."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "WEIGHTCACHE_", "PYTEST_"))}
    variables["PYTHONPATH"] = str(SHIM)
    variables["PYTHONUNBUFFERED"] = "1"
    variables["SGLANG_DISABLE_TELEMETRY"] = "1"
    # What launches remember of each other, and compiled kernels: not the developer's own.
    variables["WEIGHTCACHE_STATE_DIR"] = str(scratch() / "state")
    variables["WEIGHTCACHE_CACHE_DIR"] = str(scratch() / "cache")
    return variables


@functools.cache
def scratch() -> Path:
    """A folder of this process, which goes when it ends."""
    made = Path(tempfile.mkdtemp(prefix="wc-scratch-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
