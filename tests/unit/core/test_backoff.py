import random

from groupwise.core.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    backoff = Backoff(1.0, 5.0, low=1.0)
    assert [backoff.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.next(least=3.0) == 3.0
    assert backoff.next(least=100.0) == 5.0


def test_a_pause_is_drawn_from_the_upper_half_of_its_bound() -> None:
    drawn = [Backoff(1.0, 5.0, random.Random(seed)).next() for seed in range(100)]
    assert 0.5 <= min(drawn) < 0.6
    assert 0.9 < max(drawn) <= 1.0
