"""An environment of verifiers 0.1 whose user is a model, and whose rewards ask a judge and compare the attempts of a group."""

# pyright: reportMissingImports=false
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


class Reader(vf.MultiTurnEnv):
    """The user, a model behind the endpoint that OPENAI_BASE_URL names, answers the first poem."""

    async def env_response(
        self, messages: vf.Messages, state: vf.State, **kwargs: object
    ) -> vf.Messages:
        """What the simulated user says."""
        poem = str(messages[-1].content)
        async with AsyncOpenAI() as client:
            answer = await client.chat.completions.create(
                model="user", messages=[{"role": "user", "content": poem}]
            )
        return [vf.UserMessage(content=answer.choices[0].message.content)]


async def praise(judge, prompt, completion, answer, state) -> float:
    """What the judge says: yes or no."""
    return float("yes" in await judge(prompt, completion, answer, state))


def shortest(completions) -> list[float]:
    """Give 1 to the completion whose last poem is the shortest of the group, and 0 to the others."""
    lengths = [len(str(completion[-1].content)) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def load_environment() -> vf.Environment:
    """Four times the same question."""
    rubric = vf.JudgeRubric()
    rubric.add_reward_func(praise)
    rubric.add_reward_func(shortest, weight=0.5)
    poems = [{"question": "Write a poem.", "answer": "a poem"}] * 4
    return Reader(dataset=Dataset.from_list(poems), rubric=rubric, max_turns=2)
