"""`groupwise serve`: one process that listens, keeps the ledger, and drives the engine.

It locks the folder against a second server; binds the address, so that a port in use is reported before anything is loaded; opens the run
and sessions that the last server left; then answers requests. Two background tasks run at the same time: one writes the run's events to the
log, the other starts the run of `--start-with`.

The first SIGTERM or Ctrl-C ends it cleanly: it is no longer ready, refuses new work, and ends streams; the service answers waiting
requests, saves, and ends the engine; finally the connections are closed. All of that may take `shutdown_seconds`. The second signal ends
the process at once, which loses work but leaves the ledger correct.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.types import ASGIApp

from groupwise.api.http.app import ApiInfo, assemble
from groupwise.api.http.bodies import short_thread_switches
from groupwise.api.http.listening import Uvicorn, bind, check_tls, url_at, uvicorn_config
from groupwise.api.http.logs import configure
from groupwise.api.http.route import Route
from groupwise.api.schemas.keys import LOCAL, Caller, Keyring, caller_of
from groupwise.api.schemas.training import EventKind, StartRequest
from groupwise.core.errors import ConfigError, GroupwiseError, RunInUseError, UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.core.settings.tree import read_yaml
from groupwise.core.terminal.quantities import counted
from groupwise.runs.lock import RunLock, holder
from groupwise.server.engine.engine_process import EngineProcess, log_here
from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.ledger.writer import Ledger
from groupwise.server.openai.service import OpenAIService
from groupwise.server.parts.service import NAME as PARTS
from groupwise.server.parts.service import PartsService
from groupwise.server.routes import events, health, models, training
from groupwise.server.routes.context import Serving
from groupwise.server.routes.openai import attach_openai_errors, openai_routes
from groupwise.server.routes.parts import parts_routes
from groupwise.server.routes.responses import response_routes
from groupwise.server.run.run_config import AllowedModels
from groupwise.server.run.service import Service
from groupwise.server.settings import ServerConfig
from groupwise.server.tinker.document import document
from groupwise.server.tinker.mount import TinkerApi, TinkerMiddleware

logger = logging.getLogger(__name__)

ENGINE = "groupwise.server.engine.core:EngineCore"
LEDGER = "server.db"
"""File name of the ledger in the output folder."""
MIN_FOR_CONNECTIONS = 1.0
"""Minimum number of seconds for closing connections, regardless of how long the service has taken."""
EVENTS_AT_ONCE = 100
LONGEST_WAIT = 60.0
WARNINGS = frozenset(
    {
        EventKind.ENGINE_LOST,
        EventKind.RECOVERED_INEXACT,
        EventKind.QUARANTINED,
        EventKind.FAILED,
        EventKind.WARNING,
    }
)
ROUTES: tuple[Route, ...] = (*training.ROUTES, *models.ROUTES, *events.ROUTES, *health.ROUTES)
"""Routes of the ask/post protocol."""

DESCRIPTION = (
    "The server owns the model; the client owns the loop, the data and the rewards: it asks for completions of its prompts, scores them, "
    "and posts a number for each. Every refusal is a problem (RFC 9457) with a `code` that never changes its meaning."
)


@dataclass(frozen=True, slots=True)
class Services:
    """The services that answer requests: ask/post, and the further protocols."""

    service: Service
    openai: OpenAIService | None = None
    tinker: TinkerApi | None = None
    parts: PartsService | None = None

    async def begin(self) -> None:
        """Open the runs and sessions that the last server left."""
        await self.service.begin()
        if self.tinker is not None:
            await self.tinker.begin()
        if self.parts is not None:
            await self.parts.begin()

    async def shut_down(self, seconds: float) -> None:
        """End the parts, the Tinker API and the run. The run is saved within `seconds`."""
        if self.parts is not None:
            await self.parts.shut_down()
        if self.tinker is not None:
            await self.tinker.shut_down()
        await self.service.shut_down(seconds)

    def application(self, config: ServerConfig, keys: Keyring | None) -> tuple[Serving, ASGIApp]:
        """The application with all routes, and its shared state."""
        of_openai: tuple[Route, ...] = ()
        if self.openai is not None:
            of_openai = (*openai_routes(self.openai), *response_routes(self.openai))
        of_parts = parts_routes(self.parts) if self.parts is not None else ()
        of_tinker = document() if self.tinker is not None else None
        app = make_app(self.service, config, keys, (*of_openai, *of_parts), of_tinker)
        if of_openai:
            attach_openai_errors(app)
        serving: Serving = app.state.shared
        if self.tinker is None:
            return serving, app
        return serving, TinkerMiddleware(app, self.tinker.service, serving, keys)


Build = Callable[[ServerConfig], Awaitable[Services]]
InFrontOf = Callable[[ASGIApp, Serving], ASGIApp]
"""Wraps all routes in another application that handles its own requests and passes on the others."""


async def build_service(config: ServerConfig, factory: str = ENGINE) -> Services:
    """Create the services for the folder of these settings, without starting them. Engines are separate processes, created by `factory`."""

    def log_warnings(record: logging.LogRecord) -> None:
        """Log only warnings of the engine: the rest is in the run's own log, and the conductor logs the steps."""
        if record.levelno >= logging.WARNING:
            log_here(record)

    async def make_engine() -> Engine:
        engine = EngineProcess(
            factory,
            log=log_warnings,
            silence_limit=config.engine_silence_limit,
            limits={
                "open": config.start_time_limit,
                "step": config.step_time_limit,
                "sample": config.sampling_time_limit,
                "models.open": config.start_time_limit,
                "models.sample": config.sampling_time_limit,
                "parts.open": config.start_time_limit,
                "parts.generate": config.sampling_time_limit,
            },
        )
        return await engine.start()

    ledger = Ledger.open(config.folder / LEDGER)
    service = Service(config, ledger, make_engine)
    return Services(
        service,
        OpenAIService(service, ledger, config),
        TinkerApi(config, ledger, service, make_engine),
        _parts_service(config, service, make_engine),
    )


def _parts_service(
    config: ServerConfig, service: Service, make_engine: Callable[[], Awaitable[Engine]]
) -> PartsService:
    parts = PartsService(
        runs=service,
        make_engine=make_engine,
        allowed=AllowedModels(Path(config.model_dir).expanduser(), tuple(config.allowed_models)),
        folder=config.folder / PARTS,
        silence=config.parts_silence,
        longest_wait=config.step_time_limit,
        most_bytes=config.max_body_bytes,
    )
    service.machine_users[PARTS] = parts
    service.loop_elsewhere = parts.in_use
    return parts


def serve(
    config: ServerConfig,
    keys: Keyring | None,
    start_with: StartRequest | None = None,
    build: Build = build_service,
    in_front: InFrontOf | None = None,
) -> int:
    """Serve until a signal arrives; returns the exit code. Raises UsageError if it cannot start, or `start_with` is refused."""
    check_tls(config.tls_certificate, config.tls_key)
    lock = _lock_folder(config.folder)
    handler = configure(config.log_format)
    try:
        with bind(config.host, config.port) as listening:
            return asyncio.run(_Server(config, keys, start_with, build, listening, in_front).run())
    finally:
        logging.getLogger().removeHandler(handler)
        lock.release()


def read_start(path: Path) -> StartRequest:
    """Read the run of `--start-with`. Raises ConfigError with every problem and its line."""
    tree = read_yaml(path)
    problems = list(tree.problems)
    try:
        request = StartRequest.model_validate_json(json.dumps(tree.values))
    except ValidationError as error:
        problems += [
            f"{tree.origin(tuple(field_error.field.split('.')))}: {field_error}"
            for field_error in field_errors(error, StartRequest)
        ]
        raise ConfigError("\n".join(problems)) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return request


def _lock_folder(folder: Path) -> RunLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir {folder} cannot be made: {error.strerror}.") from None
    try:
        return RunLock.acquire(folder)
    except RunInUseError:
        raise RunInUseError(
            f"{folder} is served already by {holder(folder) or 'another process'}. Stop that one, or give another --output-dir."
        ) from None


class _Server:
    """A running server, from start to shutdown."""

    def __init__(
        self,
        config: ServerConfig,
        keys: Keyring | None,
        start_with: StartRequest | None,
        build: Build,
        listening: socket.socket,
        in_front: InFrontOf | None,
    ) -> None:
        self._config = config
        self._keys = keys
        self._start_with = start_with
        self._build = build
        self._listening = listening
        self._in_front = in_front
        self._refused: UsageError | None = None
        """Why `start_with` was refused."""

    async def run(self) -> int:
        """Serve until the server ends; returns the exit code."""
        built = await self._build(self._config)
        await built.begin()
        serving, answers = built.application(self._config, self._keys)
        if self._in_front is not None:
            answers = self._in_front(answers, serving)
        self._listen_for_signals(serving.ending)
        http = Uvicorn(
            uvicorn_config(
                answers,
                certificate=self._config.tls_certificate,
                key=self._config.tls_key,
                proxy=self._config.proxy_headers,
            )
        )
        with short_thread_switches():
            await self._answer(built, serving, http)
        if self._refused is not None:
            raise self._refused
        return 0

    async def _answer(self, built: Services, serving: Serving, http: Uvicorn) -> None:
        """Answer requests until the server is to end, or cannot listen; then shut down."""
        answering = asyncio.create_task(http.serve(sockets=[self._listening]))
        try:
            listening = asyncio.create_task(http.listening.wait())
            await asyncio.wait((listening, answering), return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            if not answering.done():
                self._print_address(serving.service.active_conductor() is not None)
                await self._until_ending(serving, answering)
            await self._shut_down(built, serving, http)
            await answering
        finally:
            await _cancel_tasks(answering)

    async def _until_ending(self, serving: Serving, answering: asyncio.Task[None]) -> None:
        background_tasks = [asyncio.create_task(_log_events(serving.service))]
        if self._start_with is not None:
            background_tasks.append(asyncio.create_task(self._start_run(serving, self._start_with)))

        def log_failure(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a background task failed", exc_info=error)

        for task in background_tasks:
            task.add_done_callback(log_failure)
        ending = asyncio.create_task(serving.ending.wait())
        try:
            await asyncio.wait((ending, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel_tasks(ending, *background_tasks)

    async def _shut_down(self, built: Services, serving: Serving, http: Uvicorn) -> None:
        began = time.monotonic()
        seconds = self._config.shutdown_seconds
        logger.info("shutting down; a second signal ends the process at once")
        serving.end()
        try:
            async with asyncio.timeout(seconds):
                await built.shut_down(seconds)
        except TimeoutError:
            logger.warning(
                "the service did not shut down within shutdown_seconds, which is %g", seconds
            )
        seconds_left = max(seconds - (time.monotonic() - began), MIN_FOR_CONNECTIONS)
        http.config.timeout_graceful_shutdown = max(round(seconds_left), 1)
        http.should_exit = True

    def _listen_for_signals(self, ending: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            if ending.is_set():
                # The second signal ends the process by the default action.
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            ending.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)

    async def _start_run(self, serving: Serving, request: StartRequest) -> None:
        """Start the run as if an admin had posted the request, unless a server with this folder has done so and the run has finished."""
        finished = await serving.service.finished_run(request)
        if finished is not None:
            logger.info(
                "--start-with has nothing to do: %s has finished with these settings; another run_name starts another run",
                finished,
            )
            return
        try:
            answer = await serving.service.start(request, LOCAL)
        except GroupwiseError as error:
            if error.code == "run_active":
                logger.info("--start-with has nothing to do: a run is active already")
                return
            self._refused = UsageError(f"--start-with was refused: {error}")
            serving.ending.set()
            return
        logger.info("run %s is ready, started by --start-with", answer.run_id)

    def _print_address(self, continues: bool) -> None:
        config = self._config
        host, port = self._listening.getsockname()[:2]
        visible_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        address = url_at(config.scheme, visible_host, port)
        need = (
            "no key is needed, and only this machine can ask"
            if self._keys is None
            else f"every request needs a key of the server, which has {len(self._keys)}"
        )
        header = "" if self._keys is None else ' -H "Authorization: Bearer $GROUPWISE_API_KEY"'
        if continues:  # another start would be refused
            request = f"{address}/status{header}"
        else:
            route, body = (
                ("start", '{"model_id": "tiny"}')
                if self._start_with is None
                else ("completions", '{"prompt": "Hello"}')
            )
            request = (
                f"-X POST {address}/{route}{header} -H 'Content-Type: application/json' -d '{body}'"
            )
        lines = (
            f"Groupwise serves at {address}; {need}.",
            f"  all files are kept in {config.folder}; the routes are listed at {address}/openapi.json",
            f"  next: curl {request}",
        )
        if self._in_front is not None:
            lines += (f"  watch: {address}/dashboard in a browser",)
        if not (config.is_local or config.tls_certificate or config.proxy_headers):
            lines += (
                "  keys and prompts can be read in transit: give tls_certificate and tls_key, or put a proxy in front",
            )
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


async def _cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks that are no longer needed, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _log_events(service: Service) -> None:
    """Log one line for each event except steps, which the conductor logs."""
    last_id = await service.last_event()
    while True:
        for event in await service.events(last_id, EVENTS_AT_ONCE):
            last_id = event.id
            if event.kind != EventKind.STEP:
                level = logging.WARNING if event.kind in WARNINGS else logging.INFO
                steps = "" if event.step is None else f" after {counted(event.step, 'step')}"
                message = f": {event.message}" if event.message else ""
                line = f"{event.run_id or 'server'}: {event.kind}{steps}{message}"
                logger.log(level, "%s", line, extra={"facts": {"event": event.kind}})
        await service.next_event(last_id, LONGEST_WAIT)


def make_app(
    service: Service,
    config: ServerConfig,
    keys: Keyring | None,
    also: Sequence[Route] = (),
    before: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Create the application. `also`: routes of further protocols; `before`: additions to the OpenAPI document for routes that are handled
    in front of this application (`tags`, `paths`, `components`). Its `state.shared` is a `Serving`.
    """

    async def who(headers: Mapping[str, str]) -> Caller:
        return caller_of(keys, headers)

    return assemble(
        ApiInfo("Groupwise training server", DESCRIPTION),
        (*ROUTES, *also),
        Serving(service, config),
        who,
        local_only=keys is None,
        outer_document=before,
    )
