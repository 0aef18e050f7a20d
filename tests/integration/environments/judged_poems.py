"""An environment of verifiers 0.1 whose rewards ask a judge, and compare the attempts of a group."""

# pyright: reportMissingImports=false
import verifiers as vf
from datasets import Dataset


async def praise(judge, prompt, completion, answer, state) -> float:
    """What the judge says: yes or no."""
    return float("yes" in await judge(prompt, completion, answer, state))


def shortest(completions) -> list[float]:
    """1 for the shortest of the group."""
    lengths = [len(str(completion[-1].content)) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def load_environment() -> vf.Environment:
    """Four times the same question."""
    rubric = vf.JudgeRubric()
    rubric.add_reward_func(praise)
    rubric.add_reward_func(shortest, weight=0.5)
    poems = [{"question": "Write a poem.", "answer": "a poem"}] * 4
    return vf.SingleTurnEnv(dataset=Dataset.from_list(poems), rubric=rubric)
