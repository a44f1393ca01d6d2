"""A program in a real terminal: tmux draws it, keys are sent to it, its screen is read as text."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

SECONDS = 30.0

KEEP_STATUS = 'trap : INT; "$@"; echo $? > "$0.new"; mv "$0.new" "$0"'
"""For sh: leave a command's exit status in a file. tmux 3.3a often does not reap a command, and never tells then."""


class Terminal:
    """One window of a tmux server of its own."""

    def __init__(self, socket: Path, status: Path) -> None:
        self._socket = socket
        self._status = status

    def tmux(self, *arguments: str) -> str:
        """Run a command of this server."""
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments]
        # Not the process's own environment: there, readline (which pytest imports) has set COLUMNS and LINES.
        known = dict(os.environ)
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=known)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def screen(self) -> str:
        """The characters that are on the screen now."""
        return self.tmux("capture-pane", "-p", "-t", "0")

    def press(self, *keys: str) -> None:
        """Send keys, by tmux's names."""
        self.tmux("send-keys", "-t", "0", *keys)

    def resize(self, columns: int, lines: int) -> None:
        """Make the window another size."""
        self.tmux("resize-window", "-t", "0", "-x", str(columns), "-y", str(lines))

    def status(self, seconds: float = SECONDS) -> int:
        """Wait until the command has ended; its exit status."""
        deadline = time.monotonic() + seconds
        while not self._status.exists():
            if time.monotonic() > deadline:
                raise AssertionError(f"the command has not ended after {seconds:g} s:\n{self.screen()}")
            time.sleep(0.1)
        return int(self._status.read_text())

    def lacks(self, word: str, seconds: float = SECONDS) -> str:
        """Wait until ``word`` is not on the screen any more and return it."""
        deadline = time.monotonic() + seconds
        while word in (seen := self.screen()):
            if time.monotonic() > deadline:
                raise AssertionError(f"still on the screen after {seconds:g} s: {word}\n{seen}")
            time.sleep(0.1)
        return seen

    def shows(self, *words: str, seconds: float = SECONDS) -> str:
        """Wait until all ``words`` are on the screen and return it."""
        deadline = time.monotonic() + seconds
        while not all(word in (seen := self.screen()) for word in words):
            if time.monotonic() > deadline:
                raise AssertionError(f"not on the screen after {seconds:g} s: {words}\n{seen}")
            time.sleep(0.1)
        return seen


@contextlib.contextmanager
def terminal(
    command: Sequence[str | Path], columns: int, lines: int, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """``command`` in a terminal of that size; the window stays when the command ends."""
    if shutil.which("tmux") is None:
        if os.environ.get("CI"):
            pytest.fail("tmux is missing (apt install tmux)", pytrace=False)
        pytest.skip("needs tmux (apt install tmux)")
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    window = Terminal(folder / "tmux", folder / "status")
    settings = [word for name, value in (environment or {}).items() for word in ("-e", f"{name}={value}")]
    try:
        size = ("-x", str(columns), "-y", str(lines))
        window.tmux("new-session", "-d", *size, *settings, "sleep 600")
        window.tmux("set-option", "-g", "remain-on-exit", "on")
        kept = ["sh", "-c", KEEP_STATUS, str(folder / "status"), *map(str, command)]
        window.tmux("respawn-pane", "-k", "-t", "0", *settings, *kept)
        yield window
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            window.tmux("kill-server")
        shutil.rmtree(folder, ignore_errors=True)
