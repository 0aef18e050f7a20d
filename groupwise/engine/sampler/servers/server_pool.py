"""Several equivalent servers: selects the one for a request, pauses failing ones, and decides when to give up.

A request goes to the server with the fewest completions in progress. A server that does not answer is paused, longer each time, and then
tried again, so it returns to use without intervention. A failed request goes to another server; if there is none, it waits. After
`server_timeout` seconds without any answer the run ends, with the last error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import httpx2

from groupwise.api.openai_client.client import Client, Endpoint
from groupwise.api.openai_client.response_parsing import read_json
from groupwise.api.openai_client.waiting import backoff
from groupwise.core.errors import EndpointError
from groupwise.core.loopback import direct_transport
from groupwise.core.retry import Backoff, Timing
from groupwise.core.types import Policy, SamplingParams
from groupwise.engine.sampler.servers.completions import refuse_what_differs
from groupwise.engine.sampler.servers.probe import LocalPolicy

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0
"""Timeout in seconds for telling a server that its adapter is no longer needed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """The weights that all servers must serve now."""

    name: str
    """Name of the model in each request."""
    version: int
    fingerprint: str
    folder: str | None = None
    """Folder of the published files, as a path on the servers; None: the base as it is."""
    policy: Policy | None = None


@dataclass(slots=True, eq=False)
class Server:
    """One address, and the state of the server of vLLM at it; `sglang.py` has one of SGLang."""

    adapters_remedy: ClassVar[str] = (
        "Start vLLM with --enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
    )
    """What to do about a server without the routes that load and unload adapters."""
    weights_remedy: ClassVar[str] = (
        "Weights from files need vLLM 0.27 or newer, started with the environment variable VLLM_SERVER_DEV_MODE=1"
    )
    """What to do about a server that cannot read all weights from files."""
    renames_base: ClassVar[bool] = False
    """True if the server calls the base by the folder of the weights that it has read."""

    endpoint: Endpoint
    concurrency: int
    timing: Timing
    in_progress: int = 0
    """Completions that are running or queued."""
    pauses: Backoff | None = None
    """Length of the next pause, which grows with each failure; None: the server answers."""
    paused_until: float = -math.inf
    """Time on `timing.clock` before which no request goes there."""
    ready: Served | None = None
    """The weights that have been checked on it; None: not yet, or not since its last failure."""
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    """Folders of the adapters that this run has loaded into it, by name; older releases of SGLang list none."""
    _clients: dict[asyncio.AbstractEventLoop, tuple[Client, asyncio.Lock]] = field(
        default_factory=dict[asyncio.AbstractEventLoop, tuple[Client, asyncio.Lock]]
    )

    @property
    def url(self) -> str:
        return self.endpoint.base_url

    @property
    def client(self) -> Client:
        """Client for the running event loop. Connections are closed after each request, so there is none to close."""
        return self._client_of_loop()[0]

    @property
    def preparing(self) -> asyncio.Lock:
        """Lock that is held while the server is prepared."""
        return self._client_of_loop()[1]

    def _client_of_loop(self) -> tuple[Client, asyncio.Lock]:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = Client(
                self.endpoint,
                concurrency=self.concurrency,
                timing=self.timing,
                keep_connections=False,
            )
            self._clients = {loop: (client, asyncio.Lock())}
        return self._clients[loop]

    @property
    def root_url(self) -> str:
        """Address of the server's own routes."""
        return self.url.removesuffix("/v1")

    @property
    def adapters_url(self) -> str:
        """Address above the routes that load and unload adapters."""
        return self.url

    def refuse(self, params: SamplingParams, end_id: int | None) -> None:
        """Raise for parameters that the engine interprets differently; `end_id`: the tokenizer's end-of-text token."""
        refuse_what_differs(params, end_id)

    async def complete(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """`read` of the answer to a body of `completions.request_body` or `completions.prompt_body`. Raises EndpointError."""
        return await self.client.ask("POST", "/completions", body, read, 0)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """POST to a route of the server's own, which is beside those of OpenAI's API. Raises EndpointError."""
        await self.client.ask("POST", self.root_url + path, body, len, 0)

    async def get(self, path: str) -> Mapping[str, Any]:
        """GET a JSON object from a route of the server's own. Raises EndpointError."""
        return await self.client.ask("GET", self.root_url + path, None, read_json, 0)

    async def pause(self) -> None:
        """Let the server finish what it computes, and begin nothing more, so that it can take weights. Raises EndpointError."""
        await self.post("/pause?mode=wait")

    async def resume(self) -> None:
        """Let a paused server go on."""
        await self.post("/resume")

    async def read_weights(self, folder: str, version: str | None) -> None:
        """Have a paused server read all weights from files. `version`: what `weight_version` then returns; None: it is not asked."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.post("/collective_rpc", reload)
        if version is not None:
            await self.post("/update_weight_version", {"new_version": version})

    async def map_weights(self, local_policy: LocalPolicy, version: str) -> None:
        """Have a paused server on the learner's GPU copy all weights from the learner's memory (CUDA IPC)."""
        await self.post("/init_weight_transfer_engine", {"init_info": {"packed": False}})
        await self.post("/start_weight_update")
        update = await asyncio.to_thread(local_policy.ipc_handles)
        await self.post("/update_weights", {"update_info": update})
        await self.post("/finish_weight_update", {"weight_version": version})

    async def weight_version(self) -> str | None:
        """The version that came with the weights that the server has now; another text, or None, if it has only those of its start."""
        return (await self.get("/weight_info")).get("weight_version")

    async def world_size(self) -> int:
        """Number of workers that take weights. Raises EndpointError."""
        answer = await self.get("/get_world_size")
        if type(size := answer.get("world_size")) is not int:
            raise EndpointError(f"answered no number of workers, but {answer}")
        return size

    def note_answer(self) -> None:
        """Record that the server answers."""
        if self.pauses is not None:
            logger.info("%s answers again", self.url)
        self.pauses, self.paused_until = None, -math.inf

    def note_failure(self, error: EndpointError) -> None:
        """Pause the server, and mark it as not prepared: another process may have been started at its address."""
        self.ready = None
        if self.timing.clock() < self.paused_until:
            return  # another request in progress has counted this failure already
        self.pauses = self.pauses or backoff(self.timing)
        wait = self.pauses.next()
        self.paused_until = self.timing.clock() + wait
        logger.warning("%s; no request goes there for %.1f s", error, wait)

    def notify(self, url: str, body: dict[str, str]) -> None:
        """POST from code that is not async, without waiting for success: failures are ignored."""
        key = self.endpoint.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            suppress(httpx2.HTTPError),
            httpx2.Client(transport=direct_transport(self.url), timeout=CLOSE_TIMEOUT) as http,
        ):
            http.post(url, json=body, headers=headers)


class Servers:
    """Several equivalent servers; see the module's docstring."""

    def __init__(
        self,
        servers: Sequence[Server],
        server_timeout: float,
        timing: Timing,
        remedy: Callable[[], str] = lambda: "Start one there (sampler.url)",
        server_timeout_key: str = "sampler.server_timeout",
    ) -> None:
        """`server_timeout`: seconds without an answer from any server after which a request is given up, and its key in the config.
        `remedy`: advice for that error."""
        self.all = tuple(servers)
        self._server_timeout = server_timeout
        self._timing = timing
        self._remedy = remedy
        self._server_timeout_key = server_timeout_key

    async def ask(self, work: Callable[[Server], Awaitable[T]], completions: int = 1) -> T:
        """Result of `work` on one of the servers; it is retried while it raises an EndpointError that may be temporary. `completions`:
        how many it asks for."""
        deadline, last_error = math.inf, None
        while True:
            server = await self._least_loaded(deadline, last_error)
            server.in_progress += completions
            try:
                result = await work(server)
            except EndpointError as error:
                if not error.is_retryable:
                    raise
                server.note_failure(error)
                last_error = error
                deadline = min(deadline, self._timing.clock() + self._server_timeout)
                if self._timing.clock() >= deadline:
                    raise self._no_server_error(last_error) from None
            else:
                server.note_answer()
                return result
            finally:
                server.in_progress -= completions

    async def _least_loaded(self, deadline: float, last_error: EndpointError | None) -> Server:
        """The server with the fewest completions in progress; if all are paused, wait for the first one, at most until `deadline`."""
        deadline = min(deadline, self._timing.clock() + self._server_timeout)
        while True:
            now = self._timing.clock()
            ready = [server for server in self.all if server.paused_until <= now]
            if ready:
                return min(ready, key=lambda server: server.in_progress)
            if now >= deadline:
                raise self._no_server_error(last_error)
            next_attempt = min(server.paused_until for server in self.all)
            await self._timing.sleep(min(next_attempt, deadline) - now)

    def _no_server_error(self, last_error: EndpointError | None) -> EndpointError:
        urls = ", ".join(server.url for server in self.all)
        last_failure = "" if last_error is None else f" The last error: {last_error}"
        return EndpointError(
            f"None of the servers ({urls}) has answered for {self._server_timeout:g} s ({self._server_timeout_key}). {self._remedy()}, "
            f"then go on with --resume.{last_failure}",
            None if last_error is None else last_error.status,
        )
