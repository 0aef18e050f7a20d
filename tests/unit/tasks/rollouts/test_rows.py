"""Rows hold what was sampled, token for token, and only the policy's tokens are trained on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.types import (
    Example,
    Group,
    LogitsProcessing,
    MaskedTokens,
    Rollout,
    RolloutCredit,
    RoutedExperts,
    Row,
    SamplingParams,
    Segment,
    from_json,
    to_json,
)
from groupwise.tasks.rollouts.rows import (
    training_rows,
    with_learner_logprobs,
    with_sibling_stats,
)

PARAMS = SamplingParams(8, 0.7)


def test_a_row_is_the_rollout_verbatim(make_group, written):
    group = make_group((written(7, 7, 1),))
    (row,) = training_rows([group], [(RolloutCredit(0.5, 0.25),)])
    assert row == Row(
        (50, 51), (7, 7, 1), (1, 1, 1), (-0.7, -0.7, -0.1), 0.5, 0.25, 0.7, rollout=(4, 0)
    )
    assert with_sibling_stats([replace(row, rollout=None)]) == [replace(row, rollout=None)]


def test_the_last_stop_token_teaches_once_and_a_truncated_row_has_none(make_group, written):
    ended, cut = (written(7, 1),), (written(7, 8, finish="length"),)
    rows = training_rows([make_group(ended, cut)], [(RolloutCredit(1, 1), RolloutCredit(-1, 1))])
    assert [sum(row.mask) for row in rows] == [2, 2]
    assert rows[1].completion_ids == (7, 8)


def test_only_what_the_policy_wrote_teaches(make_group, written):
    segments = (
        written(5, 6), Segment("inserted", (90, 91)), Segment("environment", (92,)), written(7),
    )  # fmt: skip
    (row,) = training_rows([make_group(segments)], [(RolloutCredit(1, 1),)])
    assert row.completion_ids == (5, 6, 90, 91, 92, 7)
    assert row.mask == (1, 1, 0, 0, 0, 1)
    assert row.sampling_logprobs == (-0.5, -0.6, 0.0, 0.0, 0.0, -0.7)


SEGMENTS = st.lists(
    st.tuples(st.sampled_from(["policy", "environment", "inserted"]), st.lists(st.integers(0, 99))),
    max_size=6,
)


@given(SEGMENTS)
def test_mask_ids_and_log_probabilities_have_one_length(described):
    described = [("policy", [3]), *described]
    segments = tuple(
        Segment(source, tuple(ids), (-1.0,) * len(ids), params=PARAMS)  # type: ignore[arg-type]
        if source == "policy"
        else Segment(source, tuple(ids))  # type: ignore[arg-type]
        for source, ids in described
    )
    rollout = Rollout(0, 0, 0, (1,), segments, "")
    group = Group(0, Example(0, "p"), (rollout,))
    (row,) = training_rows([group], [(RolloutCredit(1, 1),)])
    assert row.completion_ids == rollout.completion_ids
    assert len(row.mask) == len(row.sampling_logprobs) == len(row.completion_ids)
    assert sum(row.mask) == sum(len(ids) for source, ids in described if source == "policy")


def test_rollouts_without_weight_have_no_row_and_the_others_keep_their_order(make_group, written):
    groups = [make_group((written(1),), (written(2),)), make_group((written(3),), (written(4),))]
    weights = [(None, RolloutCredit(0.1, 1)), (RolloutCredit(0.2, 1), None)]
    rows = training_rows(groups, weights)
    assert [(row.completion_ids, row.advantage) for row in rows] == [((2,), 0.1), ((3,), 0.2)]


def test_weights_that_do_not_belong_to_the_groups_are_refused(make_group, written):
    group = make_group((written(1),), (written(2),))
    with pytest.raises(ValueError, match="zip"):
        training_rows([group], [(RolloutCredit(1, 1),)])
    with pytest.raises(ValueError, match="zip"):
        training_rows([group, group], [(None, None)])


def test_one_row_has_one_temperature(make_group, written):
    hot = replace(written(2), params=SamplingParams(8, 1.5))
    with pytest.raises(AssertionError, match=r"\[0\.7, 1\.5\]"):
        training_rows([make_group((written(1), hot))], [(RolloutCredit(1, 1),)])


def test_each_segment_withholds_the_stop_tokens_from_its_own_beginning(make_group, written):
    """Also where it is shorter, and in a row that begins with it."""
    least = SamplingParams(8, 0.7, (1, 2), min_tokens=2)
    first, short, third, free = (
        replace(written(*ids), params=params)
        for ids, params in (((5, 6, 7), least), ((8,), least), ((9, 9, 1), least), ((4,), PARAMS))
    )
    group = make_group(
        (first, Segment("inserted", (90, 91)), short, Segment("environment", (92,)), free),
        (first, Segment("environment", (9,)), replace(third, prompt_ids=(60,))),
    )
    rows = training_rows([group], [(RolloutCredit(1, 1), RolloutCredit(1, 1))])
    assert [row.withheld for row in rows] == [
        (MaskedTokens(0, 2, (1, 2)), MaskedTokens(5, 6, (1, 2))),
        (MaskedTokens(0, 2, (1, 2)),),
        (MaskedTokens(0, 2, (1, 2)),),
    ]
    assert from_json(Row, to_json(rows[0])) == rows[0]


def test_completions_of_truncated_sampling_are_not_trained(make_group, written):
    for part in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        drawn = replace(written(2), params=replace(PARAMS, **part))
        with pytest.raises(AssertionError, match="a part of"):
            training_rows([make_group((drawn,))], [(RolloutCredit(1, 1),)])


def test_completions_of_processed_logits_are_not_trained(make_group, written):
    changed = LogitsProcessing(presence_penalty=0.5)
    drawn = replace(written(2), params=replace(PARAMS, processing=changed))
    with pytest.raises(AssertionError, match="changed distribution"):
        training_rows([make_group((drawn,))], [(RolloutCredit(1, 1),)])


REWRITTEN = (50, 99)
"""What the policy saw in the second turn, where the template wrote the first one anew."""


def in_two_rows(written):
    return written(5, 6), Segment("environment", (9,)), replace(written(7), prompt_ids=REWRITTEN)


def test_rows_of_a_rollout_know_the_sums_of_the_others(make_group, written):
    third = replace(written(8, 9), prompt_ids=(60,))
    group = make_group((*in_two_rows(written), third), (written(5, 6),))
    rows = training_rows([group], [(RolloutCredit(1, 1), RolloutCredit(2, 1))])
    assert [row.rollout for row in rows] == [(4, 0)] * 3 + [(4, 1)]
    assert [row.others for row in rows] == [None] * 4
    proximal = [(-1.0,) * len(row.completion_ids) for row in rows]
    rows = [replace(row, proximal_logprobs=old) for row, old in zip(rows, proximal, strict=True)]
    weights = [1.1 - 2, 0.7 - 1, 1.7 - 2]  # of each row's tokens that teach: proximal − sampling
    told = with_sibling_stats(rows)
    assert [row.others and row.others.tokens for row in told] == [3, 4, 3, None]
    found = [row.others.log_weight for row in told[:3] if row.others]
    assert found == pytest.approx([sum(weights) - own for own in weights])
    assert [row.others.log_ratio for row in told[:3] if row.others] == [0.0] * 3
    assert told[3] == rows[3]


def test_ratios_are_those_of_the_policy_to_the_old_one(make_group, written):
    rows = training_rows([make_group(in_two_rows(written))], [(RolloutCredit(1, 1),)])
    now = [(-0.4, -0.4, 77.0), (-0.4,)]  # the environment's token counts for nothing
    first, second = with_sibling_stats(rows, now)
    assert first.others
    assert second.others
    assert (first.others.log_ratio, second.others.log_ratio) == pytest.approx((0.3, 0.3))
    assert first.others.log_weight == second.others.log_weight == 0.0
    with_proximal = [replace(row, proximal_logprobs=(-0.5,) * len(row.mask)) for row in rows]
    first, second = with_sibling_stats(with_proximal, now)
    assert first.others
    assert second.others
    assert (first.others.log_ratio, second.others.log_ratio) == pytest.approx((0.1, 0.2))


def test_learner_logprobs_are_stored_with_the_trained_tokens(make_group, written):
    """Through rows of several segments, and rollouts of several rows."""
    anew = replace(written(7, 8), prompt_ids=(50, 51, 9))
    only_read = replace(Segment("environment", (92,)), prompt_ids=(50, 3))
    group = make_group(
        (written(5, 6), Segment("inserted", (90, 91)), written(4), only_read, anew),
        (written(1),),
        (written(2),),
    )
    weights = (RolloutCredit(1, 1), None, RolloutCredit(-1, 1))
    rows = training_rows([group], [weights])
    told = [
        [-100.0 * number - token for token in row.completion_ids] for number, row in enumerate(rows)
    ]
    learnt = with_learner_logprobs(group, weights, told)
    assert [[each.learner_logprobs for each in r.segments] for r in learnt.rollouts] == [
        [(-5.0, -6.0), None, (-4.0,), None, (-107.0, -108.0)],
        [None],
        [(-202.0,)],
    ]
    assert training_rows([learnt], [weights]) == rows
    assert with_learner_logprobs(group, weights, None) == group


def test_log_ratios_of_the_others_are_held_within_bounds(make_group, written):
    rows = training_rows([make_group(in_two_rows(written))], [(RolloutCredit(-1, 1),)])
    now = [(-0.2, -0.9, 0.0), (-0.4,)]  # log-ratios 0.3 and −0.3, and 0.3
    told = with_sibling_stats(rows, now, lambda advantage: (-0.1, 0.2) if advantage < 0 else (0, 0))
    found = [row.others.log_ratio for row in told if row.others]
    assert found == pytest.approx([0.2, 0.2 - 0.1])


def test_advantages_of_tokens_follow_what_the_policy_wrote(make_group, written):
    group = make_group(in_two_rows(written))
    rows = training_rows([group], [(RolloutCredit(9, 1, (0.1, 0.2, 0.3)),)])
    assert [row.credits for row in rows] == [(0.1, 0.2, 0.0), (0.3,)]
    with pytest.raises(AssertionError, match="more tokens"):
        training_rows([group], [(RolloutCredit(9, 1, (0.1, 0.2, 0.3, 0.4)),)])


def test_a_token_has_the_experts_that_it_was_drawn_with(make_group, written):
    """A later answer has experts of earlier tokens, too, which count only if the answer before it had none."""
    first, second, third = (
        RoutedExperts(0, (end, 2, 1), bytes([value, value] * end))
        for value, end in ((1, 3), (200, 6), (3, 8))
    )  # of prompts of 2, 5 and 8 tokens

    def row(*experts: RoutedExperts | None) -> Row:
        segments = (
            replace(written(5, 6), routed_experts=experts[0]), Segment("environment", (92,)),
            replace(written(7, 7), routed_experts=experts[1]), Segment("environment", (93,)),
            replace(written(8), routed_experts=experts[2]),
        )  # fmt: skip
        (found,) = training_rows([make_group(segments)], [(RolloutCredit(1, 1),)])
        return found

    whole = row(first, second, third)
    middle = RoutedExperts(3, (3, 2, 1), bytes([200] * 6))
    last = RoutedExperts(6, (2, 2, 1), bytes([3] * 4))
    assert whole.routed_experts == (first, middle, last)
    assert row(None, None, third).routed_experts == (third,)
    assert row(first, None, None).routed_experts == (first,)
    assert from_json(Row, to_json(whole)) == whole
    assert replace(whole, teacher_prompt_ids=(1,)).as_seen_by_teacher.routed_experts == ()
