"""A user's program as an agent: its input, what is recorded of it, which turns are trained, and that nothing of it remains."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.types import Rollout
from groupwise.tasks.external.agent import AgentConfig, agent_program
from groupwise.tasks.rollouts.external import ExternalLimits, ExternalRollouts
from groupwise.tasks.rollouts.trained_turns import TrainedTurns, every_turn, trained_turns
from tests.chat import chat_tokenizer
from tests.scripted import ScriptedSampler, ask_for

LIMITS = ExternalLimits(
    max_turns=4, max_tokens=4000, max_seconds=60.0, max_concurrent=200, start_limit=60.0
)
TOKENIZER = chat_tokenizer("chatml")
USER = [{"role": "user", "content": "What is 1+2?"}]
PROGRAM = """
import json, os, subprocess, sys, time, urllib.request

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

def ask(messages):
    body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

does = sys.argv[1]
if does == "import":
    import nonesuch
messages = [{"role": "user", "content": sys.stdin.read()}]
first = ask(messages)
if does == "sleep":
    subprocess.Popen(["sleep", "987"], start_new_session=True)
    time.sleep(1000)
if does == "break":
    sys.exit("the agent is at its wits' end")
open("seen.txt", "w").write(json.dumps([sys.argv, os.environ["WORD"], sorted(os.listdir())]))
messages += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}]
print("It is", ask(messages)["content"])
"""

CHOICES = """
def none(turns):
    return [False] * len(turns)

def odd(turns):
    return [True]
"""


@asynccontextmanager
async def playing(
    program: Path, trained: TrainedTurns = every_turn, **limits: Any
) -> AsyncGenerator[Any]:
    """A function that plays one attempt."""
    agent = AgentConfig(
        command=(sys.executable, "agent.py", "{does}", "{number} {nothing}"),
        files=str(program.parent),
        env={"WORD": "{prompt}!"},
        collect=("*.txt",),
        max_output_length=200,
    )
    rollouts = ExternalRollouts(
        agent_program(agent), TOKENIZER, replace(LIMITS, **limits), trained=trained
    )

    def write(seed: int, seen: str) -> str:
        if "tool_response" in seen:
            return "three<|im_end|>"
        return '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'

    async def play(does: str) -> Rollout:
        ids = TOKENIZER.apply_chat_template(USER, tokenize=True, add_generation_prompt=True)[
            "input_ids"
        ]
        sampler = ScriptedSampler(TOKENIZER, write)
        ask = ask_for(TOKENIZER, USER, ids, max_tokens=200, does=does, number=7)
        return (await rollouts.sample(sampler, ask)).rollouts[0]

    try:
        yield play
    finally:
        await rollouts.close()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "agent.py"
    file.write_text(PROGRAM)
    (file.parent / "mine.py").write_text(CHOICES)
    return file


async def test_a_program_is_played_as_it_stands(program: Path):
    async with playing(program) as play:
        rollout = await play("answer")
    assert rollout.outcome == "pending", rollout.reason
    assert [segment.source for segment in rollout.segments].count("policy") == 2
    assert rollout.messages is not None
    assert rollout.messages[-1]["content"] == "three"
    assert rollout.notes["output"] == "It is three\n"
    assert rollout.notes["exit_code"] == 0
    arguments = ["agent.py", "answer", "7 {nothing}"]
    seen = [arguments, "What is 1+2?!", ["agent.py", "mine.py", "seen.txt"]]
    assert json.loads(rollout.notes["files"]["seen.txt"]) == seen
    assert not (program.parent / "seen.txt").exists()


@pytest.mark.parametrize(
    ("choice", "taught"),
    [("last", ["three"]), ("with_tool_calls", ["add"]), ("mine.py:none", []), ("mine.py:odd", [])],
)
async def test_a_choice_decides_which_turns_teach(
    program: Path, monkeypatch: pytest.MonkeyPatch, choice: str, taught: list[str]
):
    monkeypatch.chdir(program.parent)
    async with playing(program, trained_turns(choice)) as play:
        rollout = await play("answer")
    texts = [TOKENIZER.decode(s.token_ids) for s in rollout.segments if s.source == "policy"]
    if not taught:
        said = "no completion" if choice == "mine.py:none" else "1 values for 2 turns"
        assert (rollout.outcome, said in str(rollout.reason)) == ("failed", True), rollout.reason
        return
    assert len(texts) == 1
    assert taught[0] in texts[0]
    assert rollout.messages is not None
    assert len(rollout.messages) == 3  # rewards still read all of it


async def test_a_program_that_fails_is_scored_and_one_that_hangs_is_killed(program: Path):
    async with playing(program) as play:
        broken = await play("break")
    async with playing(program, max_seconds=1.0) as play:
        late = await play("sleep")
    assert (broken.outcome, broken.notes["exit_code"]) == ("pending", 1)
    assert broken.notes["stopped"] == "exit code 1: the agent is at its wits' end"
    assert late.outcome == "timed_out"
    deadline = time.monotonic() + 10
    while any_process("sleep", "987"):
        assert time.monotonic() < deadline, "what the program started is still there"
        await asyncio.sleep(0.05)


async def test_a_program_that_never_asks_fails_with_its_last_words(program: Path):
    async with playing(program) as play:
        rollout = await play("import")
    assert rollout.outcome == "failed"
    assert "exit code 1: ModuleNotFoundError" in str(rollout.reason)


def any_process(*words: str) -> bool:
    line = b"\0".join(word.encode() for word in words) + b"\0"
    return any(read(file) == line for file in Path("/proc").glob("[0-9]*/cmdline"))


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"command": ["there-is-no-such-program"]}, "no program there-is-no-such-program"),
        ({"command": ["./agent.sh"], "files": "nowhere"}, "no such folder"),
    ],
)
def test_a_program_that_is_not_there_is_refused(agent: dict[str, Any], said: str):
    with pytest.raises(TaskError, match=said):
        agent_program(AgentConfig.model_validate_json(json.dumps(agent)))
