"""The command `groupwise check`: tests a task and its rewards before training, without a GPU and without loading a model.

    hooks and data          can be called and suffice for a command; sizes, columns, lengths, duplicates, overlap
    the first prompts       exactly as the model will see them
    rewards                 in the same workers as in training, on gold answers, on wrong ones, and on given completions
    an algorithm's file     keeps what all algorithms guarantee (`check_algorithm`); only this needs torch

A reward that crashes, never varies, or gives gold less than a wrong completion is a problem; a suspicious result is a warning. A file,
hook or config that is unusable raises `UsageError`, as in `groupwise rl`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from groupwise.algorithms.custom import is_custom
from groupwise.core.errors import EnvironmentWorkerError, RewardWorkerError, TaskError, UsageError
from groupwise.core.extras import not_installed
from groupwise.core.findings import Finding, Findings, OnFinding, Report
from groupwise.core.interruption import run_to_end
from groupwise.core.reward_call.request import Scorer
from groupwise.core.reward_call.text import as_completion
from groupwise.core.settings.view import View
from groupwise.core.types import Example
from groupwise.engine.models.tokens import completion_text, render_prompt, text_ids
from groupwise.tasks.configured import find_task
from groupwise.tasks.contract import Task, check_reward_columns, load_task
from groupwise.tasks.data.overlap import same_prompt, same_row
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.tools import Schema
from groupwise.training import placement, rollout_builder
from groupwise.training.assembly.prepare import build_algorithm
from groupwise.training.checks.check_algorithm import check_algorithm
from groupwise.training.checks.check_data import (
    check_dataset,
    check_hooks,
    check_left_out,
    check_overlap,
    check_teacher,
    first_prompts,
    prompt_lengths,
    spread,
)
from groupwise.training.checks.check_environment import (
    check_environment,
    games_table,
    judge_games,
    play,
)
from groupwise.training.checks.check_given import (
    CompletionGroup,
    judge_completions,
    load_completions,
    score_completions,
)
from groupwise.training.checks.check_gold import (
    GOLD_COMPLETION,
    Gold,
    GoldByLabel,
    gold_column,
    gold_columns,
)
from groupwise.training.checks.check_rewards import (
    ALONE_ROWS,
    Trial,
    Verdict,
    find_layout,
    judge_alone,
    judge_cheap,
    judge_failures,
    judge_forms,
    judge_latency,
    judge_order,
    judge_parts,
    judge_repetition,
    judge_spread,
    table,
    try_cases,
)
from groupwise.training.config import (
    RunConfig,
    load_config,
    resolved_values,
    view,
    with_task_schema,
)
from groupwise.training.evaluation.evaluate import success_of
from groupwise.training.sft_config import SftConfig, config_of_warm_up

ROWS = 16
"""Default number of rows on which rewards are tried."""
CHARACTERS_PER_TOKEN = 4
"""Usual length of a token of English text."""
SHOWN_PROMPTS = 2
SHOWN_LAYOUTS = 4


@dataclass(frozen=True, slots=True)
class Subject:
    """A task with everything that was loaded for it."""

    config: RunConfig
    task: Task
    tokenizer: Any
    """None if the tokenizer's libraries are not installed."""
    own_model: bool
    """False if no config was given: the tokenizer is then that of the model `tiny`, and lengths in tokens mean nothing."""
    train: list[Example]
    held_out: list[Example]
    rubric: Rubric | None
    tools: tuple[Schema, ...] = ()
    """The schemas of the tools that are described in chat prompts."""
    warm_up: tuple[Task, SftConfig] | None = None
    """Task and config of the supervised run that the config's `warm_up` asks for."""

    @property
    def examples(self) -> list[Example]:
        """The examples on which rewards are tried."""
        return self.train or self.held_out


def check(
    task: object = None,
    config: Path | str | Mapping[str, Any] | RunConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    completions: str | None = None,
    rows: int = ROWS,
    on_finding: OnFinding | None = None,
) -> Report:
    """Examine a task and its rewards: the command `groupwise check`.

    Without a task, the config's is used. `completions` is a JSONL file or a run whose rollouts are scored too; `rows` is the number of
    examples on which rewards are tried. Without a config, that of the model `tiny` is used. Raises `UsageError` if something is unusable.
    """
    findings = Findings(on_finding)
    subject = _load_subject(task, config, overrides, findings)
    room = _prompt_room(subject)
    length_tokenizer = subject.tokenizer if subject.own_model else None
    key_of = same_row if subject.task.played_by else same_prompt
    for name, examples in (("training data", subject.train), ("held-out data", subject.held_out)):
        if examples:
            findings.extend(
                check_dataset(name, examples, length_tokenizer, room, key_of, subject.tools)
            )
    if subject.task.gives_rewards and not subject.task.has("get_rl_dataset"):
        findings.add(
            Finding(
                "training data",
                "warning",
                subject.task.missing("get_rl_dataset", "rl"),
                "there are rewards, but no rows to train on",
                "add the hook, unless the task is only for evaluations",
            )
        )
    findings.extend(check_left_out(subject.task.accounts))
    supervised = _check_supervised(subject, findings)
    if subject.held_out and (subject.train or supervised):
        findings.add(check_overlap(subject.train, subject.held_out, key_of, supervised))
    algorithm = subject.config.algorithm
    if is_custom(algorithm.type):
        findings.extend(check_algorithm(build_algorithm(subject.config), algorithm.type))
    details: dict[str, Any] = {
        "prompts": _render_prompts(subject),
        "prompts_rendered_by": subject.config.model.name if subject.tokenizer else None,
    }
    if completions is None:
        given_groups = []
    else:
        runs_dir = Path(subject.config.run.dir)
        given_groups = load_completions(completions, subject.train, subject.held_out, runs_dir)
    if subject.examples:
        if subject.own_model:
            rendering = Finding(
                "rendering", "ok", f"by the tokenizer of {subject.config.model.name}"
            )
        elif subject.tokenizer is None:
            rendering = Finding(
                "rendering",
                "skipped",
                "no tokenizer is installed here, so prompts are shown as the task gives them",
                remedy="install groupwise[train] and give --config",
            )
        else:
            rendering = Finding(
                "rendering",
                "ok",
                "by the tokenizer of tiny, because no config was given; lengths are in characters",
                "--config C.yaml shows prompts and lengths as your own model has them",
            )
        findings.add(rendering)
        details["table"] = run_to_end(_try_everything(subject, rows, given_groups, findings))
    return Report(subject.task.described, tuple(findings.found), "check_failed", details)


def _load_subject(
    task: object,
    config: Path | str | Mapping[str, Any] | RunConfig | None,
    overrides: Sequence[str],
    findings: Findings,
) -> Subject:
    """Load everything that can be loaded. Broken parts raise the same errors as in training."""
    given_task = None if task is None else load_task(task)
    if config is None:
        played_by = None if given_task is None else given_task.played_by
        rollout = {} if played_by is None else {"type": played_by}
        loaded = load_config({"model": {"name": "tiny"}, "rollout": rollout}, overrides)
    else:
        loaded = load_config(config, overrides)
    resolved_task = rollout_builder.task_of(loaded.config, given_task)
    lacks_rewards = given_task is not None and not given_task.has("get_reward_funcs")
    from_config = lacks_rewards and loaded.config.rewards.names_rewards
    findings.add(check_hooks(resolved_task, has_configured_rewards=from_config))
    loaded = with_task_schema(loaded, resolved_task.config_schema())
    settings = loaded.config
    config_view = view(settings)
    train = (
        resolved_task.rl_examples(config_view, limit=_draw_limit(settings))
        if resolved_task.has("get_rl_dataset")
        else []
    )
    held_out = (
        resolved_task.eval_examples(config_view, limit=settings.eval.max_prompts)
        if resolved_task.has("get_eval_dataset")
        else []
    )
    if importlib.util.find_spec("transformers") is None:
        if config is not None:
            raise UsageError(
                not_installed("The tokenizer of --config", "train", "transformers")
                + " Or leave --config out."
            )
        tokenizer = None
    else:
        from groupwise.engine.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(settings.model)
    rubric = rollout_builder.task_rubric(settings, resolved_task, tokenizer)
    tools = rollout_builder.check_rollouts(settings, resolved_task, train or held_out)
    if rubric is not None:
        in_workers = rollout_builder.scores_in_workers(settings, resolved_task, rubric)
        findings.extend(filter(None, [_judge_machine(rubric)]))
        for examples in (train, held_out):
            check_reward_columns(resolved_task, rubric, examples, in_workers=in_workers)
    warm_up = None
    if settings.warm_up is not None:
        sft_config = config_of_warm_up(loaded).config
        warm_up = find_task(given_task, View(resolved_values(sft_config))), sft_config
    return Subject(
        settings,
        resolved_task,
        tokenizer,
        config is not None,
        train,
        held_out,
        rubric,
        tools,
        warm_up,
    )


def _check_supervised(subject: Subject, findings: Findings) -> list[Example]:
    """Check the supervised rows as the config's `warm_up` reads them. Returns those whose prompts can be compared with held-out ones."""
    if subject.warm_up is None:
        task, config_view = subject.task, view(subject.config)
        limit, text_field = _draw_limit(subject.config), "text"
    else:
        task, config = subject.warm_up
        steps = config.training.max_steps
        limit = None if steps is None else steps * config.training.examples_per_step
        config_view, text_field = View(resolved_values(config)), config.data.dataset_text_field
    found, examples = check_teacher(task, config_view, subject.tokenizer, limit, text_field)
    findings.extend(found)
    # Rows of an environment may share a prompt and differ in their columns, which supervised rows lack.
    return [] if subject.task.played_by else [example for example in examples if example.prompt]


def _judge_machine(rubric: Rubric) -> Finding | None:
    """Report the rewards' complaints about this machine. At most a warning, because training may run on another machine."""
    problems = "; ".join(rubric.check_machine(refuse=False))
    try:
        rubric.check_machine()
    except TaskError:
        return Finding("machine", "warning", problems, "a training would not begin here")
    return Finding("machine", "ok", problems) if problems else None


def _draw_limit(config: RunConfig) -> int | None:
    """The number of examples that training reads from a stream of unknown length; None if unlimited."""
    steps = config.training.max_steps
    return None if steps is None else steps * config.training.prompts_per_step


def _prompt_room(subject: Subject) -> int | None:
    """Number of tokens that the model leaves for a prompt; None if the model is not known or the config's limit is lower."""
    # The service reports this when a run asks it.
    if not subject.own_model or subject.config.model.backend == "tinker":
        return None
    from groupwise.engine.models.plan import prompt_room

    room = prompt_room(subject.config.model, rollout_builder.longest_completion(subject.config))
    limit = subject.config.data.max_prompt_length
    return None if limit is not None and limit <= room else room


def _render_prompts(subject: Subject) -> list[str]:
    """Render the first prompts, with an environment's opening. If the environment fails (another check reports it), the rows' own."""
    tokenizer, examples = subject.tokenizer, subject.examples
    if tokenizer is not None and examples and subject.task.has("get_environment"):
        openings = rollout_builder.first_prompts(
            subject.config, subject.task, tokenizer, examples[:SHOWN_PROMPTS]
        )
        with suppress(TaskError, EnvironmentWorkerError):
            return [render_prompt(tokenizer, ids) for ids in run_to_end(openings)]
    return first_prompts(examples, tokenizer, SHOWN_PROMPTS, subject.tools)


async def _try_everything(
    subject: Subject, rows: int, given_groups: Sequence[CompletionGroup], findings: Findings
) -> list[dict[str, Any]]:
    """Try the environment and the rewards, as far as the task has them. Returns the table of earned rewards."""
    if subject.task.played_by is not None:
        starts = True
        # An environment that plays by itself is tried only by playing.
        if subject.task.has("get_environment"):
            finding = await check_environment(subject.task, subject.config, subject.examples[0])
            findings.add(finding)
            starts = finding.level == "ok"
        if subject.rubric is None and subject.tokenizer is not None and starts:
            config, tokenizer, examples = subject.config, subject.tokenizer, subject.examples
            room = None
            if subject.own_model:
                lengths, _ = prompt_lengths(examples, tokenizer, subject.tools)
                room = placement.key_length(config, max(lengths))
            try:
                games = await play(config, subject.task, tokenizer, examples, room)
            except EnvironmentWorkerError as error:
                findings.add(
                    Finding(
                        "games",
                        "problem",
                        str(error),
                        "a training would stop here",
                        "make it faster",
                    )
                )
                return []
            findings.extend(judge_games(games))
            return games_table(games)
    if subject.rubric is not None:
        return await _try_rewards(subject, rows, given_groups, findings)
    if subject.task.has("get_rl_dataset") and not subject.task.gives_rewards:
        missing = subject.task.missing("get_reward_funcs", "rl")
        remedy = "add the hook, or name rewards in the config (rewards.reward_funcs)"
        findings.add(Finding("rewards", "warning", missing, remedy=remedy))
    else:
        findings.add(Finding("rewards", "skipped", "the task has no get_reward_funcs"))
    return []


# --- rewards -------------------------------------------------------------------------------------


async def _try_rewards(
    subject: Subject, rows: int, given_groups: Sequence[CompletionGroup], findings: Findings
) -> list[dict[str, Any]]:
    """Score completions of all kinds, report the findings, and return the table of earned rewards."""
    config = subject.config
    scorer = rollout_builder.build_scorer(config, subject.task, subject.tokenizer, subject.rubric)
    trial = Trial(scorer, subject.tokenizer)
    try:
        await scorer.start()
        # The same number of examples of every label.
        examples_by_label = _group_by_label(subject.rubric, subject.examples)
        rows_per_label = -(-rows // len(examples_by_label))
        examples = [
            example
            for label_examples in examples_by_label.values()
            for example in spread(label_examples, rows_per_label)
        ]
        gold = await _find_gold(trial, subject, examples, findings)
        verdicts = await _try_known(subject, trial, examples, gold, findings)
        if given_groups:
            answers = await score_completions(trial, given_groups)
            findings.extend(judge_completions(given_groups, answers, success_of(subject.config)))
            verdicts += [verdict for group in answers for verdict in group]
        if subject.task.has("compute_metrics"):
            findings.add(await _metrics_on_gold(subject, scorer, rows, gold))
    except RewardWorkerError as error:
        findings.add(
            Finding(
                "rewards",
                "problem",
                str(error),
                "a training would stop here",
                "fix what the message names",
            )
        )
        return []
    finally:
        await scorer.close()
    return table(verdicts)


async def _try_known(
    subject: Subject,
    trial: Trial,
    examples: Sequence[Example],
    gold: Gold | None,
    findings: Findings,
) -> list[Verdict]:
    """Score gold and wrong completions, and report the findings that follow from their rewards."""
    config, rubric = subject.config, subject.rubric
    assert rubric is not None
    verdicts_by_example = await try_cases(trial, examples, gold, cache(partial(_cut, subject)))
    verdicts = [verdict for row in verdicts_by_example for verdict in row]
    chat = any(not isinstance(example.prompt, str) for example in examples)
    findings.extend(judge_failures(verdicts, chat=chat))
    findings.add(judge_spread(verdicts_by_example, gold))
    if gold is not None:
        findings.add(judge_order(verdicts_by_example, gold, chat=chat))
        findings.extend(judge_forms(verdicts_by_example))
        findings.extend(judge_cheap(verdicts_by_example))
    findings.extend(judge_parts(verdicts, with_gold=gold is not None))
    group = config.training.num_generations
    findings.add(judge_latency(trial, config.rewards.time_limit, group))
    findings.extend(await _score_again(trial, rubric, examples, verdicts_by_example))
    return verdicts


def _cut(subject: Subject, text: str) -> str:
    """Cut a text to the longest completion that training allows. If no model was given, a token counts as four characters."""
    limit = rollout_builder.longest_written(subject.config)
    if not subject.own_model:
        return text[: CHARACTERS_PER_TOKEN * limit]
    ids = text_ids(subject.tokenizer, text)
    return text if len(ids) <= limit else completion_text(subject.tokenizer, ids[:limit])


def _group_by_label(
    rubric: Rubric | None, examples: Sequence[Example]
) -> dict[str | None, list[Example]]:
    """Group the examples by the label that decides their rewards; one group if all have the same rewards."""
    if not isinstance(rubric, Router):
        return {None: list(examples)}
    by_label: dict[str | None, list[Example]] = {}
    for example in examples:
        by_label.setdefault(rubric.label_of(example.columns), []).append(example)
    return by_label


async def _find_gold(
    trial: Trial, subject: Subject, examples: Sequence[Example], findings: Findings
) -> Gold | None:
    """Find the source of gold completions for each label, and report it."""
    labels = _group_by_label(subject.rubric, examples)
    gold_by_label = {
        label: await _find_gold_of(
            trial, subject, label_examples, f" of {label}" if label else "", findings
        )
        for label, label_examples in labels.items()
    }
    golds = {label: gold for label, gold in gold_by_label.items() if gold is not None}
    if isinstance(subject.rubric, Router) and golds:
        return GoldByLabel.of(golds, subject.rubric.label_of)
    return next(iter(golds.values()), None)


async def _find_gold_of(
    trial: Trial, subject: Subject, examples: Sequence[Example], suffix: str, findings: Findings
) -> Gold | None:
    """The gold of rows with the same rewards; `suffix` names their label in the report."""
    answer_column = subject.config.rewards.answer_column
    column = gold_column(examples, answer_column)
    if column is None:
        findings.add(
            Finding(
                f"gold answers{suffix}",
                "skipped",
                f"there is no column {', '.join(gold_columns(answer_column))}",
                "whether a right completion earns most could not be checked",
                "add a column `gold_completion` with what a perfect model would write, or check --completions of your own",
            )
        )
        return None
    if column == GOLD_COMPLETION:
        findings.add(
            Finding(f"gold answers{suffix}", "ok", f"column `{column}`, whole completions")
        )
        return Gold(column, None)
    layout, means, is_read = await find_layout(trial, examples, column)
    ranking = sorted(means.items(), key=lambda pair: -pair[1])[:SHOWN_LAYOUTS]
    earned = "; ".join(f"{name} {mean:.4g}" for name, mean in ranking)
    gold = Gold(column, layout, is_read=is_read)
    findings.add(
        Finding(
            f"gold answers{suffix}",
            "ok",
            gold.description,
            f"this way to write an answer earns most; mean rewards: {earned}" if means else "",
            data={"column": column, "layout": layout, "rewards": means},
        )
    )
    return gold


async def _score_again(
    trial: Trial,
    rubric: Rubric,
    examples: Sequence[Example],
    verdicts_by_example: Sequence[Sequence[Verdict]],
) -> list[Finding]:
    """Repeat the same calls, then score some completions one by one, to see if rewards are deterministic and independent."""
    if rubric.stateful:
        return _skip_repetition("a reward says that it keeps state, so calls may differ")
    if trial.given_up:
        return _skip_repetition(trial.given_up)
    pairs = list(zip(examples, verdicts_by_example, strict=True))
    first_scores = [verdict.member for _, verdicts in pairs for verdict in verdicts]
    second_scores = [
        member
        for example, verdicts in pairs
        for member in await trial.score(example, [verdict.text for verdict in verdicts])
    ]
    findings = [judge_repetition(first_scores, second_scores)]
    if trial.given_up:
        return [*findings, Finding("independence", "skipped", trial.given_up)]
    relative_names = [
        name
        for name, function in zip(rubric.names, rubric.functions, strict=True)
        if getattr(function, "relative", False) is True
    ]
    if relative_names:
        meaning = f"{', '.join(f'`{name}`' for name in relative_names)} compares the members of a group, as it says"
        return [*findings, Finding("independence", "ok", meaning)]
    few_verdicts = [verdict for _, verdicts in pairs[:ALONE_ROWS] for verdict in verdicts]
    single_scores = [
        (await trial.score(example, [verdict.text]))[0]
        for example, verdicts in pairs[:ALONE_ROWS]
        for verdict in verdicts
    ]
    return [*findings, judge_alone([verdict.member for verdict in few_verdicts], single_scores)]


def _skip_repetition(why: str) -> list[Finding]:
    return [Finding(name, "skipped", why) for name in ("determinism", "independence")]


async def _metrics_on_gold(
    subject: Subject, scorer: Scorer, rows: int, gold: Gold | None
) -> Finding:
    """Call `compute_metrics` on gold completions (empty ones without gold), and report whether it works."""
    examples = spread(subject.held_out or subject.train, rows)
    texts = [next(iter(gold.texts(example)), "") if gold else "" for example in examples]
    kind = "gold completions" if any(texts) else "empty completions"
    try:
        details = await scorer.compute_metrics(
            [example.prompt for example in examples],
            [as_completion(row.prompt, text) for row, text in zip(examples, texts, strict=True)],
            [{"prompt": example.prompt, **example.columns} for example in examples],
        )
    except RewardWorkerError as error:
        meaning = "an evaluation would have no metrics"
        return Finding("compute_metrics", "problem", str(error), meaning, "fix compute_metrics")
    numbers = {
        name: float(value)
        for name, value in details.get("metrics", details).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    summary = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()) or "no numbers"
    return Finding("compute_metrics", "ok", f"on {len(examples)} {kind}: {summary}", data=numbers)
