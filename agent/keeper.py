"""`wcache keeper`: the service manager's part for one command (sd_listen_fds(3), sd_notify(3)), where there is none.

Its end frees the weights: so it is one file of the standard library, which imports nothing once it runs. It does
without WATCHDOG and EXTEND_TIMEOUT.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import grp
import math
import os
import queue
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DESCRIPTION = """\
Run COMMAND (an agent) and start it again whenever it ends. The keeper holds its listening socket and the descriptors
that it stores, by systemd's protocols: the weights outlive a crash of the agent, and engines that connect meanwhile
wait for the next one. For containers and development; where systemd runs, use its units.

  wcache keeper --listen /run/weightcache/0.sock -- python3 -m weightcache.server --rank 0 --load

What frees the weights: SIGTERM or SIGINT to the keeper, which stop COMMAND (with SIGKILL after 30 seconds or at the
second signal); SIGKILL of the keeper (as soon as COMMAND, if it is left over, ends too); the end of its container.
A crash of COMMAND frees nothing. SIGHUP is passed on. COMMAND's children cannot store descriptors."""

FIRST_FD = 3
BACKLOG = 512
STOP_SECONDS = 30.0
FIRST_EXEC_DELAY, LONGEST_EXEC_DELAY = 0.1, 4.8
SPARE_FDS = 64  # for the keeper itself, and a message on its way in
MESSAGE_BYTES = 4096
ANCILLARY_BYTES = socket.CMSG_SPACE(253 * 4) + socket.CMSG_SPACE(12)  # the most descriptors, and the sender
ONE_STRING, ALL_STRINGS = 128 << 10, 6 << 20  # what execve(2) takes, however large the stack may be
MANAGER_VARIABLES = {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID", "NOTIFY_SOCKET", "FDSTORE"}
MANAGER_VARIABLES |= {"WATCHDOG_PID", "WATCHDOG_USEC"}
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
F_DUPFD_QUERY = 1024 + 3
KCMP = {"x86_64": 312, "aarch64": 272}
LIBC = ctypes.CDLL(None)


def say(text: str) -> None:
    """One line on stderr, unless that would block or fail."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"keeper: {text}\n".encode(errors="replace"))


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors, whatever close(2) says about them."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def close_as_told(todo: queue.SimpleQueue[list[int]]) -> None:
    """A thread's life. With the last descriptor a driver frees memory, and that may take its time."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        close_all(todo.get())


def valid_name(name: str) -> bool:
    """Whether a descriptor may have this name."""
    return 0 < len(name) <= 255 and name.isascii() and name.isprintable() and ":" not in name


def same_file(first: int, second: int) -> bool:
    """Whether two descriptors are one open file, as far as the kernel tells; fstat(2) cannot tell a driver's apart."""
    try:
        return fcntl.fcntl(first, F_DUPFD_QUERY, second) == 1
    except OSError:  # before Linux 6.10
        words = (KCMP.get(os.uname().machine, -1), os.getpid(), os.getpid(), 0, first, second)
        return bool(LIBC.syscall(*map(ctypes.c_long, words)) == 0)


def name_room(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """How long the joined names may be: if execve(2) refused them, nothing could ever be started again."""
    strings = [*command, *(f"{name}={value}" for name, value in environment.items())]
    others = sum(len(os.fsencode(string)) + 9 for string in strings) + 8192
    return min(ONE_STRING, min(os.sysconf("SC_ARG_MAX"), ALL_STRINGS) - others) - len("LISTEN_FDNAMES=") - 1


class Store:
    """Descriptors with their names, in the order in which they came."""

    def __init__(self, most: int, room: int, epoll: select.epoll) -> None:
        self.entries: list[tuple[str, int]] = []
        self.most, self.room, self.epoll = most, room, epoll

    def add(self, name: str, fds: list[int], poll: bool) -> bool:
        """Move descriptors from ``fds`` to here; False if the store is full. ``poll``: until they hang up."""
        for fd in tuple(fds):
            if any(kept == name and same_file(fd, other) for kept, other in self.entries):
                continue
            if len(self.entries) >= self.most or sum(len(kept) + 1 for kept, _ in self.entries) + len(name) > self.room:
                return False
            fds.remove(fd)
            self.entries.append((name, fd))
            if poll:
                with contextlib.suppress(OSError):  # what cannot be polled does not hang up
                    self.epoll.register(fd, 0)
        return True

    def take(self, name: str | None = None, fd: int | None = None) -> list[int]:
        """Remove what has this name, or this number, and return it."""
        taken = [entry for entry in self.entries if entry[0] == name or entry[1] == fd]
        for entry in taken:
            self.entries.remove(entry)
            # Not left to close(2): an open file that somebody else has too would be reported on and on.
            with contextlib.suppress(OSError):
                self.epoll.unregister(entry[1])
        return [number for _, number in taken]


def bind(stack: contextlib.ExitStack, path: Path, mode: str, group: str | None) -> socket.socket:
    """Listen until the stack unwinds; a socket that nobody answers on is replaced. Raises OSError with a sentence."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            answer = probe.connect_ex(str(path))
        if answer == errno.ECONNREFUSED and path.is_socket():
            path.unlink()
        elif answer not in (errno.ENOENT, errno.ECONNREFUSED):  # EAGAIN too: somebody's queue is full
            raise OSError(f"somebody answers there ({os.strerror(answer) if answer else 'connected'})")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        # The file gets its mode with its name: a chmod of the name could hit what somebody has put there since.
        rights = int(mode, 8)
        os.fchmod(listener.fileno(), rights)
        mask = os.umask(0o777 & ~rights)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        stack.callback(remove, path, path.lstat())
        if group is not None:
            gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
            os.chown(path, -1, gid, follow_symlinks=False)
        listener.listen(BACKLOG)  # nobody could connect before this
    except (OSError, KeyError, ValueError) as error:
        raise OSError(f"cannot listen at {path}: {error.args[-1]}") from None
    return listener


def remove(path: Path, made: os.stat_result) -> None:
    """Unlink a socket if it is still the one that was made here."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), made):
            path.unlink()


class Keeper:
    """One command, what is kept for it, and the loop."""

    def __init__(self, options: argparse.Namespace, listener: socket.socket | None, address: str) -> None:
        self.command: list[str] = options.words
        self.listeners = [] if listener is None else [(options.name, listener.fileno())]
        self.delay, self.exec_delay = max(0.01, options.restart_delay), FIRST_EXEC_DELAY
        self.due = 0.0  # when to start the command, or to kill it
        self.pid: int | None = None
        self.status, self.said_full, self.stopping = "", False, False
        self.epoll = select.epoll()
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.notify.bind(address)
        self.failures, self.report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wakeup, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for fd in (self.notify.fileno(), self.wakeup):
            self.epoll.register(fd, select.EPOLLIN)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # What the keeper was started to ignore (nohup) stays ignored, in the command too.
        self.handled = [signal.SIGCHLD, *(number for number in asked if signal.getsignal(number) != signal.SIG_IGN)]
        for number in self.handled:
            signal.signal(number, lambda *_: None)
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.closing: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        threading.Thread(target=close_as_told, args=(self.closing,), daemon=True).start()
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.limits[1], self.limits[1]))
        most = max(0, min(options.store_max, self.limits[1] // 2 - SPARE_FDS))  # become_command has each twice
        self.environment = {key: value for key, value in os.environ.items() if key not in MANAGER_VARIABLES}
        self.environment |= {"NOTIFY_SOCKET": address, "FDSTORE": str(most)}
        room = name_room(self.command, self.environment) - len(options.name) - 1
        self.store = Store(most, room, self.epoll)

    def run(self) -> None:
        """Keep until told to stop."""
        while self.pid is not None or not self.stopping:
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - whatever went wrong, ending would free the weights
                say(f"internal error: {type(error).__name__}: {error}")
                time.sleep(0.2)
                signal.raise_signal(signal.SIGCHLD)  # nothing else may wake the next turn up
        close_all(fd for _, fd in self.store.entries)
        say(f"stopped, {len(self.store.entries)} stored descriptors closed")

    def turn(self) -> None:
        """Wait until something happens, and answer it."""
        if time.monotonic() >= self.due:
            self.start() if self.pid is None else self.kill()
        happened = self.epoll.poll(None if self.due == math.inf else max(0.0, self.due - time.monotonic()))
        for fd, _ in happened:
            if fd == self.wakeup:
                self.signalled(os.read(fd, 4096))
            elif fd != self.notify.fileno():
                self.closing.put(self.store.take(fd=fd))
        # Last, because it brings descriptors under numbers that have just become free; bounded, whoever floods it.
        for _ in range(100):
            if not self.receive():
                break
        self.reap()

    def start(self) -> None:
        """Start the command with all that is kept."""
        self.due = time.monotonic() + self.delay
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork() or self.become_command()
        except OSError as error:
            say(f"cannot start {self.command[0]}: {error.strerror}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        with contextlib.suppress(OSError):  # both sides do it, so that neither finds it undone
            os.setpgid(self.pid, self.pid)
        self.due, self.said_full, self.status = math.inf, False, ""
        say(f"starting {self.command[0]} as {self.pid} with {len(self.store.entries)} stored descriptors")

    def become_command(self) -> int:
        """The child, with all signals blocked: never returns. The pipe gets the reason if it cannot be the command."""
        passed = self.listeners + self.store.entries
        try:
            os.setpgid(0, 0)
            # All out of the way first; only the copies at 3, 4, ... are inherited.
            wanted = [self.report, *(fd for _, fd in passed)]
            self.report, *fds = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(passed)) for fd in wanted)
            for target, fd in enumerate(fds, FIRST_FD):
                os.dup2(fd, target)
            if passed:
                values = str(os.getpid()), str(len(passed)), ":".join(name for name, _ in passed)
                self.environment |= zip(("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"), values, strict=True)
            resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)
            # The last two are ignored by the interpreter. A signal that waits must not meet a handler here: it would
            # write to the keeper's pipe.
            for number in (*self.handled, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            os.execvpe(self.command[0], self.command, self.environment)  # noqa: S606 - no shell is the point
        except BaseException as error:  # noqa: BLE001 - nothing of the keeper may go on in the child
            os.write(self.report, (getattr(error, "strerror", None) or type(error).__name__).encode())
        finally:
            os._exit(127)

    def reap(self) -> None:
        """Take leave of children that ended: of the command, and of every orphan below it."""
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid == self.pid:
                    # Not reaped yet, so the number is nobody else's. It can send nothing more: this is all of it.
                    self.kill()
                    while self.receive():
                        pass
                _, status = os.waitpid(found.si_pid, 0)
                if found.si_pid == self.pid:
                    self.ended(os.waitstatus_to_exitcode(status))

    def ended(self, status: int) -> None:
        """The command is gone, and starts again: not so soon if it could not be started at all."""
        pid, self.pid, self.due = self.pid, None, time.monotonic() + self.delay
        try:
            failure = os.read(self.failures, 200).decode(errors="replace")
        except BlockingIOError:
            self.exec_delay = FIRST_EXEC_DELAY
            say(f"{pid} ended: " + (f"exit status {status}" if status >= 0 else f"{signal.strsignal(-status)}"))
        else:
            self.exec_delay = min(LONGEST_EXEC_DELAY, self.exec_delay * 2)
            self.due += self.exec_delay
            say(f"cannot start {self.command[0]}: {failure}")

    def kill(self) -> None:
        """SIGKILL what is there of the command's process group."""
        self.due = math.inf
        self.send(signal.SIGKILL, -1)

    def send(self, number: signal.Signals, group: int = 1) -> None:
        """A signal for the command."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(group * self.pid, number)

    def signalled(self, numbers: bytes) -> None:
        """Signals came for the keeper."""
        for number in numbers:
            if number == signal.SIGHUP:
                self.send(signal.SIGHUP)
            elif number in (signal.SIGTERM, signal.SIGINT) and self.stopping:
                self.kill()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self.stopping, self.due = True, time.monotonic() + STOP_SECONDS
                say(f"stopping {self.command[0]}" + (f" (last status: {self.status})" if self.status else ""))
                self.send(signal.SIGTERM)

    def receive(self) -> bool:
        """Answer one message; False if there is none. What is not kept is closed: all that BARRIER=1 asks for."""
        try:
            data, ancillary, flags, _ = self.notify.recvmsg(MESSAGE_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        sender, fds = 0, list[int]()
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds += struct.unpack_from(f"{len(content) // 4}i", content)
            elif kind == socket.SCM_CREDENTIALS:
                sender = struct.unpack_from("i", content)[0]
        try:
            if sender == self.pid and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                self.answer(data.rstrip(b"\0").decode(errors="replace"), fds)
        finally:
            close_all(fds)  # here and now, or a barrier would overtake it
        return True

    def answer(self, text: str, fds: list[int]) -> None:
        """Do what a message says, and take from ``fds`` what is kept. Fields that are not named here mean nothing."""
        lines = [line.partition("=") for line in text.split("\n")]
        fields = {key: value for key, _, value in reversed(lines)}  # the first of two wins
        if fields.get("BARRIER") == "1":
            return
        if "STATUS" in fields:
            self.status = "".join(char if char.isprintable() else " " for char in fields["STATUS"][:200])
        name = fields.get("FDNAME", "")
        if fields.get("FDSTOREREMOVE") == "1" and valid_name(name):
            self.closing.put(self.store.take(name))
        if fields.get("FDSTORE") == "1":
            kept = self.store.add(name if valid_name(name) else "stored", fds, fields.get("FDPOLL") != "0")
            if not kept and not self.said_full:
                say(f"the store is full with {len(self.store.entries)} descriptors: what comes beyond that is closed")
            self.said_full |= not kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, and the command behind them."""
    parser.usage, add = f"{parser.prog} [OPTION...] -- COMMAND [ARGUMENT...]", parser.add_argument
    add("--listen", type=Path, metavar="PATH", help="listen here (SOCK_SEQPACKET) and pass the socket to COMMAND")
    add("--mode", default="0660", help="mode of the socket (default: 0660)")
    add("--group", metavar="NAME", help="group of the socket, by name or number")
    add("--name", default="agent", help="name of the socket for COMMAND (default: agent)")
    add("--store-max", type=int, default=1024, metavar="N", help="how many descriptors to keep (default: 1024)")
    add("--restart-delay", type=float, default=0.2, metavar="SECONDS", help="pause between two starts (default: 0.2)")
    add("words", nargs="+", metavar="COMMAND", help="what to run, with its arguments")


def start(options: argparse.Namespace) -> int:
    """Run this file by itself: `wcache`, its memory and the packages of its environment stay behind."""
    given = {name: getattr(options, name) for name in ("listen", "mode", "group", "name", "store_max", "restart_delay")}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    python = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    os.execv(sys.executable, [*python, *words, "--", *options.words])  # noqa: S606 - no shell is the point


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep until told to stop; returns the exit status."""
    # A formatter that asks for no width imports a MiB to find one.
    formatter = functools.partial(argparse.HelpFormatter, width=100)
    parser = argparse.ArgumentParser("wcache keeper", allow_abbrev=False, formatter_class=formatter)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if not valid_name(options.name):
        parser.error("--name needs 1 to 255 printable ASCII characters, and no colon")
    warnings.simplefilter("ignore")  # of a fork beside a thread, of cut messages: to print one would import
    # The command gets standard input and output from whoever started the keeper, and nothing else.
    while os.open(os.devnull, os.O_RDWR) < FIRST_FD:
        pass
    os.closerange(FIRST_FD, 1 << 16)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # or any process of this user could take the descriptors
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(os.environ.get("TMPDIR") or "/tmp", f"weightcache-keeper-{os.urandom(8).hex()}")  # noqa: S108
            folder.mkdir(mode=0o700)
            stack.callback(folder.rmdir)
            stack.callback(Path(folder, "notify").unlink, missing_ok=True)
            listener = options.listen and bind(stack, options.listen, options.mode, options.group)
            Keeper(options, listener, f"{folder}/notify").run()
    except OSError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
