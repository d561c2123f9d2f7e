"""Stands in for ``vllm.entrypoints.cli.main``: an HTTP server with vLLM's routes and none of its weight.

A test copies this file to where ``PYTHONPATH`` finds it as vLLM. FAKE_MODE tells what goes wrong; FAKE_LAUNCHES and
FAKE_TOKENS, both JSON, tell what the worker counts for a request and what it answers, one for each backend.
"""

import http.server
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    arguments = sys.argv[1:]
    backend = (
        arguments[arguments.index("--attention-backend") + 1] if "--attention-backend" in arguments else "built-in"
    )
    mode = os.environ.get("FAKE_MODE", "")
    print(json.dumps({"arguments": arguments, "env": dict(os.environ)}), flush=True)
    if mode == "dies":
        raise RuntimeError("the root of it")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    if mode == "hangs":
        time.sleep(600)
    serve(int(arguments[arguments.index("--port") + 1]), backend, mode)


def serve(port: int, backend: str, mode: str) -> None:
    def snapshot(counts: dict[str, int]) -> None:
        if folder := os.environ.get("TL_BACKEND_LAUNCH_LOG_DIR"):
            # Later than the end of the request, as the last of the files that come every second.
            content = {"pid": os.getpid(), "kernels": counts, "time": time.time() + 60}
            (Path(folder) / f"launches-{os.getpid()}.json").write_text(json.dumps(content))

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            self.answer(200, "fine")

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if mode == "refuses":
                self.answer(400, "no such model")
                return
            tokens = json.loads(os.environ.get("FAKE_TOKENS", "{}")).get(backend, [104, 105])
            choices = [{"index": 0, "text": chr(token), "token_ids": [token]} for token in tokens]
            if not request.get("stream"):
                self.answer(200, json.dumps({"choices": [{"index": 0, "text": "".join(map(chr, tokens))}]}))
                return
            lines = [json.dumps({"choices": [choice]}) for choice in choices]
            if mode == "breaks off":
                lines[1:] = [json.dumps({"error": {"message": "engine died"}})]
            self.answer(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))
            snapshot(json.loads(os.environ.get("FAKE_LAUNCHES", "{}")).get(backend, {}))

    snapshot({})
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
