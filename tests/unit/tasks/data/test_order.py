"""Every example once per epoch, in an order that never changes for a seed."""

from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.data.order import Stream, example_of_draw

counts = st.integers(1, 60)
seeds = st.integers(0, 2**32)
FROZEN = [3, 9, 5, 6, 2, 4, 0, 1, 7, 8, 0, 1, 6, 3, 5, 8, 9, 7, 4, 2]


@given(counts, seeds, st.integers(0, 5))
def test_each_epoch_holds_every_example_once(count, seed, epoch):
    draws = range(epoch * count, (epoch + 1) * count)
    assert sorted(example_of_draw(d, count, seed) for d in draws) == list(range(count))


def test_without_shuffling_the_order_is_that_of_the_dataset():
    for draw in range(20):
        assert example_of_draw(draw, 7, 0, shuffle=False) == draw % 7


def test_order_is_the_same_for_ever():
    assert [example_of_draw(d, 10, 7) for d in range(20)] == FROZEN


def test_numbers_below_a_bound_are_even():
    stream = Stream("even")
    found = [stream.below(6) for _ in range(6000)]
    assert all(900 < found.count(value) < 1100 for value in range(6))


@given(st.lists(st.integers(), min_size=1, max_size=20, unique=True), st.data())
def test_sample_has_no_repetition_and_leaves_its_source_alone(items, data):
    count = data.draw(st.integers(0, len(items)))
    before = list(items)
    chosen = Stream(1).sample(items, count)
    assert len(set(chosen)) == count
    assert set(chosen) <= set(items)
    assert items == before


def test_epochs_and_seeds_differ():
    first = [example_of_draw(d, 50, 0) for d in range(50)]
    assert first != [example_of_draw(d, 50, 0) for d in range(50, 100)]
    assert first != [example_of_draw(d, 50, 1) for d in range(50)]
