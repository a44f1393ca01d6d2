"""One rank's Decision as the operator reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache.launch.console import clean, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.engine.directive import Decision
    from weightcache.fingerprint import Difference

STEPS = ("observe", "connect", "receive", "map", "private", "build", "bind", "collective")
HEADER = ("field", "resident", "engine", "consequence")


def line(decision: Decision) -> str:
    """The sentence about one rank, without the field table."""
    name = f"rank {decision.rank}" + ("" if decision.role in ("", "target") else f" {clean(decision.role)}")
    if decision.outcome in ("attached", "donated"):
        how = "attached" if decision.outcome == "attached" else "loaded from disk and donated"
        return f"{name}: {how} set {_short(decision.set_id)} ({_size(decision)}{_times(decision)})"
    reason = decision.message or decision.code or "no reason given"
    if decision.outcome == "disk":
        return f"{name}: loaded from disk: {reason}"
    if decision.outcome == "refused":
        return f"{name}: refused: {reason}"
    if decision.outcome == "failed":
        return f"{name}: attaching failed after the decision: {reason}"
    if decision.code:
        return f"{name}: would not attach: {reason}"
    which = f" set {_short(decision.set_id)}" if decision.set_id else ""
    return f"{name}: would attach{which}"


def differences(rows: Sequence[Difference]) -> str:
    """The table of differing fields."""
    return table(HEADER, [(row.field, shown(row.cached), shown(row.engine), row.consequence) for row in rows])


def shown(value: str | int) -> str:
    """A fingerprint's value; an empty one is visible."""
    return str(value) if value != "" else "(none)"


def _short(set_id: str) -> str:
    return f"{clean(set_id[:8])}.." if len(set_id) > 10 else clean(set_id)


def _size(decision: Decision) -> str:
    arenas, tensors = _counted(decision.arenas, "arena"), _counted(decision.tensors, "tensor")
    text = f"{tensors}, {decision.mapped_bytes / 1e9:.2f} GB in {arenas}"
    return f"{text}, {decision.private_bytes / 1e6:.1f} MB private" if decision.private_bytes else text


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _times(decision: Decision) -> str:
    steps = decision.milliseconds
    if not steps:
        return ""
    order = [*(name for name in STEPS if name in steps), *sorted(name for name in steps if name not in STEPS)]
    return f", {sum(steps.values()):.0f} ms: " + ", ".join(f"{clean(name)} {steps[name]:.0f}" for name in order)
