"""Complete sets for tests of the descriptor store, as loads make them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from tests.support import test_loader
from weightcache import records
from weightcache.memory import memfd
from weightcache.server import adopt
from weightcache.server.app import RECORD_SCHEMA
from weightcache.server.sets import Complete, Record
from weightcache.transport import close_all

ARENA_BYTES = 512


def commit(*arenas: int, at: float = 1.0, version: int = 1) -> tuple[Complete, ...]:
    """The sets of one load, each with this many arenas: a target, and drafts. The descriptors are the caller's."""
    ids = tuple(secrets.token_hex(6) for _ in arenas)
    sets = []
    for number, (set_id, count) in enumerate(zip(ids, arenas, strict=True)):
        role = f"draft-{number}" if number else "target"
        made = test_loader.make(test_loader.fingerprint(role=role), (ARENA_BYTES,) * count, seed=number)
        record = Record(RECORD_SCHEMA, set_id, version, "loader", at, "host", "", ids, "a-group", made.info)
        sets.append(Complete(record, made.fds))
    return tuple(sets)


def names(*sets: Complete) -> list[str]:
    """What is stored of them."""
    parts = [(s.record.id, part) for s in sets for part in ("record", *range(len(s.fds)))]
    return sorted(f"{set_id}.{part}" for set_id, part in parts)


def record_text(complete: Complete, **changes: object) -> bytes:
    """A set's record, with fields that differ."""
    return json.dumps(records.to_plain(complete.record) | changes).encode()


def entries(*sets: Complete) -> list[tuple[str, int]]:
    """What is stored of them, with descriptors of its own for the records, which are the caller's."""
    found = []
    for complete in sets:
        set_id = complete.record.id
        found += [(f"{set_id}.{number}", fd) for number, fd in enumerate(complete.fds)]
        found.append((f"{set_id}.record", memfd.sealed("record", record_text(complete))))
    return found


def adopted(stored: Sequence[tuple[str, int]]) -> frozenset[str]:
    """The sets that the next agent adopts; and so does the one after it, whenever it is killed while it tidies up."""
    found = adopt.sort_out(stored)
    for removed in range(len(found.names) + 1):
        left = [entry for entry in stored if entry[0] not in found.names[:removed]]
        assert [a.complete for a in adopt.sort_out(left).sets] == [a.complete for a in found.sets], (stored, removed)
    return frozenset(a.complete.record.id for a in found.sets)


def close(*sets: Complete) -> None:
    """Close the sets' descriptors."""
    for complete in sets:
        close_all(complete.fds)
