"""Whether a rehearsal may start: the weights are there, and memory for the rest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weightcache.cli import ranks, rehearse_room
from weightcache.config_checks import model_path
from weightcache.errors import (
    AgentUnavailable,
    Degraded,
    Drained,
    Empty,
    NotReady,
    StillLoading,
    WeightcacheError,
    from_code,
)
from weightcache.launch import layout
from weightcache.monitor.site import choose_ranks
from weightcache.parity import ending
from weightcache.sglang_options import given

if TYPE_CHECKING:
    from weightcache.cli.rehearse_room import Room
    from weightcache.monitor.site import Site
    from weightcache.monitor.view import RankView

POLL_SECONDS = 1.0
_STATES: dict[str, type[NotReady]] = {
    "loading": StillLoading, "empty": Empty, "drained": Drained, "degraded": Degraded,
}  # fmt: skip


def weights(site: Site, chosen: bool, from_disk: bool, wait: float) -> list[RankView]:
    """The ranks that hold weights, waited for up to ``wait`` seconds.

    That is all of them, or, where the arguments are ``chosen`` for this rehearsal, at least one; ``from_disk``: or
    none. Raises NotReady or AgentUnavailable.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return _weights(site, chosen, from_disk)
        except (NotReady, AgentUnavailable):
            if time.monotonic() >= deadline:
                raise
        with ending.wait():
            time.sleep(POLL_SECONDS)


def tokens(site: Site, views: list[RankView], arguments: tuple[str, ...]) -> tuple[int, Room | None]:
    """How many tokens of KV memory fit, and where; None: nobody knows. Raises NoRoom."""
    backend = next((view.status.backend for view in views), site.config.memory.backend)
    deployment = layout.deployment(given(arguments))
    if backend == "cuda":
        gpus = {view.status.gpu_uuid for view in views} or {gpu for rank in site.ranks if (gpu := site.gpu(rank))}
        room = rehearse_room.free_on_gpus(gpus) if gpus else None
    else:
        room = rehearse_room.free_on_host(deployment.world)
    size = rehearse_room.token_bytes(model_path(arguments) or "", deployment.tp_size, deployment.pp_size)
    return rehearse_room.tokens(room, backend, size, asked_tokens(arguments)), room


def asked_tokens(arguments: tuple[str, ...]) -> int | None:
    """The value of --max-total-tokens; what is none is SGLang's to refuse."""
    for i, token in enumerate(arguments):
        name, equals, value = token.partition("=")
        if name == "--max-total-tokens":
            text = value if equals else "".join(arguments[i + 1 : i + 2])
            return int(text) if text.isascii() and text.isdigit() and int(text) else None
    return None


def _weights(site: Site, chosen: bool, from_disk: bool) -> list[RankView]:
    try:
        views = ranks.query_all(site, choose_ranks(site, None))
    except AgentUnavailable:
        if from_disk:
            return []
        raise
    ready = [view for view in views if view.agent == "up" and view.status.state == "ready"]
    if from_disk or len(ready) == len(views) or (chosen and ready):
        return ready
    raise _refusal(next(view for view in views if view not in ready))


def _refusal(view: RankView) -> WeightcacheError:
    rank, state = view.status.rank, view.status.state
    if view.agent != "up":
        code, why = (view.reason.code, view.reason.message) if view.reason is not None else ("no-agent", "none answers")
        return from_code(code, f"no rehearsal: rank {rank}: {why}")
    text = f"no rehearsal: rank {rank} is {state}, and a second copy from disk was not asked for (--from-disk)"
    return _STATES.get(state, NotReady)(text)
