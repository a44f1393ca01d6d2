"""Real engines under real launchers, and clients that open a connection for each request."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine import support
from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import engine_variables
from tests.unit.launch.support import alive, eventually
from tests.unit.slots.support import Slots

START_SECONDS = 240.0


@dataclass
class RealSlots(Slots):
    """An engine of two slots, with SGLang."""

    model: Path = Path()
    hang_seconds: float = 60.0

    def arguments(self) -> list[str]:
        return ["--model-path", str(self.model), *CPU_ARGUMENTS, *support.ARGUMENTS]

    def environment(self) -> dict[str, str]:
        return {**engine_variables(), **support.VARIABLES}

    def say(self) -> str:
        """What the launchers said: SGLang's own log is long."""
        return "\n".join(f"{slot}: {self.role(slot)}: {self.lines(slot)}" for slot in self.launchers)

    def close(self) -> None:
        found = [status for slot in "ab" if (status := self.status(slot)) is not None]
        super().close()
        pids = [one.pid for status in found for one in (status.main, *status.ranks) if one is not None]
        assert eventually(lambda: not any(alive(pid) for pid in pids), 60)


@dataclass
class Asking:
    """A client that asks for a few tokens again and again, on a new connection each time.

    ``seconds``: how long it waits for an answer.
    """

    address: tuple[str, int]
    seconds: float = 60.0
    answered: list[tuple[float, float]] = field(default_factory=list)
    """When the connection was begun, and when the answer was there."""
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _sock: socket.socket | None = None

    def run(self) -> None:
        body = json.dumps({"text": "Once", "sampling_params": {"max_new_tokens": 2, "temperature": 0}})
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                self._sock = sock = socket.create_connection(self.address, self.seconds)
            except OSError as error:
                self.refused.append(str(error))
                continue
            connection = http.client.HTTPConnection(*self.address, timeout=self.seconds)
            connection.sock = sock
            try:
                with contextlib.closing(connection):
                    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    text = response.read()
                    assert response.status == 200, (response.status, text)
                self.answered.append((began, time.monotonic()))
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failed.append((began, time.monotonic(), repr(error)))

    def give_up(self) -> None:
        """Wait for no answer any more."""
        self.stop.set()
        with contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def asking(slots: Slots, seconds: float = 60.0) -> Iterator[Asking]:
    client = Asking(slots.address, seconds)
    thread = threading.Thread(target=client.run)
    thread.start()
    try:
        yield client
    except BaseException:
        client.give_up()  # nobody may be there who would answer
        raise
    finally:
        client.stop.set()
        thread.join(seconds + 30)
