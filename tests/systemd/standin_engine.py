"""Stands in for an engine, its launcher and its clients, to show what the units do whatever the engine is.

    standin_engine.py slot NAME-a     stands by, takes the lock, accepts on the socket that systemd gave it
    standin_engine.py client PORT     connects again and again until its standard input ends; prints what came of it
    standin_engine.py ask PORT        the same with HTTP: each connection asks a real engine for some words

Standard library and weightcache.standby only: it runs inside a machine, in the sandbox of the unit.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

sys.path.insert(0, "/usr/lib/weightcache")

from weightcache.standby import fence, status
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import Role
from weightcache.standby.places import EnginePaths, slot_name
from weightcache.standby.status import Promotion, SlotStatus


def notify(text: str) -> None:
    """Tell the manager something (sd_notify(3))."""
    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def ping() -> None:
    """Tell the manager's watchdog, as long as this process runs."""
    while True:
        notify("WATCHDOG=1")
        time.sleep(float(os.environ["WATCHDOG_USEC"]) / 8e6)


def slot(name: str) -> None:
    """Stand by, then serve until killed."""
    place = slot_name(name)
    paths = EnginePaths.of(place.engine)
    me = fence.identify(os.getpid())

    def tell(role: Role, promotions: tuple[Promotion, ...] = ()) -> None:
        one = SlotStatus(place.engine, place.slot, role, time.time(), me, me, promotions=promotions)
        status.write(paths.status(place.slot), one)

    lock = ByteLock(paths.lock, 0)
    tell("standby")
    notify("READY=1")
    threading.Thread(target=ping, daemon=True).start()
    lock.take()
    tell("active", (Promotion(time.time(), 0.0, "death"),))
    with socket.socket(fileno=3) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10)
                connection.sendall(place.slot.encode())


def client(port: int, ask: Callable[[socket.socket], str]) -> None:
    """Count what ``ask`` says of each connection, refused ones, and those that were cut after they were made."""
    counted: Counter[str] = Counter()
    longest = 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        began = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
                counted[ask(sock)] += 1
        except ConnectionRefusedError:
            counted["refused"] += 1
        except (OSError, http.client.HTTPException):
            counted["cut"] += 1
        longest = max(longest, time.monotonic() - began)
    print(json.dumps({**counted, "longest": longest}))


def name_of(sock: socket.socket) -> str:
    """Which slot answers."""
    sock.sendall(b"?")
    return sock.recv(10).decode() or "cut"


def words(sock: socket.socket) -> str:
    """What a real engine answers."""
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.sock = sock
    body = json.dumps({"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    return str(json.loads(answer)["output_ids"]) if response.status == 200 else f"status {response.status}"


if __name__ == "__main__":
    if sys.argv[1] == "slot":
        slot(sys.argv[2])
    else:
        client(int(sys.argv[2]), words if sys.argv[1] == "ask" else name_of)
