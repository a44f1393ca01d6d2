"""Starting and ending an engine, with a small server in SGLang's place."""

import sys
import time
from pathlib import Path

import pytest

from tests.support.engine import Engine, EngineFailed

SERVER = """
import http.server, json, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# One child stays in the session without a parent, one in a session of its own with a parent.
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '600'])"])
subprocess.Popen(["sleep", "601"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.answer(200, {"path": self.path})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(200 if "text" in body else 400, {"text": body.get("text", "no text") + "!"})
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def engine(tmp_path: Path, code: str) -> Engine:
    script = tmp_path / "server.py"
    script.write_text(code)
    return Engine(tmp_path, log=tmp_path / "log", command=[sys.executable, script])


def test_every_process_ends(tmp_path: Path) -> None:
    server = engine(tmp_path, SERVER)
    server.start().wait_ready(20)
    try:
        assert server.generate("hello") == "hello!"
        assert server.post("/generate", {}) == (400, {"text": "no text!"})
        assert server.get("/x") == (200, {"path": "/x"})
        assert 0 < server.start_seconds < 20
        family = server.family()
        assert sorted(p.cmdline()[-1] for p in family if p.name() == "sleep") == ["600", "601"]
    finally:
        start = time.monotonic()
        server.stop(grace=0.5)
    assert time.monotonic() - start < 5
    assert server.process.returncode == -9
    assert server.family() == []
    server.stop()


def test_an_engine_that_exits_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"exited with 3\n(?s:.*)no such model"):
        engine(tmp_path, "import sys; print('no such model'); sys.exit(3)").__enter__()


def test_an_engine_that_hangs(tmp_path: Path) -> None:
    server = engine(tmp_path, "import time; print('loading', flush=True); time.sleep(60)").start()
    with pytest.raises(EngineFailed, match=r"not ready after 0\.5 s"):
        server.wait_ready(0.5)
    server.stop()
    assert server.process.returncode == -15
