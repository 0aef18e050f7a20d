"""A machine that is reached by SSH. One connection is opened on demand and kept; each call is a session on it that runs the bootstrap.

None of the user's SSH settings are read: no ssh config, no known_hosts, and an agent only if its socket is given. A machine is trusted by
its pinned key alone.

The meaning of an error depends on one question: was any byte of the request passed to the connection? If not, nothing can have happened
(HostUnreachable, HostKeyError); otherwise only the machine knows (OutcomeUnknown). The first call on a connection sends its request only
once the login shell has started the bootstrap, so if the shell cannot start it, it is certain that nothing ran. Later calls save this round
trip. If the shell fails one of them, its outcome is unknown, and the next call waits for the bootstrap again.

A connection that died silently (half-open) is detected by keepalive messages, or by a call that times out; it then gets no new calls. A
machine accepts ten sessions on a connection; further calls get another connection, which is closed when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import asyncssh
from asyncssh.constants import EXTENDED_DATA_STDERR

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts.bootstrap import BOOTSTRAP_LINE, COMMANDS
from groupwise.jobs.hosts.framing import (
    NO_PYTHON,
    Exchange,
    checked_answer,
    request_bytes,
    timeout_message,
)
from groupwise.jobs.hosts.host import (
    HostError,
    HostKeyError,
    HostUnreachable,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)
from groupwise.jobs.hosts.keys import (
    HostKey,
    HostKeyRecorder,
    parse_host_key,
    scan_host_key,
    signature_algorithms,
    trust_only,
)

AGENT = "SSH_AUTH_SOCK"
"""The environment variable with the socket of the ssh agent. The socket differs after each login, so it is never stored."""
MAX_CONCURRENT_CONNECTS = 20
"""Most connections that this process opens at the same time, to all machines together. Each costs a key exchange here, and file
descriptors."""
SESSIONS = 9
"""Most concurrent calls on one connection; sshd allows ten sessions by default (MaxSessions)."""
CONNECTIONS = 4
"""Most connections to one machine. More than one is needed for calls that wait on the machine for long."""
ATTEMPTS = 2
"""How many connections are tried for a call if none of them opens a session."""
EXIT_GRACE = 2.0
"""Seconds that the runner has to end by itself after its answer."""
NOTHING_STARTED = "its login shell has started no command"

_connects: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Address:
    """A machine's address, the user name there, and the host key that it must show."""

    host: str
    user: str
    port: int = 22
    key_path: str | None = None
    """Path of a private key on this machine. If it has a passphrase, the agent must hold it; None: use any key of the agent."""
    host_key: str | None = None
    """The pinned host key, as `ssh-ed25519 AAAA…`."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" + (f":{self.port}" if self.port != 22 else "")


@dataclass(frozen=True, slots=True)
class SshTimeouts:
    """Time limits in seconds."""

    connect: float = 10.0
    """Covers address lookup, key exchange and login together."""
    keepalive: float = 15.0
    """Interval between keepalive messages; after three without an answer the connection is closed."""


class _Channel(Protocol):
    """The methods of a channel that are used here; asyncssh's own type does not say whether it carries text or bytes."""

    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def abort(self) -> None: ...


class _Connection(Protocol):
    def create_session(
        self, session_factory: Callable[[], _Session], command: str, *, encoding: None
    ) -> Awaitable[tuple[_Channel, object]]: ...


class _Session(asyncssh.SSHClientSession[bytes]):
    """One call on one connection."""

    def __init__(self, request: Request, changed: Callable[[], None]) -> None:
        self.exchange = Exchange(request)
        self._changed = changed
        self._link: _Link | None = None
        self._holds_slot = False
        self._channel: _Channel | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    async def open_on(self, link: _Link, command: str) -> None:
        """Start the bootstrap on that connection. Raises asyncssh's exceptions."""
        self._link, self._holds_slot = link, True
        link.sessions += 1
        link.waiting.add(self)
        connection = cast(_Connection, link.connection)
        self._channel, _ = await connection.create_session(lambda: self, command, encoding=None)

    async def send(self, request: bytes) -> None:
        """Send the bootstrap and the whole request; asyncssh buffers what the machine does not accept at once. If the session has ended
        already, so has the call."""
        assert self._channel is not None
        assert self._link is not None
        try:
            self._channel.write(BOOTSTRAP_LINE)
            if not self._link.runs_commands:
                await self.exchange.began.wait()
                self._link.runs_commands = self.exchange.is_ready
            if not self.exchange.answer.done():
                self.exchange.is_sent = True
                self._channel.write(request)
                self._channel.write_eof()
        except OSError:
            self.exchange.end_of_output()

    def end_call(self) -> None:
        """End the call. After an answer the process on the machine gets time to end by itself; otherwise the session is aborted."""
        self.exchange.drop()
        if self._link is not None:
            self._link.waiting.discard(self)
        if self._channel is None:
            self.release_slot()
        elif self.exchange.is_answered and self._holds_slot:
            loop = asyncio.get_running_loop()
            self._abort_timer = loop.call_later(EXIT_GRACE, self._channel.abort)
        else:
            self._channel.abort()
        self._changed()

    def release_slot(self) -> None:
        """Free the session's place on the connection, because the machine no longer counts it."""
        if self._link is not None and self._holds_slot:
            self._holds_slot = False
            self._link.sessions -= 1
            self._link.waiting.discard(self)
            self._changed()

    @property
    def is_open(self) -> bool:
        """True once the machine has accepted the session."""
        return self._channel is not None

    def retire_link(self) -> None:
        """Put no new calls on this connection after a timeout: it may be dead."""
        if self._link is not None:
            self._link.retired = True

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if datatype == EXTENDED_DATA_STDERR:
            self.exchange.take_stderr(data)
        else:
            self.exchange.take_stdout(data)

    def exit_status_received(self, status: int) -> None:
        self.exchange.status = status

    def connection_lost(self, exc: Exception | None) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        if self._link is not None and not self.exchange.is_ready:
            self._link.runs_commands = False
        if self._channel is not None:  # otherwise `SshHost._open_session` tries again
            self.exchange.end_of_output()
        self.release_slot()


@dataclass(slots=True, eq=False)
class _Link:
    """One connection and its sessions."""

    connection: asyncssh.SSHClientConnection
    lost: asyncio.Event
    jump: asyncssh.SSHClientConnection | None = None
    capacity: int = SESSIONS
    sessions: int = 0
    """Sessions that count towards the machine's limit: each until its process has ended, a little after the answer."""
    waiting: set[_Session] = field(default_factory=set[_Session])
    """Sessions that wait for their answer."""
    retired: bool = False
    """True if the connection gets no new calls."""
    runs_commands: bool = False
    """True if the login shell there started the bootstrap of the last call that has ended."""

    @property
    def usable(self) -> bool:
        return not self.retired and not self.lost.is_set()

    async def end(self) -> None:
        for connection in filter(None, (self.connection, self.jump)):
            connection.abort()
            await connection.wait_closed()


class SshHost:
    """A machine that is reached by SSH."""

    def __init__(
        self,
        address: Address,
        *,
        jump: Address | None = None,
        agent_path: str | None = None,
        timeouts: SshTimeouts | None = None,
    ) -> None:
        """`jump` is a host to connect through; it must show its own pinned key. `agent_path` is the socket of an agent that holds the
        keys."""
        self.address = address
        self._jump = jump
        self._agent_path = agent_path
        self._timeouts = timeouts or SshTimeouts()
        self._command = COMMANDS[0]
        self._links: list[_Link] = []
        self._opening: asyncio.Task[_Link] | None = None
        self._changed = asyncio.Event()
        self._closed = False

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """See `Host.call`."""
        refusal: RunnerRefused | None = None
        for command in dict.fromkeys((self._command, *COMMANDS)):
            try:
                return await self._call(request, timeout, command)
            except HostUnreachable:
                if refusal is None:
                    raise
            except RunnerRefused as error:
                if error.code != NO_PYTHON:
                    raise
                refusal = refusal or error
        assert refusal is not None, "every command has been refused"
        raise refusal

    async def _call(self, request: Request, timeout: float, command: str) -> RunnerResponse:
        session = _Session(request, self._sessions_changed)
        try:
            async with session.exchange.limit(timeout, request.longest):
                await self._open_session(session, command)
                await session.send(request_bytes(request))
                answer = await session.exchange.answer
                self._command = command
                return checked_answer(answer)
        except TimeoutError:
            session.retire_link()
            way = f"{self.address} through {self._jump}" if self._jump else self.address
            message = timeout_message(request, way, timeout)
            if session.exchange.is_sent:
                raise OutcomeUnknown(message) from None
            if session.is_open:
                message += f": {NOTHING_STARTED}, perhaps because a start-up file of it waits"
            raise HostUnreachable(message) from None
        except OutcomeUnknown as error:
            if session.exchange.is_sent:
                raise
            raise HostUnreachable(f"{self.address}: {NOTHING_STARTED}: {error}") from None
        finally:
            session.end_call()

    def note_restart(self) -> None:
        """Fail the calls on all open connections, and put no new calls on them: the machine may have restarted."""
        for link in self._links:
            link.retired = True
            for session in link.waiting:
                session.exchange.fail(OutcomeUnknown(f"{self.address} was restarted meanwhile"))
        self._sessions_changed()

    async def close(self) -> None:
        """See `Host.close`."""
        self._closed = True
        self._changed.set()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        for link in self._links:
            for session in link.waiting:
                session.exchange.fail(
                    OutcomeUnknown(f"the connection to {self.address} was closed meanwhile")
                )
            await link.end()

    async def _open_session(self, session: _Session, command: str) -> None:
        """Start the bootstrap on the machine, which then waits for a request. Any failure here means that nothing was sent."""
        broken_links = 0
        while True:
            link = await self._link_with_room()
            try:
                await session.open_on(link, command)
                return
            except asyncssh.ChannelOpenError as error:
                session.release_slot()
                reason = error.reason
                link.capacity = link.sessions
            except (OSError, asyncssh.Error) as error:
                # A connection that breaks when it is used again may have been dead for hours: open another one.
                session.release_slot()
                reason = str(error) or type(error).__name__
                link.capacity = 0
            if link.capacity < 1:
                link.retired = True
                broken_links += 1
            if broken_links == ATTEMPTS:
                raise HostUnreachable(
                    f"{self.address} opens no session to run a command in: {reason}"
                )

    async def _link_with_room(self) -> _Link:
        while True:
            if self._closed:
                raise HostUnreachable(f"the connection to {self.address} has been closed")
            usable = [link for link in self._links if link.usable]
            for link in usable:
                if link.sessions < link.capacity:
                    return link
            if len(usable) < CONNECTIONS:
                # All callers that need a connection now wait for the same one; a failure reaches all of them.
                if self._opening is None or self._opening.done():
                    self._opening = asyncio.create_task(self._connect())
                    # Retrieve its exception: if all callers were cancelled, asyncio would log it as never retrieved.
                    self._opening.add_done_callback(
                        lambda task: task.cancelled() or task.exception()
                    )
                opening = self._opening
                # `wait` does not cancel the task if this caller is cancelled: others wait for it too.
                await asyncio.wait({opening})
                if opening.cancelled():
                    raise HostUnreachable(
                        f"the connection to {self.address} was closed as it was made"
                    )
                opening.result()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _connect(self) -> _Link:
        async with connect_semaphore():
            jump = None
            if self._jump is not None:
                jump, _ = await self._connect_to(self._jump, None)
            try:
                connection, lost_event = await self._connect_to(self.address, jump)
            except BaseException:
                if jump is not None:
                    jump.abort()
                raise
        link = _Link(connection, lost_event, jump)
        self._links.append(link)
        return link

    async def _connect_to(
        self, address: Address, tunnel: asyncssh.SSHClientConnection | None
    ) -> tuple[asyncssh.SSHClientConnection, asyncio.Event]:
        return await connect(
            address, tunnel=tunnel, agent_path=self._agent_path, timeouts=self._timeouts
        )

    def _sessions_changed(self) -> None:
        """React to the end of a session: calls may wait for its place, and its connection may no longer be needed."""
        self._changed.set()
        usable = [link for link in self._links if link.usable]
        for link in usable[1:]:
            if not link.sessions:
                link.retired = True
        for link in self._links:
            if not link.usable and not link.waiting:
                link.connection.abort()
                if link.jump is not None:
                    link.jump.abort()
        self._links = [link for link in self._links if link.usable or link.waiting]


def connect_semaphore() -> asyncio.Semaphore:
    """The semaphore that limits how many connections are opened at once, one for each event loop."""
    return _connects.setdefault(
        asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT_CONNECTS)
    )


async def connect(
    address: Address,
    *,
    tunnel: asyncssh.SSHClientConnection | None = None,
    agent_path: str | None = None,
    timeouts: SshTimeouts | None = None,
) -> tuple[asyncssh.SSHClientConnection, asyncio.Event]:
    """Connect to a machine that shows its pinned key. Returns the connection and the event that is set when it is lost. Raises
    HostUnreachable or HostKeyError."""
    timeouts = timeouts or SshTimeouts()
    pinned = _pinned_key(address)
    witness = HostKeyRecorder()
    try:
        async with _client_keys(address, agent_path, timeouts.connect) as client_keys:
            connection, _ = await asyncssh.create_connection(
                lambda: witness,
                address.host,
                address.port,
                tunnel=tunnel,
                username=address.user,
                client_keys=client_keys,
                known_hosts=trust_only(pinned),
                server_host_key_algs=signature_algorithms(pinned),
                config=None,
                agent_path=None,
                preferred_auth="publickey",
                connect_timeout=timeouts.connect,
                keepalive_interval=timeouts.keepalive,
                keepalive_count_max=3,
            )
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise HostUnreachable(
            f"the private key {address.key_path} cannot be used: {error}. A key without a passphrase, in a format of OpenSSH, is wanted"
        ) from error
    except (OSError, asyncssh.Error) as error:
        raise _connect_error(address, pinned, witness, error) from error
    except (ValueError, OverflowError) as error:  # an invalid host name or port
        raise HostUnreachable(
            f"{address.host!a} port {address.port} as {address.user!a} is not a valid address: {error}"
        ) from error
    return connection, witness.lost


def _pinned_key(address: Address) -> HostKey:
    if not address.host_key:
        raise HostKeyError(
            f"no host key is pinned for {address.host} port {address.port}: nothing is sent to a machine that anybody could be."
            " Look at the fingerprint that it shows, and trust it"
        )
    try:
        return parse_host_key(address.host_key)
    except UsageError as error:
        raise HostKeyError(
            f"the key pinned for {address.host} port {address.port}: {error}"
        ) from error


@contextlib.asynccontextmanager
async def _client_keys(
    address: Address, agent_path: str | None, agent_timeout: float
) -> AsyncGenerator[list[str] | list[asyncssh.SSHKeyPair]]:
    """Keys for the login: one key file, or keys of the agent, which has `agent_timeout` seconds to list them."""
    key_path = address.key_path and _checked_key_path(address.key_path)
    if key_path and not _has_passphrase(key_path):
        yield [key_path]
        return
    if agent_path is None:
        problem = (
            f"the private key {key_path} has a passphrase, and there is no ssh agent that holds it"
            if key_path
            else f"there is no key to log in to {address} with, and no ssh agent"
        )
        raise HostUnreachable(
            f"{problem}: give a key without a passphrase (--key), or ssh-add the key and have {AGENT} set where the fleet runs"
        )
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(agent_timeout):
                agent = await stack.enter_async_context(asyncssh.connect_agent(agent_path))
                keys = [*await agent.get_keys()]
        except (OSError, asyncssh.Error, ValueError) as error:  # ValueError: it hangs up
            reason = str(error) or f"it is silent for {agent_timeout:g} s"
            raise HostUnreachable(
                f"the ssh agent at {agent_path} ({AGENT}) does not answer: {reason}"
            ) from error
        if key_path and (public := Path(f"{key_path}.pub")).is_file():
            data = asyncssh.read_public_key(public).public_data
            keys = [key for key in keys if key.public_data == data]
        if not keys:
            which = f"does not hold {key_path}" if key_path else "holds no key"
            raise HostUnreachable(f"the ssh agent at {agent_path} {which}; add it with ssh-add")
        yield keys


def _has_passphrase(key_path: str) -> bool:
    """True for a private key that can only be read with a passphrase; any other problem of it shows at the login."""
    try:
        asyncssh.read_private_key(key_path)
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        return "assphrase" in str(error)
    return False


def _checked_key_path(name: str) -> str:
    """Check a key file's permissions, as ssh does; returns its path. Raises HostUnreachable."""
    try:
        path = Path(name).expanduser()
        mode = path.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:  # also for an invalid path
        reason = error.strerror if isinstance(error, OSError) else error
        raise HostUnreachable(f"the private key {name} cannot be read: {reason}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise HostUnreachable(f"the private key {path} can be read by others; chmod 600 {path}")
    return str(path)


def _connect_error(
    address: Address, pinned: HostKey, witness: HostKeyRecorder, error: Exception
) -> HostError:
    if witness.seen is not None:
        return HostKeyError(
            f"{address.host} port {address.port} shows the key {witness.seen.fingerprint} ({witness.seen.type}); the pinned one is"
            f" {pinned.fingerprint} ({pinned.type}). It is another machine, was installed again, or is impersonated:"
            " find out which before you trust it",
            str(witness.seen),
        )
    if isinstance(error, asyncssh.PermissionDenied):
        return HostUnreachable(
            f"{address} does not accept the key {address.key_path or 'of the agent'}:"
            f" its public half belongs in ~/.ssh/authorized_keys there (is {address.user} the right user?)"
        )
    if isinstance(error, TimeoutError):
        return HostUnreachable(f"{address} does not answer")
    return HostUnreachable(f"{address} cannot be reached: {error or type(error).__name__}")


async def read_host_key(
    host: str,
    port: int,
    *,
    jump: Address | None = None,
    agent_path: str | None = None,
) -> HostKey:
    """The host key that a machine shows, read through `jump` if given. Raises HostUnreachable; HostKeyError for the jump host's key."""
    timeouts = SshTimeouts()
    async with connect_semaphore():
        if jump is None:
            return await scan_host_key(host, port, timeout=timeouts.connect)
        tunnel, _ = await connect(jump, agent_path=agent_path, timeouts=timeouts)
        try:
            return await scan_host_key(host, port, timeout=timeouts.connect, tunnel=tunnel)
        finally:
            tunnel.abort()
