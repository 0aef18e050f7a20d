"""An agent of the client of OpenAI by chats, asynchronous; streams by turns."""

import asyncio

import game
import openai

TOOLS = [{"type": "function", "function": {**game.CHECK, "strict": True}}]
client = openai.AsyncOpenAI(base_url=f"{game.URL}/v1", api_key="none")


async def play(player, name, group):
    messages = [{"role": "user", "content": game.QUESTION}]
    more = {"store": True, "metadata": game.metadata(name, group)}
    for turn in range(game.TURNS):
        asked = {"model": "latest", "messages": messages, "tools": TOOLS, **more}
        if turn % 2:
            async with client.chat.completions.stream(**asked) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = player.check_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def features():
    with openai.OpenAI(base_url=f"{game.URL}/v1", api_key="none", max_retries=0) as plain:
        hello = {"model": "latest", "messages": [{"role": "user", "content": "Hello."}]}
        ask = plain.chat.completions.create
        answer = ask(**hello, seed=1)
        pieces = list(ask(**hello, seed=1, stream=True, stream_options={"include_usage": True}))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1])
        game.show("stream", text == answer.choices[0].message.content)
        game.show("usage", pieces[-1].usage == answer.usage)
        for name, given in {
            "unknown model": {**hello, "model": "gpt-5"},
            "too long": {**hello, "messages": [{"role": "user", "content": "Hello " * 3000}]},
            "image": {**hello, "messages": [{"role": "user", "content": [IMAGE]}]},
            "unknown field": {**hello, "extra_body": {"beam_width": 3}},
        }.items():
            try:
                ask(**given)
            except openai.APIError as error:
                game.refused(name, error)


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}

features()
# The helper for streams raises it where a completion is cut off, because the tool is strict.
asyncio.run(game.train(play, (openai.LengthFinishReasonError,)))
