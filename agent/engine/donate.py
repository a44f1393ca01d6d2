"""Load a model and publish it: the loader's whole job, and what a serving engine does for an empty agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcache import checkpoint
from weightcache.engine import adapter, gate, selfcheck, state
from weightcache.engine.directive import Directive
from weightcache.errors import ExportRefused, UnsupportedMethod, WeightcacheError
from weightcache.fingerprint import Fingerprint
from weightcache.loader.produce import Agree, Check, Loading, Produced, nobody, produce
from weightcache.loader.publication import Publication
from weightcache.loader.walk import Walk, walk
from weightcache.memory import Memory, WritableRegion
from weightcache.paths import RankPaths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Donation:
    """A loaded model and, when it could be published, the set. ``reason`` says why it could not."""

    model: nn.Module
    produced: Produced | None
    reason: WeightcacheError | None


@dataclass(frozen=True, slots=True)
class Observed:
    """A loaded model, and the walks of what was constructed for it."""

    model: nn.Module
    walks: tuple[Walk, ...]
    loading: Loading

    @property
    def built(self) -> Walk:
        """The walk of the model as it was constructed. Raises ExportRefused when a loader made several."""
        if len(self.walks) != 1:
            raise ExportRefused(f"the loader constructed {len(self.walks)} models where one was expected")
        return self.walks[0]


def publish_path(public: Path) -> Path:
    """The publish socket beside a rank's public socket."""
    return RankPaths.of(public).publish


def load_observed(
    load: Callable[[], nn.Module], inner: Any, fingerprint: Fingerprint, publication: Publication
) -> Observed:
    """Run ``load``, watching construction (for the difference that loading makes) and the bytes that are read."""
    walks: list[Walk] = []
    read = 0
    directory = Path(fingerprint.model_path)
    total = checkpoint.size(directory) if directory.is_dir() else 0

    def count(size: int) -> None:
        nonlocal read
        read += size
        publication.progress("loading", read, total)

    adapter.count_weights(inner, count)
    started = time.monotonic()
    publication.progress("loading", 0, total, force=True)
    with adapter.after_construction(lambda model: walks.append(walk(model).without_tensors())):
        model = load()
    return Observed(model, tuple(walks), Loading(fingerprint, time.monotonic() - started, read))


def donate(
    load: Callable[[], nn.Module],
    inner: Any,
    fingerprint: Fingerprint,
    memory: Memory,
    device: torch.device,
    public: Path,
    token: str,
    group: str,
    directive: Directive,
) -> Donation:
    """Load, publish, go on serving from the arenas. A failure to publish never costs the engine its model.

    ``group`` is the launch's name on all ranks.
    """
    try:
        publication = Publication(publish_path(public), source="donor", group=group, token=token)
    except WeightcacheError as error:
        logger.warning("weightcache: this engine's weights are not cached: %s", error)
        return Donation(load(), None, error)
    observed = load_observed(load, inner, fingerprint, publication)
    try:
        gate.check(observed.model, fingerprint.sglang_version, fingerprint.device_capability)
        produced = produce(
            observed.model,
            observed.built,
            observed.loading,
            memory,
            publication,
            device=device,
            arena_bytes=directive.arena_bytes,
            keep_private=True,
            on_frozen=_frozen,
        )
        publication.commit()
    except Exception as error:  # whatever happened, the engine has its model
        known = error if isinstance(error, WeightcacheError) else WeightcacheError(f"{type(error).__name__}: {error}")
        logger.warning("weightcache: this engine's weights are not cached: %s", known, exc_info=known is not error)
        publication.abort(known)
        return Donation(observed.model, None, known)
    publication.close()
    return Donation(observed.model, produced, None)


def _frozen(region: WritableRegion) -> None:
    """The model lives in read-only memory from here on, even if nobody takes the set: verbs that write are refused."""
    state.process.keep.append(region)
    state.process.shares_weights = True


def load_for_agent(
    load: Callable[[], nn.Module],
    inner: Any,
    fingerprint: Fingerprint,
    memory: Memory,
    device: torch.device,
    publication: Publication,
    directive: Directive,
    build: Callable[[], nn.Module],
    agree: Agree = nobody,
) -> nn.Module:
    """Load and publish one set of a loader's launch; the commit follows when all its models are loaded.

    ``build`` constructs the model on ``meta``, for the check of methods without evidence. ``agree`` waits for the other
    ranks before anything is published.
    """
    observed = load_observed(load, inner, fingerprint, publication)
    check = _check(observed.model, fingerprint, directive, build)
    produced = produce(
        observed.model,
        observed.built,
        observed.loading,
        memory,
        publication,
        device=device,
        arena_bytes=directive.arena_bytes,
        keep_private=False,
        known=state.process.exported,
        check=check,
        agree=agree,
    )
    state.process.keep.append(produced.region)
    if fingerprint.role == "target":
        state.process.exported = produced.known
    logger.info("weightcache: published set %s: %s", produced.set_id, dict(produced.milliseconds))
    return observed.model


def _check(
    model: nn.Module, fingerprint: Fingerprint, directive: Directive, build: Callable[[], nn.Module]
) -> Check | None:
    """Raise UnsupportedMethod, or return the check that a method without evidence needs."""
    try:
        gate.check(model, fingerprint.sglang_version, fingerprint.device_capability)
    except UnsupportedMethod as error:
        if directive.unproven == "allow":
            return None
        if directive.unproven == "refuse":
            raise
        if state.process.exported is not None:
            # It refers to its target's objects, which a second tree would not have.
            what = f"{fingerprint.role}: {error.message.partition(': ')[0]}"
            raise UnsupportedMethod(f"{what}, and draft models cannot be checked on the spot") from None
        logger.info("weightcache: %s; checking what was loaded", error)
        return selfcheck.prepare(model, build)
    return None
