"""Tools of MCP servers: what a rollout gets from them, what they leave behind, and how their failures are handled."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import groupwise
from groupwise.core.errors import ConfigError, TaskError
from groupwise.runs.store import Store
from groupwise.tasks.mcp_tools import McpTools
from groupwise.tasks.tools import ToolEnvironment, ToolUnavailable
from tests.ports import free_port

SERVER = Path(__file__).parents[2] / "fixtures" / "mcp" / "server.py"
STDIO: dict[str, Any] = {"command": sys.executable, "args": [str(SERVER)]}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def begun(tools: McpTools) -> ToolEnvironment:
    environment = tools()
    await environment.reset(prompt=[{"role": "user", "content": "p"}])
    return environment


async def tool_answers(environment: ToolEnvironment, *calls: str) -> list[str]:
    observation: Any = (await environment.step("".join(calls))).observation
    return [message["content"] for message in observation]


async def test_a_rollout_calls_the_tools_that_are_offered() -> None:
    offered = {"tools": ["add", "speak"], "tool_prefix": "my_", "max_result_length": 3}
    tools = McpTools({"one": {**STDIO, **offered}, "two": {**STDIO, "tools": ["add"]}})
    functions = [schema["function"] for schema in tools.schemas]
    assert [function["name"] for function in functions] == ["my_add", "my_speak", "add"]
    assert functions[0]["description"] == "Add two numbers."
    assert functions[0]["parameters"]["required"] == ["a", "b"]
    rollout = await begun(tools)
    answers = await tool_answers(
        rollout, call("my_add", a=1, b=2), call("add", a=3, b=4), call("my_speak", length=5),
        call("speak", length=5), call("add", a="x", b=1),
    )  # fmt: skip
    assert answers[:3] == ["3", "7", "aaa\n[cut off: 2 more characters]"]
    assert answers[3].startswith("error: there is no tool 'speak'")
    assert answers[4].startswith("error: ")
    assert await rollout.metrics() == {"tool_calls": 4, "tool_errors": 1}
    await rollout.close()


async def test_nothing_of_a_rollout_reaches_another_unless_the_server_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLOUR", "red")
    own = {**STDIO, "tools": ["remember"], "inherit_env": ["COLOUR"]}
    shared = {**STDIO, "tools": ["remember"], "shared": True, "tool_prefix": "s_"}
    tools = McpTools({"own": own, "shared": shared})
    first, second = await begun(tools), await begun(tools)
    assert await tool_answers(first, call("remember", note="x"), call("s_remember", note="x")) == [
        "x x red",
        "x x None",
    ]
    await first.close()
    assert await tool_answers(second, call("remember", note="y"), call("s_remember", note="y")) == [
        "y y red",
        "x+y x+y None",
    ]
    await second.close()


async def test_a_server_that_hangs_or_dies_is_an_error_of_one_call() -> None:
    rollout = await begun(McpTools({"one": {**STDIO, "time_limit": 2.0}}))
    (late,) = await tool_answers(rollout, call("hang"))
    assert late.startswith("error: one did not answer within 2 s;")
    assert await tool_answers(rollout, call("add", a=1, b=2)) == ["3"]
    (ended,) = await tool_answers(rollout, call("die"))
    assert ended.startswith("error: one ended;")
    assert await tool_answers(rollout, call("add", a=1, b=2)) == ["3"]
    await rollout.close()


async def test_a_server_that_cannot_be_started_again_fails_the_rollout(tmp_path: Path) -> None:
    copy = tmp_path / "server.py"
    copy.write_text(SERVER.read_text())
    tools = McpTools({"one": {"command": sys.executable, "args": [str(copy)]}})
    rollout = await begun(tools)
    copy.write_text("raise SystemExit('out of order')")
    with pytest.raises(ToolUnavailable, match="out of order"):
        await rollout.step(call("add", a=1, b=2))
    await rollout.close()


@pytest.fixture
def service() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        while process.poll() is None:
            try:
                httpx2.get(url)
                break
            except httpx2.TransportError:
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


async def test_a_service_is_asked_over_http(service: str) -> None:
    rollout = await begun(McpTools({"one": {"url": service}}))
    assert await tool_answers(rollout, call("add", a=1, b=2)) == ["3"]
    await rollout.close()


@pytest.mark.parametrize(("servers", "said"), [
    ({"one": {}}, "either `command`, a program to start, or `url`"),
    ({"one": {"url": "http://127.0.0.1:1/mcp", "args": ["x"]}}, "args has no effect without command"),
    ({"one": {"command": "x", "header_env": {"a": "B"}}}, "header_env has no effect without url"),
    ({"one": {"url": "http://127.0.0.1:1/mcp"}}, r"`one` \(http://127.0.0.1:1/mcp\) cannot be used"),
    ({"one": {"command": "there-is-no-such-program"}}, "cannot be used: FileNotFoundError"),
    ({"one": {**STDIO, "inherit_env": ["NOT_SET"]}}, "the environment variable NOT_SET is not set"),
    ({"one": {**STDIO, "tools": ["ad"]}}, "no tool `ad`. It has: add, remember, speak, hang, die"),
    ({"one": STDIO, "two": {**STDIO, "tools": ["add"]}}, "one and two both have the tool `add`"),
    ({"one": {**STDIO, "time_limit": 20.0}}, "together not below the 30 s"),
])  # fmt: skip
def test_a_config_that_cannot_work_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TaskError, ConfigError), match=said):
        groupwise.rl(config(servers), dry_run=True)


@pytest.mark.slow
def test_a_config_alone_gives_a_run_the_tools_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    groupwise.rl(config({"one": STDIO}))
    with Store.open(tmp_path / "runs" / "toy" / "run.db", readonly=True) as store:
        (group,) = store.groups(0)
    (rollout, _) = group.rollouts
    assert rollout.outcome == "scored"
    assert {part.name: part.value for part in rollout.parts}["tool_calls"] == 0


def config(servers: dict[str, Any]) -> dict[str, Any]:
    Path("sums.jsonl").write_text('{"prompt": "1+2?", "answer": "3"}\n')
    return {
        "model": {"name": "tiny"},
        "data": {"dataset_name": "sums.jsonl", "prompt_format": "chat"},
        "rewards": {"reward_funcs": ["correctness"]},
        "rollout": {"type": "environment", "max_turns": 2, "max_rollout_length": 40},
        "sampler": {"max_completion_length": 4},
        "training": {"max_steps": 1, "prompts_per_step": 1, "num_generations": 2},
        "task": {"mcp_servers": servers},
        "run": {"name": "toy", "threads": 1},
    }
