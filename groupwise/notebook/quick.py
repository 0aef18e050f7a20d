"""A question to the trained policy, and the whole pipeline in one call."""

from __future__ import annotations

from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.terminal.notebook import Table, one_output, show, shown_while
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import format_prompt
from groupwise.notebook.export import export_checkpoint
from groupwise.notebook.rewards import RewardList
from groupwise.notebook.session import Session, prepare_session, refuse_other
from groupwise.notebook.training import TrainerState, train_grpo

QUESTION = "Ada has 3 boxes with 12 pencils each. She gives 8 pencils away. How many are left?"


@one_output()
def quick_test(config: TrainingConfig, session: Session, test_question: str | None = None) -> str:
    """Ask the trained policy a question (default: a small problem of arithmetic), show its answer and return it."""
    refuse_other(config, session)
    question: Any = QUESTION if test_question is None else test_question
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"test_question is {question!r}; give the text of a question.")
    with shown_while("answering"):
        [answer] = session.sampler([format_prompt(question, config)], config.total_generation_steps)
    rows = [("question", question), ("answer", answer), ("answered by", session.policy)]
    show(Table("Quick test", rows))
    return answer


def run_full_pipeline(
    config: TrainingConfig,
    *,
    reward_functions: RewardList | None = None,
    extra_reward_functions: RewardList = (),
    server: str | None = None,
    resume: bool = True,
) -> tuple[Session, TrainerState, str]:
    """Prepare, train, export, test: the session, the trainer's state (with the test's answer) and the checkpoint's folder.

    `reward_functions`, `extra_reward_functions` and `resume` as of `train_grpo`; `server` as of `prepare_session`.
    """
    session = prepare_session(config, server=server)
    state = train_grpo(
        config,
        session,
        reward_functions=reward_functions,
        extra_reward_functions=extra_reward_functions,
        resume=resume,
    )
    path = export_checkpoint(config, state)
    state.test_answer = quick_test(config, session)
    return session, state, path
