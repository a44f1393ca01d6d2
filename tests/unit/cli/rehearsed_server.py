"""Stands in for an interpreter with SGLang: a server that says that it attached, and writes down what it is asked.

``-m sglang.launch_server ARGUMENTS`` serves; everything else is the real interpreter's. $SERVER is a JSON object:
``folder`` for what was seen, ``kernels`` to write into TRITON_CACHE_DIR when a prompt comes, ``status`` of every answer
to a prompt, ``exit`` instead of serving, ``stubborn`` against SIGTERM, ``longest`` prompt, ``generates``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

if sys.argv[1:3] != ["-m", "sglang.launch_server"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])

from weightcache.engine import directive as directives

SERVER = json.loads(os.environ["SERVER"])
FOLDER = Path(SERVER["folder"])
ARGUMENTS = sys.argv[3:]
INFO = {"max_req_input_len": SERVER.get("longest", 4096), "max_total_num_tokens": 4096, "chunked_prefill_size": 512}
YAML = dict(line.split(": ", 1) for line in Path(ARGUMENTS[ARGUMENTS.index("--config") + 1]).read_text().splitlines())
KEY = f"Bearer {json.loads(YAML['api-key'])}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"/server_info": INFO, "/model_info": {"is_generation": SERVER.get("generates", True)}}[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (FOLDER / "asked").open("a") as file:
            file.write(json.dumps([self.path, body]) + "\n")
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        for name in SERVER.get("kernels", []):
            cache.mkdir(parents=True, exist_ok=True)
            (cache / name).write_text("compiled")
        self._answer({"text": "x"}, SERVER.get("status", 200))

    def _answer(self, body: dict[str, Any], status: int = 200) -> None:
        self.send_response(status if self.headers.get("Authorization") == KEY else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    told = directives.read()
    assert told is not None
    seen = {"arguments": ARGUMENTS, "levers": told.levers, "on_mismatch": told.on_mismatch, "yaml": YAML}
    (FOLDER / "seen").write_text(json.dumps(seen))
    if "exit" in SERVER:
        print("the last line of a log", flush=True)
        sys.exit(SERVER["exit"])
    if SERVER.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for process in ("main", "scheduler"):
        directives.send_report(told, directives.PluginReady(os.getpid(), process, "0"))
    directives.send_report(
        told, directives.Decision(0, "target", "attached", set_id="1a2b" * 8, milliseconds={"map": 1.0})
    )
    port = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()
