"""The program that calls Ray's head, run as on the machine, against a local server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import ray_call
from tests.ports import free_port

Seen = list[tuple[str, str, str | None, bytes]]


class Server(ThreadingHTTPServer):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: Seen = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        size = int(self.headers.get("Content-Length") or 0)
        told = self.headers.get("Authorization")
        server.seen.append((self.command, self.path, told, self.rfile.read(size)))
        moved = self.path == "/moved"
        self.send_response(302 if moved else 404 if self.path == "/none" else 200)
        if moved:
            self.send_header("Location", f"{server.address}/elsewhere")
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"told\n")

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        serving = threading.Thread(target=found.serve_forever, args=(0.01,))
        serving.start()
        yield found
        found.shutdown()
        serving.join()


def asks(address: str, home: Path, *calls: tuple[str, str, Any], **environment: str) -> Any:
    text = Path(ray_call.__file__).read_text()
    asked = json.dumps({"address": address, "seconds": 20, "calls": calls})
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", text, asked],
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("where", ["environment", "path", "home"])
def test_the_token_is_read_where_ray_reads_it(server: Server, tmp_path: Path, where: str) -> None:
    file = tmp_path / ("kept" if where == "path" else ".ray/auth_token")
    file.parent.mkdir(exist_ok=True)
    file.write_text("of-a-file\n")
    environment = {
        "environment": {"RAY_AUTH_TOKEN": "of-here"},
        "path": {"RAY_AUTH_TOKEN_PATH": str(file)},
        "home": {},
    }[where]
    asks(server.address, tmp_path, ("GET", "/a", None), **environment)
    expected = "of-here" if where == "environment" else "of-a-file"
    assert server.seen[0][2] == f"Bearer {expected}"


def test_the_token_is_not_sent_to_redirects_or_proxies(server: Server, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    given = {"RAY_AUTH_TOKEN": "of-here", "http_proxy": dead}
    done = asks(server.address, tmp_path, ("GET", "/moved", None), **given)
    assert json.loads(done.stdout) == [[302, "told\n"]]
    assert len(server.seen) == 1
    done = asks(dead, tmp_path, ("GET", "/a", None))
    assert (done.returncode, done.stdout) == (ray_call.NO_ANSWER, "")
    assert "refused" in done.stderr
