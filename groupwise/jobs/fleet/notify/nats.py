"""NATS as a notifier, and as the channel on which ends of jobs are announced: `jobs.new`, `jobs.completed`, `jobs.errored`.

`NatsLink` keeps one connection in the background: start-up never waits for it, it retries for ever, and the log has one line when the
server goes away and one when it comes back. Each connection is a new client with a new subscription, pinged every few seconds: a client
that reconnects by itself, or whose reader has died of an unreadable message, may receive nothing without any sign.

`NatsNotifier` sends and receives ids of jobs on a subject of core NATS. It does not know who published, and trusts no message.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg

from groupwise.core.retry import Backoff
from groupwise.core.waiting import cancel_and_wait, wait_at_most
from groupwise.jobs.fleet.notify.base import LARGEST, PendingIds, ids_in, messages

NEW_JOBS = "jobs.new"
CONNECTING = 2
"""Time limit in seconds for one server to accept a connection."""
CHECKED = 5.0
"""Seconds between two pings that check whether the server still answers."""
ANSWERING = 5
"""Time limit in seconds for the answer to such a ping."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to connect; doubled each time."""
SENDING = 1.0
"""Seconds that closing waits for pending ids to be sent."""
SENT = LARGEST // 4
"""Maximum bytes of one message of job ids."""
KEPT_MESSAGES, KEPT_BYTES = 10_000, 16 * 1024 * 1024
"""Limits of one subscription's unread messages; further ones are dropped."""

logger = logging.getLogger(__name__)


def _is_no_late_pong(record: logging.LogRecord) -> bool:
    """Filter out a pong that came after its ping timed out: that ends the reader of nats-py, which our own pings detect."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.InvalidStateError))


logging.getLogger(Client.__module__).addFilter(_is_no_late_pong)


class NatsAway(Exception):
    """The server cannot be reached, or did not acknowledge in time: the messages may have arrived or not."""


class NatsRefused(NatsAway):
    """The server does not allow us to publish there; it reports that separately from its acknowledgement. None may have arrived."""


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """The address of NATS and how to log in. Secrets are not in the settings: `access_from` reads them from the environment."""

    url: str
    """One or several URLs, separated by commas: nats://localhost:4222, tls://…"""
    token: str | None = None
    user: str | None = None
    password: str | None = None
    credentials: Path | None = None
    """A `.creds` file."""
    ca: Path | None = None
    """CA certificates to trust instead of the system's."""
    certificate: Path | None = None
    key: Path | None = None
    """Private key of `certificate`, our client certificate, for a server that requires one."""

    @property
    def shown(self) -> str:
        """The URLs without user, password or token."""
        parts = [urlsplit(url.strip()) for url in self.url.split(",")]
        return ",".join(f"{p.scheme}://{p.netloc.rpartition('@')[2]}" for p in parts)

    @property
    def is_shown_whole(self) -> bool:
        """True if `shown` and the environment are enough to connect."""
        return "@" not in self.url

    def __repr__(self) -> str:
        return f"NatsAccess({self.shown})"


def access_from(url: str, environment: Mapping[str, str]) -> NatsAccess:
    """Read the access from the variables of the `nats` command: NATS_TOKEN, NATS_USER, NATS_PASSWORD, NATS_CREDS, NATS_CA, …"""

    def path(name: str) -> Path | None:
        return Path(environment[name]).expanduser() if environment.get(name) else None

    return NatsAccess(
        url=url,
        token=environment.get("NATS_TOKEN") or None,
        user=environment.get("NATS_USER") or None,
        password=environment.get("NATS_PASSWORD") or None,
        credentials=path("NATS_CREDS"),
        ca=path("NATS_CA"),
        certificate=path("NATS_CERT"),
        key=path("NATS_KEY"),
    )


class NatsLink:
    """A connection that exists whenever the server does. `heard` gets the payload of each message on `subject`, once `listen` was
    called."""

    def __init__(
        self,
        access: NatsAccess,
        subject: str | None = None,
        heard: Callable[[bytes], None] | None = None,
        absent: int = logging.INFO,
    ) -> None:
        """`absent`: the log level for a server that is missing from the start."""
        self._access = access
        self._absent_level = absent
        self._subject = subject
        self._on_payload = heard
        self._listening = False
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._has_tried = asyncio.Event()
        self._wake_up = asyncio.Event()
        """Set to wake the task `_connecting`."""
        self._connecting: asyncio.Task[None] | None = None
        self._was_connected: bool | None = None
        self._last_error: Exception | None = None
        self._reported_errors: set[str] = set()
        self._refusals: list[str] = []
        """The server's messages that refuse the present publication."""
        self._refusal_by_subject: dict[str, str] = {}
        """The server's refusal by subject, until a message is accepted there."""

    @property
    def is_there(self) -> bool:
        """True while there is a connection."""
        return self._connected.is_set()

    @property
    def trouble(self) -> str | None:
        """The reason why nothing can be published; None: no obstacle is known."""
        return (
            "; ".join(self._refusal_by_subject.values()) or None
            if self.is_there
            else "it is not there"
        )

    @property
    def largest(self) -> int:
        """Maximum bytes of a message that the server accepts."""
        return self._client.max_payload if self._client is not None else LARGEST

    def open(self) -> None:
        """Start to connect in the background, and stay connected."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._keep_connected())

    def listen(self) -> None:
        """Start to receive messages that are published on the subject."""
        if not self._listening:
            self._listening = True
            self._wake_up.set()
        self.open()

    async def until_there(self) -> None:
        """Wait for a connection, without a time limit."""
        await self._connected.wait()

    async def until_tried(self) -> None:
        """Wait until the first attempt to connect has succeeded or failed."""
        await self._has_tried.wait()

    async def publish(self, texts: Sequence[tuple[str, bytes]], timeout: float) -> None:
        """Publish (subject, payload) pairs in order; return when the server has taken all of them. Raises NatsAway, NatsRefused.

        One call at a time: the server sends refusals separately from its acknowledgement, and before it.
        """
        client = self._client
        self._refusals.clear()
        if client is None:
            raise NatsAway(f"NATS at {self._access.shown} is not there")
        try:
            async with asyncio.timeout(timeout):
                for subject, payload in texts:
                    await client.publish(subject, payload)
                # The library's ping overtakes messages that wait to be written. After its answer they are written; the next ping follows
                # them.
                await client.rtt()
                await client.rtt()
        except Exception as error:
            raise NatsAway(f"NATS at {self._access.shown}: {_describe_error(error)}") from error
        for subject, _ in texts:
            self._refusal_by_subject.pop(subject, None)
        if self._refusals:
            self._refusal_by_subject.update((subject, self._refusals[0]) for subject, _ in texts)
            raise NatsRefused(f"NATS at {self._access.shown}: {self._refusals[0]}")

    async def close(self) -> None:
        """Close the connection."""
        await cancel_and_wait(self._connecting)
        self._connecting = None

    async def _keep_connected(self) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            client = Client()
            reason = "the connection ended"
            try:
                await self._connect(client)
                backoff.reset()
                self._client = client
                self._last_error = None
                self._connected.set()
                self._has_tried.set()
                if self._was_connected is not True:
                    logger.info("NATS at %s is there", self._access.shown)
                self._was_connected = True
                # Return when the connection has ended; raise when the server stops answering.
                subscribed = False
                while not client.is_closed:
                    self._wake_up.clear()
                    if self._listening and self._subject is not None and not subscribed:
                        subscribed = True
                        await client.subscribe(  # pyright: ignore[reportUnknownMemberType]
                            self._subject,
                            cb=self._on_message,
                            pending_msgs_limit=KEPT_MESSAGES,
                            pending_bytes_limit=KEPT_BYTES,
                        )
                    await client.rtt(timeout=ANSWERING)
                    await wait_at_most(CHECKED, self._wake_up)
            except Exception as error:  # noqa: BLE001 — a foreign server and its library may raise anything: the fleet continues without
                reason = _describe_error(self._last_error or error)
            finally:
                self._client = None
                self._connected.clear()
                with suppress(Exception):  # the client is given up, in any state
                    async with asyncio.timeout(CONNECTING):
                        await client.close()
            self._has_tried.set()
            if self._was_connected is not False:
                logger.log(
                    self._absent_level if self._was_connected is None else logging.WARNING,
                    "NATS at %s %s (%s). It is tried again until it comes; "
                    "the database is looked at regularly, so that no job waits for it",
                    self._access.shown,
                    "is not there" if self._was_connected is None else "has gone",
                    reason,
                )
            self._was_connected = False
            await asyncio.sleep(backoff.next())

    async def _connect(self, client: Client) -> None:
        servers = [url.strip() for url in self._access.url.split(",")]
        self._last_error = None
        async with asyncio.timeout((CONNECTING + 1) * len(servers)):
            await client.connect(
                servers=servers,
                name="groupwise-fleet",
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECTING,
                closed_cb=self._on_closed,
                error_cb=self._on_error,
                **credentials(self._access),
            )
            await client.rtt()

    async def _on_message(self, message: Msg) -> None:
        if self._on_payload is not None:
            self._on_payload(message.data)

    async def _on_closed(self) -> None:
        self._wake_up.set()

    async def _on_error(self, error: Exception) -> None:
        """Handle errors outside our calls: while connecting, the reason of the failure; later, missing permissions."""
        self._last_error = error
        message = _describe_error(error)
        if not self.is_there or "permissions" not in message.lower():
            return
        if "publish" in message.lower():  # rather than a subscription
            self._refusals.append(message)
        if message not in self._reported_errors:
            self._reported_errors.add(message)
            logger.warning("NATS at %s: %s", self._access.shown, message)


class NatsNotifier:
    """Ids on a subject of core NATS, over a connection of its own."""

    def __init__(self, access: NatsAccess, subject: str = NEW_JOBS) -> None:
        self._subject = subject
        self._received = PendingIds()
        self._unsent = PendingIds()
        self._link = NatsLink(access, subject, lambda payload: self._received.put(ids_in(payload)))
        self._sender: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start to connect in the background: ids that are announced from now on are sent as soon as there is a server."""
        self._link.open()
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_unsent())

    def notify(self, job_ids: Iterable[str]) -> None:
        """See `Notifier`. Sent once `open` or `wait` was called; kept until then, up to a bound."""
        ids = frozenset(job_ids)
        self._received.put(ids)
        self._unsent.put(ids)

    async def wait(self, timeout: float) -> frozenset[str]:
        """See `Notifier`."""
        self._link.listen()
        self.open()
        return await self._received.wait(timeout)

    async def close(self) -> None:
        """See `Notifier`."""
        await cancel_and_wait(self._sender)
        if ids := self._unsent.take():
            self._link.open()
            with suppress(NatsAway, TimeoutError):
                async with asyncio.timeout(SENDING):
                    await self._link.until_tried()
                    await self._publish_ids(ids)
        await self._link.close()

    async def _send_unsent(self) -> None:
        while True:
            await self._link.until_there()
            ids = await self._unsent.wait(None)
            try:
                await self._publish_ids(ids)
            except NatsRefused:
                pass  # it would be refused again; the link has logged it, and sweeps find the jobs
            except NatsAway:
                self._unsent.put(ids)
                await asyncio.sleep(FIRST_PAUSE)
            except asyncio.CancelledError:  # `close` sends it
                self._unsent.put(ids)
                raise

    async def _publish_ids(self, ids: frozenset[str]) -> None:
        texts = [(self._subject, text) for text in messages(sorted(ids), SENT)]
        await self._link.publish(texts, SENDING)


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__


def credentials(access: NatsAccess) -> dict[str, Any]:
    """The login options of a NATS client. Raises OSError if one of the files cannot be read."""
    options: dict[str, Any] = {
        "token": access.token,
        "user": access.user,
        "password": access.password,
        "user_credentials": access.credentials,
    }
    if access.ca or access.certificate or "tls://" in access.url:
        context = ssl.create_default_context(cafile=access.ca)
        if access.certificate is not None:
            context.load_cert_chain(access.certificate, access.key)
        options["tls"] = context
    return {name: value for name, value in options.items() if value is not None}
