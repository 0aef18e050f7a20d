"""Finds the address and the host key of a machine for `groupwise fleet vm add`.

The address comes from options or, once, from the user's ssh config. The host key is shown to the user before anything else is sent to the
machine. For a fleet that runs elsewhere, nothing is looked up: the fleet's machine may have another ssh config, and reach another host
under the same name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.api.schemas.fleet import UNPREPARED
from groupwise.cli.options import option
from groupwise.cli.output import say
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.hosts.answers import Observation
    from groupwise.jobs.hosts.keys import Alias, HostKey

NO_KEY_FROM_AFAR = (
    "--trust and --yes only work on the machine where the fleet runs: {vm} may show another key there than here. Leave "
    "them out; the fleet reads its host key in the next round, and `groupwise fleet vm trust {vm} SHA256:…` then trusts it."
)
NO_PREPARING_FROM_AFAR = (
    "--prepare only works on the machine where the fleet runs: it needs SSH keys and the code there. Leave it out, and run "
    "`groupwise fleet vm prepare {vm}` there."
)
NO_ALIAS_FROM_AFAR = (
    "--from-ssh-config {alias}: the ssh config of this machine names keys of this machine, and the fleet runs elsewhere. Say --host, "
    "--user and --key, the path of the private key on the machine where the fleet runs."
)
KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
"""The private keys that ssh itself tries, in the folder .ssh."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a machine, with the user and the key to log in with."""

    host: str
    port: int
    user: str
    key: str | None
    jump: Mapping[str, Any] | None = None
    name: str | None = None
    """Its name in the ssh config, by which known_hosts may have it too."""

    def as_fields(self) -> dict[str, Any]:
        """The address as fields of a machine's document."""
        return {
            "ip_address": self.host,
            "port": self.port,
            "user": self.user,
            "ssh_key_path": self.key,
            "jump": self.jump,
        }


@dataclass(frozen=True, slots=True)
class Trust:
    """The reason to trust a host key: a given fingerprint, `--yes` (any key), or the user's answer."""

    fingerprint: str | None = None
    of_jump: str | None = None
    assume_yes: bool = False
    ask: Callable[[str], bool] | None = None

    def covers(self, fingerprint: str | None, question: str) -> bool:
        """True if the key is trusted. `fingerprint`: the given one, which was found to match; without it, the user is asked."""
        return (
            fingerprint is not None
            or self.assume_yes
            or (self.ask is not None and self.ask(question))
        )


def ask_user() -> Callable[[str], bool] | None:
    """A function that asks the user yes or no; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return lambda question: typer.confirm(question, default=False, err=True)


@dataclass(frozen=True, slots=True)
class SeenKey:
    """The host key of a machine: trusted (`pinned`), or only seen (`shown`)."""

    pinned: str | None
    shown: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How a machine is reached."""

    host: Annotated[
        str | None,
        option("H", "[USER@]NAME[:PORT]. `vm add` looks NAME up in ~/.ssh/config, as ssh does."),
    ] = None
    port: Annotated[
        int | None, option("N", "Port of SSH. A new machine has 22.", min=1, max=65535)
    ] = None
    user: Annotated[str | None, option("U", "User to log in as.")] = None
    key: Annotated[str | None, option("FILE", "Private key for the login, a file here.")] = None
    alias: Annotated[
        str | None,
        option(
            "NAME",
            "Take host, user, port, key and jump host of NAME from the ssh config as it is now; the other options override them.",
            "--from-ssh-config",
        ),
    ] = None

    def of_new(self, trust: Trust) -> Address:
        """The address of a new machine. Raises UsageError, also if its jump host is not trusted."""
        if self.alias is not None:
            return self._of_alias(self.alias, trust)
        if self.host is None:
            raise UsageError(
                "where is the machine? --host [USER@]NAME[:PORT], NAME as `ssh NAME` has it."
            )
        ssh = self._split_host()
        name = str(ssh.host)
        if ssh.user is not None and shutil.which("ssh") is None:
            return Address(name, ssh.port or 22, ssh.user, private_key(self.key))
        return replace(ssh, host=None)._of_alias(name, trust)

    def _split_host(self) -> SshOptions:
        """The options with user and port apart from the host, if it is `USER@NAME:PORT`."""
        user, _, name = (self.host or "").rpartition("@")
        address, colon, number = name.rpartition(":")
        is_port = colon and number.isdecimal() and ":" not in address  # an IPv6 address has several
        return replace(
            self,
            host=(address if is_port else name) or None,
            user=self.user or user or None,
            port=int(number) if is_port else self.port,
        )

    def of_new_from_afar(self) -> Address:
        """The address of a new machine for a fleet that runs elsewhere, so nothing can be looked up here. Raises UsageError."""
        if self.alias is not None:
            raise UsageError(NO_ALIAS_FROM_AFAR.format(alias=self.alias))
        ssh = self._split_host()
        required_options = {"--host": ssh.host, "--user": ssh.user, "--key": ssh.key}
        missing = [name for name, value in required_options.items() if value is None]
        if missing:
            raise UsageError(
                f"the fleet runs elsewhere, and nothing can be looked up there: say {' and '.join(missing)} too. --key is the path of the "
                "private key on the machine where the fleet runs."
            )
        return Address(str(ssh.host), ssh.port or 22, str(ssh.user), ssh.key)

    def of_known(self, trust: Trust, *, is_local: bool) -> dict[str, Any]:
        """The changed fields of an existing machine. Raises UsageError. `is_local`: the fleet runs on this machine."""
        if self.alias is not None:
            if not is_local:
                raise UsageError(NO_ALIAS_FROM_AFAR.format(alias=self.alias))
            address = self._of_alias(self.alias, trust)
            return {**address.as_fields(), "jump": address.jump or {}}
        if trust.of_jump is not None or trust.assume_yes:
            raise UsageError(
                "--trust-jump and --yes are for --from-ssh-config, which finds jump hosts."
            )
        key = private_key(self.key) if self.key is not None and is_local else self.key
        ssh = self._split_host()
        return {"ip_address": ssh.host, "port": ssh.port, "user": ssh.user, "ssh_key_path": key}

    def _of_alias(self, name: str, trust: Trust) -> Address:
        """The address to which `ssh NAME` connects now; the options override it."""
        from groupwise.jobs.hosts.keys import resolve_alias

        if self.host is not None:
            raise UsageError(
                "--host and --from-ssh-config contradict each other: both say where it is."
            )
        alias = resolve_alias(name)
        if alias.jump is None and trust.of_jump is not None:
            raise UsageError(f"--trust-jump: `ssh {name}` goes through no jump host.")
        jump = None if alias.jump is None else _jump_host(alias.jump, trust)
        return Address(
            alias.host,
            self.port or alias.port,
            self.user or alias.user,
            private_key(self.key or alias.identity_file),
            jump,
            name,
        )


def _jump_host(alias: Alias, trust: Trust) -> dict[str, Any]:
    """The jump host as a document. Its key must be trusted now, because machines are reached through it. Raises UsageError."""
    host_key = _read_key(alias.host, alias.port)
    say(f"the jump host {alias.host} shows the host key {host_key.fingerprint} ({host_key.type})")
    _expect_key("--trust-jump", trust.of_jump, alias.host, host_key)
    if not trust.covers(trust.of_jump, "Is that the jump host's own key?"):
        raise UsageError(
            f"the jump host {alias.host} is not trusted, so that nothing is reached through it. Compare its fingerprint with what it says "
            f"itself, and say --trust-jump {host_key.fingerprint}. Nothing was changed."
        )
    return {
        "host": alias.host,
        "port": alias.port,
        "user": alias.user,
        "ssh_key_path": alias.identity_file,
        "host_key": str(host_key),
    }


def private_key(option: str | None) -> str | None:
    """The private key's path, absolute because the fleet runs in another folder. Without an option, the first key that ssh would try."""
    if option is None:
        folder = Path("~/.ssh").expanduser()
        default_key = next((folder / name for name in KEYS if (folder / name).is_file()), None)
        return None if default_key is None else str(default_key)
    path = Path(option).expanduser().absolute()
    if not path.is_file():
        raise UsageError(
            f"--key {option}: there is no such file; the private key is expected, not the .pub."
        )
    if path.suffix == ".pub":
        raise UsageError(
            f"--key {option} is the public half; the private key is {path.with_suffix('')}."
        )
    return str(path)


def host_key_of(where: Address, trust: Trust) -> SeenKey:
    """The host key of a machine, and whether it is trusted: by --trust, by known_hosts, or by the user's answer. Raises UsageError if it
    differs from --trust."""
    from groupwise.jobs.hosts.keys import known_host_key

    known_key = known_host_key(where.host, where.port)
    known_key = known_key or (known_host_key(where.name, where.port) if where.name else None)
    if trust.fingerprint is None and known_key is not None:
        # The login checks whether it shows this key.
        say(f"{where.host} has the host key {known_key.fingerprint} in your known_hosts")
        return SeenKey(str(known_key), None)
    host_key = _read_key(where.host, where.port, where.jump)
    say(f"{where.host} shows the host key {host_key.fingerprint} ({host_key.type})")
    _expect_key("--trust", trust.fingerprint, where.host, host_key)
    if trust.covers(trust.fingerprint, "Is that the machine's own key?"):
        return SeenKey(str(host_key), None)
    return SeenKey(None, str(host_key))


def observe_new(
    machine: Mapping[str, Any], consequence: str = "Nothing was changed."
) -> tuple[Observation, str | None]:
    """Log in to a machine with a new login, and observe it as the poller does. Returns the observation, and the problem with the
    interpreter of its jobs, if any. Raises UsageError, which ends with `consequence`, if the login or the runner fails. `machine`: the
    fields of a `NewMachine`."""
    from groupwise.jobs.fleet.attempts import records
    from groupwise.jobs.fleet.machines import connections
    from groupwise.jobs.fleet.operations.machines import FOLDER
    from groupwise.jobs.fleet.store.tables import VM
    from groupwise.jobs.hosts.host import HostError, RunnerRefused

    defaults = {"workdir": FOLDER, "python": UNPREPARED, "idle_memory_mb": 0}
    given = {name: value for name, value in machine.items() if value is not None}
    new = records.machine(VM(**{**defaults, **given}))

    async def look() -> tuple[Observation, str | None]:
        host = connections.host_of(new)
        try:
            runner = connections.runner_of(new, host)
            observation = await runner.observe(probe=new.probe, probe_timeout=10.0, timeout=20.0)
            try:
                trial = await runner.run([new.python, "-c", "import sys"])
                problem = trial.err.strip() if trial.code else None
            except RunnerRefused as refusal:
                problem = str(refusal)
            return observation, problem
        finally:
            await host.close()

    try:
        return asyncio.run(look())
    except HostError as error:
        raise UsageError(f"{new.vm_id} cannot be used: {error}. {consequence}") from None


def _expect_key(option: str, fingerprint: str | None, host: str, host_key: HostKey) -> None:
    if fingerprint is not None and fingerprint != host_key.fingerprint:
        raise UsageError(
            f"{host} shows the host key {host_key.fingerprint}, not {fingerprint} of {option}. Either the fingerprint is of another key of "
            "that machine, or this is not the machine that it should be. Nothing was changed."
        )


def _read_key(host: str, port: int, jump: Mapping[str, Any] | None = None) -> HostKey:
    from groupwise.jobs.fleet.machines.connections import jump_address
    from groupwise.jobs.hosts.host import HostError
    from groupwise.jobs.hosts.ssh import AGENT, read_host_key

    try:
        agent_path = os.environ.get(AGENT)
        return asyncio.run(
            read_host_key(host, port, jump=jump_address(jump), agent_path=agent_path)
        )
    except HostError as error:
        if isinstance(error.__cause__, socket.gaierror):
            raise UsageError(
                f"{host} is neither a name of your ssh config nor of the network. Nothing was changed."
            ) from None
        raise UsageError(f"{error}. Is it up, and is {port} its port?") from None
