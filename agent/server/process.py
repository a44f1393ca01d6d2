"""What the agent's process sets for itself before it serves."""

from __future__ import annotations

import ctypes
import logging
import resource
import sys

log = logging.getLogger("weightcache")

_PR_SET_DUMPABLE = 4


def protect() -> None:
    """Not dumpable (prctl(2)): a process of the same user, such as a loader, cannot take descriptors from this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("prctl(PR_SET_DUMPABLE) failed: %s", ctypes.get_errno())


def raise_descriptor_limit() -> None:
    """Use all descriptors that the hard limit allows: each arena is one, and each unread answer counts them again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def log_to_stderr(rank: int) -> None:
    """Plain lines; the service manager adds the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    root = logging.getLogger("weightcache")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
