"""Completions that must be tool calls, by a model that knows nothing of them.

1. Every completion that ends is read as calls of the tools, with arguments of their schemas, in each family's notation.
2. Exactly one call where one is asked for; calls or JSON where both are allowed.
3. Log-probabilities are those of the constrained distribution.
4. What cannot be enforced is refused with the tool's name, and so are schemas that take long to compile.
5. Memory does not grow with the schemas that were used, or refused.
"""

from __future__ import annotations

import json
import re
import resource
import time
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from groupwise.core.errors import UsageError
from groupwise.core.types import CallGrammar, GroupRequest, LogitsProcessing, SamplingParams
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.models.tokens import call_markers, completion_text
from groupwise.engine.sampler.json_schemas import (
    SchemaMasks,
    check_calls,
    compile_schema,
)
from groupwise.tasks.openai.tools import split_calls

TOKENIZER: Any = tiny_tokenizer()
EOS = 1
KIND: Any = {
    "type": "object",
    "properties": {"kind": {"$ref": "#/$defs/kind"}},
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["ox", "hen </tool_call>"]}},
}
WILD: Any = {
    "properties": {"wild": {"type": "boolean"}},
    "required": ["wild"],
    "additionalProperties": False,
}
TOOLS = (("look", json.dumps(KIND)), ('call "it"', json.dumps(WILD)))
OFFERED: Any = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": json.loads(text)}}
    for name, text in TOOLS
]
ANSWER = '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'


def request(
    calls: CallGrammar, members=6, schema: str | None = None, max_tokens=400, **params
) -> GroupRequest:
    processing = LogitsProcessing(json_schema=schema, tool_calls=calls)
    ids = tuple(TOKENIZER("sort these")["input_ids"])
    return GroupRequest(
        0,
        ids,
        tuple(range(members)),
        SamplingParams(max_tokens, stop_token_ids=(EOS,), processing=processing, **params),
    )


async def texts(make_sampler, asked: GroupRequest) -> list[str]:
    """Completions that have ended, as the engine reads them."""
    found = await make_sampler(key_length=512).generate(asked)
    whole = [each for each in found if each.finish_reason == "stop"]
    assert whole, "none has ended"
    return [completion_text(TOKENIZER, each.token_ids) for each in whole]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("call_format", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("is_single", [True, False])
async def test_completions_are_calls(make_sampler, call_format, is_single):
    for text in await texts(make_sampler, request(CallGrammar(TOOLS, call_format, is_single))):
        rest, calls = split_calls(text, call_format, OFFERED)
        assert (rest, len(calls) >= 1) == ("", True), text
        assert not is_single or len(calls) == 1
        for call in calls:
            if call.name == "look":
                assert call.arguments["kind"] in ("ox", "hen </tool_call>")
            else:
                assert call.name == 'call "it"'
                assert type(call.arguments["wild"]) is bool


async def test_calls_or_json_of_a_schema(make_sampler):
    group_request = request(CallGrammar(TOOLS, is_single=True), members=24, schema=ANSWER)
    kinds: set[str] = set()
    for text in await texts(make_sampler, group_request):
        rest, calls = split_calls(text, "hermes", OFFERED)
        kinds.add("call" if calls else "answer")
        assert rest == "" if calls else json.loads(rest)["n"] in (1, 2)
    assert kinds == {"call", "answer"}


async def test_a_call_cut_by_max_tokens_does_not_count_as_a_call(make_sampler):
    group_request = request(CallGrammar(TOOLS), members=3, max_tokens=12)
    for each in await make_sampler().generate(group_request):
        assert each.finish_reason == "length"
        assert split_calls(TOKENIZER.decode(each.token_ids), "hermes", OFFERED)[1] == []


async def test_log_probabilities_are_those_of_the_constrained_distribution(make_sampler):
    model: Any = tiny_model(seed=4)
    calls = CallGrammar(TOOLS, is_single=True)
    group_request = request(calls, members=2, temperature=0.7)
    for each in await make_sampler(model, key_length=512).generate(group_request):
        with torch.no_grad():
            whole = torch.tensor([[*group_request.prompt_ids, *each.token_ids]])
            logits_TV = model(input_ids=whole, use_cache=False).logits[0].double()
        (mask,) = SchemaMasks(TOKENIZER).masks(None, (EOS,), 1, calls)
        expected: list[float] = []
        for logits_V, token in zip(
            logits_TV[len(group_request.prompt_ids) - 1 :], each.token_ids, strict=False
        ):
            mask.exclude(logits_V)
            expected.append(float((logits_V / 0.7).log_softmax(-1)[token]))
            mask.advance(token)
        assert each.logprobs == pytest.approx(expected, abs=3e-5)


def follow(masks: SchemaMasks, calls: CallGrammar, token_ids: list[int]) -> None:
    """Assert that these tokens can be drawn one after the other, and then the end."""
    (mask,) = masks.masks(None, (EOS,), 1, calls)
    for token in [*token_ids, EOS]:
        logits_V = torch.zeros(masks._tokenizer.vocab_size + 8)
        mask.exclude(logits_V)
        assert logits_V[token] == 0, masks._tokenizer.decode([token])
        mask.advance(token)


def test_marks_that_are_special_tokens_are_drawn_as_such():
    tokenizer: Any = tiny_tokenizer()
    marks = ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    ids = dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True))
    masks, tools = SchemaMasks(tokenizer), TOOLS[:1]

    def plain(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    arguments = plain('{"kind": "ox"}')
    new = [ids["[TOOL_CALLS]"], *plain("look"), ids["[ARGS]"], *arguments]
    follow(masks, CallGrammar(tools, "mistral"), [*new, *new])
    text = completion_text(tokenizer, new, call_markers(tokenizer))
    assert [call.name for call in split_calls(text, "mistral", OFFERED)[1]] == ["look"]
    body = [*plain('\n{"name": "look", "arguments": '), *arguments, *plain("}\n")]
    follow(masks, CallGrammar(tools), [ids["<tool_call>"], *body, ids["</tool_call>"]])
    (mask,) = masks.masks('{"type": "string"}', (EOS,), 1)
    mask.advance(plain('"')[0])
    logits_V = torch.zeros(len(tokenizer))
    mask.exclude(logits_V)
    assert all(logits_V[id] == -torch.inf for id in ids.values()), "never within a string"


def test_characters_of_several_tokens_are_followed():
    """With the tokenizer of a real model, which works on bytes."""
    tokenizer: Any = load_tokenizer(ModelConfig(name="smollm2-135m-instruct"))
    masks, said = SchemaMasks(tokenizer), 'é 中文 🐂 \\" <|im_end|> </tool_call>'
    schema = '{"properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'
    text = f'<tool_call>\n{{"name": "look", "arguments": {{"a": "{said}"}}}}\n</tool_call>'
    ids = [id for piece in pieces_of(text) for id in tokenizer(piece)["input_ids"]]
    calls = CallGrammar((("look", schema),))
    (mask,) = masks.masks(None, (tokenizer.eos_token_id,), 1, calls)
    special = [id for id, token in tokenizer.added_tokens_decoder.items() if token.special]
    for token in [*ids, tokenizer.eos_token_id]:
        logits_V = torch.zeros(len(tokenizer))
        mask.exclude(logits_V)
        allowed = [id for id in special if logits_V[id] == 0]
        assert allowed == [id for id in (tokenizer.eos_token_id,) if id == token]
        assert logits_V[token] == 0, tokenizer.decode([token])
        mask.advance(token)
    (call,) = split_calls(completion_text(tokenizer, ids), "hermes", [])[1]
    assert call.arguments["a"] == said.replace("\\", "")


def pieces_of(text: str) -> list[str]:
    """The text cut so that no piece is a special token."""
    return [part for part in re.split(r"(?<=<)(?=\|)", text) if part]


WIDE = json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(4000)}})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"type": "string"}', "object"),
        ('{"properties": {"a": {"not": {}}}}', "not"),
        ('{"properties": {"a": {"not": {}}}, "x-guidance": {"lenient": true}}', "not"),
        (WIDE, "1000"),
    ],
)
def test_an_unsupported_tool_schema_is_refused_with_the_tools_name(schema, said):
    started = time.thread_time()
    for calls in (CallGrammar((("bad", schema),)), CallGrammar((TOOLS[0], ("bad", schema)))):
        with pytest.raises(UsageError, match=f"'bad'.*{said}"):
            check_calls(calls)
        with pytest.raises(UsageError, match=f"'bad'.*{said}"):
            SchemaMasks(TOKENIZER).masks(None, (EOS,), 1, calls)
    assert time.thread_time() - started < 2, "others wait for it"


def test_memory_does_not_grow_with_schemas():
    masks = SchemaMasks(TOKENIZER)

    def use(first: int, count: int) -> None:
        for number in range(first, first + count):
            properties = {f"p{number}-{part}": {"type": "string"} for part in range(8)}
            schema = json.dumps({"type": "object", "properties": properties})
            (mask,) = masks.masks(schema, (EOS,), 1)
            mask.exclude(torch.zeros(len(TOKENIZER)))
            with pytest.raises(UsageError):
                compile_schema(json.dumps({"not": properties}))

    use(0, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    use(100, 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB
