"""`wcache engines`, `promote`, `park` and `wake`, with launchers that only write files and answer commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcache.cli import engines_memory, engines_verbs
from weightcache.errors import NotReady
from weightcache.monitor.nvml import Reading
from weightcache.monitor.snapshot import Device, DeviceProcess
from weightcache.standby import control, fence, status
from weightcache.standby.control import Command, Reply
from weightcache.standby.listing import EngineView, SlotView
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import Process, Role
from weightcache.standby.places import EnginePaths
from weightcache.standby.status import Promotion, SlotStatus

FILE = '[engine]\narguments = ["--model-path", "/models/m", "--port", "30000", "--api-key", "hidden"]\n'


class Launchers:
    """The launchers of both slots of engine e, in this process."""

    def __init__(self, run: Path) -> None:
        self.paths = EnginePaths(run / "engines", "e")
        self.paths.prepare()
        self.asked: list[tuple[str, str]] = []
        self.on: dict[str, Callable[[str], Reply]] = {}
        self.lock = ByteLock(self.paths.lock, 0)
        self._listeners: list[socket.socket] = []

    def slot(self, slot: str, role: Role, **fields: object) -> SlotStatus:
        """Write a slot's status; fields that are not named stay as they were."""
        known = status.read(self.paths.status(slot))[0]
        if known is None:
            known = SlotStatus("e", slot, role, time.time() - 61, fence.identify(os.getpid()), Process(4711, 1))
        one = dataclasses.replace(known, role=role, **fields)  # type: ignore[arg-type]
        status.write(self.paths.status(slot), one)
        return one

    def answer(self, slot: str, carry_out: Callable[[str], Reply] = lambda _: Reply(True)) -> None:
        """Take commands at the slot's control socket."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.paths.control(slot)))
        listener.listen()
        self._listeners.append(listener)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        command: Command = control.decode_command(connection.recv(65536))
                        self.asked.append((slot, command.verb))
                        connection.send(control.encode(carry_out(command.verb)))

        threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.lock.close()


@pytest.fixture
def files(tmp_path, monkeypatch):
    folder = tmp_path / "engines"
    folder.mkdir()
    monkeypatch.setenv("WEIGHTCACHE_ENGINES_DIR", str(folder))
    (folder / "e.toml").write_text(FILE)
    return folder


@pytest.fixture
def launchers(host, files):
    made = Launchers(host.run)
    yield made
    made.close()


def promotion(at: float, cause: str = "death") -> Promotion:
    return Promotion(at, 0.25, cause, {"roster": 0.001, "own": 0.2})  # type: ignore[arg-type]


def test_no_engine_is_no_error(host, files):
    (files / "e.toml").unlink()
    got = host.wcache("engines")
    assert (got.status, got.out) == (0, "")
    assert f"no engine has a file in {files}" in got.err
    assert json.loads(host.wcache("engines", "--json").out) == {"schema": 1, "engines": []}


def test_the_table(host, launchers):
    launchers.slot("a", "active", priority=0, promotions=(promotion(1), promotion(2, "promote")), memory=3 * 10**9)
    launchers.slot("b", "standby", problem="it ended by SIGKILL")
    got = host.wcache("engines")
    assert got.status == 0
    header, first, second, problem = got.out.splitlines()
    assert header.split() == [
        "ENGINE", "SLOT", "ROLE", "FOR", "PID", "PRIORITY", "MEMORY", "TOOK", "WHY", "LISTEN", "MODEL",
    ]  # fmt: skip
    tail = ["127.0.0.1:30000", "/models/m"]
    assert first.split() == ["e", "a", "active", "61", "s", "4711", "0", "3.00", "GB", "0.25", "s", "promote", *tail]
    assert second.split() == ["e", "b", "standby", "61", "s", "4711", "0", "-", "-", "-", *tail]
    assert problem == "e-b: it ended by SIGKILL"


def test_json_is_what_the_launchers_wrote(host, launchers):
    active = launchers.slot("a", "active", promotions=(promotion(1),))
    data = json.loads(host.wcache("engines", "--json").out)
    [engine] = data.pop("engines")
    assert data == {"schema": 1}
    first, second = engine.pop("slots")
    assert engine == {
        "engine": "e", "listen": "127.0.0.1:30000", "model": "/models/m", "priority": 0, "parked": False, "problem": "",
    }  # fmt: skip
    assert (first["slot"], first["role"], first["problem"]) == ("a", "active", "")
    assert first["status"]["promotions"][0]["phases"] == active.promotions[0].phases
    assert first["status"]["launcher"] == {"pid": os.getpid(), "started": active.launcher.started}
    assert second == {"slot": "b", "role": "down", "status": None, "problem": ""}


def test_memory_is_what_the_driver_counts_for_the_ranks(monkeypatch):
    gpus = ("GPU-1", "GPU-2")
    ranks = (Process(7, 1), Process(8, 1))
    said = SlotStatus("e", "a", "active", 0.0, Process(6, 1), ranks=ranks, gpus=gpus, size=2)
    view = EngineView("e", "", "", 0, False, "", (SlotView("a", "active", said, ""), SlotView("b", "down", None, "")))
    asked = []

    def read(uuids):
        asked.append(uuids)
        of = {"GPU-1": ((7, 100), (9, 5)), "GPU-2": ((8, 200), (7, 1))}
        devices = [Device(uuid, 0, "", 0, 0, 0, tuple(DeviceProcess(p, "", n) for p, n in of[uuid])) for uuid in uuids]
        return Reading("", "", tuple(devices))

    monkeypatch.setattr(engines_memory, "_read", read)
    (measured,) = engines_memory.measured((view,))
    assert asked == [["GPU-1", "GPU-2"]]
    assert measured.slots[0].status.memory == 301
    without = dataclasses.replace(said, gpus=("host",))
    same = dataclasses.replace(view, slots=(SlotView("a", "active", without, ""),))
    assert engines_memory.measured((same,)) == (same,)
    assert len(asked) == 1


def test_an_engine_that_a_more_important_one_parked_is_as_it_should_be(host, launchers):
    launchers.slot("a", "parked", problem="high is more important, and has the same GPU")
    assert host.wcache("engines").status == 0
    launchers.answer("a")
    got = host.wcache("wake", "e")
    assert got.status == 1
    assert "e is woken, and stays parked for now: high is more important, and has the same GPU" in got.err


def test_whose_launcher_is_dead_is_down(host, launchers):
    ended = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    launchers.slot("a", "active", launcher=fence.identify(ended.pid))
    assert host.wcache("engines").status == 0
    ended.communicate()
    got = host.wcache("engines")
    assert got.status == 1
    assert [line.split()[2:5] for line in got.out.splitlines()[1:]] == [["down", "-", "-"], ["down", "-", "-"]]


def test_what_is_broken_is_said_beside_the_rest(host, launchers, files):
    launchers.paths.status("a").write_text("{")
    launchers.slot("b", "active")
    (files / "e.toml").write_text("[engine]\n")
    (files / "other.toml").write_text(FILE)
    got = host.wcache("engines")
    assert got.status == 1
    assert "e-a: " in got.out
    assert "says nothing that this version understands" in got.out
    assert "e.toml: engine.arguments: this key is missing" in got.out
    assert [line.split()[:3] for line in got.out.splitlines()[1:5]] == [
        ["e", "a", "down"], ["e", "b", "active"], ["other", "a", "down"], ["other", "b", "down"],
    ]  # fmt: skip


def test_an_engine_without_its_file_is_shown(host, launchers, files):
    launchers.slot("a", "active", listen="127.0.0.1:9", model="/m")
    (files / "e.toml").unlink()
    got = host.wcache("engines")
    assert "127.0.0.1:9  /m" in got.out
    assert "there is no such file" in got.out


def test_check_says_what_would_run_and_no_secret(host, files):
    got = host.wcache("engines", "check", "e")
    assert (got.status, got.err) == (0, "")
    assert "hidden" not in got.out
    assert "127.0.0.1:30000, by weightcache-http@e.socket" in got.out
    assert "--model-path /models/m --port 30000 --api-key *** --host 127.0.0.1" in got.out
    facts = dict(re.split("  +", line, maxsplit=1) for line in got.out.splitlines())
    assert facts["KV memory"] == "what is free when the first engine starts, less the reserve"
    assert facts["unproven"] == "no"
    assert facts["limits"] == "wait 600 s, hang 60 s, drain 30 s, own 60 s"
    numbers = "[standby]\nkv_gigabytes = 40.5\nunproven = true\nown_seconds = 7\n"
    (files / "e.toml").write_text(f"{FILE}wait_seconds = 90\n{numbers}")
    got = host.wcache("engines", "check", "e")
    facts = dict(re.split("  +", line, maxsplit=1) for line in got.out.splitlines())
    assert facts["KV memory"] == "40.5 GiB of each GPU"
    assert facts["unproven"] == "kinds of KV memory that no run on a GPU has shown are taken, too"
    assert facts["limits"] == "wait 90 s, hang 60 s, drain 30 s, own 7 s"
    (files / "e.toml").write_text(FILE + "lisen = 1\n")
    got = host.wcache("engines", "check", "e")
    assert got.status == 78
    assert 'did you mean "listen"?' in got.err
    assert host.wcache("engines", "check", "none").status == 78
    assert host.wcache("engines", "check", "a b").status == 2


def test_setup_writes_drop_ins_once(host, files, tmp_path):
    root = tmp_path / "root"
    got = host.wcache("engines", "setup", "e", "--dry-run")
    assert got.status == 0
    assert not root.exists()
    assert got.out.count("# /etc/systemd/system/") == 3
    got = host.wcache("engines", "setup", "e", "--root", str(root))
    assert got.status == 0
    units = root / "etc/systemd/system"
    listener = (units / "weightcache-http@e.socket.d/10-weightcache.conf").read_text()
    assert "\nListenStream=127.0.0.1:30000\n" in listener
    assert "\nService=weightcache-engine@e-a.service\n" in listener
    for slot in ("a", "b"):
        path = units / f"weightcache-engine@e-{slot}.service.d/10-weightcache.conf"
        assert "\nSockets=weightcache-http@e.socket\nTimeoutStopSec=150\n" in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o644
    names = "weightcache-http@e.socket weightcache-engine@e-a.service weightcache-engine@e-b.service"
    assert f"systemctl enable --now {names}" in got.out
    assert host.wcache("engines", "setup", "e", "--root", str(root)).out.count("unchanged: ") == 3
    (files / "e.toml").write_text(FILE.replace("30000", "30001"))
    assert host.wcache("engines", "setup", "e", "--root", str(root)).out.count("wrote: ") == 1
    assert len([path for path in root.rglob("*") if path.is_file()]) == 3


def test_setup_where_nothing_can_be_written(host, files, tmp_path):
    (tmp_path / "root").touch()
    got = host.wcache("engines", "setup", "e", "--root", str(tmp_path / "root"))
    assert got.status == 70
    assert got.err.count("\n") == 1
    assert "cannot be written" in got.err


def test_promote_waits_until_the_other_one_is_active(host, launchers):
    old = promotion(1)
    launchers.slot("a", "active", promotions=(promotion(2),))
    launchers.slot("b", "standby", promotions=(old,))

    def retire(verb: str) -> Reply:
        launchers.slot("a", "retiring")

        def swap() -> None:
            launchers.slot("b", "active", promotions=(old, promotion(3, "promote")))
            launchers.slot("a", "standby")

        threading.Timer(0.1, swap).start()
        return Reply(True)

    launchers.answer("a", retire)
    got = host.wcache("promote", "e", "--wait", "20")
    assert (got.status, got.err) == (0, "")
    first, second = got.out.splitlines()
    assert first.startswith("e-b is active after 0.")
    assert second == "the promotion took 0.250 s (roster 0.001, own 0.200)"
    assert launchers.asked == [("a", "retire")]


def test_promote_fails_where_the_same_slot_takes_requests_again(host, launchers):
    launchers.slot("a", "active", promotions=(promotion(2),))
    launchers.slot("b", "standby")

    def swap() -> None:
        launchers.slot("b", "starting", problem="rank 0 has ended")
        launchers.slot("a", "active", promotions=(promotion(2), promotion(3, "promote")))

    def retire(verb: str) -> Reply:
        threading.Timer(0.1, swap).start()
        return Reply(True)

    launchers.answer("a", retire)
    got = host.wcache("promote", "e", "--wait", "20")
    assert (got.status, got.out) == (1, "")
    assert got.err == (
        "wcache: e-a has retired, and nobody has taken over: it is active again, and e-b is starting "
        "(rank 0 has ended)\n"
    )


def test_whoever_retired_already_has_to_stay_away_as_well():
    def seen(role: Role, *promotions: Promotion) -> EngineView:
        said = SlotStatus("e", "a", role, 0.0, Process(1, 1), promotions=promotions)
        slots = (SlotView("a", role, said, ""), SlotView("b", "standby", None, ""))
        return EngineView("e", "", "", 0, False, "", slots)

    before = seen("retiring", promotion(1))
    assert engines_verbs._promoted(before, seen("active", promotion(1))) is None
    with pytest.raises(NotReady, match="e-a has retired, and nobody has taken over"):
        engines_verbs._promoted(before, seen("active", promotion(1), promotion(2)))


def test_promote_is_refused_with_the_launchers_sentence(host, launchers):
    launchers.slot("a", "active")
    launchers.slot("b", "starting")
    launchers.answer("a", lambda _: Reply(False, "e-a does not retire: the other slot is starting"))
    got = host.wcache("promote", "e")
    assert (got.status, got.out) == (1, "")
    assert got.err == "wcache: e-a does not retire: the other slot is starting\n"


def test_promote_that_does_not_come_to_an_end(host, launchers):
    launchers.slot("a", "active")
    launchers.slot("b", "standby")
    launchers.answer("a")
    got = host.wcache("promote", "e", "--wait", "0.1")
    assert got.status == 1
    assert got.err == "wcache: e is not there yet, and goes on: e-a is active, e-b is standby\n"


@pytest.mark.parametrize("verb", ["promote", "park", "wake"])
def test_nobody_to_ask(host, launchers, verb):
    got = host.wcache(verb, "e")
    assert got.status == 69
    assert got.err == "wcache: no slot of e runs\n"
    launchers.slot("a", "active")
    got = host.wcache(verb, "e", "--wait", "1")
    if verb != "wake":  # which has nothing to ask of an engine that is active
        assert got.status == 69
        assert "no launcher answers" in got.err
    assert host.wcache(verb, "a/b").status == 2


def test_promote_needs_one_that_is_active(host, launchers):
    launchers.slot("a", "starting")
    launchers.slot("b", "standby")
    got = host.wcache("promote", "e")
    assert got.status == 1
    assert "has no active engine that could retire: e-a is starting, e-b is standby" in got.err
    launchers.paths.parked.touch()
    assert "`wcache wake e`" in host.wcache("promote", "e").err


def test_park_tells_both_and_waits_for_the_lock(host, launchers):
    launchers.lock.take()
    launchers.slot("a", "standby")
    launchers.slot("b", "active")

    def park(verb: str) -> Reply:
        launchers.paths.parked.touch()
        launchers.slot("b", "parked")
        threading.Timer(0.2, launchers.lock.give_back).start()
        return Reply(True)

    launchers.answer("a")
    launchers.answer("b", park)
    got = host.wcache("park", "e", "--wait", "20")
    assert (got.status, got.err) == (0, "")
    assert got.out.startswith("e is parked after 0.")
    assert not launchers.lock.held
    assert launchers.asked == [("b", "park"), ("a", "park")]
    assert host.wcache("engines").status == 0


def test_one_launcher_that_heard_it_is_enough(host, launchers):
    launchers.slot("a", "parked")
    launchers.slot("b", "parked")
    launchers.paths.parked.touch()

    def wake(verb: str) -> Reply:
        launchers.paths.parked.unlink()
        launchers.slot("b", "active", promotions=(promotion(1, "wake"),))
        return Reply(True)

    launchers.answer("b", wake)
    got = host.wcache("wake", "e", "--wait", "20")
    assert (got.status, got.err) == (0, "")
    assert got.out.startswith("e-b is active after 0.")
    again = host.wcache("wake", "e")
    assert again.out == "e is not parked: e-b is active\n"
    assert launchers.asked == [("b", "wake")]


def test_launchers_that_die_meanwhile_end_the_wait(host, launchers):
    ended = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    launchers.slot("a", "active", launcher=fence.identify(ended.pid))

    def park(verb: str) -> Reply:
        assert ended.stdin is not None
        ended.stdin.close()
        ended.wait()
        return Reply(True)

    launchers.answer("a", park)
    got = host.wcache("park", "e", "--wait", "20")
    assert got.status == 69
    assert got.err == "wcache: no slot of e runs\n"
