"""What is known of one rank: from its agent, or what the agent left behind."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weightcache import protocol, records
from weightcache.client import Conversation
from weightcache.errors import AgentUnavailable, NotReady, StillLoading, WeightcacheError, from_code
from weightcache.protocol import ErrorInfo, RankReport, RankStatus

if TYPE_CHECKING:
    from pathlib import Path

    from weightcache.monitor.site import Site

ANSWER_SECONDS = 5.0
"""How long an agent may take for an answer that needs no work."""

_MAX_STATUS_FILE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class RankView:
    """What is known of a rank, and since when.

    ``agent`` is ``up``, ``down`` (nobody answers) or ``closed`` (an agent is there that refuses this user or speaks
    another protocol). Unless it is up, ``reason`` says why, and ``status`` is the last known one or a blank.
    ``heard_at`` is when ``status`` was true, in seconds since the epoch; 0 where nothing is known.
    """

    status: RankStatus
    agent: Literal["up", "down", "closed"]
    reason: ErrorInfo | None
    heard_at: float


def query(site: Site, rank: int) -> RankView:
    """One rank's state: from its agent, or as last known."""
    try:
        with Conversation(site.rank(rank).status, ANSWER_SECONDS) as agent:
            status = agent.request(protocol.Status(), RankReport, ANSWER_SECONDS).status
    except WeightcacheError as error:
        return unanswered(site, rank, error)
    return RankView(status, "up", None, time.time())


def unanswered(site: Site, rank: int, error: WeightcacheError) -> RankView:
    """A rank whose agent gave ``error`` instead of its status."""
    reason = ErrorInfo(error.code, error.message)
    # An agent that is there and cannot be talked to is more telling than what the file says.
    agent: Literal["down", "closed"] = "down" if isinstance(error, AgentUnavailable) else "closed"
    known = _last_known(site.rank(rank).status_file)
    if known is None:
        return RankView(_blank(site, rank, reason), agent, reason, 0.0)
    status, heard_at = known
    return RankView(dataclasses.replace(status, error=reason) if agent == "closed" else status, agent, reason, heard_at)


def verdict(site: Site, views: Sequence[RankView]) -> int:
    """The exit status that says whether all is well: 0, 1 or 75. Raises AgentUnavailable or why no agent answered."""
    if all(view.agent != "up" for view in views):
        # Leaves with the sentence of the first agent that is there, if there is one.
        for view in views:
            if view.agent == "closed" and view.reason is not None:
                raise from_code(view.reason.code, view.reason.message)
        raise AgentUnavailable(f"no agent answers in {site.directory}")
    waiting = [view for view in views if view.agent != "up" or view.status.state != "ready"]
    if not waiting:
        return 0
    loading = all(view.agent == "up" and view.status.state == "loading" for view in waiting)
    return StillLoading.exit_status if loading else NotReady.exit_status


def plain(view: RankView) -> dict[str, Any]:
    """A rank as an entry of ``ranks`` in the JSON of ``wcache status`` and ``wcache-top``."""
    return {**records.to_plain(view.status), "agent": "up" if view.agent == "up" else "down"}


def _last_known(file: Path) -> tuple[RankStatus, float] | None:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_STATUS_FILE)
        return records.from_plain(RankStatus, json.loads(data)), file.stat().st_mtime
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it says nothing
        return None


def _blank(site: Site, rank: int, error: ErrorInfo) -> RankStatus:
    backend = site.config.memory.backend
    return RankStatus(rank, "unknown", backend, site.gpu(rank), "", 0, 0.0, "", (), (), None, error, None)
