"""From a freshly loaded model to a published set: gate, export, pack, digest, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weightcache import transport
from weightcache.fingerprint import Fingerprint
from weightcache.loader.export import Export, Known, export
from weightcache.loader.pack import pack
from weightcache.loader.publication import Publication
from weightcache.loader.walk import Walk
from weightcache.manifest import Manifest
from weightcache.memory import Memory, WritableRegion, arena_sizes
from weightcache.memory.digest import digest
from weightcache.protocol import ArenaInfo, SetInfo

Check = Callable[[Manifest, torch.Tensor], None]
"""Raises for a packed range (uint8) that is not what the manifest promises."""

Agree = Callable[[SetInfo, Manifest], tuple[str, ...]]
"""Tells the other ranks of a launch what this one has; returns what each of them has, in their order."""


def nobody(info: SetInfo, body: Manifest) -> tuple[str, ...]:
    """Nobody else is asked."""
    return ()


@dataclass(frozen=True, slots=True)
class Loading:
    """What is known about the load that made the model: seconds it took and bytes of checkpoint tensors it read."""

    fingerprint: Fingerprint
    seconds: float
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Produced:
    """A published set, as its publisher still holds it. The region backs the model's own tensors now."""

    set_id: str
    manifest: Manifest
    region: WritableRegion
    arenas: tuple[ArenaInfo, ...]
    known: Known
    milliseconds: Mapping[str, float]


def produce(
    model: nn.Module,
    built: Walk,
    loading: Loading,
    memory: Memory,
    publication: Publication,
    *,
    device: torch.device,
    arena_bytes: int,
    keep_private: bool,
    known: Known | None = None,
    check: Check | None = None,
    agree: Agree = nobody,
    on_frozen: Callable[[WritableRegion], None] = lambda region: None,
) -> Produced:
    """Publish ``model``; its tensors live in the arenas afterwards (private ones too, unless ``keep_private``).

    ``check`` looks at what was packed before anything is published, and ``agree`` waits for the other ranks.
    ``on_frozen`` is called when the tensors become read-only, whether the publication succeeds afterwards or not.

    Raises ExportRefused, NoRoom, AgentUnavailable and what the agent answers. The caller has passed the gate.
    """
    marks = [time.perf_counter()]
    exported = export(model, built, device, known)
    marks.append(time.perf_counter())
    region, arenas = _packed(exported, memory, publication, arena_bytes, keep_private)
    if check is not None:
        check(exported.manifest, region.bytes_at(0, exported.manifest.bytes))
    marks.append(time.perf_counter())
    infos = _digests(region, arenas, exported.manifest.bytes)
    marks.append(time.perf_counter())
    info = SetInfo(
        role=loading.fingerprint.role,
        model=loading.fingerprint.model_path,
        revision=loading.fingerprint.revision,
        fingerprint=loading.fingerprint,
        arenas=infos,
        tensors=len(exported.manifest.tensors),
        load_seconds=round(loading.seconds, 3),
        bytes_read=loading.bytes_read,
    )
    contents = agree(info, exported.manifest)
    marks.append(time.perf_counter())
    on_frozen(region)
    fds = region.freeze()
    try:
        publication.progress("publishing", exported.manifest.bytes, exported.manifest.bytes, force=True)
        set_id = publication.publish(info, exported.manifest, fds, contents)
    finally:
        transport.close_all(fds)
    marks.append(time.perf_counter())
    steps = zip(("walk", "pack", "digest", "agree", "publish"), marks, marks[1:], strict=False)
    milliseconds = {name: round((end - start) * 1000, 3) for name, start, end in steps}
    known_now = exported.known(loading.fingerprint.role)
    return Produced(set_id, exported.manifest, region, infos, known_now, milliseconds)


def _packed(
    exported: Export, memory: Memory, publication: Publication, arena_bytes: int, keep_private: bool
) -> tuple[WritableRegion, tuple[int, ...]]:
    total = exported.manifest.bytes
    arenas = arena_sizes(total, memory.granularity, arena_bytes)
    region = memory.reserve(sum(arenas))
    pack(
        exported,
        region,
        arenas,
        keep_private=keep_private,
        on_progress=lambda done: publication.progress("packing", done, total),
    )
    return region, arenas


def _digests(region: WritableRegion, arenas: tuple[int, ...], total: int) -> tuple[ArenaInfo, ...]:
    infos = []
    start = 0
    for size in arenas:
        used = max(0, min(size, total - start))
        infos.append(ArenaInfo(size, used, digest(region.bytes_at(start, used))))
        start += size
    return tuple(infos)
