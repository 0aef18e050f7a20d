"""A real NATS server for tests: a child of this process with its own token and port, and methods that kill, freeze and empty it.

`publish` speaks the protocol over a plain socket, as any other client would, and may send what no client of the library can.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import require_programs, with_parent_death_signal

TOKEN = "canary-of-nats-6e5b"


class Nats:
    """A server that keeps its port when it is killed and started again."""

    def __init__(self, folder: Path, *, token: str | None = TOKEN, more: str = "") -> None:
        """`more`: further lines of its configuration."""
        self.program = require_programs("nats-server", install="nats-server")
        self.folder = folder
        self.token = token
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        authorization = f'authorization {{ token: "{token}" }}' if token else ""
        (folder / "nats.conf").write_text(
            f"""
            listen: "127.0.0.1:{self.port}"
            server_name: test
            max_payload: 65536
            jetstream {{ store_dir: "{folder / "store"}", max_memory_store: 64MB, max_file_store: 256MB }}
            {authorization}
            {more}
            """
        )

    @property
    def url(self) -> str:
        """The URL without the token."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server; returns when it accepts connections."""
        assert self._process is None
        with (self.folder / "log").open("ab") as output:
            self._process = subprocess.Popen(
                [*with_parent_death_signal(), self.program, "-c", self.folder / "nats.conf"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = self._process

        def answers() -> bool:
            assert process.poll() is None, self.log()
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1) as probe,
            ):
                return probe.recv(4) == b"INFO"
            return False

        wait_until(answers, "NATS", details=self.log)

    def kill(self) -> None:
        """`kill -9`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        self._process = None

    def freeze(self) -> None:
        """Freeze the server: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        """End the freeze."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def drop_store(self) -> None:
        """Delete everything that the server has stored, as after a lost disk."""
        assert self._process is None, "kill it first"
        shutil.rmtree(self.folder / "store", ignore_errors=True)

    def log(self) -> str:
        """The server's log."""
        return (self.folder / "log").read_text(errors="replace")

    def publish(self, subject: str, *payloads: bytes, headers: bytes | None = None) -> None:
        """Publish as a plain client; returns when the server has received everything."""
        with self._connected() as (connection, lines):
            for payload in payloads:
                if headers is None:
                    start = f"PUB {subject} {len(payload)}\r\n".encode()
                    connection.sendall(start + payload + b"\r\n")
                else:
                    size = len(headers) + len(payload)
                    start = f"HPUB {subject} {len(headers)} {size}\r\n".encode()
                    connection.sendall(start + headers + payload + b"\r\n")
            connection.sendall(b"PING\r\n")
            _until_pong(lines)

    @contextlib.contextmanager
    def subscribed(self, subject: str) -> Iterator[Iterator[bytes]]:
        """The payloads published on a subject, as a plain client hears them."""
        with self._connected() as (connection, lines):
            connection.sendall(f"SUB {subject} 1\r\nPING\r\n".encode())
            _until_pong(lines)

            def payloads() -> Iterator[bytes]:
                for line in lines:
                    if line.startswith(b"MSG "):
                        size = int(line.split()[-1])
                        yield lines.read(size)
                        lines.read(2)
                    elif line.startswith(b"PING"):
                        connection.sendall(b"PONG\r\n")

            yield payloads()

    @contextlib.contextmanager
    def _connected(self):
        with (
            socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S) as connection,
            connection.makefile("rb") as lines,
        ):
            assert lines.readline().startswith(b"INFO ")
            options = {"verbose": False, "headers": True, "lang": "test", "version": "1"}
            if self.token:
                options["auth_token"] = self.token
            connection.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
            yield connection, lines

    def end(self) -> None:
        """End the server, in whatever state it is."""
        if self._process is not None:
            self.kill()


def _until_pong(lines) -> None:
    for line in lines:
        if line.startswith(b"PONG"):
            return
        assert not line.startswith(b"-ERR"), line
    raise AssertionError("the server ended the connection")


@contextlib.contextmanager
def server(
    folder: Path, *, started: bool = True, token: str | None = TOKEN, more: str = ""
) -> Iterator[Nats]:
    """A server below `folder`, ended at the end. `more`: further lines of its configuration."""
    running = Nats(folder, token=token, more=more)
    try:
        if started:
            running.start()
        yield running
    finally:
        running.end()
