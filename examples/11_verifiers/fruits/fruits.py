"""An environment for verifiers 0.1: the user asks for a fruit, and then for another one; one word each is best.

A reply counts by the share of its words that are needed: a fruit alone has 1, a sentence with a fruit in it less, no fruit 0.
"""

import re

import verifiers as vf
from datasets import Dataset

FRUITS = (
    "apple apricot banana blackberry blueberry cherry coconut cranberry date fig grape grapefruit guava kiwi lemon lime mango "
    "melon nectarine olive orange papaya peach pear pineapple plum pomegranate raspberry strawberry tangerine tomato watermelon"
).split()
PLACES = (
    "kitchen garden market basket salad picture story supermarket tree cake pie bowl juice smoothie farm jar table plate "
    "lunchbox picnic dessert jam orchard island shop poem song painting breakfast party"
).split()


def fruit_of(reply: str) -> str | None:
    """The first fruit in a reply."""
    words = [word.removesuffix("s") for word in re.findall(r"[a-z]+", reply.lower())]
    return next((word for word in words if word in FRUITS), None)


def replies(completion: vf.Messages) -> list[str]:
    """What the policy said, turn by turn."""
    return [str(message.content or "") for message in completion if message.role == "assistant"]


def fruits(completion: vf.Messages) -> float:
    """The mean worth of both replies; a fruit that was named before has none."""
    named: set[str | None] = {None}
    total = 0.0
    for reply in replies(completion):
        fruit = fruit_of(reply)
        total += 0.0 if fruit in named else 1.0 / len(reply.split())
        named.add(fruit)
    return total / 2


def words(completion: vf.Messages) -> float:
    """Words of a reply, recorded only."""
    said = replies(completion)
    return sum(len(reply.split()) for reply in said) / max(len(said), 1)


class TwoQuestions(vf.MultiTurnEnv):
    """The user asks for another fruit after the first reply."""

    async def env_response(
        self, messages: vf.Messages, state: vf.State, **kwargs: object
    ) -> vf.Messages:
        """The second question."""
        return [vf.UserMessage(content="Another one. Answer in one word.")]


def load_environment() -> vf.Environment:
    """The last six places are held out."""
    questions = [f"Name a fruit for the {place}. Answer in one word." for place in PLACES]
    data = [{"question": question} for question in questions]
    rubric = vf.Rubric(funcs=[fruits, words], weights=[1.0, 0.0])
    return TwoQuestions(
        dataset=Dataset.from_list(data[:-6]),
        eval_dataset=Dataset.from_list(data[-6:]),
        rubric=rubric,
        max_turns=2,
    )
