"""The server's main process: what the launcher does with it, and how one is started that was not there before."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from weightcache.errors import NoRoom, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.ELOOP, errno.ENAMETOOLONG)


class Child(Protocol):
    """The server's main process, a child of this one; the face of subprocess.Popen."""

    @property
    def pid(self) -> int:
        """Its number, valid until ``wait`` returned."""

    def poll(self) -> int | None:
        """Its exit status, or minus the signal's number; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has ended. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""


Starter = Callable[["Sequence[str]", "Mapping[str, str]", Callable[[], None]], Child]
"""Starts a command under an environment; the last argument has to run in the child before the command does."""


def fresh(command: Sequence[str], environment: Mapping[str, str], setup: Callable[[], None]) -> Child:
    """Start ``command`` as a new process. Raises UsageError, or NoRoom for what may pass by itself."""
    try:
        return subprocess.Popen(command, env=dict(environment), preexec_fn=setup)
    except OSError as error:
        kind = UsageError if error.errno in _NOT_THERE else NoRoom
        raise kind(f"{command[0]} cannot be started ({error.strerror})") from None
    except subprocess.SubprocessError:
        raise NoRoom(f"{command[0]} cannot be started") from None
