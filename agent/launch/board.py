"""What a slot says of itself: its status file, written when something changes, and one line for the service manager."""

from __future__ import annotations

import contextlib
import os
import time
import typing
from dataclasses import replace
from typing import TYPE_CHECKING

from weightcache.errors import WeightcacheError
from weightcache.launch.console import say
from weightcache.standby import status
from weightcache.standby.places import SlotName

if TYPE_CHECKING:
    from pathlib import Path

    from weightcache.standby.messages import Process, Role
    from weightcache.standby.status import Promotion, SlotStatus


CAUSES = typing.get_args(status.Cause)
AGAIN_SECONDS = 1.0
"""Between two tries to write what could not be written."""


class Board:
    """Keeps the status of one slot; it begins with ``initial``, and with the promotions that the file knows of.

    A launcher without descriptors has something to say: one is kept to write the file with, until ``close``.
    """

    def __init__(self, path: Path, initial: SlotStatus) -> None:
        before, _ = status.read(path)
        self._path = path
        self._engines = 0
        self._shown = False
        self._written: SlotStatus | None = None
        self._again_at = 0.0
        self._complained = False
        self._spare: int | None = None
        self.status = initial
        if before:
            # Whatever else is in that file, what is carried over stays small from one launcher to the next.
            promotions = before.promotions[-status.MOST_PROMOTIONS :]
            promoted = {cause: count for cause in CAUSES if (count := before.promoted.get(cause, 0)) > 0}
            self.status = replace(initial, promotions=promotions, promoted=promoted)
        self.problem = ""

    def engine_starts(self) -> None:
        """Another engine."""
        self._engines += 1

    def promoted(self, promotion: Promotion) -> None:
        """It became the active one."""
        promotions = (*self.status.promotions, promotion)[-status.MOST_PROMOTIONS :]
        promoted = self.status.promoted | {promotion.cause: self.status.promoted.get(promotion.cause, 0) + 1}
        self.status = replace(self.status, promotions=promotions, promoted=promoted)

    def predecessor(self, mine: bool) -> str:
        """Whose engine was elected before: one of this slot (``mine``), or of the other one."""
        name = SlotName(self.status.engine, self.status.slot)
        return f"{name}'s last engine" if mine else f"{name.other}"

    def show(self, role: Role, main: Process | None, ranks: tuple[Process, ...]) -> str:
        """Write down how it stands; one line about it."""
        since = self.status.since if role == self.status.role and self._shown else time.time()
        if role != self.status.role:
            self._again_at = 0.0
        self._shown = True
        self.status = replace(
            self.status,
            role=role,
            since=since,
            main=main,
            ranks=ranks,
            restarts=max(self._engines - 1, 0),
            problem=self.problem,
        )
        if self.status != self._written and time.monotonic() >= self._again_at:
            self._write()
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        line = f"active since {when}" if role == "active" else role
        return f"{line} ({self.problem})" if self.problem and role == "starting" else line

    def _write(self) -> None:
        self.close()
        try:
            status.write(self._path, self.status)
        except WeightcacheError as error:
            self._again_at = time.monotonic() + AGAIN_SECONDS
            if not self._complained:  # a full disk must not end an engine, nor fill a log
                say(error.message)
            self._complained = True
        else:
            self._written = self.status
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give up the descriptor that is kept."""
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
