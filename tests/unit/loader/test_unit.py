"""Between the agent and a loader: what comes through, and what is left when either end goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.server.harness import eventually, gone
from weightcache import protocol, transport
from weightcache.errors import LoadFailed, ProtocolError
from weightcache.loader import unit
from weightcache.protocol import Alive, Ended, Hello, Output, Run
from weightcache.server import child

SECONDS = 15.0
UNIT = [sys.executable, "-I", "-c", child._UNIT.format(path=sys.path)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "SAMPLE_SECONDS", 0.1)
    monkeypatch.setattr(unit, "TERM_SECONDS", 0.3)


class Running:
    """A command behind a supervisor in a thread, seen from the agent's end."""

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        self.connection, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(SECONDS)
        self.packets: list[bytes] = []
        self.lines: list[str] = []
        self.signs: list[Alive] = []
        self.ended: Ended | None = None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        if command:
            self.say(Run(command, dict(environment or {})))

    def _serve(self) -> None:
        try:
            with self.theirs:
                unit.serve(self.theirs)
        except BaseException as error:
            self.failure = error

    def say(self, message: protocol.Message) -> None:
        transport.send_packet(self.connection, protocol.encode(message))

    def step(self) -> bool:
        """Take one message; False at the end."""
        data = transport.receive_packet(self.connection).data
        if not data:
            return False
        assert self.ended is None
        self.packets.append(data)
        match protocol.decode(data):
            case Output(lines):
                self.lines += lines
            case Alive() as alive:
                self.signs.append(alive)
            case Ended() as ended:
                self.ended = ended
            case other:
                raise AssertionError(other)
        return True

    def line(self, number: int = 0) -> str:
        """One line of output, by number."""
        while len(self.lines) <= number:
            assert self.step()
        return self.lines[number]

    def finish(self) -> Ended:
        """Take everything to the end."""
        while self.step():
            pass
        self.join()
        assert self.ended is not None
        return self.ended

    def join(self) -> None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        if self.failure:
            raise self.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.thread.join(SECONDS)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-I", "-c", code


def test_output_and_the_end() -> None:
    with Running("/bin/sh", "-c", "echo one; echo two >&2; printf 'no newline'; exit 3") as running:
        assert running.finish() == Ended(3)
        assert running.lines == ["one", "two", "no newline"]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (rb"0%%\r 50%%\r100%%\n", ["0%", "50%", "100%"]),
        (rb"a\r\nb\r\n\n\n  \n", ["a", "b"]),
        (rb"\033[31mred\033[0m\a\t\0end\n", ["[31mred [0m   end"]),
        (rb"\377\376 \342\226\210 \303\n", ["\ufffd\ufffd \u2588 \ufffd"]),
        (rb"right\342\200\256left\n", ["right left"]),
    ],
)
def test_unprintable_output(output: bytes, lines: list[str]) -> None:
    with Running("/usr/bin/printf", output.decode()) as running:
        running.finish()
        assert running.lines == lines


def test_very_long_lines() -> None:
    code = "import sys; w = sys.stdout.write; w('x' * 3000 + '\\n'); w('y' * 3_000_000); w('\\nlast\\n')"
    with Running(*python(code)) as running:
        running.finish()
        assert running.lines[0] == "x" * unit.LONGEST_LINE
        assert running.lines[1].strip("y") == ""
        assert running.lines[2:] == ["last"]
        assert all(len(line) <= unit.LONGEST_LINE for line in running.lines)


@pytest.mark.parametrize("char", ["\\xff", "\\xc3\\xa9", "\\xe6\\xbc\\xa2", "\\xf0\\x9f\\x99\\x82", "a"])
@pytest.mark.parametrize("length", [1, 100, 1999])
def test_every_packet_is_small_enough(char: str, length: int) -> None:
    """Escapes make text longer: a packet that is too large would end the conversation."""
    count = 4 if length > 1 else 1
    text = f"(b'{char}' * {length})[:{length}].ljust({length + 1}, b'\\n')"
    code = f"import os\nfor _ in range({count}): os.write(1, {text} * (65536 // {length + 1}))"
    with Running(*python(code)) as running:
        assert running.finish() == Ended(0)
        assert max(map(len, running.packets)) <= transport.MAX_PACKET
        assert len(running.lines) == count * (65536 // (length + 1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_output(parts: list[bytes]) -> None:
    """However it is cut: the same lines, printable and not empty."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        supervisor = unit.Unit(theirs, Run(("/bin/true",), {}))
        supervisor.run()
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0) as output:
            supervisor._output = output
            for part in parts:
                os.write(writer, part)
                if part:
                    assert supervisor._forward()
            os.close(writer)
            assert not supervisor._forward()
        supervisor._emit([supervisor._partial])
        ours.setblocking(False)
        lines: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                message = protocol.decode(transport.receive_packet(ours).data)
                if isinstance(message, Output):
                    lines += message.lines
    whole = b"".join(parts).replace(b"\r", b"\n").split(b"\n")
    assert lines == [text for line in whole if (text := unit._readable(line))]
    assert all(line.isprintable() and line == line.strip() for line in lines)


def test_a_flood() -> None:
    """200,000 lines: in far fewer packets, and without much memory at either end while the agent does not read."""
    code = "for number in range(200_000): print(f'line {number} of a flood that says nothing')"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(UNIT, stdin=theirs) as supervisor, ours:
        theirs.close()
        ours.settimeout(SECONDS)
        transport.send_packet(ours, protocol.encode(Run(python(code), {})))
        time.sleep(0.5)  # it waits now, and the command waits for it
        packets, lines, ended = 0, 0, None
        while data := transport.receive_packet(ours).data:
            packets += 1
            body = json.loads(data)
            if body["type"] == "output":
                lines += len(body["lines"])
            ended = body if body["type"] == "ended" else ended
            if packets == 1000:
                status = Path(f"/proc/{supervisor.pid}/status").read_text()
                [peak] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
        supervisor.wait(SECONDS)
    assert lines == 200_000
    assert ended is not None
    assert ended["status"] == 0
    assert packets < lines / 5
    assert peak < 40_000, f"{peak} kB"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal(sign: signal.Signals) -> None:
    with Running("/bin/sh", "-c", f"kill -{int(sign)} $$") as running:
        assert running.finish() == Ended(-sign)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("/nowhere/loader", "load"), "'/nowhere/loader': No such file or directory"),
        (("/etc",), "'/etc': Permission denied"),
        (("a\0b",), "embedded null byte"),
        (("x" * 5000,), "File name too long"),
    ],
)
def test_a_command_that_cannot_be_started(command: tuple[str, ...], reason: str) -> None:
    with Running(*command) as running:
        ended = running.finish()
        assert ended.status is None
        assert reason in ended.reason
        assert len(ended.reason) <= 1000


def test_an_environment_that_is_none() -> None:
    with Running("/bin/true", environment={"A=B": "c"}) as running:
        assert "illegal environment variable name" in running.finish().reason


def test_what_the_command_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the service manager's, no descriptor, nothing to read, a session of its own."""
    private = {"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a", "NOTIFY_SOCKET": "/x", "FDSTORE": "3"}
    for name, value in {**private, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "KEPT": "own", "CHANGED": "own"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import json, os, sys\n"
        "names = ('KEPT', 'CHANGED', *(name for name in os.environ if '_' in name or name == 'FDSTORE'))\n"
        "print(json.dumps({'environment': {name: os.environ[name][:9] for name in names},\n"
        "'fds': sorted(map(int, os.listdir('/proc/self/fd')))[:4], 'input': sys.stdin.read(),\n"
        "'session': os.getsid(0) == os.getpid()}))"
    )
    with Running(*python(code), environment={"CHANGED": "asked"}) as running:
        running.finish()
        [line] = running.lines
        found = json.loads(line)
    assert not [name for name in found["environment"] if name.startswith(("LISTEN_", "NOTIFY_", "WATCHDOG_", "FDS"))]
    assert (found["environment"]["KEPT"], found["environment"]["CHANGED"]) == ("own", "asked")
    assert found["fds"] == [0, 1, 2, 3]  # the last one is the listing's
    assert found["input"] == ""
    assert found["session"]


def test_signs_that_nobody_wants() -> None:
    """Output and the end come as ever, and an agent that goes away ends the command."""
    command = python("import time\nwhile time.process_time() < 0.5: pass\nprint('idle', flush=True)\ntime.sleep(60)")
    with Running() as running:
        running.say(Run(tuple(command), {}, signs=False))
        assert running.line() == "idle"
        assert running.signs == []
        running.connection.shutdown(socket.SHUT_WR)
        assert running.finish() == Ended(-signal.SIGTERM)
    with Running() as running:
        running.say(
            Run(
                tuple(
                    python(
                        "import signal, time\nsignal.signal(15, lambda *_: None)\nprint('deaf', flush=True)\n"
                        "while True: time.sleep(1)"
                    )
                ),
                {},
                signs=False,
            )
        )
        assert running.line() == "deaf"
        running.connection.shutdown(socket.SHUT_WR)
        assert running.finish() == Ended(-signal.SIGKILL)


def test_signs_of_life() -> None:
    """A command that computes shows it; one that sleeps shows nothing more."""
    with Running(
        *python("import time\nwhile time.process_time() < 0.5: pass\nprint('idle', flush=True)\ntime.sleep(60)")
    ) as running:
        assert running.line() == "idle"
        ticks = [alive.ticks for alive in running.signs]
        assert len(ticks) > 2
        assert ticks == sorted(ticks)
        assert running.signs[-1].processes == 1
        time.sleep(0.3)
        running.connection.settimeout(0.5)
        count = len(running.signs)
        with contextlib.suppress(TimeoutError):
            while running.step():
                assert len(running.signs) <= count + 2
        assert running.ended is None


# -- the end -----------------------------------------------------------------------------------------------------------

FAMILY = """
import os, signal, sys, time
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    if "deaf" not in sys.argv: signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"grandchild was told\\n"))
    print(os.getpid(), flush=True)
    while True: time.sleep(60)
told = lambda *_: (os.write(1, b"told\\n"), time.sleep(0.1), sys.exit(7))
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else told)
print(os.getpid(), flush=True)
if "leave" in sys.argv: time.sleep(0.2); sys.exit(0)
while True: time.sleep(60)
"""


@contextlib.contextmanager
def family(*arguments: str) -> Iterator[tuple[Running, list[int]]]:
    with Running(*python(FAMILY), *arguments) as running:
        pids = [int(running.line(0)), int(running.line(1))]
        yield running, pids
        eventually(lambda: all(gone(pid) for pid in pids), what="somebody of the command's family lives on")


def hang_up(running: Running) -> None:
    running.connection.shutdown(socket.SHUT_WR)


def test_the_end_of_the_connection_is_the_end_of_the_command() -> None:
    with family() as (running, _):
        hang_up(running)
        assert running.finish() == Ended(7)
        assert "told" in running.lines
        assert "grandchild was told" in running.lines  # and killed, because its parent is gone


def test_whoever_ignores_sigterm_is_killed() -> None:
    with family("deaf") as (running, _):
        started = time.monotonic()
        hang_up(running)
        assert running.finish() == Ended(-signal.SIGKILL)
        assert 0.25 < time.monotonic() - started < 5


def test_an_agent_that_dies() -> None:
    """It closes both directions: nobody listens to the last words either."""
    with family("deaf") as (running, _):
        running.connection.close()
        running.join()


def test_an_agent_that_dies_in_a_flood() -> None:
    with Running("/bin/sh", "-c", "echo $$; exec yes") as running:
        pid = int(running.line())
        running.connection.close()
        running.join()
        assert gone(pid)


def test_whoever_is_left_behind_is_killed() -> None:
    with family("leave") as (running, _):
        assert running.finish() == Ended(0)


def test_a_command_that_closes_its_output_lives_on() -> None:
    with Running("/bin/sh", "-c", "echo $$; exec >&- 2>&-; sleep 0.3; exit 5") as running:
        assert running.finish() == Ended(5)


# -- who may ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [b"garbage", b"{}", protocol.encode(Hello("x", "1")), protocol.encode(Run((), {})), protocol.encode(Ended(0))],
)
def test_garbage_instead_of_a_request(packet: bytes) -> None:
    with Running() as running:
        running.connection.send(packet)
        assert not running.step()
        with pytest.raises(ProtocolError):
            running.join()


def test_nobody_asks_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    with Running() as running:
        running.connection.close()
        running.join()
    monkeypatch.setattr(unit, "REQUEST_SECONDS", 0.1)
    with Running() as running, pytest.raises(ProtocolError, match="no request"):
        running.join()


def test_more_than_a_request_changes_nothing() -> None:
    with Running("/bin/sh", "-c", "sleep 0.2; echo done") as running:
        running.say(Hello("x", "1"))
        running.connection.send(b"garbage")
        assert running.finish() == Ended(0)
        assert running.lines == ["done"]


@pytest.mark.parametrize("kind", ["null", "pipe", "stream", "datagram", "closed", "internet"])
def test_standard_input_that_is_no_connection(kind: str) -> None:
    kinds = {
        "stream": (socket.AF_UNIX, socket.SOCK_STREAM),
        "datagram": (socket.AF_UNIX, socket.SOCK_DGRAM),
        "internet": (socket.AF_INET, socket.SOCK_DGRAM),
    }
    with contextlib.ExitStack() as stack:
        given_: Any = {"null": subprocess.DEVNULL, "pipe": subprocess.PIPE}.get(kind)
        if kind in kinds:
            given_ = stack.enter_context(socket.socket(*kinds[kind]))
        command = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *UNIT] if kind == "closed" else UNIT
        done = subprocess.run(command, stdin=given_, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr == "weightcache-loader: standard input is no connection to an agent\n"


def test_garbage_at_the_process(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, subprocess.Popen(UNIT, stdin=theirs, stderr=subprocess.PIPE, text=True) as process:
        theirs.close()
        ours.send(b"garbage")
        _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == ProtocolError.exit_status
    assert error == "weightcache-loader: a packet that is no JSON\n"


# -- the agent's end ---------------------------------------------------------------------------------------------------


def with_child(
    work: Callable[[child.Child, list[str]], Any], *command: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run ``work`` beside a command that the agent started."""

    async def whole() -> None:
        lines: list[str] = []
        running = await child.start(command, environment or {}, lines.append, None)
        try:
            async with asyncio.timeout(SECONDS):
                await work(running, lines)
        finally:
            await running.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(whole())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def first_line(lines: list[str]) -> str:
    while not lines:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0.01)
    return lines[0]


ADVICE = (
    "; edit loader.command in weightcache.toml: it names the Python of your SGLang environment, with weightcache in it"
)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("/bin/sh", "-c", "echo a; echo b; exit 3"), "ended with status 3: a | b"),
        (("/bin/sh", "-c", "kill -9 $$"), "ended with signal 9 (SIGKILL)"),
        (("/bin/sh", "-c", "kill -40 $$"), "ended with signal 40 (unknown)"),
        (("/nowhere/loader",), "cannot be started ('/nowhere/loader': No such file or directory)" + ADVICE),
        (
            ("/usr/bin/python3", "-Ic", "import weightcache"),
            "ended with status 1: Traceback (most recent call last): | "
            """File "<string>", line 1, in <module> | ModuleNotFoundError: No module named 'weightcache'""" + ADVICE,
        ),
    ],
)
def test_how_it_ended_in_words(command: tuple[str, ...], words: str) -> None:
    async def work(running: child.Child, _: list[str]) -> None:
        await running.exited.wait()
        assert running.describe() == words

    with_child(work, *command)


def test_a_supervisor_that_is_killed() -> None:
    pids: list[int] = []

    async def work(running: child.Child, lines: list[str]) -> None:
        pids.append(int(await first_line(lines)))
        assert running._process is not None
        running._process.kill()
        await running.exited.wait()
        assert running.status is None
        assert running.describe() == (
            "ended without a word (killed for memory, or never started: journalctl -u 'weightcache-loader@*'): "
            f"{pids[0]}"
        )

    with_child(work, "/bin/sh", "-c", "echo $$; exec sleep 60")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)


def test_a_supervisor_that_does_not_do_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SECONDS", 0.3)
    pids: list[int] = []

    async def work(running: child.Child, lines: list[str]) -> None:
        pids.append(int(await first_line(lines)))
        assert running._process is not None
        running._process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert running.describe() == f"does not end: {pids[0]}"
        await running.stop()
        assert 0.2 < time.monotonic() - started < 5
        assert running.exited.is_set()

    with_child(work, "/bin/sh", "-c", "echo $$; exec sleep 60")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)


def test_a_supervisor_that_talks_nonsense() -> None:
    async def work(running: child.Child, lines: list[str]) -> None:
        await first_line(lines)
        before = running.signs
        running._take(Alive(1, 2, 3))
        assert running.signs == before + 1
        with pytest.raises(ProtocolError, match="Hello from a loader's supervisor"):
            running._take(Hello("x", "1"))

    with_child(work, "/bin/sh", "-c", "echo x; exec sleep 60")


def test_a_request_that_no_packet_carries() -> None:
    async def work(_: child.Child, __: list[str]) -> None:
        """Never called."""

    with pytest.raises(LoadFailed, match="the loader's supervisor takes no request: cannot send a packet"):
        with_child(work, "/bin/true", environment={"X": "x" * transport.MAX_PACKET})


def test_a_socket_where_nobody_runs_loaders(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="nobody can run the loader: no agent listens at"):
        asyncio.run(child.start(("/bin/true",), {}, print, tmp_path / "loader.sock"))


def test_only_the_last_lines_are_kept() -> None:
    async def work(running: child.Child, lines: list[str]) -> None:
        await running.exited.wait()
        assert len(lines) == 500
        assert list(running.lines) == lines[-child.KEPT_LINES :]
        assert running.last_words() == ": 496 | 497 | 498 | 499 | 500"

    with_child(work, "/usr/bin/seq", "500")
