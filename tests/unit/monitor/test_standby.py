"""Engines with a standby as observers see them: from the files alone, whatever is in them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.monitor import made
from tests.unit.monitor.observed import GPUS, NOW, pair, slot, snapshot
from weightcache.cli.main import main as wcache
from weightcache.monitor import metrics, site as sites, standby, table
from weightcache.monitor.families import CAUSES, ENGINE_ROLES
from weightcache.monitor.live import Live
from weightcache.monitor.recording import Recorder
from weightcache.monitor.replay import Replay
from weightcache.monitor.snapshot import plain
from weightcache.standby import fence, status
from weightcache.standby.listing import EngineView, SlotView
from weightcache.standby.messages import Process, Role
from weightcache.standby.places import EnginePaths
from weightcache.standby.status import Cause, Promotion, SlotStatus

FILE = '[engine]\narguments = ["--model-path", "/models/m", "--port", "30000", "--api-key", "hidden"]\n'


class Host:
    """The directories of a host with the engine chat."""

    def __init__(self, root: Path) -> None:
        self.run, self.config = root / "run", root / "engines"
        self.config.mkdir()
        (self.config / "chat.toml").write_text(FILE)
        self.paths = EnginePaths(self.run / "engines", "chat")
        self.paths.prepare()

    def slot(self, slot: str, role: Role, **fields: object) -> SlotStatus:
        promotions = (Promotion(time.time() - 5, 0.56, "death", {"map": 0.3}),) if role == "active" else ()
        written = SlotStatus("chat", slot, role, time.time() - 61, fence.identify(os.getpid()), promotions=promotions)
        status.write(self.paths.status(slot), written)
        return written


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made_here = Host(runtime_dir)
    monkeypatch.setenv("WEIGHTCACHE_ENGINES_DIR", str(made_here.config))
    monkeypatch.setenv("WEIGHTCACHE_RUNTIME_DIR", str(made_here.run))
    return made_here


def test_a_snapshot_has_them_and_a_recording_keeps_them(host: Host, tmp_path: Path) -> None:
    active = host.slot("a", "active")
    live = Live(sites.open_site(None, None), None, 1.0, None)
    try:
        found = live.snapshot()
    finally:
        live.close()
    [engine] = found.standby
    assert (engine.engine, engine.listen, engine.model) == ("chat", "127.0.0.1:30000", "/models/m")
    assert [(one.role, one.status, one.problem) for one in engine.slots] == [("active", active, ""), ("down", None, "")]
    assert "hidden" not in json.dumps(plain(found))
    with Recorder(tmp_path / "r") as recorder:
        recorder.write(found)
    with contextlib.closing(Replay(tmp_path / "r")) as played:
        assert played.last() == found


def test_a_recording_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as recorder:
        recorder.write(snapshot())
    text = (tmp_path / "r").read_text()
    (tmp_path / "r").write_text(text.replace(',"standby":[]', ""))
    assert '"standby"' not in (tmp_path / "r").read_text()
    with contextlib.closing(Replay(tmp_path / "r")) as played:
        assert played.last() == snapshot()


def test_a_host_without_engines_shows_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCACHE_ENGINES_DIR", str(tmp_path / "none"))
    assert standby.look(tmp_path / "none") == ((), "")
    assert table.lines(made.snapshot(made.view())) == table.lines(made.snapshot(made.view(), standby=()))
    assert "weightcache_engine" not in metrics.text(made.snapshot(made.view()), GPUS)[0].decode()


def test_files_are_read_at_most_twice_a_second(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []

    def look(directory: Path) -> tuple[tuple[EngineView, ...], str]:
        looked.append(directory)
        return (), ""

    monkeypatch.setattr(standby, "look", look)
    seen = standby.Standby(host.paths.directory)
    for _ in range(100):
        seen.now()
    assert looked == [host.paths.directory]
    monkeypatch.setattr(standby, "LOOK_SECONDS", 0.0)
    seen.now()
    assert len(looked) == 2


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff" * 300_000),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.mkdir(),
        _link,
        os.mkfifo,
        lambda path: path.write_text(json.dumps({"schema": 2})),
    ],
)
def test_a_damaged_status_is_a_sentence(host: Host, spoil: Callable[[Path], None]) -> None:
    host.slot("b", "active")
    spoil(host.paths.status("a"))
    [engine], problem = standby.look(host.paths.directory)
    assert problem == ""
    assert [standby.role(one) for one in engine.slots] == ["unknown", "active"]
    assert str(host.paths.status("a")) in engine.slots[0].problem
    assert "\n" not in engine.slots[0].problem


@pytest.mark.parametrize("launcher", [(-1, 1), (0, 1), (2**70, 1), (2**31 - 1, -5)])
def test_a_launcher_that_cannot_be_is_no_error(host: Host, launcher: tuple[int, int]) -> None:
    host.slot("a", "active")
    text = host.paths.status("a").read_text()
    pid, started = launcher
    data = json.loads(text) | {"launcher": {"pid": pid, "started": started}}
    host.paths.status("a").write_text(json.dumps(data))
    [engine], problem = standby.look(host.paths.directory)
    assert problem == ""
    assert standby.role(engine.slots[0]) in ("down", "unknown")


def test_a_file_that_is_no_engine_hides_no_other(host: Host) -> None:
    (host.config / "no name.toml").touch()
    (host.config / "odd.toml").write_text("[engine]\narguments = []\n")
    engines, problem = standby.look(host.paths.directory)
    assert [engine.engine for engine in engines] == ["chat", "odd"]
    assert "no name.toml" in problem
    assert "--model-path is missing" in engines[1].problem


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("mode", "roles"), [(0o2771, ["active", "down"]), (0o2770, ["unknown", "unknown"])])
def test_somebody_in_no_group_sees_engines_with_a_file_alone(host: Host, mode: int, roles: list[str]) -> None:
    host.slot("a", "active")
    other = EnginePaths(host.paths.directory, "nameless")
    status.write(other.status("a"), host.slot("a", "active"))
    for path in (host.paths.lock, host.paths.roster("a")):
        path.touch(0o640)
    host.paths.directory.chmod(mode)
    for path in (host.run.parent, host.run):
        path.chmod(0o755)
    script = (
        "import json, os, sys; from pathlib import Path; from weightcache.monitor import standby\n"
        "directory = Path(sys.argv[1])\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "engines, problem = standby.look(directory)\n"
        "may = [name for name in ('chat.lock', 'chat-a.roster') if os.access(directory / name, os.R_OK)]\n"
        "print(json.dumps([[e.engine, [standby.role(s) for s in e.slots]] for e in engines] + [problem, may]))\n"
    )
    told = subprocess.run([sys.executable, "-c", script, str(host.paths.directory)], capture_output=True, check=True)
    assert json.loads(told.stdout) == [["chat", roles], "", []]


def test_an_unreadable_directory_of_files_is_a_sentence(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == host.config:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    host.slot("a", "active")
    [engine], problem = standby.look(host.paths.directory)
    assert engine.roles == ("active", "down")
    assert problem == f"{host.config}: cannot be read (Permission denied)"


def samples(*engines: EngineView, name: str, **labels: str) -> list[float]:
    found = metrics.registry(snapshot(standby=engines), GPUS).collect()
    return [
        sample.value
        for family in found
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def test_metrics_of_both_slots() -> None:
    assert samples(pair(), name="weightcache_engine_role", slot="a", role="active") == [1]
    assert sum(samples(pair(), name="weightcache_engine_role", slot="a")) == 1
    assert samples(pair(), name="weightcache_engine_role", slot="b", role="standby") == [1]
    assert samples(pair(), name="weightcache_engine_restarts_total") == [2, 2]
    assert samples(pair(), name="weightcache_engine_promotions_total", slot="a", cause="death") == [2]
    assert samples(pair(), name="weightcache_engine_promotions_total", slot="b") == [0] * len(CAUSES)
    assert samples(pair(), name="weightcache_engine_last_promotion_seconds") == [0.56]
    assert samples(pair(), name="weightcache_engine_last_promotion_timestamp_seconds") == [NOW - 600]
    assert samples(pair(), pair(engine="x", parked=True), name="weightcache_engine_parked") == [0, 1]


def test_metrics_of_a_slot_that_is_not_to_be_seen() -> None:
    hidden = pair(SlotView("a", "down", None, "this user may not"), SlotView("b", "down", None, ""))
    assert samples(hidden, name="weightcache_engine_role", slot="a", role="unknown") == [1]
    assert samples(hidden, name="weightcache_engine_role", slot="a", role="down") == [0]
    assert samples(hidden, name="weightcache_engine_role", slot="b", role="down") == [1]
    assert samples(hidden, name="weightcache_engine_restarts_total") == []


def test_the_words_are_the_launchers() -> None:
    assert (*typing.get_args(Role), standby.UNKNOWN) == ENGINE_ROLES
    assert typing.get_args(Cause) == CAUSES


def test_lines_for_people() -> None:
    failing = slot("b", "starting", main=None, promotions=())
    broken = SlotView("b", "starting", failing.status, "rank 0 has ended")
    shown = table.lines(
        made.snapshot(standby=(pair(slot("a", "active", main=Process(77, 1)), broken, parked=True),), at=NOW)
    )
    assert shown == [
        "engine chat: parked; `wcache wake chat` ends it",
        "slot chat-a: active for 10 min, pid 77, 2 restarts, promoted in 0.56 s (death) 10 min ago",
        "slot chat-b: starting for 10 min, 2 restarts",
        "slot chat-b: rank 0 has ended",
    ]


def test_wcache_metrics_has_them_but_not_for_one_rank(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    host.slot("a", "active")
    assert wcache(["metrics"]) == 0
    assert 'weightcache_engine_role{engine="chat",role="active",slot="a"} 1' in capfd.readouterr().out
    assert wcache(["metrics", "--rank", "3"]) == 0
    assert "weightcache_engine" not in capfd.readouterr().out
