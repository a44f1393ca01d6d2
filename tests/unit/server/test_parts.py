"""The parts that need no process."""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.server.harness import eventually
from weightcache.config import Config
from weightcache.errors import LoadFailed, WeightcacheError
from weightcache.loader import vitals
from weightcache.paths import RankPaths
from weightcache.protocol import DrainInfo
from weightcache.server import listen, markers, peers
from weightcache.server.__main__ import parse
from weightcache.server.peers import Peer
from weightcache.server.server import Server
from weightcache.server.settings import Options, Settings, model_in, resolve, uid_of
from weightcache.server.states import Backoff, Facts, State, state_of
from weightcache.server.waiting import Changes, first


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (Facts(), State.EMPTY),
        (Facts(failed=True), State.FAILED),
        (Facts(failed=True, loading=True), State.LOADING),
        (Facts(failed=True, resident=True), State.READY),
        (Facts(loading=True, resident=True), State.LOADING),
        (Facts(damaged=True, resident=True, loading=True), State.DEGRADED),
        (Facts(drained=True, damaged=True, resident=True, loading=True, failed=True), State.DRAINED),
    ],
)
def test_states(facts: Facts, state: State) -> None:
    assert state_of(facts) is state


def test_backoff_doubles_up_to_a_minute() -> None:
    backoff, delays = Backoff(), []
    for _ in range(9):
        backoff = backoff.after_failure(100.0)
        delays.append(backoff.left(100.0))
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert backoff.left(160.0) == 0
    assert Backoff().left(0.0) == 0


def settings(publishers: frozenset[int] = frozenset()) -> Settings:
    paths = RankPaths(Path("/nowhere"), 0)
    return Settings(0, paths, paths.public, Config(), publishers=publishers)


def test_who_may_do_what() -> None:
    mine, root, other, publisher = (Peer(1, uid, 0) for uid in (os.geteuid(), 0, 77777, 88888))
    rules = settings(frozenset({88888}))
    assert [rules.may_operate(peer) for peer in (mine, root, other, publisher)] == [True, True, False, False]
    assert [rules.may_publish(peer) for peer in (mine, root, other, publisher)] == [True, True, False, True]


def test_users_by_name_and_by_number() -> None:
    assert uid_of("77777") == 77777
    assert uid_of(pwd.getpwuid(0).pw_name) == 0
    with pytest.raises(KeyError):
        uid_of("nobody-has-this-name")


def test_problems_of_the_configuration_become_the_error(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[agent]\nsocket_group = "no-such-group"\n[policy]\npublishers = ["no-such-user"]\n'
        '[memory]\nbackend = "host"\n[[rank]]\nrank = 3\n'
    )
    found = resolve(Options(rank=0, config=file, runtime_dir=tmp_path))
    assert found.error is not None
    for part in ("rank = 0", "no-such-group", "no-such-user", str(file)):
        assert part in found.error.message
    assert found.error.code == "config"
    assert (found.paths.directory, found.gid, found.publishers) == (tmp_path, None, frozenset())
    missing = resolve(Options(rank=0, config=tmp_path / "missing.toml", runtime_dir=tmp_path))
    assert missing.error is not None


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (("--model-path", "/m", "--tp", "2"), "/m"),
        (("--tp", "2", "--model", "m"), "m"),
        (("--model-path=/m=x",), "/m=x"),
        (("--tp", "2"), ""),
        (("--model-path",), ""),
    ],
)
def test_the_model_among_the_arguments(arguments: tuple[str, ...], model: str) -> None:
    assert model_in(arguments) == model


def test_options() -> None:
    assert parse(["--rank", "3"]) == Options(3)
    assert parse(["--rank", "3", "--load", "--listen", "/s", "--config", "/c", "--runtime-dir", "/r"]) == Options(
        3, Path("/c"), Path("/r"), Path("/s"), True
    )


def test_units_from_cgroups() -> None:
    assert peers.unit_in("0::/system.slice/sglang@0.service\n") == "sglang@0.service"
    assert peers.unit_in("3:cpu:/x.service\n1:name=systemd:/user.slice/session-2.scope\n0::/\n") == "session-2.scope"
    assert peers.unit_in("0::/a.slice/b.service/inner\n") == "b.service"
    assert peers.unit_in("0::/\n") == ""
    assert peers.unit_in("nonsense") == ""


def test_a_command_line_is_harmless_and_short() -> None:
    nasty = "x\x1b[31m\n\u202e" + "y" * 300
    with subprocess.Popen([sys.executable, "-c", "input()", nasty], stdin=subprocess.PIPE) as child:
        shown = eventually(lambda: peers.command_of(child.pid))
        child.communicate(b"\n")
    assert shown.startswith(f"{sys.executable} -c 'input()' 'x?[31m??yyy")
    assert len(shown) == 200
    assert peers.command_of(0) == ""
    assert peers.unit_of(2**22 + 1) == ""


def test_a_command_line_shows_no_secrets() -> None:
    command = [sys.executable, "-c", "input()", "--api-key", "S" * 10_000, "--api_key", "S", "--hf_token=S", "--port=1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        shown = eventually(lambda: peers.command_of(child.pid))
        child.communicate(b"\n")
    assert shown.endswith("--api-key ***")  # as much as is read of it
    command[4] = "S"
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        shown = eventually(lambda: peers.command_of(child.pid))
        child.communicate(b"\n")
    assert shown.endswith("--api-key *** --api_key *** --hf_token=*** --port=1")


def test_a_pidfd_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = peers.identify(ours)
        assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
        for option in (77, 9999):  # with SO_PEERPIDFD, and as a kernel before 6.5 answers
            monkeypatch.setattr(peers, "_SO_PEERPIDFD", option)
            fd = peers.open_pidfd(ours, peer)
            assert fd is not None
            assert not os.get_inheritable(fd)
            os.close(fd)
        assert peers.open_pidfd(ours, Peer(0, 0, 0)) is None
        theirs.close()
        with pytest.raises(ProcessLookupError):
            peers.open_pidfd(ours, peer)


class _Failing:
    """A socket whose peer cannot be had as a descriptor."""

    def __init__(self, number: int) -> None:
        self._number = number

    def getsockopt(self, *_: int) -> bytes:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    ("number", "gone"),
    [("ESRCH", True), ("ENODATA", True), ("EINVAL", True), ("EMFILE", False), ("ENFILE", False), ("ENOMEM", False)],
)
def test_a_peer_is_gone_only_if_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch, number: str, gone: bool) -> None:
    code = getattr(errno, number)
    with pytest.raises(OSError, match=r".") as caught:
        peers.open_pidfd(cast("socket.socket", _Failing(code)), Peer(os.getpid(), 0, 0))
    assert (type(caught.value) is ProcessLookupError, caught.value.errno) == (gone, errno.ESRCH if gone else code)
    if number in ("EINVAL", "ENODATA"):
        return

    def fail(_: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match=r".") as caught:
        peers.open_pidfd(cast("socket.socket", _Failing(errno.ENOPROTOOPT)), Peer(os.getpid(), 0, 0))
    assert (type(caught.value) is ProcessLookupError, caught.value.errno) == (gone, code)


def test_markers_survive_anything(tmp_path: Path) -> None:
    path, unreadable = tmp_path / "marker", DrainInfo(-1, 0.0)
    assert markers.read(path, DrainInfo, unreadable) is None
    markers.write(path, DrainInfo(7, 1.5))
    assert markers.read(path, DrainInfo, unreadable) == DrainInfo(7, 1.5)
    for text in ("", "{", '{"uid": "x"}', "[]"):
        path.write_text(text)
        assert markers.read(path, DrainInfo, unreadable) == unreadable
    markers.remove(path)
    markers.remove(path)
    assert list(tmp_path.iterdir()) == []


def test_descriptors_meant_for_another_process_are_left_alone() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert listen.handed_in(environment) == listen.Handed()
    assert environment == {"HOME": "/"}


def test_a_session_shows_signs_of_life() -> None:
    code = "import os\nwhile os.read(0, 1): sum(range(10**6))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdin is not None
        before = vitals.of_session(child.pid)
        assert before[0] == 1
        child.stdin.write(b"xx")
        child.stdin.flush()
        while vitals.of_session(child.pid) == before:
            assert child.poll() is None
        child.stdin.close()
    assert vitals.of_session(child.pid) == (0, 0, 0)


def test_waiting_for_the_first_event_and_for_changes() -> None:
    async def run() -> None:
        one, other = asyncio.Event(), asyncio.Event()
        await first(one, other, seconds=0.01)
        asyncio.get_running_loop().call_soon(other.set)
        await first(one, other)
        changes = Changes()
        waiters = [asyncio.ensure_future(changes.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        changes.notify()
        await asyncio.gather(*waiters)
        await changes.wait(0.01)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


class _Ending:
    """Doors and readiness of an agent whose first load failed, as far as its end looks at them."""

    quiet = True

    def __init__(self) -> None:
        self.accepting = True
        self.accepted_late = False

    def stop(self) -> None:
        self.accepting = False

    async def rise(self, prepared: Any, load: bool, activated: bool) -> None:
        prepared.close()
        raise LoadFailed("no weights")

    def fail(self, error: WeightcacheError) -> None:
        """Nobody hears it."""

    async def close(self) -> None:
        self.accepted_late = self.accepting

    def give_in(self, error: WeightcacheError) -> None:
        """There is no agent."""

    activated = False


async def _nothing() -> None:
    pass


def test_an_agent_that_gives_up_accepts_nobody_whom_it_would_hang_up_on() -> None:
    """Between its last look at who waits and its end."""
    ending: Any = _Ending()

    async def give_up() -> None:
        server = Server(settings())
        with pytest.raises(LoadFailed):
            await server._report(ending, ending, ending, _nothing(), load=True)

    asyncio.run(give_up())
    assert not ending.accepted_late


def swapping(path: Path, target: Path) -> Callable[[int], int]:
    """An os.umask() after whose second call ``path``, a socket that was bound just now, is a link to ``target``."""
    umask, calls = os.umask, []

    def called(mask: int) -> int:
        calls.append(mask)
        if len(calls) == 2:
            path.unlink()
            path.symlink_to(target)
        return umask(mask)

    return called


def test_nothing_happens_to_what_is_put_in_the_place_of_a_socket(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = runtime_dir / "victim", runtime_dir / "0.sock"
    victim.touch(0o600)
    before = victim.stat()
    other = next((gid for gid in (*os.getgroups(), 7) if gid != before.st_gid), 7)
    monkeypatch.setattr(os, "umask", swapping(path, victim))
    listener = listen.bind(path, 0o666, other)
    listen.let_in(path, 7)
    listener.close()
    after = victim.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)
    assert "system.posix_acl_access" not in os.listxattr(victim)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_a_socket_has_its_mode_whatever_the_umask(runtime_dir: Path, mode: int, mask: int) -> None:
    before = os.umask(mask)
    try:
        listener = listen.bind(runtime_dir / "0.sock", mode)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((runtime_dir / "0.sock").lstat().st_mode) == mode
    listener.close()
    assert not list(runtime_dir.iterdir())
