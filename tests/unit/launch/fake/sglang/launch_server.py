"""Plays the steps of $FAKE_SGLANG (JSON): what the plugin would report and how a server would end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from weightcache import records
from weightcache.engine import directive
from weightcache.starts.record import Writer, process_began


def main() -> None:
    plan = json.loads(os.environ["FAKE_SGLANG"])
    here = Path(plan["directory"])
    runs = len(list(here.glob("run-*.json")))
    told = directive.read()
    record = {"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid()}
    temporary = here / f"{os.getpid()}.tmp"  # two launches may share the folder
    temporary.write_text(json.dumps(record))
    temporary.rename(here / f"run-{runs}.json")
    steps = plan["again"] if told and told.from_disk and "again" in plan else plan["steps"]
    for name, *arguments in steps:
        step(name, arguments, told, here)


def step(name: str, arguments: list, told: directive.Directive | None, here: Path) -> None:
    if name == "ready":
        directive.send_report(told, directive.PluginReady(os.getpid(), arguments[0], "0.0.0"))
    elif name == "decision":
        directive.send_report(told, records.from_plain(directive.Decision, arguments[0]))
    elif name == "trace":
        kind, what, how = arguments
        began = {"began": process_began()} if kind == "process" else None
        Writer.to(told.trace).mark(kind, what, how=how, facts=began)
    elif name == "milestone":
        now = time.monotonic()
        Writer.to(told.trace).mark("point", arguments[0], at=now)
        directive.send_report(told, directive.Milestone(os.getpid(), arguments[0], now))
    elif name == "listen":
        port = int(sys.argv[sys.argv.index("--port") + 1])
        globals()["listener"] = socket.create_server(("127.0.0.1", port))
    elif name == "sleep":
        time.sleep(arguments[0])
    elif name == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (here / "child").write_text(str(child.pid))
    elif name == "catch":
        number = getattr(signal, arguments[0])
        signal.signal(number, lambda *_: (here / f"caught-{arguments[0]}").write_text("x") and None)
    elif name == "mark":
        (here / arguments[0]).write_text("x")
    elif name == "wait":
        deadline = time.monotonic() + 20
        while not (here / arguments[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    elif name == "die":
        os.kill(os.getpid(), getattr(signal, arguments[0]))
        time.sleep(10)
    elif name == "exit":
        sys.exit(arguments[0])


main()
