"""Words and numbers as pages write them."""

from __future__ import annotations

import time

import pytest

from groupwise.web.templates import gist, number, said, since, written


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1"), (0.0, "0"), (-2.0, "-2"), (0.25, "0.250"), (12.3456, "12.35"), (43812.5, "43,812"), (1e-5, "1e-05"), (2e9, "2e+09"),
     (3, "3"), (None, "–"), (float("nan"), "nan"), (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_have_the_digits_that_count(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_of_a_prompt_the_question_is_shown_without_marks() -> None:
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 9?<|im_end|>\n<|im_start|>assistant\n"
    assert gist(chat) == "system: Be brief. user: What is 2 + 9?"
    assert gist("<start_of_turn>user\nHi<end_of_turn>\n") == "user: Hi"
    assert gist("a <b>bold</b> 1 < 2 |> x") == "a <b>bold</b> 1 < 2 |> x"
    assert gist("x" * 300 + " why?") == "…" + "x" * 155 + " why?"


def test_prompts_of_all_kinds_are_said() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert said("as it is") == "as it is"
    assert said(chat) == "system: Be brief.\n\nuser: Why?"
    assert said([1, 2]) == "[\n  1,\n  2\n]"
    assert said(None) == "null"


def test_times_of_an_api_are_those_of_this_machine() -> None:
    moment = time.time() - 120
    iso = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(moment))
    assert written(iso) == time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment))
    assert since(iso) == "2 min ago"
    assert (written(None), since("")) == ("", "")
