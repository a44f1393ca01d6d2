"""Where a parked tree cannot be used there is one line that says why, and an engine that was started afresh."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.unit.launch.support import alive, eventually
from tests.unit.warm.support import PARKED, Launched

pytestmark = pytest.mark.timeout(180)


def main_of(states: list) -> int:
    return int(states[0]["pid"])


def test_sigkill_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    with Launched(tmp_path) as launched:
        launched.wait_for(PARKED)
        family = launched.family()
        assert len(family) >= 7
        launched.process.kill()
        launched.process.wait(10)
        assert eventually(lambda: not any(map(alive, family)), 10)


def test_a_tree_that_dies_while_it_is_parked_is_replaced(tmp_path: Path) -> None:
    with Launched(tmp_path) as launched:
        launched.wait_for(PARKED)
        first = launched.parked()
        os.kill(first, signal.SIGKILL)
        launched.wait_for("the parked processes ended")
        assert not Path(f"/proc/{first}").exists()  # reaped
        launched.wait_for(PARKED, 2)
        assert launched.after(main_of)[0]["pid"] != first
        assert "starting afresh" not in launched.text()


def test_a_child_that_dies_while_it_is_parked_takes_its_tree_along(tmp_path: Path) -> None:
    with Launched(tmp_path) as launched:
        launched.wait_for(PARKED)
        parked = launched.parked()
        scheduler = min(pid for pid in launched.family() if _parent(pid) == parked)
        os.kill(scheduler, signal.SIGKILL)
        launched.wait_for("the parked processes ended: the scheduler ended while it was parked; trying again in 5 s")
        launched.wait_for(PARKED, 2)
        assert not alive(parked)
        assert launched.after(main_of)[0]["pid"] != parked
        assert "starting afresh" not in launched.text()


def test_changed_code_is_not_run_from_a_parked_tree(tmp_path: Path) -> None:
    changing = tmp_path / "changing"
    changing.mkdir()
    (changing / "sitecustomize.py").write_text("import changes\n")
    (changing / "changes.py").write_text("")
    launched = Launched(tmp_path)
    launched.environment["PYTHONPATH"] += f":{changing}"
    with launched:
        launched.wait_for(PARKED)
        parked = launched.parked()
        (changing / "changes.py").write_text("# new\n")
        assert launched.after(main_of)[0]["pid"] != parked
        assert f"no warm worker: {changing / 'changes.py'} changed since it was parked; starting afresh" in (
            launched.said()
        )
        assert not alive(parked)


def test_imports_that_initialise_cuda_park_nothing(tmp_path: Path) -> None:
    with Launched(tmp_path, FAKE_ASK="1") as launched:
        launched.wait_for("must hold no GPU memory")
        assert len(launched.states()) == 3
        line = next(line for line in launched.said() if "GPU memory" in line)
        assert line.startswith("no warm worker: importing SGLang made a CUDA context")


def test_a_variable_that_children_would_miss_costs_the_child_only(tmp_path: Path) -> None:
    """SGLang sets another value for each start, and nobody knows whether imports read it."""
    with Launched(tmp_path, "--random", "RANDOM_NAME") as launched:
        launched.wait_for(PARKED)
        parked = launched.parked()
        states = launched.after(main_of)
        assert states[0]["pid"] == parked
        assert "scheduler: not from a warm worker: its environment would differ in RANDOM_NAME" in launched.text()


def test_processes_that_are_not_parked_are_spawned(tmp_path: Path) -> None:
    with Launched(tmp_path, "--extra") as launched:
        launched.wait_for(PARKED)
        parked = launched.parked()
        assert launched.after(main_of)[0]["pid"] == parked


def test_without_workers_nothing_is_parked(tmp_path: Path) -> None:
    with Launched(tmp_path, "--wcache-without=workers") as launched:
        first = launched.states()
        assert launched.after(main_of) != first
        assert "1 restart so far" in launched.text()
        assert "warm" not in "".join(launched.said())


def test_two_launchers_have_a_tree_each(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Launched(tmp_path / "a") as one, Launched(tmp_path / "b") as other:
        both = (one, other)
        for launched in both:
            launched.wait_for(PARKED)
        parked = [launched.parked() for launched in both]
        assert len(set(parked)) == 2
        for launched in both:
            os.kill(main_of(launched.states()), signal.SIGKILL)
        for launched, pid in zip(both, parked, strict=True):
            launched.wait_for("serving", 2)
            assert main_of(launched.states()) == pid


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
