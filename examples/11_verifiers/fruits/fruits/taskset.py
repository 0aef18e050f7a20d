"""The policy names a fruit, and is asked for another one, which must differ.

A reply counts by the share of its words that are needed: a fruit alone has 1, a sentence with a fruit in it less, no fruit 0.
"""

import re

import verifiers.v1 as vf

FRUITS = (
    "apple apricot banana blackberry blueberry cherry coconut cranberry date fig grape grapefruit guava kiwi lemon lime mango melon "
    "nectarine olive orange papaya peach pear pineapple plum pomegranate raspberry strawberry tangerine tomato watermelon"
).split()
PLACES = (
    "kitchen",
    "garden",
    "market",
    "basket",
    "salad",
    "picture",
    "story",
    "supermarket",
    "tree",
    "cake",
)


def fruit_of(reply: str) -> str | None:
    """The first fruit in a reply."""
    words = re.findall(r"[a-z]+", reply.lower())
    return next(
        (word for word in words if word in FRUITS or word.removesuffix("s") in FRUITS), None
    )


def worth(reply: str, named: set[str]) -> float:
    """One by the number of words, if the reply has a fruit that was not named before."""
    fruit = fruit_of(reply)
    return 0.0 if fruit is None or fruit in named else 1.0 / len(reply.split())


class FruitsTask(vf.Task[vf.TaskData]):
    """Scored by what the policy said in both turns."""

    @vf.reward(weight=1.0)
    async def fruits(self, trace: vf.Trace) -> float:
        """The mean worth of both replies."""
        named: set[str] = set()
        total = 0.0
        for message in trace.assistant_messages:
            total += worth(message.content or "", named)
            named.add(fruit_of(message.content or "") or "")
        return total / 2

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        """Words of a reply."""
        lengths = [len((message.content or "").split()) for message in trace.assistant_messages]
        return sum(lengths) / max(len(lengths), 1)


class FruitsTaskset(vf.Taskset[FruitsTask, vf.TasksetConfig]):
    """A question for each place."""

    def load(self) -> list[FruitsTask]:
        """The tasks."""
        texts = [f"Name a fruit for the {place}. Answer in one word." for place in PLACES]
        return [FruitsTask(vf.TaskData(prompt=text), self.config.task) for text in texts]


class FruitsConfig(vf.EnvConfig):
    """One agent, which only talks."""

    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class FruitsEnvironment(vf.Env[FruitsConfig]):
    """The user asks twice."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One conversation."""
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("Another one. Answer in one word.")
