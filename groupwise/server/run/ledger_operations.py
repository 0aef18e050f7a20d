"""What the requests of clients change in the ledger. Each function is one transaction, with the response, an event and the counters."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    AnyRewards,
    CheckpointAnswer,
    CloseAnswer,
    CompletionsRequest,
    EventKind,
    GroupAnswer,
    GroupRewards,
    RewardAnswer,
    RewardOfTrajectory,
    RewardsOfOne,
    StepAnswer,
    StepRequest,
)
from groupwise.core.types import Group, from_json
from groupwise.server.engine.engine_protocol import Opened, Sampled
from groupwise.server.ledger import events, groups, members, plans, runs, trajectories
from groupwise.server.ledger.group_states import State
from groupwise.server.ledger.groups import Echo, GroupRow, NewGroup
from groupwise.server.ledger.idempotency import StoredResponse, run_idempotent
from groupwise.server.ledger.plans import PlanRow
from groupwise.server.ledger.rewards import Post
from groupwise.server.ledger.runs import RunRow, Tokenizer
from groupwise.server.ledger.transaction import Transaction, store_uptime
from groupwise.server.run import steps
from groupwise.server.run.responses import (
    answer_of,
    completions_answer,
    rewards_answer,
    step_answer,
)

# --- runs -----------------------------------------------------------------------------------------


def start_run(
    transaction: Transaction,
    run: str,
    folder: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    is_resumed: bool,
    opened: Opened,
    caller: Caller,
    answer: StoredResponse,
    replaced: str | None = None,
) -> RunRow:
    """Record a run that an engine has opened as the active one, in place of the run `replaced`, which ends here."""
    tokenizer = Tokenizer.of(opened)

    def work() -> StoredResponse:
        if replaced is not None:
            step = steps.next_step(transaction, replaced)
            steps.end_run(transaction, replaced, "replaced", EventKind.STOPPED, step)
        if is_resumed:
            runs.reactivate_run(transaction, run, settings, config, tokenizer)
        else:
            runs.add_run(transaction, run, folder, settings, config, tokenizer)
        events.add_event(transaction, run, EventKind.STARTED, {"step": opened.step})
        return answer

    run_idempotent(transaction, caller, work)
    return runs.read_run(transaction, run)


# --- completions ----------------------------------------------------------------------------------


def check_draws(transaction: Transaction, run: str, draws: Sequence[int | None]) -> None:
    """Check that the draws are free, before waiting for their turn. Refuses with `draw_taken`."""
    for draw in draws:
        if draw is not None:
            groups.need_free_draw(transaction, run, draw)


def keep_groups(
    transaction: Transaction,
    run: str,
    sampled: Sequence[Sampled],
    lease: float,
    request: CompletionsRequest,
    caller: Caller,
) -> list[GroupAnswer]:
    """Store sampled groups and the answer about them; returns the answers."""
    answers: list[GroupAnswer] = []

    def work() -> StoredResponse:
        new_groups = [
            NewGroup(
                f"g-{secrets.token_hex(10)}",
                sample.group,
                sample.step,
                sample.version,
                sample.fingerprint,
                named=draw is not None,
            )
            for sample, draw in zip(sampled, request.all_draws, strict=True)
        ]
        rows = groups.add_groups(transaction, run, new_groups, key_id=caller.key_id, lease=lease)
        events.count(transaction, run, events.COMPLETION_REQUESTS)
        answers.extend(
            group_answer(transaction, row, new_group.group)
            for row, new_group in zip(rows, new_groups, strict=True)
        )
        return completions_answer(request, answers)

    run_idempotent(transaction, caller, work)
    return answers


def group_answer(transaction: Transaction, row: GroupRow, group: Group) -> GroupAnswer:
    """A group in the form sent to its client."""
    rollouts = group.rollouts
    return GroupAnswer(
        group_id=row.id,
        prompt=group.example.prompt,
        completions=[rollout.completion for rollout in rollouts],
        completion_tokens=[list(rollout.completion_ids) for rollout in rollouts],
        finish_reasons=[rollout.finish_reason or "length" for rollout in rollouts],
        model_version=(row.run, row.sampled_step),
        fingerprint=row.fingerprint,
        draw=row.draw,
        expires_at=transaction.now + row.lease_end - transaction.uptime,
    )


# --- rewards --------------------------------------------------------------------------------------


def keep_rewards(
    transaction: Transaction, run: str, steps_done: int | None, request: AnyRewards, caller: Caller
) -> list[RewardAnswer]:
    """Store the rewards of one or more groups, all or none, and the answers about them. `steps_done`: the run's step count; None: as
    recorded in the ledger.

    If the client waits for the step, the answer stored under its key says `accepted`: a repeated request continues to wait from there.
    """
    answers: list[RewardAnswer] = []

    def work() -> StoredResponse:
        done = steps.next_step(transaction, run) if steps_done is None else steps_done
        for post in _posts_of(transaction, run, done, request, caller):
            posted = members.accept_post(transaction, run, post)
            # For rewards posted before, the answer of the first post.
            first_run, first_done = posted.answer["model_version"]
            answers.append(
                RewardAnswer(
                    group_id=posted.group,
                    model_version=(first_run, first_done),
                    status=posted.answer["status"],
                )
            )
        events.count(transaction, run, events.REWARD_REQUESTS)
        return rewards_answer(request, answers)

    run_idempotent(transaction, caller, work)
    return answers


def _posts_of(
    transaction: Transaction, run: str, done: int, request: AnyRewards, caller: Caller
) -> Iterator[Post]:
    """The posts of a request, one for each group or for the trajectory. They are made one after the other, because echoes are compared
    with what the ledger has then.
    """
    if isinstance(request, RewardOfTrajectory):
        group, member = _member_of(transaction, run, request, caller)
        answer = {"model_version": [run, done], "status": "accepted"}
        yield Post(f"{group}-{member}", (request.reward,), answer, "next", "reward")
        return
    for number, group_rewards in enumerate(request.all_groups):
        if group_rewards.group_id is not None:
            _check_echo(transaction, group_rewards)
        status = "held" if group_rewards.include == "hold" else "accepted"
        yield Post(
            group_rewards.group_id or _echo_of_request(group_rewards),
            tuple(group_rewards.rewards),
            {"model_version": [run, done], "status": status},
            group_rewards.include,
            "rewards" if isinstance(request, RewardsOfOne) else f"groups.{number}.rewards",
        )


def _member_of(
    transaction: Transaction, run: str, request: RewardOfTrajectory, caller: Caller
) -> tuple[str, int]:
    if request.completion_ids is None:
        assert request.trajectory is not None, "one of the two is given"
        return trajectories.member_named(transaction, run, caller.key_id, request.trajectory)
    calls = [members.parse_id(name).call or name for name in request.completion_ids]
    return trajectories.member_of_calls(transaction, calls, request.trajectory)


def close_group(transaction: Transaction, run: str, name: str, caller: Caller) -> CloseAnswer:
    """Close the open groups of trajectories with this name, and store the answer about it."""
    closed: list[str] = []
    given_up: list[str] = []

    def work() -> StoredResponse:
        runs.require_active(transaction, run)
        for group in trajectories.open_groups_named(transaction, run, caller.key_id, name):
            row = members.close_group(transaction, group)
            (given_up if row.state == "given_up" else closed).append(group)
        return answer_of(CloseAnswer(closed=closed, given_up=given_up))

    response = run_idempotent(transaction, caller, work)
    assert response is not None, "it always answers"
    return CloseAnswer.model_validate_json(response.body)


def _echo_of_request(group_rewards: GroupRewards) -> Echo:
    assert group_rewards.echoed_prompt is not None, "it is needed where there is no id"
    assert group_rewards.completions is not None, "likewise"
    tokens = group_rewards.completion_tokens
    return Echo(
        group_rewards.echoed_prompt,
        tuple(group_rewards.completions),
        None if tokens is None else tuple(map(tuple, tokens)),
    )


def _check_echo(transaction: Transaction, group_rewards: GroupRewards) -> None:
    """Compare the texts sent along with an id to the sampled ones, if these are still stored."""
    assert group_rewards.group_id is not None
    record = groups.read_record(transaction, members.parse_id(group_rewards.group_id).group)
    if (
        record is None
        or (group_rewards.prompt, group_rewards.completions, group_rewards.completion_tokens)
        == (None,) * 3
    ):
        return
    sampled = groups.echo_of(from_json(Group, record))
    compared: dict[str, tuple[Any, Any]] = {
        "prompt": (group_rewards.echoed_prompt, sampled.prompt),
        "completions": (group_rewards.completions, list(sampled.completions)),
        "completion_tokens": (
            group_rewards.completion_tokens,
            [list(ids) for ids in sampled.completion_tokens or ()],
        ),
    }
    for name, (echoed, expected) in compared.items():
        if echoed is not None and echoed != expected:
            raise Refusal(
                "echo_mismatch",
                f"{name} of group {group_rewards.group_id} are not what the server has sampled. Leave them out, or send them as they came.",
            )


def after_step(transaction: Transaction, answers: Sequence[RewardAnswer]) -> list[RewardAnswer]:
    """The answers as of now: `trained` if a step has learnt from the group. Refuses if a group ended without training."""
    current_answers: list[RewardAnswer] = []
    for answer in answers:
        row = groups.read_group(transaction, answer.group_id)
        if row.state in _UNTRAINED_CODES:
            raise Refusal(
                _UNTRAINED_CODES[row.state], f"group {row.id} is {row.state}: {row.reason}."
            )
        plan = plans.plan_of(transaction, row.id)
        changes: dict[str, Any] = {}
        if plan is not None and plan.trained is not None:
            changes = {
                "status": "trained",
                "step": plan.step,
                "metrics": dict(plan.trained.metrics),
                "model_version": (row.run, plan.step + 1),
            }
        current_answers.append(answer.model_copy(update=changes))
    return current_answers


_UNTRAINED_CODES: dict[State, str] = {"stale": "group_stale", "quarantined": "group_quarantined"}


# --- steps ----------------------------------------------------------------------------------------


def keep_plan(
    transaction: Transaction,
    run: str,
    request: StepRequest,
    most: int,
    staleness: int,
    caller: Caller,
) -> StepAnswer | None:
    """Store the plan of a requested step and the answer about it; None if another plan is waiting already."""
    step_answers: list[StepAnswer] = []
    rate = request.learning_rate
    parameters = {} if rate is None else {steps.LEARNING_RATE: rate}

    def work() -> StoredResponse | None:
        runs.require_active(transaction, run)
        plan = steps.plan_of_named(transaction, run, request.group_ids, most, staleness, parameters)
        if plan is None:
            return None
        step_answers.append(_step_answer(plan))
        return step_answer(request, step_answers[0])

    run_idempotent(transaction, caller, work)
    return step_answers[0] if step_answers else None


def step_after(transaction: Transaction, answer: StepAnswer) -> StepAnswer:
    """The answer as of now. Refuses with `group_quarantined` if the step was quarantined."""
    plan = plans.plan_of(transaction, answer.group_ids[0])
    assert plan is not None, "it was planned"
    if plan.state == "quarantined":
        raise Refusal("group_quarantined", f"step {plan.step + 1} was put aside: {plan.reason}.")
    return _step_answer(plan)


def _step_answer(plan: PlanRow) -> StepAnswer:
    if plan.trained is None:
        return StepAnswer(status="accepted", step=plan.step, group_ids=list(plan.groups))
    return StepAnswer(
        status="trained",
        step=plan.step,
        group_ids=list(plan.groups),
        model_version=(plan.run, plan.step + 1),
        metrics=dict(plan.trained.metrics),
    )


# --- checkpoints ----------------------------------------------------------------------------------


def keep_checkpoint(transaction: Transaction, checkpoint: CheckpointAnswer, caller: Caller) -> None:
    """Record a named checkpoint and the answer about it."""

    def work() -> StoredResponse:
        steps.note_named_checkpoint(
            transaction, checkpoint.run_id, checkpoint.step, checkpoint.address
        )
        return answer_of(checkpoint)

    run_idempotent(transaction, caller, work)


# --- time and status ------------------------------------------------------------------------------


def tick(transaction: Transaction) -> bool:
    """Store the uptime, and end groups whose lease has expired; True if there were any."""
    store_uptime(transaction)
    settled = members.settle_overdue(transaction)
    overdue = groups.expire_overdue(transaction)
    for run in dict.fromkeys(row.run for row in overdue):
        ids = [row.id for row in overdue if row.run == run]
        data: dict[str, Any] = {"message": "their lease is over", "data": {"expired": ids}}
        if names := trajectories.names_of(transaction, ids):
            data["message"] += f"; no trajectory in them got a reward: {', '.join(names[:8])}"
            data["data"]["trajectories"] = names
        events.add_event(transaction, run, EventKind.GROUPS, data)
    return bool(overdue or settled)


def holder_of_room(transaction: Transaction, run: str) -> str | None:
    """The open group whose lease ends first, and what frees its room, in words; None if no group is open."""
    row = groups.next_to_expire(transaction, run)
    if row is None:
        return None
    progress = members.progress_of(transaction, row)
    end = f"give it up (DELETE /completions/{row.id})"
    if progress.name is not None and trajectories.is_of_trajectories(transaction, row.id):
        end = f"close it (close_group({progress.name!r}))"
    seconds = max(0.0, row.lease_end - transaction.uptime)
    return (
        f"group {progress.name or row.id!r} has {progress.rewarded} of {row.members} rewards; post the others, or {end}, or its lease "
        f"ends in {seconds:.0f} s"
    )


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The ledger's facts about a run, for its status."""

    row: RunRow
    step: int
    """Number of trained steps."""
    groups: dict[State, int]
    counters: dict[str, int]
    quarantined: list[PlanRow]
    last_event: int
    unnamed: int
    """Number of groups whose client did not name the draw."""

    @property
    def refusals_by_code(self) -> dict[str, int]:
        """Number of refused requests, by code."""
        prefix = "refused/"
        counts = self.counters.items()
        return {name.removeprefix(prefix): n for name, n in counts if name.startswith(prefix)}


def snapshot_of(transaction: Transaction, run: str) -> RunSnapshot:
    """The facts about a run, all from one transaction."""
    return RunSnapshot(
        runs.read_run(transaction, run),
        steps.next_step(transaction, run),
        groups.count_groups(transaction, run),
        events.counters_of(transaction, run),
        plans.quarantined_plans(transaction, run),
        events.last_event(transaction),
        groups.count_unnamed(transaction, run),
    )
