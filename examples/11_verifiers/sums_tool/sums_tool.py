"""An environment for verifiers 0.1: sums, with a tool that adds."""

import random

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def load_environment(largest: int = 50, seed: int = 0) -> vf.Environment:
    """Questions with numbers up to `largest`; the held-out ones are others."""

    def rows(count: int, of: random.Random) -> Dataset:
        pairs = [(of.randint(1, largest), of.randint(1, largest)) for _ in range(count)]
        questions = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
        return Dataset.from_list(questions)

    parser = vf.Parser()

    def correct(completion: vf.Messages, answer: str) -> float:
        """1 if the last message has the sum."""
        return float(answer in (parser.parse_answer(completion) or ""))

    def uses_tool(completion: vf.Messages) -> float:
        """1 if a tool was called."""
        return float(any(message.role == "tool" for message in completion))

    rubric = vf.Rubric(funcs=[correct, uses_tool], weights=[1.0, 0.2], parser=parser)
    return vf.ToolEnv(
        tools=[add],
        max_turns=4,
        dataset=rows(100, random.Random(seed)),
        eval_dataset=rows(20, random.Random(seed + 1)),
        system_prompt="Use the tool, then answer with the sum.",
        rubric=rubric,
    )
