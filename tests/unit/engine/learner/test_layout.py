"""Cutting rows into micro-batches: nothing lost, nothing twice, within the budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.types import Row
from groupwise.engine.learner.layout import (
    MicroBatch,
    PackedBatch,
    PackedGroups,
    cut,
    group_tokens,
    microbatches,
    pack_groups,
    pack_rows,
)
from groupwise.engine.learner.native.layout import cut as flat_batches
from groupwise.engine.models.native.facts import KEYS_PER_TOKEN


def row(prompt: tuple[int, ...], length: int) -> Row:
    ids = tuple(range(length))
    return Row(prompt, ids, (1,) * length, (0.0,) * length, 1.0, 1.0)


PROMPTS = st.sampled_from([(1,), (1, 2), (2, 1), (5,) * 9, (7,) * 30])
ROWS = st.lists(st.builds(row, PROMPTS, st.integers(1, 40)), max_size=25)
BUDGETS = st.integers(1, 200)


@settings(max_examples=50)
@given(ROWS, BUDGETS, st.booleans())
def test_every_row_exactly_once_beside_others_of_its_prompt(rows, budget, shared):
    cut = microbatches(rows, budget, prompt_shared=shared)
    indices = [index for batch in cut for index in batch.indices]
    assert sorted(indices) == list(range(len(rows)))
    for batch in cut:
        assert batch.rows == tuple(rows[index] for index in batch.indices)
        assert {each.prompt_ids for each in batch.rows} == {batch.prompt_ids}


@settings(max_examples=50)
@given(ROWS, BUDGETS)
def test_the_budget_is_kept_but_by_a_single_row(rows, budget):
    for batch in microbatches(rows, budget):
        width = max(len(each.completion_ids) for each in batch.rows)
        assert batch.tokens == len(batch.prompt_ids) + len(batch.rows) * width
        assert batch.tokens <= budget or len(batch.rows) == 1
    for batch in microbatches(rows, budget, prompt_shared=False):
        computed = len(batch.rows) * (len(batch.prompt_ids) + batch.width)
        assert computed <= budget or len(batch.rows) == 1


def length(each: Row) -> int:
    return len(each.prompt_ids) + len(each.completion_ids) - 1


@settings(max_examples=50)
@given(ROWS, BUDGETS)
def test_packed_rows_stand_once_and_apart(rows, budget):
    packs = pack_rows(rows, budget)
    assert sorted(index for pack in packs for index in pack.indices) == list(range(len(rows)))
    for pack in packs:
        assert pack.rows == tuple(rows[index] for index in pack.indices)
        sequences, capacity = pack.shape
        taken = [[False] * capacity for _ in range(sequences)]
        for each, (sequence, start) in zip(pack.rows, pack.starts, strict=True):
            for place in range(start, start + length(each)):
                assert not taken[sequence][place]
                taken[sequence][place] = True
        assert all(any(sequence) for sequence in taken)


@settings(max_examples=50)
@given(ROWS, BUDGETS)
def test_packs_keep_the_budget_but_for_a_single_long_row(rows, budget):
    for pack in pack_rows(rows, budget):
        sequences, capacity = pack.shape
        assert capacity == max(map(length, pack.rows)), "no longer than one row needs"
        assert pack.tokens == sequences * capacity
        assert pack.tokens <= budget or sequences == 1


@settings(max_examples=50)
@given(ROWS, BUDGETS)
def test_groups_fill_the_budget_and_compute_each_prompt_once_in_a_batch(rows, budget):
    packs = pack_groups(rows, budget)
    for number, pack in enumerate(packs):
        assert pack.rows == tuple(rows[index] for index in pack.indices)
        assert all(len({each.prompt_ids for each in members}) == 1 for members in pack.groups)
        prompts = [members[0].prompt_ids for members in pack.groups]
        assert len(set(prompts)) == len(prompts)
        tokens, keys = (sum(each) for each in zip(*map(group_tokens, pack.groups), strict=True))
        assert len(pack.rows) == 1 or (tokens <= budget and keys <= KEYS_PER_TOKEN * budget)
        if number:
            more, seen = group_tokens(pack.groups[0])
            before = [group_tokens(members) for members in packs[number - 1].groups]
            known = packs[number - 1].groups[-1][0].prompt_ids == prompts[0]
            tokens, keys = (sum(each) for each in zip(*before, strict=True))
            assert known or tokens + more > budget or keys + seen > KEYS_PER_TOKEN * budget


def test_tokens_and_keys_of_a_group():
    assert group_tokens([row((1,) * 90, 4)]) == (93, 93), "one text, which copies nothing"
    assert group_tokens([row((1,) * 90, 4)] * 2) == (96, 90 + 2 * 93)


@pytest.mark.parametrize("divide", [pack_groups, flat_batches])
def test_short_completions_of_a_long_prompt_copy_only_so_many_keys(divide):
    packs = divide([row((1,) * 90, 3)] * 40, 100)
    assert [len(pack.rows) for pack in packs] == [3] * 13 + [1]


@settings(max_examples=50)
@given(ROWS, BUDGETS, st.booleans(), st.booleans(), st.booleans())
def test_every_layout_has_every_row_once(rows, budget, packing, shared, whole_groups):
    batches = cut(rows, budget, packing=packing, prompt_shared=shared, whole_groups=whole_groups)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(rows)))
    for batch in batches:
        assert batch.rows == tuple(rows[index] for index in batch.indices)
        assert packing or isinstance(batch, MicroBatch)
        assert isinstance(batch, PackedGroups) == (packing and whole_groups)
        assert shared or not packing or isinstance(batch, PackedBatch | PackedGroups)


def test_a_prompt_is_shared_where_that_computes_fewer_tokens():
    group = [row((1,) * 30, 10) for _ in range(4)]
    single = [row((2,) * 30, 10), row((3,) * 5, 10)]
    uneven = [row((4,), 50), row((4,), 2), row((4,), 2)]
    shared, packs = cut([*single, *group, *uneven], 1000, packing=True)
    assert isinstance(shared, MicroBatch)
    assert shared.indices == (2, 3, 4, 5)
    assert sorted(packs.indices) == [0, 1, 6, 7, 8]
    assert all(isinstance(each, MicroBatch) for each in cut([*single, *group], 1000, packing=False))
