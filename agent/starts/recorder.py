"""The launcher's side of a trace: it makes the file, and says what only it knows."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Self

from weightcache import __version__
from weightcache.starts import folder
from weightcache.starts.record import SCHEMA, Header, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

OUTCOMES = ("attached", "donated", "disk", "refused", "failed")
"""How a rank got its weights, as points of these names."""


class Recorder:
    """Records one start; use it as a context manager. A trace that cannot be made costs one sentence, ``problem``."""

    def __init__(
        self, path: Path | None = None, writer: Writer | None = None, began: float | None = None, problem: str = ""
    ) -> None:
        self.path = path
        self.began = time.monotonic() if began is None else began
        self.problem = problem
        self._writer = writer or Writer()

    @classmethod
    def open(cls, model: str, arguments: Sequence[str], levers: Sequence[str], began: float | None = None) -> Self:
        """Begin a trace. ``began``, on CLOCK_MONOTONIC, is what the start is counted from: now, if None."""
        now = time.monotonic()
        began = now if began is None else min(began, now)
        try:
            where = folder.directory()
            path, fd = folder.create(where)
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            named = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
            return cls(began=began, problem=f"this start leaves no trace: {named}")
        writer = Writer(fd)
        epoch = time.time() - (now - began)
        writer.write(Header(SCHEMA, round(began, 6), epoch, model, tuple(arguments), tuple(levers), __version__))
        if not writer.works:
            with contextlib.suppress(OSError):
                path.unlink()
            return cls(began=began, problem=f"this start leaves no trace: {where} takes no more (is the disk full?)")
        folder.prune(where)
        return cls(path, writer, began)

    @property
    def trace(self) -> str:
        """The file that the engine's processes append to; empty if there is none."""
        return os.fspath(self.path) if self.path else ""

    @property
    def number(self) -> int:
        """Which start this is; 0 if there is no trace."""
        return int(self.path.stem) if self.path else 0

    def attempt(self) -> None:
        """The server is started now; again, if it was started before."""
        self._writer.mark("point", "attempt")

    def weights(self, rank: int, role: str, outcome: str, milliseconds: Mapping[str, float] | None) -> None:
        """How one rank got its weights, with the steps that were timed."""
        if outcome in OUTCOMES:
            self._writer.mark("point", outcome, rank=rank, how=role, facts=milliseconds)

    def ended(self, status: int) -> None:
        """The server ended: exit status, or minus the number of a signal."""
        self._writer.mark("point", "ended", facts={"status": status})

    def close(self) -> None:
        """Let go of the trace: whoever reads it sees that its launcher is gone."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
