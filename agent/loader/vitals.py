"""Signs of life of a session of processes: CPU time and I/O, for loads that report no progress (imports, compilers)."""

from __future__ import annotations

import os
from pathlib import Path

Vitals = tuple[int, int, int]
"""(processes, CPU ticks, bytes read and written): any change is a sign of life."""


def of_session(session: int) -> Vitals:
    """Sum over all processes of ``session`` (proc(5): stat fields 6, 14 to 17; io rchar and wchar)."""
    count = ticks = moved = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are enough, and there may be thousands
        if not name.isdigit():
            continue
        try:
            # The command in parentheses may contain anything, so fields are counted from the last parenthesis.
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[3]) != session:
                continue
            ticks += sum(int(field) for field in fields[11:15])
            count += 1
            moved += _moved(name)
        except (OSError, ValueError, IndexError):
            continue
    return count, ticks, moved


def _moved(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_bytes().splitlines()
    except OSError:  # another user's process: CPU time must do
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])
