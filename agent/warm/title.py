"""The command line of a parked process becomes that of the server it turns into.

systemd, ps, operators and weightcache's own monitor know processes by /proc/PID/cmdline. The kernel shows the memory
in which execve(2) put the arguments: they are written over in place, in a parked command line that is long enough.
Where the kernel allows a process to move the end of that memory (PR_SET_MM_MAP, prctl(2): no privilege is needed where
the kernel can checkpoint processes, as those of distributions can), nothing is left behind the new arguments; elsewhere
empty arguments follow, which readers drop.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FILLER = "-"
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 2**32 - 1


class _Map(ctypes.Structure):
    """struct prctl_mm_map (linux/prctl.h)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start",
            "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


def padding(parked: Sequence[str], command: Sequence[str]) -> str:
    """One more argument for ``parked``, so that ``command`` fits in its place."""
    return FILLER * max(1, _size(command) - _size(parked) - 1)


def _size(command: Sequence[str]) -> int:
    return sum(len(os.fsencode(word)) + 1 for word in command)


def become(command: Sequence[str]) -> bool:
    """Show ``command`` as this process's command line; False if it does not fit, and nothing was changed."""
    fields = _fields()
    start, end = fields[48], fields[49]
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    # The last byte stays zero: the kernel takes another one there for a title without arguments (setproctitle(3)).
    if not 0 < start < end or len(text) > end - start:
        return False
    ctypes.memmove(start, text + b"\0" * (end - start - len(text)), end - start)
    _cut(fields, start + len(text))
    sys.orig_argv[:] = command
    return True


def _cut(fields: dict[int, int], end: int) -> None:
    """Let the arguments end at ``end``; the kernel may refuse."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    now = _Map(
        start_code=fields[26], end_code=fields[27], start_data=fields[45], end_data=fields[46], start_brk=fields[47],
        brk=libc.sbrk(ctypes.c_ssize_t(0)), start_stack=fields[28], arg_start=fields[48], arg_end=end,
        env_start=fields[50], env_end=fields[51], auxv=0, auxv_size=0, exe_fd=_NO_FILE,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(now))
    libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(now), size, ctypes.c_ulong(0))


def _fields() -> dict[int, int]:
    """/proc/self/stat by the numbers that proc_pid_stat(5) gives the fields, from the fourth on."""
    text = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    return {number: int(value) for number, value in enumerate(text[1:], 4)}
