"""The metrics: names, types, units, labels and what each of them tells. docs/operations.md says what to do about them.

All of a rank carry ``rank``, and ``gpu`` and ``UUID`` with the values of NVIDIA's DCGM exporter (both empty without a
GPU), so that ``on (UUID)`` joins the two; those of engines with a standby carry ``engine``, most of them ``slot``, too.
No label has values without bound: no paths, no processes, no ids of sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RANK = ("rank", "gpu", "UUID")
ROLE = (*RANK, "role")

STATES = (
    "empty", "loading", "ready", "drained", "failed", "degraded",  # what an agent says of its rank
    "stopped", "down", "unknown",  # it was stopped or never started, it is gone without a word, it cannot be asked
)  # fmt: skip

KEPT = ("store", "process", "lost")

EVENTS = (
    "state-changed", "load-began", "load-ended", "set-published", "set-adopted", "set-dropped", "leased", "lease-ended",
    "suspected", "verified", "store-emptied", "store-refilled", "store-rejected", "drained", "resumed", "stopping",
    "records-dropped",
)  # fmt: skip
"""The journal's, but for those that are counted by code."""

LOADS = (
    *((source, result) for source in ("loader", "donor") for result in ("published", "failed", "given-up")),
    ("loader", "retained"),
)

REFUSALS = (
    "mismatch", "loading", "empty", "drained", "degraded",  # nothing that fits, or nothing now
    "load-failed", "checkpoint", "unsupported", "no-room", "no-device", "config",  # the load that it would take fails
    "protocol", "version-skew",
)  # fmt: skip

OTHER = "other"
"""Stands for any value that this version does not know."""


ENGINE_ROLES = ("starting", "standby", "promoting", "active", "retiring", "parked", "down", "unknown")
"""Of a slot; unknown: its status may not be read."""

CAUSES = ("start", "death", "promote", "wake")
SLOT = ("engine", "slot")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family; ``name`` is without the suffixes that its type brings (``_total``, ``_info``)."""

    name: str
    type: Literal["counter", "gauge", "histogram", "info", "summary"]
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        """The base unit that the name ends in, or an empty text."""
        end = self.name.rpartition("_")[2]
        return end if end in ("seconds", "bytes") else ""

    @property
    def series(self) -> tuple[str, ...]:
        """The names as PromQL knows them."""
        suffixes = {
            "counter": ("_total",), "gauge": ("",), "info": ("_info",),
            "histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum"),
        }  # fmt: skip
        return tuple(self.name + suffix for suffix in suffixes[self.type])


FAMILIES = (
    Family("weightcache_build", "info", ("version", "python"), "What made these metrics."),
    Family("weightcache_agent_up", "gauge", RANK, "1 if the rank's agent answers."),
    Family("weightcache_agent_start_time_seconds", "gauge", RANK, "When the agent was started."),
    Family(
        "weightcache_rank",
        "info",
        (*RANK, "backend", "version", "pci_bus_id", "gpu_name"),
        "The rank's kind of memory, the version of its agent, and the GPU by its bus id and its name.",
    ),
    Family("weightcache_rank_state", "gauge", (*RANK, "state"), "1 for the state that the rank is in."),
    Family("weightcache_rank_ready", "gauge", RANK, "1 if engines get weights from this rank."),
    Family("weightcache_rank_error", "gauge", (*RANK, "code"), "1 while the rank has an error, with its code."),
    Family("weightcache_rank_drained_timestamp_seconds", "gauge", RANK, "Since when the rank is drained, while it is."),
    Family(
        "weightcache_rank_kept",
        "gauge",
        (*RANK, "kept"),
        "1 for who holds the descriptors besides engines: the service manager (store), the agent alone (process), or "
        "the agent alone because the manager dropped them (lost).",
    ),
    Family(
        "weightcache_set",
        "info",
        (*ROLE, "model", "revision", "version", "digest"),
        "The newest set of a role: model by name, its revision, how many times it was published, and its digest.",
    ),
    Family("weightcache_sets", "gauge", ROLE, "Resident sets; more than one while engines still use an older one."),
    Family("weightcache_set_bytes", "gauge", ROLE, "Memory of all resident sets of the role, whoever maps it."),
    Family(
        "weightcache_set_arenas", "gauge", ROLE, "Allocations of all resident sets of the role: one descriptor each."
    ),
    Family("weightcache_set_tensors", "gauge", ROLE, "Tensors in all resident sets of the role."),
    Family("weightcache_set_suspect", "gauge", ROLE, "1 while a set is examined, and given to nobody."),
    Family("weightcache_set_published_timestamp_seconds", "gauge", ROLE, "When the newest set was published."),
    Family("weightcache_set_load_seconds", "gauge", ROLE, "How long its publisher took to load the newest set."),
    Family("weightcache_set_load_bytes", "gauge", ROLE, "What its publisher read from disk for the newest set."),
    Family("weightcache_leases", "gauge", ROLE, "Attached engines."),
    Family("weightcache_orphans", "gauge", RANK, "Engines that still hold memory of sets which were dropped."),
    Family(
        "weightcache_last_lease_timestamp_seconds",
        "gauge",
        RANK,
        "When an engine was last attached: now, or when the last lease ended; if the agent knows of none, its start.",
    ),
    Family(
        "weightcache_attach_duration_seconds",
        "histogram",
        RANK,
        "From an engine's request to its descriptors, where no load was waited for.",
    ),
    Family(
        "weightcache_loads",
        "counter",
        (*RANK, "source", "result"),
        "Loads from disk: by a loader, or by an engine that donates; published, failed or given up.",
    ),
    Family(
        "weightcache_load_duration_seconds",
        "summary",
        (*RANK, "source"),
        "Loads that were published, from begin to end.",
    ),
    Family("weightcache_load_progress_seconds", "gauge", RANK, "How long the load that is under way takes already."),
    Family("weightcache_load_progress_bytes", "gauge", RANK, "What it has loaded."),
    Family("weightcache_load_progress_size_bytes", "gauge", RANK, "What it will have loaded, where that is known."),
    Family("weightcache_events", "counter", (*RANK, "event"), "Events of the journal since the agent started."),
    Family("weightcache_refusals", "counter", (*RANK, "code"), "Requests for weights that were refused, by reason."),
    Family(
        "weightcache_verification_failures",
        "counter",
        (*RANK, "code"),
        "Verifications that failed: the bytes are wrong (damaged), or the check could not run (other).",
    ),
    Family("weightcache_engine_role", "gauge", (*SLOT, "role"), "1 for the role that the slot's engine has."),
    Family(
        "weightcache_engine_restarts", "counter", SLOT, "Engines that the slot's launcher has started again by itself."
    ),
    Family(
        "weightcache_engine_promotions",
        "counter",
        (*SLOT, "cause"),
        "Promotions of the slot's engines since the host was booted: no engine was active since the slots started "
        "(start), the active one died (death), or somebody asked (promote, wake).",
    ),
    Family("weightcache_engine_last_promotion_seconds", "gauge", SLOT, "How long the slot's last promotion took."),
    Family(
        "weightcache_engine_last_promotion_timestamp_seconds",
        "gauge",
        SLOT,
        "When the slot's engine was last promoted.",
    ),
    Family("weightcache_engine_parked", "gauge", ("engine",), "1 while the engine is parked: no slot takes requests."),
)
