"""What the assistant wrote, for the templates of real model families, against spans made by hand.

⟦ and ⟧ stand around the tokens that are trained. Every span ends with the token that ends a turn, which is trained once, and not with
the line break that a template writes after it.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupwise.core.errors import TaskError
from groupwise.engine.models import chat_masks
from groupwise.engine.models.chat_masks import (
    Chat,
    MaskedRow,
    assistant_turns,
    mask_completion,
    mask_text,
    mask_turns,
    mask_whole_chat,
)
from groupwise.engine.models.tokens import text_ids
from tests.chat import chat_tokenizer

SYSTEM = {"role": "system", "content": "be kind"}
TWO_TURNS = [
    {"role": "user", "content": " 1+1? "},
    {"role": "assistant", "content": " 2\n"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
THOUGHT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "one more"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "<think>\nagain\n</think>\n\nyes"},
]
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"name": "add"}]
WITH_TOOLS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "reasoning_content": "ask", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2", "reasoning_content": "so"},
]

CHATML = (
    "<|im_start|>user\n 1+1? <|im_end|>\n<|im_start|>assistant\n⟦ 2\n<|im_end|>⟧\n"
    "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
)
CASES: dict[str, tuple[str, list[dict[str, Any]], list[Any] | None, list[str]]] = {
    "chatml": ("chatml", TWO_TURNS, None, [CHATML]),
    "mistral has no prompt for the answer": (
        "mistral", TWO_TURNS, None, ["<s>[INST]  1+1? [/INST]⟦ 2</s>⟧[INST] sure?[/INST]⟦ yes</s>⟧"],
    ),
    "qwen 3 forgets what it thought before the last question": (
        "qwen3",
        THOUGHT,
        None,
        [
            "<|im_start|>user\n1+1?<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\none more\n</think>\n\n2<|im_end|>⟧\n",
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\nsure?<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nagain\n</think>\n\nyes<|im_end|>⟧\n",
        ],
    ),
    "qwen 3 keeps its thoughts while it uses tools": (
        "qwen3",
        WITH_TOOLS,
        TOOLS,
        [
            '<|im_start|>system\n# Tools\n{"name": "add"}\n<|im_end|>\n'
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nask\n</think>\n\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nso\n</think>\n\n2<|im_end|>⟧\n"
        ],
    ),
    "marks of the template": ("marked", TWO_TURNS, None, [CHATML]),
    "marks of the template from the first message on": (
        "marked",
        TWO_TURNS[1:],
        None,
        [
            "<|im_start|>assistant\n⟦ 2\n<|im_end|>⟧\n"
            "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
        ],
    ),
}  # fmt: skip


def shown(tokenizer: Any, row: MaskedRow) -> str:
    """The row as text with ⟦ ⟧ around what is trained."""
    text, inside = "", 0
    for token, trained in zip(row.ids, row.mask, strict=True):
        if trained != inside:
            text += "⟦" if trained else "⟧"
        text += tokenizer.decode([token])
        inside = trained
    return text + "⟧" * inside


def masked(family: str, messages, tools=None, turns=None, **keywords):
    tokenizer = chat_tokenizer(family)
    chat = Chat(messages, tools or (), keywords)
    rows = mask_turns(tokenizer, chat, assistant_turns(chat) if turns is None else turns)
    return tokenizer, chat, rows


@pytest.mark.parametrize("case", CASES)
def test_spans(case):
    family, messages, tools, wanted = CASES[case]
    tokenizer, _, rows = masked(family, messages, tools)
    assert [shown(tokenizer, row) for row in rows] == wanted
    assert sum(row.ends for row in rows) == sum(row.stretches for row in rows) == 2


def test_no_text_is_tokenised_twice(monkeypatch):
    texts = []
    monkeypatch.setattr(
        chat_masks, "text_ids", lambda told, text: texts.append(text) or text_ids(told, text)
    )
    masked("chatml", TWO_TURNS)
    assert len(set(texts)) == len(texts) == 6


def test_end_tokens_are_not_looked_for():
    """An end token that stands within what the assistant wrote ends nothing."""
    quoted = [TWO_TURNS[0], {"role": "assistant", "content": "say <|im_end|> twice"}]
    tokenizer, _, rows = masked("chatml", quoted)
    assert shown(tokenizer, rows[0]).endswith("⟦say <|im_end|> twice<|im_end|>⟧\n")
    assert rows[0].ends == 1


def test_a_template_without_an_end_token_is_distinguished_from_one_with():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    )
    (row,) = mask_turns(tokenizer, Chat(TWO_TURNS[:2]), [1])
    assert shown(tokenizer, row) == "user: 1+1? \nassistant:⟦ 2\n\n⟧"
    assert (row.ends, row.stretches) == (0, 1)


@pytest.mark.parametrize(("family", "messages", "said"), [
    ("gemma", [SYSTEM, *TWO_TURNS], "roles system, user"), ("gemma", [TWO_TURNS[0], TWO_TURNS[0], TWO_TURNS[1]], "must alternate"),
    ("chatml", TWO_TURNS[1:2], "begins with the assistant"),
    ("mistral", [SYSTEM, *TWO_TURNS], r"goes on with 'be kind\\n\\n 1\+1\? \[/INST\]'"),
    ("deepseek_r1", TWO_TURNS, r"goes on with '<think>\\n', it writes ' 2\\n</s>'"),
])  # fmt: skip
def test_chats_that_a_template_cannot_mask_are_refused(family, messages, said):
    with pytest.raises(TaskError, match=said):
        masked(family, messages)


def test_whole_conversations_and_texts():
    tokenizer = chat_tokenizer("chatml")
    whole = CHATML.replace("⟦", "").replace("⟧", "")
    assert shown(tokenizer, mask_whole_chat(tokenizer, Chat(TWO_TURNS))) == f"⟦{whole}⟧"
    for text in ("abc", "abc<|im_end|>"):
        row = mask_text(tokenizer, text)
        assert (shown(tokenizer, row), row.ends) == ("⟦abc<|im_end|>⟧", 1)
    for completion in ("4", "4<|im_end|>"):
        for whole, text in ((False, "2+2=⟦4"), (True, "⟦2+2=4")):
            row = mask_completion(tokenizer, "2+2=", completion, train_prompt=whole)
            assert shown(tokenizer, row) == text + "<|im_end|>⟧"


def test_the_prompt_keeps_its_tokens_where_the_border_could_be_merged_away():
    """The model is asked with the tokens of the prompt alone, so a pair across the border may not become one token."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    plain = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    plain.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [2]
    row = mask_completion(tokenizer, "a", "b", train_prompt=False)
    assert (row.ids, row.mask) == ((0, 1, 3), (0, 1, 1))


def test_the_header_is_not_trained_where_the_template_does_not_ask():
    tokenizer = chat_tokenizer("chatml")
    said = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    tokenizer.chat_template = "{% for m in messages %}" + said + "{% endfor %}"
    (row,) = mask_turns(tokenizer, Chat(TWO_TURNS), [1, 3])
    assert shown(tokenizer, row) == CHATML
    letter = [TWO_TURNS[0], {"role": "assistant", "content": "a"}]
    (row,) = mask_turns(tokenizer, Chat(letter), [1])
    assert shown(tokenizer, row).endswith("<|im_start|>assistant\n⟦a<|im_end|>⟧\n")
    rows = mask_turns(tokenizer, Chat([*TWO_TURNS[:1], {**TWO_TURNS[1], "name": "me"}]), [1])
    assert "assistant\n⟦" in shown(tokenizer, rows[0])
