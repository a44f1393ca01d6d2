"""Which checkpoint is this, and is it whole? Standard library only; reads headers and a few sampled blocks.

The identity covers, for every file that shapes the weights: name, size, inode and change time (where loader and engine
share the host, a file rewritten in place or replaced shows here even when size and modification time are equal), the
full safetensors header, sampled blocks of the data, and small text files entirely. A change that keeps the inode, the
change time, the header and all sampled blocks goes unnoticed: only root could make one, by setting the clock back.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from weightcache.errors import CheckpointError

SAMPLES = 4
SAMPLE_BYTES = 4096
MAX_HEADER = 100 << 20
MAX_TEXT = 16 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
TEXT_SUFFIXES = (".json", ".py", ".model", ".jinja", ".txt")


def weight_files(directory: Path) -> list[Path]:
    """The files that hold tensors, by name."""
    return sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())


def identity(directory: Path) -> str:
    """32 hex digits for the checkpoint in ``directory``. Raises CheckpointError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in _files(directory):
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_ino}\0{stat.st_ctime_ns}\0".encode())
            for block in _blocks(path, stat.st_size):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {directory}: {error.strerror or error}") from None
    return digest.hexdigest()[:32]


def size(directory: Path) -> int:
    """Bytes of all weight files."""
    return sum(path.stat().st_size for path in weight_files(directory))


def check(directory: Path) -> None:
    """Raise CheckpointError, with one sentence, for a checkpoint that cannot load: missing, unreadable, truncated."""
    if not directory.exists():
        raise CheckpointError(f"there is no model at {directory}")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory with a checkpoint")
    config = directory / "config.json"
    try:
        json.loads(config.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no config.json: it is no Hugging Face checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {config}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{config} is not valid JSON: {error}") from None
    try:
        files = weight_files(directory)
        if not files:
            raise CheckpointError(f"{directory} holds no weight files ({', '.join(WEIGHT_SUFFIXES)})")
        for path in files:
            if path.suffix == ".safetensors":
                _check_safetensors(path)
        _check_index(directory)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {directory}: {error}") from None


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.suffix in WEIGHT_SUFFIXES + TEXT_SUFFIXES and path.is_file():
            yield path


def _blocks(path: Path, length: int) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Without this the kernel reads ahead around every sample, and a cold attach would touch megabytes of disk.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        start = 0
        if path.suffix in TEXT_SUFFIXES:
            yield os.pread(fd, min(length, MAX_TEXT), 0)
            start = MAX_TEXT
        elif path.suffix == ".safetensors":
            start = 8 + _header_length(os.pread(fd, 8, 0))
            yield os.pread(fd, min(start, MAX_HEADER), 0)
        for index in range(SAMPLES if length > start else 0):
            # Spread evenly, moved inside each part by a value that depends on the name, so that no fixed block is safe.
            part = (length - start) // SAMPLES
            jitter = int.from_bytes(hashlib.sha256(f"{path.name}{index}".encode()).digest()[:8], "big")
            offset = start + index * part + (jitter % (part - SAMPLE_BYTES) if part > SAMPLE_BYTES else 0)
            yield os.pread(fd, SAMPLE_BYTES, offset)
    finally:
        os.close(fd)


def _header_length(prefix: bytes) -> int:
    return int(struct.unpack("<Q", prefix)[0]) if len(prefix) == 8 else 0


def _check_safetensors(path: Path) -> None:
    """The header must parse and its data must end exactly at the end of the file."""
    length = path.stat().st_size
    with path.open("rb") as file:
        header_length = _header_length(file.read(8))
        if not 2 <= header_length <= min(MAX_HEADER, length - 8):
            raise CheckpointError(f"{path} is no whole safetensors file: its header is missing or cut off")
        try:
            header = json.loads(file.read(header_length))
            ends = [int(row["data_offsets"][1]) for name, row in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            raise CheckpointError(f"{path} is no safetensors file: its header is damaged") from None
    expected = 8 + header_length + max(ends, default=0)
    if length != expected:
        raise CheckpointError(f"{path} is truncated or damaged: {length} bytes where its header says {expected}")


def _check_index(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        needed = {Path(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{index} is damaged") from None
    missing = sorted(name for name in needed if not (directory / name).is_file())
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} weight files that its index names, first {missing[0]}")
