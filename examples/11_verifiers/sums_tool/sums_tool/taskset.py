"""Sums of two numbers, scored by the last reply and by whether the tool was called."""

import random
import re

import verifiers.v1 as vf

from sums_tool.calculator import Calculator


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTaskConfig(vf.TaskConfig):
    """Where the tool server runs."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    """One question."""

    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        """The tool that adds."""
        return [Calculator(config.tools)]

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the last number of the last reply is the sum."""
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [self.data.answer])

    @vf.reward(weight=0.2)
    async def uses_tool(self, trace: vf.Trace) -> float:
        """1 if the tool was called."""
        return float(bool(trace.tool_messages))


class SumsConfig(vf.TasksetConfig):
    """The range of the numbers, and the seed of their choice."""

    task: SumTaskConfig = SumTaskConfig()
    largest: int = 50
    seed: int = 0


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """A hundred sums."""

    def load(self) -> list[SumTask]:
        """The tasks."""
        of = random.Random(self.config.seed)
        pairs = [
            (of.randint(1, self.config.largest), of.randint(1, self.config.largest))
            for _ in range(100)
        ]
        return [
            SumTask(
                SumData(
                    prompt=f"What is {a} + {b}?",
                    system_prompt="Use the tool, then answer with the sum.",
                    answer=str(a + b),
                ),
                self.config.task,
            )
            for a, b in pairs
        ]


class SumsEnvironmentConfig(vf.EnvConfig):
    """One agent, which talks and calls tools."""

    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class SumsEnvironment(vf.Env[SumsEnvironmentConfig]):
    """One agent plays each task."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One attempt."""
        await agents.agent.run(task)
