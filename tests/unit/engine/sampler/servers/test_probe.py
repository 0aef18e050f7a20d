"""Of two explanations of a server's answers the more likely one is reported, unless rounding could explain both."""

import random

import pytest

from groupwise.core.errors import PolicyMismatchError
from groupwise.engine.sampler.servers.probe import NOT_APPLIED, NOT_PROCESSED, check_logprobs

TRUE = [-0.1 * k for k in range(1, 65)]


def noisy(values, size, seed=0):
    generator = random.Random(seed)
    return [value + generator.gauss(0, size) for value in values]


def check_answers(answered, others=None, tolerance=0.1):
    check_logprobs("http://s/v1", "name", answered, TRUE, others or {}, tolerance)


def test_rounding_is_no_reason():
    others = {NOT_APPLIED: noisy(TRUE, 0.01, 5), NOT_PROCESSED: noisy(TRUE, 0.3, 6)}
    for seed in range(200):
        check_answers(noisy(TRUE, 0.02, seed + 10), others)
    check_answers(TRUE, {NOT_APPLIED: TRUE, NOT_PROCESSED: TRUE})


def test_other_weights_are_recognised_by_their_distance():
    with pytest.raises(PolicyMismatchError, match=r" 0\.\d+ nats .*logprob_tolerance is 0\.1"):
        check_answers(noisy(TRUE, 0.5))
    check_answers(noisy(TRUE, 0.5), tolerance=1.0)


@pytest.mark.parametrize(
    ("lacking", "told"),
    [(NOT_APPLIED, "without any adapter"), (NOT_PROCESSED, "processed_logprobs")],
)
def test_the_likely_cause_is_named_also_within_the_tolerance(lacking, told):
    other = [value + 0.05 for value in TRUE]
    with pytest.raises(PolicyMismatchError, match=told):
        check_answers(noisy(other, 0.005), {lacking: other})


def test_log_probabilities_of_nan_never_pass():
    with pytest.raises(PolicyMismatchError):
        check_logprobs("http://s/v1", "name", [float("nan")], [0.0], {}, 0.1)
