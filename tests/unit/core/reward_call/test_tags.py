"""Tags with names of any kind, and the answer in the last of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.reward_call.tags import (
    REASONING,
    Tags,
    after_reasoning,
    marks,
    opened_reasoning,
)

WHOLE = "<reasoning>r</reasoning><answer>a</answer>"


@pytest.mark.parametrize(("text", "share"), [
    ("", 0.0), ("reasoning answer", 0.0), ("<answer>", 0.25), ("<answer><answer>", 0.25),
    ("<ANSWER>a</Answer>", 0.5), ("<reasoning><answer></answer>", 0.75), (WHOLE, 1.0),
    ("<think>r</think><answer>a</answer>", 0.5),
])  # fmt: skip
def test_share_is_how_many_of_four_tags_occur(text, share):
    assert REASONING.share(text) == share


@pytest.mark.parametrize(("text", "answer"), [
    (WHOLE, "a"), ("<answer>\n 1\n2 \n</answer>", "1\n2"),
    ("<answer>1</answer> or <answer>2</answer>", "2"), ("<answer>1</answer> or <answer>2", "1"),
    ("<answer>1<answer>2</answer>", "2"), ("<answer>1</answer></answer>", "1"),
    ("<Answer>1</ANSWER>", "1"), ("<answer></answer>", ""),
    ("<answer>1</answer><answer></answer>", ""), ("</answer>1<answer>", None), ("1", None),
])  # fmt: skip
def test_the_last_pair_of_answer_tags_counts(text, answer):
    assert REASONING.last_answer(text) == answer


@pytest.mark.parametrize("name", ["a.c", "a|b", "(x", "[z", "a*", "\\d", "$", "^", "final answer"])
def test_a_name_is_text_and_no_pattern(name):
    tags = Tags(answer=name)
    assert tags.last_answer(f"<{name}>1</{name}>") == "1"
    assert tags.counts(f"<{name}>1</{name}>") == (0, 0, 1, 1)
    assert tags.counts("<abc><a><b><aa><5><>") == (0, 0, 0, 0)


def test_marks_of_another_kind():
    tags = Tags(reasoning=("[[", "]]"), answer=("Answer:", "(end)"))
    assert tags.four == ("[[", "]]", "Answer:", "(end)")
    assert tags.counts("[[ 1 ]] answer: 2 (END)") == (1, 1, 1, 1)
    assert tags.last_answer("Answer: 1 (end) answer: 2 Answer: 3 (end)") == "3"
    assert marks("answer") == ("<answer>", "</answer>")


@given(st.text("<>/ansWER aé(", max_size=30), st.text("xé<> ", max_size=8))
def test_any_text_has_a_share_and_what_is_written_last_is_found(before, answer):
    assert REASONING.share(before) in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert REASONING.last_answer(f"{before}<answer>{answer}</answer>") == answer.strip()


def test_a_flood_of_tags_is_read_in_time():
    assert REASONING.last_answer("<answer>" * 50_000) is None


@pytest.mark.parametrize(("text", "said"), [
    ("<think>a</think> b", " b"), ("a</think> b", " b"), ("<THINK>a</Think>b", "b"), ("b <think> a", "b "),
    ("<think>a</think>b<think>c</think>d", "d"), ("<think>a <answer>5</answer>", ""), ("a < b", "a < b"),
    ("<reasoning>a</reasoning>b", "b"), ("<thought>a</thought>b", "b"), ("<thinking>a</thinking>b", "b"),
    ("[THINK]a[/THINK]b", "b"), ("◁think▷a", ""), ("<|begin_of_thought|>a<|end_of_thought|>b", "b"),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"), ("<|channel|>analysis<|message|>a", ""),
    ("analysisSo it is.assistantfinalb", "b"), ("analysisSo", ""), ("analysis of it", "analysis of it"), ("My analysisA", "My analysisA"),
    ("analysis\nWe need", ""), ("<think >a</think>b", "b"), ("<think\n>a", ""), ("<|think|>a", ""),
    ("<start_working_out>a<end_working_out>b", "b"),
    ("<seed:think>a</seed:think>b", "b"), ("<|START_THINKING|>a<|END_THINKING|>b", "b"), ("<unused94>thought a<unused95>b", "b"),
    *[(f"<{name}>a</{name}>b", "b") for name in ("scratchpad", "analysis", "reflection", "thoughts", "reason")], ("[REASONING]a", ""),
])  # fmt: skip
def test_after_reasoning_returns_the_text_behind_the_reasoning(text, said):
    assert after_reasoning(text) == said
    assert after_reasoning(f"[[a]]{text}", ("[[", "]]")) == said


@pytest.mark.parametrize(("prompt", "opened"), [
    ("Why? <think>\n", "<think>\n"), ("Why?[THINK]", "[THINK]"), ("<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
    ("Think in <think> tags. Why?", ""), ("<think>a</think>", ""), ("", ""), ([], ""), ([{"role": "user", "content": "<think>"}], ""),
    ([{"role": "assistant", "content": "Well.\n<think>\nFirst"}], "<think>\nFirst"),
    ([{"role": "assistant", "content": "<think>a</think>b"}], ""),
    ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
])  # fmt: skip
def test_reasoning_that_the_prompt_opens(prompt, opened):
    assert opened_reasoning(prompt) == opened
