"""The asynchronous client of the training server: one method for each call. Several tasks may use a client at once.

    async with AsyncTrainingClient() as client:
        await client.start(model_id="tiny", max_steps=20)
        answer = await client.completions("Sort: pear fig apple")
        await client.rewards(answer, [score(text) for text in answer.completions])

A call is retried while its failure may pass (`connection`). Every attempt has the same idempotency key, so it does not matter which of
them arrived. After a change, run `python scripts/generate_sync_client.py`: it makes `training_client` from this module.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack
from urllib.parse import quote

import httpx2
from pydantic import BaseModel

from groupwise.api.client.connection import (
    CONNECT_TIMEOUT,
    LIMITS,
    RETRY_TIMEOUT,
    TIMEOUT,
    Connection,
    network_failure,
    read_answer,
    refusal,
    stream_end_error,
)
from groupwise.api.client.errors import BrokenDownload, ClientError, StrangeAnswer
from groupwise.api.client.request_bodies import (
    Rewards,
    RewardsEntry,
    Sampling,
    checked_body,
    rewards_entry,
    rewards_for,
    waiting,
    without_none,
)
from groupwise.api.client.streams import Download, EventReader, checked_target
from groupwise.api.openai_client.bounded_responses import ResponseTooLarge, read_response_async
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.idempotency import HEADER, new_idempotency_key
from groupwise.api.schemas.training import (
    DEFAULT_WAIT,
    REWARDS_REQUEST,
    CheckpointAnswer,
    CheckpointRequest,
    CheckpointsAnswer,
    CloseAnswer,
    CloseRequest,
    CompletionsBatch,
    CompletionsRequest,
    EventData,
    GivenUpAnswer,
    GroupAnswer,
    Include,
    RewardAnswer,
    RewardsBatchAnswer,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
    TokenizerAnswer,
)
from groupwise.core.loopback import async_direct_transport
from groupwise.core.retry import Timing
from groupwise.core.types import Prompt

A = TypeVar("A", bound=BaseModel)


class AsyncTrainingClient:
    """Calls a training server. Use it as an asynchronous context manager. Every method raises `ClientError`; see `client.errors`."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        retry_timeout: float = RETRY_TIMEOUT,
        timeout: float = TIMEOUT,
        timing: Timing | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Server and key come from GROUPWISE_URL (else http://127.0.0.1:8000) and GROUPWISE_API_KEY if they are not given.

        `retry_timeout`: seconds during which a call is retried. `timeout`: seconds without a byte after which one attempt counts as failed.
        `transport` replaces the network.
        """
        self.connection = Connection.of(url, api_key, retry_timeout, timeout, timing)
        self._transport = transport  # for `asynchronous` of the synchronous client
        self._http = httpx2.AsyncClient(
            transport=transport or async_direct_transport(self.connection.url, limits=LIMITS),
            **self.connection.http_options,
        )

    def __repr__(self) -> str:
        return f"AsyncTrainingClient({self.connection.url!r})"

    async def __aenter__(self) -> AsyncTrainingClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the connections."""
        await self._http.aclose()

    async def start(
        self, settings: StartRequest | Mapping[str, Any] | None = None, **more: Any
    ) -> StartAnswer:
        """Start a run. Settings are those of `StartRequest`; keyword arguments override `settings`."""
        if isinstance(settings, StartRequest):
            settings = settings.model_dump(exclude_unset=True)
        settings = {**(settings or {}), **more}
        body = checked_body(StartRequest, settings)
        with self.connection.reporting_start(settings):
            return await self._request(StartAnswer, "POST", "/start", body)

    async def stop(self) -> StopAnswer:
        """End the run with a clean checkpoint. Safe to repeat."""
        return await self._request(StopAnswer, "POST", "/stop")

    async def completions(
        self,
        prompt: Prompt,
        *,
        draw: int | None = None,
        prompt_tokens: Sequence[int] | None = None,
        **sampling: Unpack[Sampling],
    ) -> GroupAnswer:
        """Completions of one prompt, text or messages, from the policy that is served now.

        `draw`: position of the prompt in the run's order of draws; None: the next free one. `sampling` overrides the run's settings.
        Waits while `groups_per_step × (staleness + 1)` groups are in progress (sampled, open or rewarded, but not yet trained on), or until
        a named draw is due; raises `TooBusy` after `retry_timeout` seconds.
        """
        fields = without_none(prompt=prompt, draw=draw, prompt_tokens=prompt_tokens, **sampling)
        body = checked_body(CompletionsRequest, fields)
        return await self._request(GroupAnswer, "POST", "/completions", body)

    async def completions_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        draws: Sequence[int] | None = None,
        **sampling: Unpack[Sampling],
    ) -> CompletionsBatch:
        """Completions of several prompts, in their order; the arguments are as in `completions`."""
        fields = without_none(prompts=list(prompts), draws=draws, **sampling)
        body = checked_body(CompletionsRequest, fields)
        return await self._request(CompletionsBatch, "POST", "/completions", body)

    async def rewards(
        self,
        group: GroupAnswer | str,
        rewards: Rewards,
        *,
        include: Include = "next",
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardAnswer:
        """Post one number, or None, for each completion. `include`: `next` trains the group as soon as possible; `hold` keeps it until
        `step` names it or it is posted again with `next`. With `wait` the answer has the metrics of the step that trained on it.
        """
        if isinstance(group, GroupAnswer):
            entry = rewards_entry(rewards_for(group, rewards, include=include))
        else:
            entry = {"group_id": group, "rewards": rewards, "include": include}
        body = checked_body(REWARDS_REQUEST, {**entry, **waiting(wait, timeout)})
        server_wait = timeout if wait else 0.0
        return await self._request(RewardAnswer, "POST", "/rewards", body, server_wait)

    async def rewards_batch(
        self,
        groups: Sequence[RewardsEntry],
        *,
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardsBatchAnswer:
        """Post the rewards of several groups (made by `rewards_for`); the server accepts all of them or none."""
        fields = {"groups": [rewards_entry(group) for group in groups], **waiting(wait, timeout)}
        body = checked_body(REWARDS_REQUEST, fields)
        server_wait = timeout if wait else 0.0
        return await self._request(RewardsBatchAnswer, "POST", "/rewards", body, server_wait)

    async def reward_trajectory(
        self,
        trajectory: str | Sequence[str],
        reward: float | None,
        *,
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardAnswer:
        """Post the one reward of a trajectory, None if it failed. `trajectory`: the name that its calls gave as `metadata.trajectory`, or
        the ids of its calls, in order. With `wait` the answer has the metrics of the step that trained on its group, or the status
        `accepted` after `timeout` seconds.
        """
        name = {"trajectory": trajectory}
        if not isinstance(trajectory, str):
            name = {"completion_ids": list(trajectory)}
        body = checked_body(REWARDS_REQUEST, {**name, "reward": reward, **waiting(wait, timeout)})
        server_wait = timeout if wait else 0.0
        return await self._request(RewardAnswer, "POST", "/rewards", body, server_wait)

    async def close_group(self, group: str) -> CloseAnswer:
        """Close a group of trajectories, by the name that its calls gave as `metadata.group`: train it with the rewards that came."""
        body = checked_body(CloseRequest, {"group": group})
        return await self._request(CloseAnswer, "POST", "/trajectories/close", body)

    async def give_up(self, group: GroupAnswer | str) -> GivenUpAnswer:
        """Drop a group that will get no rewards, and free its slot at once."""
        name = group.group_id if isinstance(group, GroupAnswer) else group
        return await self._request(GivenUpAnswer, "DELETE", f"/completions/{quote(name, safe='')}")

    async def step(
        self,
        group_ids: Sequence[str] | None = None,
        *,
        learning_rate: float | None = None,
        wait: bool = True,
        timeout: float = DEFAULT_WAIT,
    ) -> StepAnswer:
        """Take a step now, with the posted groups or with the named ones."""
        fields = without_none(group_ids=group_ids, learning_rate=learning_rate)
        body = checked_body(StepRequest, {**fields, **waiting(wait, timeout)})
        return await self._request(StepAnswer, "POST", "/step", body, timeout if wait else 0.0)

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        return await self._request(StatusAnswer, "GET", "/status")

    async def activity(self) -> ActivityAnswer:
        """Current activity: open groups, waiting requests, upcoming steps, clients and their sessions."""
        return await self._request(ActivityAnswer, "GET", "/activity")

    async def checkpoints(self) -> CheckpointsAnswer:
        """The checkpoints from which a run can be resumed."""
        return await self._request(CheckpointsAnswer, "GET", "/checkpoints")

    async def save_checkpoint(self, name: str) -> CheckpointAnswer:
        """Write a checkpoint of this name now."""
        body = checked_body(CheckpointRequest, {"name": name})
        return await self._request(CheckpointAnswer, "POST", "/checkpoints", body)

    async def tokenizer(self) -> TokenizerAnswer:
        """Tokenizer and chat template of the model, with their hash."""
        return await self._request(TokenizerAnswer, "GET", "/tokenizer")

    async def model(
        self, version: str | None = None, *, to: str | os.PathLike[str], unpack: bool = False
    ) -> Path:
        """Download the weights of a version (`run@step`; None: the newest) as a zip to `to`, or unpack them into the new folder `to`."""
        target = checked_target(to, unpack=unpack)
        retry = self.connection.retry()
        while True:
            error: ClientError
            try:
                query = without_none(version=version)
                response = await self.send("GET", "/model", query=query, stream=True)
                async with aclosing(response):
                    with Download(target, unpack=unpack) as download:
                        async for chunk in response.aiter_bytes():
                            download.write(chunk)
                        return await asyncio.to_thread(download.finish)
            except BrokenDownload as broken:
                error = broken
            except httpx2.RequestError as lost:
                error, _ = network_failure(lost, self.connection)
            await self._sleep(retry.next(error, error.retry_after or 0.0))

    async def events(self, after: int | None = None) -> AsyncIterator[EventData]:
        """Yields each event once, as it happens, and reconnects after a lost connection. It ends only when the caller stops iterating.

        `after`: the id of the last event that the caller already knows (`StatusAnswer.last_event_id`).
        """
        reader = EventReader(after)
        retry = self.connection.retry()
        while True:
            reader.begin()
            headers = {"Accept": "text/event-stream"}
            if reader.last_id is not None:
                headers["Last-Event-ID"] = str(reader.last_id)
            error: ClientError = stream_end_error(self.connection)
            try:
                response = await self.send("GET", "/events", headers=headers, stream=True)
                async with aclosing(response):
                    async for chunk in response.aiter_bytes():
                        retry.renew()
                        for event in reader.feed(chunk):
                            yield event
            except httpx2.RequestError as request_error:
                error, _ = network_failure(request_error, self.connection)
            await self._sleep(retry.next(error, error.retry_after or 0.0))

    async def _request(
        self,
        answer: type[A],
        method: str,
        path: str,
        body: bytes | None = None,
        server_wait: float = 0.0,
    ) -> A:
        return read_answer(
            answer, await self.send(method, path, body=body, server_wait=server_wait)
        )

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        server_wait: float = 0.0,
        stream: bool = False,
        retry_timeout: float | None = None,
        timeout: float | None = None,
    ) -> httpx2.Response:
        """Send any request and return its successful response, also for routes that have no method here.

        `server_wait`: seconds for which the server may delay the response on purpose. `stream`: the body has not been read yet, and the
        caller closes the response. `retry_timeout` and `timeout` override the client's.
        """
        connection = self.connection
        retry = connection.retry(retry_timeout)
        read_timeout = connection.timeout if timeout is None else timeout
        default_headers = {} if method == "GET" else {HEADER: new_idempotency_key()}
        if body is not None:
            default_headers["Content-Type"] = "application/json"
        request = self._http.build_request(
            method,
            path,
            headers={**default_headers, **(headers or {})},
            params=query,
            content=body,
            # The server may delay the response by `server_wait` seconds, which must not count as silence.
            timeout=httpx2.Timeout(
                read_timeout + server_wait, connect=min(CONNECT_TIMEOUT, read_timeout), pool=None
            ),
        )
        while True:
            error: ClientError
            try:
                response = await self._http.send(request, stream=True)
                if not (stream and response.is_success):
                    response = await read_response_async(response)
                if response.is_success:
                    connection.report_answer()
                    return response
                error, retryable = refusal(response, connection)
            except ResponseTooLarge as too_large:
                raise StrangeAnswer(f"{method} {path} at {connection.url}: {too_large}.") from None
            except httpx2.RequestError as request_error:
                error, retryable = network_failure(request_error, connection)
            if not retryable:
                raise error
            wait = retry.next(error, error.retry_after or 0.0)
            connection.report_failure(error, retry.left)
            await self._sleep(wait)

    async def _sleep(self, seconds: float) -> None:
        await self.connection.timing.sleep(seconds)
