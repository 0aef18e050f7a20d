"""A run in which nothing is scored ends with an error that says whether the reward's own code is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.errors import NothingScoredError
from groupwise.tasks.rollouts.config import TURNS
from groupwise.training.loops.recording import check_something_scored


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("reward `f` raised r.py:3 in f\n    c[0]['content']\n  TypeError: string indices", 2),
        ("reward `f` raised r.py:3 in f\n    ask(c)\n  ConnectionError: no answer", 1),
        ("every reward function returned None for this completion", 1),
    ],
)
def test_only_wrong_code_is_the_users_error_and_the_last_line_names_it(
    reason: str, code: int
) -> None:
    rollouts = [SimpleNamespace(outcome="failed", reason=reason, ended_by="eos")] * 4
    group: Any = SimpleNamespace(scored=[], rollouts=rollouts)
    config = SimpleNamespace(rollout=SimpleNamespace(type=next(iter(TURNS))))
    run: Any = SimpleNamespace(
        unscored_steps=0, unscored_reasons=[], unscored_limit=1, max_steps=9, step=0, config=config
    )
    with pytest.raises(NothingScoredError) as failed:
        check_something_scored(run, [group])
    assert failed.value.exit_code == code
    assert failed.value.message.splitlines()[-1].endswith(reason.splitlines()[-1])
    assert "in step 1 (" in failed.value.message
    run.unscored_limit, run.step = 2, 1  # the progress shows one step as done
    with pytest.raises(NothingScoredError, match="in 2 steps in a row, up to step 2 "):
        check_something_scored(run, [group])
