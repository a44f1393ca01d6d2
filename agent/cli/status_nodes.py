"""`wcache status`: the other nodes of the deployment. What their exporters answered is data of unknown origin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from weightcache import records
from weightcache.monitor import words
from weightcache.text import coloured, escape, paint, progress, size, table

if TYPE_CHECKING:
    from weightcache.monitor.brief import RankBrief
    from weightcache.monitor.peers import Peer

HEADER = ("RANK", "STATE", "BACKEND", "GPU", "MODEL", "SETS", "SIZE")
RIGHT = ("RANK", "SETS", "SIZE")


def plain(peer: Peer) -> dict[str, Any]:
    """A node as an entry of ``nodes`` in the JSON."""
    found: dict[str, Any] = {"node": peer.node, "address": peer.address}
    if peer.error:
        return {**found, "error": peer.error}
    return {**found, "ranks": [records.to_plain(rank) for rank in peer.ranks]}


def title(node: int, name: str, here: bool = False) -> str:
    """The line above a node's ranks."""
    return f"node {node} ({escape(name)}{', this host' if here else ''}):"


def lines(peer: Peer) -> list[str]:
    """One node's section."""
    head = title(peer.node, peer.address)
    if peer.error or not peer.ranks:
        return [f"{head} {escape(peer.error) or 'no rank is known there'}"]
    rows = table(HEADER, [_row(rank) for rank in peer.ranks], RIGHT)
    if coloured(sys.stdout):
        for i, rank in enumerate(peer.ranks, 1):
            if colour := words.COLOURS.get(rank.state):
                rows[i] = paint(rows[i], rank.state, colour)
    return [head, *rows, *(line for rank in peer.ranks for line in _details(rank))]


def _row(rank: RankBrief) -> tuple[str, ...]:
    return (
        str(rank.rank),
        escape(rank.state),
        escape(rank.backend),
        escape(rank.gpu_uuid) or "-",
        escape(rank.model) or "-",
        str(len(rank.sets)),
        size(sum(entry.bytes for entry in rank.sets)),
    )


def _details(rank: RankBrief) -> list[str]:
    found = []
    if rank.progress is not None:
        found.append(f"loading: {progress(rank.progress)}")
    if rank.error is not None:
        label = rank.state if rank.state in ("failed", "degraded") else "error"
        why = f": {escape(rank.error.message)}" if rank.error.message else ""
        found.append(f"{label}{why} [{escape(rank.error.code)}]")
    return [f"rank {rank.rank}: {line}" for line in found]
