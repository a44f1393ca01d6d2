"""A server that answers as much of SGLang's HTTP as a comparison asks for; copied as sglang/launch_server.py.

$FAKE says how it behaves: well, silent, ends, busy (refuses to flush twice), broken (no log probabilities).
"""

import http.server
import json
import os
import subprocess
import sys

FAKE = os.environ["FAKE"]
PORT = int(sys.argv[sys.argv.index("--port") + 1])
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

    def do_GET(self):
        self.answer(200, {"arguments": sys.argv})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache":
            left[0] -= FAKE == "busy"
            return self.answer(400 if FAKE == "busy" and left[0] >= 0 else 200, {})
        count = body["sampling_params"]["max_new_tokens"]
        ids = [sum(body["input_ids"]) % 97 + step for step in range(count)]
        meta = {
            "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
            "output_top_logprobs": [[[-0.5 * token, token, None], [-9.0, 1, None]] for token in ids],
        }
        return self.answer(200, {"output_ids": ids, "meta_info": {} if FAKE == "broken" else meta})


print("fake server", FAKE, flush=True)
if FAKE == "ends":
    sys.exit("out of memory, says the fake")
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("helper", helper.pid, flush=True)
if FAKE == "silent":
    helper.wait()
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
