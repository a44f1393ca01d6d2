"""What compiled code depends on, as a stamp: equal stamps may share files, others never do.

Nothing of the environment is imported: its interpreter is asked for versions, which it reads from the packages'
metadata; what the driver says is read in /proc.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECONDS = 30.0
"""A cold file system on a network; usually this takes a tenth of a second."""
NVIDIA = Path("/proc/driver/nvidia")
CPU = Path("/proc/cpuinfo")
UNKNOWN = "unknown"

PACKAGES = (
    "torch", "triton", "sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "flashinfer-cubin",
    "flashinfer-jit-cache", "deep-gemm", "sgl-deep-gemm", "sgl-flash-mla", "flash-attn-4", "apache-tvm-ffi", "tilelang",
    "nvidia-cutlass-dsl", "quack-kernels", "humming-kernels", "kernels", "numba", "torchao", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvcc", "nvidia-mathdx", "cuda-python",
)  # fmt: skip
"""Compilers, and packages whose kernels are compiled at run time or take part in it."""

_ANSWER = 1 << 16
_MOST = 1 << 16
_LONGEST = 500
# The working directory is first on the path of -c (-P is new in 3.11): nothing there may run, or count as installed.
_PROBE = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.metadata, json, platform, sysconfig
def version(name):
    try:
        return str(importlib.metadata.version(name) or "")
    except Exception:
        return ""
print(json.dumps({
    "python": " ".join((platform.python_implementation(), platform.python_version())),
    "abi": str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag),
    "prefix": sys.prefix,
    **{name: version(name) for name in sys.argv[1:]},
}))
"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """``facts`` by name, without those that do not apply; ``digest``: 16 hexadecimal digits of them."""

    facts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The name of the stamp's directory."""
        return hashlib.sha256(json.dumps(dict(sorted(self.facts.items()))).encode()).hexdigest()[:16]


def of(python: str, environment: Mapping[str, str] = os.environ) -> Stamp:
    """The stamp of what ``python`` would run under ``environment``. Raises UsageError if it does not answer."""
    cxx, nvcc = _cxx(environment), _nvcc(environment)
    deadline = time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        probe = _Command([python, "-c", _PROBE, *PACKAGES], environment, stack)
        paths = dict.fromkeys(path for path in (*cxx.values(), nvcc) if path)
        asked = {path: _Command([path, "--version"], environment, stack) for path in paths}
        facts = _checked(python, probe.output(deadline))
        said = {path: command.output(deadline) for path, command in asked.items()}
    facts["cxx"] = " ".join(_version(said[path]) if path else word for word, path in cxx.items())[:_LONGEST]
    facts["nvcc"] = _version(said[nvcc], -1) if nvcc else ""
    facts |= {"machine": platform.machine(), "libc": _libc(), "cpu": _cpu(CPU), **_within(NVIDIA, deadline)}
    return Stamp({name: value for name, value in facts.items() if value})


class _Command:
    """A command that runs while others do; it is gone when ``stack`` is left."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError, ValueError):
            self.process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
            stack.callback(self.process.kill)

    def output(self, deadline: float) -> bytes:
        """What it wrote; nothing if it failed or takes too long."""
        if self.process is None:
            return b""
        try:
            text = self.process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            return b""
        return text if self.process.returncode == 0 else b""


def _checked(python: str, answer: bytes) -> dict[str, str]:
    try:
        # Whatever runs at an interpreter's start may print before.
        found = json.loads(answer[-_ANSWER:].splitlines()[-1])
        names = ("python", "abi", "prefix", *PACKAGES)
        return {name: str(found[name])[:_LONGEST] for name in names}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UsageError(f"{python} does not say which versions it has") from None


def _version(output: bytes, place: int = 0) -> str:
    """g++ and clang say it in their first line, nvcc in its last."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if re.search(r"\d\.\d", line)]
    return lines[place][:_LONGEST] if lines else UNKNOWN


def _cxx(environment: Mapping[str, str]) -> dict[str, str]:
    """Inductor's compiler for the CPU, and nvcc's for the host (torch/_inductor/config.py): its words and their paths.

    Words that are no programs (``g++ -m64``) have none; without a program among them they are one word, UNKNOWN.
    """
    given = environment.get("CXX", "").strip()
    try:
        words = shlex.split(given) or ["g++"]
    except ValueError:
        words = []
    found = {word: shutil.which(word, path=environment.get("PATH")) or "" for word in words}
    if any(found.values()):
        return found
    return {f"{UNKNOWN} ({given})": ""} if given else {}


def _nvcc(environment: Mapping[str, str]) -> str:
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH")]
    chosen = [str(Path(home, "bin/nvcc")) for home in homes if home]
    found = [*chosen, shutil.which("nvcc", path=environment.get("PATH")) or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in found if path and os.access(path, os.X_OK)), "")


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return " ".join(platform.libc_ver())


def _cpu(path: Path) -> str:
    """The model, and a digest of what it can do: virtual machines have the same name for different ones."""
    text = _read(path).partition("\n\n")[0]
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    able = fields.get("flags") or fields.get("Features") or ""
    if not able:
        return UNKNOWN
    name = fields.get("model name") or fields.get("CPU part") or ""
    return f"{name} {hashlib.sha256(' '.join(sorted(able.split())).encode()).hexdigest()[:8]}".strip()


def _within(root: Path, deadline: float) -> dict[str, str]:
    """``_gpus``, which hangs where the driver does."""
    found: dict[str, str] = {}
    reader = threading.Thread(target=lambda: found.update(_gpus(root)), name="gpus", daemon=True)
    reader.start()
    reader.join(max(0.0, deadline - time.monotonic()))
    return found if not reader.is_alive() else {"driver": UNKNOWN, "gpu": UNKNOWN}


def _gpus(root: Path) -> dict[str, str]:
    """The driver's version and the models of this host's GPUs, which determine their compute capabilities."""
    if not root.is_dir():
        return {}
    version = re.search(r"\b(\d{3,}\.\d[\d.]*)", _read(root / "version"))
    informations = [_read(path) for path in sorted(root.glob("gpus/*/information"))]
    models = {
        match[1].strip() if (match := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)) else UNKNOWN
        for text in informations
    }
    return {"driver": version[1] if version else UNKNOWN, "gpu": ", ".join(sorted(models))[:_LONGEST]}


def _read(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_MOST)
    except OSError:
        return ""
