"""Rows on one axis: every token that must be computed occurs once, and each knows which token it follows."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.types import Row
from groupwise.engine.learner.native.layout import SPREAD, FlatBatch, Texts, cut


def row(prompt: tuple[int, ...], length: int, first: int) -> Row:
    ids = tuple(range(first, first + length))
    return Row(prompt, ids, (1,) * length, (0.0,) * length, 1.0, 1.0)


PROMPTS = st.sampled_from([(1,), (1, 2), (2, 1), (5,) * 9, (7,) * 30])
ROWS = st.lists(st.builds(row, PROMPTS, st.integers(1, 40), st.integers(100, 200)), max_size=25)
BUDGETS = st.integers(1, 200)


def seen_before(batch: FlatBatch, place: int) -> list[int]:
    """The tokens up to a place that it sees, as the layout has them."""
    (texts,) = (each for each in batch.texts if each.start <= place < each.end)
    start = texts.start
    for length in texts.lengths:
        if place < start + length:
            break
        start += length
    prompt = []
    if texts.prompt is not None:
        first, count = texts.prompt
        prompt = [*batch.token_ids[first : first + count]]
    return [*prompt, *batch.token_ids[start : place + 1]]


@settings(max_examples=50)
@given(ROWS, BUDGETS, st.booleans())
def test_each_completion_token_follows_its_own_text(rows, budget, packing):
    for batch in cut(rows, budget, packing=packing):
        places = iter(batch.predictors)
        for each in batch.rows:
            for count in range(len(each.completion_ids)):
                place = next(places)
                text = [*each.prompt_ids, *each.completion_ids[:count]]
                assert seen_before(batch, place) == text
                assert batch.positions[place] == len(text) - 1
        assert next(places, None) is None


@settings(max_examples=50)
@given(ROWS, BUDGETS, st.booleans())
def test_every_row_exactly_once_and_every_token_in_one_set_of_texts(rows, budget, packing):
    batches = cut(rows, budget, packing=packing)
    assert sorted(index for batch in batches for index in batch.indices) == [*range(len(rows))]
    for batch in batches:
        assert batch.rows == tuple(rows[index] for index in batch.indices)
        assert batch.width == max(len(each.completion_ids) for each in batch.rows)
        assert batch.tokens == len(batch.token_ids) == len(batch.positions)
        assert [each.start for each in batch.texts[1:]] == [each.end for each in batch.texts[:-1]]
        assert (batch.texts[0].start, batch.texts[-1].end) == (0, batch.tokens)
        for texts in batch.texts:
            assert all(first >= second for first, second in pairwise(texts.lengths))
            assert texts.lengths[0] <= SPREAD * texts.lengths[-1]


@settings(max_examples=50)
@given(ROWS, BUDGETS, st.booleans())
def test_the_budget_is_kept_but_by_a_single_row(rows, budget, packing):
    for batch in cut(rows, budget, packing=packing):
        assert batch.tokens <= budget or len(batch.rows) == 1
        assert packing or len({each.prompt_ids for each in batch.rows}) == 1


def test_a_prompt_stands_there_once_unless_its_group_is_too_large():
    group = [row((3,) * 10, 5, 100) for _ in range(4)]
    (whole,) = cut(group, 26)
    assert whole.tokens == 10 + 4 * 4
    assert whole.texts == (Texts(0, (10,)), Texts(10, (4, 4, 4, 4), (0, 10)))
    assert [batch.tokens for batch in cut(group, 25)] == [10 + 3 * 4, 10 + 4]


def test_texts_of_very_different_lengths_are_not_padded_to_each_other():
    (batch,) = cut([row((3,), length, 100) for length in (41, 2, 25, 1)], 100)
    assert [each.lengths for each in batch.texts] == [(1,), (40, 24), (1,)]


def test_groups_fill_a_micro_batch_as_far_as_they_fit():
    rows = [row((prompt,), 5, 100) for prompt in (1, 2, 3)]
    assert [batch.indices for batch in cut(rows, 10)] == [(0, 1), (2,)]
    assert [batch.indices for batch in cut(rows, 10, packing=False)] == [(0,), (1,), (2,)]
