"""Stands in for the agent, the loader and their clients, to show what the units do whatever the programs are.

    standin.py agent RANK     keeps one memory file in the manager's descriptor store, answers each packet with a report
    standin.py loader         reports through its standard input, which is the connection, and lives as long as it
    standin.py ask PATH       connects, sends a packet, prints the answer; status 3 and the error's name without one
    standin.py hold PATH      connects, prints what it is told, sends a line of its standard input, or just ends with it

Standard library only, and nothing of weightcache: it runs inside a machine, in the sandboxes of the units.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import grp
import json
import mmap
import os
import pwd
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN = Path("/run/weightcache")
CRASHES = RUN / "crashes"
"""How often the agent is still to die before it is ready."""
SLOW = Path("/etc/weightcache/slow")
"""How many seconds its load takes, if the file is there."""
PUBLISHERS = "weightcache-publish"


def notify(text: str, *fds: int) -> None:
    """Tell the manager something (sd_notify(3))."""
    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([text.encode()], rights, 0, "\0" + address[1:] if address.startswith("@") else address)


def barrier() -> None:
    """Wait until the manager has read everything that was sent before."""
    reader, writer = os.pipe()
    notify("BARRIER=1", writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)


def agent(rank: str) -> None:
    """Serve until SIGTERM."""
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    handed = dict(zip(names, range(3, 3 + int(os.environ.get("LISTEN_FDS", "0"))), strict=False))
    if CRASHES.exists() and (left := int(CRASHES.read_text())):
        CRASHES.write_text(str(left - 1))
        sys.exit(1)
    if "pool" not in handed:
        if SLOW.exists():
            time.sleep(float(SLOW.read_text()))
        handed["pool"] = os.memfd_create("pool")
        os.write(handed["pool"], str(os.getpid()).encode())
        notify("FDSTORE=1\nFDPOLL=0\nFDNAME=pool", handed["pool"])
        barrier()
    status = RUN / f"{rank}.status.sock"
    status.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    public = socket.socket(fileno=handed["agent"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as private, selectors.DefaultSelector() as selector:
        private.bind(str(status))
        private.listen()
        for listener in (public, private):
            selector.register(listener, selectors.EVENT_READ)
        notify("READY=1\nSTATUS=standing in")
        interval = float(os.environ["WATCHDOG_USEC"]) / 4e6
        try:
            while True:
                for key, _ in selector.select(interval):
                    assert isinstance(key.fileobj, socket.socket)
                    answer(key.fileobj, handed["pool"])
                notify("WATCHDOG=1")
        finally:
            status.unlink()


def answer(listener: socket.socket, pool: int) -> None:
    """Answer one packet of one client."""
    with listener.accept()[0] as connection:
        command = connection.recv(65536).decode()
        report: dict[str, Any] = {"pid": os.getpid(), "pool": os.pread(pool, 100, 0).decode()}
        if command == "probe":
            report["probes"] = probe(connection)
        elif command == "loader":
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as loader:
                loader.connect(str(RUN / "loader.sock"))
                report["loader"] = json.loads(loader.recv(65536))
        connection.send(json.dumps(report).encode())


def attempt(action: Callable[[], Any]) -> str:
    """What an action gives, or the name of its error."""
    try:
        return str(action())
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except Exception as error:
        return repr(error)


def code() -> str:
    """Map memory that can be written and executed, as compilers do."""
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    return "mapped"


def probe(connection: socket.socket) -> dict[str, str]:
    """Do everything that an agent does, and some things that it must not be able to do."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return {name: attempt(action) for name, action in probes(pid, uid).items()}


def probes(pid: int, uid: int) -> dict[str, Callable[[], Any]]:
    """What :func:`probe` tries; ``pid`` and ``uid`` are the client's."""

    def sealed() -> int:
        fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
        return int(fcntl.fcntl(fd, fcntl.F_GET_SEALS))

    def pidfd() -> str:
        fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(fd, signal.SIGKILL, None, 0)
        return "killed"

    def watched() -> str:
        os.close(os.pidfd_open(pid))
        return "opened"

    def publish() -> str:
        path = RUN / "probe.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.bind(str(path))
        os.chown(path, -1, grp.getgrnam(PUBLISHERS).gr_gid)
        path.chmod(0o660)
        path.unlink()
        return "given"

    def replaced() -> str:
        fresh = RUN / "probe.new"
        fresh.write_text("{}")
        fresh.rename(RUN / "probe.json")
        (RUN / "probe.json").unlink()
        return "written"

    def journal() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            return sock.sendto(b"MESSAGE=native line\nWEIGHTCACHE_PROBE=1\n", "/run/systemd/journal/socket")

    def internet() -> str:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        return "made"

    return {
        "client": lambda: uid,
        "client's process": lambda: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(),
        "client's unit": lambda: bool(Path(f"/proc/{pid}/cgroup").read_text()),
        "lease": watched,
        "not dumpable": lambda: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0),
        "sealed memory": sealed,
        "publish socket": publish,
        "status file": replaced,
        "journal": journal,
        "home": lambda: sum(0 for _ in Path("/home").iterdir()),
        "other user's process": pidfd,
        "etc": lambda: Path("/etc/weightcache/probe").write_text(""),
        "var": lambda: Path("/var/cache/probe").write_text(""),
        "network": internet,
        "code": code,
        "devices": lambda: [name for name in ("kmsg", "mem", "fuse", "nvidiactl") if Path("/dev", name).exists()],
    }


def loader() -> None:
    """Report, leave a child that ignores SIGTERM, and live until the connection ends."""
    print("a line that belongs in the journal", flush=True)
    subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 1000"], stdin=subprocess.DEVNULL)
    report = {
        "pid": os.getpid(),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "groups": sorted(grp.getgrgid(number).gr_name for number in {os.getgid(), *os.getgroups()}),
        "unit": Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2],
        "directory": str(Path.cwd()),
        "variables": {k: v for k, v in os.environ.items() if "CACHE" in k or k in ("HOME", "HF_HOME")},
        "cache": attempt(lambda: (Path.home() / f"probe-{os.getpid()}").write_text("x")),
        "etc": attempt(lambda: Path("/etc/probe").write_text("")),
        "network": attempt(lambda: [name for _, name in socket.if_nameindex()]),
        "code": attempt(code),
        "all of /proc": Path("/proc/meminfo").exists(),
    }
    with socket.socket(fileno=os.dup(0)) as connection:
        connection.send(json.dumps(report).encode())
        if connection.recv(65536) == b"fail":
            sys.exit(9)


def ask(path: str, command: str, hold: bool) -> None:
    """Print what the other side answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(path)
            if command:
                sock.send(command.encode())
            answered = sock.recv(65536).decode()
        except OSError as error:
            print(errno.errorcode[error.errno or 0])
            sys.exit(3)
        print(answered, flush=True)
        if hold and (line := sys.stdin.readline().strip()):
            sock.send(line.encode())


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "agent":
        agent(*arguments)
    elif role == "loader":
        loader()
    else:
        ask(arguments[0], arguments[1] if len(arguments) > 1 else "", hold=role == "hold")
