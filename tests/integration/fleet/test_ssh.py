"""What SSH adds to `tests/contract/test_host_contract.py`: whom one speaks to, and what is known when it breaks."""

import asyncio
import dataclasses
import re
import resource
import shutil
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from groupwise.jobs.hosts.driver import Launch, Runner
from groupwise.jobs.hosts.host import (
    HostError,
    HostKeyError,
    HostUnreachable,
    OutcomeUnknown,
    RunnerRefused,
)
from groupwise.jobs.hosts.spec import JobSpec
from groupwise.jobs.hosts.ssh import SshHost, SshTimeouts, read_host_key
from tests import ssh_hosts
from tests.contract.test_host_contract import TIMEOUT_S, arrived, ask, request
from tests.required_programs import require_programs
from tests.ssh_hosts import FullHost, LoopbackHost

QUICK = SshTimeouts(connect=2.0, keepalive=0.3)


def marker(host: ssh_hosts.Host) -> Path:
    path = host.home / f"marker-{uuid.uuid4().hex}"
    path.touch()
    path.chmod(0o666)
    return path


async def check_answers(host: SshHost) -> None:
    """It answers."""
    assert (await ask(host, "echo")).body["ok"] is True


def logins(host: ssh_hosts.Host) -> int:
    return host.log().count("Accepted publickey")


def host_of(host: ssh_hosts.Host, **changed: Any) -> SshHost:
    return SshHost(dataclasses.replace(host.login, **changed))


async def refusal(host: SshHost, **fields: Any) -> HostKeyError:
    """Of somebody who is not who he was."""
    with pytest.raises(HostKeyError) as refused:
        await ask(host, "echo", **fields)
    await host.close()
    return refused.value


# Whom one speaks to


@pytest.fixture
def machine(plain_machines: list[LoopbackHost]) -> LoopbackHost:
    return plain_machines[0]


async def test_a_host_key_other_than_the_pinned_one_prevents_login(
    plain_machines: list[LoopbackHost],
) -> None:
    one, other = plain_machines
    mark, before = marker(one), logins(one)
    rsa = asyncssh.generate_private_key("ssh-rsa").export_public_key().decode()
    for key in (other.host_key, rsa):
        refused = await refusal(host_of(one, host_key=key), mark=str(mark))
        assert refused.seen == one.host_key
    assert (logins(one), mark.read_text()) == (before, "")
    found = await read_host_key(one.address, one.port)
    assert (str(found), logins(one)) == (one.host_key, before), "it is read without a login"
    with pytest.raises(HostUnreachable, match="cannot be read"):
        await read_host_key("127.0.0.99", 1)
    for key in (None, "ssh-ed25519 AAAA"):
        nobody_there = host_of(one, port=1, host_key=key)
        assert (await refusal(nobody_there)).seen is None, "without a pinned key nothing is dialled"


async def test_a_key_that_changed_is_found_at_the_next_connection(machine: LoopbackHost) -> None:
    host = host_of(machine)
    await check_answers(host)
    before = machine.host_key
    machine.new_host_key()
    machine.restart()
    assert (await refusal(host)).seen == machine.host_key != before


async def test_a_jump_host_or_an_agent_that_is_silent_is_named(
    plain_machines: list[LoopbackHost],
) -> None:
    gate, inner = plain_machines
    host = SshHost(inner.login, jump=gate.login, timeouts=QUICK)
    enter = inner.folder / "enter"
    honest = enter.read_text()
    enter.write_text("#!/bin/sh\nkill -STOP $$\n")
    with pytest.raises(HostUnreachable, match=f"{inner.login} through {gate.login}"):
        await quick(host, "echo", timeout=0.5)
    enter.write_text(honest)
    await host.close()
    path = str(inner.folder / "silent")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        login = dataclasses.replace(inner.login, key_path=None)
        host = SshHost(login, agent_path=path, timeouts=SshTimeouts(connect=0.2))
        with pytest.raises(HostUnreachable, match=rf"agent at {path}.*silent for 0\.2 s"):
            await ask(host, "echo")
        await host.close()


HEADER = f"GROUPWISE-ANSWER 1 {{}} {'a' * 64} 0"


@pytest.mark.parametrize(("says", "told"), [
    ("yes", "before any answer"), ("yes >&2", "within 1"), ("sleep 9", "within 1"),
    (f"echo {HEADER.format('9' * 12)}; yes", "announces"), (f"echo {HEADER.format(1000)}; yes", "hash"),
    (f"echo {HEADER.format(1000)}; echo x", "ended"), ("kill -9 $PPID", "ended"),
])  # fmt: skip
async def test_a_hostile_machine_cannot_block_callers_or_fill_memory(
    machine: LoopbackHost, says: str, told: str
) -> None:
    enter = machine.folder / "enter"
    honest = enter.read_text()
    enter.write_text(f"#!/bin/sh\n{says}\n")
    host = host_of(machine)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with pytest.raises(HostError, match=told):
            await quick(host, "echo")
    finally:
        enter.write_text(honest)
        await host.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


async def test_the_users_ssh_config_is_not_read(
    machine: LoopbackHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap, own = tmp_path / "trapped", tmp_path / ".ssh"
    own.mkdir()
    (own / "config").write_text(
        f"Host *\n  UserKnownHostsFile none\n  ProxyCommand touch {trap}\n  User nobody\n"
    )
    (own / "known_hosts").write_text(f"[{machine.address}]:{machine.port} {machine.host_key}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "no-agent"))
    host = host_of(machine)
    await check_answers(host)
    await host.close()
    await refusal(host_of(machine, host_key=None))
    assert not trap.exists()


async def test_an_agent_that_is_named_is_asked(machine: LoopbackHost) -> None:
    require_programs("ssh-agent", "ssh-add")
    with pytest.raises(HostUnreachable, match="no key"):
        await ask(host_of(machine, key_path=None), "echo")
    socket = machine.folder / "agent"  # a path of a socket has at most 107 characters
    agent = await asyncio.create_subprocess_exec("ssh-agent", "-D", "-a", str(socket))
    try:
        while not socket.exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(0.01)
        host = SshHost(dataclasses.replace(machine.login, key_path=None), agent_path=str(socket))
        with pytest.raises(HostUnreachable, match="holds no key"):
            await ask(host, "echo")
        adding = await asyncio.create_subprocess_exec(
            "ssh-add", "-q", str(machine.key_path), env={"SSH_AUTH_SOCK": str(socket)}
        )
        assert await adding.wait() == 0
        await ask(host, "echo")
        await host.close()
        await passphrases(machine, str(socket))
    finally:
        agent.terminate()
        await agent.wait()


async def passphrases(machine: LoopbackHost, agent_path: str) -> None:
    """A key with a passphrase is used as the agent holds it; the file is never decrypted here."""
    locked = machine.folder / "locked"
    shutil.copy(machine.key_path, locked)
    shutil.copy(f"{machine.key_path}.pub", f"{locked}.pub")
    keygen = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a phrase", "-f", str(locked)]
    assert await (await asyncio.create_subprocess_exec(*keygen)).wait() == 0
    login = dataclasses.replace(machine.login, key_path=str(locked))
    with pytest.raises(HostUnreachable, match="has a passphrase"):
        await ask(SshHost(login), "echo")
    host = SshHost(login, agent_path=agent_path)
    await ask(host, "echo")
    await host.close()
    shutil.copy(machine.folder / "hostkey.pub", f"{locked}.pub")  # another key's
    with pytest.raises(HostUnreachable, match="does not hold"):
        await ask(SshHost(login, agent_path=agent_path), "echo")
    with pytest.raises(HostUnreachable, match="does not answer"):
        await ask(SshHost(login, agent_path=f"{agent_path}-gone"), "echo")


async def test_through_a_jump_host_that_shows_its_own_key(
    plain_machines: list[LoopbackHost],
) -> None:
    gate, inner = plain_machines
    host = SshHost(inner.login, jump=gate.login)
    await check_answers(host)
    assert f"from {gate.address}" in inner.log() or "from 127.0.0.1" in inner.log()
    await host.close()
    assert str(await read_host_key(inner.address, inner.port, jump=gate.login)) == inner.host_key
    for key in (None, inner.host_key):
        await refusal(SshHost(inner.login, jump=dataclasses.replace(gate.login, host_key=key)))
    behind = dataclasses.replace(inner.login, host_key=gate.host_key)
    assert (await refusal(SshHost(behind, jump=gate.login))).seen == inner.host_key


# What is known when it breaks


@pytest.fixture
def full(full_machines: list[FullHost]) -> FullHost:
    return full_machines[0]


@pytest.fixture
async def way(full: FullHost) -> AsyncIterator[SshHost]:
    if not full.is_on():
        full.start()
    full.heal()
    full.until_it_answers()
    host = SshHost(full.login, timeouts=QUICK)
    yield host
    await host.close()


async def quick(host: SshHost, verb: str, timeout: float = 1.0, **fields: Any) -> Any:
    return await host.call(request(verb, **fields), timeout=timeout)


# Which shell answers

GREETING = "echo Welcome; echo of many words >&2\n"
BASH, RESTRICTED, TCSH, CSH, FISH = (
    "/bin/bash", "/bin/rbash", "/usr/bin/tcsh", "/bin/bsd-csh", "/usr/bin/fish"
)  # fmt: skip
SHELLS: dict[tuple[str, str], str] = {
    **{(shell, GREETING): "" for shell in ("/bin/dash", BASH, RESTRICTED, TCSH, CSH, FISH)},
    (BASH, "PATH=/nowhere\n"): "", (CSH, "set path = /nowhere\n"): "", (FISH, "set PATH /nowhere\n"): "",
    (RESTRICTED, "PATH=/nowhere\n"): "no_python: .* python3: (command )?not found",
    **{(shell, "exit 3\n"): "status 3 and ran nothing: .*start-up file" for shell in (BASH, RESTRICTED)},
    **{(shell, "exec /bin/false\n"): "status 1 and ran nothing" for shell in (TCSH, CSH, FISH)},
    **{(shell, "kill -9 $$\n"): "started no command" for shell in (BASH, TCSH)},
    (BASH, "read x\n"): "start-up file of it waits",
    (TCSH, "sleep 9\n"): "start-up file of it waits",
    # On a busy machine sshd may lose what a shell writes that ends while its input is still being sent.
    ("/usr/sbin/nologin", ""): "ran nothing: (This account is currently not available|perhaps)",
}  # fmt: skip
"""What the first call meets, by login shell and what stands in its start-up files; empty: its answer."""


async def test_any_login_shell_starts_the_runner_and_one_that_does_not_is_reported(
    full: FullHost,
) -> None:
    """Nothing was sent, or run: nothing of a job is left in doubt."""
    require_programs("tcsh", "bsd-csh", "fish")
    found: dict[tuple[str, str], str] = {}
    for shell, files in SHELLS:
        full.login_shell(shell, files)
        host = SshHost(full.login)
        try:
            await Runner(host).hello(timeout=1.0 if "wait" in SHELLS[shell, files] else TIMEOUT_S)
            found[shell, files] = ""
        except (HostUnreachable, RunnerRefused) as error:
            found[shell, files] = str(error)
        await host.close()
    full.login_shell(BASH)
    wrong = {k: v for k, v in found.items() if not re.search(SHELLS[k] or "^$", v)}
    assert wrong == {}


async def test_a_login_shell_that_fails_on_a_connection_that_lives_leaves_one_call_in_doubt(
    full: FullHost, way: SshHost
) -> None:
    """The request was sent, and READY may be lost with the answer. The next call waits for READY, and is certain. On a busy machine the
    shell may have ended before the request was sent, and then the first call is certain, too."""
    await check_answers(way)
    full.login_shell(BASH, "exit 0\n")
    mark = marker(full)
    with pytest.raises((OutcomeUnknown, HostUnreachable), match="status 0"):
        await quick(way, "echo", timeout=20, mark=str(mark))
    with pytest.raises(HostUnreachable, match="status 0 and ran nothing"):
        await quick(way, "echo", timeout=20, mark=str(mark))
    assert not mark.read_text()
    full.login_shell(BASH)
    await check_answers(way)


WAYS = ("partition", "half_open", "reset", "power_loss")


@pytest.mark.parametrize(
    "how",
    [*WAYS[::2], *(pytest.param(w, marks=pytest.mark.soak(suite="fleet")) for w in WAYS[1::2])],
)
async def test_cut_off_before_anything_was_sent(full: FullHost, way: SshHost, how: str) -> None:
    """On a connection that is kept, and then on one that is not there yet."""
    await ask(way, "echo")
    mark = marker(full)
    getattr(full, how)()
    for _ in range(2):
        with pytest.raises(HostUnreachable):
            await quick(way, "echo", mark=str(mark))
    assert not mark.read_text()


@pytest.mark.parametrize("how", WAYS)
async def test_cut_off_after_it_was_sent_leaves_it_open(
    full: FullHost, way: SshHost, how: str
) -> None:
    mark = marker(full)
    call = asyncio.create_task(quick(way, "sleep", timeout=10, seconds=8, mark=str(mark)))
    await arrived(mark)
    getattr(full, how)()
    with pytest.raises(OutcomeUnknown):
        await call


@pytest.mark.parametrize("doubted", [False, True])
async def test_after_a_call_without_an_answer_a_new_connection_is_made(
    full: FullHost, way: SshHost, doubted: bool
) -> None:
    """One that is doubted is not waited for."""
    host = SshHost(full.login, timeouts=SshTimeouts(connect=2.0, keepalive=1000.0))
    await check_answers(host)
    if doubted:
        mark = marker(full)
        call = asyncio.create_task(ask(host, "sleep", seconds=1000.0, mark=str(mark)))
        await arrived(mark)
        full.half_open()
    else:
        full.half_open()
        with pytest.raises(HostUnreachable):
            await quick(host, "echo", timeout=0.5)
        call = None
    full.heal()
    before = logins(full)
    if call is not None:
        host.note_restart()
        with pytest.raises(OutcomeUnknown, match="restarted"):
            await call
    await check_answers(host)
    assert logins(full) == before + 1
    await host.close()


async def test_a_short_partition_is_no_error(full: FullHost, way: SshHost) -> None:
    patient = SshHost(full.login)
    mark = marker(full)
    call = asyncio.create_task(ask(patient, "sleep", seconds=1.0, mark=str(mark)))
    await arrived(mark)
    full.partition()
    await asyncio.sleep(0.5)
    full.heal()
    assert (await call).body["ok"] is True
    await patient.close()


async def test_an_attempt_lives_on_without_its_connection_and_its_machine_is_known_after_a_reboot(
    full: FullHost, way: SshHost
) -> None:
    runner = Runner(way)
    began = await runner.hello()
    state = await runner.launch(Launch("job-1", 1, JobSpec(("sleep", "1000")), slot=0))
    assert state.state == "running"
    await way.close()
    again = Runner(SshHost(full.login, timeouts=QUICK))
    assert (await again.status("job-1", 1)).pid == state.pid
    full.reboot()
    after = await again.status("job-1", 1)
    assert (after.state, after.same_boot) == ("rebooted", False)
    assert (await again.hello()).boot_id != began.boot_id
    await again.host.close()


@pytest.mark.parametrize("sessions", [2, 0])
async def test_a_machine_that_takes_few_sessions_is_asked_through_several_connections(
    sessions: int,
) -> None:
    with ssh_hosts.loopback_hosts(settings=f"MaxSessions {sessions}") as [narrow]:
        host = host_of(narrow)
        if sessions:
            answers = await asyncio.gather(*(ask(host, "echo", n=n) for n in range(20)))
            assert [a.body["told"]["n"] for a in answers] == list(range(20))
        else:
            with pytest.raises(HostUnreachable, match="opens no session"):
                await ask(host, "echo")
        await host.close()
