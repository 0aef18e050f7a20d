"""Of the connection to a machine, what needs no machine; `tests/integration/fleet/test_ssh.py` has the rest."""

import asyncio
import gc
from typing import Any

import pytest

from groupwise.hosts import ssh
from groupwise.hosts.port import HostUnreachable, Request
from groupwise.hosts.ssh import Address, SshHost


async def test_a_connection_that_fails_when_nobody_wants_it_any_more_is_not_complained_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trying, fails = asyncio.Event(), asyncio.Event()
    complaints: list[dict[str, Any]] = []

    async def connect(address: Address, **_: Any) -> Any:
        trying.set()
        await fails.wait()
        raise HostUnreachable(f"{address} does not answer")

    monkeypatch.setattr(ssh, "connect", connect)
    asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
    host = SshHost(Address("10.0.0.1", user="ada", host_key="pinned"))
    asking = asyncio.create_task(host.call(Request("hello", {}), timeout=60.0))
    await trying.wait()
    asking.cancel()
    await asyncio.wait({asking})
    fails.set()
    for _ in range(5):
        await asyncio.sleep(0)  # it fails meanwhile
    del host, asking
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
