"""The README's table of what is supported is made from the evidence, and from nothing else.

WEIGHTCACHE_UPDATE_DOCS=1 writes it anew.
"""

from __future__ import annotations

import os

from tests.support.environments import REPOSITORY
from weightcache.engine import evidence

README = REPOSITORY / "README.md"
BEGIN = "<!-- made from agent/engine/evidence.toml -->\n"
END = "<!-- end -->\n"
PROOFS = {"parity": "✓ bit by bit", "tokens": "equal greedy tokens"}


def table() -> str:
    rows = ["| method | device | proof | run |", "|---|---|---|---|"]
    for proof in evidence.packaged():
        devices = {"": "CPU", "*": "any GPU"}
        device = devices.get(proof.capability, f"compute capability {proof.capability}")
        name, _, switches = proof.method.partition("(")  # of which package it is, the file says
        method = f"{name.rpartition('.')[2]}({switches}"
        rows.append(f"| `{method}` | {device} | {PROOFS[proof.proof]} | {proof.run} |")
    return "\n".join(rows) + "\n"


def test_the_readme_shows_the_evidence() -> None:
    text = README.read_text()
    before, begin, rest = text.partition(BEGIN)
    shown, end, after = rest.partition(END)
    assert begin
    assert end
    if os.environ.get("WEIGHTCACHE_UPDATE_DOCS"):
        README.write_text(before + begin + table() + end + after)
    else:
        assert shown == table()
