"""Who gets how many lines of the screen."""

from __future__ import annotations

from collections.abc import Mapping

LEAST = 2
"""A heading and a row."""


def share(room: int, wants: Mapping[str, int], focused: str) -> dict[str, int]:
    """Lines for each part of the screen, 0 for those that have to go; ``wants`` is in the order of importance.

    The part in focus comes first, so that Tab also is the way to see all of a long table; the last one gets the rest.
    """
    order = sorted(wants, key=lambda name: name != focused)
    given = dict.fromkeys(wants, 0)
    for name in order:
        least = min(wants[name], LEAST)
        if room >= least:
            given[name] = least
            room -= least
    # Half of what is left for the part in focus, the rest by importance; what never has enough comes last.
    focus, last = order[0], list(wants)[-1]
    others = [(name, room) for name in wants if name != last]
    for name, most in [(focus, room // 2), *others, (focus, room), (last, room)]:
        more = min(wants[name] - given[name], most, room) if given[name] else 0
        given[name] += more
        room -= more
    if shown := [name for name in wants if given[name]]:
        given[shown[-1]] += room
    return given
