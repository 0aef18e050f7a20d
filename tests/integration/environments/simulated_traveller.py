"""An environment of verifiers 0.1 whose user is a model, behind the endpoint that OPENAI_BASE_URL names."""

# pyright: reportMissingImports=false
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


class Traveller(vf.MultiTurnEnv):
    """The user answers each reply of the policy."""

    async def env_response(
        self, messages: vf.Messages, state: vf.State, **kwargs: object
    ) -> vf.Messages:
        """What the simulated user says."""
        reply = {"role": "user", "content": str(messages[-1].content)}
        async with AsyncOpenAI() as client:
            answer = await client.chat.completions.create(model="user", messages=[reply])
        return [vf.UserMessage(content=answer.choices[0].message.content)]


def named_rome(completion: vf.Messages) -> float:
    """1 if the last reply names the city that only the user knows."""
    return float("Rome" in str(completion[-1].content))


def load_environment() -> vf.Environment:
    """One question, of two turns."""
    data = Dataset.from_list([{"question": "I want to travel."}] * 2)
    return Traveller(dataset=data, rubric=vf.Rubric(funcs=[named_rome]), max_turns=2)
