import random

import pytest

from groupwise.core.retry import Backoff, Retry, doubled


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    backoff = Backoff(1.0, 5.0, low=1.0)
    assert [backoff.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.next() == 1.0
    assert (doubled(2.0, 0, 9.0), doubled(2.0, 10**6, 9.0)) == (2.0, 9.0)


def test_a_pause_is_drawn_from_the_upper_half_of_its_bound() -> None:
    drawn = [Backoff(1.0, 5.0, random.Random(seed).random).next() for seed in range(100)]
    assert 0.5 <= min(drawn) < 0.6
    assert 0.9 < max(drawn) <= 1.0


@pytest.mark.parametrize("least", [0.2, 3.0, 100.0])
def test_a_retry_waits_at_least_as_long_as_the_server_asked_for(least: float) -> None:
    drawn = [Backoff(1.0, 5.0, low=0.0).next(least) for _ in range(100)]
    assert least <= min(drawn) < max(drawn) <= least + 1.0


def test_retries_end_after_their_time_which_a_success_renews() -> None:
    now = 0.0
    retry = Retry(10.0, Backoff(4.0, 4.0, low=1.0), lambda: now)
    lost = ConnectionError("lost")
    assert (retry.next(lost), retry.left) == (4.0, 10.0)
    now = 7.0
    with pytest.raises(ConnectionError):
        retry.next(lost)
    retry.renew()
    now = 1000.0  # what came was used for long: the time counts from the next failure
    assert retry.next(lost) == 4.0
    now = 1004.0
    assert (retry.left, retry.next(lost)) == (6.0, 4.0)
    with pytest.raises(ConnectionError):
        retry.next(lost, least=3.0)
