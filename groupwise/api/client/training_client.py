"""The synchronous client of the training server: one method for each call. Its asynchronous twin is `AsyncTrainingClient`.

    with TrainingClient() as client:
        client.start(model_id="tiny", max_steps=20)
        answer = client.completions("Sort: pear fig apple")
        client.rewards(answer, [score(text) for text in answer.completions])

Their common parts are in `calls`, `exchange` and `streams`; this module only sends requests and sleeps. A client may be used by
several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import httpx2

from groupwise.api.client import calls
from groupwise.api.client.async_training_client import AsyncTrainingClient
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
from groupwise.core.errors import UsageError
from groupwise.core.types import Prompt

T = TypeVar("T")


class TrainingClient:
    """Asks a training server. Use it as a context manager. Every method raises `ClientError`; see `groupwise.api.client.errors`."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        patience: float = RETRY_TIMEOUT,
        timeout: float = TIMEOUT,
        timing: Timing | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Server and key come from GROUPWISE_URL (else http://127.0.0.1:8000) and GROUPWISE_API_KEY if they are not given.

        `patience`: seconds for which a call is tried again. `timeout`: seconds without a byte after which an attempt is given up.
        `transport` replaces the network.
        """
        self.connection = Connection.of(url, api_key, patience, timeout, timing)
        self._transport = transport
        self._http = httpx2.Client(
            base_url=self.connection.url,
            headers=self.connection.headers,
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"TrainingClient({self.connection.url!r})"

    def __enter__(self) -> TrainingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the connections."""
        self._http.close()

    def asynchronous(self) -> AsyncTrainingClient:
        """A client of the same server, with the same key, for coroutines."""
        transport, of = self._transport, self.connection
        if transport is not None and not isinstance(transport, httpx2.AsyncBaseTransport):
            raise UsageError(
                f"The transport {type(transport).__name__} is synchronous only; give AsyncTrainingClient one of its own."
            )
        return AsyncTrainingClient(
            of.url,
            of.key,
            patience=of.patience,
            timeout=of.timeout,
            timing=of.timing,
            transport=transport,
        )

    def start(
        self, settings: StartRequest | Mapping[str, Any] | None = None, **more: Any
    ) -> StartAnswer:
        """Begin a run. Settings are those of `StartRequest`; what is given by name goes over `settings`."""
        return self._ask(calls.start(settings, more))

    def stop(self) -> StopAnswer:
        """End the run with a clean checkpoint. Repeating it is harmless."""
        return self._ask(calls.stop())

    def completions(
        self,
        prompt: Prompt,
        *,
        draw: int | None = None,
        prompt_tokens: Sequence[int] | None = None,
        **sampling: Unpack[Sampling],
    ) -> GroupAnswer:
        """Completions of one prompt, text or messages, by the policy that serves. Waits while the server is too far ahead."""
        return self._ask(calls.completions(prompt, draw, prompt_tokens, sampling))

    def completions_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        draws: Sequence[int] | None = None,
        **sampling: Unpack[Sampling],
    ) -> CompletionsBatch:
        """Completions of several prompts, in their order."""
        return self._ask(calls.completions_batch(prompts, draws, sampling))

    def rewards(
        self,
        group: GroupAnswer | str,
        rewards: Rewards,
        *,
        include: Include = "next",
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardAnswer:
        """Post one number, or None, for each completion. With `wait` the answer has the metrics of the step that learnt from them."""
        return self._ask(calls.rewards(group, rewards, include=include, wait=wait, timeout=timeout))

    def rewards_batch(
        self,
        groups: Sequence[RewardsEntry],
        *,
        wait: bool = False,
        timeout: float = DEFAULT_WAIT,
    ) -> RewardsBatchAnswer:
        """The same for several groups (made by `rewards_for`), which are accepted all or none."""
        return self._ask(calls.rewards_batch(groups, wait=wait, timeout=timeout))

    def give_up(self, group: GroupAnswer | str) -> GivenUpAnswer:
        """No rewards will come for this group; its place is free at once."""
        return self._ask(calls.give_up(group))

    def step(
        self,
        group_ids: Sequence[str] | None = None,
        *,
        learning_rate: float | None = None,
        wait: bool = True,
        timeout: float = DEFAULT_WAIT,
    ) -> StepAnswer:
        """Take a step now, with what has been posted or with the named groups."""
        return self._ask(calls.step(group_ids, learning_rate, wait=wait, timeout=timeout))

    def status(self) -> StatusAnswer:
        """Status of server and run."""
        return self._ask(calls.status())

    def activity(self) -> ActivityAnswer:
        """Current activity: living groups, waiting requests, steps to come, clients and their sessions."""
        return self._ask(calls.activity())

    def checkpoints(self) -> CheckpointsAnswer:
        """The checkpoints that a run can go on from."""
        return self._ask(calls.checkpoints())

    def save_checkpoint(self, name: str) -> CheckpointAnswer:
        """Write a checkpoint now, under this name."""
        return self._ask(calls.save_checkpoint(name))

    def tokenizer(self) -> TokenizerAnswer:
        """Tokenizer and chat template of the model, with their hash."""
        return self._ask(calls.tokenizer())

    def model(
        self, version: str | None = None, *, to: str | os.PathLike[str], unpack: bool = False
    ) -> Path:
        """The weights of a version (`run@step`; None: the newest) as a zip at `to`, or unpacked into the new folder `to`."""
        target = checked_target(to, unpack=unpack)
        patience = Patience(self.connection)
        while True:
            try:
                return self._download(calls.model(version), target, unpack)
            except BrokenDownload as error:
                failed: ClientError = error
            except httpx2.RequestError as error:
                failed = lost(error, self.connection)
            self._sleep(patience.wait(failed))

    def events(self, after: int | None = None) -> Iterator[EventData]:
        """Yields each event once, as it happens, also over lost connections; it ends when the caller stops asking.

        `after`: the id of the last event that is known already (`StatusAnswer.last_event_id`).
        """
        reader, patience = EventReader(after), Patience(self.connection)
        while True:
            reader.begin()
            failed: ClientError = ended(self.connection)
            try:
                with closing(self._open(calls.events(reader.last_id))) as response:
                    for chunk in response.iter_bytes():
                        patience.renew()
                        yield from reader.feed(chunk)
            except httpx2.RequestError as error:
                failed = lost(error, self.connection)
            self._sleep(patience.wait(failed))

    def _ask(self, call: Call[T]) -> T:
        return self._drive(call, stream=False)

    def _open(self, call: Call[httpx2.Response]) -> httpx2.Response:
        """An answer whose body is still to be read; the caller closes it."""
        return self._drive(call, stream=True)

    def _drive(self, call: Call[T], *, stream: bool) -> T:
        """Do what the exchange says, until it has the answer."""
        steps = exchange(call, self.connection)
        todo = next(steps)
        while True:
            reply = None
            if isinstance(todo, Send):
                reply = self._attempt(todo, stream=stream)
            else:
                self._sleep(todo.seconds)
            try:
                todo = steps.send(reply)
            except StopIteration as end:
                return end.value

    def _attempt(self, send: Send, *, stream: bool) -> httpx2.Response | httpx2.RequestError:
        request = self._http.build_request(
            send.method,
            send.path,
            headers=send.headers,
            params=send.query,
            content=send.body,
            timeout=send.timeout,
        )
        try:
            response = self._http.send(request, stream=stream)
            if stream and not response.is_success:
                response.read()
                response.close()
        except httpx2.RequestError as error:
            return error
        return response

    def _download(self, call: Call[httpx2.Response], to: Path, unpack: bool) -> Path:
        response = self._open(call)
        with closing(response), Download(to, unpack=unpack) as download:
            for chunk in response.iter_bytes():
                download.write(chunk)
            return download.finish()

    def _sleep(self, seconds: float) -> None:
        self.connection.timing.sleep(seconds)
