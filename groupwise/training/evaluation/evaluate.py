"""Evaluation: a policy answers held-out prompts, rewards score the answers, and metrics are computed.

`answer_held_out` needs a sampler and a scorer. It is called by the RL loop before, during and after training, and by `evaluate`, which is
the command `groupwise eval`. Seeds depend only on the prompt and the sample, so two policies can be compared prompt by prompt, and the
random state of a training run does not change. `groupwise.training.evaluation.measures` defines the metrics,
`groupwise.training.evaluation.results` the files.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from groupwise.core.errors import RewardWorkerError, UsageError
from groupwise.core.interruption import gather_all, run_to_end
from groupwise.core.reward_call.request import Scorer
from groupwise.core.types import Group, Sampler, SamplingParams
from groupwise.engine.distributed import prefork
from groupwise.engine.models.tokens import completion_text
from groupwise.runs import checkpoints
from groupwise.runs.advice import advice_before_training
from groupwise.runs.encoding import pack_json
from groupwise.runs.folder import SERVER_LOG, read_config, result_file
from groupwise.runs.records import EvaluationRecord
from groupwise.tasks.contract import Task, check_reward_columns, require
from groupwise.tasks.data.success import check_part
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rollouts.prompts import PromptSet, as_seen, tokenise
from groupwise.tasks.rollouts.rollout_request import RolloutKind, RolloutRequest
from groupwise.tasks.rollouts.score import score_group, transcript
from groupwise.tasks.rollouts.seeds import evaluation_seed
from groupwise.tasks.rollouts.single import Single
from groupwise.training import placement, rollout_builder
from groupwise.training.assembly import prepare
from groupwise.training.config import (
    LoadedConfig,
    RunConfig,
    load_config,
    resolved_values,
    view,
    with_task_schema,
)
from groupwise.training.evaluation.measures import (
    REWARD,
    Success,
    by_prompt,
    is_share,
    measure,
    metric_names,
    rows_of,
)
from groupwise.training.evaluation.policies import PolicyWeights, find_policy
from groupwise.training.evaluation.results import check_writable, result_name, write_result
from groupwise.training.evaluation.statistics import Interval, paired_difference, wilson


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The prompts of an evaluation, and how to answer them."""

    prompts: PromptSet
    params: SamplingParams
    samples_per_prompt: int
    seed: int
    scores_rewards: bool
    """True if the task has rewards; without them, only its own metrics are computed."""
    has_metrics: bool
    rollouts: RolloutKind | None = None
    """The kind of rollouts; None: single completions."""
    success: Success = field(default_factory=Success)
    pass_at_k: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation."""

    policy: str
    metrics: dict[str, float]
    """Metric name -> value: the task's metrics under their own names, `reward`, `pass@k`, lengths, failures."""
    details: dict[str, Any]
    """The complete return value of the task's `compute_metrics`."""
    rows: list[dict[str, Any]]
    """One row per sample; see `groupwise.training.evaluation.measures.rows_of`."""
    path: Path | None = None
    """The result file; None if none was written."""
    other_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sampler settings that differ from those of the evaluated run. A value reads like `64, in the run 16`."""
    advice: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Advice on the answers of an untrained model; see `groupwise.runs.advice.advice_before_training`."""

    @classmethod
    def from_record(cls, record: EvaluationRecord) -> Self:
        """Build the result from a run's record."""
        rows = [dict(row) for row in record.rows]
        return cls(record.policy, dict(record.metrics), {}, rows)

    @property
    def rewards(self) -> dict[int, float]:
        """Index of the example -> mean reward of its samples; prompts without a scored sample are left out."""
        means = measure(REWARD, self.rows)
        assert means is not None
        samples = by_prompt(self.rows)
        return {samples[key][0]["example"]: value for key, value in means.values.items()}

    def interval(self, metric: str) -> Interval:
        """A metric with its 95 % interval over prompts: Wilson's if each prompt counts 0 or 1, otherwise bootstrapped.

        A task's own metric is treated as a fraction of the prompts, such as an accuracy; if its name has the label of a mixture's task, as
        a fraction of that task's prompts. Raises KeyError if that number of prompts is unknown; `metrics_with_interval` leaves such metrics
        out.
        """
        computed = measure(metric, self.rows)
        return (
            computed.interval
            if computed
            else wilson(self.metrics[metric], self._prompt_counts[metric])
        )

    @property
    def prompts(self) -> int:
        """Number of answered prompts; several samples of one prompt are a single observation."""
        return len({row["example"] for row in self.rows})

    @property
    def metrics_with_interval(self) -> list[str]:
        """The metrics that have an interval: reward, success rates, and accuracies from 0 to 1 over a known number of prompts."""
        prompt_counts = self._prompt_counts
        return [
            name
            for name, value in self.metrics.items()
            if name == REWARD
            or is_share(name)
            or (name in prompt_counts and name.endswith("accuracy") and 0 <= value <= 1)
        ]

    @property
    def _prompt_counts(self) -> dict[str, int]:
        """Number of prompts of each of the task's metrics, if known: all prompts, or those of the label in its name."""
        label_counts = Counter(samples[0].get("task") for samples in by_prompt(self.rows).values())
        counts = {**label_counts, "": self.prompts}
        counts_by_metric = {name: counts.get(name.rpartition("/")[0]) for name in self.metrics}
        return {name: count for name, count in counts_by_metric.items() if count is not None}

    @property
    def left_out(self) -> dict[str, int]:
        """The number of prompts that each metric lacks because too few of their samples could be scored."""
        measures = {name: measure(name, self.rows) for name in self.metrics_with_interval}
        return {
            name: computed.left_out
            for name, computed in measures.items()
            if computed and computed.left_out
        }

    @property
    def failures(self) -> dict[str, int]:
        """Number of samples that could not be scored, by reason, most frequent first."""
        reasons = Counter(row["reason"] or row["outcome"] for row in self.rows if _is_failure(row))
        return dict(reasons.most_common())

    @property
    def summary(self) -> dict[str, Any]:
        """Summary for people and `--json`."""
        intervals = {
            name: [interval.low, interval.high]
            for name in self.metrics_with_interval
            for interval in [self.interval(name)]
        }
        return {
            "policy": self.policy,
            "prompts": self.prompts,
            "samples": len(self.rows),
            "metrics": self.metrics,
            "intervals_95": intervals,
            **({"left_out": self.left_out} if self.left_out else {}),
            **({"failures": self.failures} if self.failures else {}),
            **({"other_settings": dict(self.other_settings)} if self.other_settings else {}),
            **({"advice": self.advice} if self.advice else {}),
            **({"results": str(self.path)} if self.path else {}),
        }


def compare_before_after(
    before: EvalResult, after: EvalResult, untrained: EvalResult | None = None
) -> dict[str, Any]:
    """Held-out metrics before and after training, and the paired difference of the rewards with its 95 % interval.

    `untrained` is the result of the base model, if the run started from a warm-up.
    """
    rewards_before, rewards_after = before.rewards, after.rewards
    common_keys = sorted(rewards_before.keys() & rewards_after.keys())
    change = paired_difference(
        [rewards_before[key] for key in common_keys], [rewards_after[key] for key in common_keys]
    )
    results = [before, after, *([untrained] if untrained else [])]
    names = [name for name in after.metrics if all(name in result.metrics for result in results)]
    return {
        "prompts": len(common_keys),
        "change": _interval_as_dict(change),
        "rises": change.low > 0,
        **(
            {"base": {name: _metric_with_interval(untrained, name) for name in names}}
            if untrained
            else {}
        ),
        "before": {name: _metric_with_interval(before, name) for name in names},
        "after": {name: _metric_with_interval(after, name) for name in names},
    }


def _metric_with_interval(result: EvalResult, name: str) -> dict[str, float]:
    """A metric, with its 95 % interval if it has one."""
    if name in result.metrics_with_interval:
        return _interval_as_dict(result.interval(name))
    return {"value": result.metrics[name]}


def _interval_as_dict(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def held_out_prompts(
    config: RunConfig, task: Task, tokenizer: Any, room: int, *, check_only: bool = False
) -> PromptSet:
    """The held-out prompts that an evaluation of this config uses. For `check_only`, see `tokenise`."""
    examples = task.eval_examples(view(config), limit=config.eval.max_prompts)
    tools = rollout_builder.check_rollouts(config, task, examples)
    return tokenise(
        tokenizer,
        examples,
        max_prompt_length=config.data.max_prompt_length,
        room=room,
        where=f"{task.described}: get_eval_dataset",
        tools=tools,
        strict=config.data.strict,
        check_only=check_only,
    )


def held_out(
    config: RunConfig,
    task: Task,
    prompts: PromptSet,
    stops: tuple[int, ...],
    rollouts: RolloutKind | None = None,
) -> HeldOut:
    """The held-out prompts with the config's sampling settings."""
    params = SamplingParams(
        max_tokens=config.eval.max_completion_length or config.sampler.max_completion_length,
        temperature=config.eval.temperature,
        stop_token_ids=stops,
        stop=config.sampler.stop,
        min_tokens=config.sampler.min_completion_length,
        top_k=config.eval.top_k,
        top_p=config.eval.top_p,
        min_p=config.eval.min_p,
    )
    return HeldOut(
        prompts=prompts,
        params=params,
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.training.seed,
        scores_rewards=task.gives_rewards,
        has_metrics=task.has("compute_metrics"),
        rollouts=rollouts,
        success=success_of(config),
        pass_at_k=config.eval.ks,
    )


def success_of(config: RunConfig) -> Success:
    """The criterion for a solved prompt, from the config's `eval` section."""
    return Success(config.eval.success_threshold, config.eval.success_part)


def check_success_part(config: RunConfig, task: Task, rubric: Rubric | None) -> None:
    """Raise TaskError if `eval.success_part` is not a part of the task's reward."""
    # An environment's parts are only known once it returns them.
    if not task.has("get_environment"):
        names = rubric.names if rubric else ()
        check_part("eval.success_part", config.eval.success_part, names, task.described)


async def answer_held_out(
    held_out_set: HeldOut,
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: Any,
    policy: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    trainer: tuple[int, int, float | None] = (0, 1, None),
    on_metrics_failed: Callable[[RewardWorkerError], None] | None = None,
) -> EvalResult:
    """Answer every prompt, score the answers, and compute the metrics, including the task's own.

    `trainer` is passed to reward functions as `trainer_state`: steps done, total steps (1 outside training), and steps per pass over the
    rows. If the task's own metrics fail, they are omitted and `on_metrics_failed` is called; without it, RewardWorkerError is raised.
    """
    total = len(held_out_set.prompts.examples)
    done = 0

    async def answer(index: int) -> Group:
        nonlocal done
        group = await _sample_group(held_out_set, sampler, tokenizer, index)
        if held_out_set.scores_rewards:
            group = await score_group(scorer, group, *trainer)
        done += 1
        on_progress(done, total)
        return group

    groups = await gather_all(answer(index) for index in range(total))
    details: dict[str, Any] = {}
    try:
        if held_out_set.has_metrics:
            samples = [(group.example, rollout) for group in groups for rollout in group.rollouts]
            details = await scorer.compute_metrics(
                [example.prompt for example, _ in samples],
                [transcript(example.prompt, rollout) for example, rollout in samples],
                [{"prompt": example.prompt, **example.columns} for example, _ in samples],
            )
    except RewardWorkerError as error:
        if on_metrics_failed is None:
            raise
        on_metrics_failed(error)
    rows = rows_of(groups, held_out_set.success)
    measures = {name: measure(name, rows) for name in metric_names(rows, held_out_set.pass_at_k)}
    means = {
        name: fmean(computed.values.values()) for name, computed in measures.items() if computed
    }
    failed = sum(_is_failure(row) for row in rows)
    own_metrics = {**means, "rollouts/failed": float(failed)} if failed else means
    # Built-in metrics have priority: a task's metric of the same name is renamed to `task/<name>`.
    # The task's are the numbers in `metrics` of its details or, without that, at their top level.
    task_metrics = {
        f"task/{name}" if name in own_metrics else name: float(value)
        for name, value in details.get("metrics", details).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return EvalResult(policy, {**own_metrics, **task_metrics}, details, rows)


async def _sample_group(
    held_out_set: HeldOut, sampler: Sampler, tokenizer: Any, index: int
) -> Group:
    """Sample all answers to one prompt. Their seeds depend only on prompt and sample, not on the time of the evaluation."""
    rollouts = held_out_set.rollouts or Single(partial(completion_text, tokenizer))
    request = RolloutRequest(
        draw=index,
        example=held_out_set.prompts.examples[index],
        prompt_ids=held_out_set.prompts.prompts[index],
        members=held_out_set.samples_per_prompt,
        seed=partial(evaluation_seed, held_out_set.seed, index),
        params=held_out_set.params,
    )
    return as_seen(tokenizer, await rollouts.sample(sampler, request))


def evaluate(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object = None,
    *,
    overrides: Sequence[str] = (),
    policy: str = "base",
    samples_per_prompt: int | None = None,
    output: Path | None = None,
) -> EvalResult:
    """Evaluate a policy on a task's held-out prompts: the command `groupwise eval`.

    Without a task, the config names the rows and the rewards. `policy` is `base`, an adapter or model folder, a run (`RUN`, `RUN@STEP`), or
    a hub id (`NAME@REVISION`). Raises `UsageError` for wrong arguments.
    """
    return evaluate_policies(
        config,
        task,
        [policy],
        overrides=overrides,
        samples_per_prompt=samples_per_prompt,
        output=output,
    )[0]


def evaluate_policies(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object,
    policies: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    samples_per_prompt: int | None = None,
    output: Path | None = None,
) -> list[EvalResult]:
    """Evaluate several policies in the same way, one after the other; all of them are looked up before the first is loaded."""
    loaded = _load_config(config, overrides, samples_per_prompt, policies, output)
    with prepare.expected_ranks(loaded.config):
        resolved_task, settings, policy_weights = _resolve_request(loaded, task, policies, output)
        results: list[EvalResult] = []
        for weights in policy_weights:
            prepare.expect_ranks(settings)
            results.append(run_to_end(_evaluate_policy(settings, resolved_task, weights, output)))
        return results


def plan_policies(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object,
    policies: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    samples_per_prompt: int | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """The plan of `evaluate_policies`, as far as it is known before a model is loaded. Raises the errors that it would raise until then."""
    loaded = _load_config(config, overrides, samples_per_prompt, policies, output)
    resolved_task, settings, policy_weights = _resolve_request(loaded, task, policies, output)
    prepared = _prepare_evaluation(settings, resolved_task)
    places = [_result_location(resolved_task, weights, settings) for weights in policy_weights]
    return {
        "config": resolved_values(settings),
        "plan": {
            "task": resolved_task.described,
            "policies": [weights.label for weights in policy_weights],
            "prompts": len(prepared.prompts.examples),
            "longest_prompt": prepared.prompts.longest,
            "samples_per_prompt": settings.eval.samples_per_prompt,
            "folders": [
                str(policy.run or policy.folder) for policy in policy_weights if policy.folder
            ],
            "results": [str(output or result_file(folder, name)) for folder, name in places],
        },
    }


def _load_config(
    config: Path | str | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str],
    samples_per_prompt: int | None,
    policies: Sequence[str],
    output: Path | None,
) -> LoadedConfig:
    if output is not None and len(policies) > 1:
        raise UsageError(
            f"--output names one file, but {len(policies)} policies are evaluated. Leave it out: each gets a file of its own."
        )
    if samples_per_prompt is not None:
        overrides = [*overrides, f"eval.samples_per_prompt={samples_per_prompt}"]
    return load_config(config, overrides)


def _resolve_request(
    loaded: LoadedConfig, task: object, policies: Sequence[str], output: Path | None
) -> tuple[Task, RunConfig, list[PolicyWeights]]:
    """The task, the config with the task's own keys, and the policies. Raises UsageError also if results could not be written."""
    resolved_task = rollout_builder.task_of(loaded.config, task)
    require(resolved_task, "eval")
    settings = with_task_schema(loaded, resolved_task.config_schema()).config
    policy_weights = [_find_policy(policy, settings) for policy in policies]
    for weights in policy_weights:
        check_writable(*_result_location(resolved_task, weights, settings), output)
    return resolved_task, settings, policy_weights


def _find_policy(policy: str, config: RunConfig) -> PolicyWeights:
    weights = find_policy(policy, Path(config.run.dir))
    if weights.folder is None:
        if config.model.adapter is not None and config.model.backend != "tinker":
            from groupwise.engine.models.adapters import adapter_folder

            adapter_folder(config.model)
        return replace(weights, label="base" if config.model.adapter is None else "base+adapter")
    return weights


@dataclass(frozen=True, slots=True)
class _PreparedEvaluation:
    """The prompts and the rubric, prepared before a model is loaded."""

    tokenizer: Any
    prompts: PromptSet
    rubric: Rubric | None


def _prepare_evaluation(config: RunConfig, task: Task) -> _PreparedEvaluation:
    tokenizer = prefork.load_tokenizer(config.model)
    prepare.check_stop_tokens(config, tokenizer)
    prompts = held_out_prompts(
        config,
        task,
        tokenizer,
        prepare.prompt_room(config.model, rollout_builder.longest_completion(config)),
    )
    rubric = rollout_builder.task_rubric(config, task, tokenizer)
    check_success_part(config, task, rubric)
    if rubric is not None:
        in_workers = rollout_builder.scores_in_workers(config, task, rubric)
        check_reward_columns(task, rubric, prompts.examples, in_workers=in_workers)
    return _PreparedEvaluation(tokenizer, prompts, rubric)


def evaluate_untrained(loaded: LoadedConfig, task: object) -> EvalResult | None:
    """Evaluate the model before any training, without writing a file.

    None if `eval.before_and_after` is off or the task has no held-out prompts.
    """
    resolved_task = rollout_builder.task_of(loaded.config, task)
    if not loaded.config.eval.before_and_after or not resolved_task.has("get_eval_dataset"):
        return None
    resolved_task, settings, [policy] = _resolve_request(loaded, task, ["base"], None)
    with prepare.expected_ranks(settings):
        return run_to_end(_answer_and_score(settings, resolved_task, policy))[0]


async def _evaluate_policy(
    config: RunConfig, task: Task, policy: PolicyWeights, output: Path | None
) -> EvalResult:
    file = output or result_file(*_result_location(task, policy, config))
    log = file.with_name(f"{file.stem}.{SERVER_LOG}")
    result, fingerprint = await _answer_and_score(config, task, policy, log)
    if policy.run is not None:
        result = replace(result, other_settings=_other_settings(config, read_config(policy.run)))
    elif policy.folder is None:
        result = replace(
            result, advice=advice_before_training(result.rows, resolved_values(config))
        )
    content = {
        **result.summary,
        "fingerprint": fingerprint,
        "task": task.name,
        "config": resolved_values(config),
        "finished_at": time.time(),
        "details": result.details,
        "rows": result.rows,
    }
    return replace(
        result, path=write_result(content, *_result_location(task, policy, config), output)
    )


ANSWER_KEYS = ("max_completion_length", "min_completion_length", "stop", "stop_token_ids")
"""Keys of the section `sampler` that apply to evaluations too."""


def _other_settings(config: RunConfig, run_config: Mapping[str, Any]) -> dict[str, str]:
    """The settings in `ANSWER_KEYS` that differ from those of the evaluated run; empty for a supervised run, which has no sampler."""
    here, there = resolved_values(config)["sampler"], run_config.get("sampler", {})
    return {
        f"sampler.{key}": f"{json.dumps(here[key])}, in the run {json.dumps(there[key])}"
        for key in ANSWER_KEYS
        if key in there and here[key] != there[key]
        if key != "max_completion_length" or config.eval.max_completion_length is None
    }


async def _answer_and_score(
    config: RunConfig, task: Task, policy: PolicyWeights, server_log: Path | None = None
) -> tuple[EvalResult, str]:
    """Evaluate a policy. Returns the result and the fingerprint of the policy's weights. `server_log`: see `start_serving`."""
    from groupwise.training.assembly.start import start_serving

    asked_for = _prepare_evaluation(config, task)
    tokenizer, prompts, rubric = asked_for.tokenizer, asked_for.prompts, asked_for.rubric
    layout = placement.choose_layout(config, prompts.longest)
    scorer = rollout_builder.build_scorer(config, task, tokenizer, rubric)
    rollouts = rollout_builder.build_rollouts(config, task, tokenizer, layout.key_length)
    with checkpoints.reading(policy.folder):
        parts = await start_serving(config, layout, policy.folder, server_log)
    try:
        held_out_set = held_out(config, task, prompts, parts.stop_token_ids, rollouts)
        result = await answer_held_out(held_out_set, parts.sampler, scorer, tokenizer, policy.label)
        columns = {each.index: json.loads(pack_json(each.columns)) for each in prompts.examples}
        rows = [{**row, "columns": columns[row["example"]]} for row in result.rows]
        return replace(result, rows=rows), parts.sampler.fingerprint()
    finally:
        parts.close()
        await rollouts.close()
        await scorer.close()


def _result_location(task: Task, policy: PolicyWeights, config: RunConfig) -> tuple[Path, str]:
    """Folder and name of the result file: in the policy's run or, without a run, next to the folder of runs."""
    return policy.run or Path(config.run.dir).parent, result_name(task.name, policy.label)


def _is_failure(row: Mapping[str, Any]) -> bool:
    return row["outcome"] in ("failed", "timed_out")
