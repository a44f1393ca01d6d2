"""What a set holds, as one digest: two sets with equal ones are the same weights, whatever load each came from.

It covers every byte of the arenas (by their digests), the manifest, and the fingerprint, and nothing of how the set
came to be, such as the time that a load took.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from weightcache import records

if TYPE_CHECKING:
    from weightcache.status import SetInfo

DIGITS = 32


def content_of(info: SetInfo, manifest: bytes) -> str:
    """DIGITS hex digits for a set; ``manifest`` is what its memory file holds."""
    arenas = [[arena.used, arena.digest] for arena in info.arenas]
    parts = [info.role, records.to_plain(info.fingerprint), hashlib.sha256(manifest).hexdigest(), arenas]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGITS]
