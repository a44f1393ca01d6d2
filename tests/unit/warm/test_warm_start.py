"""An engine that comes from a parked tree is, from inside and outside, as one that was started afresh."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.support import alive, eventually
from tests.unit.warm.support import PARKED, Launched, differing

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with Launched(tmp_path_factory.mktemp("warm"), FAKE_IMPORTS=str(tmp_path_factory.mktemp("i") / "log")) as one:
        yield one


@pytest.fixture(scope="module")
def cold(launched: Launched) -> list[dict[str, Any]]:
    return launched.states()


@pytest.fixture(scope="module")
def warm(launched: Launched, cold: list[dict[str, Any]]) -> list[dict[str, Any]]:
    launched.wait_for(PARKED)
    parked = launched.parked()
    os.kill(cold[0]["pid"], signal.SIGKILL)
    assert eventually(lambda: not alive(cold[0]["pid"]), 20)
    states = launched.states()
    assert states[0]["pid"] == parked, launched.text()
    return states


def test_every_process_came_from_the_parked_tree(launched: Launched, warm: list[dict[str, Any]]) -> None:
    imported = [int(line.split()[0]) for line in Path(launched.environment["FAKE_IMPORTS"]).read_text().splitlines()]
    assert all(imported.count(state["pid"]) == 1 for state in warm)
    assert not any("no warm worker" in line or "not from a warm" in line for line in launched.said())


def test_it_looks_the_same_from_inside(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> None:
    assert differing(cold[0], warm[0]) == {"pid", "environment", "directive_at_import"}
    for before, after in zip(cold[1:], warm[1:], strict=True):
        # A child's own view of its command line: SGLang's children write a title over it.
        names = {"pid", "parent", "environment", "directive_at_import", "orig_argv"}
        assert differing(before, after) == names
    for before, after in zip(cold, warm, strict=True):
        assert differing(before["environment"], after["environment"]) == {"SGLANG_RUN_ID"}


def test_the_directive_is_not_there_while_imports_run(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> None:
    assert [state["directive_at_import"] for state in (*cold, *warm)] == [True] * 3 + [False] * 3


def test_the_tree_is_the_usual_one(launched: Launched, cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> None:
    for main, *others in (cold, warm):
        assert main["parent"] == launched.process.pid
        assert [state["parent"] for state in others] == [main["pid"]] * 2
    group = os.getpgid(launched.process.pid)
    assert {os.getpgid(state["pid"]) for state in warm} == {group}


def test_the_command_line_is_the_servers(launched: Launched, warm: list[dict[str, Any]]) -> None:
    words = Path(f"/proc/{warm[0]['pid']}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    assert words[1:] == ["-m", "sglang.launch_server", *launched.arguments]
    assert warm[0]["orig_argv"] == words


def test_the_next_tree_is_parked_and_used(launched: Launched, warm: list[dict[str, Any]]) -> None:
    launched.wait_for(PARKED, 2)
    parked = launched.parked()
    states = launched.after(lambda states: states[1]["pid"])  # its scheduler: the main process ends by itself
    assert states[0]["pid"] == parked
    assert "a child ended with -9" in launched.text()
    assert any(
        line.startswith("the engine ended with status 9 after ") and line.endswith("(2 restarts so far)")
        for line in launched.said()
    )
    assert "imported with a warning" in launched.text().rpartition("2 restarts so far")[2]


def test_sigterm_ends_everything_with_the_servers_status(launched: Launched, warm: list[dict[str, Any]]) -> None:
    launched.wait_for(PARKED, 3)
    family = launched.family()
    assert len(family) > 7
    launched.process.terminate()
    assert launched.process.wait(20) == 7
    assert eventually(lambda: not any(map(alive, family)), 10)
