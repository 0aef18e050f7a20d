"""What the server has acknowledged it has seen."""

import asyncio
import logging

import pytest

from groupwise.jobs.fleet.notify.nats import NatsAccess, NatsLink

INFO = (
    b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"proto":1,"headers":true}\r\n'
)


async def test_the_last_ping_stands_behind_all_that_was_published() -> None:
    """Its answer is the acknowledgement: one that came before would be of nothing."""
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        while line := await reader.readline():
            heard.append(line.split(b" ")[0].decode().strip())
            if heard[-1] == "PUB":
                await reader.readline()
            elif heard[-1] == "PING":
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = NatsLink(NatsAccess(f"nats://127.0.0.1:{port}"))
    link.open()
    await link.until_there()
    heard.clear()
    await link.publish([("jobs.completed", b"{}")] * 3, 60)
    assert heard.count("PUB") == 3
    assert heard[-1] == "PING"
    await link.close()
    server.close()


def test_a_pong_that_came_too_late_for_the_library_is_no_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (asyncio.InvalidStateError("invalid state"), ValueError("another")):
        logging.getLogger("nats.aio.client").error("nats: encountered error", exc_info=error)
    assert [str(each.exc_info and each.exc_info[1]) for each in caplog.records] == ["another"]
