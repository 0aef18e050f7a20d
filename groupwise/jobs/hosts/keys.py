"""SSH host keys, and host aliases of an ssh config.

A machine is trusted by its key, which is stored in its row as `ssh-ed25519 AAAA…`. `scan_host_key` reads the key that a machine shows, and
disconnects before the login; a person decides by the fingerprint whether it is the right key.

`resolve_alias` asks OpenSSH once what an alias means: host, port, user, key, jump host. Afterwards the ssh config is never read again,
because it may change, and may run commands."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import asyncssh

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts.host import HostUnreachable

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
"""Accepted key types, best first, with the signature algorithms of each; RSA not with SHA-1."""


TrustedKeys = tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]
"""Trusted keys, trusted authorities, revoked keys."""
NO_TRUSTED_KEYS: TrustedKeys = ([], [], [])
"""Trust no key. Not None, which would mean trusting every key."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """The public host key of a machine."""

    type: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.type} {base64.b64encode(self.data).decode('ascii')}"

    @property
    def fingerprint(self) -> str:
        """The fingerprint as ssh and ssh-keygen show it: `SHA256:…`."""
        digest = base64.b64encode(hashlib.sha256(self.data).digest()).decode("ascii")
        return "SHA256:" + digest.rstrip("=")

    def public(self) -> asyncssh.SSHKey:
        """The key as an asyncssh object. Raises UsageError if it is invalid."""
        try:
            return asyncssh.import_public_key(str(self))
        except asyncssh.KeyImportError as error:
            raise UsageError(f"the host key {self} cannot be read: {error}") from error


def parse_host_key(line: str) -> HostKey:
    """Parse a key of the form `type base64`, with or without a comment, or a line of a `.pub` file or of `ssh-keyscan`. Raises
    UsageError."""
    words = line.split()
    if len(words) > 2 and words[0] not in ALGORITHMS and words[1] in ALGORITHMS:
        words = words[1:]  # lines of ssh-keyscan and known_hosts start with the host's name
    expected = f"a host key is a type ({', '.join(ALGORITHMS)}), a blank and base64, as in the .pub file of the machine"
    if len(words) < 2 or words[0] not in ALGORITHMS:
        raise UsageError(f"{line.strip()[:80]!r} is not a host key: {expected}")
    try:
        data = base64.b64decode(words[1], validate=True)
    except binascii.Error:
        raise UsageError(
            f"the base64 of the host key {words[1][:40]!r} is broken: {expected}"
        ) from None
    key = HostKey(words[0], data)
    key.public()
    return key


def key_of(public: asyncssh.SSHKey) -> HostKey:
    """Convert an asyncssh key."""
    return HostKey(public.get_algorithm(), public.public_data)


def trust_only(key: HostKey) -> TrustedKeys:
    """Trust this key and no other."""
    return ([key.public()], [], [])


def signature_algorithms(pinned: HostKey | None) -> list[str]:
    """Signature algorithms to request from a machine. Those of the pinned type come first: a machine with several keys then shows that
    one."""
    preferred = [*ALGORITHMS[pinned.type]] if pinned else []
    return preferred + [
        name for names in ALGORITHMS.values() for name in names if name not in preferred
    ]


class HostKeyRecorder(asyncssh.SSHClient):
    """Rejects the host key of a machine that is not trusted, and keeps it in `seen`."""

    def __init__(self) -> None:
        self.seen: HostKey | None = None
        self.lost = asyncio.Event()

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        self.seen = key_of(key)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def scan_host_key(
    address: str,
    port: int,
    *,
    timeout: float = 10.0,
    tunnel: asyncssh.SSHClientConnection | None = None,
) -> HostKey:
    """The host key that a machine shows; nothing else is requested. Raises HostUnreachable."""
    witness = HostKeyRecorder()
    try:
        connection, _ = await asyncssh.create_connection(
            lambda: witness,
            address,
            port,
            tunnel=tunnel,
            username="nobody",
            client_keys=None,
            known_hosts=NO_TRUSTED_KEYS,
            server_host_key_algs=signature_algorithms(None),
            config=None,
            agent_path=None,
            connect_timeout=timeout,
        )
    except (OSError, asyncssh.Error, ValueError, OverflowError) as error:
        # ValueError and OverflowError: an invalid host name or port.
        if witness.seen is not None:
            return witness.seen
        raise HostUnreachable(
            f"the host key of {address} port {port} cannot be read: {error or type(error).__name__}"
        ) from error
    connection.abort()
    raise AssertionError("a connection was made although no key is trusted")


KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
"""Files in which OpenSSH records trusted machines."""

CONFIG_TIMEOUT = 20.0
"""Seconds that ssh may take to read its config, which may run programs (`Match exec`)."""


def known_host_key(host: str, port: int, files: Sequence[str] = KNOWN_HOSTS) -> HostKey | None:
    """The best accepted key by which the user's OpenSSH trusts this host; None: it knows no such key, or the key is revoked."""
    paths = [str(path) for file in files if (path := Path(file).expanduser()).is_file()]
    if not paths:
        return None
    try:
        matches = asyncssh.match_known_hosts(asyncssh.read_known_hosts(paths), host, "", port)
    except (OSError, ValueError):  # unreadable, or with invalid lines
        return None
    trusted, revoked = matches[0], matches[2]
    keys = [key_of(key) for key in trusted if key not in revoked]
    usable = [key for key in keys if key.type in ALGORITHMS]
    return min(usable, key=lambda key: [*ALGORITHMS].index(key.type), default=None)


@dataclass(frozen=True, slots=True)
class Alias:
    """The settings of a host alias in an ssh config."""

    host: str
    port: int
    user: str
    identity_file: str | None
    """The first configured key file that exists."""
    jump: Alias | None = None


def resolve_alias(name: str, *, config: Path | None = None, jumps: int = 1) -> Alias:
    """Ask ssh where `ssh NAME` would connect to. `config` None: the user's own. Raises UsageError."""
    settings = _ssh_settings(name, config)
    host, port, user = (settings[key][0] for key in ("hostname", "port", "user"))
    command = settings.get("proxycommand", ["none"])[0]
    if command != "none":
        raise UsageError(
            f"{name} is reached by a command of the ssh config (ProxyCommand {command}), which is not run here;"
            " give the machine a ProxyJump, or an address that can be reached"
        )
    jump_spec = settings.get("proxyjump", ["none"])[0]
    jump = None
    if jump_spec != "none":
        if jumps < 1 or "," in jump_spec:
            raise UsageError(
                f"{name} is reached through several jump hosts ({jump_spec}); one is supported"
            )
        login, _, jump_address = jump_spec.removeprefix("ssh://").rpartition("@")
        jump_host, jump_port = _host_and_port(jump_address)
        jump = resolve_alias(jump_host, config=config, jumps=jumps - 1)
        jump = replace(jump, port=jump_port or jump.port, user=login or jump.user, jump=None)
    paths = (Path(f).expanduser() for f in settings.get("identityfile", []))
    key = next((str(path) for path in paths if path.is_file()), None)
    return Alias(host, int(port), user, key, jump)


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Parse `host`, `host:port`, `[v6]`, `[v6]:port`, or a bare IPv6 address."""
    if text.startswith("["):
        host, _, suffix = text[1:].partition("]")
        return host, int(suffix[1:]) if suffix[1:].isdecimal() else None
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and ":" not in host:
        return host, int(port)
    return text, None


def _ssh_settings(name: str, config: Path | None) -> dict[str, list[str]]:
    if not name or name.startswith("-") or any(c.isspace() or c == "\0" for c in name):
        raise UsageError(f"{name!r} is not a name of a host in an ssh config")
    program = shutil.which("ssh")
    if program is None:
        raise UsageError(
            "there is no ssh on PATH to read its config with; give the address, port, user and key of the machine instead"
        )
    command = [program, "-G", *(["-F", str(config)] if config else []), "--", name]
    try:
        # The name is a separate argument after `--`, so it cannot be an option.
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=CONFIG_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"ssh does not say within {CONFIG_TIMEOUT:g} s what {name} is: does a `Match exec` of its config wait?"
        ) from None
    if result.returncode:
        raise UsageError(f"ssh cannot say what {name} is: {result.stderr.strip()}")
    settings: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value)
    return settings
