"""Prompts to tokens: text as it stands, chats through the template, answers that join on."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from groupwise.errors import TaskError
from groupwise.models.tiny import tiny_tokenizer
from groupwise.models.tokens import completion_text, prompt_ids, unannounced

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS}
ENDS = {"chatml": "<|im_end|>\n", "headers": "<|eot|>", "turns": "</turn>\n"}
MARKS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"]
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And\n3 + 3?"},
]


def tokenizer(template: str | None = None, adds_bos: bool = False) -> Any:
    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": MARKS, "bos_token": "<s>"})
    if adds_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    made.chat_template = template
    return made


def tokens(made, ids) -> list[str]:
    return made.convert_ids_to_tokens(list(ids))


# Text


def test_text_is_tokenised_as_it_stands():
    made = tokenizer(CHATML)
    ids = prompt_ids(made, "<|im_start|>user\nhi<|im_end|>")
    assert tokens(made, ids) == ["<|im_start|>", *"user\nhi", "<|im_end|>"]
    with pytest.raises(TaskError, match="no tokens"):
        prompt_ids(made, "")


def test_a_beginning_is_added_once_where_the_model_wants_one():
    made = tokenizer(adds_bos=True)
    assert tokens(made, prompt_ids(made, "hi")) == ["<s>", "h", "i"]
    assert tokens(made, prompt_ids(made, "<s>hi")) == ["<s>", "h", "i"]
    made = tokenizer(adds_bos=False)
    assert made.bos_token_id is not None
    assert tokens(made, prompt_ids(made, "hi")) == ["h", "i"]


# Chats


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", ["6.", "  6, and\n\nthat is all ", "<think>3 + 3</think>6"])
def test_prompt_and_completion_are_the_full_render(name, answer):
    made = tokenizer(TEMPLATES[name], adds_bos=name != "chatml")
    completion = made(answer + ENDS[name], add_special_tokens=False)["input_ids"]
    whole = made.apply_chat_template(
        [*CHAT, {"role": "assistant", "content": answer}], tokenize=False
    )
    asked = prompt_ids(made, CHAT)
    assert tokens(made, asked).count("<s>") == (0 if name == "chatml" else 1)
    joined = [*asked, *completion]
    assert joined == made(whole, add_special_tokens=False)["input_ids"]
    assert completion_text(made, completion).removesuffix("\n") == answer


def test_without_a_template_the_message_says_what_to_do():
    with pytest.raises(TaskError, match=r"no chat template.*model\.chat_template"):
        prompt_ids(tokenizer(None), CHAT)


def test_a_template_that_refuses_is_explained():
    chat = [{"role": "system", "content": "Be kind."}, *CHAT]
    with pytest.raises(TaskError) as caught:
        prompt_ids(tokenizer(TURNS), chat)
    assert "roles system, user, assistant, user: System role" in str(caught.value)
    assert "model.chat_template" in str(caught.value)


# Completions


def test_a_completion_is_text_without_special_tokens():
    made = tokenizer()
    ids = made("a , b's<|im_end|><eos>")["input_ids"]
    assert completion_text(made, ids) == "a , b's"
    assert completion_text(made, ()) == ""


def test_a_broken_template_is_told_with_its_line():
    made = tokenizer("{% for m in messages %}\n{{ m['content'] }}\n{% endif %}")
    with pytest.raises(TaskError, match=r"does not parse: .*'endif'.* \(line 3 of the template\)"):
        prompt_ids(made, CHAT)


def test_a_template_that_does_not_ask_is_warned_of():
    silent = tokenizer("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}")
    said = unannounced(silent, CHAT)
    assert said is not None
    assert "'[assistant] '" in said
    bare = tokenizer("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    assert unannounced(bare, CHAT) is None, "nothing stands before an answer"
    assert unannounced(silent, "text") is None
    assert unannounced(tokenizer("{% broken"), CHAT) is None
    for template in TEMPLATES.values():
        assert unannounced(tokenizer(template), CHAT) is None
