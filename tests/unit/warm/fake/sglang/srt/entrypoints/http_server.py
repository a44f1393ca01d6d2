"""Serves its own state, and children's, as JSON on the port."""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

from sglang.srt import plugins
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.scheduler import run_scheduler_process


def state() -> dict:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "name": multiprocessing.current_process().name,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "cwd": str(Path.cwd()),
        "environment": {k: v for k, v in os.environ.items() if k not in ("WEIGHTCACHE_DIRECTIVE", "RUN")},
        "run": os.environ.get("RUN", ""),
        "main": [sys.modules["__main__"].__name__, sys.modules["__main__"].__spec__.name],
        "names": sorted(n for n in vars(sys.modules["__main__"]) if not n.startswith("__")),
        "method": multiprocessing.get_start_method(allow_none=True),
        "gc": gc.get_threshold(),
        "signals": {n: str(signal.getsignal(n)).partition(" at ")[0] for n in (signal.SIGINT, signal.SIGTERM)},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "fds": sorted(str(Path(f"/proc/self/fd/{n}").readlink()) for n in range(3)),
        "directive_at_import": plugins.at_import is not None,
        "limits": __import__("resource").getrlimit(__import__("resource").RLIMIT_CORE),
    }


def launch_server(arguments: list[str]) -> None:
    multiprocessing.set_start_method("spawn", force=True)
    os.environ["SGLANG_RUN_ID"] = os.environ["RUN"] = str(time.time())
    del os.environ["RUN"]
    os.environ["SGLANG_OF_CHILDREN"] = "1"
    if "--random" in arguments:
        os.environ[arguments[arguments.index("--random") + 1]] = str(time.time())
    __import__("resource").setrlimit(__import__("resource").RLIMIT_CORE, (0, 0))
    children = []
    for target in (run_scheduler_process, run_detokenizer_process):
        reader, writer = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.Process(target=target, args=(arguments, writer))
        child.start()
        writer.close()
        children.append((child, reader))
    if "--extra" in arguments:
        extra = multiprocessing.Process(target=time.sleep, args=(0,))
        extra.start()
        extra.join(20)
        assert extra.exitcode == 0
    states = [reader.recv() for _, reader in children]
    listener = socket.create_server(("127.0.0.1", int(arguments[arguments.index("--port") + 1])))
    print("serving", flush=True)
    children = [child for child, _ in children]

    def end(status: int) -> None:
        for child in children:
            child.kill()
            child.join()
        sys.exit(status)

    signal.signal(signal.SIGTERM, lambda *_: end(7))
    listener.settimeout(0.05)
    while True:
        for child in children:
            if child.exitcode is not None:
                print(f"a child ended with {child.exitcode}", flush=True)
                end(9)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.sendall(json.dumps([state(), *states]).encode())
