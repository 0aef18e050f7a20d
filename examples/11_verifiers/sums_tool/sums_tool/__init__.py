"""A taskset for verifiers 0.4: sums, with a tool that adds. The agent is the harness `null`, which talks and calls tools."""

from sums_tool.taskset import SumsEnvironment, SumsTaskset

__all__ = ["SumsEnvironment", "SumsTaskset"]
