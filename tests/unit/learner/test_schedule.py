"""The course of the learning rate."""

import pytest

from groupwise.learner.config import TrainingConfig
from groupwise.learner.schedule import learning_rate


def course(steps: int, **settings) -> list[float]:
    config = TrainingConfig(learning_rate=1.0, max_steps=steps, **settings)
    return [learning_rate(step, steps, config) for step in range(steps)]


def test_constant_stays():
    assert course(5, lr_scheduler_type="constant") == [1.0] * 5


def test_linear_goes_down_and_would_be_0_after_the_last_step():
    assert course(4, lr_scheduler_type="linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine_goes_down_slowly_first():
    assert course(4, lr_scheduler_type="cosine") == pytest.approx(
        [1.0, 0.8535533905932737, 0.5, 0.14644660940672627]
    )


def test_the_warm_up_rises_to_the_peak_and_never_begins_at_0():
    found = course(6, lr_scheduler_type="constant", warmup_steps=3)
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_decay_begins_after_the_warm_up():
    found = course(6, lr_scheduler_type="linear", warmup_steps=2)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_a_share_of_the_steps_is_the_same_as_so_many():
    by_share = course(20, warmup_ratio=0.25, lr_scheduler_type="cosine")
    assert by_share == course(20, warmup_steps=5, lr_scheduler_type="cosine")


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 10, 30])
def test_every_step_learns_and_none_exceeds_the_peak(kind, warmup):
    found = course(10, lr_scheduler_type=kind, warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in found)
    falling = found[warmup:]
    assert falling == sorted(falling, reverse=True)


def test_one_step_is_taken_at_the_peak():
    for kind in ("constant", "linear", "cosine"):
        assert course(1, lr_scheduler_type=kind) == [1.0]
