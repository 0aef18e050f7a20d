"""Webhooks: when a job ends, the address that it names gets an HTTP POST with the JSON that NATS gets.

The submitter of a job chooses the address, and our machine connects to it. So only http and https are allowed, redirects are not
followed, and the name is resolved once, here: nothing is sent unless all of its IP addresses are on the public internet, and the connection
goes to a checked address. `allow_private` also allows the fleet's own network.

A 2xx response completes the delivery. Everything else is tried again with growing pauses, a bounded number of times. Either end is an event
of the job, so a tracker that is restarted does not repeat finished deliveries.

Deliveries to one destination (host and port) wait for each other, but not for other destinations: only a few run at once, and those that
were never tried go first. If a host cannot be connected to, one attempt counts for all deliveries that wait for it. Destinations that gave
no answer the last time share a few separate slots, so any number of them cannot hold up one that answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import httpx2
from sqlalchemy import select

from groupwise.core import waiting
from groupwise.jobs.fleet.queue.request import is_host
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Event
from groupwise.jobs.fleet.tracker import JobEnd

PAUSES = (2.0, 10.0, 60.0, 300.0, 900.0, 1800.0)
"""Seconds before each further attempt; after the last one the delivery is given up."""
ANSWER_TIMEOUT = 10.0
"""Seconds for name resolution, connection and response together."""
CONNECT_TIMEOUT = ANSWER_TIMEOUT / 2
"""Seconds of these for the connection; the limit separates an absent host from one that does not answer."""
MAX_CONCURRENT = 64
MAX_UNRESPONSIVE = 16
"""Further slots, for destinations that did not answer the last time."""
MAX_PER_DESTINATION = 4
"""Requests at once to one destination; only one if it has not answered yet, or not the last time."""
UNRESPONSIVE_SECONDS = 2 * PAUSES[-1]
"""Seconds for which a destination counts as unresponsive: long enough to retry all deliveries that wait there."""
AWAY = 3
"""Index into `PAUSES` of the longest pause for a destination that could not be connected to."""
ROUND_SECONDS = 1.0
"""Seconds that one round waits for answers; the next round takes those that come later."""
DELIVERED, GIVEN_UP = "webhook.delivered", "webhook.given_up"
ACTOR = "tracker"

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port → addresses."""

_LOOK_UPS = ThreadPoolExecutor(
    MAX_CONCURRENT + MAX_UNRESPONSIVE, thread_name_prefix="webhook-names"
)
"""A separate pool: a look-up continues after its caller has given up, and the process's shared pool is small."""

logger = logging.getLogger(__name__)


class Forbidden(Exception):
    """The submitter's address may not be called."""


@dataclass(slots=True)
class _Delivery:
    """Attempts to deliver one event."""

    attempts: int = 0
    next_at: float = 0.0
    is_queued: bool = False
    """True while it waits in a destination's queue, or is being tried."""
    end: tuple[str, str] | None = None
    """Kind and reason of the final event; it may not be written yet."""


@dataclass(slots=True)
class _Destination:
    """A host and port to which webhooks are sent, with the deliveries that wait for it."""

    queue: dict[int, JobEnd] = field(default_factory=dict[int, JobEnd])
    workers: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    failures: int = 0
    """Failed connections in a row."""
    next_at: float = 0.0
    has_answered: bool = False
    """True if it answered the last time."""
    unresponsive_until: float = 0.0


class WebhookOutlet:
    """Calls each job's own address; see `Outlet`."""

    name = "tracker.webhooks"
    announces_history = True

    def __init__(
        self,
        database: Database,
        *,
        allow_private: bool = False,
        transport: httpx2.AsyncBaseTransport | None = None,
        resolve: Resolve | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._allow_private = allow_private
        self._resolve = resolve or addresses_of
        self._clock = clock
        self._deliveries: dict[int, _Delivery] = {}
        self._destinations: dict[tuple[str, int] | None, _Destination] = {}
        self._settled_ids: set[int] = set()
        self._slots, self._unresponsive_slots = (
            asyncio.Semaphore(MAX_CONCURRENT),
            asyncio.Semaphore(MAX_UNRESPONSIVE),
        )
        self._http = httpx2.AsyncClient(
            transport=transport,
            timeout=httpx2.Timeout(ANSWER_TIMEOUT, connect=CONNECT_TIMEOUT),
            trust_env=False,  # a proxy of the environment would look names up again
            follow_redirects=False,
            headers={"User-Agent": "groupwise-fleet"},
        )

    def destination_of(self, job_end: JobEnd) -> str | None:
        """See `Outlet`."""
        address = None if job_end.webhook is None else _host_and_port(job_end.webhook)
        return None if address is None else f"{address[0]}:{address[1]}"

    async def announce(self, job_ends: Sequence[JobEnd]) -> frozenset[int]:
        """See `Outlet`. Deliveries in progress continue after this returns."""
        silent = {e.event_id for e in job_ends if e.webhook is None}
        with_webhook = [e for e in job_ends if e.webhook is not None]
        new_ends = [e for e in with_webhook if e.event_id not in self._deliveries]
        settled_ids = await self._settled_deliveries(new_ends) if new_ends else frozenset[int]()
        now = self._clock()
        for end in with_webhook:
            if end.event_id in settled_ids or end.event_id in self._settled_ids:
                continue
            delivery = self._deliveries.setdefault(end.event_id, _Delivery())
            destination = self._destinations.setdefault(
                _host_and_port(end.webhook or ""), _Destination()
            )
            if not delivery.is_queued and max(delivery.next_at, destination.next_at) <= now:
                delivery.is_queued = True
                destination.queue[end.event_id] = end
        for destination in self._destinations.values():
            max_workers = min(
                MAX_PER_DESTINATION if destination.has_answered else 1, len(destination.queue)
            )
            while len(destination.workers) < max_workers:
                destination.workers.add(asyncio.create_task(self._deliver_queued(destination)))
        if workers := [
            worker for destination in self._destinations.values() for worker in destination.workers
        ]:
            await asyncio.wait(workers, timeout=ROUND_SECONDS)
        self._remove_ended_workers()
        finished, self._settled_ids = silent | settled_ids | self._settled_ids, set()
        for event_id in finished:
            self._deliveries.pop(event_id, None)
        return frozenset(finished)

    async def close(self) -> None:
        """Cancel deliveries in progress, which the next tracker tries again, and close the connections."""
        await waiting.cancel_and_wait(
            *(
                worker
                for destination in self._destinations.values()
                for worker in destination.workers
            )
        )
        await self._http.aclose()

    def _remove_ended_workers(self) -> None:
        """Forget workers that have ended. Raises the error of one that failed."""
        failure: BaseException | None = None
        for destination in self._destinations.values():
            for worker in [task for task in destination.workers if task.done()]:
                destination.workers.remove(worker)
                failure = worker.exception() or failure
        now = self._clock()
        self._destinations = {
            key: destination
            for key, destination in self._destinations.items()
            if destination.workers
            or destination.queue
            or now < max(destination.next_at, destination.unresponsive_until)
        }
        if failure is not None:
            raise failure

    async def _deliver_queued(self, destination: _Destination) -> None:
        """Try the deliveries that wait for a destination one by one, those with the fewest attempts first."""
        while destination.queue:
            event_id = min(
                destination.queue,
                key=lambda queued_id: (self._deliveries[queued_id].attempts, queued_id),
            )
            job_end = destination.queue.pop(event_id)
            async with (
                self._unresponsive_slots
                if self._clock() < destination.unresponsive_until
                else self._slots
            ):
                delivery = self._deliveries[job_end.event_id]
                try:
                    if delivery.end is None:
                        delivery.attempts += 1
                        await self._try_delivery(job_end, delivery, destination)
                    if delivery.end is not None:
                        await self._record_settled(job_end, delivery, *delivery.end)
                finally:
                    delivery.is_queued = False

    async def _settled_deliveries(self, job_ends: Sequence[JobEnd]) -> frozenset[int]:
        """Deliveries that were settled before this process started, or by another tracker."""
        jobs = sorted({e.job_id for e in job_ends})
        query = select(Event.detail).where(
            Event.job_id.in_(jobs), Event.kind.in_((DELIVERED, GIVEN_UP))
        )
        details = await self._database.read_in_thread(lambda s: list(s.scalars(query)))
        return frozenset(d["event_id"] for d in details if d) & {e.event_id for e in job_ends}

    async def _try_delivery(
        self, job_end: JobEnd, delivery: _Delivery, destination: _Destination
    ) -> None:
        assert job_end.webhook is not None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                status = await self._post_event(job_end.webhook, job_end)
            destination.failures, destination.has_answered, destination.unresponsive_until = (
                0,
                True,
                0.0,
            )
            problem = f"HTTP {status}"
            if 200 <= status < 300:
                delivery.end = DELIVERED, problem
                return
        except Forbidden as error:
            delivery.end = GIVEN_UP, str(error)
            return
        except (TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout):
            problem = f"no answer within {ANSWER_TIMEOUT:g} seconds"
            self._note_unresponsive(destination)
        except (OSError, httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            problem = _describe_error(error)
            self._note_unresponsive(destination)
            self._note_unreachable(destination, problem)
        except Exception as error:  # noqa: BLE001 - submitters choose the addresses, and one must not end the delivery to others
            problem = _describe_error(error)
        self._note_failure(delivery, problem)

    def _note_unresponsive(self, destination: _Destination) -> None:
        destination.has_answered, destination.unresponsive_until = (
            False,
            self._clock() + UNRESPONSIVE_SECONDS,
        )

    def _note_unreachable(self, destination: _Destination, problem: str) -> None:
        """The host is unreachable: count a failed attempt for all deliveries that wait for it."""
        if destination.next_at <= self._clock():  # else another delivery has just found this out
            destination.failures += 1
            destination.next_at = self._clock() + _pause(min(destination.failures, AWAY))
        for event_id in list(destination.queue):
            delivery = self._deliveries[event_id]
            if delivery.end is None:
                delivery.attempts += 1
                self._note_failure(delivery, problem)
            if delivery.end is None:
                del destination.queue[event_id]
                delivery.is_queued = False

    def _note_failure(self, delivery: _Delivery, problem: str) -> None:
        if delivery.attempts > len(PAUSES):
            delivery.end = GIVEN_UP, problem
        else:
            delivery.next_at = self._clock() + _pause(delivery.attempts)

    async def _post_event(self, url: str, job_end: JobEnd) -> int:
        host, port, scheme = _split_address(url)
        address = _allowed_address(await self._resolve(host, port), host, self._allow_private)
        parts = urlsplit(url)
        address_text = f"[{address}]" if ":" in address else address
        request = self._http.build_request(
            "POST",
            parts._replace(netloc=f"{address_text}:{port}", fragment="").geturl(),
            content=job_end.message(),
            headers={
                "Host": parts.netloc,
                "Content-Type": "application/json",
                "Groupwise-Event": str(job_end.event_id),
                "Idempotency-Key": f"groupwise-{job_end.event_id}",
            },
            extensions={"sni_hostname": host} if scheme == "https" else {},
        )
        response = await self._http.send(request, stream=True)
        await response.aclose()  # only the status matters; the body is not read
        return response.status_code

    async def _record_settled(
        self, job_end: JobEnd, delivery: _Delivery, kind: str, because: str
    ) -> None:
        if kind == GIVEN_UP:
            logger.warning(
                "the webhook of %s was not told: %s; given up after %d attempts",
                job_end.job_id,
                because,
                delivery.attempts,
            )
        detail = {
            "event_id": job_end.event_id,
            "attempts": delivery.attempts,
            "because": because[:300],
        }
        await self._database.in_thread(
            lambda s: events.append(s, actor=ACTOR, kind=kind, job_id=job_end.job_id, detail=detail)
        )
        self._settled_ids.add(job_end.event_id)


def _pause(number: int) -> float:
    """Seconds to wait after failed attempt `number`, counted from 1; shortened at random by up to half."""
    return PAUSES[number - 1] * random.uniform(0.5, 1.0)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _host_and_port(url: str) -> tuple[str, int] | None:
    """Host and port; None for an invalid address, which is given up at once."""
    try:
        host, port, _ = _split_address(url)
    except Forbidden:
        return None
    return host, port


def _split_address(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise Forbidden(f"no address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise Forbidden("only http:// and https:// addresses are allowed")
    if not is_host(host) or port == 0:
        raise Forbidden(f"{ascii(host)[:80]} port {port} is not a valid address")
    if parts.username is not None or parts.password is not None:
        raise Forbidden("an address without user and password is wanted")
    return host, port or (443 if parts.scheme == "https" else 80), parts.scheme


def _allowed_address(addresses: list[str], host: str, allow_private: bool) -> str:
    """The address to connect to. Raises Forbidden unless all are allowed: a name with public and private addresses is suspicious."""
    if not addresses:
        raise OSError(f"{host} has no address")
    if not allow_private and (inner := [a for a in addresses if not is_public(a)]):
        # Only logged, for operators: the submitter who chose the address would otherwise learn about the internal network.
        logger.info("no webhook is called at %s, which is %s", host, inner[0])
        raise Forbidden(
            f"{host} is not of the public internet; `webhooks_to_private` in the fleet's settings allows that"
        )
    return addresses[0]


_INNER = [
    ipaddress.ip_network(network)
    for network in ("2002::/16", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")
]
"""6to4 relays, which lead into any network that uses them; Azure's virtual address for its machines; addresses for documentation."""


def is_public(address: str) -> bool:
    """True if an address is on the public internet, also if it is IPv4 embedded in IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if any(ip in network for network in _INNER if network.version == ip.version):
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_site_local:
            return False
        if ip.teredo:
            return is_public(str(ip.teredo[1]))
    # Also reserved: addresses that map to others within one network, such as ::ffff:127.0.0.1, 64:ff9b::7f00:1.
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def addresses_of(host: str, port: int) -> list[str]:
    """Addresses from the system's resolver, in its order."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    results = await asyncio.get_running_loop().run_in_executor(_LOOK_UPS, look_up)
    return list(dict.fromkeys(str(address[0]) for *_, address in results))
