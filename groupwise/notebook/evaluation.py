"""Evaluates the newest weights on the test part."""

from __future__ import annotations

from groupwise.core.errors import UsageError
from groupwise.core.terminal.notebook import Table, one_output, show, shown_while, tell
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import by_own_names, flat
from groupwise.notebook.friendly_errors import is_count, plain_number
from groupwise.notebook.identity import (
    REWARDS,
    collected_names,
    comparable,
    differences,
    note_changes,
    reward_facts,
)
from groupwise.notebook.previous_runs import FACTS
from groupwise.notebook.rewards import RewardList, rewards_of
from groupwise.notebook.session import Session, refuse_other
from groupwise.notebook.task import NotebookTask
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store
from groupwise.training.evaluation.evaluate import evaluate as evaluated


@one_output()
def evaluate(
    config: TrainingConfig,
    session: Session,
    *,
    samples_per_prompt: int | None = None,
    reward_functions: RewardList | None = None,
    extra_reward_functions: RewardList = (),
) -> dict[str, float]:
    """Answer the test part (its first 128 prompts) with the newest weights, or the untrained model; show and return the metrics.

    accuracy, within_10_percent (where answers are numbers) and format_rate are shares of the answers; pass@k that one of k samples is
    right, for k up to `samples_per_prompt`, else the eval.samples_per_prompt of the overrides, else 1. One sample is drawn greedily,
    several at temperature 1, unless the overrides have an eval.temperature. For rubrics, rubric_overlap is the mean reward. `reward` is
    that of the functions given here; if none are given, of those of the last training with this session, or else of the config. If the
    run had others, a note says so.
    """
    refuse_other(config, session)
    core = session.core.config
    samples = core.eval.samples_per_prompt
    if samples_per_prompt is not None:
        samples = plain_number(samples_per_prompt)
        if not is_count(samples):
            raise UsageError(
                f"samples_per_prompt is {samples!r}; it must be a whole number, at least 1, or None."
            )
    sets_temperature = samples > 1 and "eval.temperature" not in dict(flat(config.overrides))
    if reward_functions is None and not extra_reward_functions:
        reward_functions, extra_reward_functions = session.given_rewards
    rewards = rewards_of(config, session.train_dataset, reward_functions, extra_reward_functions)
    facts = reward_facts(rewards)
    policy = "base"
    if session.folder is not None and session.weights is not None:
        policy = session.folder.name  # the run by its name, so the results are written there
        stored_facts = Store.facts(session.folder / RECORD)
        training_facts, evaluation_facts = comparable(
            stored_facts.get(FACTS, {}), facts, collected_names(session.folder)
        )
        if REWARDS in training_facts and differences(training_facts, evaluation_facts):
            # A mean reward cannot be compared with that of other functions.
            counted = [name for name, weight in stored_facts["rewards"].items() if weight]
            tell(
                f"The training had other rewards ({', '.join(counted)}): give the same reward_functions or extra_reward_functions to "
                "compare `reward`."
            )
    task = NotebookTask(
        config, session.dataset, session.train_dataset, session.test_dataset, rewards
    )
    with shown_while("evaluating"), by_own_names(config), note_changes(rewards, facts):
        result = evaluated(
            core,
            task,
            overrides=["eval.temperature=1.0"] if sets_temperature else [],
            policy=policy,
            samples_per_prompt=samples,
        )
    intervals = {name: result.interval(name) for name in result.metrics_with_interval}
    rows = [
        (
            name,
            f"{value:.3f}",
            f"{intervals[name].low:.3f} to {intervals[name].high:.3f}" if name in intervals else "",
        )
        for name, value in result.metrics.items()
    ]
    show(Table(f"{result.policy}: {result.prompts} prompts", rows, ("", "", "95 % interval")))
    return result.metrics
