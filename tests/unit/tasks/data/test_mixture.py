"""Mixtures: what is held out never comes back, weights are kept, and the seed decides everything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.tasks.data.mixture import Part, interleave, mix_parts, split, with_same_columns
from groupwise.tasks.data.order import Order, restrict_shares


def part(name: str, count: int, weight: float = 1.0, **columns: Any) -> Part:
    return Part(name, [{"prompt": f"{name}{n}", **columns} for n in range(count)], weight)


def key(row: dict[str, Any]) -> str:
    return row["prompt"]


def prompts(rows: Any) -> list[str]:
    return [row["prompt"] for row in rows]


# Weights


def epochs(parts: list[Part], seed: int, count: int) -> list[list[str]]:
    """The prompts that each epoch draws."""
    rows, shares = mix_parts(parts, seed)
    order = Order(len(rows), seed, shares=shares)
    turns = range(count * order.length)
    drawn = [rows[order.example(turn)]["prompt"] for turn in turns]
    return [drawn[n * order.length : (n + 1) * order.length] for n in range(count)]


@pytest.mark.parametrize(("weight", "counts"), [
    (1.0, {1: 10}), (0.5, {1: 5}), (2.0, {2: 10}), (1.3, {1: 7, 2: 3}), (0.26, {1: 3}),
])  # fmt: skip
def test_weight_says_how_often_rows_come(weight: float, counts: dict[int, int]) -> None:
    (found,) = epochs([part("a", 10, weight)], 0, 1)
    assert Counter(Counter(found).values()) == counts


def test_shares_that_leave_no_row_are_refused() -> None:
    with pytest.raises(TaskError, match=r"0\.01 of its 10 rows"):
        mix_parts([part("a", 10, 0.01)], 0)
    for rows, share in ((3, 0.1), (2, 0.9)):
        with pytest.raises(TaskError, match=r"data\.test_split_size"):
            split([part("a", rows)], share, 0, key)


def test_part_that_is_alone_keeps_its_order_and_several_are_shuffled_together() -> None:
    assert prompts(mix_parts([part("a", 50)], 0)[0]) == prompts(part("a", 50).rows)
    both = prompts(mix_parts([part("a", 50), part("b", 50)], 0)[0])
    assert sorted(both) == sorted(prompts([*part("a", 50).rows, *part("b", 50).rows]))
    assert {name[0] for name in both[:20]} == {"a", "b"}


PARTS = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0.3, 0.5, 1.0, 1.5, 2.0, 3.25])),
    min_size=1,
    max_size=4,
).map(lambda sizes: [part("abcd"[n], count, w) for n, (count, w) in enumerate(sizes)])


@settings(max_examples=50)
@given(PARTS, st.integers(0, 5))
def test_every_epoch_has_the_shares_and_all_of_them_all_rows(parts: list[Part], seed: int) -> None:
    parts = [one for one in parts if round(one.weight * len(one.rows)) >= 1]
    if not parts:
        return
    found = [Counter(each) for each in epochs(parts, seed, 30)]
    assert epochs(parts, seed, 2) == epochs(parts, seed, 2)
    for one in parts:
        most = int(one.weight) + 1
        extra = round((one.weight % 1) * len(one.rows)) or int(one.weight < 1)
        for epoch in found:
            own = [epoch[row["prompt"]] for row in one.rows]
            assert sum(own) == int(one.weight) * len(one.rows) + extra
            assert set(own) <= {most - 1, most}
        total = {sum(e[row["prompt"]] for e in found[: len(one.rows)]) for row in one.rows}
        assert total == {int(one.weight) * len(one.rows) + extra}


def test_a_part_is_drawn_alike_whatever_stands_beside_it() -> None:
    def of_a(parts: list[Part], seed: int = 3) -> list[str]:
        return sorted(name for name in epochs(parts, seed, 1)[0] if name.startswith("a"))

    first = part("a", 20, 0.5)
    assert of_a([first]) == of_a([first, part("b", 7)])
    assert of_a([first]) == of_a([part("b", 7, 2.5), first])
    assert of_a([first]) != of_a([first], 4)


def test_without_shuffling_an_epoch_keeps_the_order() -> None:
    rows, shares = mix_parts([part("a", 10, 1.5)], 0)
    order = Order(len(rows), 0, shuffle=False, shares=shares)
    places = [order.example(turn) for turn in range(order.length)]
    assert len(places) == 15
    assert places == sorted(places)


def test_shares_of_what_is_left() -> None:
    _, shares = mix_parts([part("a", 4, 0.5), part("b", 2, 2.0)], 0)
    (a, b) = shares
    kept = sorted([*a.indices[1:], *b.indices])
    left = restrict_shares(shares, kept)
    assert [[kept[place] for place in share.indices] for share in left] == [
        list(a.indices[1:]),
        list(b.indices),
    ]
    assert [share.extra_examples for share in left] == [2, 0]
    assert restrict_shares(shares, b.indices)[0].name == "b"


# Held out


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=40), min_size=1, max_size=3),
    st.sampled_from([0.1, 0.25, 0.5]),
    st.integers(0, 3),
)
def test_held_out_rows_are_disjoint_by_prompt_across_all_sets(
    sets: list[list[int]], share: float, seed: int
) -> None:
    parts = [
        Part(f"p{n}", [{"prompt": str(value), "place": place} for place, value in enumerate(rows)])
        for n, rows in enumerate(sets)
    ]
    try:
        train, test = split(parts, share, seed, key)
    except TaskError:  # nothing is left on one of the sides
        return
    trained = {row["prompt"] for one in train for row in one.rows}
    held_out = {row["prompt"] for one in test for row in one.rows}
    assert trained.isdisjoint(held_out)
    count = sum(len(one.rows) for one in [*train, *test])
    assert count == sum(map(len, sets))
    again = split(parts, share, seed, key)
    assert again == (train, test)


def test_held_out_share_is_that_of_each_part_and_weights_act_on_what_is_left() -> None:
    parts = [part("a", 40, 2.0), part("b", 10)]
    train, test = split(parts, 0.2, 0, key)
    assert [len(one.rows) for one in test] == [8, 2]
    assert [len(one.rows) for one in train] == [32, 8]
    assert prompts(split(parts, 0.2, 1, key)[1][0].rows) != prompts(test[0].rows)
    (drawn,) = epochs(train[:1], 0, 1)
    assert len(drawn) == 64
    assert set(drawn).isdisjoint(prompts(test[0].rows))


def test_first_rows_in_turn_stand_for_all_parts() -> None:
    found = interleave([part("a", 4), part("b", 1), part("c", 2)])
    assert prompts(found) == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"]


# Columns


def test_columns_can_be_left_out_or_filled() -> None:
    parts = [part("a", 1, id=3), part("b", 1, level=1)]
    common, every = with_same_columns(parts, "common"), with_same_columns(parts, "all")
    assert [one.rows for one in common] == [[{"prompt": "a0"}], [{"prompt": "b0"}]]
    assert [one.rows for one in every] == [
        [{"prompt": "a0", "id": 3, "level": None}],
        [{"prompt": "b0", "id": None, "level": 1}],
    ]
