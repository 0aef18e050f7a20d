"""What counts as agreement, and what a run was configured with when a step was taken."""

from __future__ import annotations

import math

import pytest

from groupwise.review.replay import Learnt, ReplayedStep, as_it_was
from groupwise.runs.records import ResumeRecord, Rewound

FACTS = {"loss": 0.5, "grad_norm": 2.0, "version": 3, "fingerprint": "f"}


def step(tolerance: float | None = None, advantages: int = 0, **replayed) -> ReplayedStep:
    return ReplayedStep(7, Learnt(**FACTS), Learnt(**{**FACTS, **replayed}), advantages, tolerance)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loss": math.nextafter(0.5, 1)}, "loss"),
        ({"grad_norm": math.nextafter(2.0, 0)}, "grad_norm"),
        ({"grad_norm": None}, "grad_norm"),
        ({"loss": math.nan}, "loss"),
        ({"version": 4}, "version"),
        ({"fingerprint": "g"}, "fingerprint"),
        ({"advantages": 1}, "advantages"),
    ],
)
def test_one_bit_is_a_difference(change, named):
    assert step(**change).differences == (named,)
    assert not step(**change).exact


def test_what_does_not_exist_is_equal():
    """Nothing taught; or the gradient was not finite, and the update left out."""
    for value in (None, math.nan):
        facts = Learnt(value, value, 3, "f")
        assert ReplayedStep(7, facts, facts, 0, None).exact


def test_rounding_is_measured_against_the_gradient():
    assert step(0.01, loss=0.519, grad_norm=1.981, fingerprint="g").differences == ()
    assert not step(0.01, loss=0.519).exact
    assert step(0.01, loss=0.521).differences == ("loss",)
    assert step(0.01, grad_norm=2.021).differences == ("grad_norm",)
    assert step(0.01, version=4).differences == ("version",)
    assert step(0.01, advantages=1).differences == ("advantages",)


def resumed(step: int, **changes) -> ResumeRecord:
    named = {key.replace("__", "."): list(change) for key, change in changes.items()}
    return ResumeRecord(step, Rewound(0, 0), 0.0, named)


NOW = {"training": {"max_steps": 80}, "run": {"threads": 4, "name": "r"}}
RESUMES = [
    resumed(10, training__max_steps=(20, 40), layout__threads=(1, 2)),
    resumed(30, run__threads=(None, 4), layout__threads=(2, 4)),
    resumed(20, training__max_steps=(40, 80)),
]


@pytest.mark.parametrize(
    ("step", "max_steps", "threads"),
    [(9, 20, None), (10, 40, None), (19, 40, None), (20, 80, 4), (29, 80, 4), (79, 80, 4)],
)
def test_changes_after_a_step_are_taken_back(step, max_steps, threads):
    """The last resume began before the second one did, so what that one had done was done again."""
    then = as_it_was(NOW, RESUMES, step)
    assert then == {"training": {"max_steps": max_steps}, "run": {"threads": threads, "name": "r"}}
    assert NOW["training"] == {"max_steps": 80}


@pytest.mark.parametrize(("step", "threads"), [(9, 1), (10, 2), (19, 2), (20, 4), (79, 4)])
def test_the_layout_of_a_step_is_found_likewise(step, threads):
    assert as_it_was({"threads": 4, "slots": 8}, RESUMES, step, "layout") == {
        "threads": threads,
        "slots": 8,
    }
