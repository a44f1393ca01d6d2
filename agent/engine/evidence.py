"""Which methods are known to survive being shared: the package's own runs (evidence.toml), and the operator's."""

from __future__ import annotations

import fnmatch
import importlib.resources
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightcache import paths, records
from weightcache.errors import ConfigError

VARIABLE = "WEIGHTCACHE_EVIDENCE"
_PACKAGED = "evidence.toml"
_MAX_FILE = 1 << 20
_SPECIAL = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Proof:
    """A method and a compute capability, both with ``*`` and ``?`` as in file names, and the run that proved them.

    ``proof`` is ``parity`` (bit by bit) or ``tokens`` (equal greedy tokens).
    """

    method: str
    capability: str
    proof: Literal["parity", "tokens"]
    run: str


@dataclass(frozen=True, slots=True)
class _File:
    proven: tuple[Proof, ...] = ()


def packaged() -> tuple[Proof, ...]:
    """What the package's own runs proved."""
    return _parse(importlib.resources.files(__package__).joinpath(_PACKAGED).read_text("utf-8"), _PACKAGED)


def local_file() -> Path:
    """Where the operator's own evidence is: $WEIGHTCACHE_EVIDENCE, or beside the configuration."""
    return Path(os.environ.get(VARIABLE) or paths.EVIDENCE_FILE)


def all_known() -> tuple[Proof, ...]:
    """The package's evidence and the operator's. Raises ConfigError for a file that cannot be read."""
    path = local_file()
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        return packaged()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > _MAX_FILE:
        raise ConfigError(f"{path}: larger than {_MAX_FILE} bytes, which is no file of evidence")
    return (*packaged(), *_parse(data.decode("utf-8", "replace"), str(path)))


def find(known: Iterable[Proof], method: str, capability: str) -> Proof | None:
    """The first proof of ``method`` on a device of ``capability`` (empty: a CPU)."""
    for proof in known:
        # "*" stands for all GPUs; what holds for them says nothing about a CPU.
        on_device = fnmatch.fnmatchcase(capability, proof.capability) and bool(capability) == bool(proof.capability)
        if on_device and fnmatch.fnmatchcase(method, proof.method):
            return proof
    return None


def check_writable(path: Path) -> None:
    """Raise ConfigError where ``record`` could not add to ``path``."""
    record(path, (), "", "")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: cannot be written, since {path.parent} is not for this user or does not exist")


def record(path: Path, methods: Iterable[str], capability: str, run: str) -> Sequence[Proof]:
    """Add what a comparison proved to ``path``, by rename; returns what was new. Raises ConfigError."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        text = "# Written by `wcache parity --record`; the form is that of weightcache's own evidence.toml.\n"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    known = _parse(text, str(path))
    exact = [Proof(_literally(method), capability, "parity", run) for method in methods]
    new = [proof for proof in exact if not any((k.method, k.capability) == (proof.method, capability) for k in known)]
    for proof in new:
        # A JSON string is a TOML string.
        rows = (f"{name} = {json.dumps(value)}\n" for name, value in records.to_plain(proof).items())
        text = f"{text.rstrip()}\n\n[[proven]]\n{''.join(rows)}"
    if new:
        _replace(path, text)
    return new


def _literally(method: str) -> str:
    return _SPECIAL.sub(lambda found: f"[{found[0]}]", method)


def _replace(path: Path, text: str) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(text)
            temporary = Path(file.name)
        temporary.chmod(0o644)
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def _parse(text: str, name: str) -> tuple[Proof, ...]:
    try:
        return records.from_plain(_File, tomllib.loads(text), name).proven
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    except records.RecordError as error:
        raise ConfigError(str(error)) from None
