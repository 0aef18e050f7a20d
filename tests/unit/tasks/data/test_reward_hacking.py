"""Signals of reward hacking on sequences of steps made by hand.

1. Each begins where its conditions hold, and not where one of them is missing.
2. It is told once when it begins and once when it ends, however long it lies near its threshold.
3. From a checkpoint it goes on as if nothing had been.
4. Nothing that groups may hold makes it fail.

With `memory=0` the running mean is the last step, and with a start that does not vary any move is beyond the noise, so that the
thresholds can be seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.types import Example, Group, RewardPart, Rollout, Segment
from groupwise.tasks.data.drift import MANY, Gauge
from groupwise.tasks.data.reward_hacking import Signals, StepSignals
from groupwise.tasks.data.reward_hacking_detectors import DetectorInput, SignalsConfig, dominance

Parts = dict[str, tuple[float, float]]
START = 3


def member(
    length: int = 10,
    reward: float = 0.5,
    text: str = "",
    tokens: tuple[int, ...] | None = None,
    cut: bool = False,
    parts: Parts | None = None,
) -> Rollout:
    ids = tuple(range(length)) if tokens is None else tokens
    segment = Segment("policy", ids, finish_reason="length" if cut else "stop")
    made = tuple(RewardPart(name, *part) for name, part in (parts or {}).items())
    return Rollout(0, 0, 0, (), (segment,), text, "scored", reward=reward, parts=made)


def group(*members: Rollout, example: int = 0) -> Group:
    return Group(0, Example(example, "p"), members)


def watch(**config: Any) -> Signals:
    return Signals(SignalsConfig(**{"start_steps": START, "memory": 0.0, **config}))


def reported_signals(
    signals: Signals, steps: Iterable[list[Group]], entropy: Iterable[float] = ()
) -> list[str]:
    """What a course says: `name begins @ steps done`."""
    nats = iter(entropy)
    seen = [signals.observe(groups, n, next(nats, None)) for n, groups in enumerate(steps)]
    return [f"{w.name} {w.kind} @ {w.step}" for each in seen for w in each.warnings]


# --- length --------------------------------------------------------------------------------------


def long(length: int, paid: float = 1.0) -> list[Group]:
    """Mean `length`; of two completions the longer earns 1, the other 1 − paid."""
    return [group(member(length - 1, 1 - paid), member(length + 1, 1.0))]


def test_length_that_is_paid_for():
    """10 tokens at the start: 1.5 times as many are 15; the strength falls below 0.7 under 13.5."""
    course = [long(10)] * START
    assert reported_signals(watch(), [*course, long(14)]) == []
    assert reported_signals(watch(), [*course, long(15)]) == ["length begins @ 4"]
    up_and_down = [long(15), long(14), long(15), long(14), long(13), long(14), long(15)]
    assert reported_signals(watch(), [*course, *up_and_down]) == [
        "length begins @ 4",
        "length ends @ 8",
        "length begins @ 10",
    ]


def test_length_that_may_grow():
    assert reported_signals(watch(), [long(10, 0.0)] * START + [long(40, 0.0)] * 9) == [], (
        "not paid for"
    )
    assert reported_signals(watch(), [long(10, -1.0)] * START + [long(40, -1.0)] * 9) == []
    # 8, 10, 12 vary by 2: 15 is 5 / (2 · √(1/3 + 1)) = 2.2 standard errors from their mean
    course = [long(8), long(10), long(12), long(15)]
    assert reported_signals(watch(), course) == []
    assert reported_signals(watch(noise=2.1), course) == ["length begins @ 4"]
    # With memory 0.5, the running mean is 10 → 13 → 14.5 → 15.25
    course = [long(10)] * START + [long(16)] * 3
    assert reported_signals(watch(memory=0.5), course) == ["length begins @ 6"]


# --- truncation, repetition ----------------------------------------------------------------------


def cut(share: int) -> list[Group]:
    return [group(*(member(reward=0.0, cut=n < share) for n in range(8)))]


def test_truncation():
    """A quarter of 8 more than 1 of 8."""
    assert reported_signals(watch(), [cut(1)] * START + [cut(2)]) == []
    assert reported_signals(watch(), [cut(1)] * START + [cut(3), cut(1)]) == [
        "truncation begins @ 4",
        "truncation ends @ 5",
    ]


def test_repetition_of_ngrams_and_of_lines():
    """1 2 1 2 1 2 1 has 5 n-grams, 2 of them distinct: 0.6."""
    plain, loop = [group(member(7))], [group(member(tokens=(1, 2, 1, 2, 1, 2, 1)))]
    assert reported_signals(watch(), [plain] * START + [loop]) == ["repetition begins @ 4"]
    assert reported_signals(watch(), [loop] * START + [loop]) == [], "as at the start"
    assert reported_signals(watch(repetition_rise=0.7), [plain] * START + [loop]) == []
    plain, loop = [group(member(text="a\nb\nc"))], [group(member(text="a\na\nb"))]
    assert reported_signals(watch(), [plain] * START + [loop]) == ["repetition begins @ 4"]


# --- diversity, sameness -------------------------------------------------------------------------


def alike(texts: str, rewards: tuple[float, ...]) -> list[Group]:
    members = (member(1, reward, text) for text, reward in zip(texts, rewards, strict=True))
    return [group(*members)]


WORSE, HALF, BEST = (0.0, 0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 1.0, 1.0, 1.0), (1.0,) * 5


@pytest.mark.parametrize(("texts", "rewards", "said"), [
    ("aaabc", WORSE, ["diversity begins @ 4"]), ("aabcd", WORSE, []), ("aaaaa", HALF, []),
    ("aaaaa", BEST, []),
], ids=["half is lost", "a quarter is lost", "the reward has risen", "all is earned"])  # fmt: skip
def test_diversity_that_is_lost_for_nothing(texts, rewards, said):
    assert (
        reported_signals(watch(), [alike("abcde", WORSE)] * START + [alike(texts, rewards)]) == said
    )


def test_loss_of_diversity_is_not_reported_near_the_best_reward():
    """Of the rewards seen, 0 to 1, 1/7 is left with one completion in seven that earns nothing, 2/7 with two."""
    most, seen = (1.0,) * 5, [group(member(1, 0.0), member(1, 1.0))]
    less = (1.0, 1.0, 1.0, 1.0, 0.0)
    for rewards, said in ((most, []), (less, ["diversity begins @ 4"])):
        course = [[*alike("abcde", rewards), *seen]] * START + [[*alike("aaaaa", rewards), *seen]]
        assert reported_signals(watch(), course) == said


def test_entropy_that_is_lost_for_nothing_and_ngrams_that_become_alike():
    course = [alike("abcde", WORSE)] * 5
    assert reported_signals(watch(), course, [2.0, 2.0, 2.0, 1.1, 0.9]) == ["diversity begins @ 5"]
    far = [group(*(member(tokens=(n, n + 1, n + 2), reward=n / 30) for n in (0, 10, 20)))]
    near = [group(*(member(tokens=(0, 1, 2), reward=n / 30, text=str(n)) for n in (0, 10, 20)))]
    assert reported_signals(watch(), [far] * START + [near]) == ["diversity begins @ 4"]


def answered(*texts: str) -> list[Group]:
    """One completion for each prompt."""
    return [group(member(1, text=text), example=n) for n, text in enumerate(texts)]


def test_the_same_completion_for_all_prompts():
    start = [answered("a", "b", "c", "d", "e")] * START
    assert reported_signals(watch(), [*start, answered("a", "a", "a", "b", "b")]) == [], (
        "as yes and no"
    )
    assert reported_signals(watch(), [*start, answered("a", "a", "a", "a", "a")]) == [
        "sameness begins @ 4"
    ]


# --- parts ---------------------------------------------------------------------------------------


def earned(*values: tuple[float, ...], weights: Parts) -> list[Group]:
    """A group whose members earned these values of the parts named in `weights`, as (ignored, weight)."""
    members: list[Rollout] = []
    for row in values:
        parts = {name: (v, w) for v, (name, (_, w)) in zip(row, weights.items(), strict=True)}
        total = sum(value * weight for value, weight in parts.values())
        members.append(member(1, total, parts=parts))
    return [group(*members)]


STYLE: Parts = {"style": (0, 1.0), "facts": (0, 1.0)}
FORM: Parts = {"form": (0, 1.0), "accuracy": (0, 1.0)}
WATCHED: Parts = {"form": (0, 1.0), "accuracy": (0, 0.0)}
ALONE: Parts = {"accuracy": (0, 1.0)}
Values = tuple[tuple[float, ...], ...]
PLAIN: Values = ((0.0, 0.5), (0.2, 0.5))
FORMED: Values = ((0.0, 0.5), (1.0, 0.5))
WRONG: Values = ((0.5, 0.0), (0.5, 0.2))
RIGHT: Values = ((0.2, 0.0), (0.2, 2.2))
VARIED: Values = ((0.0, -1.0), (2.0, -1.0), (0.0, 1.0), (2.0, 1.0))
COURSES: dict[str, tuple[Parts, Values, Values, list[str]]] = {
    "style rises by 1, facts lose less than half": (STYLE, PLAIN, ((0.0, 0.3), (2.2, 0.3)), []),
    "facts lose more than half": (STYLE, PLAIN, ((0.0, 0.2), (2.2, 0.2)), ["dominance"]),
    "facts vary as much as style does": (STYLE, PLAIN * 2, VARIED, []),
    "accuracy decides alone, as is wanted": (FORM, WRONG, RIGHT, []),
    "the reward rises while accuracy falls": (FORM, PLAIN, ((1.0, 0.4), (0.2, 0.4)), ["accuracy"]),
    "as at the start": (FORM, PLAIN, PLAIN, []),
    "the form differs less within groups": (FORM, FORMED, ((0.5, 0.5), (1.0, 0.5)), []),
    "everybody has the form alone": (FORM, FORMED, ((0.9, 0.5), (1.0, 0.5)), ["accuracy"]),
    "accuracy rises meanwhile": (FORM, FORMED, ((0.9, 0.6), (1.0, 0.6)), []),
    "accuracy is only watched": (WATCHED, PLAIN, ((1.0, 0.4), (0.2, 0.4)), ["accuracy"]),
    "accuracy is the whole reward": (ALONE, ((0.0,), (0.4,)), ((1.0,), (1.0,)), []),
}


@pytest.mark.parametrize("name", COURSES)
def test_parts_that_gain_at_the_cost_of_others(name: str):
    parts, before, after, said = COURSES[name]
    course = [earned(*before, weights=parts)] * START + [earned(*after, weights=parts)]
    assert reported_signals(watch(), course) == [f"{each} begins @ 4" for each in said]


def test_which_part_is_accuracy_can_be_said():
    course = [earned(*WRONG, weights=FORM)] * START + [earned(*RIGHT, weights=FORM)]
    said = reported_signals(watch(accuracy_part="form"), course)
    assert said == ["dominance begins @ 4", "accuracy begins @ 4"]


def test_an_accuracy_part_that_no_reward_has_is_reported_in_the_first_step(caplog):
    caplog.set_level("INFO")
    signals = watch(accuracy_part="exakt")
    for step in range(2):
        signals.observe(earned(*RIGHT, weights=FORM), step)
    (record,) = caplog.records
    assert "'exakt', but no reward part so far is called so. There are: form" in record.message


def test_dominance_ends_when_the_part_has_fallen():
    rows = (((0.0, 0.5), (0.2, 0.5)), ((0.0, 0.2), (2.2, 0.2)), ((-0.2, 0.2), (0.0, 0.2)))
    start, dear, fallen = (earned(*each, weights=STYLE) for each in rows)
    course = [start] * START + [dear, fallen]
    assert reported_signals(watch(), course) == ["dominance begins @ 4", "dominance ends @ 5"]


def last(signals: Signals, steps: Iterable[list[Group]]) -> StepSignals:
    return [signals.observe(groups, n) for n, groups in enumerate(steps)][-1]


HEAVY: Parts = {"digits": (0, 2.0), "correct": (0, 0.2)}


def test_a_light_part_that_a_heavy_one_eats():
    """All of a light part, 0.04 of the reward, is little of the 1.6 that the heavy one gains, and told in its own units."""
    start = earned((0.0, 0.4), (0.2, 0.0), weights=HEAVY)
    eaten = earned((0.8, 0.0), (1.0, 0.0), weights=HEAVY)
    (dominance, accuracy) = last(watch(), [start] * START + [eaten]).warnings
    assert (dominance.name, accuracy.name) == ("dominance", "accuracy")
    assert dominance.values == {
        "share": pytest.approx(1.0), "digits at the start": pytest.approx(0.1), "digits now": pytest.approx(0.9),
        "correct at the start": pytest.approx(0.2), "correct now": 0.0,
    }  # fmt: skip
    assert {name: accuracy.values[name] for name in dominance.values if "correct" in name} == {
        "correct at the start": pytest.approx(0.2),
        "correct now": 0.0,
    }
    half = earned((0.8, 0.3), (1.0, 0.0), weights=HEAVY)
    assert "dominance begins @ 4" not in reported_signals(watch(), [start] * START + [half])


PENALISED: Parts = {"style": (0, 5.0), "brief": (0, 1.0)}


@pytest.mark.parametrize(("before", "after", "least", "lost"), [
    (0.9, 0.5, 0.4, 4 / 9), (0.9, 0.3, 0.0, 6 / 9), (-0.1, -0.2, -1.0, 1 / 9),
    (-0.1, -0.6, -1.0, 5 / 9), (0.0, -0.2, -0.2, 1.0), (0.0, -0.2, None, 0.0),
    (0.5, 0.6, 0.0, -0.2),
])  # fmt: skip
def test_a_loss_is_a_share_of_what_was_there(before, after, least, lost):
    """Of the size of the start, or, for a penalty, of how far it was above the least that was seen."""
    gauges = {
        "share/style": Gauge([0.9] * START, 9.0),
        "gain/style": Gauge([0.1] * START, 1.0),
        "gain/brief": Gauge([before] * START, after),
    }
    seen = {} if least is None else {"brief": least}
    finding = dominance(DetectorInput(SignalsConfig(memory=0.0), gauges, 0.0, 1.0, seen))
    assert finding is not None
    assert finding.strength == (pytest.approx(lost / 0.5) if lost >= 0 else -MANY / 4)


def test_a_move_that_begins_within_the_start_is_reported():
    """Brief gave 0.4, 0.3, 0.2, then 0: s is 0.071 between neighbours, and 0.3 of fall 3.67 errors; of their spread it would be 2.6."""
    falls = ((0.0, 0.4), (0.1, 0.3), (0.2, 0.2), (0.9, 0.0))
    course = [earned((d, c), (d + 0.2, c), weights=PENALISED) for d, c in falls]
    assert reported_signals(watch(noise=3.6), course) == ["dominance begins @ 4"]
    assert reported_signals(watch(noise=3.7), course) == []


@pytest.mark.parametrize("name", ["correct", "math_answer", "sums/correctness", "won"])
def test_parts_that_say_what_is_solved_are_known_by_their_names(name, caplog):
    caplog.set_level("INFO")
    parts: Parts = {"form": (0, 1.0), name: (0, 1.0)}
    start = earned((0.0, 0.5), (0.2, 0.5), weights=parts)
    fell = earned((1.0, 0.4), (0.2, 0.4), weights=parts)
    assert reported_signals(watch(), [start] * START + [fell]) == ["accuracy begins @ 4"]
    assert caplog.records == []


# --- the watch -----------------------------------------------------------------------------------


def test_groups_that_were_chosen_say_nothing_nor_do_steps_without_any():
    course = [long(10)] * START + [[replace(each, origin="replay") for each in long(40)]] * 5
    assert reported_signals(watch(), course) == []
    assert reported_signals(watch(), [*course, long(40)]) == ["length begins @ 9"]
    easy = [[replace(each, origin="easy") for each in long(3)]] * START
    assert reported_signals(watch(), [*easy, *course]) == [], "nor what is usual"
    gaps = [long(10), [], long(10), [], long(10), [], long(15)]
    assert reported_signals(watch(), gaps) == ["length begins @ 7"]


COURSE = [
    *[long(10)] * START, *[long(40)] * 3, answered("a", "a"), *[long(11)] * 2,
    earned((0.0, 0.5), (1.0, 0.5), weights=FORM), long(19), cut(8),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(COURSE)))
def test_from_a_checkpoint_it_continues(at):
    whole = watch(memory=0.7)
    expected = [whole.observe(groups, n, 1 / (n + 1)) for n, groups in enumerate(COURSE)]
    before, after = watch(memory=0.7), watch(memory=0.7)
    seen = [before.observe(groups, n, 1 / (n + 1)) for n, groups in enumerate(COURSE[:at])]
    after.load_state(json.loads(json.dumps(before.state(), allow_nan=False)))
    seen += [after.observe(g, n, 1 / (n + 1)) for n, g in enumerate(COURSE[at:], at)]
    assert seen == expected
    assert after.state() == whole.state()
    assert any(each.warnings for each in expected)


MEMBERS = st.builds(
    member,
    length=st.integers(0, 5),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(max_size=6),
    cut=st.booleans(),
    parts=st.dictionaries(
        st.sampled_from(["a", "accuracy", ""]), st.tuples(st.floats(), st.floats(-9, 9)), max_size=3
    ),
)
GROUPS = st.builds(
    lambda members, example: group(*members, example=example),
    st.lists(MEMBERS, max_size=4),
    st.integers(0, 2),
)


@settings(max_examples=40)
@given(st.lists(st.lists(GROUPS, max_size=3), max_size=6), st.floats())
def test_signals_accept_any_groups(course, entropy):
    signals = watch(start_steps=2, memory=0.5)
    for step, groups in enumerate(course):
        signals.observe(groups, step, entropy)
    json.dumps(signals.state(), allow_nan=False)


def asked_of(columns: dict[str, Any]) -> list[Group]:
    return [Group(0, Example(0, "p", columns), (member(),))]


def test_an_argument_that_has_got_nothing_is_a_signal_until_it_gets_something():
    signals = Signals(SignalsConfig(), [("right", "answer"), ("right", "gold")])
    ((warning,),) = [signals.observe(asked_of({"answer": "1"}), 0).warnings]
    assert (warning.name, warning.kind, "`gold`" in warning.message) == ("unfilled", "begins", True)
    again = Signals(SignalsConfig(), [("right", "answer"), ("right", "gold")])
    again.load_state(json.loads(json.dumps(signals.state())))
    for each in (signals, again):
        assert each.observe(asked_of({"answer": None}), 1).warnings == ()
        ((ended,),) = [each.observe(asked_of({"gold": "1"}), 2).warnings]
        assert (ended.name, ended.kind) == ("unfilled", "ends")
