"""One decision for all ranks of an engine: all attach, or all donate, or all load from disk.

Ranks that got their weights in different ways would size their KV pools differently, and nothing in SGLang notices.
Ranks that attach must have got theirs from one load, too: no agent knows what the agents of other hosts hold.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch

from weightcache.engine import adapter


class Vote(IntEnum):
    """What one rank could do."""

    REFUSE = 0
    DISK = 1
    DONATE = 2
    ATTACH = 3


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks do, the first rank that could do no better, and the largest resident set of any rank (bytes).

    ``group`` is the name under which all donate; ``apart`` is the first rank whose set came from another load than
    rank 0's, where all could attach but for that.
    """

    vote: Vote
    reluctant: int
    resident_bytes: int
    group: str
    apart: int | None = None


def agree(vote: Vote, resident_bytes: int, group: str) -> Agreement:
    """Exchange votes over the world's CPU group; every rank must call this once per model, whatever happened to it.

    ``group`` names the load that this rank's set came from, or this engine's launch where it may donate.
    """
    rank, size, cpu_group = adapter.world()
    if size == 1:
        return Agreement(vote, rank, resident_bytes, group)
    mine = torch.tensor([int(vote), resident_bytes, _number(group)], dtype=torch.int64)
    everyone = [torch.zeros_like(mine) for _ in range(size)]
    torch.distributed.all_gather(everyone, mine, group=cpu_group)
    votes = [int(entry[0]) for entry in everyone]
    groups = [int(entry[2]) for entry in everyone]
    lowest, apart = min(votes), None
    if lowest == Vote.ATTACH and len(set(groups)) > 1:
        lowest, apart = Vote.DISK, next(r for r, other in enumerate(groups) if other != groups[0])
    elif lowest == Vote.DONATE and max(votes) != Vote.DONATE:
        # Some ranks hold the set and some do not: the resident ones would stay idle beside a second copy.
        lowest = Vote.DISK
    largest = max(int(entry[1]) for entry in everyone)
    return Agreement(Vote(lowest), votes.index(min(votes)), largest, f"{groups[0]:016x}", apart)


def _number(group: str) -> int:
    """63 bits of a name's hash: the ranks of several hosts have different names for one launch."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") >> 1


def wait_for_all() -> None:
    """Return when all ranks that load together are here; that one of them has failed raises RuntimeError."""
    _, size, cpu_group = adapter.world()
    if size > 1:
        torch.distributed.barrier(group=cpu_group)


def exchange(said: bytes) -> list[bytes]:
    """What every rank says, in their order; every rank must call this as often as the others."""
    _, size, cpu_group = adapter.world()
    if size == 1:
        return [said]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    torch.distributed.all_gather(lengths, torch.tensor([len(said)], dtype=torch.int64), group=cpu_group)
    longest = max(int(length) for length in lengths)
    mine = torch.tensor(list(said.ljust(longest, b"\0")), dtype=torch.uint8)
    everyone = [torch.zeros_like(mine) for _ in range(size)]
    torch.distributed.all_gather(everyone, mine, group=cpu_group)
    return [bytes(text[: int(length)].tolist()) for text, length in zip(everyone, lengths, strict=True)]
