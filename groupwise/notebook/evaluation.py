"""How well the newest weights do on the test part."""

from __future__ import annotations

from groupwise.display.notebook import Table, show
from groupwise.evaluation.evaluate import evaluate as evaluated
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.rewards import Given, rewards_of
from groupwise.notebook.session import Session, refuse_other
from groupwise.notebook.task import NotebookTask


def _policy(session: Session) -> str:
    """The run by its name, so that the results are written there."""
    if session.folder is None or session.weights is None:
        return "base"
    return session.folder.name


def evaluate(
    config: TrainingConfig,
    session: Session,
    *,
    samples_per_prompt: int = 1,
    reward_functions: Given | None = None,
    extra_reward_functions: Given = (),
) -> dict[str, float]:
    """Answer the test part (its first 128 prompts) with the newest weights, or the model as it is; show what is measured, and return it.

    accuracy, within_10_percent (where answers are numbers) and format_rate are shares of the answers; pass@k that one of k samples is
    right, for k up to `samples_per_prompt`, which are drawn at temperature 1 (one sample is drawn greedily); for rubrics, rubric_overlap
    is the mean reward.
    """
    refuse_other(config, session)
    rewards = rewards_of(config, session.train_dataset, reward_functions, extra_reward_functions)
    task = NotebookTask(config, session.train_dataset, session.test_dataset, rewards)
    result = evaluated(
        session.core.config,
        task,
        overrides=[] if samples_per_prompt == 1 else ["eval.temperature=1.0"],
        policy=_policy(session),
        samples_per_prompt=samples_per_prompt,
    )
    judged = {name: result.interval(name) for name in result.judged}
    rows = [
        (
            name,
            f"{value:.3f}",
            f"{judged[name].low:.3f} to {judged[name].high:.3f}" if name in judged else "",
        )
        for name, value in result.metrics.items()
    ]
    show(Table(f"{result.policy}: {result.prompts} prompts", rows, ("", "", "95 % interval")))
    return result.metrics
