"""A machine with a real systemd: a container that boots in a fraction of a second and that a test may do anything to.

    with Machine("257", stage, enable=["weightcache@0.socket"]) as machine:
        machine.run("systemctl", "start", "weightcache@0.service")
        pid = machine.main_pid("weightcache@0.service")
        machine.kill(pid)
        assert machine.show("weightcache@0.service", "NRestarts") == {"NRestarts": "1"}

"252" is this machine's own root below a throw-away layer (or, where this machine runs another version, a Debian 12),
"257" a Debian 13; tests/env/systemd.sh makes them. Both get the staged tree of a package (packaging/stage.sh).

Not as on a real machine: memory and device limits, negative OOM scores and a higher memlock limit are not enforced.
There is no network but loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import environments
from tests.systemd import leftovers

VERSIONS = ("252", "257")
BOOT_SECONDS = 60.0
STOP_SECONDS = 20.0
RUN_SECONDS = 60.0

USERS = """\
u member
m member weightcache
u stranger
"""
"""Users of the tests: one that may attach engines, and one that may not."""
VARIABLES = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "cat",
}
CONTAINER = [
    "--register=no", "--keep-unit", "--settings=no", "--private-network", "--link-journal=no", "--resolv-conf=off",
    "--timezone=off", "--suppress-sync=yes", "--notify-ready=yes", "--console=pipe", "--boot",
]  # fmt: skip


def missing(version: str) -> str:
    """Why a machine of ``version`` cannot be booted here; empty when it can."""
    if os.geteuid() != 0:
        return "only root can boot a container"
    if shutil.which("systemd-nspawn") is None:
        return "systemd-nspawn is not installed: run `make env-systemd`"
    if _lower(version) is None:
        return f"there is no root with systemd {version}: run `make env-systemd`"
    if not leftovers.hierarchies():
        return "no cgroup hierarchy for systemd is mounted"
    return ""


def _visible(readable: Sequence[Path]) -> dict[str, str]:
    """Drop-ins for units with a /tmp of their own, where a checkout or an environment lies below the real one."""
    hidden = [str(path) for path in readable if path.is_relative_to("/tmp") or path.is_relative_to("/var/tmp")]
    text = "[Service]\n" + "".join(f"BindReadOnlyPaths={path}\n" for path in hidden)
    units = ("weightcache@.service", "weightcache-loader@.service") if hidden else ()
    return {f"/etc/systemd/system/{unit}.d/readable.conf": text for unit in units}


def _lower(version: str) -> Path | None:
    made = environments.folder() / f"root-{version}"
    if (made / ".stamp").is_file():
        return made
    shown = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return Path("/") if shown.startswith(f"systemd {version} ") else None


class Inside(subprocess.Popen[Any]):
    """A command inside. It is the child of the process that subprocess started, and gets the signals."""

    @property
    def inner(self) -> int:
        """The number of the command inside; 0 before it runs or when it is over."""
        if not (child := self._child()):
            return 0
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{child}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
        return 0

    def send_signal(self, sig: int) -> None:
        """Send a signal to the command."""
        if child := self._child():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, sig)
            if sig != signal.SIGSTOP:  # its parent stops when it does
                super().send_signal(signal.SIGCONT)
        else:
            super().send_signal(sig)

    def _child(self) -> int:
        if self.poll() is not None:
            return 0
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except FileNotFoundError:
            return 0
        return int(children[0]) if children else 0


class Machine:
    """One machine. ``stage`` is installed and ``enable`` enabled before it boots; each boot starts from nothing.

    ``files`` (absolute path: text) are laid over the stage; ``readable`` are folders of this machine that everybody
    inside may read, at the same path. A path without /: a unit's drop-in, such as "weightcache@.service".
    """

    def __init__(
        self,
        version: str,
        stage: Path,
        *,
        enable: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        readable: Sequence[Path] = (),
    ) -> None:
        self.version = version
        self.stage = stage
        self.enable = tuple(enable)
        self.files = {"/usr/lib/sysusers.d/test.conf": USERS, **_visible(readable), **(files or {})}
        self.readable = tuple(readable)
        self.boot_seconds = 0.0
        self.leader = 0
        self._leader_fd = -1
        self._place: leftovers.Place | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Life

    def start(self) -> Self:
        """Boot, and wait until everything that is enabled has started or failed."""
        lower = _lower(self.version)
        assert lower is not None, missing(self.version)
        self._place = place = leftovers.claim()
        try:
            for path, text in self.files.items():
                target = place.folder / "files" / _inside(path).lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
            command = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--propagation=private"]
            command += [str(Path(__file__).with_name("boot.sh")), str(lower), str(place.folder), str(self.stage)]
            command += [" ".join(self.enable), ":".join(map(str, self.readable)), "--", f"--machine={place.name}"]
            command += [*CONTAINER, *(f"--bind-ro={path}" for path in self.readable)]
            variables = {
                **VARIABLES,
                "NOTIFY_SOCKET": str(place.folder / "notify"),
                "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
            }
            started = time.monotonic()
            with (place.folder / "console").open("wb") as console, self._listen() as notifications:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, env=variables
                )
                self._await_ready(notifications)
            self.boot_seconds = time.monotonic() - started
        except BaseException:
            self.stop()
            raise
        return self

    def reboot(self) -> None:
        """Shut down and boot again; /run is empty then, the file system stays."""
        with self._listen() as notifications:
            self.run("systemctl", "reboot", check=False)
            self._await_ready(notifications)

    def stop(self) -> None:
        """Cut the power. A machine that is not running is left alone."""
        if self._process is not None:
            try:
                if self._leader_fd >= 0:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(self._leader_fd, signal.SIGKILL)
                    self._process.wait(STOP_SECONDS)
            finally:
                self._process.kill()
                self._process.wait()
                self._process = None
        if self._leader_fd >= 0:
            os.close(self._leader_fd)
            self._leader_fd = -1
        if self._place is not None:
            self._place.leave()
            self._place = None

    def _listen(self) -> socket.socket:
        # Only while somebody reads: the container manager passes on everything that its first process says, and waits
        # for room in the queue.
        assert self._place is not None
        address = self._place.folder / "notify"
        address.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.bind(str(address))
        return sock

    def _await_ready(self, notifications: socket.socket) -> None:
        assert self._process is not None
        deadline = time.monotonic() + BOOT_SECONDS
        self.leader = 0
        notified, ended = notifications.fileno(), os.pidfd_open(self._process.pid)
        try:
            while True:
                left = max(deadline - time.monotonic(), 0)
                readable, _, _ = select.select([notified, ended], [], [], left)
                if notified not in readable:
                    what = "ended" if readable else "does not get ready"
                    raise AssertionError(f"the machine {what}\n{self.console()}")
                for line in notifications.recv(65536).decode().splitlines():
                    name, _, value = line.partition("=")
                    if name == "X_NSPAWN_LEADER_PID":
                        self._lead(int(value))
                    elif (name, value) == ("READY", "1") and self.leader:
                        return
        finally:
            os.close(ended)

    def _lead(self, pid: int) -> None:
        if self._leader_fd >= 0:
            os.close(self._leader_fd)
        self.leader, self._leader_fd = pid, os.pidfd_open(pid)

    def console(self) -> str:
        """What the machine said on its console."""
        assert self._place is not None, "the machine was not started"
        return (self._place.folder / "console").read_text(errors="replace")

    # Processes

    def run(
        self,
        *command: str | Path,
        check: bool = True,
        timeout: float = RUN_SECONDS,
        user: str = "",
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as ``user`` or root; with ``check`` its failure is an AssertionError."""
        line = " ".join(map(str, command))
        pipe = subprocess.PIPE
        with self.popen(command, user=user, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                out, err = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{line}: not done after {timeout:g} s\n{out}{err}") from None
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            raise AssertionError(f"{line}: status {process.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def popen(self, command: Sequence[str | Path], *, user: str = "", **options: Any) -> Inside:
        """Start a command inside, as ``user`` or root."""
        assert self._process is not None, "the machine is not running"
        whom = [f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        inside = ["setpriv", "--pdeathsig=KILL", *whom, "--", *map(str, command)]
        return Inside(["nsenter", f"--target={self.leader}", "--all", "--", *inside], env=VARIABLES, **options)

    def kill(self, pid: int, sign: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process by its number inside."""
        assert pid > 1, f"no process to kill: {pid}"
        self.run("kill", f"-{sign.value}", str(pid))

    # Units

    def systemctl(self, *arguments: str, check: bool = True, timeout: float = RUN_SECONDS) -> str:
        """Run systemctl and return what it printed, without the last line break."""
        return self.run("systemctl", *arguments, check=check, timeout=timeout).stdout.strip()

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit, by default all of them."""
        chosen = [f"--property={','.join(properties)}"] if properties else []
        return dict(line.split("=", 1) for line in self.systemctl("show", *chosen, unit).splitlines() if "=" in line)

    def main_pid(self, unit: str) -> int:
        """The number of a service's main process; 0 when there is none."""
        return int(self.show(unit, "MainPID")["MainPID"])

    def stored(self, unit: str) -> int:
        """How many descriptors the manager keeps for a service."""
        return int(self.show(unit, "NFileDescriptorStore")["NFileDescriptorStore"])

    @contextlib.contextmanager
    def drop_in(self, unit: str, text: str) -> Iterator[None]:
        """Change a unit for the length of a with block. It takes effect as far as a daemon-reload goes."""
        self.write_file(unit, text)
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            self.path(_inside(unit)).unlink()
            self.systemctl("daemon-reload")

    # Journal

    def cursor(self) -> str:
        """Where the journal ends now."""
        self.run("journalctl", "--sync")
        shown = self.run("journalctl", "--quiet", "--lines=0", "--show-cursor").stdout
        return shown.rpartition("-- cursor: ")[2].strip()

    def journal(self, unit: str = "", since: str = "") -> list[dict[str, Any]]:
        """The entries of a unit, and those about it, after a cursor; without a unit all entries."""
        self.run("journalctl", "--sync")
        chosen = [*([f"--unit={unit}"] if unit else []), *([f"--after-cursor={since}"] if since else [])]
        lines = self.run("journalctl", "--quiet", "--all", "--output=json", *chosen).stdout.splitlines()
        return [json.loads(line) for line in lines]

    def messages(self, unit: str = "", since: str = "") -> list[str]:
        """The texts of :meth:`journal`."""
        return [str(entry.get("MESSAGE")) for entry in self.journal(unit, since)]

    # Files

    def path(self, inside: str | Path) -> Path:
        """The path on this machine of a file inside. Absolute symbolic links in it lead out: resolve them inside."""
        return Path(f"/proc/{self.leader}/root", str(inside).lstrip("/"))

    def write_file(self, inside: str | Path, text: str, mode: int = 0o644) -> None:
        """Write a file inside, with the folders above it."""
        target = self.path(_inside(str(inside)))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)


def _inside(path: str) -> str:
    # Not one name for all: an instance's drop-in would take the place of its template's.
    return path if path.startswith("/") else f"/etc/systemd/system/{path}.d/50-{path}.conf"
