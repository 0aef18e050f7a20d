"""The contract of every Host implementation:

1. An answer is the machine's, whole, whatever its shell prints before it, and however long request and answer are.
2. A refusal is RunnerRefused. A request of which nothing was sent is HostUnreachable. What may have arrived is OutcomeUnknown.
3. A call ends when the answer is there or its time is over, whatever the machine's processes do after that. Of one that may take long
   the time is over when the machine has been silent for so long.
4. Any number of calls may be under way at once, and none waits for another's answer.
5. Closed means closed: calls under way end as OutcomeUnknown, later ones as HostUnreachable.
6. Secrets arrive, and are neither in the request's text for people nor in the arguments or the environment of a process.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts.host import (
    Host,
    HostUnreachable,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.ssh import Address, SshHost
from tests import ssh_hosts

pytestmark = pytest.mark.fleet

STAND_IN = Path(ssh_hosts.__file__).with_name("fake_runner.py").read_text()
TIMEOUT_S = 60.0


def request(verb: str, payload: bytes = b"", **fields: Any) -> Request:
    digest = hashlib.sha256(STAND_IN.encode()).hexdigest()
    body = {"root": "fleet", "runner": digest, "source": STAND_IN, **fields}
    return Request(verb, body, payload, most_payload=1 << 30)


@dataclass
class Machine:
    """A machine, and a new way to it with each `reach`."""

    folder: Path
    """Where the stand-in may write."""
    login: Address | None = None
    home: Path | None = None

    def reach(self) -> Host:
        if self.login is not None:
            return SshHost(self.login)
        return LocalHost(environment={"HOME": str(self.home), "PATH": "/usr/bin:/bin"})

    def marker(self, name: str) -> Path:
        """A file that the stand-in writes to when a request has arrived."""
        marker = self.folder / name
        marker.touch()
        marker.chmod(0o666)
        return marker


@pytest.fixture(
    scope="module",
    params=["local", "ssh"],
)
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    if request.param == "local":
        home = tmp_path_factory.mktemp("home")
        yield Machine(home, home=home)
    else:
        with ssh_hosts.loopback_hosts() as [host]:
            yield Machine(host.home, host.login)


@pytest.fixture
async def host(machine: Machine) -> AsyncIterator[Host]:
    host = machine.reach()
    yield host
    await host.close()


@pytest.fixture
async def connected(host: Host) -> Host:
    """What it takes to connect is part of no time limit."""
    await ask(host, "echo")
    return host


async def ask(host: Host, verb: str, payload: bytes = b"", **fields: Any) -> RunnerResponse:
    return await host.call(request(verb, payload, **fields), timeout=TIMEOUT_S)


async def arrived(marker: Path) -> None:
    while not marker.stat().st_size:  # noqa: ASYNC110, ASYNC240  # another process writes it
        await asyncio.sleep(0.005)


async def test_requests_and_answers_travel_unchanged(host: Host) -> None:
    text = "words; $(touch x) 'and' \"quotes\"\n"
    answer = await ask(host, "echo", some=text, more=[1, None, "é→\n"])
    told = answer.body["told"]
    assert (told["verb"], told["some"], told["more"]) == ("echo", text, [1, None, "é→\n"])
    assert answer.payload == b""
    with pytest.raises(RunnerRefused, match="no room") as refused:
        await ask(host, "refuse")
    assert refused.value.code == "disk_full"
    with pytest.raises(OutcomeUnknown, match=r"status 3.*it is dying"):
        await ask(host, "die")


async def test_big_payloads_go_both_ways(host: Host) -> None:
    data = bytes(range(256)) * (48 << 12)  # 48 MiB
    answer = await ask(host, "echo", data, back=16 << 20)
    assert answer.body["came"] == hashlib.sha256(data).hexdigest()
    assert answer.payload == b"\xff\n" * (16 << 20)


async def test_no_answer_in_time_leaves_it_open_what_happened(connected: Host) -> None:
    with pytest.raises(OutcomeUnknown, match=r"within 2\.5 s"):
        await connected.call(request("sleep", seconds=20), timeout=2.5)
    assert (await ask(connected, "echo")).body["ok"] is True


async def test_heartbeats_extend_the_time_limit_of_a_call(connected: Host) -> None:
    asked = replace(request("echo", signs=21, every=0.5), longest=TIMEOUT_S)
    assert (await connected.call(asked, timeout=10)).body["ok"] is True


@pytest.mark.parametrize(
    ("signs", "longest", "timeout"),
    [(0, TIMEOUT_S, 2.5), (100, 3.0, 2.5), (100, None, 2.0)],
    ids=["is silent", "never comes to an end", "should not take long"],
)
async def test_a_request_without_an_answer_in_time_has_an_unknown_outcome(
    connected: Host, signs: int, longest: float | None, timeout: float
) -> None:
    asked = request("sleep", seconds=0 if signs else 20, signs=signs, every=0.25)
    with pytest.raises(OutcomeUnknown, match="no answer to sleep"):
        await connected.call(replace(asked, longest=longest), timeout=timeout)


async def test_an_answer_does_not_wait_for_what_was_left_behind(host: Host) -> None:
    async with asyncio.timeout(10):
        await ask(host, "linger", seconds=20)


async def test_calls_that_take_long_or_are_given_up_hold_up_no_other(
    host: Host, machine: Machine
) -> None:
    """More at once than a connection takes."""
    asked = request("sleep", seconds=2 * TIMEOUT_S)
    waiting = [asyncio.create_task(host.call(asked, timeout=2 * TIMEOUT_S)) for _ in range(12)]
    answers = await asyncio.gather(*(ask(host, "echo", n=n) for n in range(25)))
    assert [answer.body["told"]["n"] for answer in answers] == list(range(25))
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    for n in range(12):
        marker = machine.marker(f"given-up-{n}")
        call = asyncio.create_task(ask(host, "sleep", seconds=20, mark=str(marker)))
        await arrived(marker)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
    assert (await ask(host, "echo")).body["ok"] is True


async def test_closing_ends_what_is_under_way(machine: Machine) -> None:
    host = machine.reach()
    await ask(host, "echo")
    marker = machine.marker("closing")
    call = asyncio.create_task(ask(host, "sleep", seconds=20, mark=str(marker)))
    await arrived(marker)
    await host.close()
    with pytest.raises(OutcomeUnknown, match="closed"):
        await call
    with pytest.raises(HostUnreachable, match="closed"):
        await ask(host, "echo")
    await host.close()


async def test_secrets_arrive_and_are_not_shown(host: Host) -> None:
    asked = request("echo")
    hidden = Request("echo", asked.body, secrets={"TOKEN": "canary-7f31"})
    assert "canary-7f31" not in repr(hidden)
    answer = await host.call(hidden, timeout=TIMEOUT_S)
    assert answer.body["secrets"] == {"TOKEN": hashlib.sha256(b"canary-7f31").hexdigest()}


@pytest.mark.timeout(60)
def test_cancelling_at_the_start_of_a_call_does_not_hang(machine: Machine) -> None:
    """Whatever was reached of it: `asyncio.run` cancels all that is under way, and waits for its end."""

    async def leaves(turns: int) -> None:
        host = machine.reach()
        call = asyncio.create_task(ask(host, "sleep", seconds=20))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not call.done()
        raise KeyError(turns)

    for turns in range(10):
        with pytest.raises(KeyError):
            asyncio.run(leaves(turns))
