"""The toy task with a second reward that looks at the step for which a group was drawn."""

from tests.integration.toy_task import (
    compute_metrics,
    get_eval_dataset,
    get_rl_dataset,
    share,
)

__all__ = ["compute_metrics", "get_eval_dataset", "get_reward_funcs", "get_rl_dataset"]


def later(completions, trainer_state, **kwargs):
    """The same for a whole group: nothing to learn from, but visible in the record."""
    return [trainer_state.epoch] * len(completions)


def get_reward_funcs(config, tokenizer):
    return [share, later]
