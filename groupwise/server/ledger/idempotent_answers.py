"""Answers a repeated request once: finds the earlier answer, or waits for one under way.

The service keeps the answer of whatever it creates in the same transaction as the work, under the request's Idempotency-Key. It needs the
answer's bytes for that, so that what an answer looks like is decided here (`answer_of` and its like), for the service and the routes
alike. Refusals are not kept: the same request may be made again when what was in its way is gone. A request that waits for a step is
kept as accepted; a repeat waits for the same step.

`UnderWay` is for the time between: the same key while the first request is still being answered waits for that answer. If the first is
refused, or its client goes away, the next in line does the work itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from pydantic import BaseModel

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    CompletionsBatch,
    CompletionsRequest,
    GroupAnswer,
    RewardAnswer,
    RewardsBatchAnswer,
    RewardsOfOne,
    RewardsOfSeveral,
    StepAnswer,
    StepRequest,
)
from groupwise.server.ledger.answers import StoredResponse


def answer_of(model: BaseModel, status: int = 200) -> StoredResponse:
    """A model as it is sent."""
    return StoredResponse(status, model.model_dump_json().encode())


def completions_answer(
    request: CompletionsRequest, groups: Sequence[GroupAnswer]
) -> StoredResponse:
    """Flat for one prompt, `groups` for several."""
    if request.prompts is None:
        (only,) = groups
        return answer_of(only)
    return answer_of(CompletionsBatch(groups=list(groups)))


def rewards_answer(
    request: RewardsOfOne | RewardsOfSeveral, answers: Sequence[RewardAnswer]
) -> StoredResponse:
    """Flat for one group, `groups` for several; 202 where a step was waited for in vain."""
    trained = all(answer.status == "trained" for answer in answers)
    status = 202 if request.wait and not trained else 200
    if isinstance(request, RewardsOfOne):
        (only,) = answers
        return answer_of(only, status)
    return answer_of(RewardsBatchAnswer(groups=list(answers)), status)


def rewards_of(
    request: RewardsOfOne | RewardsOfSeveral, answer: StoredResponse
) -> list[RewardAnswer]:
    """Parse a stored answer into the answer for each group."""
    if isinstance(request, RewardsOfOne):
        return [RewardAnswer.model_validate_json(answer.body)]
    return RewardsBatchAnswer.model_validate_json(answer.body).groups


def step_answer(request: StepRequest, answer: StepAnswer) -> StoredResponse:
    """202 where it was waited for in vain."""
    return answer_of(answer, 202 if request.wait and answer.status == "accepted" else 200)


class UnderWay:
    """The requests with an Idempotency-Key that are being answered, in one event loop."""

    def __init__(self) -> None:
        self._first: dict[
            tuple[str, str, str], tuple[str, asyncio.Future[StoredResponse | None]]
        ] = {}

    async def answer(self, caller: Caller) -> StoredResponse | None:
        """Wait for the answer to the first request with this key; None if none is under way, and the caller must do the work.

        Raises Refusal `idempotency_key_reused` if the first one has another body.
        """
        while (named := caller.answer_key) and (first := self._first.get(_name(caller, named))):
            body_hash, answer = first
            if body_hash != named.body_hash:
                raise Refusal(
                    "idempotency_key_reused",
                    f"the Idempotency-Key {named.key[:80]!r} is that of another {named.route} that is being answered. "
                    "Make a new key for each new request.",
                )
            if (given := await asyncio.shield(answer)) is not None:
                return given
        return None

    @asynccontextmanager
    async def first(self, caller: Caller) -> AsyncGenerator[asyncio.Future[StoredResponse | None]]:
        """Register as the request that others wait for. The caller puts its answer, if any, into the future."""
        told: asyncio.Future[StoredResponse | None] = asyncio.get_running_loop().create_future()
        named = caller.answer_key
        if named is not None:
            self._first[_name(caller, named)] = (named.body_hash, told)
        try:
            yield told
        finally:
            if named is not None:
                del self._first[_name(caller, named)]
            if not told.done():
                told.set_result(None)


def _name(caller: Caller, named: AnswerKey) -> tuple[str, str, str]:
    return (caller.key_id, named.route, named.key)
