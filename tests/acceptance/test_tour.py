"""The configs that ship: with each of them RL teaches the bundled model its task, whatever the seed."""

from pathlib import Path

import pytest

from benchmarks.tour import TASKS, html_page, numbers_of, rows_of, table, train_task
from groupwise.tasks.contract import builtin_tasks


def test_the_tour_goes_through_every_task():
    assert sorted(TASKS) == sorted(builtin_tasks())


@pytest.mark.soak(suite="configs")
@pytest.mark.parametrize("task", TASKS)
def test_rl_raises_what_held_out_prompts_earn(task: str, tmp_path: Path):
    found = [train_task(task, seed, tmp_path) for seed in range(2)]
    assert html_page(found).count("<svg") == 2
    assert all(each.gained and each.minutes <= 15 for each in found), table(
        rows_of(numbers_of(found))
    )
