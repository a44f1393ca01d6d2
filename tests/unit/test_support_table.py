"""The README's table of what is supported is made from the evidence, and from nothing else.

WEIGHTCACHE_UPDATE_DOCS=1 writes it anew.
"""

from __future__ import annotations

import os
import re

from tests.support.environments import REPOSITORY
from weightcache.engine import evidence

README = REPOSITORY / "README.md"
BEGIN = "<!-- made from agent/engine/evidence.toml -->\n"
END = "<!-- end -->\n"
PROOFS = {"parity": "✓ bit by bit", "tokens": "equal greedy tokens"}

_OFF = re.compile(r"\w+=False(, )?")
_PACKAGE = re.compile(r"\b(?:[a-z]\w*\.)+(?=[\w*])")
_LITERAL = re.compile(r"\[(\W)\]")
_DEPTH = 2


def in_short(method: str) -> str:
    """A pattern for people: what is on, without packages and without what parts are made of. The file has all of it."""
    text = _LITERAL.sub(r"\1", _PACKAGE.sub("", _OFF.sub("", method))).replace(", )", ")")
    shown, depth = [], 0
    for part in re.split(r"([()])", text):
        depth += part == "("
        if depth <= _DEPTH:
            shown.append(part)
        elif depth == _DEPTH + 1:
            shown.append({"(": "(..", ")": ")"}.get(part, ""))
        depth -= part == ")"
    return "".join(shown)


def table() -> str:
    rows = ["| method | SGLang | device | proof | run |", "|---|---|---|---|---|"]
    for proof in evidence.packaged():
        devices = {"": "CPU", "*": "any GPU"}
        device = devices.get(proof.capability, f"compute capability {proof.capability}")
        versions = "any" if proof.sglang == "*" else proof.sglang.replace(" ", ", ")
        rows.append(f"| `{in_short(proof.method)}` | {versions} | {device} | {PROOFS[proof.proof]} | {proof.run} |")
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
