"""The configs that ship: by each of them the bundled model learns its task, by rewards alone and with more than one seed."""

from pathlib import Path

import pytest

from benchmarks.tour import TASKS, learn, numbers_of, page, rows_of, table
from groupwise.tasks.contract import builtin_tasks


def test_the_tour_goes_through_every_task():
    assert sorted(TASKS) == sorted(builtin_tasks())


@pytest.mark.soak(suite="configs")
@pytest.mark.parametrize("task", TASKS)
def test_rewards_alone_raise_what_held_out_prompts_earn(task: str, tmp_path: Path):
    found = [learn(task, seed, tmp_path) for seed in range(2)]
    assert page(found).count("<svg") == 2
    assert all(each.gained and each.minutes <= 15 for each in found), table(
        rows_of(numbers_of(found))
    )
