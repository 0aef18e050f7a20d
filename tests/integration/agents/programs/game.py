"""What the programs share: they play a game with a tool, reward each trajectory once, and say what they see, a JSON line each.

They have nothing of Groupwise but the address: rewards are posted by the standard library, as an agent in any language would.
"""

import asyncio
import contextlib
import json
import os
import urllib.request

import openai

URL = os.environ["GROUPWISE_URL"]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
LONG = "Hello " * 3000
STEPS, TRAJECTORIES = int(os.environ["STEPS"]), int(os.environ["TRAJECTORIES"])
TURNS, RIGHT = 4, 8
QUESTION, INSTRUCTIONS = "Guess.", "You guess a number."
CHECK = {
    "name": "check",
    "description": "Says whether a number is right.",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


class Game:
    """One trajectory: the guesses that the model's calls of the tool have made."""

    def __init__(self):
        self.guesses = []

    def check(self, n):
        """The tool."""
        self.guesses.append(n)
        return "right" if n == RIGHT else "wrong"

    def check_json(self, text):
        """The same for arguments as JSON, which may be anything that a model writes."""
        arguments = json.loads(text)
        return self.check(arguments["n"]) if "n" in arguments else "wrong"

    @property
    def reward(self):
        """How near the guesses are on the average, from 0 to 1, less a tenth for each after the first; 0 if there is none."""
        if not self.guesses:
            return 0.0
        near = [max(0.0, 1 - abs(RIGHT - n) / 2) for n in self.guesses]
        return sum(near) / len(near) - 0.1 * (len(near) - 1)


def say(**line):
    """Print what the test reads."""
    print(json.dumps(line), flush=True)


def show(name, seen):
    """Say what a feature of the client gave."""
    say(feature=name, seen=seen)


@contextlib.contextmanager
def expect_refusal(name, kinds=openai.APIError):
    """Say which exception, of `kinds`, the client makes of a refusal."""
    try:
        yield
    except kinds as error:
        say(refusal=name, kinds=[kind.__name__ for kind in type(error).__mro__], message=str(error))


def show_refusals(ask, cases, kinds=openai.APIError):
    """The same of several: `ask(**case)` of each."""
    for name, case in cases.items():
        with expect_refusal(name, kinds):
            ask(**case)


async def chat(player, ask):
    """Play one trajectory by chats: `ask(turn, messages)` is the model's message."""
    messages = [{"role": "user", "content": QUESTION}]
    for turn in range(TURNS):
        message = await ask(turn, messages)
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = player.check_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def metadata(name, group):
    """What the calls of a trajectory say of it."""
    return {"trajectory": name, "group": group}


def headers(name, group):
    """The same, for clients that send no metadata."""
    return {
        "X-Groupwise-Store": "true",
        "X-Groupwise-Trajectory": name,
        "X-Groupwise-Group": group,
    }


def post_reward(name, reward):
    """Give a trajectory its one reward."""
    body = json.dumps({"trajectory": name, "reward": reward}).encode()
    request = urllib.request.Request(
        f"{URL}/rewards", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request) as answer:
        json.load(answer)


async def train(play, bad=()):
    """Have `play(game, name, group)` play trajectories, a group for each step, and reward each. `bad`: exceptions for which the model's
    words are the cause, so that the trajectory is worth what it has reached.
    """

    async def one(step, number):
        game, name = Game(), f"{step}-{number}"  # once in a run; the samples follow from it
        with contextlib.suppress(*bad):
            await play(game, name, f"step-{step}")
        await asyncio.to_thread(post_reward, name, game.reward)
        return game.reward

    for step in range(STEPS):
        rewards = await asyncio.gather(*(one(step, n) for n in range(TRAJECTORIES)))
        say(reward=sum(rewards) / len(rewards))
