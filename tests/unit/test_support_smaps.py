"""The reader of smaps, on text and on this process."""

import mmap
import os

from tests.support import smaps

SIZE = 1 << 20
TEXT = """\
7f00-9f00 r--s 00000000 00:01 42                         /memfd:weights (deleted)
Size:                  8 kB
Rss:                   8 kB
Pss:                   4 kB
Shared_Clean:          8 kB
Shared_Dirty:          0 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
THPeligible:           0
VmFlags: rd sh mr
9f00-af00 rw-p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
"""


def test_parse() -> None:
    weights, heap = smaps.parse(TEXT)
    assert (weights.permissions, weights.device, weights.inode) == ("r--s", "00:01", 42)
    assert (weights.length, weights.rss, weights.pss, weights.shared, weights.private) == (8192, 8192, 4096, 8192, 0)
    assert "THPeligible" not in weights.sizes
    assert (heap.path, heap.anonymous) == ("", 4096)


def test_memfd_of_this_process() -> None:
    fd = os.memfd_create("weights")
    try:
        os.ftruncate(fd, SIZE)
        os.pwrite(fd, b"w" * SIZE, 0)
        with mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
            before = smaps.private_anonymous()
            assert len(view[:]) == SIZE
            [read_only] = smaps.memfds(smaps.read(), {os.fstat(fd).st_ino})
            assert (read_only.rss, read_only.anonymous) == (SIZE, 0)
            view[: SIZE // 2] = b"x" * (SIZE // 2)
            [written] = smaps.memfds(smaps.read(), {os.fstat(fd).st_ino})
            assert written.anonymous == SIZE // 2
            assert smaps.private_anonymous() - before >= SIZE // 2
        assert smaps.memfds(smaps.read(), {os.fstat(fd).st_ino}) == []
    finally:
        os.close(fd)
