import ctypes
import os
import signal
import time

from sglang.srt import plugins

os.environ["SET_BY_SCHEDULER"] = "1"


def _run(arguments, writer, process):
    from sglang.srt.entrypoints.http_server import state

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    plugins.load_plugins(process)
    writer.send(state())
    time.sleep(1000)


def run_scheduler_process(arguments, writer):
    print("a scheduler runs", flush=True)
    if "--die" in arguments:
        raise SystemExit(3)
    _run(arguments, writer, "scheduler")
