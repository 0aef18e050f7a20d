"""How work is shared: everything once, evenly, groups whole if that is even."""

from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.types import Row
from groupwise.engine.distributed.sharding import MAX_IMBALANCE, shard_rows, share_groups
from groupwise.engine.learner.layout import group_by_prompt


def members(shares, ranks):
    """How many each rank has."""
    return [
        sum(each.members for group in shares for each in group if each.rank == rank)
        for rank in range(ranks)
    ]


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 20), max_size=12), st.lists(st.integers(0, 30), min_size=1, max_size=5)
)
def test_every_member_is_dealt_once_and_evenly(sizes, loads):
    shares = share_groups(sizes, loads)
    for size, group in zip(sizes, shares, strict=True):
        assert [place for each in group for place in range(each.start, each.end)] == [*range(size)]
    dealt = members(shares, len(loads))
    after = [load + more for load, more in zip(loads, dealt, strict=True)]
    given_something = [total for total, more in zip(after, dealt, strict=True) if more]
    assert max(given_something, default=0) <= min(after) + 1, "others had less to do"


def test_groups_stay_whole_where_that_is_even():
    assert [len(group) for group in share_groups([8] * 4, [0, 0])] == [1] * 4
    assert [len(group) for group in share_groups([4, 8, 4], [0, 0])] == [1] * 3
    assert [len(group) for group in share_groups([8, 8], [0, 16])] == [1, 1]
    assert members(share_groups([8, 8], [0, 16]), 2) == [16, 0]


def test_a_group_is_split_where_ranks_would_be_idle():
    (group,) = share_groups([8], [0, 0])
    assert [(each.rank, each.start, each.end) for each in group] == [(0, 0, 4), (1, 4, 8)]
    shares = share_groups([8] * 5, [0, 0])
    assert members(shares, 2) == [20, 20]
    assert sorted(len(group) for group in shares) == [1, 1, 1, 1, 2]
    assert members(share_groups([4, 4], [0] * 4), 4) == [2] * 4


def row(prompt, length):
    ids = tuple(range(length))
    return Row((prompt,) * 10, ids, (1,) * length, (0.0,) * length, 1.0, 1.0)


def tokens(rows, share):
    chosen = [rows[index] for index in share]
    prompts = sum(len(prompt) for prompt in group_by_prompt(chosen))
    return prompts + sum(len(each.completion_ids) for each in chosen)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40), st.integers(1, 5))
def test_every_row_is_cut_to_one_rank(described, ranks):
    rows = [row(*each) for each in described]
    cut = shard_rows(rows, ranks)
    assert sorted(index for share in cut for index in share) == [*range(len(rows))]
    assert all(share == sorted(share) for share in cut)
    assert len(cut) == ranks
    assert cut == shard_rows(rows, ranks)


def test_prompts_stay_together_where_that_is_even():
    rows = [row(prompt, 20) for _ in range(8) for prompt in range(4)]
    first, second = shard_rows(rows, 2)
    assert {rows[index].prompt_ids for index in first} & {
        rows[index].prompt_ids for index in second
    } == set()
    lengths = {0: 10, 1: 50, 2: 30, 3: 12}
    rows = [row(prompt, length) for prompt, length in lengths.items() for _ in range(8)]
    assert shard_rows(rows, 2) == [[*range(8, 16)], [*range(8), *range(16, 32)]]


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(10, 40), min_size=4, max_size=8), min_size=1, max_size=6))
def test_no_rank_has_clearly_too_much(groups):
    rows = [row(prompt, length) for prompt, each in enumerate(groups) for length in each]
    for ranks in (2, 3):
        costs = [tokens(rows, share) for share in shard_rows(rows, ranks)]
        fair = sum(tokens(rows, [*members]) for members in group_by_prompt(rows).values()) / ranks
        assert max(costs) <= max(MAX_IMBALANCE * fair, fair + 40 + 2 * 10), (costs, fair)


def test_one_group_is_shared_by_all():
    rows = [row(0, 20) for _ in range(8)]
    assert [len(share) for share in shard_rows(rows, 2)] == [4, 4]
    assert [len(share) for share in shard_rows(rows, 4)] == [2, 2, 2, 2]
    assert shard_rows(rows[:1], 3).count([]) == 2
