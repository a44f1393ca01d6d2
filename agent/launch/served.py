"""What the launcher says when its server serves: after how long, and what took the time, or more than before."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from weightcache.starts import comparison, phases, reading

if TYPE_CHECKING:
    from weightcache.engine.directive import Milestone
    from weightcache.starts.recorder import Recorder

RECENT = 10
"""How many of the newest traces are looked at for a start like this one: whoever supervises the server reads them."""


def news(milestone: Milestone, recorder: Recorder) -> list[str]:
    """Lines about a milestone; never raises, since no trace is worth a server."""
    if milestone.name == reading.WARM_UP_TOKEN:  # the line about serving says when it came
        return []
    try:
        return _news(milestone, recorder)
    except Exception:  # noqa: BLE001  a trace is data of other processes, and this one supervises a server
        return []


def _news(milestone: Milestone, recorder: Recorder) -> list[str]:
    seconds = milestone.at - recorder.began
    start = reading.read(recorder.path.parent, recorder.number) if recorder.path else None
    if milestone.name == reading.FIRST_TOKEN:
        # With a warm-up this is when somebody asked for the first time, which says nothing about the start.
        warm = start is not None and start.point(reading.WARM_UP_TOKEN) is not None
        return [] if warm else [f"first token after {seconds:.1f} s"]
    if start is None or not (sentence := phases.sentence(start)):
        return [f"serving after {seconds:.1f} s"]
    lines = [sentence]
    recent = itertools.islice(reading.newest_first(recorder.path.parent), RECENT) if recorder.path else ()
    before = comparison.previous(start, recent)
    if before is not None and (slower := comparison.sentence(start, before)):
        lines.append(f"{slower}; `wcache starts show {start.number}` draws it")
    return lines
