"""The operator's side of a host: what loads, and what attaches.

``Standin`` takes no torch: a loader that publishes made-up weights, and a client that maps them. ``Sglang`` is the real
one, in an environment of its own (/opt/sglang), into which the package's wheel is installed by pip.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.package.host import Host
from tests.support import pagecache
from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import REPOSITORY, SHIM, environments, folder
from tests.systemd.machine import Inside
from tests.systemd.rank import Client, Rank, configuration
from weightcache.checkpoint import weight_files

HOME = "/opt/sglang"
PYTHON = f"{HOME}/bin/python"
SERVE = REPOSITORY / "tests" / "package" / "serve.py"
LOG = "/tmp/engine.log"
PACKAGED = "/usr/lib/weightcache"
WHEEL = "/usr/share/weightcache/weightcache-*.whl"


class Engine(Protocol):
    """Something that attached."""

    def check(self) -> None:
        """The weights are those that were mapped in the beginning."""

    def close(self) -> None:
        """End it."""


class Side(Protocol):
    """What the operator has."""

    readable: Sequence[Path]

    def prepare(self, host: Host) -> None:
        """What is there before the package."""

    def plug_in(self, host: Host) -> None:
        """What the package's documentation tells to do after an installation or an upgrade."""

    @property
    @abstractmethod
    def configuration(self) -> str:
        """The configuration file."""

    def attach(self, rank: Rank) -> Engine:
        """Start an engine, and wait until it has weights."""

    def isolated(self, host: Host) -> None:
        """The engine runs on the plugin alone."""

    def map_again(self, rank: Rank) -> None:
        """Map what is resident in one more process."""

    def forget(self) -> None:
        """Take the checkpoint out of the page cache."""

    def read(self) -> int:
        """Bytes of the checkpoint that were read from disk since."""


class StandinEngine(Client):
    """The client of the systemd tests."""

    def check(self) -> None:
        """Compare digests."""
        self.unharmed()


class Standin:
    """No torch, no checkpoint."""

    readable: Sequence[Path] = (REPOSITORY,)
    configuration = configuration()

    def prepare(self, host: Host) -> None:
        """Nothing."""

    def plug_in(self, host: Host) -> None:
        """Nothing: it runs on the package's own code."""

    def attach(self, rank: Rank) -> StandinEngine:
        """Attach as a member of the group."""
        return StandinEngine(rank)

    def isolated(self, host: Host) -> None:
        """There is nothing to be kept apart."""

    def map_again(self, rank: Rank) -> None:
        """As one more engine."""
        with self.attach(rank) as another:
            another.check()

    def forget(self) -> None:
        """Nothing."""

    def read(self) -> int:
        """Made-up weights are read from nowhere."""
        return 0


class SglangEngine:
    """serve.py inside."""

    def __init__(self, host: Host, model: Path) -> None:
        self.host = host
        variables = ("env", "HOME=/tmp", f"WEIGHTCACHE_ENVS={folder()}")
        pipe = subprocess.PIPE
        self._process: Inside = host.popen(
            [*variables, PYTHON, SERVE, model, LOG], user="member", stdin=pipe, stdout=pipe, text=True
        )
        try:
            self.first = self._read()
            assert [line for line in self.first["said"] if "attached set" in line], self.first
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """It answers as in the beginning."""
        print(file=self._process.stdin, flush=True)
        assert self._read()["text"] == self.first["text"]

    def close(self) -> None:
        """Let it end its server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended\n{self._log()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.host.path(LOG).read_text(errors="replace")
        return ""


class Sglang:
    """SGLang on the CPU, with the interpreter that its environment was made for, whatever the host's own one is."""

    def __init__(self, model: Path) -> None:
        engine = environments().engine()
        self.model = model
        self.interpreter = engine.resolve()
        script = "import sysconfig; print(sysconfig.get_path('stdlib')); print(sysconfig.get_path('purelib'))"
        shown = subprocess.run([engine, "-Ic", script], check=True, capture_output=True, text=True).stdout
        stdlib, self.packages = map(Path, shown.split())
        self.readable: Sequence[Path] = (REPOSITORY, folder(), stdlib, model)

    def prepare(self, host: Host) -> None:
        """An environment at /opt/sglang; torch and SGLang are those of the tests' environment."""
        inside = host.path(self.interpreter)
        if not inside.exists():
            shutil.copy2(self.interpreter, inside)
        host.run(self.interpreter, "-m", "venv", "--without-pip", HOME)
        [site] = host.path(f"{HOME}/lib").glob("python3.*/site-packages")
        (site / "base.pth").write_text(f"{self.packages}\n")

    def plug_in(self, host: Host) -> None:
        """Install the wheel. The environment below has a weightcache of its own, which is not to be touched."""
        below = "--ignore-installed"
        pip = f"{PYTHON} -m pip -q install --root-user-action=ignore --no-index {below} --no-deps"
        host.run("sh", "-c", f"{pip} {WHEEL}")

    @property
    def configuration(self) -> str:
        """The model, on the CPU."""
        return f"""\
[loader]
command = ["{PYTHON}", "-m", "weightcache.loader"]
environment = {{ PYTHONPATH = "{SHIM}", SGLANG_DISABLE_TELEMETRY = "1" }}
[model]
arguments = {json.dumps(["--model-path", str(self.model), *CPU_ARGUMENTS])}
[memory]
backend = "host"
[[rank]]
rank = 0
"""

    def attach(self, rank: Rank) -> SglangEngine:
        """Start a server with wcache-launch."""
        assert isinstance(rank.machine, Host)
        return SglangEngine(rank.machine, self.model)

    def isolated(self, host: Host) -> None:
        """SGLang finds exactly the plugin of the wheel, and nothing that agent and `wcache` bring along."""
        where = "import weightcache, importlib.metadata as m; print(weightcache.__file__);"
        where += "print(*(p.value for p in m.entry_points(group='sglang.srt.plugins') if p.name == 'weightcache'))"
        shown = host.run(PYTHON, "-c", where).stdout.splitlines()
        assert shown[0].startswith(f"{HOME}/lib/")
        assert shown[1:] == ["weightcache.engine.plugin:setup"]
        seen = 0
        for path in host.path("/proc").glob("[0-9]*"):
            if b"sglang.launch_server" in (path / "cmdline").read_bytes():
                seen += 1
                # What it would import, and from where.
                variables = [word.decode() for word in (path / "environ").read_bytes().split(b"\0") if word]
                assert (
                    PACKAGED
                    not in host.run("env", "-i", *variables, PYTHON, "-c", "import sys; print(sys.path)").stdout
                )
        assert seen

    def map_again(self, rank: Rank) -> None:
        """By the loader's command, which compares the digests."""
        rank.machine.run("wcache", "attach", "--check", timeout=240)

    def forget(self) -> None:
        """Of the copy that nobody else opens."""
        pagecache.drop(weight_files(self.model))

    def read(self) -> int:
        """What is back in the page cache."""
        return pagecache.resident(weight_files(self.model))
