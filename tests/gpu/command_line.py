"""What the scripts for many kinds of models have in common on their command lines."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.models.kinds import KINDS


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with --out; one whose ``kinds`` are not all of tests/models/kinds.py ends the program."""
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("LOGS", ".")))
    found = parser.parse_args()
    if unknown := [kind for kind in found.kinds if kind not in KINDS]:
        parser.error(f"no such kind: {' '.join(unknown)}")
    return found
