"""Complete sets for tests of the descriptor store, as loads make them."""

from __future__ import annotations

import secrets

from tests.support import test_loader
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
        record = Record(RECORD_SCHEMA, set_id, version, "loader", at, "host", "", ids, made.info)
        sets.append(Complete(record, made.fds))
    return tuple(sets)


def names(*sets: Complete) -> list[str]:
    """What is stored of them."""
    parts = [(s.record.id, part) for s in sets for part in ("record", *range(len(s.fds)))]
    return sorted(f"{set_id}.{part}" for set_id, part in parts)


def close(*sets: Complete) -> None:
    """Close the sets' descriptors."""
    for complete in sets:
        close_all(complete.fds)
