"""The journal's native protocol: what arrives, and that nothing waits."""

from __future__ import annotations

import logging
import re
import resource
import socket
import statistics
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcache.server import journal
from weightcache.server.journal import Event, JournalHandler, Name, chosen_handler, event

Fields = dict[str, str]

NAME = re.compile(rb"[A-Z][A-Z0-9_]{0,63}")


def parse(datagram: bytes) -> Fields:
    """Read one entry as journald's protocol has it, and stricter: no repeated name, nothing unprintable as text."""
    fields: Fields = {}
    while datagram:
        line, newline, rest = datagram.partition(b"\n")
        assert newline, line
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, end, datagram = rest[8 : 8 + size], rest[8 + size : 9 + size], rest[9 + size :]
            assert len(value) == size
            assert end == b"\n"
            assert b"\n" in value, "the binary form is for newlines"
        else:
            datagram = rest
        assert NAME.fullmatch(name), name
        text = value.decode()
        assert not equals or not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), value
        assert name.decode() not in fields
        fields[name.decode()] = text
    return fields


class Journald:
    """A socket as journald has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self._sock.setblocking(False)

    def receive(self) -> Fields:
        """The next entry. Raises BlockingIOError."""
        return parse(self._sock.recv(1 << 20))

    def entries(self) -> list[Fields]:
        """Everything that has arrived."""
        found = []
        while True:
            try:
                found.append(self.receive())
            except BlockingIOError:
                return found

    def entry(self) -> Fields:
        """The only entry that has arrived."""
        (found,) = self.entries()
        return found

    def close(self) -> None:
        """End it as a crash does: the path stays."""
        self._sock.close()


@pytest.fixture
def journald(runtime_dir: Path) -> Iterator[Journald]:
    found = Journald(runtime_dir / "socket")
    yield found
    found.close()


@pytest.fixture
def handler(runtime_dir: Path) -> Iterator[JournalHandler]:
    """A handler for the socket of ``journald``, whether there is one or not."""
    found = JournalHandler(3, runtime_dir / "socket")
    yield found
    found.close()


@pytest.fixture
def log(handler: JournalHandler) -> Iterator[logging.Logger]:
    found = logging.getLogger("test_journal")
    found.addHandler(handler)
    found.setLevel(logging.DEBUG)
    found.propagate = False
    yield found
    found.removeHandler(handler)


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    """A record for a handler that no logger knows."""
    return logging.makeLogRecord({"levelno": logging.INFO, "msg": message, "args": args, **extra})


def too_large() -> int:
    """More bytes than any datagram of this machine may have."""
    return int(Path("/proc/sys/net/core/wmem_default").read_text()) + 1


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_a_plain_record(journald: Journald, log: logging.Logger) -> None:
    log.info("serving at %s", "/run/x")
    assert journald.entry() == {
        "MESSAGE": "serving at /run/x",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "weightcache",
        "WEIGHTCACHE_RANK": "3",
    }


def test_an_event(journald: Journald, log: logging.Logger) -> None:
    log.warning("set dropped", extra=event("set-dropped", set="0123456789ab", bytes=1 << 40, seconds=1.5))
    found = journald.entry()
    assert found["PRIORITY"] == "4"
    assert found["MESSAGE_ID"] == journal.MESSAGE_IDS["set-dropped"]
    assert {name: value for name, value in found.items() if name.startswith("WEIGHTCACHE_")} == {
        "WEIGHTCACHE_RANK": "3",
        "WEIGHTCACHE_EVENT": "set-dropped",
        "WEIGHTCACHE_SET": "0123456789ab",
        "WEIGHTCACHE_BYTES": "1099511627776",
        "WEIGHTCACHE_SECONDS": "1.5",
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.DEBUG, "7"),
        (logging.INFO, "6"),
        (logging.INFO + 5, "6"),
        (logging.WARNING, "4"),
        (logging.ERROR, "3"),
        (logging.CRITICAL, "2"),
        (logging.CRITICAL + 5, "2"),
    ],
)
def test_priorities(journald: Journald, log: logging.Logger, level: int, priority: str) -> None:
    log.log(level, "x")
    assert journald.entry()["PRIORITY"] == priority


def test_every_event_arrives(journald: Journald, log: logging.Logger) -> None:
    for name in journal.MESSAGE_IDS:
        log.info("x", extra=event(name))
        found = journald.entry()
        assert (found["WEIGHTCACHE_EVENT"], found["MESSAGE_ID"]) == (name, journal.MESSAGE_IDS[name])


@pytest.mark.parametrize("value", ["a\nb", "\n", "\n\n\n", "a\nB=1\n", "a\n\x1b[0m\0", "é\n\U0001f600"])
def test_newlines_take_the_binary_form(journald: Journald, log: logging.Logger, value: str) -> None:
    log.info("%s", value, extra=event("set-published", model=value))
    found = journald.entry()
    assert found["MESSAGE"] == found["WEIGHTCACHE_MODEL"] == value


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/Größe-模型-\U0001f600", "/models/Größe-模型-\U0001f600"),
        ("/models/a=b\tc", "/models/a=b\tc"),
        ("/models/\x1b[31mred\x07\x7f\x00\r", "/models/?[31mred????"),
        ("/models/\x85\x9b", "/models/??"),
        ("/models/\udcff", "/models/\\udcff"),  # a name that is no UTF-8, as os.fsdecode gives it
        ("/models/\udcff\n", "/models/\\udcff\n"),
        ("", ""),
    ],
)
def test_unusual_model_paths(journald: Journald, log: logging.Logger, path: str, expected: str) -> None:
    log.info("published %s", path, extra=event("set-published", model=path))
    found = journald.entry()
    assert found["WEIGHTCACHE_MODEL"] == expected
    assert found["MESSAGE"] == f"published {expected}"


def test_exceptions_are_part_of_the_message(journald: Journald, log: logging.Logger) -> None:
    try:
        raise OSError("the reason")
    except OSError:
        log.exception("internal error")
    first, *rest = journald.entry()["MESSAGE"].splitlines()
    assert first == "internal error"
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "OSError: the reason"


def test_a_wrong_log_call_is_no_error(
    journald: Journald, handler: JournalHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    handler.handle(record("set %s dropped: %d bytes", "abc"))
    assert journald.entry()["MESSAGE"].startswith("set %s dropped: %d bytes (its arguments do not fit: TypeError(")
    assert capsys.readouterr().err == ""


# -- large records -----------------------------------------------------------------------------------------------------


def test_a_long_message_arrives_whole(journald: Journald, log: logging.Logger) -> None:
    for text in ("x" * 100_000, "x\n" * 50_000):
        log.info("%s", text)
        assert journald.entry()["MESSAGE"] == text


def test_a_message_that_is_too_long_is_cut(journald: Journald, log: logging.Logger, handler: JournalHandler) -> None:
    log.info("é%s", "x" * too_large(), extra=event("load-ended", code="load-failed"))
    found = journald.entry()
    assert found["MESSAGE"] == "é" + 1999 * "x"
    assert found["WEIGHTCACHE_CODE"] == "load-failed"
    assert handler.dropped == 0


def test_a_record_that_stays_too_long_is_dropped(
    journald: Journald, log: logging.Logger, handler: JournalHandler
) -> None:
    log.info("x", extra=event("load-ended", code="x" * too_large()))
    assert journald.entries() == []
    assert handler.dropped == 1


# -- a journal that does not take them ---------------------------------------------------------------------------------


def check_the_gap(journald: Journald, log: logging.Logger, dropped: int) -> None:
    """After a gap: one record with the count, one sentence, and then as ever."""
    log.error("back", extra=event("resumed"))
    back, notice = journald.entries()
    assert back["MESSAGE"] == "back"
    assert back["WEIGHTCACHE_EVENT"] == "resumed"
    assert back["WEIGHTCACHE_DROPPED"] == str(dropped)
    assert notice == {
        "MESSAGE": f"{dropped} log records were dropped because the journal did not take them",
        "MESSAGE_ID": journal.MESSAGE_IDS["records-dropped"],
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "weightcache",
        "WEIGHTCACHE_RANK": "3",
        "WEIGHTCACHE_EVENT": "records-dropped",
    }
    log.info("more")
    assert "WEIGHTCACHE_DROPPED" not in journald.entry()


def waited() -> int:
    """How often this thread gave up the processor because it had to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_stalled_journal_holds_nothing_up(
    journald: Journald, log: logging.Logger, handler: JournalHandler, size: int
) -> None:
    taken = 0
    while not handler.dropped:
        log.info("x" * size)
        taken += 1
    taken -= 1
    durations, waits = [], waited()
    for _ in range(1000):
        before = time.thread_time()
        log.info("x" * size, extra=event("set-dropped", set="0123456789ab", bytes=1))
        durations.append(time.thread_time() - before)
    # Neither depends on how busy the machine is: whoever waits gives the processor away, however shortly.
    assert waited() - waits < 10
    assert statistics.median(durations) < 0.001
    assert sorted(durations)[-10] < 0.005
    assert handler.dropped == 1001
    assert len(journald.entries()) == taken
    check_the_gap(journald, log, 1001)


def test_only_room_for_the_record_itself(journald: Journald, log: logging.Logger, handler: JournalHandler) -> None:
    """The count travels with the record, so the sentence may be lost."""
    while not handler.dropped:
        log.info("x")
    one = journald.receive()
    log.info("last")
    assert handler.dropped == 0
    found = [one, *journald.entries()]
    assert [f["MESSAGE"] for f in found if "WEIGHTCACHE_DROPPED" in f] == ["last"]
    assert found[-1]["MESSAGE"] == "last"


def test_no_socket_and_then_one(runtime_dir: Path, log: logging.Logger, handler: JournalHandler) -> None:
    for _ in range(3):
        log.info("x")
    assert handler.dropped == 3
    journald = Journald(runtime_dir / "socket")
    check_the_gap(journald, log, 3)
    journald.close()


def test_a_journal_that_is_restarted(runtime_dir: Path, log: logging.Logger, handler: JournalHandler) -> None:
    first = Journald(runtime_dir / "socket")
    log.info("x")
    assert len(first.entries()) == 1
    first.close()
    log.info("nobody listens")
    first.path.unlink()
    log.info("nothing is there")
    assert handler.dropped == 2
    second = Journald(runtime_dir / "socket")
    check_the_gap(second, log, 2)
    second.close()


@pytest.mark.parametrize("name", ["x" * 200, "folder/file"])
def test_a_path_that_can_be_no_socket(runtime_dir: Path, name: str) -> None:
    (runtime_dir / "folder").touch()
    found = JournalHandler(0, runtime_dir / name)
    found.handle(record("x"))
    assert found.dropped == 1
    found.close()
    found.handle(record("logged after the end"))
    assert found.dropped == 2


# -- which handler -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stderr() -> Iterator[typing.TextIO]:
    """A stream socket, as the service manager gives a service for its standard error."""
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("w") as stream:
        yield stream


def identity(stream: typing.TextIO) -> str:
    found = Path(f"/proc/self/fd/{stream.fileno()}").stat()
    return f"{found.st_dev}:{found.st_ino}"


def test_the_journal_where_standard_error_goes_there(journald: Journald, stderr: typing.TextIO) -> None:
    found = chosen_handler(3, {"JOURNAL_STREAM": identity(stderr)}, stderr, journald.path)
    assert isinstance(found, JournalHandler)
    found.handle(record("one sentence"))
    found.close()
    entry = journald.entry()
    assert (entry["MESSAGE"], entry["WEIGHTCACHE_RANK"]) == ("rank 3: one sentence", "3")


@pytest.mark.parametrize("value", [None, "", "1:2", "nonsense", ":", "9" * 500, "closed, or no file"])
def test_plain_lines_where_standard_error_is_redirected(
    journald: Journald, tmp_path: Path, stderr: typing.TextIO, value: str | None
) -> None:
    environment = {"JOURNAL_STREAM": identity(stderr) if value is None else value}
    with (tmp_path / "log").open("w") as stream:
        found = chosen_handler(3, environment, stream, journald.path)
        found.handle(record("state %s", "ready", **event("state-changed")))
    assert (tmp_path / "log").read_text() == "rank 3: state ready\n"
    assert journald.entries() == []


def test_nobody_writes_a_line_of_the_agents(journald: Journald, tmp_path: Path, stderr: typing.TextIO) -> None:
    said = "a\nrank 3: state ready\r\x1b[2J\x85\u2028b"
    shown = "rank 3: lease on set a\\nrank 3: state ready\\r\\x1b[2J\\x85\\u2028b ended"
    native = chosen_handler(3, {"JOURNAL_STREAM": identity(stderr)}, stderr, journald.path)
    native.handle(record("lease on set %s ended", said))
    native.close()
    assert journald.entry()["MESSAGE"] == shown
    with (tmp_path / "log").open("w") as stream:
        plain = chosen_handler(3, {}, stream, journald.path)
        plain.handle(record("lease on set %s ended", said))
        try:
            raise ValueError("x")
        except ValueError as error:
            plain.handle(record("internal error", exc_info=(type(error), error, error.__traceback__)))
    first, second, *traceback = (tmp_path / "log").read_text().splitlines()
    assert (first, second) == (shown, "rank 3: internal error")
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", "ValueError: x")


def test_plain_lines_without_a_journal(runtime_dir: Path, stderr: typing.TextIO) -> None:
    """The variable alone is no proof: a service with a root of its own may not see the journal's socket."""
    assert type(chosen_handler(3, {}, stderr, runtime_dir / "no")) is logging.StreamHandler
    found = chosen_handler(3, {"JOURNAL_STREAM": identity(stderr)}, stderr, runtime_dir / "no")
    assert type(found) is logging.StreamHandler


def test_a_closed_standard_error(journald: Journald, tmp_path: Path) -> None:
    closed = (tmp_path / "log").open("w")
    closed.close()
    for stream in (None, closed):
        assert type(chosen_handler(3, {"JOURNAL_STREAM": "1:2"}, stream, journald.path)) is logging.StreamHandler


# -- the catalogue -----------------------------------------------------------------------------------------------------


def test_the_catalogue() -> None:
    assert tuple(journal.MESSAGE_IDS) == typing.get_args(Name)
    assert len(set(journal.MESSAGE_IDS.values())) == len(journal.MESSAGE_IDS)
    for name, identifier in journal.MESSAGE_IDS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert re.fullmatch(r"[0-9a-f]{32}", identifier)


@pytest.mark.parametrize(
    "name",
    [
        *("", "A", "_A", "MESSAGE", "weightcache_A"),
        *(f"WEIGHTCACHE_{rest}" for rest in ("", "a", "A\n", "A B", "A=", "Ä", 53 * "A")),
    ],
)
def test_bad_field_names(name: str) -> None:
    with pytest.raises(ValueError, match="not names of journal fields"):
        Event("leased", {name: 1})


def test_good_field_names() -> None:
    Event("leased", {"WEIGHTCACHE_CLIENT_PID": 1, "WEIGHTCACHE_" + 52 * "9": 1})
    assert event("leased", client_pid=1) == {"event": Event("leased", {"WEIGHTCACHE_CLIENT_PID": 1})}
