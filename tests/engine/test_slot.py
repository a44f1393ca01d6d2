"""Two real engines in the slots of one engine, directed by the test in place of their launchers.

One after the other, since each test leaves the engines as the next one finds them.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine import support
from tests.support.agent import eventually
from tests.support.engine import Engine
from tests.support.environments import NEWEST
from tests.support.slot import MAIN, SlotLauncher
from weightcache.engine.directive import Directive
from weightcache.engine.private import UnixConnection
from weightcache.standby import fence
from weightcache.standby.locks import is_taken
from weightcache.standby.messages import Process, Slot

pytestmark = pytest.mark.timeout(400)

SECONDS = 60.0
PROMPT = support.PROMPTS[0]
# A response in the background has no ignore_eos of its own, and has to be kept; 0.5.17 keeps all of them.
_NO_END = ("--preferred-sampling-params", '{"ignore_eos": true}')
ARGUMENTS = {"0.5.17": _NO_END, NEWEST: (*_NO_END, "--enable-response-store")}
LONG = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0}}


@dataclass(frozen=True, slots=True)
class InSlot:
    """An engine, its launcher, and where it listens."""

    engine: Engine
    launcher: SlotLauncher
    slot: Slot

    @property
    def lock(self) -> Path:
        return Path(self.slot.lock)

    def ranks(self) -> list[Process]:
        return [fence.identify(pid) for rank, pid in self.launcher.pids.items() if rank != MAIN]

    def privately(self, method: str, path: str, body: Any = None) -> int:
        return self.asked_privately(method, path, body)[0]

    def asked_privately(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = UnixConnection(Path(self.slot.private), SECONDS)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")


@dataclass(frozen=True, slots=True)
class Two:
    """Both, and the socket that they share."""

    port: socket.socket
    a: InSlot
    b: InSlot


@pytest.fixture(scope="module")
def two(checkpoint: Path, sglang_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Both engines, ready."""
    folder = Path(tempfile.mkdtemp(prefix="wc-slot-", dir="/tmp"))
    logs = tmp_path_factory.mktemp("slot")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        made = []
        for name in ("a", "b"):
            slot = Slot(str(folder / f"{name}.channel"), str(folder / "lock"), str(folder / f"{name}.http"))
            launcher = stack.enter_context(SlotLauncher(Path(slot.channel)))
            directive = Directive("engine", "host", {}, "test", from_disk="a test", slot=slot)
            engine = support.plain(checkpoint, logs / f"{name}.log", sglang_version, ARGUMENTS[sglang_version])
            engine.environment |= directive.environment()
            # As a launcher would: the port in the arguments is the one that is held.
            engine.port = port.getsockname()[1]
            engine.argv[engine.argv.index("--port") + 1] = str(engine.port)
            stack.callback(engine.stop)
            made.append(InSlot(engine.start(), launcher, slot))
        for each in made:
            try:
                each.launcher.wait_ready()
            except AssertionError:
                pytest.fail(each.engine.tail())
        yield Two(port, *made)


@pytest.fixture(scope="module")
def expected(disk: Any) -> str:
    """What an engine without weightcache answers."""
    return str(disk.texts[0])


class Asking:
    """A request on a connection of its own, from a thread."""

    def __init__(self, engine: Engine, body: object) -> None:
        self.status, self.answer, self.headers = 0, b"", {}
        self._engine, self._body = engine, body
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._engine.port, timeout=SECONDS)
        with closing(connection):
            connection.request("POST", "/generate", json.dumps(self._body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            self.answer, self.status = response.read(), response.status

    def result(self) -> int:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.status


class Streaming:
    """A request for so many tokens, one event a token, which has begun to be answered when this returns."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.events: list[str] = []
        self.ended = 0.0
        self._connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=SECONDS)
        sampling = {**LONG["sampling_params"], "max_new_tokens": tokens}
        body = json.dumps({**LONG, "sampling_params": sampling, "stream": True})
        self._connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self.events.append(self._response.readline().decode())
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        with closing(self._connection):
            # Raises IncompleteRead where the answer is cut off.
            rest = self._response.read().decode()
        self.events = [event for event in (self.events[0] + rest).splitlines() if event]
        self.ended = time.monotonic()

    def result(self) -> dict[str, Any]:
        """What is said of the last token; the stream has ended as it should."""
        self._thread.join(SECONDS)
        assert self.ended
        assert self.events[-1] == "data: [DONE]"
        last: dict[str, Any] = json.loads(self.events[-2].removeprefix("data: "))
        return dict(last["meta_info"])


class Background:
    """A response that nobody waits for, of so many tokens."""

    def __init__(self, each: InSlot, tokens: int) -> None:
        body = {"input": "Hello", "max_output_tokens": tokens, "temperature": 0}
        model = each.engine.get("/v1/models")[1]["data"][0]["id"]
        status, answer = each.engine.post("/v1/responses", {**body, "model": model, "background": True})
        assert (status, answer["status"]) == (200, "queued"), answer
        self.path = f"/v1/responses/{answer['id']}"


def computed(answer: dict[str, Any]) -> int:
    """How many tokens a response has; the releases have their own words for it."""
    usage = answer["usage"]
    return int(usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"])


class Idle:
    """A connection that has had its answer and is kept."""

    def __init__(self, engine: Engine) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=SECONDS)
        self._connection.request("GET", "/model_info")
        response = self._connection.getresponse()
        assert response.read()
        assert not response.will_close

    def closed(self) -> float:
        """Wait until the server closes it; when that was."""
        with closing(self._connection):
            assert self._connection.sock.recv(1) == b""
        return time.monotonic()


def begun(each: InSlot) -> int:
    """How many prompts its scheduler has taken up."""
    return each.engine.text().count("Prefill batch")


def takes(port: socket.socket) -> socket.socket:
    """A connection that waits in the queue."""
    return socket.create_connection(port.getsockname(), SECONDS)


def test_a_standby_is_up_privately_and_nowhere_else(two: Two) -> None:
    for each in (two.a, two.b):
        assert sorted(each.launcher.said) == [MAIN, 0]
        assert Path(each.slot.private).stat().st_mode & 0o777 == 0o600
        assert each.privately("GET", "/model_info") == 200
        # What generates is refused: a standby has no memory for it.
        assert each.privately("GET", "/health") == 503
        assert each.privately("POST", "/generate", LONG) == 503
        main = psutil.Process(each.launcher.pids[MAIN])
        inet = [c for c in main.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert not [c for c in inet if c.laddr.port == each.engine.port]
    assert not is_taken(two.a.lock, 0)
    assert not is_taken(two.a.lock, 1)
    with takes(two.port) as waiting:
        waiting.settimeout(0.5)
        waiting.sendall(b"GET /model_info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with pytest.raises(TimeoutError):
            waiting.recv(1)


def test_event_loops_beat_while_nothing_runs(two: Two) -> None:
    for each in (two.a, two.b):
        for process in (MAIN, 0):
            each.launcher.wait_beats(process, 3)


def test_nothing_is_accepted_without_the_lock(two: Two) -> None:
    assert "was not elected" in two.a.launcher.accept(two.port).problem


def test_one_is_elected_and_answers_who_waited(two: Two, expected: str) -> None:
    waiting = Asking(two.a.engine, {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 32}})
    a = two.a.launcher
    assert a.elect().problem == ""
    assert is_taken(two.a.lock, 0)
    owned = a.own()
    assert owned.problem == ""
    assert set(owned.seconds) == {"lock", "fence", "map"}
    assert is_taken(two.a.lock, 1)
    assert a.accept(two.port).problem == ""
    assert waiting.result() == 200
    assert json.loads(waiting.answer)["text"] == expected
    assert two.a.engine.generate(PROMPT, 32) == expected
    assert "accepts requests already" in a.accept(two.port).problem
    assert "keeps the lock" in a.give_back().problem


def test_the_other_one_waits(two: Two) -> None:
    done = two.b.launcher.send_elect()
    with pytest.raises(AssertionError, match="not answered"):
        done(0.5)
    # Orders behind one that waits are carried out, and this one ends it.
    assert two.b.launcher.give_back().problem == ""
    assert "given up" in done(SECONDS).problem


def test_a_request_that_ends_in_time_is_answered(two: Two) -> None:
    body = {**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 64}}
    before = begun(two.a)
    asking = Asking(two.a.engine, body)
    eventually(lambda: begun(two.a) > before, SECONDS)
    done = two.a.launcher.retire(SECONDS)
    assert done.problem == ""
    assert asking.result() == 200
    assert json.loads(asking.answer)["meta_info"]["completion_tokens"] == 64
    assert asking.headers["connection"] == "close"
    assert done.seconds["abort"] < 1


def test_another_process_goes_on_accepting(two: Two) -> None:
    with takes(two.port) as client:
        two.port.settimeout(SECONDS)
        accepted, _ = two.port.accept()
        two.port.settimeout(None)
        with accepted:
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"


def test_a_request_that_does_not_end_is_aborted_and_answered(two: Two, expected: str) -> None:
    a = two.a.launcher
    assert a.accept(two.port).problem == ""
    before = begun(two.a)
    asking = Asking(two.a.engine, LONG)
    eventually(lambda: begun(two.a) > before, SECONDS)
    done = a.retire(0.2)
    assert done.problem == ""
    assert asking.result() == 503
    assert asking.headers["retry-after"] == "1"
    assert a.release().problem == ""
    assert not is_taken(two.a.lock, 1)
    assert a.give_back().problem == ""
    # And again, as if nothing had been.
    assert (a.elect().problem, a.own().problem, a.accept(two.port).problem) == ("", "", "")
    assert two.a.engine.generate(PROMPT, 32) == expected


def test_streams_and_responses_in_the_background_end_in_time(two: Two) -> None:
    a = two.a
    idle = Idle(a.engine)
    background, streaming = Background(a, 48), Streaming(a.engine, 64)
    done = a.launcher.send_retire(SECONDS)
    closed = idle.closed()
    status, answer = a.asked_privately("GET", background.path)
    assert (status, answer["status"]) == (200, "in_progress")
    retired = done(SECONDS)
    assert retired.problem == ""
    said = streaming.result()
    assert (said["finish_reason"]["type"], said["completion_tokens"]) == ("length", 64)
    assert closed < streaming.ended
    assert retired.seconds["abort"] < 1
    _, answer = a.asked_privately("GET", background.path)
    assert answer["status"] in ("completed", "incomplete"), answer
    assert computed(answer) > 40, answer  # SGLang allows a few less than were asked for
    assert a.launcher.accept(two.port).problem == ""


def test_streams_and_responses_in_the_background_that_do_not_end_are_aborted(
    two: Two, expected: str, sglang_version: str
) -> None:
    a = two.a
    idle = Idle(a.engine)
    background, streaming = Background(a, 2000), Streaming(a.engine, 2000)
    done = a.launcher.send_retire(0.5)
    idle.closed()
    retired = done(SECONDS)
    assert retired.problem == ""
    said = streaming.result()
    assert said["finish_reason"]["type"] == "abort"
    assert 0 < said["completion_tokens"] < 2000
    assert two.b.asked_privately("GET", background.path)[0] == 404
    assert a.launcher.accept(two.port).problem == ""
    status, answer = a.engine.get(background.path)
    # 0.5.17 calls whatever has ended completed.
    assert (status, answer["status"]) == (200, "completed" if sglang_version == "0.5.17" else "failed")
    assert computed(answer) < 2000
    assert a.engine.generate(PROMPT, 32) == expected


def test_sigkill_frees_the_locks_and_the_other_takes_over(two: Two, expected: str) -> None:
    b = two.b.launcher
    done = b.send_elect()
    old = two.a.ranks()
    killed = time.monotonic()
    os.kill(two.a.launcher.pids[MAIN], 9)
    first = Asking(two.b.engine, {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 32}})
    assert done(SECONDS).problem == ""
    assert time.monotonic() - killed < 1.0
    owned = b.own(fence=old)
    assert owned.problem == ""
    assert b.accept(two.port).problem == ""
    assert time.monotonic() - killed < 5.0, owned  # on a machine that does more than this
    assert not [process for process in old if fence.lives(process)]
    assert first.result() == 200
    assert json.loads(first.answer)["text"] == expected


def test_an_engine_whose_launcher_is_gone_ends(two: Two) -> None:
    family = two.b.engine.family()
    two.b.launcher.close()
    two.b.engine.process.wait(10)
    eventually(lambda: not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 10)
    assert not is_taken(two.b.lock, 0)
    assert not is_taken(two.b.lock, 1)
    assert "the launcher is gone" in two.b.engine.text()
