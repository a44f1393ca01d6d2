"""What the agent's process sets for itself before it serves."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys

from weightcache.server import journal

log = logging.getLogger("weightcache")

_PR_SET_DUMPABLE = 4


def protect() -> None:
    """Not dumpable (prctl(2)): a process of the same user, such as a loader, cannot take descriptors from this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("prctl(PR_SET_DUMPABLE) failed: %s", ctypes.get_errno())


def raise_descriptor_limit() -> None:
    """Use all descriptors that the hard limit allows: each arena is one, and each unread answer counts them again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:  # a unit's LimitNOFILE= sets both, and its sandbox forbids the call
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_log(rank: int) -> None:
    """To the journal with fields, or plain lines on standard error. asyncio's complaints go the same way."""
    handler = journal.chosen_handler(rank, os.environ, sys.stderr)
    for name in ("weightcache", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    log.setLevel(logging.INFO)
