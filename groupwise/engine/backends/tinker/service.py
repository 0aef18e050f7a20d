"""The connection to a Tinker service: its address and key, what it offers, and its errors as ours.

Requests are repeated by the tinker package itself, which keeps their order and their numbers. Here nothing is tried a second time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import httpx2

from groupwise.core.errors import EndpointError, ModelError, UsageError
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

T = TypeVar("T")


class Service:
    """A session with the service; `close` ends it. The session begins with the first request that needs one."""

    def __init__(self, model: ModelConfig, run: str) -> None:
        """`run` is told to the service as metadata, for its lists. Raises UsageError without the package or a key."""
        package = import_package()
        self.model = model
        self.package = package
        self.client: tinker.ServiceClient = package.ServiceClient(
            base_url=address(model), api_key=key(model), user_metadata={"groupwise_run": run}
        )

    def close(self) -> None:
        """End the session: the service then frees its models and samplers. Saved weights stay."""
        try:
            self.client.close("success").result(timeout=FIRST_TIMEOUT)
        except Exception:  # noqa: BLE001 - whatever keeps it from answering: it ends a silent session by itself
            return

    async def wait(self, future: Any) -> Any:
        """Await a future of the package. Raises our errors.

        Cancelling the wait leaves the request to the service: it counts a model's requests, and later ones would wait for a missing one.
        """
        pending = cast("Future[Any]", future.future())
        waiting = asyncio.wrap_future(pending)
        waiting.add_done_callback(_take_exception)
        with explaining_errors(self.model):
            return await asyncio.shield(waiting)

    def wait_now(self, future: Any) -> Any:
        """Like `wait`, for callers that are not async."""
        with explaining_errors(self.model):
            return future.result()


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
            f"model.backend is tinker, which needs the tinker package ({error}): pip install 'groupwise[train,tinker]'."
        ) from None
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
    try:
        httpx2.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=FIRST_TIMEOUT)
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
        client = package.RestClient(base_url=url, api_key=api_key)
        answer = client.get_server_capabilities().result(timeout=FIRST_TIMEOUT)
    return {
        offered.model_name: offered.max_context_length
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
