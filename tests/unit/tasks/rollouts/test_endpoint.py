"""The address of one attempt, called by OpenAI's client: each route records a turn, and no other attempt can use it."""

import asyncio
from typing import Any

import openai
import pytest

from groupwise.tasks.rollouts.endpoint import PolicyCalls, PolicyEndpoint
from tests.chat import chat_tokenizer
from tests.scripted import ScriptedSampler, ask_for

TOKENIZER = chat_tokenizer("chatml")
USER: Any = [{"role": "user", "content": "Say a letter."}]


def ask_all(base_url: str) -> list[str]:
    """The texts of a chat, a stream, a response that goes on from another, and a completion."""
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        chat = client.chat.completions.create(
            model="gpt-4o", messages=USER, temperature=0, seed=1, top_p=0.5
        )
        stream = client.chat.completions.create(model="gpt-4o", messages=USER, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        first = client.responses.create(model="gpt-4o", input="Say a letter.")
        second = client.responses.create(
            model="gpt-4o", input="Another.", previous_response_id=first.id
        )
        text = client.completions.create(model="gpt-4o", prompt="abc")
        with pytest.raises(openai.BadRequestError, match=r"rollout\.max_turns"):
            client.chat.completions.create(model="gpt-4o", messages=USER)
        content = str(chat.choices[0].message.content)
        return [content, "".join(pieces), second.output_text, text.choices[0].text]


async def test_all_routes_are_kept_as_turns_and_an_ended_attempt_is_refused():
    sampler = ScriptedSampler(TOKENIZER, lambda seed, seen: "b<|im_end|>")
    ask = ask_for(TOKENIZER, USER, [1, 2])
    calls = PolicyCalls(sampler, TOKENIZER, ask, member=0, max_turns=5, longest=500)
    endpoint = PolicyEndpoint()
    await endpoint.start()
    try:
        base_url, key = endpoint.open(calls)
        assert await asyncio.to_thread(ask_all, base_url) == ["b"] * 4
        assert {request.params.temperature for request in sampler.requests} == {0.7}
        assert (len(calls.turns), calls.cut_by) == (5, "turns")
        assert "Another." in TOKENIZER.decode(sampler.requests[3].prompt_ids)
        await endpoint.end(key)
        with (
            openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client,
            pytest.raises(openai.NotFoundError),
        ):
            await asyncio.to_thread(client.models.list)
    finally:
        await endpoint.close()
