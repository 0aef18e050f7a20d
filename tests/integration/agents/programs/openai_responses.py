"""An agent of the client of OpenAI by responses, which go on from each other by their ids."""

import asyncio

import game
import openai

TOOLS = [{"type": "function", **game.CHECK, "strict": True}]
client = openai.AsyncOpenAI(base_url=f"{game.URL}/v1", api_key="none")


async def play(player, name, group):
    more = {"model": "latest", "tools": TOOLS, "store": True}
    answer = await client.responses.create(
        **more, input=game.QUESTION, metadata=game.metadata(name, group)
    )
    for _ in range(game.TURNS - 1):
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": player.check_json(call.arguments),
            }
            for call in calls
        ]
        answer = await client.responses.create(
            **more,
            input=results,
            previous_response_id=answer.id,
            metadata=game.metadata(name, group),
        )


def features():
    with openai.OpenAI(base_url=f"{game.URL}/v1", api_key="none", max_retries=0) as plain:
        first = plain.responses.create(model="latest", input="Hello.")
        game.show("kept", plain.responses.retrieve(first.id).output_text == first.output_text)
        with plain.responses.stream(model="latest", input="Hello.") as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            game.show("stream", "".join(pieces) == stream.get_final_response().output_text)
        plain.responses.delete(first.id)
        hello = {"model": "latest", "input": "Hello."}
        cases = {
            "unknown response": {**hello, "previous_response_id": first.id},
            "tool of OpenAI": {**hello, "tools": [{"type": "web_search"}]},
            "too long": {**hello, "input": game.LONG},
        }
        game.show_refusals(plain.responses.create, cases)


features()
asyncio.run(game.train(play))
