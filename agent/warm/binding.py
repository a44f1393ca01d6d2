"""SGLang binds a scheduler to the processors and the memory beside its GPU by running it under numactl(8).

A parked child cannot be started again under numactl, but what numactl does before it executes a program are two calls
that a running process can make as well: its threads' processors, and its memory policy. What was allocated before stays
where it is (code and Python objects); threads that exist keep their own policy, which takes memory beside the
processors they are bound to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from weightcache.errors import WeightcacheError
from weightcache.warm.priority import threads

_SCRIPT = re.compile(r'#!/bin/sh\nexec numactl ((?:--[a-z]+=[\d,-]+ ?)+) (\S+) "\$@"\s*')
_SCRIPT_BYTES = 4096
_KNOWN = ("--cpunodebind", "--physcpubind", "--membind", "--preferred")
_NODES = Path("/sys/devices/system/node")
_CALLS = {"x86_64": 238, "aarch64": 237}
"""set_mempolicy(2)."""
_POLICIES = {"--preferred": 1, "--membind": 2}
_MOST_NODES = 1024


def wanted(path: str, executable: str, usual: str) -> dict[str, str]:
    """numactl's options for a process that multiprocessing starts as ``path`` where ``usual`` is this interpreter.

    Raises WeightcacheError for anything but this interpreter or SGLang's script around it.
    """
    if path == usual:
        return {}
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        match = _SCRIPT.fullmatch(file.read(_SCRIPT_BYTES))
        if match and path == executable and match[2] == usual:
            options = dict(word.split("=", 1) for word in match[1].split())
            if set(options) <= set(_KNOWN):
                return options
    raise WeightcacheError(f"it would run as {path}")


def apply(options: Mapping[str, str]) -> None:
    """Bind this process, with all its threads. What the kernel refuses is left: numactl's effect is on speed only."""
    cpus: set[int] = numbers(options.get("--physcpubind", ""))
    for node in numbers(options.get("--cpunodebind", "")):
        with contextlib.suppress(OSError):
            cpus |= numbers((_NODES / f"node{node}" / "cpulist").read_text().strip())
    for thread in threads() if cpus else ():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cpus)
    for option, policy in _POLICIES.items():
        if nodes := numbers(options.get(option, "")):
            _memory_policy(policy, nodes)


def numbers(text: str) -> set[int]:
    """The numbers in a list like ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _memory_policy(policy: int, nodes: set[int]) -> None:
    call = _CALLS.get(platform.machine())
    if call is None or max(nodes) >= _MOST_NODES:
        return
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    ctypes.CDLL(None).syscall(ctypes.c_long(call), policy, mask, ctypes.c_ulong(_MOST_NODES + 1))
