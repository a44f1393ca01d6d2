"""One decision for all ranks of an engine: all attach, or all donate, or all load from disk.

Ranks that got their weights in different ways would size their KV pools differently, and nothing in SGLang notices.
"""

from __future__ import annotations

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
    """What all ranks do, the first rank that could do no better, and the largest resident set of any rank (bytes)."""

    vote: Vote
    reluctant: int
    resident_bytes: int


def agree(vote: Vote, resident_bytes: int) -> Agreement:
    """Exchange votes over the world's CPU group; every rank must call this once per model, whatever happened to it."""
    rank, size, group = adapter.world()
    if size == 1:
        return Agreement(vote, rank, resident_bytes)
    mine = torch.tensor([int(vote), resident_bytes], dtype=torch.int64)
    everyone = [torch.zeros_like(mine) for _ in range(size)]
    torch.distributed.all_gather(everyone, mine, group=group)
    votes = [int(entry[0]) for entry in everyone]
    lowest = min(votes)
    if lowest == Vote.DONATE and max(votes) != Vote.DONATE:
        # Some ranks hold the set and some do not: the resident ones would stay idle beside a second copy.
        lowest = Vote.DISK
    return Agreement(Vote(lowest), votes.index(min(votes)), max(int(entry[1]) for entry in everyone))
