"""What the descriptor store hands back to a new agent: complete sets, by name, and the rest, which is removed.

The order of the descriptors means nothing (systemd hands them out reversed). A set counts if its record can be read,
every descriptor that the record names is there, and no other set of its commit has descriptors but no record: that, and
only that, is a commit that a crash tore while it was being stored. A set of which nothing is there was evicted; a set
whose record is there and descriptors are missing was being evicted, or stored again. Both concern no other set. See
``fdstore`` for the order of messages that this rests on.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightcache import manifest, records
from weightcache.errors import ProtocolError
from weightcache.memory import memfd
from weightcache.server.app import RECORD_SCHEMA
from weightcache.server.fdstore import CANARY, RECORD
from weightcache.server.sets import Complete, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("weightcache")

MAX_RECORD = 1 << 20


class Adopted(NamedTuple):
    """A complete set, and the descriptor of its record."""

    complete: Complete
    record_fd: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """Complete sets, oldest first; descriptors of no use, for the caller to close; names to remove from the store.

    Removed in this order, what is left after any of them is sorted out in the same way.
    """

    sets: tuple[Adopted, ...]
    fds: tuple[int, ...]
    names: tuple[str, ...]


def sort_out(stored: Sequence[tuple[str, int]]) -> Adoption:
    """Sort what came from the store. Reads records and sizes; maps nothing."""
    # A name may come twice, where a store that was filled again did not recognize a descriptor: they mean the same.
    named = dict(reversed(stored))
    found: dict[str, Adopted] = {}
    for name, fd in named.items():
        set_id, dot, part = name.rpartition(".")
        if dot and part == RECORD:
            try:
                found[set_id] = Adopted(_complete(set_id, named), fd)
            except (ProtocolError, ValueError, OSError, RecursionError) as error:
                log.warning("set %.40s in the descriptor store is not complete and is removed: %s", set_id, error)
    parts = [name.rpartition(".") for name in named]
    bare = {set_id for set_id, _, _ in parts} - {set_id for set_id, _, part in parts if part == RECORD}
    torn = {set_id for set_id, adopted in found.items() if bare.intersection(adopted.complete.record.companions)}
    sets = [adopted for set_id, adopted in found.items() if set_id not in torn]
    used = {fd for adopted in sets for fd in (*adopted.complete.fds, adopted.record_fd)}
    keep = {f"{c.record.id}.{part}" for c, _ in sets for part in (RECORD, *range(len(c.fds)))}
    # First what makes the sets of torn commits look whole, last what says that the others are not.
    first = {f"{set_id}.{RECORD}" for set_id in torn}
    useless = sorted(named.keys() - keep, key=lambda name: (name not in first, name.endswith(f".{RECORD}"), name))
    # Canaries come and go.
    if told := ", ".join(name[:40] for name in sorted(useless) if not name.startswith(CANARY)):
        log.warning("closing descriptors that belong to no complete set: %s", told)
    return Adoption(
        sets=tuple(sorted(sets, key=lambda a: (a.complete.record.published_at, _place(a.complete.record)))),
        fds=tuple(fd for _, fd in stored if fd not in used),
        names=tuple(useless),
    )


def _place(record: Record) -> int:
    return [*record.companions, record.id].index(record.id)


def _complete(set_id: str, named: dict[str, int]) -> Complete:
    text = memfd.read_sealed(named[f"{set_id}.{RECORD}"], MAX_RECORD)
    body = json.loads(text)
    schema = body.get("schema") if isinstance(body, dict) else None
    if schema != RECORD_SCHEMA:
        raise ProtocolError(f"its record has schema {str(schema)[:40]}, this version reads {RECORD_SCHEMA}")
    record = records.from_plain(Record, body)
    if (made := record.info.fingerprint.schema) != manifest.SCHEMA:
        # No engine of this version would take it, and nothing could be loaded beside it.
        raise ProtocolError(f"its manifest has schema {made}, engines of this version read {manifest.SCHEMA}")
    if record.id != set_id:
        raise ProtocolError(f"its record belongs to set {record.id[:40]}")
    names = [f"{set_id}.{number}" for number in range(1 + len(record.info.arenas))]
    if missing := [name for name in names if name not in named]:
        raise ProtocolError(f"{len(missing)} of {len(names)} descriptors are missing")
    complete = Complete(record, tuple(named[name] for name in names))
    _check_memory(complete)
    return complete


def _check_memory(complete: Complete) -> None:
    if not memfd.is_sealed(complete.fds[0]):
        raise ProtocolError("its manifest is no sealed memory file")
    if complete.record.backend != "host":
        return  # device memory is opaque here; the verification tells
    for number, (fd, arena) in enumerate(zip(complete.fds[1:], complete.record.info.arenas, strict=True)):
        if not memfd.is_sealed(fd) or os.fstat(fd).st_size != arena.bytes:
            raise ProtocolError(f"arena {number} is no sealed memory file of {arena.bytes} bytes")
