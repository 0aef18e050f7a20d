"""Ask and post: start and end a run, request completions, post rewards, take steps, read the state.

Asking and posting end with their client: if the client of a request for completions disconnects, its place becomes free; a wait for a step
ends in the same way. Anything the service has committed by then stays. Starting and ending a run continue even if the client disconnects.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Body as BodyOf
from fastapi import Path
from fastapi.responses import Response

from groupwise.api.http.route import SMALL_BODY, Route, json_response
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.training import (
    MAX_ID,
    AnyRewards,
    Body,
    CloseAnswer,
    CloseRequest,
    CompletionsBatch,
    CompletionsRequest,
    GivenUpAnswer,
    GroupAnswer,
    RewardAnswer,
    RewardsBatchAnswer,
    RewardsRequest,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
)
from groupwise.core.settings.field_errors import GROUP_ID_PATTERN
from groupwise.server.ledger.idempotency import StoredResponse
from groupwise.server.routes.context import Context
from groupwise.server.run.responses import (
    answer_of,
    completions_answer,
    rewards_answer,
    rewards_of,
    step_answer,
)

TAG = "training"
OF_ENGINE = ("engine_recovering", "engine_failed", "timed_out")
OF_RUN = ("not_started", "finished")
OF_SAMPLING = ("too_busy", "draw_taken", "settings_conflict", "prompt_too_long", "disk_full")
GONE = ("lease_expired", "group_given_up", "group_stale", "group_quarantined")


class Nothing(Body):
    """An empty object; POST /stop has nothing to say."""


async def start(body: StartRequest, context: Context) -> Response:
    """Begin a training. The answer comes when it is ready: a large model takes its time."""

    async def work() -> Any:
        return answer_of(await context.service.start(body, context.caller))

    return await context.run_idempotent(work)


async def stop(context: Context, body: Annotated[Nothing | None, BodyOf()] = None) -> Response:
    """End the training cleanly, with a checkpoint. Asking again is harmless."""
    return json_response(await context.service.stop())


async def completions(body: CompletionsRequest, context: Context) -> Response:
    """Completions of one prompt, or of several, by the policy that serves."""

    async def work() -> Any:
        return completions_answer(body, await context.service.completions(body, context.caller))

    return await context.run_idempotent(work)


GroupIdInPath = Annotated[
    str, Path(description="The group.", min_length=1, max_length=MAX_ID, pattern=GROUP_ID_PATTERN)
]


async def give_up(group_id: GroupIdInPath, context: Context) -> Response:
    """Give up a group that will not be rewarded; its place is then free for another."""
    await context.service.give_up(group_id)
    return json_response(GivenUpAnswer(group_id=group_id))


async def rewards(body: RewardsRequest, context: Context) -> Response:
    """The rewards of one group or of several, or the one reward of a trajectory. They are on disk before the answer."""
    request: AnyRewards = body

    async def work() -> Any:
        return rewards_answer(request, await context.service.rewards(request, context.caller))

    async def wait_on(stored: StoredResponse) -> Any:
        answers = rewards_of(request, stored)
        return rewards_answer(
            request, await context.service.rewards_trained(answers, request.timeout)
        )

    return await context.run_idempotent(work, wait_on if request.wait else None)


async def close_group(body: CloseRequest, context: Context) -> Response:
    """Close a group of trajectories: train it with the rewards that came. Those without one count as failed."""

    async def work() -> Any:
        return answer_of(await context.service.close_group(body.group, context.caller))

    return await context.run_idempotent(work)


async def step(body: StepRequest, context: Context) -> Response:
    """Take a step now: with all that was rewarded, or with the groups that are named."""

    async def work() -> Any:
        return step_answer(body, await context.service.step(body, context.caller))

    async def wait_on(before: StoredResponse) -> Any:
        answer = StepAnswer.model_validate_json(before.body)
        return step_answer(body, await context.service.step_taken(answer, body.timeout))

    return await context.run_idempotent(work, wait_on if body.wait else None)


async def status(context: Context) -> Response:
    """The state of the server and its run."""
    return json_response(await context.service.status())


async def activity(context: Context) -> Response:
    """The server at this instant: living groups with their leases, waiting clients, steps to come, clients and their sessions."""
    return json_response(await context.serving.activity())


get_route = partial(Route, method="GET", role=Role.READ, tag=TAG)
post_route = partial(Route, method="POST", tag=TAG, takes_body=True, works=True)
train_route = partial(post_route, role=Role.TRAIN, named=True)
admin_route = partial(
    post_route, role=Role.ADMIN, max_body_bytes=SMALL_BODY, ends_with_client=False
)
ROUTES = (
    admin_route(
        path="/start",
        handler=start,
        answer=StartAnswer,
        named=True,
        codes=(
            *("run_active", "settings_conflict", "model_not_allowed", "resume_mismatch"),
            *("unknown_checkpoint", "unknown_run", "disk_full", *OF_ENGINE),
        ),
        example={"model_id": "tiny", "num_completions_per_prompt": 8, "max_steps": 100},
    ),
    admin_route(
        path="/stop", handler=stop, answer=StopAnswer, codes=("disk_full", *OF_ENGINE), example={}
    ),
    train_route(
        path="/completions",
        handler=completions,
        answer=GroupAnswer | CompletionsBatch,
        codes=(*OF_SAMPLING, "tokenizer_mismatch", *OF_RUN, *OF_ENGINE),
        example={"prompt": "Sort these words: pear, apple"},
    ),
    Route(
        method="DELETE",
        path="/completions/{group_id}",
        handler=give_up,
        role=Role.TRAIN,
        tag=TAG,
        answer=GivenUpAnswer,
        works=True,
        ends_with_client=False,
        codes=(
            *("unknown_group", "group_in_use", "lease_expired", "group_stale"),
            *("group_quarantined", "disk_full", "invalid_request"),
        ),
    ),
    train_route(
        path="/rewards",
        handler=rewards,
        answer=RewardAnswer | RewardsBatchAnswer,
        later="The rewards are kept; the step that was waited for is not done yet.",
        codes=(
            *("unknown_group", "already_rewarded", "echo_mismatch", "manual_mode", "group_in_use"),
            *("disk_full", *GONE, *OF_RUN, *OF_ENGINE),
        ),
        example={"group_id": "g-0123456789abcdef0123", "rewards": [1.0, 0.0, None, 0.5]},
    ),
    train_route(
        path="/trajectories/close",
        handler=close_group,
        answer=CloseAnswer,
        max_body_bytes=SMALL_BODY,
        codes=("unknown_group", "disk_full", *OF_RUN),
        example={"group": "scenario-7"},
    ),
    train_route(
        path="/step",
        handler=step,
        answer=StepAnswer,
        max_body_bytes=SMALL_BODY,
        later="The step is planned; it is not done yet.",
        codes=(
            *("auto_mode", "too_busy", "nothing_to_train", "unknown_group", "group_in_use"),
            *("settings_conflict", "disk_full", *GONE, *OF_RUN, *OF_ENGINE),
        ),
        example={"wait": True},
    ),
    get_route(path="/status", handler=status, answer=StatusAnswer),
    get_route(path="/activity", handler=activity, answer=ActivityAnswer),
)
