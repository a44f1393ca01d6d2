"""``python -m tests.models smollm2``, ``... tiny [FAMILY [OPTION...]]`` or ``... kind NAME``: prints the folder."""

import sys
from collections.abc import Callable
from pathlib import Path

from tests import models

MAKERS: dict[str, Callable[..., Path]] = {"smollm2": models.smollm2, "tiny": models.tiny, "kind": models.kind}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MAKERS:
        sys.exit(__doc__)
    print(MAKERS[sys.argv[1]](*sys.argv[2:]))
