"""Sealed memory files: bytes that stay."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.unit.contracts.test_transport import no_leak
from weightcache.errors import ProtocolError
from weightcache.memory import memfd


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(3_000_000)], ids=["empty", "small", "large"])
def test_a_sealed_file_holds_its_bytes(data: bytes) -> None:
    with no_leak():
        fd = memfd.sealed("test", data)
        assert memfd.is_sealed(fd)
        assert memfd.read_sealed(fd, 4 << 20) == data
        assert memfd.read_sealed(fd, len(data)) == data
        os.close(fd)


def test_nobody_can_change_it() -> None:
    fd = memfd.sealed("test", b"abc")
    for change in (
        lambda: os.write(fd, b"x"),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 10),
        lambda: mmap.mmap(fd, 3, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    assert memfd.read_sealed(fd, 10) == b"abc"
    os.close(fd)


def test_what_could_still_change_is_not_read(tmp_path: Path) -> None:
    fd = memfd.create("test")
    os.write(fd, b"abc")
    assert not memfd.is_sealed(fd)
    with pytest.raises(ProtocolError, match="not sealed"):
        memfd.read_sealed(fd, 10)
    os.close(fd)
    (tmp_path / "file").write_bytes(b"abc")
    with (tmp_path / "file").open("rb") as file, pytest.raises(ProtocolError, match="not sealed"):
        memfd.read_sealed(file.fileno(), 10)


def test_a_large_one_is_not_read() -> None:
    fd = memfd.sealed("test", b"abc")
    with pytest.raises(ProtocolError, match="a memory file of 3 bytes where at most 2 are allowed"):
        memfd.read_sealed(fd, 2)
    os.close(fd)


def test_a_failed_seal_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(memfd, "seal", fail)
    with no_leak(), pytest.raises(OSError, match="no"):
        memfd.sealed("test", b"abc")


def test_older_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(22, "Invalid argument")
        return original(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    fd = memfd.sealed("test", b"abc")
    assert memfd.is_sealed(fd)
    os.close(fd)


def test_descriptors_are_not_inherited() -> None:
    fd = memfd.create("test")
    assert not os.get_inheritable(fd)
    os.close(fd)
