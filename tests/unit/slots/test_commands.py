"""promote, park, wake and the end of a service: nothing is lost by what somebody asks for."""

from __future__ import annotations

import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.launch.support import alive, eventually
from tests.unit.slots.support import NAME, OTHER, Slots, clients, request
from weightcache.cli.main import main
from weightcache.errors import AgentUnavailable
from weightcache.launch.restart import MOST_DEATHS
from weightcache.standby.places import EnginePaths


def test_promote_hands_over_without_a_failed_request(slots: Slots) -> None:
    slots.start("a", "b")
    active = slots.stand()
    with clients(slots.address, 3) as answers:
        for _ in range(2):
            assert slots.ask(active, "retire").ok
            promotion = slots.until(OTHER[active], "active").promotions[-1]
            assert promotion.cause == "promote"
            active = OTHER[active]
            assert slots.stand() == active
    assert all(answer.who for answer in answers)
    assert "retired" in slots.lines("a")
    assert "retired" in slots.lines("b")
    slots.check_never_two()


def test_requests_that_run_may_end(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    slots.start("b")
    slots.until("b", "standby")
    answers = []
    slow = threading.Thread(target=lambda: answers.append(request(slots.address, 1.0)))
    slow.start()
    assert eventually(lambda: request(slots.address).who is not None)
    assert slots.ask("a", "retire").ok
    slots.until("b", "active")
    slow.join(10)
    assert (answers[0].who or "").startswith("a ")


def test_without_a_standby_nobody_retires(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    reply = slots.ask("a", "retire")
    assert not reply.ok
    assert reply.text == "demo-a does not retire: nobody would take over: the other slot is down, not standby"
    slots.start("b")
    slots.until("b", "standby")
    reply = slots.ask("b", "retire")
    assert reply.text == "demo-b does not retire: it is not active, but standby"
    report = slots.ask("a", "report")
    assert report.ok
    assert report.status == slots.status("a")


def test_park_and_wake_lose_nothing(slots: Slots) -> None:
    slots.start("a", "b")
    active = slots.stand()
    with clients(slots.address, 2) as answers:
        # Only one is told: the other one sees the marker when it is elected.
        assert slots.ask(active, "park").ok
        slots.until("a", "parked")
        slots.until("b", "parked")
        served = len(answers)
        assert slots.ask(active, "wake").ok
        promotion = slots.until(active, "active").promotions[-1]
        assert promotion.cause == "wake"
        slots.until(OTHER[active], "standby")
        assert eventually(lambda: len(answers) > served + 2)
    assert all(answer.who for answer in answers)
    slots.check_never_two()


def test_parked_is_what_new_launchers_find(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    assert slots.ask("a", "park").ok
    slots.until("a", "parked")
    slots.kill("a", "everything")
    slots.start("a", "b")
    slots.until("a", "parked")
    slots.until("b", "parked")
    assert any(line.startswith("parked (ready after ") for line in slots.lines("b"))
    assert slots.ask("b", "wake").ok
    assert slots.stand()


def test_a_service_that_is_stopped_retires_first(slots: Slots) -> None:
    slots.start("a")
    found = slots.until("a", "active")
    slots.start("b")
    slots.until("b", "standby")
    with clients(slots.address, 3) as answers:
        slots.launchers["a"].terminate()
        assert slots.until("b", "active").promotions[-1].cause == "promote"
        assert slots.launchers.pop("a").wait(20) == -signal.SIGTERM
    assert all(answer.who for answer in answers)
    assert not any(alive(rank.pid) for rank in found.ranks)
    down = slots.status("a")
    assert down is not None
    assert (down.role, down.main, down.ranks) == ("down", None, ())
    assert not slots.paths.control("a").exists()
    assert not slots.paths.private("a").exists()
    assert slots.paths.lock.exists()
    slots.check_never_two()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_standby_that_is_stopped_ends_at_once(slots: Slots, name: str) -> None:
    slots.start("a")
    slots.until("a", "active")
    slots.start("b")
    slots.until("b", "standby")
    number = getattr(signal, name)
    slots.launchers["b"].send_signal(number)
    assert slots.launchers.pop("b").wait(20) in (-number, 1)
    assert slots.role("b") == "down"
    assert slots.role("a") == "active"


def test_a_signal_between_two_engines_leaves_nothing_behind(slots: Slots) -> None:
    (slots.journal / "dies-a").touch()
    slots.more["FIRST_PAUSE"] = "60"
    slots.start("a")
    assert eventually(lambda: "starting it again in 30 s" in slots.log("a"), 20), slots.log("a")
    assert slots.ask("a", "report").ok
    slots.launchers["a"].terminate()
    assert slots.launchers.pop("a").wait(20) == -signal.SIGTERM
    assert slots.role("a") == "down"
    assert not slots.paths.control("a").exists()


def test_a_first_start_without_weights_is_tried_again_with_pauses(slots: Slots) -> None:
    """As after a boot, before an agent runs: the service manager would start the launcher again at once."""
    file = slots.folder / "engines" / "demo.toml"
    file.write_text(file.read_text().replace("'fallback'", "'error'"))
    slots.more["FIRST_PAUSE"] = "60"
    slots.start("a")
    assert eventually(lambda: "starting it again in 30 s" in slots.log("a"), 20), slots.log("a")
    assert "the engine cannot be started: no agent" in slots.log("a")
    assert slots.launchers["a"].poll() is None


def test_an_interpreter_that_is_not_there_for_a_while_ends_no_launcher(slots: Slots) -> None:
    """The service manager starts no launcher again that says that its options cannot work."""
    python = slots.folder / "python"
    python.symlink_to(sys.executable)
    file = slots.folder / "engines" / "demo.toml"
    file.write_text(file.read_text().replace("[engine]\n", f"[engine]\npython = '{python}'\n"))
    slots.start("a")
    slots.until("a", "active")
    python.unlink()
    slots.kill("a", "main")
    missing = f"the engine cannot be started: {python} cannot be started (No such file or directory)"
    assert eventually(lambda: slots.log("a").count(missing) > MOST_DEATHS, 20), slots.log("a")
    assert slots.ask("a", "report").ok
    python.symlink_to(sys.executable)
    slots.until("a", "active")
    assert slots.launchers["a"].poll() is None


def test_who_may_give_commands(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    mode = slots.paths.control("a").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o660


def test_what_is_no_command_is_answered(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    for garbage in (b"{}", b"[" * 100_000, b"\xff", b'{"verb": "dance"}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(str(slots.paths.control("a")))
            sock.send(garbage)
            assert b"that is no command" in sock.recv(65536)
    assert slots.ask("a", "report").ok


def test_no_launcher_is_an_error_that_says_so(slots: Slots) -> None:
    with pytest.raises(AgentUnavailable, match="is the slot's unit running"):
        slots.ask("a", "report")


def refused(slots: Slots, handed: bool = True) -> str:
    process = slots.launcher("a", handed)
    assert process.wait(20) != 0
    return slots.log("a")


def test_an_option_says_where_the_files_are_as_for_who_looks(
    slots: Slots, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = runtime_dir / "asked"
    slots.options = ("--wcache-runtime-dir", str(asked))
    slots.paths = EnginePaths(asked / "engines", NAME)
    slots.start("a", "b")
    active = slots.stand()
    monkeypatch.setenv("WEIGHTCACHE_ENGINES_DIR", str(slots.folder / "engines"))
    monkeypatch.setenv("WEIGHTCACHE_RUNTIME_DIR", str(slots.runtime))
    assert main(["promote", NAME, "--runtime-dir", str(asked)]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME}-{OTHER[active]} is active after ")
    slots.stand()
    assert main(["engines", "--runtime-dir", str(asked)]) == 0
    assert not (slots.runtime / "engines").exists()
    slots.check_never_two()


def test_a_slot_has_one_launcher(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    assert "weightcache: demo-a has a launcher already" in refused(slots)
    assert slots.ask("a", "report").ok


def test_a_launcher_that_cannot_work_does_not_spin_with_its_socket(slots: Slots) -> None:
    (slots.folder / "engines" / f"{NAME}.toml").write_text("[engine]\n")
    began = time.monotonic()
    assert "engine.arguments: this key is missing" in refused(slots)
    assert time.monotonic() - began >= 0.5


def test_without_the_socket_unit_nothing_starts(slots: Slots) -> None:
    said = refused(slots, handed=False)
    assert f"it takes requests from weightcache-http@{NAME}.socket" in said
    assert not list(slots.journal.iterdir())


def test_what_the_service_manager_hears(slots: Slots, runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(runtime_dir / "notify"))
        manager.settimeout(20)
        slots.notify = {"NOTIFY_SOCKET": str(runtime_dir / "notify"), "WATCHDOG_USEC": "400000"}
        slots.start("a")
        heard: list[str] = []
        while heard.count("WATCHDOG=1") < 3 or not any(line.startswith("STATUS=active since ") for line in heard):
            heard += manager.recv(4096).decode().splitlines()
        assert heard.count("READY=1") == 1
        assert heard.index("STATUS=starting") < heard.index("STATUS=standby") < heard.index("STATUS=promoting")
        slots.launchers["a"].terminate()
        while "STOPPING=1" not in heard:
            heard += manager.recv(4096).decode().splitlines()
    told = (slots.journal / "environment-a").read_text().splitlines()
    assert "FROM_FILE=yes" in told
    assert not [line for line in told if line.startswith(("NOTIFY", "WATCHDOG", "LISTEN"))]
