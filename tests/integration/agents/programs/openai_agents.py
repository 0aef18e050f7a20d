"""Agents of openai-agents: `responses`, its default, or `chat`. Every second trajectory is streamed, and in every second step they hand
over."""

import asyncio
import contextlib
import itertools
import sys

import game
import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)
kind = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[sys.argv[1]]
model = kind("latest", openai.AsyncOpenAI(base_url=f"{game.URL}/v1", api_key="none"))
played = itertools.count()


class Answer(BaseModel):
    n: int


def agents_of(player):
    """The agent that is asked first, and hands over, and one that does not."""

    @function_tool
    def check(n: int) -> str:
        """Says whether a number is right."""
        return player.check(n)

    usual = {"instructions": game.INSTRUCTIONS, "tools": [check], "model": model}
    other = Agent(name="other", **usual)
    return Agent(name="first", handoffs=[other], **usual), other


async def run(agent, question, streamed=False, **more):
    if not streamed:
        return await Runner.run(agent, question, **more)
    result = Runner.run_streamed(agent, question, **more)
    async for _ in result.stream_events():
        pass
    return result


async def until(holds, agent, question):
    """Run again until this holds of a result: the model writes freely, and may do something else."""
    while True:
        with contextlib.suppress(ModelBehaviorError, MaxTurnsExceeded):
            if holds(result := await run(agent, question)):
                return result


async def play(player, name, group):
    first, other = agents_of(player)
    stored = ModelSettings(store=True, metadata=game.metadata(name, group))
    config = {"run_config": RunConfig(model_settings=stored), "max_turns": game.TURNS}
    # The trajectories of a group are compared, so that they all hand over, or none does.
    hands_over = int(group.removeprefix("step-")) % 2
    start = (first, "Guess, other.") if hands_over else (other, game.QUESTION)
    await run(*start, next(played) % 2 == 1, **config)


async def features():
    player = game.Game()
    first, other = agents_of(player)
    result = await until(lambda result: result.last_agent is other, first, "Guess, other.")
    # The model may also say something with its call, or call twice.
    types = dict.fromkeys(item.type for item in result.new_items)
    game.show("handoff", [each for each in types if each.startswith("handoff")])
    form = Agent(name="form", model=model, output_type=Answer)
    game.show("output_type", type((await run(form, "As JSON.")).final_output).__name__)
    called = await until(
        lambda result: len(result.new_items) > 1,
        other.clone(output_type=Answer),
        game.QUESTION,
    )
    game.show("output_type after calls of tools", type(called.final_output).__name__)
    session = SQLiteSession("session")
    hello = Agent(name="hello", model=model)
    for _ in range(2):
        session_result = await run(hello, "Hello.", session=session)
    game.show("session", len(await session.get_items()))
    streamed = await run(hello, "Hello.", streamed=True)
    game.show("stream", bool(streamed.final_output))
    game.show("usage", session_result.context_wrapper.usage.total_tokens > 0)
    if kind is OpenAIResponsesModel:
        again = await run(hello, "Hello.", previous_response_id=session_result.last_response_id)
        game.show("previous_response_id", again.last_response_id.startswith("resp_"))
    part = {"type": "input_image", "image_url": "http://127.0.0.1/a.png", "detail": "auto"}
    for name, prompt in {
        "too long": game.LONG,
        "image": [{"role": "user", "content": [part]}],
    }.items():
        with game.expect_refusal(name):
            await run(other, prompt)


async def main():
    await features()
    await game.train(play, (ModelBehaviorError, MaxTurnsExceeded))


asyncio.run(main())
