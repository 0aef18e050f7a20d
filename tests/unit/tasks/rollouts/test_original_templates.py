"""Chat templates as published with the models: TRL has byte-for-byte copies of them next to its own.

1. Prompt and completion together are the tokens of the whole conversation, for one turn and for several.
2. What is trained of a given conversation are spans made by hand; TRL's marks for the same templates agree up to white space.
3. A template that rewrites an earlier turn begins a new row, with the tokens that it asks with.
"""

from __future__ import annotations

import re
import string
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupwise.core.types import Completion, SamplingParams
from groupwise.engine.models.chat_masks import Chat, mask_turns
from groupwise.engine.models.tokens import prompt_ids
from groupwise.tasks.rollouts.dialogue import begin_dialogue

TRL = find_spec("trl")
"""Found, but not imported, which takes seconds."""
assert TRL is not None
assert TRL.origin is not None
FOLDER = Path(TRL.origin).parent / "chat_templates"
MARKS = re.compile(r"<\|[^|<>\s]+\|>|<[a-zA-Z_]+>")
ENDS = {
    "qwen2_5": ("<|im_end|>",), "qwen3": ("<|im_end|>",), "qwen3_instruct_2507": ("<|im_end|>",),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"), "gemma": ("<bos>", "<end_of_turn>"),
    "gemma3": ("<bos>", "<end_of_turn>"), "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
}  # fmt: skip
"""The tokens that begin a text, where there is one, and that end a turn."""

ADDED = {"qwen3": "<think>\n\n</think>\n\n"}
"""What a template puts before the answer of its last turn, so that the model has to write it."""

TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes, 2"},
]


def tokenizer_of(template: str, family: str | None = None) -> Any:
    """One token for each character and for each mark of the template."""
    ends = ENDS[family or template]
    text = (FOLDER / f"{template}.jinja").read_text()
    vocabulary = {character: number for number, character in enumerate(string.printable)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="\x0c"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=ends[-1],
        pad_token=ends[-1],
        bos_token=ends[0] if len(ends) > 1 else None,
        additional_special_tokens=sorted({*MARKS.findall(text), *ends}),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = text
    return tokenizer


def answer(family: str, text: str) -> str:
    """What the model writes of a turn: the text, what the template wants before it, and the end token."""
    return ADDED.get(family, "") + text + ENDS[family][-1]


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def spans(tokenizer: Any, rows: Any) -> list[str]:
    """The trained stretches of all rows as text."""
    found: list[str] = []
    for row in rows:
        before = 0
        for token, trained in zip(row.ids, row.mask, strict=True):
            if trained and not before:
                found.append("")
            if trained:
                found[-1] += tokenizer.decode([token])
            before = trained
    return found


@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize("family", ENDS)
def test_prompt_and_completion_are_the_whole_conversation(family, turn):
    tokenizer = tokenizer_of(family)
    whole = tokenizer.apply_chat_template(TALK[: turn + 1], tokenize=False)
    said = answer(family, TALK[turn]["content"])
    joined = (*prompt_ids(tokenizer, TALK[:turn]), *ids_of(tokenizer, said))
    expected = ids_of(tokenizer, whole)
    assert joined == expected[: len(joined)]
    assert tokenizer.decode(expected[len(joined) :]).strip() == "", "white space nobody writes"


@pytest.mark.parametrize("family", ENDS)
def test_only_the_assistants_answers_are_trained(family):
    tokenizer = tokenizer_of(family)
    rows = mask_turns(tokenizer, Chat(TALK), [1, 3])
    assert spans(tokenizer, rows) == [answer(family, TALK[turn]["content"]) for turn in (1, 3)]
    assert sum(row.ends for row in rows) == 2
    assert len(rows) == (2 if family in ADDED else 1)


@pytest.mark.parametrize("family", ENDS)
def test_the_marks_of_trl_agree(family):
    """Its own copies of the templates mark what the assistant wrote; some marks take in a line break at either end."""
    marked = tokenizer_of(f"{family}_training", family)
    theirs = spans(marked, mask_turns(marked, Chat(TALK), [1, 3]))
    assert [span.strip() for span in theirs] == [
        answer(family, TALK[turn]["content"]) for turn in (1, 3)
    ]


def completion(tokenizer: Any, text: str) -> Completion:
    ids = ids_of(tokenizer, text)
    return Completion(ids, (-1.0,) * len(ids), "stop", 0, 0, "f")


@pytest.mark.parametrize("family", sorted(ENDS.keys() - ADDED.keys()))
def test_a_dialogue_has_the_tokens_of_the_template(family):
    tokenizer = tokenizer_of(family)
    dialogue = begin_dialogue(tokenizer, TALK[:1], (), {}, None)
    assert dialogue.context == prompt_ids(tokenizer, TALK[:1])
    dialogue.say(completion(tokenizer, answer(family, "2.")), SamplingParams(9))
    assert dialogue.hear("sure?", 9999)
    assert dialogue.context == prompt_ids(tokenizer, TALK[:3])
    assert [segment.source for segment in dialogue.segments] == ["policy", "environment"]


@pytest.mark.parametrize("family", sorted(ENDS.keys() - ADDED.keys()))
def test_text_of_an_environment_contains_no_control_tokens(family):
    tokenizer = tokenizer_of(family)
    contexts: list[tuple[int, ...]] = []
    for brought in ("x", "x".join(tokenizer.all_special_tokens)):
        dialogue = begin_dialogue(tokenizer, TALK[:1], (), {}, None)
        dialogue.say(completion(tokenizer, answer(family, "2.")), SamplingParams(9))
        assert dialogue.hear(brought, 9999)
        contexts.append(dialogue.context)
    assert brought in tokenizer.decode(list(contexts[1]))
    special = {*tokenizer.all_special_ids}
    plain, forged = ([each for each in ids if each in special] for ids in contexts)
    assert plain == forged


def test_a_dialogue_begins_a_new_row_where_the_template_drops_a_thought():
    tokenizer = tokenizer_of("qwen3")
    dialogue = begin_dialogue(tokenizer, TALK[:1], (), {}, None)
    thought = "<think>\none and one\n</think>\n\n2."
    dialogue.say(completion(tokenizer, f"{thought}<|im_end|>"), SamplingParams(9))
    assert dialogue.hear("sure?", 9999)
    assert dialogue.context == prompt_ids(tokenizer, TALK[:3])
    assert "one and one" not in tokenizer.decode(list(dialogue.context))
    dialogue.say(completion(tokenizer, "yes<|im_end|>"), SamplingParams(9))
    first, second = dialogue.segments
    assert first.prompt_ids is None
    assert second.prompt_ids == prompt_ids(tokenizer, TALK[:3])
