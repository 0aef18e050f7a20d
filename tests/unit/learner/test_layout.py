"""Cutting rows into micro-batches: nothing lost, nothing twice, within the budget."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from groupwise.learner.layout import microbatches
from groupwise.types import Row


def row(prompt: tuple[int, ...], length: int) -> Row:
    ids = tuple(range(length))
    return Row(prompt, ids, (1,) * length, (0.0,) * length, 1.0, 1.0)


PROMPTS = st.sampled_from([(1,), (1, 2), (2, 1), (5,) * 9, (7,) * 30])
ROWS = st.lists(st.builds(row, PROMPTS, st.integers(1, 40)), max_size=25)
BUDGETS = st.integers(1, 200)


@given(ROWS, BUDGETS, st.booleans())
def test_every_row_exactly_once_beside_others_of_its_prompt(rows, budget, shared):
    cut = microbatches(rows, budget, prompt_shared=shared)
    indices = [index for batch in cut for index in batch.indices]
    assert sorted(indices) == list(range(len(rows)))
    for batch in cut:
        assert batch.rows == tuple(rows[index] for index in batch.indices)
        assert {each.prompt_ids for each in batch.rows} == {batch.prompt_ids}


@given(ROWS, BUDGETS)
def test_the_budget_is_kept_but_by_a_single_row(rows, budget):
    for batch in microbatches(rows, budget):
        width = max(len(each.completion_ids) for each in batch.rows)
        assert batch.tokens == len(batch.prompt_ids) + len(batch.rows) * width
        assert batch.tokens <= budget or len(batch.rows) == 1


@given(ROWS, BUDGETS)
def test_also_where_each_row_repeats_its_prompt(rows, budget):
    for batch in microbatches(rows, budget, prompt_shared=False):
        computed = len(batch.rows) * (len(batch.prompt_ids) + batch.width)
        assert computed <= budget or len(batch.rows) == 1


@given(ROWS, BUDGETS)
def test_prompts_keep_their_order_and_long_rows_come_first(rows, budget):
    cut = microbatches(rows, budget)
    order = list(dict.fromkeys(batch.prompt_ids for batch in cut))
    assert order == list(dict.fromkeys(each.prompt_ids for each in rows))
    for prompt in order:
        lengths = [
            len(each.completion_ids)
            for batch in cut
            if batch.prompt_ids == prompt
            for each in batch.rows
        ]
        assert lengths == sorted(lengths, reverse=True)


@given(ROWS, BUDGETS)
def test_no_micro_batch_is_smaller_than_it_must_be(rows, budget):
    cut = microbatches(rows, budget)
    for batch, following in pairwise(cut):
        if batch.prompt_ids == following.prompt_ids:
            one_more = len(batch.prompt_ids) + (len(batch.rows) + 1) * batch.width
            assert one_more > budget
