"""An agent of langchain, which is a graph of langgraph: `chat`, or `responses`."""

import asyncio
import sys

import game
import openai
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel

usual = {"model": "latest", "base_url": f"{game.URL}/v1", "api_key": "none"}
usual["use_responses_api"] = sys.argv[1] == "responses"


class Answer(BaseModel):
    """An answer."""

    n: int


def tool_of(player):
    @tool
    def check(n: int) -> str:
        """Says whether a number is right."""
        return player.check(n)

    return check


async def play(player, name, group):
    # A model for each trajectory: its calls say to which one they belong, here in the body, there in headers.
    if usual["use_responses_api"]:
        model = ChatOpenAI(**usual, default_headers=game.headers(name, group))
    else:
        stored = {"store": True, "metadata": game.metadata(name, group)}
        model = ChatOpenAI(**usual, extra_body=stored)
    agent = create_agent(model, [tool_of(player)], system_prompt=game.INSTRUCTIONS)
    state = {"messages": [("user", game.QUESTION)]}
    await agent.ainvoke(state, {"recursion_limit": 2 * game.TURNS})


def features():
    model = ChatOpenAI(**usual, max_retries=0)
    whole = None
    for piece in model.stream("Hello."):
        whole = piece if whole is None else whole + piece
    game.show("stream", bool(whole.text))
    tools = model.bind_tools([tool_of(game.Game())])
    while True:  # the model writes freely, and may do something else
        called = tools.invoke(game.QUESTION)
        if called.tool_calls:
            break
    game.show("tools", called.tool_calls[0]["name"])
    whole = None
    while whole is None or not whole.tool_calls:
        whole = None
        for piece in tools.stream(game.QUESTION):
            whole = piece if whole is None else whole + piece
    game.show("streamed tools", whole.tool_calls[0]["type"])
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Answer, method=method).invoke("As JSON.")
        game.show(f"structured output by {method}", type(answer).__name__)
    game.show("usage", called.usage_metadata["total_tokens"] > 0)
    cases = {
        "too long, as langchain says": {"input": game.LONG},
        "image": {"input": [("user", [game.IMAGE])]},
    }
    game.show_refusals(model.invoke, cases, (openai.APIError, ContextOverflowError))
    unknown = ChatOpenAI(**{**usual, "model": "gpt-5"})
    game.show_refusals(unknown.invoke, {"unknown model": {"input": "Hello."}})


features()
asyncio.run(game.train(play, (GraphRecursionError,)))
