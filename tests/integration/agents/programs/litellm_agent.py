"""An agent of litellm, by chats; every second turn is streamed."""

import asyncio

import game
import litellm
import openai

TOOLS = [{"type": "function", "function": game.CHECK}]
usual = {"model": "openai/latest", "api_base": f"{game.URL}/v1", "api_key": "none"}


async def play(player, name, group):
    messages = [{"role": "user", "content": game.QUESTION}]
    # litellm keeps an argument `metadata` to itself, so it goes in `extra_body`.
    more = {"tools": TOOLS, "extra_body": {"store": True, "metadata": game.metadata(name, group)}}
    for turn in range(game.TURNS):
        if turn % 2:
            stream = await litellm.acompletion(**usual, **more, messages=messages, stream=True)
            answer = litellm.stream_chunk_builder([piece async for piece in stream])
        else:
            answer = await litellm.acompletion(**usual, **more, messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = player.check_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def features():
    def ask(text="Hello.", **more):
        messages = [{"role": "user", "content": text}]
        return litellm.completion(**{**usual, "messages": messages, "max_retries": 0, **more})

    whole, stream = ask(seed=1), ask(seed=1, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in stream)
    game.show("stream", text == whole.choices[0].message.content)
    game.show("usage", whole.usage.total_tokens > 0)
    said = litellm.responses(**usual, input="Hello.")
    game.show("responses", said.status)
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    for name, given in {
        "unknown model": {"model": "openai/gpt-5"},
        "too long, as litellm says": {"text": "Hello " * 3000},
        "image": {"text": [image]},
        "unknown field": {"extra_body": {"beam_width": 3}},
    }.items():
        try:
            ask(**given)
        except openai.APIError as error:  # of which the exceptions of litellm are kinds
            game.refused(name, error)


features()
asyncio.run(game.train(play))
