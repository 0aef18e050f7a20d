"""The machines of `benchmarks.fleet_polling --ssh`: `python -m benchmarks.fleet_polling_server FOLDER` prints two ports and serves.

Whoever logs in as `hanging` is never answered. At the second port nobody answers at all: connections stay in its queue.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import asyncssh

from benchmarks.fleet_polling import THINKING, observed
from groupwise.jobs.hosts.framing import answer_bytes


class _Anybody(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False


async def _answer(process: asyncssh.SSHServerProcess[bytes]) -> None:
    if process.get_extra_info("username") == "hanging":
        await asyncio.Event().wait()
    await process.stdin.readline()
    await asyncio.sleep(THINKING)
    name = str(process.get_extra_info("peername")[1])
    process.stdout.write(answer_bytes(observed(name)))
    process.exit(0)


async def _serve(folder: Path) -> None:
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    held = [socket.socket() for _ in range(4)]
    for each in (
        held
    ):  # the queue of a listener that accepts nobody; once it is full, connections are not answered
        each.setblocking(False)
        each.connect_ex(full.getsockname())
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=_Anybody,
        server_host_keys=[str(folder / "host")],
        process_factory=_answer,
        encoding=None,
        login_timeout=0,
    )
    print(server.get_port(), full.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
