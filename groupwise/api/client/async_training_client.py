"""The asynchronous client of the training server: the twin of `TrainingClient`, call by call.

    async with AsyncTrainingClient() as client:
        await client.start(model_id="tiny", max_steps=20)
        answer = await client.completions("Sort: pear fig apple")
        await client.rewards(answer, [score(text) for text in answer.completions])

All that both do alike stands in `calls`, `exchange` and `streams`; here requests are made and waits are waited.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import httpx2

from groupwise.api.client import calls
from groupwise.api.client.calls import Rewards, RewardsEntry, Sampling
from groupwise.api.client.errors import BrokenDownload, ClientError
from groupwise.api.client.exchange import (
    RETRY_TIMEOUT,
    TIMEOUT,
    Call,
    Connection,
    Patience,
    Send,
    Timing,
    driven,
    ended,
    exchange,
    lost,
)
from groupwise.api.client.streams import Download, EventReader, checked_target
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.training import (
    DEFAULT_WAIT,
    CheckpointAnswer,
    CheckpointsAnswer,
    CompletionsBatch,
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
    StopAnswer,
    TokenizerAnswer,
)
from groupwise.core.types import Prompt

T = TypeVar("T")


class AsyncTrainingClient:
    """Asks a training server. Use it as an asynchronous context manager. Every method raises `ClientError`; see `client.errors`."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        patience: float = RETRY_TIMEOUT,
        timeout: float = TIMEOUT,
        timing: Timing | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Server and key come from GROUPWISE_URL (else http://127.0.0.1:8000) and GROUPWISE_API_KEY if they are not given.

        `patience`: seconds for which a call is tried again. `timeout`: seconds without a byte after which an attempt is given up.
        `transport` replaces the network.
        """
        self.connection = Connection.of(url, api_key, patience, timeout, timing)
        self._http = httpx2.AsyncClient(
            base_url=self.connection.url,
            headers=self.connection.headers,
            transport=transport,
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
        """Begin a run. Settings are those of `StartRequest`; what is given by name goes over `settings`."""
        return await self._ask(calls.start(settings, more))

    async def stop(self) -> StopAnswer:
        """End the run with a clean checkpoint. Repeating it is harmless."""
        return await self._ask(calls.stop())

    async def completions(
        self,
        prompt: Prompt,
        *,
        draw: int | None = None,
        prompt_tokens: Sequence[int] | None = None,
        **sampling: Unpack[Sampling],
    ) -> GroupAnswer:
        """Completions of one prompt, text or messages, by the policy that serves. Waits while the server is too far ahead."""
        return await self._ask(calls.completions(prompt, draw, prompt_tokens, sampling))

    async def completions_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        draws: Sequence[int] | None = None,
        **sampling: Unpack[Sampling],
    ) -> CompletionsBatch:
        """Completions of several prompts, in their order."""
        return await self._ask(calls.completions_batch(prompts, draws, sampling))

    async def rewards(
        self,
        group: GroupAnswer | str,
        rewards: Rewards,
        *,
        include: Include = "next",
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardAnswer:
        """Post one number, or None, for each completion. With `wait` the answer has the metrics of the step that learnt from them."""
        return await self._ask(
            calls.rewards(group, rewards, include=include, wait=wait, timeout=timeout)
        )

    async def rewards_batch(
        self,
        groups: Sequence[RewardsEntry],
        *,
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardsBatchAnswer:
        """The same for several groups (made by `rewards_for`), which are accepted all or none."""
        return await self._ask(calls.rewards_batch(groups, wait=wait, timeout=timeout))

    async def give_up(self, group: GroupAnswer | str) -> GivenUpAnswer:
        """No rewards will come for this group; its place is free at once."""
        return await self._ask(calls.give_up(group))

    async def step(
        self,
        group_ids: Sequence[str] | None = None,
        *,
        learning_rate: float | None = None,
        wait: bool = True,
        timeout: float = DEFAULT_WAIT,
    ) -> StepAnswer:
        """Take a step now, with what has been posted or with the named groups."""
        return await self._ask(calls.step(group_ids, learning_rate, wait=wait, timeout=timeout))

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        return await self._ask(calls.status())

    async def activity(self) -> ActivityAnswer:
        """Current activity: living groups, waiting requests, steps to come, clients and their sessions."""
        return await self._ask(calls.activity())

    async def checkpoints(self) -> CheckpointsAnswer:
        """The checkpoints that a run can go on from."""
        return await self._ask(calls.checkpoints())

    async def save_checkpoint(self, name: str) -> CheckpointAnswer:
        """Write a checkpoint now, under this name."""
        return await self._ask(calls.save_checkpoint(name))

    async def tokenizer(self) -> TokenizerAnswer:
        """Tokenizer and chat template of the model, with their hash."""
        return await self._ask(calls.tokenizer())

    async def model(
        self, version: str | None = None, *, to: str | os.PathLike[str], unpack: bool = False
    ) -> Path:
        """The weights of a version (`run@step`; None: the newest) as a zip at `to`, or unpacked into the new folder `to`."""
        target = checked_target(to, unpack=unpack)
        patience = Patience(self.connection)
        while True:
            try:
                return await self._download(calls.model(version), target, unpack)
            except BrokenDownload as error:
                failed: ClientError = error
            except httpx2.RequestError as error:
                failed = lost(error, self.connection)
            await self._sleep(patience.wait(failed))

    async def events(self, after: int | None = None) -> AsyncIterator[EventData]:
        """Yields each event once, as it happens, also over lost connections; it ends when the caller stops asking.

        `after`: the id of the last event that is known already (`StatusAnswer.last_event_id`).
        """
        reader, patience = EventReader(after), Patience(self.connection)
        while True:
            reader.begin()
            failed: ClientError = ended(self.connection)
            try:
                async with aclosing(await self._open(calls.events(reader.last_id))) as response:
                    async for chunk in response.aiter_bytes():
                        patience.renew()
                        for event in reader.feed(chunk):
                            yield event
            except httpx2.RequestError as error:
                failed = lost(error, self.connection)
            await self._sleep(patience.wait(failed))

    async def _ask(self, call: Call[T]) -> T:
        return await self._drive(call, stream=False)

    async def _open(self, call: Call[httpx2.Response]) -> httpx2.Response:
        """An answer whose body is still to be read; the caller closes it."""
        return await self._drive(call, stream=True)

    async def _drive(self, call: Call[T], *, stream: bool) -> T:
        """Do what the exchange says, until it has the answer."""
        attempt = partial(self._attempt, stream=stream)
        return await driven(exchange(call, self.connection), attempt, self._sleep)

    async def _attempt(self, send: Send, *, stream: bool) -> httpx2.Response | httpx2.RequestError:
        request = self._http.build_request(
            send.method,
            send.path,
            headers=send.headers,
            params=send.query,
            content=send.body,
            timeout=send.timeout,
        )
        try:
            response = await self._http.send(request, stream=stream)
            if stream and not response.is_success:
                await response.aread()
                await response.aclose()
        except httpx2.RequestError as error:
            return error
        return response

    async def _download(self, call: Call[httpx2.Response], to: Path, unpack: bool) -> Path:
        response = await self._open(call)
        async with aclosing(response):
            with Download(to, unpack=unpack) as download:
                async for chunk in response.aiter_bytes():
                    download.write(chunk)
                return await asyncio.to_thread(download.finish)

    async def _sleep(self, seconds: float) -> None:
        await self.connection.timing.sleep_async(seconds)
