"""The whole server as a process: what it says, how it ends, and who may not begin."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from groupwise.core.errors import UsageError
from groupwise.runs.lock import RunLock
from groupwise.server.serve import serve
from groupwise.server.settings import ServerConfig
from tests.unit.server.run_server import main

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Process:
    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list[str])
    more: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False

    def read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self.more:
                self.lines.append(line)
                self.more.notify_all()
        with self.more:
            self.ended = True
            self.more.notify_all()

    def wait_for_output(self, pattern: str) -> str:
        """Wait for a line with it."""

        def search() -> "re.Match[str] | None":
            return re.search(pattern, "".join(self.lines))

        with self.more:
            self.more.wait_for(lambda: search() or self.ended, timeout=30)
            match = search()
        assert match, "".join(self.lines)
        return match[0]

    @property
    def address(self) -> str:
        return self.wait_for_output(r"https?://127.0.0.1:\d+")


@contextmanager
def server(folder: Path, *more: str, **settings: str) -> Generator[Process]:
    environment = {f"GROUPWISE_SERVE_{name.upper()}": value for name, value in settings.items()}
    words = [sys.executable, "-m", "tests.unit.server.run_server", str(folder), *more]
    popen = subprocess.Popen(
        words, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )
    process = Process(popen)
    reader = threading.Thread(target=process.read)
    reader.start()
    try:
        yield process
    finally:
        popen.kill()
        popen.wait()
        reader.join()
        assert popen.stderr is not None
        popen.stderr.close()


def test_while_it_ends_it_is_not_ready_and_takes_no_work_and_the_second_signal_ends_it_at_once(
    tmp_path: Path,
) -> None:
    with server(tmp_path, "slow") as process, httpx2.Client(base_url=process.address) as client:
        process.popen.send_signal(signal.SIGINT)
        process.wait_for_output("ending")
        assert client.get("/readyz").status_code == 503
        assert client.get("/status").status_code == 200
        assert client.post("/start", json={}).json()["code"] == "shutting_down"
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(30) == -signal.SIGINT


def test_it_ends_cleanly_with_a_request_that_waits_and_a_stream_that_is_open(
    tmp_path: Path,
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("model_id: tiny\nmax_steps: 3\n")
    with (
        server(tmp_path / "out", str(settings)) as process,
        httpx2.Client(base_url=process.address) as client,
    ):
        process.wait_for_output("no key is needed")
        process.wait_for_output("run tiny is ready, as --start-with has it")
        client.get("/status")
        client.get("/nowhere")
        process.wait_for_output("GET /nowhere 404 not_found")
        assert not any("GET /status" in line for line in process.lines)
        waited: list[httpx2.Response] = []

        def wait() -> None:
            with httpx2.Client(base_url=process.address, timeout=30) as other:
                waited.append(other.post("/completions", json={"prompt": "a"}))

        waiting = threading.Thread(target=wait)
        with client.stream("GET", "/events", headers={"Last-Event-ID": "0"}) as stream:
            lines = stream.iter_lines()
            assert "event: started" in lines
            waiting.start()
            assert "event: warning" in lines  # the request is there
            process.popen.send_signal(signal.SIGTERM)
            for _ in lines:  # it ends, and so does this
                pass
        waiting.join(30)
        assert process.popen.wait(30) == 0
        assert waited[0].json()["code"] == "shutting_down"
        process.wait_for_output("ending; a second signal ends at once")


def test_a_run_that_cannot_be_begun_ends_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text("run_name: bad\n")
    assert main(str(tmp_path / "out"), str(tmp_path / "settings.yaml")) == 2
    assert "was refused: for a reason" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")
def test_tls_by_files_logs_in_json_and_a_run_that_is_active_already(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    usages = ("subjectAltName=IP:127.0.0.1", "keyUsage=digitalSignature,keyCertSign")
    more = [word for usage in usages for word in ("-addext", usage)]
    words = [*make.split(), *more, "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    files = {"tls_certificate": str(certificate), "tls_key": str(key)}
    (tmp_path / "settings.yaml").write_text("run_name: active\n")
    more = str(tmp_path / "settings.yaml")
    with server(tmp_path / "out", more, **files, log_format="json") as process:
        process.wait_for_output("--start-with has nothing to do")
        assert process.address.startswith("https://")
        with httpx2.Client(base_url=process.address, verify=trusting) as client:
            assert client.get("/status").status_code == 200
        line = json.loads(process.wait_for_output(r'\{.*"path": "/status".*\}'))
        assert (line["status"], line["key"]) == (200, "local")


def test_what_cannot_be_used_is_told_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    for name in ("c.pem", "none.pem"):
        path = str(tmp_path / name)
        config = ServerConfig(output_dir=str(tmp_path / "out"), tls_certificate=path, tls_key=path)
        with pytest.raises(UsageError, match="PEM"):
            serve(config, None)
    assert not (tmp_path / "out").exists()
    held = RunLock.acquire(tmp_path)
    with pytest.raises(UsageError, match=r"served already by process \d+"):
        serve(ServerConfig(output_dir=str(tmp_path), port=0), None)
    held.release()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
            serve(ServerConfig(output_dir=str(tmp_path), port=port), None)
