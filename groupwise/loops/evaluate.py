"""Evaluation: held-out prompts answered by a policy, scored by the rewards, measured by the task.

`answer_held_out` does it for whoever has a sampler and a scorer: the RL loop before, after and during training, and `evaluate`,
which is the command `groupwise eval`. Seeds depend on the prompt and the sample alone, so that two policies can be compared
prompt by prompt, and nothing of a training run's randomness is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from groupwise import build
from groupwise.config import LoadedConfig, RunConfig, load_config, resolved, view, with_task_schema
from groupwise.errors import UsageError
from groupwise.loops.awaiting import gather_all, run_to_end
from groupwise.loops.policies import FoundPolicy, find_policy
from groupwise.loops.statistics import Interval, bootstrap_mean, wilson
from groupwise.models.adapters import adapter_folder
from groupwise.models.plan import prompt_room
from groupwise.models.tokenizer import load_tokenizer
from groupwise.models.tokens import completion_text
from groupwise.rewards.scoring import Scorer
from groupwise.rewards.text import as_completion
from groupwise.rollouts.prompts import PromptSet, tokenise
from groupwise.rollouts.score import score_group
from groupwise.rollouts.seeds import evaluation_seed
from groupwise.rollouts.single import sample_group
from groupwise.runs import durable
from groupwise.runs.folder import add_result, result_file
from groupwise.tasks.contract import Task, check_reward_columns, load_task, require
from groupwise.types import Group, Sampler, SamplingParams


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation asks: the prompts and how they are to be answered."""

    prompts: PromptSet
    params: SamplingParams
    samples_per_prompt: int
    seed: int
    scores_rewards: bool
    """Whether the task has rewards; without them only its own metrics are computed."""
    has_metrics: bool


@dataclass(frozen=True, slots=True)
class EvalResult:
    """How a policy did."""

    policy: str
    metrics: dict[str, float]
    """Flat numbers: the task's metrics under their own names, `reward`, lengths, failures."""
    details: dict[str, Any]
    """All that the task's `compute_metrics` returned."""
    rows: list[dict[str, Any]]
    """One for each sample: prompt, completion, reward, parts, outcome."""
    path: Path | None = None
    """Where the rows were written."""

    @property
    def rewards(self) -> dict[int, float]:
        """Mean reward of each prompt by its example; prompts without a scored sample are left out."""
        by_prompt: dict[int, list[float]] = {}
        for row in self.rows:
            if row["reward"] is not None:
                by_prompt.setdefault(row["example"], []).append(row["reward"])
        return {example: fmean(values) for example, values in by_prompt.items()}

    def interval(self, metric: str) -> Interval:
        """A metric with its 95 % interval: bootstrapped for `reward`, Wilson's for shares such as accuracy."""
        if metric == "reward":
            return bootstrap_mean(list(self.rewards.values()))
        return wilson(self.metrics[metric], self.prompts)

    @property
    def prompts(self) -> int:
        """How many were answered; samples of one prompt are no observations of their own."""
        return len({row["example"] for row in self.rows})

    @property
    def judged(self) -> list[str]:
        """The metrics that have an interval: the reward, and accuracies where they are shares from 0 to 1."""
        return [
            name
            for name, value in self.metrics.items()
            if name == "reward" or (name.endswith("accuracy") and 0 <= value <= 1)
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """For people and `--json`."""
        intervals = {
            name: [interval.low, interval.high]
            for name in self.judged
            for interval in [self.interval(name)]
        }
        return {
            "policy": self.policy,
            "prompts": self.prompts,
            "samples": len(self.rows),
            "metrics": self.metrics,
            "intervals_95": intervals,
            **({"results": str(self.path)} if self.path else {}),
        }


def held_out_prompts(config: RunConfig, task: Task, tokenizer: Any, room: int) -> PromptSet:
    """The held-out prompts that an evaluation of this config uses."""
    examples = task.eval_examples(view(config), limit=config.eval.max_prompts)
    return tokenise(
        tokenizer,
        examples,
        max_prompt_length=config.data.max_prompt_length,
        room=room,
        where=f"{task.described}: get_eval_dataset",
    )


def held_out(config: RunConfig, task: Task, prompts: PromptSet, stops: tuple[int, ...]) -> HeldOut:
    """How the config wants held-out prompts answered."""
    params = SamplingParams(
        max_tokens=config.eval.max_completion_length or config.sampler.max_completion_length,
        temperature=config.eval.temperature,
        stop_token_ids=stops,
        stop=config.sampler.stop,
    )
    return HeldOut(
        prompts=prompts,
        params=params,
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.training.seed,
        scores_rewards=task.has("get_reward_funcs"),
        has_metrics=task.has("compute_metrics"),
    )


async def answer_held_out(
    asked: HeldOut,
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: Any,
    policy: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    trainer: tuple[int, int] = (0, 1),
) -> EvalResult:
    """Answer every prompt, score the answers, and let the task measure them.

    `trainer` is what reward functions see as `trainer_state`: steps done, and steps in all (1 where nothing is trained).
    """
    total = len(asked.prompts.examples)
    done = 0

    async def answer(index: int) -> Group:
        nonlocal done
        group = await sample_group(
            sampler,
            asked.prompts.examples[index],
            index,
            asked.prompts.prompts[index],
            [
                evaluation_seed(asked.seed, index, member)
                for member in range(asked.samples_per_prompt)
            ],
            asked.params,
            lambda ids: completion_text(tokenizer, ids),
        )
        if asked.scores_rewards:
            group = await score_group(scorer, group, *trainer)
        done += 1
        on_progress(done, total)
        return group

    groups = await gather_all(answer(index) for index in range(total))
    details = await _task_metrics(asked, scorer, groups) if asked.has_metrics else {}
    return EvalResult(
        policy, _with_own(_numbers(details), _measured(groups)), details, _rows(groups)
    )


def evaluate(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object,
    *,
    overrides: Sequence[str] = (),
    policy: str = "base",
    samples_per_prompt: int | None = None,
    output: Path | None = None,
) -> EvalResult:
    """Evaluate a policy on a task's held-out prompts: the command `groupwise eval`.

    `policy` is `base`, an adapter or model folder, a run (`RUN`, `RUN@STEP`), or a hub id
    (`NAME@REVISION`). Raises `UsageError` for what was given wrongly.
    """
    loaded = load_config(config, overrides)
    found = load_task(task)
    require(found, "eval")
    loaded = _prepared(loaded, found, samples_per_prompt)
    weights = find_policy(policy, Path(loaded.config.run.dir))
    if weights.folder is None:
        adapter_folder(loaded.config.model)
        weights = replace(weights, label=build.serving_label(loaded.config))
    _refuse_existing(output)
    durable.check_can_write(output or _result_file(found, weights, loaded.config))
    return run_to_end(_evaluate(loaded.config, found, weights, output))


def _prepared(loaded: LoadedConfig, task: Task, samples_per_prompt: int | None) -> LoadedConfig:
    schema = task.config_schema()
    if schema is not None:
        loaded = with_task_schema(loaded, schema)
    if samples_per_prompt is None:
        return loaded
    return replace(
        loaded,
        config=load_config(
            resolved(loaded.config), [f"eval.samples_per_prompt={samples_per_prompt}"]
        ).config,
    )


async def _evaluate(
    config: RunConfig, task: Task, policy: FoundPolicy, output: Path | None
) -> EvalResult:
    tokenizer = load_tokenizer(config.model)
    prompts = held_out_prompts(
        config, task, tokenizer, prompt_room(config.model, build.longest_completion(config))
    )
    rubric = build.task_rubric(config, task, tokenizer)
    if rubric is not None:
        in_workers = build.scores_in_workers(config, task, rubric)
        check_reward_columns(task, rubric, prompts.examples, in_workers=in_workers)
    layout = build.choose_layout(config, prompts.longest)
    sampler, stops = build.serving_sampler(config, layout, policy.folder)
    scorer = build.build_scorer(config, task, tokenizer, rubric)
    try:
        asked = held_out(config, task, prompts, stops)
        result = await answer_held_out(asked, sampler, scorer, tokenizer, policy.label)
    finally:
        await scorer.close()
    return replace(result, path=_write(result, task, policy, Path(config.run.dir), output))


def _write(
    result: EvalResult, task: Task, policy: FoundPolicy, runs_dir: Path, output: Path | None
) -> Path:
    """Into `output`, or the `results` folder of the policy's run, or the one beside the runs."""
    content = {**result.summary, "task": task.name, "details": result.details, "rows": result.rows}
    if output is None:
        return add_result(policy.run or runs_dir.parent, _result_name(task, policy), content)
    _refuse_existing(output)
    with durable.explained(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    durable.write_json(output, content)
    return output


def _result_file(task: Task, policy: FoundPolicy, config: RunConfig) -> Path:
    return result_file(policy.run or Path(config.run.dir).parent, _result_name(task, policy))


def _result_name(task: Task, policy: FoundPolicy) -> str:
    return f"{task.name}-{policy.label.strip('./').replace('/', '_')}"


def _refuse_existing(output: Path | None) -> None:
    if output is not None and output.exists():
        raise UsageError(
            f"{output} exists, and results are never overwritten. Give another --output."
        )


async def _task_metrics(asked: HeldOut, scorer: Scorer, groups: Sequence[Group]) -> dict[str, Any]:
    samples = [(group.example, rollout) for group in groups for rollout in group.rollouts]
    return await scorer.compute_metrics(
        [example.prompt for example, _ in samples],
        [as_completion(example.prompt, rollout.completion) for example, rollout in samples],
        [{"prompt": example.prompt, **example.columns} for example, _ in samples],
    )


def _measured(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    measured = {
        "completions/mean_length": fmean(len(rollout.completion_ids) for rollout in rollouts),
        "completions/clipped_ratio": fmean(rollout.truncated for rollout in rollouts),
    }
    if rewards:
        measured = {"reward": fmean(rewards), **measured}
    failed = sum(rollout.outcome in ("failed", "timed_out") for rollout in rollouts)
    return {**measured, "rollouts/failed": float(failed)} if failed else measured


def _with_own(theirs: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """Ours first; a metric of the task that has the name of one of ours is kept as `task/<name>`."""
    return {
        **own,
        **{f"task/{name}" if name in own else name: value for name, value in theirs.items()},
    }


def _numbers(details: Mapping[str, Any]) -> dict[str, float]:
    """The task's numbers: its `metrics` sub-dict, or else all numbers at the top."""
    chosen = details.get("metrics", details)
    return {
        name: float(value)
        for name, value in chosen.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "example": group.example.index,
            "sample": rollout.member,
            "prompt": group.example.prompt,
            "completion": rollout.completion,
            "reward": rollout.reward,
            "parts": {part.name: part.value for part in rollout.parts},
            "outcome": rollout.outcome,
            "reason": rollout.reason,
            "finish_reason": rollout.segments[-1].finish_reason,
            "tokens": len(rollout.completion_ids),
        }
        for group in groups
        for rollout in group.rollouts
    ]
