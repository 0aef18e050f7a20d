"""A spot machine that AWS takes back notifies its jobs; the metadata service requires a token."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from groupwise.jobs.clouds import spot_notice
from tests.ports import free_port
from tests.processes import wait_until


class Service(BaseHTTPRequestHandler):
    """As IMDSv2: a token first, then 404 until there is a notice."""

    notice = threading.Event()
    asked = threading.Semaphore(0)

    def do_PUT(self) -> None:
        lives = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if self.path == "/latest/api/token" and lives else 400, b"the token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "the token":
            self._answer(401)
            return
        there = self.path == "/latest/meta-data/spot/instance-action" and self.notice.is_set()
        self._answer(200 if there else 404, b'{"action": "terminate"}')
        self.asked.release()

    def _answer(self, code: int, data: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def service() -> Iterator[tuple[str, type[Service]]]:
    kind = type("This", (Service,), {"notice": threading.Event(), "asked": threading.Semaphore(0)})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


def test_jobs_are_signalled_at_a_spot_notice(tmp_path: Path) -> None:
    attempt = tmp_path / "root" / "attempts" / "job.1"
    attempt.mkdir(parents=True)
    with service() as (url, kind):
        words = [sys.executable, "-I", spot_notice.__file__, str(tmp_path / "root"), url, "0.01"]
        proxy = {"http_proxy": f"http://127.0.0.1:{free_port()}"}
        with subprocess.Popen(words, env={**os.environ, **proxy}) as watching:
            try:
                assert kind.asked.acquire(timeout=30)
                assert kind.asked.acquire(timeout=30)
                assert not (attempt / "evict").exists()
                kind.notice.set()
                wait_until((attempt / "evict").exists)
                later = tmp_path / "root" / "attempts" / "later.1"
                later.mkdir()
                wait_until((later / "evict").exists)
            finally:
                watching.kill()
    assert (attempt / "evict").read_text() == str(spot_notice.TO_SAVE)
