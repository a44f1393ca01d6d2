"""What the keeper keeps, and what it lets go of."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from tests.unit.keeper.harness import PROBE, Rig, answer, eventually, kill, reaped, stopped
from weightcache import keeper


def test_twenty_kills_lose_neither_a_descriptor_nor_a_connection(rig: Rig) -> None:
    rig.start()
    rig.ready()
    expected: dict[str, list[str]] = {}
    for number in range(20):
        expected[f"arena-{number}"] = [f"bytes of {number}"]
        rig.ask("store", f"arena-{number}", [f"bytes of {number}"])
        pid = rig.state()["pid"]
        stopped(pid)
        with rig.connect() as queued:
            queued.send(b'["state"]')
            kill(pid)
            with rig.connect() as meanwhile:
                meanwhile.send(b'["state"]')
                states = [answer(queued), answer(meanwhile)]
        for state in states:
            assert state["pid"] != pid
            assert state["contents"] == expected
    assert rig.text().count("ended: Killed") == 20
    assert f"as {states[0]['pid']} with 20 stored descriptors" in rig.text()


def test_nothing_is_imported_or_left_open_while_it_runs(rig: Rig) -> None:
    rig.start("--store-max", "40", keeper=PROBE, environment={"PROBE_DUMP": str(rig.dump)})
    rig.ready()
    before = rig.look()
    for number in range(20):
        rig.ask("store", "kept", [str(number)])
        assert len(rig.contents()["kept"]) == number + 1
    rig.ask("store", "more", [str(number) for number in range(30)])
    rig.ask("tell", "FDSTORE=1\nBARRIER=1", ["neither"])
    rig.ask("pipe", "hung up", "")
    assert len(rig.contents()["more"]) == 20
    rig.ask("tell", "\xff=\nSTATUS=so\x01 so\nSTATUS=no", [])
    after = rig.look()
    assert sorted(set(after["modules"]) - set(before["modules"])) == []
    assert len(after["fds"]) == len(before["fds"]) + 40
    for name in ("kept", "more"):
        rig.ask("tell", f"FDSTOREREMOVE=1\nFDNAME={name}", [])
    eventually(lambda: len(rig.look()["fds"]) == len(before["fds"]))
    assert rig.stop() == 0
    assert "last status: so  so)" in rig.text()


def test_a_full_store_closes_and_the_canary_sees_it(rig: Rig) -> None:
    rig.start("--store-max", "5")
    rig.ready()
    rig.ask("store", "a", list("12"))
    assert rig.ask("canary", "canary")
    rig.ask("store", "b", list("1234"))
    assert not rig.ask("canary", "late")
    assert rig.contents() == {"a": ["1", "2"], "canary": ["pipe"], "b": ["1", "2"]}
    assert rig.text().count("the store is full with 5 descriptors") == 1
    rig.ask("tell", "FDSTOREREMOVE=1\nFDNAME=a", [])
    assert rig.ask("canary", "late")
    assert rig.state()["environment"]["FDSTORE"] == "5"


@pytest.mark.parametrize(("stack", "least"), [(8 << 20, 480), (256 << 10, 400)])
def test_names_never_become_too_long_to_start_the_command(rig: Rig, stack: int, least: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    rig.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (stack, hard)))
    pid = rig.ready()["pid"]
    rig.ask("many", 600, 255)
    kill(pid)
    kept = rig.ask("count") - 1
    print(f"{kept} names of 255 bytes")
    assert least < kept < 512
    assert "cannot start" not in rig.text()


def test_remove_takes_all_of_a_name(rig: Rig) -> None:
    rig.start()
    rig.ready()
    for name in ("a", "b", "c"):
        rig.ask("store", name, ["1", "2"])
    rig.ask("tell", "FDSTOREREMOVE=1\nFDNAME=b", [])
    rig.ask("tell", "FDSTOREREMOVE=1", [])
    rig.ask("tell", "FDSTOREREMOVE=1\nFDNAME=nothing", [])
    assert rig.contents() == {"a": ["1", "2"], "c": ["1", "2"]}
    rig.ask("tell", "FDSTOREREMOVE=1\nFDNAME=a\nFDSTORE=1", ["3"])
    assert rig.contents() == {"a": ["3"], "c": ["1", "2"]}


def test_a_driver_that_is_slow_to_let_go_stops_nothing(rig: Rig) -> None:
    rig.start()
    rig.ready()
    rig.ask("slow", "slow", 3)
    begin = time.monotonic()
    rig.ask("tell", "FDSTOREREMOVE=1\nFDNAME=slow", [])
    assert rig.ask("canary", "x")
    assert rig.contents() == {"x": ["pipe"]}
    assert rig.stop() == 0
    assert time.monotonic() - begin < 2


def test_a_barrier_comes_after_300_messages_which_cost_little_memory(rig: Rig) -> None:
    rig.start()
    rig.ready()
    begin = time.monotonic()
    rig.ask("many", 300, 40)
    print(f"300 descriptors and a barrier: {1000 * (time.monotonic() - begin):.0f} ms")
    assert rig.contents() == {f"{number:040}": [str(number)] for number in range(300)}
    [line] = [x for x in Path(f"/proc/{rig.process.pid}/status").read_text().splitlines() if x.startswith("VmRSS:")]
    print(line)
    assert int(line.split()[1]) * 1024 < 15e6


def test_a_barrier_alone_and_a_barrier_that_breaks_the_rules(rig: Rig) -> None:
    rig.start()
    rig.ready()
    assert rig.ask("barrier")
    assert rig.ask("barrier", "FDSTORE=1\nFDNAME=x\nBARRIER=1")
    assert rig.ask("tell", "BARRIER=1", ["1", "2"])
    assert rig.contents() == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("FDNAME=" + "x" * 255, "x" * 255),
        ("FDNAME=a b~", "a b~"),
        ("FDNAME=first\nFDNAME=second", "first"),
        ("FDNAME=" + "x" * 256, "stored"),
        ("FDNAME=a:b", "stored"),
        ("FDNAME=a\tb", "stored"),
        ("FDNAME=\u00e9", "stored"),
        ("FDNAME=", "stored"),
        ("READY=1\nMAINPID=1\nnonsense\n", "stored"),
    ],
)
def test_names(rig: Rig, line: str, name: str) -> None:
    rig.start()
    rig.ready()
    rig.ask("tell", f"{line}\nFDSTORE=1", ["1", "2"])
    assert rig.contents() == {name: ["1", "2"]}


def test_one_open_file_is_stored_once_under_a_name(rig: Rig) -> None:
    rig.start("--store-max", "2")
    rig.ready()
    rig.ask("again", "a", "b")
    assert rig.contents() == {"a": ["a"], "b": ["a"]}


def test_the_kernels_of_all_years_tell_one_open_file_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = os.memfd_create("one"), os.memfd_create("two")
    copy = os.dup(first)
    for query in (keeper.F_DUPFD_QUERY, 99999):
        monkeypatch.setattr(keeper, "F_DUPFD_QUERY", query)
        assert not keeper.same_file(first, second)
    # Answered by kcmp(2) now, which a container may forbid: then both are kept.
    assert keeper.same_file(first, copy) in (True, False)
    for fd in (first, second, copy):
        os.close(fd)


def test_what_hangs_up_is_dropped_unless_the_command_says_otherwise(rig: Rig) -> None:
    rig.start()
    rig.ready()
    rig.ask("pipe", "polled", "")
    rig.ask("pipe", "unpolled", "FDPOLL=0")
    rig.ask("store", "memory", ["1"], True, "FDPOLL=1")
    assert rig.contents() == {"unpolled": ["pipe"], "memory": ["1"]}


def test_nobody_else_is_heard(rig: Rig) -> None:
    rig.start()
    address = rig.ready()["environment"]["NOTIFY_SOCKET"]
    assert Path(address).parent.stat().st_mode & 0o777 == 0o700
    reading, writing = os.pipe()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", writing))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as foreign:
        foreign.connect(address)
        foreign.sendmsg([b"FDSTORE=1\nFDNAME=foreign"], rights)
        foreign.send(b"STATUS=foreign")
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert rig.contents() == {}
    assert rig.stop() == 0
    assert "foreign" not in rig.text()


def test_the_last_messages_of_a_killed_command_count(rig: Rig) -> None:
    rig.start()
    pid = rig.ready()["pid"]
    rig.ask("store", "early", ["0"])
    rig.ask("store", "gone", ["0"])
    stopped(rig.process.pid)
    rig.ask("tell", "FDSTORE=1\nFDNAME=late", ["1", "2", "3"], False)
    rig.ask("tell", "FDSTOREREMOVE=1\nFDNAME=gone", [], False)
    os.kill(pid, signal.SIGKILL)
    rig.process.send_signal(signal.SIGCONT)
    eventually(lambda: reaped(pid))
    assert rig.state()["contents"] == {"early": ["0"], "late": ["1", "2", "3"]}


def test_a_message_that_is_too_long_is_dropped(rig: Rig) -> None:
    rig.start()
    rig.ready()
    rig.ask("tell", "FDSTORE=1\nSTATUS=" + "x" * 4096, ["1"])
    assert rig.contents() == {}


def test_more_descriptors_than_the_keeper_may_have(rig: Rig) -> None:
    limits = (160, 160)
    rig.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    rig.ready()
    rig.ask("store", "kept", [str(number) for number in range(20)])
    rig.ask("copies", 200)
    assert rig.contents() == {"kept": [str(number) for number in range(16)]}
    assert "internal error" not in rig.text()
