"""Estimates the cost of a run on this machine from a short measurement of sampling and learning.

Completions are sampled to a fixed length with all slots occupied, because a decode step costs the same for any number of occupied slots.
Training is measured on whole groups. Scoring is not included: rewards run concurrently in other processes, and only the task knows
their duration. Nor is an environment's own time; but each of its turns reads the conversation again, and that cost is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.algorithms.registry import make
from groupwise.algorithms.sft import Sft
from groupwise.core.findings import Finding
from groupwise.core.interruption import gather_all
from groupwise.core.types import GroupRequest, Learner, OptimiserParams, Row
from groupwise.tasks.data.order import Order
from groupwise.tasks.rollouts.config import TURNS
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.tasks.rollouts.teacher import LessonSet, teacher_row
from groupwise.training import rollout_builder
from groupwise.training.checks.doctor_engine import Engine
from groupwise.training.config import DEFAULT_ALGORITHM, RunConfig
from groupwise.training.sft_config import SftConfig

BUDGET = 12.0
"""Seconds that one measurement of sampling or of learning may take."""
FEW_TOKENS, MANY_TOKENS = 4, 64
"""Tokens of the first and, at most, of the second measurement. The first shows how many the second can afford."""
READ_TOKENS = 512
"""Longest conversation, in tokens, whose reading (prefill) is measured."""
MIB = 2**20

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds of an RL run."""

    sampling: float
    """Tokens per second with all slots occupied."""
    learning: float
    """Completion tokens per second; the time includes their prompts."""
    publishing: float
    """Seconds of an update, its publication and loading it."""
    tokens: int
    """Length of the measured completions in tokens."""
    reading: float = float("inf")
    """Prompt tokens per second (prefill). Infinite, and not measured, if no conversation is read twice."""


async def measure(
    engine: Engine, config: RunConfig, slots: int, version: int, clock: Clock = time.perf_counter
) -> Speeds:
    """Measure sampling, learning and publishing for a few seconds each."""
    limit = rollout_builder.longest_written(config)
    members = config.training.num_generations
    groups = max(1, min(slots // members, config.training.prompts_per_step))
    _, seconds_for_few = await _sample_rows(engine, groups, members, min(FEW_TOKENS, limit), clock)
    affordable_tokens = (
        int(BUDGET * min(FEW_TOKENS, limit) / seconds_for_few) if seconds_for_few else MANY_TOKENS
    )
    tokens = max(min(FEW_TOKENS, limit), min(affordable_tokens, MANY_TOKENS, limit))
    rows, seconds = await _sample_rows(engine, groups, members, tokens, clock)
    # Forward and backward passes are timed with one group first, then with as many as the time allows.
    pass_seconds = await _time_backward(engine, rows[:members], clock)
    engine.learner.discard()
    affordable_groups = max(1, int(BUDGET / pass_seconds)) if pass_seconds else len(rows)
    batch = rows[: members * affordable_groups]
    pass_seconds = await _time_backward(engine, batch, clock)
    learning_speed = _per_second(sum(len(row.completion_ids) for row in batch), pass_seconds)
    turns = _turns(config)
    reading_speed = await _reading_speed(engine, config, clock) if turns > 1 else float("inf")
    started_at = clock()
    await engine.learner.update(OptimiserParams(learning_rate=config.training.learning_rate))
    await engine.sampler.load(await engine.learner.publish(version))
    return Speeds(
        sampling=_per_second(len(rows) * tokens, seconds),
        learning=learning_speed,
        publishing=clock() - started_at,
        tokens=tokens,
        reading=reading_speed,
    )


def _turns(config: RunConfig) -> int:
    """Largest number of completions in a rollout that are requested with the whole conversation so far."""
    return config.rollout.max_turns if config.rollout.type in TURNS else 1


async def _reading_speed(engine: Engine, config: RunConfig, clock: Clock) -> float:
    """Prompt tokens per second: the time to the first token after a prompt as long as a conversation can become."""
    prompt = engine.prompts[0]
    length = min(READ_TOKENS, len(prompt) + rollout_builder.longest_completion(config) - 1)
    conversation = (prompt * (length // len(prompt) + 1))[:length]
    _, seconds = await _sample_rows(replace(engine, prompts=(conversation,)), 1, 1, 1, clock)
    return _per_second(length, seconds)


async def _sample_rows(
    engine: Engine, groups: int, members: int, tokens: int, clock: Clock
) -> tuple[list[Row], float]:
    """Sample groups of completions of exactly `tokens` tokens. Returns them as rows, with the seconds taken."""
    params = replace(engine.params, max_tokens=tokens, stop_token_ids=(), stop=())
    requests = [
        GroupRequest(
            draw,
            engine.prompts[draw % len(engine.prompts)],
            tuple(member_seed(engine.seed, draw, member) for member in range(members)),
            params,
        )
        for draw in range(groups)
    ]
    started_at = clock()
    completions_by_request = await gather_all(
        engine.sampler.generate(request) for request in requests
    )
    seconds = clock() - started_at
    rows = [
        Row(
            prompt_ids=request.prompt_ids,
            completion_ids=completion.token_ids,
            mask=(1,) * len(completion.token_ids),
            sampling_logprobs=completion.logprobs,
            advantage=(-1.0) ** index,
            scale=1.0,
            temperature=params.temperature,
        )
        for request, completions in zip(requests, completions_by_request, strict=True)
        for index, completion in enumerate(completions)
    ]
    return rows, seconds


async def _time_backward(engine: Engine, rows: Sequence[Row], clock: Clock) -> float:
    algorithm = make(DEFAULT_ALGORITHM, {})
    tokens = float(sum(len(row.completion_ids) for row in rows))
    started_at = clock()
    await engine.learner.forward_backward(rows, algorithm.loss_spec(), {"policy": tokens})
    return clock() - started_at


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else float("inf")


def estimate(
    speeds: Speeds,
    config: RunConfig,
    steps: int | None,
    usual_length: float | None,
    longest_prompt: int = 0,
) -> Finding:
    """Estimate the seconds of a step and of the run.

    `usual_length` is the mean length in tokens of completions that ended by themselves; None if some did not. The usual number of turns
    in an environment is unknown, so there is only an upper bound.
    """
    completions = config.training.prompts_per_step * config.training.num_generations
    turns = _turns(config)
    # The bound is for rollouts that reach every limit; the learner also processes the environment's text.
    written_tokens = rollout_builder.longest_written(config)
    completion_tokens = written_tokens if turns == 1 else rollout_builder.longest_completion(config)
    max_seconds = _step_seconds(
        speeds,
        completions,
        written_tokens,
        completion_tokens,
        (turns - 1) * (longest_prompt + completion_tokens),
    )
    usual_seconds = None
    if usual_length is not None and turns == 1:
        usual_seconds = _step_seconds(speeds, completions, usual_length, usual_length)
    data: dict[str, Any] = {
        "sampling_tokens_per_second": speeds.sampling,
        "learning_tokens_per_second": speeds.learning,
        "publishing_seconds": speeds.publishing,
        "completions_per_step": completions,
        "step_seconds_at_most": max_seconds,
        "step_seconds_usual": usual_seconds,
        "usual_length": usual_length,
        "steps": steps,
    }
    if turns > 1:
        data["reading_tokens_per_second"] = speeds.reading
    if steps is not None:
        data["run_seconds_at_most"] = max_seconds * steps
        data["run_seconds_usual"] = None if usual_seconds is None else usual_seconds * steps
    run = (
        ""
        if steps is None
        else f"; {steps} steps: {duration((usual_seconds or max_seconds) * steps)}"
    )
    step = (
        f"{duration(max_seconds)} at most"
        if usual_seconds is None
        else f"{duration(usual_seconds)} with completions as long as those above ({usual_length:.0f} tokens), {duration(max_seconds)} "
        "at most"
    )
    return Finding(
        "speed",
        "ok",
        f"sampling {speeds.sampling:,.0f} tokens/s, learning {speeds.learning:,.0f} tokens/s",
        f"a step of {completions} {'completions' if turns == 1 else f'rollouts with {turns} turns'} takes {step}{run}; "
        f"{'' if turns == 1 else 'the environment, '}scoring and evaluations come on top",
        data=data,
    )


def _step_seconds(
    speeds: Speeds,
    rollouts: int,
    written_tokens: float,
    trained_tokens: float,
    read_tokens: float = 0.0,
) -> float:
    """Seconds of a step with these numbers of tokens per rollout: written by the policy, trained on, and read again in later turns."""
    rollout_seconds = (
        written_tokens / speeds.sampling
        + trained_tokens / speeds.learning
        + read_tokens / speeds.reading
    )
    return rollouts * rollout_seconds + speeds.publishing


@dataclass(frozen=True, slots=True)
class LessonSpeeds:
    """Measured speeds of a supervised run."""

    learning: float
    """Tokens of rows per second, forward and backward."""
    updating: float
    """Seconds of an update."""


async def measure_lessons(
    learner: Learner, lessons: LessonSet, config: SftConfig, clock: Clock = time.perf_counter
) -> LessonSpeeds:
    """Train on one example, and then on as many of a step as the time allows; the updates are discarded."""
    training, count = config.training, len(lessons.lessons)
    order = Order(count, training.seed, shuffle=config.data.shuffle)
    lessons_drawn = (
        lessons.lessons[order.example(draw)] for draw in range(training.examples_per_step)
    )
    rows = [teacher_row(row) for lesson in lessons_drawn for row in lesson.rows]
    seconds = await _time_supervised_backward(learner, rows[:1], clock)
    learner.discard()
    affordable_rows = max(1, int(BUDGET / seconds)) if seconds else len(rows)
    batch = rows[:affordable_rows]
    seconds = await _time_supervised_backward(learner, batch, clock)
    started_at = clock()
    await learner.update(OptimiserParams(learning_rate=training.learning_rate))
    tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for row in batch)
    return LessonSpeeds(_per_second(tokens, seconds), clock() - started_at)


async def _time_supervised_backward(learner: Learner, rows: Sequence[Row], clock: Clock) -> float:
    tokens = float(sum(sum(row.mask) for row in rows))
    started_at = clock()
    await learner.forward_backward(rows, Sft().loss_spec(), {Sft.name: tokens})
    return clock() - started_at


def estimate_lessons(
    speeds: LessonSpeeds, lessons: LessonSet, config: SftConfig, steps: int
) -> Finding:
    """Estimate the seconds of a step and of a supervised run, with rows of average length and with the longest ones."""
    size = config.training.examples_per_step
    mean_tokens = lessons.tokens / len(lessons.lessons)
    usual_seconds = size * mean_tokens / speeds.learning + speeds.updating
    max_seconds = size * max(mean_tokens, lessons.longest) / speeds.learning + speeds.updating
    return Finding(
        "speed",
        "ok",
        f"learning {speeds.learning:,.0f} tokens/s",
        f"a step of {size} examples takes {duration(usual_seconds)} with usual rows ({mean_tokens:.0f} tokens), "
        f"{duration(max_seconds)} with the longest; {steps} steps: {duration(usual_seconds * steps)}; evaluations come on top",
        data={
            "learning_tokens_per_second": speeds.learning,
            "updating_seconds": speeds.updating,
            "examples_per_step": size,
            "step_seconds_usual": usual_seconds,
            "step_seconds_at_most": max_seconds,
            "steps": steps,
            "run_seconds_usual": usual_seconds * steps,
        },
    )


SPARE_MIB = 300
"""MiB above the plan that need no warning: with a small model, libraries and tokenised prompts take most of the memory."""


def peak(planned_mib: float, peak_bytes: int | None, step: str = "a whole step") -> Finding:
    """Compare the peak memory so far with the plan for `step` (MiB)."""
    if peak_bytes is None:
        meaning = f"this system does not say what processes share; the plan for {step} is {planned_mib:,.0f} MiB"
        return Finding(
            "peak memory", "skipped", meaning, data={"peak_mib": None, "planned_mib": planned_mib}
        )
    peak_mib = peak_bytes / MIB
    data = {"peak_mib": peak_mib, "planned_mib": planned_mib}
    measured = f"{peak_mib:,.0f} MiB at most so far; the plan for {step} is {planned_mib:,.0f} MiB"
    if peak_mib > max(1.2 * planned_mib, planned_mib + SPARE_MIB):
        return Finding(
            "peak memory",
            "warning",
            measured,
            "a run will need more than was planned",
            "leave room: lower training.max_tokens_per_microbatch or sampler.max_num_seqs",
            data,
        )
    return Finding("peak memory", "ok", measured, data=data)


def duration(seconds: float) -> str:
    """A duration as text: `0.4 s`, `12 s`, `3 min`, `2.5 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
