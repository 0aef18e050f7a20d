"""Serves completions, accepts their rewards, and takes manual steps.

Posts are in the ledger before they are answered. After a post the conductor is nudged; requests that wait for a step read the ledger again
at each beat of the run.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.template_columns import columns_of
from groupwise.api.schemas.training import (
    AnyRewards,
    CloseAnswer,
    CompletionsRequest,
    GroupAnswer,
    RewardAnswer,
    StepAnswer,
    StepRequest,
)
from groupwise.core.interruption import gather_all
from groupwise.core.types import Prompt
from groupwise.core.waiting import wait_at_most
from groupwise.server.engine.engine_protocol import GroupSampleRequest
from groupwise.server.ledger import groups
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations
from groupwise.server.run.active_run import ActiveRun
from groupwise.server.run.engine_errors import await_engine, check_prompt_length, naming_field
from groupwise.tasks.openai.sampling import OrderField, Sampling

T = TypeVar("T")


class CompletionsAndRewards:
    """The ask/post operations on the current run."""

    def __init__(self, active_run: ActiveRun, ledger: Ledger) -> None:
        self._active_run = active_run
        self._config = active_run.config
        self._ledger = ledger

    # --- completions -----------------------------------------------------------------------------

    async def completions(self, request: CompletionsRequest, caller: Caller) -> list[GroupAnswer]:
        """Sample groups, store them, and only then answer."""
        conductor = self._active_run.active()
        _ = conductor.engine  # raises early if the engine is unavailable
        server_hash = conductor.status.opened.tokenizer_hash
        if request.tokenizer_hash not in (None, server_hash):
            message = (
                f"tokenizer_hash is {request.tokenizer_hash!r}, but the server's tokenizer and template have {server_hash!r}. "
                "GET /tokenizer has them."
            )
            raise Refusal("tokenizer_mismatch", message, field="tokenizer_hash")
        for index, prompt in enumerate(request.all_prompts):
            field = _request_field_names(request, index)["prompt"]
            check_prompt_length(prompt, conductor.status.opened, field)
        await self._ledger.do(
            ledger_operations.check_draws, conductor.status.run, request.all_draws
        )
        wait = self._config.completions_wait
        async with conductor.admission.admit(request.all_draws, wait, caller.key_id) as draws:
            sample_requests = [
                _sample_request(request, prompt, draw, conductor.admission.limits.policy_step(draw))
                for prompt, draw in zip(request.all_prompts, draws, strict=True)
            ]
            engine = conductor.engine
            sampled = await await_engine(
                gather_all(
                    naming_field(
                        engine.sample(sample_request), _request_field_names(request, index)
                    )
                    for index, sample_request in enumerate(sample_requests)
                ),
                conductor,
                self._config.sampling_time_limit,
            )
            answers = await self._ledger.do(
                ledger_operations.keep_groups,
                conductor.status.run,
                sampled,
                conductor.request.lease_seconds,
                request,
                caller,
            )
            await conductor.recount()
        return answers

    async def give_up(self, group: str) -> None:
        """End a group that its client no longer needs."""
        await self._ledger.do(groups.give_up, group)
        if self._active_run.conductor is not None:
            await self._active_run.conductor.recount()

    # --- rewards and steps -----------------------------------------------------------------------

    async def rewards(self, request: AnyRewards, caller: Caller) -> list[RewardAnswer]:
        """Store rewards, and only then answer; with `wait`, after the step that learns from them."""
        run = self._active_run.any_run()
        if request.wait and self._active_run.is_manual():
            raise Refusal("manual_mode")
        status = self._active_run.last_status
        steps_done = status.step if status else None  # None: no engine has opened the run yet
        answers = await self._ledger.do(
            ledger_operations.keep_rewards, run.run, steps_done, request, caller
        )
        if self._active_run.conductor is not None:
            self._active_run.conductor.nudge()
        if not request.wait:
            return answers
        return await self.rewards_trained(answers, request.timeout)

    async def close_group(self, name: str, caller: Caller) -> CloseAnswer:
        """Close the open groups of trajectories with this name."""
        run = self._active_run.any_run()
        answer = await self._ledger.do(ledger_operations.close_group, run.run, name, caller)
        if self._active_run.conductor is not None:
            self._active_run.conductor.nudge()
            await self._active_run.conductor.recount()
        return answer

    async def rewards_trained(
        self, answers: Sequence[RewardAnswer], seconds: float
    ) -> list[RewardAnswer]:
        """The answers after the step that learnt from the groups, or as they are when the time is over."""
        return await self._wait_until(
            lambda: self._ledger.do(ledger_operations.after_step, answers),
            lambda current: all(group.status == "trained" for group in current),
            seconds,
        )

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        """Take a step with the named groups, or with the rewarded ones that wait."""
        conductor = self._active_run.active()
        if request.group_ids is None and not self._active_run.is_manual():
            raise Refusal("auto_mode")
        deadline = time.monotonic() + request.timeout
        while True:
            beat = self._active_run.changed.next_event
            answer = await self._ledger.do(
                ledger_operations.keep_plan,
                conductor.status.run,
                request,
                conductor.request.prompts_per_step,
                conductor.request.staleness,
                caller,
            )
            if answer is not None:
                break
            if not await wait_at_most(deadline - time.monotonic(), beat):
                raise Refusal(
                    "too_busy", "another step is still being taken; ask again.", retry_after=2
                )
        conductor.nudge()
        if not request.wait:
            return answer
        return await self.step_taken(answer, deadline - time.monotonic())

    async def step_taken(self, answer: StepAnswer, seconds: float) -> StepAnswer:
        """The answer after the planned step was taken, or as it is when the time is over."""
        return await self._wait_until(
            lambda: self._ledger.do(ledger_operations.step_after, answer),
            lambda current: current.status == "trained",
            seconds,
        )

    async def _wait_until(
        self, read: Callable[[], Awaitable[T]], is_done: Callable[[T], bool], seconds: float
    ) -> T:
        """Call `read` at each beat, and return its result once it is done, the time is over, or no more steps will be taken."""
        deadline = time.monotonic() + seconds
        run = self._active_run.any_run().run
        while True:
            beat = self._active_run.changed.next_event
            result = await read()
            replaced = self._active_run.any_run().run != run
            if is_done(result) or replaced or self._active_run.is_over():
                return result
            if not await wait_at_most(deadline - time.monotonic(), beat):
                return result


def _request_field_names(request: CompletionsRequest, index: int) -> Mapping[OrderField, str]:
    """The request's field names for the fields of a `GroupSampleRequest`."""
    return {
        "prompt": "prompt" if request.prompts is None else f"prompts.{index}",
        "prompt_ids": "prompt_tokens",
        "max_tokens": "max_completion_length",
        "min_tokens": "min_completion_length",
        "temperature": "temperature",
    }


def _sample_request(
    request: CompletionsRequest, prompt: Prompt, draw: int, policy_step: int | None
) -> GroupSampleRequest:
    ids = request.prompt_tokens
    return GroupSampleRequest(
        draw,
        prompt,
        request.num_completions,
        Sampling(
            temperature=request.temperature,
            max_tokens=request.max_completion_length,
            min_tokens=request.min_completion_length,
            stop=None if request.stop is None else tuple(request.stop),
        ),
        None if ids is None else tuple(ids),
        columns_of(request.tools, request.chat_template_kwargs),
        policy_step=policy_step,
    )
