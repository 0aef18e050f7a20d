"""The connection to a Tinker service: its address and key, what it offers, and its errors as ours.

Requests are repeated by the tinker package itself, which keeps their order and their numbers. Here nothing is tried a second time.

The package speaks with services of about its own age: 0.25 and later send and read protobuf, and services from before that take the JSON of
releases up to 0.24. Those releases return clients where later ones return futures of them, and lack some calls; both are used here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import httpx2

from groupwise.core.errors import EndpointError, ModelError, UsageError
from groupwise.core.extras import not_installed
from groupwise.core.loopback import direct_transport, no_proxy_variables
from groupwise.engine.backends.tinker.capabilities import capabilities_of
from groupwise.engine.models.config import ModelConfig

if TYPE_CHECKING:
    import tinker

BASE_URL = "TINKER_BASE_URL"
"""The environment variable from which the tinker package reads the address if it is given none."""
FIRST_TIMEOUT = 60.0
"""Seconds in which a service must answer the first question. Later requests wait as long as the tinker package does, for minutes."""
OURS, THEIRS = "gw-", "tml-"
"""Beginnings of a key of `groupwise serve`, and of those that the tinker package takes; the server takes either."""
MODELS_SHOWN = 30
LAST_WITH_JSON = "0.24.1"
"""The last release of the tinker package that speaks with services from before protobuf."""
PREDATES = "only supports as proto"
"""Part of the error that later releases raise when they meet such a service."""


class Service:
    """A session with the service; `close` ends it. The session begins with the first request that needs one."""

    def __init__(self, model: ModelConfig, run: str) -> None:
        """`run` is sent to the service as metadata, for its lists. Raises UsageError without the package or a key."""
        package = import_package()
        self.model = model
        self.package = package
        os.environ.update(no_proxy_variables(address(model) or ""))
        self.client: tinker.ServiceClient = package.ServiceClient(
            base_url=address(model), api_key=key(model), user_metadata={"groupwise_run": run}
        )
        self.capabilities = capabilities_of(model, address(model))

    def close(self) -> None:
        """End the session: the service then frees its models and samplers. Saved weights stay. Releases of the package up to 0.24 cannot;
        their sessions end when they have been silent for a while."""
        end: Callable[[str], Any] | None = getattr(self.client, "close", None)
        if end is None:
            return
        try:
            end("success").result(timeout=FIRST_TIMEOUT)
        except Exception:  # noqa: BLE001 - whatever keeps it from answering: it ends a silent session by itself
            return

    async def wait(self, future: Any) -> Any:
        """Await a future of the package. Raises our errors.

        Cancelling the wait leaves the request to the service: it counts a model's requests, and later ones would wait for a missing one.
        """
        pending = cast("Future[Any]", future.future() if hasattr(future, "future") else future)
        return await self._wait(asyncio.wrap_future(pending))

    async def make(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The client that a call of the package makes, whether it returns it or a future. Raises our errors."""
        return await self._wait(
            asyncio.ensure_future(asyncio.to_thread(_client_of, call, *args, **kwargs))
        )

    async def _wait(self, waiting: asyncio.Future[Any]) -> Any:
        waiting.add_done_callback(_take_exception)
        with explaining_errors(self.model):
            return await asyncio.shield(waiting)

    def make_now(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `make`, for callers that are not async; also for calls whose future is all that is wanted."""
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(_client_of(call, *args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                result.set_exception(error)

        # In a thread, because the package warns of blocking calls where an event loop runs.
        threading.Thread(target=work, name="tinker", daemon=True).start()
        with explaining_errors(self.model):
            return result.result()

    async def prompt_logprobs(self, client: Any, tokens: Sequence[int], last: int) -> list[Any]:
        """Log-probabilities of the last tokens of a prompt, by a sampling client; None for those that it did not compute."""
        prompt, compute = self.package.ModelInput.from_ints([*tokens]), client.compute_logprobs
        limited = "prompt_logprobs_last_n" in signature(compute).parameters
        limit = {"prompt_logprobs_last_n": last} if limited else {}
        return [*await self.wait(compute(prompt, **limit))][-last:]


def sampler_handle(client: Any) -> str:
    """The service's name of a sampling client, which no other one has."""
    handle: Callable[[], str] | None = getattr(client, "get_sampler_handle", None)
    return str(client._sampling_session_id) if handle is None else handle()


def _client_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    return result.result() if hasattr(result, "result") else result


def _take_exception(waiting: asyncio.Future[Any]) -> None:
    """Mark the exception of a request as seen: asyncio would report it if nobody waits any more."""
    if not waiting.cancelled():
        waiting.exception()


def import_package() -> Any:
    """The tinker package; importing it takes seconds. Raises UsageError if it is not installed."""
    try:
        import tinker
    except ImportError as error:
        raise UsageError(
            not_installed("model.backend: tinker", "train,tinker", error.name or "tinker")
        ) from error
    return tinker


def address(model: ModelConfig) -> str | None:
    """The service's URL; None: the tinker package's own."""
    return model.base_url or os.environ.get(BASE_URL) or None


def key(model: ModelConfig) -> str:
    """The service's key, as the tinker package takes it. Raises UsageError if its variable is not set."""
    value = os.environ.get(model.api_key_env, "").strip()
    if not value:
        raise UsageError(
            f"model.backend is tinker, but the environment variable {model.api_key_env} is empty, which holds the service's key "
            f"(model.api_key_env). Set it. A server of groupwise serve without keys takes any, such as {THEIRS}none."
        )
    return THEIRS + value.removeprefix(OURS) if value.startswith(OURS) else value


def longest_context(model: ModelConfig) -> int | None:
    """Most tokens of prompt and completion together, as the service says; None if it does not. Raises UsageError if it cannot be reached,
    or does not have the model."""
    offered = _offered_models(address(model), key(model), model)
    if model.name not in offered:
        names = sorted(offered)
        more = (
            f" and {len(names) - MODELS_SHOWN} more, such as {names[-1]}"
            if len(names) > MODELS_SHOWN
            else ""
        )
        raise ModelError(
            f"model.name is {model.name!r}, which the Tinker service at {_place(model)} does not have. It has: "
            f"{', '.join(names[:MODELS_SHOWN]) or 'none'}{more}."
        )
    return offered[model.name]


def _offered_models(url: str | None, api_key: str, model: ModelConfig) -> dict[str, int | None]:
    _check_reachable(url)
    return _capabilities(url, api_key, model.api_key_env)


def _check_reachable(url: str | None) -> None:
    """Raise UsageError if nothing listens there; the tinker package would try for minutes."""
    if url is None:
        return
    os.environ.update(no_proxy_variables(url))
    try:
        with httpx2.Client(transport=direct_transport(url), timeout=FIRST_TIMEOUT) as http:
            http.get(f"{url.rstrip('/')}/api/v1/healthz")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UsageError(
            f"model.base_url: no Tinker service answers at {url}: {error}. Is it running, and is the address right?"
        ) from None


@cache
def _capabilities(url: str | None, api_key: str, api_key_env: str) -> dict[str, int | None]:
    """Longest context in tokens of each model that the service offers, by name; asked once in a process."""
    package = import_package()
    model = ModelConfig(name="any", backend="tinker", base_url=url, api_key_env=api_key_env)
    with explaining_errors(model):
        kind = getattr(package, "RestClient", None) or package.ServiceClient
        answer = kind(base_url=url, api_key=api_key).get_server_capabilities()
        if hasattr(answer, "result"):
            answer = answer.result(timeout=FIRST_TIMEOUT)
    return {
        offered.model_name: getattr(offered, "max_context_length", None)
        for offered in answer.supported_models
        if offered.model_name is not None
    }


@contextmanager
def explaining_errors(model: ModelConfig) -> Generator[None]:
    """Turn errors of the tinker package into ours: UsageError for a key that is refused, EndpointError for all others."""
    package = import_package()
    try:
        yield
    except (package.AuthenticationError, package.PermissionDeniedError) as error:
        raise UsageError(
            f"The Tinker service at {_place(model)} refuses the key in {model.api_key_env}: {error}. Set it to one that may train."
        ) from None
    except package.APIStatusError as error:
        raise EndpointError(
            f"The Tinker service at {_place(model)} refused a request ({error.status_code}): {error}",
            error.status_code,
        ) from error
    except ValueError as error:
        if PREDATES not in str(error):
            raise
        raise UsageError(
            f"The Tinker service at {_place(model)} answers in JSON, which the tinker package {package.__version__} does not read. Install "
            f"one that does, in place of it: pip install 'tinker=={LAST_WITH_JSON}'."
        ) from None
    except (package.TinkerError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise EndpointError(
            f"The Tinker service at {_place(model)} did not do what was asked: {reason}. If it is back, --resume goes on from the last "
            "checkpoint."
        ) from error


def describe(model: ModelConfig) -> str:
    """The service in words, for the record of a run."""
    return f"the Tinker service at {_place(model)}"


def _place(model: ModelConfig) -> str:
    return address(model) or "its usual address"
