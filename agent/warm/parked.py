"""The parked main process: imports what the server needs, with its children, and becomes ``sglang.launch_server``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import select
import socket
import sys
import time

from weightcache.engine import adapter_warm
from weightcache.errors import AgentUnavailable, ProtocolError, WeightcacheError
from weightcache.warm import device, messages, priority, process, seats, title

IMPORT_SECONDS = 600.0
GO_SECONDS = 10.0


def main() -> None:
    """Wait for a launch, or end with the reason why there can be none."""
    process.quiet_interrupt()
    began, began_with = time.time(), dict(os.environ)
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(sock.fileno(), False)
    before = priority.lower()
    try:
        park, _ = messages.expect(sock, messages.Park, 30)
        children = _bring_in(park, before)
        packages = process.packages()
        messages.send(sock, messages.Ready(time.time() - began))
        _wait(sock, children)
        go, fds = messages.expect(sock, messages.Go, GO_SECONDS, max_fds=3)
        if len(fds) != 3:
            raise ProtocolError("standard input, output and error did not come")
        priority.restore(before)
        for child in children:
            messages.send(child.sock, messages.Go((), {}))
        if changed := process.stale(began):
            raise AgentUnavailable(f"{changed} changed since it was parked")
        if process.packages() != packages:
            raise AgentUnavailable("packages were installed or removed since it was parked")
        if not title.become(go.command):
            raise AgentUnavailable("its command line has no room for the server's")
    except (WeightcacheError, OSError) as error:
        with contextlib.suppress(OSError):
            messages.send(sock, messages.Unfit(getattr(error, "message", str(error))))
        os._exit(1)
    messages.send(sock, messages.Going())
    sock.close()
    _become(go, fds, children, began_with)


def _bring_in(park: messages.Park, usual: priority.Priority) -> list[seats.Seat]:
    origin = importlib.util.find_spec(adapter_warm.SERVER_MODULE)
    if origin is None or not origin.origin:
        raise AgentUnavailable("SGLang is not installed where the engine runs")
    sys.argv[:] = [origin.origin, *park.arguments]
    facts = device.find_out(os.environ)
    layout = park.layout
    schedulers = layout.ranks if adapter_warm.starts_schedulers(layout.dp_size, layout.attention_dp) else 0
    kinds = ["scheduler"] * schedulers + ["detokenizer"]
    changes = park.children if len(park.children) >= len(kinds) else ({},) * len(kinds)
    children = [seats.park(kind, changed, facts, usual) for kind, changed in zip(kinds, changes, strict=False)]
    process.bring_in(adapter_warm.IMPORTS["main"], facts)
    seats.await_ready(children, IMPORT_SECONDS)
    return children


def _wait(sock: socket.socket, children: list[seats.Seat]) -> None:
    """Until the launcher says something, or is gone. Raises AgentUnavailable for a child that ends meanwhile."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    kinds = {child.sock.fileno(): child.kind for child in children}
    for fd in kinds:
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if ended := ready & set(kinds):
        raise AgentUnavailable(f"the {kinds[ended.pop()]} ended while it was parked")


def _become(go: messages.Go, fds: tuple[int, ...], children: list[seats.Seat], began_with: dict[str, str]) -> None:
    log = os.dup(1)
    sys.stdout.flush()
    sys.stderr.flush()
    process.take_over(dict(zip((0, 1, 2), fds, strict=True)))
    _repeat(log)
    process.adopt(began_with, go.environment)
    seats.Seats(children, _tell).install()
    process.usual_interrupt()
    process.handed_over()
    main_module = sys.modules["__main__"].__dict__
    for name in [name for name in main_module if not name.startswith("__")]:
        del main_module[name]
    runpy._run_module_as_main(adapter_warm.SERVER_MODULE)  # type: ignore[attr-defined]


def _repeat(log: int) -> None:
    """What the imports wrote while nobody listened belongs to this server's log."""
    with contextlib.suppress(OSError):
        os.lseek(log, 0, os.SEEK_SET)
        while text := os.read(log, 1 << 16):
            os.write(2, text)
    os.close(log)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"weightcache: {text}\n".encode())
