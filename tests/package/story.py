"""What an administrator does with a package, step by step, and what has to be true after each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.package.builds import NEXT, VERSION
from tests.package.host import Host
from tests.package.sides import Engine, Side
from tests.systemd.rank import CONFIG, Rank, eventually

TARGET, LOADERS = "weightcache.target", "weightcache-loader.socket"
SOCKET, SERVICE = "weightcache@0.socket", "weightcache@0"
EXPORTER = "weightcache-exporter.service"
WRONG = """\
[loader]
command = {command}
[model]
arguments = ["--model-path", "/srv/none"]
[memory]
backend = "host"
"""


class Story:
    """One host from its first package to the last, and what one step leaves to the next one."""

    def __init__(self, host: Host, side: Side) -> None:
        self.host, self.side = host, side
        self.bare: set[str] = set()
        """What was on the host before."""
        self._engine: Engine | None = None
        self._pid = 0
        self._set = ""

    @property
    def engine(self) -> Engine:
        """The engine that an earlier step started."""
        assert self._engine is not None, "no engine: an earlier step failed"
        return self._engine

    def end(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def enabled(self, *units: str) -> list[str]:
        """What systemctl says of them."""
        return [self.host.systemctl("is-enabled", unit, check=False) for unit in units]

    # -- steps -----------------------------------------------------------------------------------------------------

    def install(self, package: Path) -> str:
        """Nothing starts."""
        self.bare = self.host.everything()
        said = self.host.install(package)
        assert f"nothing is started yet: edit {CONFIG}" in said
        assert self.host.units() == []
        run = self.host.path("/run/weightcache")
        assert [path.relative_to(run).as_posix() for path in run.rglob("*")] == ["engines"]
        self.host.join("weightcache")
        self.side.plug_in(self.host)
        return said

    def mistake(self, command: str) -> None:
        """A loader that cannot run is a state and a sentence, and no loop of restarts."""
        host = self.host
        host.write_file(CONFIG, WRONG.format(command=command))
        assert host.run("systemctl", "start", SERVICE, check=False).returncode != 0
        rank = Rank(host)
        rank.await_active()
        status = rank.status()
        assert status.state == "failed"
        assert status.error is not None
        assert "edit loader.command in weightcache.toml" in status.error.message
        pid = host.main_pid(SERVICE)
        subprocess.run(["sleep", "1"], check=True)
        assert (host.main_pid(SERVICE), rank.restarts) == (pid, 1)
        host.systemctl("stop", SERVICE)

    def attach(self) -> None:
        """An engine connects to the socket; that starts the agent, which loads."""
        host = self.host
        host.write_file(CONFIG, self.side.configuration)
        host.systemctl("enable", "--now", SOCKET)
        assert not host.main_pid(SERVICE)
        rank = Rank(host)
        self._engine = self.side.attach(rank)
        rank.await_active()
        status = rank.status()
        assert (status.state, status.version, status.kept) == ("ready", VERSION, "store")
        [held] = status.sets
        assert len(held.leases) == 1
        assert rank.count("load-began", "set-published") == (1, 1)
        self._pid, self._set = host.main_pid(SERVICE), held.id
        self.engine.check()

    def upgrade(self, package: Path) -> None:
        """Nothing that runs is touched."""
        host, rank = self.host, Rank(self.host)
        said = host.install(package)
        assert "systemctl restart 'weightcache@*.service'" in said
        assert host.path(CONFIG).read_text() == self.side.configuration
        assert host.run("wcache", "--version").stdout.split()[1] == NEXT
        status = rank.status()
        assert (host.main_pid(SERVICE), status.version) == (self._pid, VERSION)
        assert [(held.id, len(held.leases)) for held in status.sets] == [(self._set, 1)]
        assert host.show(f"{SERVICE}.service", "NeedDaemonReload") == {"NeedDaemonReload": "no"}
        self.engine.check()

    def restart(self) -> None:
        """The new code takes the weights over, and nothing is read."""
        host = self.host
        self.side.plug_in(host)
        rank = Rank(host)
        self.side.forget()
        host.systemctl("restart", "weightcache@*.service")
        rank.await_active()
        status = rank.status()
        assert (status.state, status.version, [held.id for held in status.sets]) == ("ready", NEXT, [self._set])
        assert host.main_pid(SERVICE) != self._pid
        eventually(lambda: [len(held.leases) for held in rank.status().sets] == [1], rank.status)
        self.engine.check()
        self.side.map_again(rank)
        assert rank.count("set-adopted", "load-began") == (1, 0)
        assert self.side.read() == 0

    def remove(self) -> None:
        """All is stopped and disabled; the engine goes on."""
        host = self.host
        host.systemctl("enable", "weightcache-warm@0", EXPORTER, "weightcache-engine@e-a", "weightcache-http@e.socket")
        host.remove()
        self.engine.check()
        assert host.units() == []
        assert host.links() == []
        for user in ("weightcache", "weightcache-loader", "weightcache-engine", "weightcache-exporter"):
            assert host.run("pgrep", "--uid", user, check=False).stdout == ""
        assert not host.path("/run/weightcache").exists()
        for folder in ("lib", "libexec", "share"):
            assert not host.path(f"/usr/{folder}/weightcache").exists()


@contextmanager
def told(host: Host, side: Side) -> Iterator[Story]:
    """Tell it on ``host``, which is booted for it."""
    with pytest.MonkeyPatch.context() as patch, host:
        # The users of a machine are not this machine's.
        patch.setattr("weightcache.client.trusted_uids", lambda: range(1 << 32))
        side.prepare(host)
        story = Story(host, side)
        yield story
        story.end()
