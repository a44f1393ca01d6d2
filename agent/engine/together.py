"""Load one model of a launch of several ranks: everything anew, or only what some ranks lost.

Where some ranks still hold what one load gave them, only the others load, each by itself, while the holders wait. What
was loaded has to be what was lost, byte by byte; then the holders attach to their own agents' sets, so that SGLang's
launch goes on with all ranks, and nothing is published but what was missing. Whatever stands in the way of that, all
load anew: in the same launch, where nothing was built on ``meta`` yet.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightcache import manifest, transport
from weightcache.content import content_of
from weightcache.engine import adapter, state
from weightcache.engine.adapter_together import NeedsOthers, alone, neighbours
from weightcache.engine.agree import exchange
from weightcache.engine.directive import Directive
from weightcache.engine.donate import load_for_agent
from weightcache.engine.rebuild import copy_private, rebuild
from weightcache.errors import LoadFailed, WeightcacheError
from weightcache.fingerprint import Fingerprint
from weightcache.loader import standing
from weightcache.loader.produce import Agree, nobody
from weightcache.loader.publication import Publication
from weightcache.loader.standing import Loaded, Plan, Standing
from weightcache.manifest import Manifest
from weightcache.memory import Memory, Region, memfd
from weightcache.status import SetInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """How this process loads a model, and whose it is. ``build`` constructs it on ``meta``."""

    load: Callable[[], nn.Module]
    inner: Any
    fingerprint: Fingerprint
    memory: Memory
    device: torch.device
    directive: Directive
    build: Callable[[], nn.Module]
    drafts_apart: bool = False
    """Whether some ranks will load a draft that others have not."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What this rank's agent holds, mapped."""

    manifest: Manifest
    region: Region
    group: str
    contents: tuple[str, ...]


def load_together(source: Source, publication: Publication) -> nn.Module:
    """The model, and its set with the agent. Raises what makes the load fail on all ranks."""
    rank, size, _ = adapter.world()
    role = source.fingerprint.role
    if size == 1 or not _on_all_ranks(role):
        return _load(source, publication, source.load, nobody)
    plan, borrowed = _plan(source, publication)
    beside = neighbours() if plan.group else ()
    if plan.group and borrowed is None:
        publication.rejoin(plan.group, role, plan.contents[rank])
        try:
            return _load(source, publication, _by_itself(source.load, beside), _Rejoining(plan, publication))
        except NeedsOthers as error:
            problem = str(error)
        _fits(plan, Loaded("", problem), publication)
        gc.collect()  # what was loaded so far
    elif plan.group and borrowed is not None:
        if _fits(plan, Loaded(plan.contents[rank]), publication):
            return _attach(source, borrowed, beside)
        borrowed.region.close()
    return _load(source, publication, source.load, _contents_of_all)


def _on_all_ranks(role: str) -> bool:
    """Whether every rank of the world loads this model: only the last stage of a pipeline has a draft."""
    return role == "target" or int(adapter.parallel().pp_size) == 1


def _plan(source: Source, publication: Publication) -> tuple[Plan, Borrowed | None]:
    """What all ranks do, and what this one goes on with then."""
    role = source.fingerprint.role
    if role != "target" and not state.process.rejoined:
        return Plan(), None
    borrowed: Borrowed | None = None
    if source.directive.anew:
        mine = Standing("anew", why="everything is to be loaded again")
    elif source.drafts_apart:
        mine = Standing("anew", why="the drafts of pipelines are on some ranks only")
    elif not publication.holds:
        mine = Standing("lost")
    else:
        try:
            borrowed = _borrow(source, publication)
            mine = Standing("holds", borrowed.group, borrowed.contents)
        except WeightcacheError as error:
            mine = Standing("anew", why=error.message)
    mine = dataclasses.replace(mine, in_use=publication.in_use)
    plan = standing.decide(standing.standings(exchange(standing.encode(mine))))
    if role != "target" and plan.group != state.process.rejoined:
        why = plan.why or "they are of another load than the target's"
        raise LoadFailed(f"{role} weights cannot be brought back ({why}): `wcache load --again` loads all ranks anew")
    if plan.group:
        state.process.rejoined = plan.group
        return plan, borrowed
    if borrowed is not None:
        borrowed.region.close()
    logger.info("weightcache: all ranks load: %s", plan.why)
    if publication.holds:
        publication.anew()
    return plan, None


def _borrow(source: Source, publication: Publication) -> Borrowed:
    """Raises what stands in the way of going on with what the agent holds."""
    role = source.fingerprint.role
    lent, fds = publication.borrow(role, source.fingerprint)
    try:
        body = manifest.decode(memfd.read_sealed(fds[0], manifest.MAX_BYTES))
        region = source.memory.map(fds[1:], [arena.bytes for arena in lent.arenas])
    finally:
        transport.close_all(fds)  # the mapping alone keeps the memory
    if body.bytes > region.size:
        region.close()
        raise LoadFailed(f"the {role} manifest describes {body.bytes} bytes, and the arenas have {region.size}")
    return Borrowed(body, region, lent.group, lent.contents)


def _attach(source: Source, borrowed: Borrowed, beside: Sequence[bool]) -> nn.Module:
    """The model over what the agent holds, as an engine has it. Those that load have constructed theirs by now."""
    role = source.fingerprint.role
    state.process.keep.append(borrowed.region)
    base = borrowed.region.bytes_at(0, borrowed.manifest.bytes)
    private = copy_private(borrowed.manifest, base)
    with alone(beside):
        model = source.build()
    state.process.rebuilt[role] = rebuild(model, borrowed.manifest, base, state.process.rebuilt, private)
    logger.info("weightcache: this rank goes on with its %s weights of load %s", role, borrowed.group)
    return model.eval()


def _load(
    source: Source,
    publication: Publication,
    load: Callable[[], nn.Module],
    agree: Agree,
) -> nn.Module:
    return load_for_agent(
        load,
        source.inner,
        source.fingerprint,
        source.memory,
        source.device,
        publication,
        source.directive,
        build=source.build,
        agree=agree,
    )


def _by_itself(load: Callable[[], nn.Module], beside: Sequence[bool]) -> Callable[[], nn.Module]:
    def loaded() -> nn.Module:
        with alone(beside):
            return load()

    return loaded


class _Rejoining:
    """Whether what this rank has loaded is what it had lost, and all ranks' contents, whatever comes of that."""

    def __init__(self, plan: Plan, publication: Publication) -> None:
        self._plan = plan
        self._publication = publication

    def __call__(self, info: SetInfo, body: Manifest) -> tuple[str, ...]:
        own = content_of(info, manifest.encode(body))
        if _fits(self._plan, Loaded(own), self._publication):
            return self._plan.contents
        return _contents_of_all(info, body)


def _fits(plan: Plan, mine: Loaded, publication: Publication) -> bool:
    """Whether all ranks have what they lost; otherwise all of them load anew from here on."""
    why = standing.misfit(plan, standing.contents(exchange(standing.encode(mine))))
    if why:
        plan.require_room(why)
        logger.warning("weightcache: all ranks load anew: %s", why)
        state.process.rejoined = ""
        publication.anew()
    return not why


def _contents_of_all(info: SetInfo, body: Manifest) -> tuple[str, ...]:
    mine = standing.encode(Loaded(content_of(info, manifest.encode(body))))
    return tuple(loaded.content for loaded in standing.contents(exchange(mine)))
