"""The bytes of each answer: the route sends exactly what the ledger stores under an Idempotency-Key, the first time and every time."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from groupwise.api.schemas.training import (
    AnyRewards,
    CompletionsBatch,
    CompletionsRequest,
    GroupAnswer,
    RewardAnswer,
    RewardsBatchAnswer,
    RewardsOfSeveral,
    StepAnswer,
    StepRequest,
)
from groupwise.server.ledger.idempotency import StoredResponse


def answer_of(model: BaseModel, status: int = 200) -> StoredResponse:
    """Serialise a model as it is sent."""
    return StoredResponse(status, model.model_dump_json().encode())


def completions_answer(
    request: CompletionsRequest, groups: Sequence[GroupAnswer]
) -> StoredResponse:
    """The group itself for one prompt, a list `groups` for several."""
    if request.prompts is None:
        (only,) = groups
        return answer_of(only)
    return answer_of(CompletionsBatch(groups=list(groups)))


def rewards_answer(request: AnyRewards, answers: Sequence[RewardAnswer]) -> StoredResponse:
    """The answer itself for one group or trajectory, a list `groups` for several. Status 202 if the request waited for a step, and none was
    taken in time.
    """
    trained = all(answer.status == "trained" for answer in answers)
    status = 202 if request.wait and not trained else 200
    if isinstance(request, RewardsOfSeveral):
        return answer_of(RewardsBatchAnswer(groups=list(answers)), status)
    (only,) = answers
    return answer_of(only, status)


def rewards_of(request: AnyRewards, answer: StoredResponse) -> list[RewardAnswer]:
    """Parse a stored answer into the answer for each group."""
    if isinstance(request, RewardsOfSeveral):
        return RewardsBatchAnswer.model_validate_json(answer.body).groups
    return [RewardAnswer.model_validate_json(answer.body)]


def step_answer(request: StepRequest, answer: StepAnswer) -> StoredResponse:
    """Status 202 if the request waited for the step and it was not taken in time."""
    return answer_of(answer, 202 if request.wait and answer.status == "accepted" else 200)
