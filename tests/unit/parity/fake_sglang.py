"""A server that answers as much of SGLang's HTTP as a comparison asks for; copied as sglang/launch_server.py.

$FAKE says how it behaves: well, silent, ends, busy (refuses to flush twice), broken (no log probabilities), slow (never
answers a prompt), drafts (has a draft model).
"""

import http.server
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FAKE = os.environ["FAKE"]
PORT = int(sys.argv[sys.argv.index("--port") + 1])
KEY = sys.argv[sys.argv.index("--api-key") + 1]
left = [2]


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stranger(self):
        known = self.headers["Authorization"] == f"Bearer {KEY}"
        if not known:
            self.answer(401, {"error": "Unauthorized"})
        return not known

    def do_GET(self):
        return self.stranger() or self.answer(200, {"arguments": sys.argv})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.stranger():
            return None
        if self.path == "/flush_cache":
            left[0] -= FAKE == "busy"
            return self.answer(400 if FAKE == "busy" and left[0] >= 0 else 200, {})
        if FAKE == "slow":
            print("asked", flush=True)
            time.sleep(600)
        count = body["sampling_params"]["max_new_tokens"]
        shift = sum(body["input_ids"]) + len(body.get("lora_path", ""))
        ids = [shift % 97 + step for step in range(count)]
        meta = {
            "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
            "output_top_logprobs": [[[-0.5 * token, token, None], [-9.0, 1, None]] for token in ids],
        }
        if FAKE == "drafts":
            meta |= {"spec_num_proposed_drafts": 2 * count, "spec_num_correct_drafts": 1}
        return self.answer(200, {"output_ids": ids, "meta_info": {} if FAKE == "broken" else meta})


tempfile.NamedTemporaryFile(delete=False).close()
print("fake server", FAKE, flush=True)
if FAKE == "ends":
    sys.exit("out of memory, says the fake")
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("helper", helper.pid, flush=True)
if FAKE == "silent":
    helper.wait()
if directive := json.loads(os.environ.get("WEIGHTCACHE_DIRECTIVE", "{}")):
    nothing = {"methods": {"M(a=1)": 1}, "tensors": {}, "values": {}, "bytes": 0, "unreached": 0}
    where = {"role": "target", "rank": 0, "sglang_version": "0", "capability": ""}
    Path(directive["inventory"], "rank-0.target.json").write_text(json.dumps({**where, **nothing}))
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
