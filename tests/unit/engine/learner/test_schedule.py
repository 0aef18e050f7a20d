"""The course of the learning rate."""

import pytest

from groupwise.engine.learner.config import TrainingConfig
from groupwise.engine.learner.schedule import learning_rate


def course(steps: int, **settings) -> list[float]:
    config = TrainingConfig(learning_rate=1.0, max_steps=steps, **settings)
    return [learning_rate(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize(("kind", "steps", "warmup", "wanted"), [
    ("constant", 1, 0, [1.0]), ("linear", 4, 0, [1.0, 0.75, 0.5, 0.25]),
    ("cosine", 4, 0, [1.0, 0.8535533905932737, 0.5, 0.14644660940672627]), ("constant", 6, 3, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ("linear", 6, 2, [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
])  # fmt: skip
def test_the_course_of_each_kind(kind, steps, warmup, wanted):
    """It would be 0 after the last step, and does not begin at 0."""
    found = course(steps, lr_scheduler_type=kind, warmup_steps=warmup)
    assert found == pytest.approx(wanted)


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
