"""Webhooks: the address that a job names is told by HTTP POST that it has ended, with the JSON that NATS is told.

Whoever submits a job chooses the address, and it is our machine that goes there. So only http and https are spoken, redirects are not
followed, and the name is looked up once, here: unless every address behind it is one of the public internet nothing is sent, and what was
checked is what is connected to. `allow_private` opens that to the network of the fleet itself.

An answer of 2xx is the end of it. Everything else is tried again with growing pauses, a bounded number of times. Either end is an event of
the job, so that a tracker that is restarted does not begin anew with those that are done.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2
from sqlalchemy import select

from groupwise.fleet.queue.request import is_host
from groupwise.fleet.store import events
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import Event
from groupwise.fleet.tracker import Ended

PAUSES = (2.0, 10.0, 60.0, 300.0, 900.0, 1800.0)
"""Seconds before each further attempt; with the last one it is given up."""
ANSWERED = 10.0
"""Seconds for the name, the connection and the answer together."""
AT_ONCE = 16
DELIVERED, GIVEN_UP = "webhook.delivered", "webhook.given_up"
ACTOR = "tracker"

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port → addresses."""

logger = logging.getLogger(__name__)


class Forbidden(Exception):
    """The address is none that is spoken to."""


@dataclass(slots=True)
class _Trial:
    """What has been tried for one event."""

    attempts: int = 0
    next_at: float = 0.0


class WebhookOutlet:
    """Tells each job's own address; see `Outlet`."""

    name = "tracker.webhooks"
    tells_history = True

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
        self._trials: dict[int, _Trial] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._http = httpx2.AsyncClient(
            transport=transport,
            trust_env=False,  # a proxy of the environment would look names up anew
            follow_redirects=False,
            headers={"User-Agent": "groupwise-fleet"},
        )

    async def tell(self, ended: Sequence[Ended]) -> frozenset[int]:
        """See `Outlet`."""
        silent = {e.event_id for e in ended if e.webhook is None}
        wanted = [e for e in ended if e.webhook is not None]
        new = [e for e in wanted if e.event_id not in self._trials]
        known = await self._known(new) if new else frozenset[int]()
        due = [e for e in wanted if e.event_id not in known and self._is_due(e)]
        settled = await asyncio.gather(*(self._try(e) for e in due))
        done = silent | known | {e.event_id for e, over in zip(due, settled, strict=True) if over}
        for event_id in done:
            self._trials.pop(event_id, None)
        return frozenset(done)

    async def close(self) -> None:
        """End the connections."""
        await self._http.aclose()

    def _is_due(self, ended: Ended) -> bool:
        return self._trials.setdefault(ended.event_id, _Trial()).next_at <= self._clock()

    async def _known(self, ended: Sequence[Ended]) -> frozenset[int]:
        """Those that were settled before this process began, or by another tracker."""
        jobs = sorted({e.job_id for e in ended})
        query = select(Event.detail).where(
            Event.job_id.in_(jobs), Event.kind.in_((DELIVERED, GIVEN_UP))
        )
        details = await self._database.read_in_thread(lambda s: list(s.scalars(query)))
        return frozenset(d["event_id"] for d in details if d) & {e.event_id for e in ended}

    async def _try(self, ended: Ended) -> bool:
        """Whether nothing more is to be done."""
        assert ended.webhook is not None
        trial = self._trials[ended.event_id]
        trial.attempts += 1
        final = False
        try:
            async with self._places, asyncio.timeout(ANSWERED):
                status = await self._post(ended.webhook, ended)
            if 200 <= status < 300:
                await self._settle(ended, DELIVERED, trial, f"HTTP {status}")
                return True
            problem = f"HTTP {status}"
        except Forbidden as error:
            problem, final = str(error), True
        except TimeoutError:
            problem = f"no answer within {ANSWERED:g} seconds"
        except Exception as error:  # noqa: BLE001 - whoever submits a job chooses the address, and it must not be the end of the others'
            problem = f"{type(error).__name__}: {error}"
        if final or trial.attempts > len(PAUSES):
            await self._settle(ended, GIVEN_UP, trial, problem)
            return True
        pause = PAUSES[trial.attempts - 1] * random.uniform(0.5, 1.0)
        trial.next_at = self._clock() + pause
        return False

    async def _post(self, url: str, ended: Ended) -> int:
        host, port, scheme = _parts(url)
        address = _checked(await self._resolve(host, port), host, self._allow_private)
        parts = urlsplit(url)
        shown = f"[{address}]" if ":" in address else address
        request = self._http.build_request(
            "POST",
            parts._replace(netloc=f"{shown}:{port}", fragment="").geturl(),
            content=ended.message(),
            headers={
                "Host": parts.netloc,
                "Content-Type": "application/json",
                "Groupwise-Event": str(ended.event_id),
                "Idempotency-Key": f"groupwise-{ended.event_id}",
            },
            extensions={"sni_hostname": host} if scheme == "https" else {},
        )
        answer = await self._http.send(request, stream=True)
        await answer.aclose()  # what it says beyond its status is not read
        return answer.status_code

    async def _settle(self, ended: Ended, kind: str, trial: _Trial, because: str) -> None:
        if kind == GIVEN_UP:
            logger.warning(
                "the webhook of %s was not told: %s; given up after %d attempts",
                ended.job_id,
                because,
                trial.attempts,
            )
        detail = {"event_id": ended.event_id, "attempts": trial.attempts, "because": because[:300]}
        await self._database.in_thread(
            lambda s: events.append(s, actor=ACTOR, kind=kind, job_id=ended.job_id, detail=detail)
        )


def _parts(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise Forbidden(f"no address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise Forbidden("only http:// and https:// addresses are told")
    if not is_host(host) or port == 0:
        raise Forbidden(f"{ascii(host)[:80]} port {port} is no place on any network")
    if parts.username is not None or parts.password is not None:
        raise Forbidden("an address without user and password is wanted")
    return host, port or (443 if parts.scheme == "https" else 80), parts.scheme


def _checked(addresses: list[str], host: str, allow_private: bool) -> str:
    """The address to connect to; Forbidden unless all are allowed, for a name with a public and a private one is no accident."""
    if not addresses:
        raise OSError(f"{host} has no address")
    if not allow_private and (inner := [a for a in addresses if not is_public(a)]):
        raise Forbidden(
            f"{host} is {inner[0]}, which is not of the public internet; `webhooks_to_private` in the fleet's settings allows that"
        )
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, also where one of IPv4 stands within it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.sixtofour or (ip.teredo and ip.teredo[1])
        if inner:
            return is_public(str(inner))
    # Reserved are also the addresses that stand for others in one network alone: ::ffff:127.0.0.1, 64:ff9b::7f00:1.
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def addresses_of(host: str, port: int) -> list[str]:
    """What the system's resolver says, in its order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
