"""Host arenas: sealed at publish, read-only for everybody, back to back, and refused when they could change."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import hashlib
import mmap
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightcache.errors import AttachFailed, LoadFailed, NoRoom
from weightcache.memory import host, memfd, open_memory
from weightcache.memory.host import GRANULARITY, HostMemory

SIZES = (GRANULARITY, 2 * GRANULARITY)
TOTAL = sum(SIZES)


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def pattern() -> torch.Tensor:
    return torch.randint(0, 256, (TOTAL,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def published(memory, pattern):
    """Two published arenas that hold ``pattern``: (writer's region, descriptors)."""
    region = memory.reserve(TOTAL)
    for size in SIZES:
        region.extend(size)
    region.bytes_at(0, TOTAL).copy_(pattern)
    fds = region.freeze()
    yield region, fds
    region.close()
    for fd in fds:
        os.close(fd)


_elsewhere: list[str] = []
"""Arenas that other tests of this process still map when one begins: models keep theirs for as long as they live."""


def _arenas() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weightcache-arena" in line]


@pytest.fixture(autouse=True)
def remember_arenas_of_other_tests() -> None:
    gc.collect()
    _elsewhere[:] = _arenas()


def mappings() -> list[str]:
    """Lines of /proc/self/maps that belong to arenas of the running test."""
    return [line for line in _arenas() if line not in _elsewhere]


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def in_child(action) -> int:
    """Run ``action`` in a forked child; its raw wait status."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # dying is what the child is for
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_open_memory_gives_the_host_backend():
    memory = open_memory("host")
    assert memory.name == "host"
    assert memory.granularity % mmap.PAGESIZE == 0


def test_freeze_keeps_tensors_valid_in_place(memory, pattern):
    region = memory.reserve(TOTAL)
    region.extend(TOTAL)
    tensor = region.bytes_at(0, TOTAL)
    tensor.copy_(pattern)
    address = tensor.data_ptr()
    (fd,) = region.freeze()
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, pattern)
    os.close(fd)
    assert torch.equal(tensor, pattern), "the mapping keeps the memory after the last descriptor"
    region.close()


def test_published_arenas_are_sealed_and_refuse_every_change(published):
    for fd, size in zip(published[1], SIZES, strict=True):
        assert memfd.is_sealed(fd)
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size + 1)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_mapping_is_back_to_back_private_and_read_only(memory, published, pattern):
    _, fds = published
    before = mappings()
    region = memory.map(fds, SIZES)
    whole = region.bytes_at(0, TOTAL)
    assert torch.equal(whole, pattern)
    assert torch.equal(region.bytes_at(GRANULARITY - 3, 7), pattern[GRANULARITY - 3 : GRANULARITY + 4])
    assert len(mappings()) == len(before) + 2
    inodes = {os.fstat(fd).st_ino for fd in fds}
    for line in mappings():
        _, permissions, _, _, inode, *_ = line.split()
        assert permissions == "r--p"
        assert int(inode) in inodes
    region.close()
    assert mappings() == before


def test_smaps_shows_the_inode_without_private_memory(memory, published):
    region = memory.map(published[1], SIZES)
    tensor = region.bytes_at(0, TOTAL)
    assert int(tensor.sum()) > 0
    smaps = Path("/proc/self/smaps").read_text()
    block = smaps[smaps.index(f"{tensor.data_ptr():x}-") :]
    block = block[: block.index("VmFlags")]
    assert "r--p" in block.splitlines()[0]
    assert f" {os.fstat(published[1][0]).st_ino} " in block.splitlines()[0]
    figures = dict(re.findall(r"^(\w+):\s+(\d+) kB$", block, re.MULTILINE))
    assert int(figures["Rss"]) == GRANULARITY // 1024
    assert figures["Anonymous"] == "0", "a private mapping that copied nothing"
    region.close()


@pytest.mark.parametrize("side", ["publisher", "reader"])
def test_write_kills_only_the_writer_and_leaves_the_bytes(memory, published, pattern, side):
    region, fds = published
    reader, other = memory.map(fds, SIZES), memory.map(fds, SIZES)
    target = (region if side == "publisher" else reader).bytes_at(0, TOTAL)
    status = in_child(lambda: target.__setitem__(5, 1))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    for view in (region, reader, other):
        assert torch.equal(view.bytes_at(0, TOTAL), pattern)
    reader.close()
    other.close()


def test_reader_in_another_process_sees_the_bytes(published, pattern):
    code = (
        "import sys, hashlib\n"
        "from weightcache.memory.host import HostMemory\n"
        "sizes = [int(s) for s in sys.argv[2].split(',')]\n"
        "region = HostMemory().map([int(f) for f in sys.argv[1].split(',')], sizes)\n"
        "print(hashlib.sha256(bytes(region.bytes_at(0, sum(sizes)).tolist())).hexdigest())\n"
    )
    _, fds = published
    arguments = [",".join(map(str, fds)), ",".join(map(str, SIZES))]
    result = subprocess.run([sys.executable, "-c", code, *arguments], pass_fds=fds, capture_output=True, text=True)
    assert result.stdout.strip() == hashlib.sha256(bytes(pattern.tolist())).hexdigest(), result.stderr


@pytest.mark.parametrize("seals", [0, memfd.SEAL_WRITE, memfd.SEAL_WRITE | memfd.SEAL_GROW])
def test_descriptors_that_could_change_are_refused(memory, seals):
    fd = memfd.create("half-sealed")
    os.ftruncate(fd, GRANULARITY)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(AttachFailed, match="arena 0 is not a sealed"):
        memory.map([fd], [GRANULARITY])
    os.close(fd)


def test_plain_files_and_wrong_sizes_are_refused(memory, published, tmp_path):
    _, fds = published
    file = tmp_path / "file"
    file.write_bytes(bytes(GRANULARITY))
    before = mappings()
    with file.open("rb") as opened, pytest.raises(AttachFailed, match="arena 1 is not a sealed"):
        memory.map([fds[0], opened.fileno()], [SIZES[0], GRANULARITY])
    for sizes in ([SIZES[0], SIZES[0]], [0, SIZES[1]], [SIZES[0]], [SIZES[0] - 1, SIZES[1]]):
        with pytest.raises(AttachFailed):
            memory.map(fds, sizes)
    assert mappings() == before


def test_bounds_and_empty_views(memory, published):
    region, _ = published
    assert region.bytes_at(TOTAL, 0).shape == (0,)
    for offset, size in ((-1, 2), (TOTAL, 1), (0, TOTAL + 1), (0, -1)):
        with pytest.raises(AttachFailed, match="outside"):
            region.bytes_at(offset, size)
    nothing = memory.map((), ())
    assert nothing.bytes_at(0, 0).numel() == 0
    nothing.close()


def test_views_share_memory_and_keep_nothing_alive(memory):
    region = memory.reserve(GRANULARITY)
    region.extend(GRANULARITY)
    first, second = region.bytes_at(0, 8), region.bytes_at(4, 8)
    first[4:] = 7
    assert second[:4].tolist() == [7] * 4
    assert first.untyped_storage().nbytes() == 8
    assert first.view(torch.float32).shape == (2,)
    descriptors = open_descriptors()
    del first, second
    gc.collect()
    assert open_descriptors() == descriptors
    region.close()
    assert not mappings()


def test_reserving_costs_no_memory_and_one_mapping(memory):
    before = len(Path("/proc/self/maps").read_text().splitlines())
    region = memory.reserve(1 << 40)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1
    assert region.size == 0
    region.close()
    region.close()


@pytest.mark.parametrize("size", [0, -GRANULARITY, GRANULARITY + 1, 4 * GRANULARITY])
def test_impossible_arenas_are_refused(memory, size):
    region = memory.reserve(TOTAL)
    with pytest.raises(ValueError, match="no arena"):
        region.extend(size)
    region.close()


def test_too_little_memory_is_no_room_before_anything_is_allocated(memory):
    region = memory.reserve(1 << 46)
    descriptors = open_descriptors()
    with pytest.raises(NoRoom, match=r"needs \d+ bytes of host memory and only \d+ are available"):
        region.extend(1 << 46)
    assert open_descriptors() == descriptors
    assert region.size == 0
    region.close()


def test_kernel_that_cannot_back_an_arena_is_no_room(memory, monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.os, "posix_fallocate", full)
    region = memory.reserve(GRANULARITY)
    descriptors = open_descriptors()
    with pytest.raises(NoRoom, match="No space left on device"):
        region.extend(GRANULARITY)
    assert open_descriptors() == descriptors
    region.close()


def test_unreservable_addresses_are_no_room(memory):
    with pytest.raises(NoRoom, match="address space"):
        memory.reserve(1 << 60)


def test_arena_is_backed_when_extend_returns(memory):
    region = memory.reserve(TOTAL)
    region.extend(TOTAL)
    (entry,) = region._arenas
    assert os.fstat(entry[0]).st_blocks * 512 == TOTAL
    region.close()


def test_closing_an_unpublished_region_frees_everything(memory):
    descriptors = open_descriptors()
    region = memory.reserve(TOTAL)
    region.extend(GRANULARITY)
    region.close()
    assert open_descriptors() == descriptors
    assert not mappings()


def test_forked_children_do_not_forbid_the_seal(memory):
    region = memory.reserve(GRANULARITY)
    region.extend(GRANULARITY)
    ready, hold = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold)
        os.read(ready, 1)
        os._exit(0)
    try:
        (fd,) = region.freeze()
        os.close(fd)
    finally:
        os.close(ready)
        os.close(hold)
        os.waitpid(pid, 0)
    region.close()


def test_other_writable_mappings_fail_the_publication(memory):
    region = memory.reserve(GRANULARITY)
    region.extend(GRANULARITY)
    ((fd, size),) = region._arenas
    with (
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        pytest.raises(LoadFailed, match="cannot seal"),
    ):
        region.freeze()
    region.close()


def test_free_bytes_is_bounded_by_control_groups(tmp_path, monkeypatch):
    own = tmp_path / "cgroup"
    own.write_text("0::/slice/unit\n")
    unit = tmp_path / "slice" / "unit"
    unit.mkdir(parents=True)
    for folder, limit in ((unit, "max"), (unit.parent, "1000")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\nactive_file 50\ninactive_file 150\n")
    assert list(host._cgroup_headroom(tmp_path, own)) == [500]
    monkeypatch.setattr(host, "_cgroup_headroom", lambda: [500])
    assert HostMemory().free_bytes() == 500


def test_free_bytes_understands_the_old_control_groups(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("5:cpu:/x\n4:memory:/job\n")
    job = tmp_path / "memory" / "job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("1000\n")
    (job / "memory.usage_in_bytes").write_text("400\n")
    (job / "memory.stat").write_text("total_active_file 10\ntotal_inactive_file 20\n")
    assert list(host._cgroup_headroom(tmp_path, own)) == [630]
    assert list(host._cgroup_headroom(tmp_path, tmp_path / "absent")) == []


def test_free_bytes_is_plausible(memory):
    assert 0 < memory.free_bytes() < 1 << 50
