"""What `wcache doctor` prints: one finding a line. The loader's `doctor --json` prints the same shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject`` was looked at, ``text`` was found, ``advice`` is what to do about it (empty: nothing)."""

    status: Literal["ok", "problem", "note"]
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, text)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Something will not work."""
    return Finding("problem", subject, text, advice)


def note(subject: str, text: str, advice: str = "") -> Finding:
    """Worth knowing, and no obstacle by itself."""
    return Finding("note", subject, text, advice)
