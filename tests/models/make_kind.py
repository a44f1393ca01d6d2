"""Write the checkpoint of one kind: make_kind KIND OUT."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.models.kinds import KINDS

if __name__ == "__main__":
    KINDS[sys.argv[1]].make(Path(sys.argv[2]))
