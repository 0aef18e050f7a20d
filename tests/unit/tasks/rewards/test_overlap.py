"""Words of a rubric, similarity to a reference, and that an echo of the prompt earns nothing."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.rewards.overlap import (
    RubricOverlap,
    contains_rubric,
    overlap,
    similarity,
    words,
)

RUBRIC = "Names photosynthesis. Explains photosynthesis by light and water."
"""names, photosynthesis (twice), explains, light, and, water: weights 1, 1/2, 1, 1, 1, 1, together 5.5."""
WORDS = st.lists(st.sampled_from(["light", "water", "soil", "of", "sugar", "air"]), max_size=8)


def value(
    text: Any,
    *,
    prompt: Any = "Why are leaves green?",
    rubric: Any = RUBRIC,
    reference: Any = "blue",
    **parameters: Any,
) -> Any:
    (one,) = RubricOverlap(**parameters)([prompt], [text], rubric=[rubric], reference=[reference])
    return one


def test_overlap_and_similarity_by_hand():
    for text, weight in (
        ("Light!", 1),
        ("photosynthesis " * 2, 0.5),
        ("WATER, light", 2),
        ("by by", 0),
    ):
        assert value(text) == pytest.approx(10 * weight / 5.5)
    reference = "leaves turn light into sugar"
    assert value(reference, rubric="xyz", reference=reference) == 5.0
    assert value("leaves eat sugar", rubric="xyz", reference=reference) == 5.0 * 2 * 2 / (3 + 5)
    assert value("leaves", rubric="xyz", reference=["roots", "Leaves."]) == 5.0
    assert value(RUBRIC, reference=RUBRIC) == 15.0
    assert similarity([], ["a"]) == 0.0
    frequent = ["leaf", "light"] * 150
    assert similarity(frequent, frequent) == 1.0


def test_an_echo_of_a_rubric_in_the_prompt_wins_nothing():
    prompt = f"Why are leaves green?\n{RUBRIC}"
    own = "Light and water feed it: photosynthesis."
    assert value(RUBRIC, prompt=prompt, copied_run=0) == 10.0
    chat, answer = (
        [{"role": r, "content": t}] for r, t in (("user", prompt), ("assistant", RUBRIC))
    )
    assert value(answer, prompt=chat) == 0.0
    runs = {"prompt": prompt, "copied_run": 5}
    assert value(RUBRIC, **runs) == 0.0
    assert value(f"{RUBRIC} {own}", **runs) == value(own, **runs) > 0.0
    assert value(own, prompt=prompt, copied_run=1) == value(own, prompt=prompt) == 0.0


def test_a_rubric_in_the_prompt_leaves_the_likeness_of_what_is_not_copied():
    shown = {"prompt": f"Why?\n{RUBRIC}", "reference": "Leaves turn light into sugar."}
    for echo in (" ".join(reversed(words(RUBRIC))), " x ".join(words(RUBRIC))):
        assert value(echo, **shown) == 0.0
    assert value("light", **shown) == 0.0
    assert value("Leaves eat sugar", **shown) == pytest.approx(15.0 * 2 * 2 / (3 + 4))
    assert value(shown["reference"], **shown) == 15.0
    copied = {**shown, "reference": "Photosynthesis by light."}
    assert value("photosynthesis, by light", **copied) == 15.0
    assert value("by light, photosynthesis", **copied) == 0.0


@pytest.mark.parametrize(("rubric", "prompt", "shown"), [
    ("light; water", "It mentions LIGHT, water.", True), ("light; water", "water, light", False),
    ("light", "lights", False), ("light\n\nwater", "1. light 2. water", True),
    (["light", "water"], "1. light 2. water", True), (["light", "water"], "1. light", False),
    ([{"title": "L", "text": "light"}], "light", True), (["", "light"], "light", True),
    ("", "light", False), (None, "light", False),
    ("light", [{"role": "user", "content": "Say light."}], True),
])  # fmt: skip
def test_a_rubric_that_stands_in_the_prompt(rubric, prompt, shown):
    assert contains_rubric(rubric, prompt) is shown


@pytest.mark.parametrize("rubric", [None, "", [], "of by", float("nan")])
def test_a_row_without_a_rubric_does_not_apply(rubric):
    assert value("light", rubric=rubric) is None


@given(WORDS, WORDS, WORDS)
def test_bounds_case_and_space(written, rubric, reference):
    text = " ".join(written)
    told = {"rubric": " ".join(rubric), "reference": " ".join(reference) or "x"}
    got = value(text, **told)
    assert got is None if not {*rubric} - {"of"} else 0.0 <= got <= 15.0
    assert got == value(f"\n{text.upper()} ", **told)


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_a_batch_equals_its_rows_one_by_one(texts):
    completions = [" ".join(text) for text in texts]
    count = len(texts)
    whole = RubricOverlap()(["p"] * count, completions, rubric=[RUBRIC] * count, gold=["x"] * count)
    assert whole == [value(text, prompt="p", reference="x") for text in completions]


def test_the_worst_of_texts_is_compared_in_a_bounded_time():
    begun = time.thread_time()
    one = [word for number in range(2000) for word in ("the", f"a{number}")]
    other = [word for number in range(2000) for word in ("the", f"b{number}")]
    similarity(one, other)
    assert time.thread_time() - begun < 5.0


@given(WORDS, st.integers(0, 8))
def test_more_of_the_vocabulary_never_earns_less(vocabulary, count):
    if vocabulary:
        fewer, more = set(vocabulary[:count]), set(vocabulary[: count + 1])
        assert 0 <= overlap(fewer, vocabulary) <= overlap(more, vocabulary) <= 1
