"""Which methods are known to survive being shared: the package's own runs (evidence.toml), and the operator's."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import importlib.resources
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
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
    """A method, versions of SGLang and a compute capability, all as patterns of file names, and what proved them.

    ``proof`` is ``parity`` (bit by bit) or ``tokens`` (equal greedy tokens).
    """

    method: str
    sglang: str
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


def find(known: Iterable[Proof], method: str, sglang: str, capability: str) -> Proof | None:
    """The first proof of ``method`` in that version of SGLang, on a device of ``capability`` (empty: a CPU)."""
    for proof in known:
        # "*" stands for all GPUs; what holds for them says nothing about a CPU.
        on_device = fnmatch.fnmatchcase(capability, proof.capability) and bool(capability) == bool(proof.capability)
        if on_device and _is_of(proof, method, sglang):
            return proof
    return None


def elsewhere(known: Iterable[Proof], method: str, sglang: str) -> Sequence[str]:
    """The compute capabilities on which ``method`` is proven, for a sentence about one where it is not."""
    return sorted({proof.capability for proof in known if proof.capability and _is_of(proof, method, sglang)})


def _is_of(proof: Proof, method: str, sglang: str) -> bool:
    versions = any(fnmatch.fnmatchcase(sglang, version) for version in proof.sglang.split())
    return versions and fnmatch.fnmatchcase(method, proof.method)


def check_writable(path: Path) -> None:
    """Raise ConfigError where ``record`` could not add to ``path``."""
    _parse(_read(path), str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: cannot be written, since {path.parent} is not for this user or does not exist")


def record(path: Path, methods: Iterable[str], sglang: str, capability: str, run: str) -> Sequence[Proof]:
    """Add what a comparison proved, for this version of SGLang, to ``path``, by rename; returns what was new.

    Raises ConfigError.
    """
    with _alone(path):
        text = _read(path)
        known = {(proof.method, proof.sglang, proof.capability) for proof in _parse(text, str(path))}
        exact = [Proof(literal(method), literal(sglang), capability, "parity", run) for method in methods]
        new = [proof for proof in exact if (proof.method, proof.sglang, proof.capability) not in known]
        for proof in new:
            rows = (f"{name} = {_text(value)}\n" for name, value in records.to_plain(proof).items())
            text = f"{text.rstrip()}\n\n[[proven]]\n{''.join(rows)}"
        if new:
            _replace(path, text)
    return new


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Of several comparisons that end at once, each adds to what the others wrote. The lock is the directory's."""
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return "# Written by `wcache parity --record`; the form is that of weightcache's own evidence.toml.\n"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None


def literal(method: str) -> str:
    """The pattern that stands for exactly this signature."""
    return _SPECIAL.sub(lambda found: f"[{found[0]}]", method)


def _text(value: str) -> str:
    """As in TOML: a JSON string, but without surrogates and DEL."""
    valid = value.encode("utf-8", "replace").decode()
    return json.dumps(valid, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    data = text.encode()
    if len(data) > _MAX_FILE:
        raise ConfigError(f"{path}: cannot be added to, since loaders read no more than {_MAX_FILE} bytes")
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                os.fchmod(fd, 0o644)
            Path(name).rename(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def _parse(text: str, name: str) -> tuple[Proof, ...]:
    try:
        return records.from_plain(_File, tomllib.loads(text), name).proven
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    except records.RecordError as error:
        raise ConfigError(str(error)) from None
