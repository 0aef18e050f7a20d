"""An agent of the client of OpenAI by chats, asynchronous; streams by turns."""

import asyncio

import game
import openai

TOOLS = [{"type": "function", "function": {**game.CHECK, "strict": True}}]
client = openai.AsyncOpenAI(base_url=f"{game.URL}/v1", api_key="none")


async def play(player, name, group):
    more = {"store": True, "metadata": game.metadata(name, group)}

    async def ask(turn, messages):
        request = {"model": "latest", "messages": messages, "tools": TOOLS, **more}
        if turn % 2:
            async with client.chat.completions.stream(**request) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**request)
        return answer.choices[0].message

    await game.chat(player, ask)


def features():
    with openai.OpenAI(base_url=f"{game.URL}/v1", api_key="none", max_retries=0) as plain:
        hello = {"model": "latest", "messages": [{"role": "user", "content": "Hello."}]}
        ask = plain.chat.completions.create
        answer = ask(**hello, seed=1)
        pieces = list(ask(**hello, seed=1, stream=True, stream_options={"include_usage": True}))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1])
        game.show("stream", text == answer.choices[0].message.content)
        game.show("usage", pieces[-1].usage == answer.usage)
        cases = {
            "unknown model": {**hello, "model": "gpt-5"},
            "too long": {**hello, "messages": [{"role": "user", "content": game.LONG}]},
            "image": {**hello, "messages": [{"role": "user", "content": [game.IMAGE]}]},
            "unknown field": {**hello, "extra_body": {"beam_width": 3}},
        }
        game.show_refusals(ask, cases)


features()
# The helper for streams raises it where a completion is cut off, because the tool is strict.
asyncio.run(game.train(play, (openai.LengthFinishReasonError,)))
