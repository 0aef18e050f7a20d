"""An agent of litellm, by chats; every second turn is streamed."""

import asyncio

import game
import litellm

TOOLS = [{"type": "function", "function": game.CHECK}]
usual = {"model": "openai/latest", "api_base": f"{game.URL}/v1", "api_key": "none"}


async def play(player, name, group):
    # litellm keeps an argument `metadata` to itself, so it goes in `extra_body`.
    more = {"tools": TOOLS, "extra_body": {"store": True, "metadata": game.metadata(name, group)}}

    async def ask(turn, messages):
        if turn % 2:
            stream = await litellm.acompletion(**usual, **more, messages=messages, stream=True)
            answer = litellm.stream_chunk_builder([piece async for piece in stream])
        else:
            answer = await litellm.acompletion(**usual, **more, messages=messages)
        return answer.choices[0].message

    await game.chat(player, ask)


def features():
    def ask(text="Hello.", **more):
        messages = [{"role": "user", "content": text}]
        return litellm.completion(**{**usual, "messages": messages, "max_retries": 0, **more})

    whole, stream = ask(seed=1), ask(seed=1, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in stream)
    game.show("stream", text == whole.choices[0].message.content)
    game.show("usage", whole.usage.total_tokens > 0)
    response = litellm.responses(**usual, input="Hello.")
    game.show("responses", response.status)
    cases = {
        "unknown model": {"model": "openai/gpt-5"},
        "too long, as litellm says": {"text": game.LONG},
        "image": {"text": [game.IMAGE]},
        "unknown field": {"extra_body": {"beam_width": 3}},
    }
    game.show_refusals(ask, cases)  # of which the exceptions of litellm are kinds


features()
asyncio.run(game.train(play))
