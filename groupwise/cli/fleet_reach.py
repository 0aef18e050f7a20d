"""What `groupwise fleet vm add` finds out itself: where a machine is, and which host key it shows.

Where a machine is, is said by options or asked of the user's ssh config, once. Its host key is shown to a person before anything else
is said to it. For a fleet that runs elsewhere nothing is found out: what this machine sees and has is not what that one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.output import say
from groupwise.errors import UsageError

if TYPE_CHECKING:
    from groupwise.hosts.keys import Alias, HostKey

NO_KEY_FROM_AFAR = (
    "--trust and --yes are for who types on the machine where the fleet runs: what {vm} shows here need not be what it shows there. Leave "
    "them out; the fleet reads its host key in the next round, and `groupwise fleet vm trust {vm} SHA256:…` then trusts it."
)
NO_PREPARING_FROM_AFAR = (
    "--prepare is for who types on the machine where the fleet runs: it needs SSH keys and the code there. Leave it out, and type "
    "`groupwise fleet vm prepare {vm}` there."
)
KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
"""What ssh itself tries, in the folder .ssh."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a machine is, and as whom it is reached."""

    host: str
    port: int
    user: str
    key: str | None
    jump: Mapping[str, Any] | None = None

    def as_fields(self) -> dict[str, Any]:
        """As a fleet calls them."""
        return {
            "ip_address": self.host,
            "port": self.port,
            "user": self.user,
            "ssh_key_path": self.key,
            "jump": self.jump,
        }


@dataclass(frozen=True, slots=True)
class SeenKey:
    """The host key of a machine: trusted, or only seen."""

    pinned: str | None
    shown: str | None


def described(
    host: str | None,
    port: int | None,
    user: str | None,
    key: str | None,
    alias: str | None,
) -> Where:
    """Where a machine is, by options or by a name of the ssh config with options laid over it. Raises UsageError."""
    if host is None and alias is None:
        raise UsageError(
            "where is the machine? --host ADDRESS with --user, or --from-ssh-config NAME."
        )
    if host is not None and alias is not None:
        raise UsageError(
            "--host and --from-ssh-config contradict each other: both say where it is."
        )
    if alias is not None:
        return _of_alias(alias, port, user, key)
    if user is None:
        raise UsageError(f"as whom is {host} reached? Say it with --user.")
    return Where(str(host), port or 22, user, private_key(key))


def from_afar(
    host: str | None,
    port: int | None,
    user: str | None,
    key: str | None,
    alias: str | None,
) -> Where:
    """Where a machine is, for a fleet that runs elsewhere: nothing of it can be looked at from here. Raises UsageError."""
    if alias is not None:
        raise UsageError(
            f"--from-ssh-config {alias}: the ssh config of this machine names keys of this machine, and the fleet runs elsewhere. Say "
            "--host, --user and --key, the path of the private key on the machine where the fleet runs."
        )
    missing = [
        name
        for name, value in (("--host", host), ("--user", user), ("--key", key))
        if value is None
    ]
    if missing:
        raise UsageError(
            f"the fleet runs elsewhere, and nothing can be looked up there: say {' and '.join(missing)} too. --key is the path of the "
            "private key on the machine where the fleet runs."
        )
    return Where(str(host), port or 22, str(user), key)


def _of_alias(name: str, port: int | None, user: str | None, key: str | None) -> Where:
    from groupwise.hosts.keys import resolve_alias

    found = resolve_alias(name)
    jump = None if found.jump is None else _jump(found.jump)
    return Where(
        found.host,
        port or found.port,
        user or found.user,
        private_key(key or found.identity_file),
        jump,
    )


def _jump(alias: Alias) -> dict[str, Any]:
    seen = _scanned(alias.host, alias.port)
    say(f"the jump host {alias.host} shows {seen.fingerprint}")
    return {
        "host": alias.host,
        "port": alias.port,
        "user": alias.user,
        "ssh_key_path": alias.identity_file,
        "host_key": str(seen),
    }


def private_key(given: str | None) -> str | None:
    """The path of the key, absolute, because whoever uses it runs elsewhere."""
    if given is None:
        folder = Path("~/.ssh").expanduser()
        found = next((folder / name for name in KEYS if (folder / name).is_file()), None)
        return None if found is None else str(found)
    path = Path(given).expanduser().absolute()
    if not path.is_file():
        raise UsageError(
            f"--key {given}: there is no such file; the private key is wanted, not the .pub."
        )
    if path.suffix == ".pub":
        raise UsageError(
            f"--key {given} is the public half; the private key is {path.with_suffix('')}."
        )
    return str(path)


def host_key_of(
    where: Where, *, trust: str | None, yes: bool, ask: Callable[[str], bool] | None
) -> SeenKey:
    """The key that the machine shows now, and whether it is trusted. Raises UsageError where it is not the one of --trust."""
    if where.jump is not None:
        say(
            "its host key is read through the jump host by the poller; `groupwise fleet vm trust` then shows it"
        )
        return SeenKey(None, None)
    seen = _scanned(where.host, where.port)
    say(f"{where.host} shows the host key {seen.fingerprint} ({seen.type})")
    if trust is not None and trust != seen.fingerprint:
        raise UsageError(
            f"{where.host} shows the host key {seen.fingerprint}, not {trust}. Either the fingerprint is of another key of "
            "that machine, or this is not the machine that it should be. Nothing was added."
        )
    if trust is not None or yes:
        return SeenKey(str(seen), None)
    if ask is not None and ask("Is that the machine's own key?"):
        return SeenKey(str(seen), None)
    return SeenKey(None, str(seen))


def _scanned(host: str, port: int) -> HostKey:
    from groupwise.hosts.keys import scan
    from groupwise.hosts.port import HostUnreachable

    try:
        return asyncio.run(scan(host, port))
    except HostUnreachable as error:
        raise UsageError(f"{error}. Is it up, and is {port} its port?") from None
