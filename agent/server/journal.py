"""The journal: one datagram with fields for each record, and a name for each change. Nothing here waits for it."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO

from weightcache.text import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET = Path("/run/systemd/journal/socket")

CUT_CHARACTERS = 2000
"""What is left of a message that is too long for one datagram."""

Value = str | int | float
Name = Literal[
    "state-changed", "load-began", "load-ended", "set-published", "set-adopted", "set-dropped", "leased", "lease-ended",
    "refused", "suspected", "verified", "verification-failed", "store-emptied", "store-refilled", "store-rejected",
    "drained", "resumed", "stopping", "records-dropped",
]  # fmt: skip

# Operators filter by these and put them into alerts: they never change, and none is used again for something else.
MESSAGE_IDS: Final[Mapping[Name, str]] = {
    "state-changed": "4a7da54f303a474fa79de1f0114dd0d3",  # STATE, PREVIOUS
    "load-began": "05411b978e014281982385602db6d04e",  # SOURCE
    "load-ended": "ebb912070d604e5e93678044ad9ddf65",  # SOURCE, CODE, SECONDS; without a set
    "set-published": "2be8672544554221b80252154fe1e8b3",  # SET, ROLE, MODEL, VERSION, SOURCE, BYTES, ARENAS, SECONDS
    "set-adopted": "eefa92f8abbf45c4956ac395b9a34dea",  # SET, ROLE, MODEL, VERSION, BYTES, ARENAS
    "set-dropped": "104536f41e1548e38977cd9cc3e07098",  # SET, BYTES
    "leased": "e4e6e735fdc24f868d37f93b7ce1f486",  # SET, LEASE, CLIENT_PID, CLIENT_UID, CLIENT_UNIT
    "lease-ended": "1efb50e215994ad18b83a89381eb5032",  # the same
    "refused": "7e79c04280688c47d1de6439536b813e",  # CODE, CLIENT_PID, CLIENT_UID
    "suspected": "6be48b7f369e343af3abd1bf69990e8e",  # SET, REASON
    "verified": "529e465bbbce4946a50f6cb61716394a",  # SET, BYTES, SECONDS
    "verification-failed": "d2f1770b3e254a08ac831aaced400f5b",  # SET, CODE
    "store-emptied": "451ac741e3e24d11818d728740b63d91",
    "store-refilled": "2b7f3393ae984980a871d5dbc467a2d4",
    "store-rejected": "ed361c795d4646cd897ad75aeaababf3",
    "drained": "51fb97bf924a4b1d9faa89223e2a5bd2",  # CLIENT_PID, CLIENT_UID
    "resumed": "a0b8d65249fd446b887e3ea65d2a88ca",  # CLIENT_PID, CLIENT_UID
    "stopping": "d57e8f500f534cb6a65e658c5f29b543",
    "records-dropped": "1987d59b25494a6381443bf3f008d910",
}

_FIELD = re.compile(r"WEIGHTCACHE_[A-Z0-9_]{1,52}")
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
# What journalctl takes for binary data; newlines choose the other form, tabs are harmless.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to the rank, for programs; the record's message says it to people."""

    name: Name
    fields: Mapping[str, Value]

    def __post_init__(self) -> None:
        if bad := [field for field in self.fields if not _FIELD.fullmatch(field)]:
            raise ValueError(f"not names of journal fields: {bad}")


def event(name: Name, /, **fields: Value) -> dict[str, Event]:
    """The ``extra`` of a log call. A field ``set`` becomes WEIGHTCACHE_SET."""
    return {"event": Event(name, {f"WEIGHTCACHE_{field.upper()}": value for field, value in fields.items()})}


class OneLine(logging.Formatter):
    """A record is one line, whatever a client or a loader says in it: with line breaks they could write lines that look
    like the agent's. A traceback has lines of its own.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """The line, with control characters spelled out."""
        return escape(super().formatMessage(record))


class JournalHandler(logging.Handler):
    """Sends records to journald. ``dropped`` counts those that it did not take since the last one that it took."""

    def __init__(self, rank: int, path: Path = SOCKET) -> None:
        super().__init__()
        self.dropped = 0
        self._rank = rank
        self._path = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, and after a gap how long the gap was."""
        dropped = {"WEIGHTCACHE_DROPPED": self.dropped} if self.dropped else {}
        if not self._send(self._fields(record) | dropped):
            self.dropped += 1
        elif self.dropped:
            text = f"{self.dropped} log records were dropped because the journal did not take them"
            notice = {"levelno": logging.WARNING, "msg": text, **event("records-dropped")}
            self.dropped = 0
            self._send(self._fields(logging.makeLogRecord(notice)))

    def close(self) -> None:
        """Close the socket; what is logged later is dropped."""
        self._sock.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> dict[str, Value]:
        try:
            message = self.format(record)
        except Exception as error:  # noqa: BLE001 - a wrong log call; standard error would be the journal's too
            message = f"{record.msg} (its arguments do not fit: {error!r})"
        fields: dict[str, Value] = {
            "MESSAGE": message,
            "PRIORITY": next((number for level, number in _PRIORITIES if record.levelno >= level), 7),
            "SYSLOG_IDENTIFIER": "weightcache",
            "WEIGHTCACHE_RANK": self._rank,
        }
        if isinstance(found := getattr(record, "event", None), Event):
            fields |= {"MESSAGE_ID": MESSAGE_IDS[found.name], "WEIGHTCACHE_EVENT": found.name, **found.fields}
        return fields

    def _send(self, fields: dict[str, Value]) -> bool:
        for message in (fields["MESSAGE"], str(fields["MESSAGE"])[:CUT_CHARACTERS]):
            try:
                # Unconnected: a journald that was restarted is found again by itself.
                self._sock.sendto(encode({**fields, "MESSAGE": message}), self._path)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    break
            else:
                return True
        return False


def encode(fields: Mapping[str, Value]) -> bytes:
    """Fields in journald's native protocol."""
    parts = []
    for name, value in fields.items():
        if "\n" in (text := str(value)):
            data = text.encode("utf-8", "backslashreplace")
            parts.append(b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data))
        else:
            parts.append(f"{name}={_CONTROL.sub('?', text)}\n".encode("utf-8", "backslashreplace"))
    return b"".join(parts)


def chosen_handler(
    rank: int, environment: Mapping[str, str], stderr: TextIO | None, path: Path = SOCKET
) -> logging.Handler:
    """The journal where standard error goes there, else plain lines, as after a redirection (systemd.exec(5))."""
    native = path.is_socket() and environment.get("JOURNAL_STREAM") == _identity(stderr)
    handler = JournalHandler(rank, path) if native else logging.StreamHandler(stderr)
    handler.setFormatter(OneLine(f"rank {rank}: %(message)s"))
    return handler


def _identity(stream: TextIO | None) -> str:
    try:
        found = os.fstat(stream.fileno() if stream else -1)
    except (OSError, ValueError):
        return "closed, or no file"
    return f"{found.st_dev}:{found.st_ino}"
