"""A fake vLLM server for one checkpoint: `python tests/suite_server.py FOLDER PORT [MODEL…]`. It answers every sum correctly.

It starts a process that leaves its group, and writes the pids of both to `server.json` in its folder before it answers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER, PORT, *MODELS = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"data": [{"id": model} for model in MODELS or [FOLDER]]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (number,) = re.findall(r"What is (\d+) plus", body["messages"][0]["content"])
        said = {"message": {"content": f"ANSWER: {2 * int(number)}"}}
        self.answer({"model": body["model"], "choices": [said]})

    def answer(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    assert (Path(FOLDER) / "adapter_config.json").is_file()
    begun = [sys.executable, "-c", "import time; time.sleep(1000)"]
    other = subprocess.Popen(begun, start_new_session=True)
    Path("server.json.tmp").write_text(json.dumps([os.getpid(), other.pid]))
    Path("server.json.tmp").rename("server.json")
    ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler).serve_forever()


if __name__ == "__main__":
    main()
