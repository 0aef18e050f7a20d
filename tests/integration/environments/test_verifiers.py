"""Environments of verifiers, of both its interfaces, in the virtual environments that `make test-environments` makes.

1. Examples are listed, those that are held out too.
2. An attempt of several turns, with a tool, is recorded with its rewards' parts and metrics, and trained as it was sampled.
3. A judge and a user who are models themselves are asked at their own endpoints, and nothing that they say is trained.
4. Training is recorded, a resume says what is played again, and an evaluation scores the held-out examples.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from groupwise.cli.main import main
from groupwise.core.types import Rollout
from groupwise.tasks.contract import load_task
from groupwise.tasks.external.installed import require
from groupwise.tasks.rollouts.external import ExternalLimits, ExternalRollouts
from tests.chat import chat_tokenizer
from tests.fake_openai_server import Service, scripted, serve
from tests.scripted import ScriptedSampler, ask_for

CONFIG = Path(__file__).parents[3] / "examples" / "11_verifiers" / "config.yaml"
LIMITS = ExternalLimits(
    max_turns=4, max_tokens=4000, max_seconds=120.0, max_concurrent=64, start_limit=120.0
)
TOKENIZER = chat_tokenizer("chatml")
JUDGE, USER = "gpt-4.1-nano", "user"
"""Names of the models that the tests' endpoint plays."""


async def play(
    spec: str, say: Callable[[int, str], str], members: int, examples: int = 1, **task_keys: Any
) -> list[Rollout]:
    """Attempts at the first examples; `say` gets the seed and what the policy sees."""
    config: Any = {"task": task_keys, "rollout": {"start_limit": 120.0}}
    task = load_task(spec)
    rollouts = ExternalRollouts(task.program(config), TOKENIZER, LIMITS)
    sampler = ScriptedSampler(TOKENIZER, lambda seed, seen: say(seed, seen) + "<|im_end|>")
    played: list[Rollout] = []
    try:
        for example in task.rl_examples(config)[:examples]:
            ids = TOKENIZER.apply_chat_template(example.prompt, tokenize=True)["input_ids"]
            ask = ask_for(
                TOKENIZER, example.prompt, ids, members=members, max_tokens=200, **example.columns
            )
            played += (await rollouts.sample(sampler, ask)).rollouts
    finally:
        await rollouts.close()
    return played


@pytest.mark.timeout(300)
async def test_two_turns_of_verifiers_0_1():
    def say(seed: int, seen: str) -> str:
        return "a ripe pear" if "Another one" in seen else "apple"

    rollouts = await play("verifiers:fruits", say, 20)
    assert {rollout.reason for rollout in rollouts} == {None}
    first = rollouts[0]
    values = {part.name: (part.value, part.weight) for part in first.parts}
    assert values["fruits"] == (pytest.approx((1 + 1 / 3) / 2), 1.0)
    assert values["words"] == (2.0, 0.0)
    assert [segment.source for segment in first.segments] == ["policy", "environment", "policy"]
    assert (first.ended_by, first.notes["stopped"]) == ("environment", "max_turns_reached")


def judge_and_user(verdict: Callable[[str], bool], replies: dict[str, str], other: str) -> Service:
    """An endpoint with two models: a judge who says yes or no, and a user who answers by `replies`, or says `other`."""

    def write(text: str, seed: int) -> str:
        if "answer" not in text:  # which is in the prompts of both judges
            return replies.get(text, other)
        return "yes" if verdict(text) else "no"

    return Service(scripted(write), models=(JUDGE, USER), key="their-key")


def refuse_judge(service: Service, after: int) -> None:
    """Have the judge's requests refused after so many were answered."""
    judged = count()

    async def refuse(number: int) -> Response | None:
        is_late = service.asked[number]["model"] == JUDGE and next(judged) >= after
        return Response(status_code=400) if is_late else None

    service.interfere = refuse


def check_dialogue(rollout: Rollout, said_by_user: str) -> None:
    """The policy spoke twice, and between that the user, whose words are in the transcript and are not trained."""
    assert rollout.messages is not None
    assert [m["role"] for m in rollout.messages] == ["assistant", "user", "assistant"]
    assert rollout.messages[1]["content"] == said_by_user
    assert [segment.source for segment in rollout.segments] == ["policy", "environment", "policy"]
    assert said_by_user in TOKENIZER.decode(rollout.segments[1].token_ids)


@pytest.mark.timeout(300)
async def test_a_judge_a_simulated_user_and_rewards_of_a_whole_group_of_verifiers_0_1():
    """Judge and user are models of any server of the protocol; if the judge fails, so does what it should have judged."""
    policy_calls: list[str] = []

    def say(seed: int, seen: str) -> str:
        policy_calls.append(seen)
        return "rose " * (1 + seed % 7)

    with serve(judge_and_user(lambda text: "rose rose" in text, {}, "Another, please.")) as others:
        refuse_judge(others, after=3)
        variables = {
            "PYTHONPATH": str(Path(__file__).parent),
            "OPENAI_BASE_URL": others.url,
            "OPENAI_API_KEY": "their-key",
        }
        task = {"environment": "fruits", "variables": variables}
        played = await play("verifiers:judged_poems", say, 3, examples=2, **task)
        models = [asked["model"] for asked in others.asked]
    poems, unjudged = played[:3], played[3:]
    for poem in poems:
        check_dialogue(poem, "Another, please.")
    assert (len(policy_calls), models.count(USER)) == (12, 6)
    last = [str(poem.messages[-1]["content"]) for poem in poems if poem.messages]
    shortest = min(map(len, last))
    parts = [{part.name: (part.value, part.weight) for part in poem.parts} for poem in poems]
    assert [each["shortest"] for each in parts] == [
        (float(len(text) == shortest), 0.5) for text in last
    ]
    assert [each["praise"] for each in parts] == [
        (float("rose rose" in text), 1.0) for text in last
    ]
    assert {rollout.outcome for rollout in unjudged} == {"failed"}
    assert "praise" in str(unjudged[0].reason)


@pytest.mark.timeout(300)
def test_verifiers_0_4_scores_by_a_reward_of_ours():
    page = (CONFIG.parents[2] / "docs/how-to/parts-elsewhere.md").read_text()
    [block] = re.findall(r"^```python\n(import verifiers.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = f"""
import asyncio, sys
sys.path += {sys.path!r}
{block}
for reply in ("It is \\\\boxed{{0.75}}", "It is \\\\boxed{{0.7}}"):
    trace = vf.Trace(
        task=vf.TraceTask(type="MathTask", data=task.data), agent=vf.AgentInfo.model_construct(), root_reply=reply
    )
    asyncio.run(task.score(trace))
    print(trace.reward)
"""
    python = require("sums-tool").python
    ran = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["1.0", "0.0"], ran.stderr


async def test_a_tool_of_verifiers_0_4():
    def say(seed: int, seen: str) -> str:
        if seen.rpartition("<|im_start|>user")[2].startswith("\n<tool_response>"):
            return "It is " + re.findall(r"\d+", seen)[-1]
        a, b = re.findall(r"What is (\d+) \+ (\d+)", seen)[0]
        return f'<tool_call>\n{{"name": "calculator_add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'

    (rollout,) = await play("verifiers:sums-tool", say, 1)
    assert rollout.reason is None
    values = {part.name: (part.value, part.weight) for part in rollout.parts}
    assert (values["correct"], values["uses_tool"]) == ((1.0, 1.0), (1.0, 0.2))
    assert [s.source for s in rollout.segments if s.source == "policy"] == ["policy"] * 2


@pytest.mark.timeout(300)
async def test_a_judge_and_a_simulated_user_of_verifiers_0_4():
    """They are configured by the arguments; a judge that fails costs the attempt, and no reward of 0 is made of it."""
    policy_calls: list[str] = []

    def say(seed: int, seen: str) -> str:
        policy_calls.append(seen)
        return "a dozen" if "Guess." in seen else "Why?"

    replies = {"Why?": "Guess.", "a dozen": "###DONE###"}
    opening = "Please add for me."
    with serve(judge_and_user(lambda text: "a dozen" in text, replies, opening)) as others:
        refuse_judge(others, after=1)
        client = {"base_url": others.url, "api_key_var": "THEIR_KEY"}
        judge = {"id": "reference", "model": JUDGE, "weight": 0.5, **client}
        args = {
            "id": "user-sim",
            "taskset": {"task": {"judges": [judge]}},
            "assistant": {"harness": {"id": "null"}},
            "user": {"model": USER, "client": {"type": "eval", **client}},
        }
        task = {"args": args, "variables": {"THEIR_KEY": "their-key"}}
        judged, unjudged = await play("verifiers:sums-tool", say, 1, examples=2, **task)
        models = [asked["model"] for asked in others.asked]
    check_dialogue(judged, "Guess.")
    assert opening in TOKENIZER.decode(judged.prompt_ids)
    assert (len(policy_calls), models.count(USER)) == (4, 6)
    values = {part.name: (part.value, part.weight) for part in judged.parts}
    assert (values["correct"], values["reference"]) == ((0.0, 1.0), (1.0, 0.5))
    assert unjudged.outcome == "failed"
    assert "400" in str(unjudged.reason)


@pytest.mark.timeout(400)
def test_it_trains_continues_and_is_evaluated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    small = [
        "model.name=tiny",
        "training.max_steps=2",
        "training.prompts_per_step=2",
        "training.num_generations=4",
        "sampler.max_completion_length=8",
        "eval.before_and_after=false",
        "run.threads=1",
        "run.save_steps=1",
        f"run.dir={tmp_path}",
    ]
    command = ["--config", str(CONFIG), "--task-module", "verifiers:fruits", *small]
    assert main(["rl", *command]) == 0
    assert main(["rl", *command, "--resume-from", "fruits@1"]) == 0
    assert "verifiers:fruits plays all attempts after step 1 again" in caplog.text
    capfd.readouterr()
    assert main(["runs", "rollouts", "fruits", "--dir", str(tmp_path), "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert len(rows) > 0
    assert {row["outcome"] for row in rows} == {"scored"}
    output = tmp_path / "rows.jsonl"
    drawn = ["eval.temperature=1", "--policy", "fruits", "--output", str(output), "--json"]
    assert main(["eval", *command, *drawn]) == 0
    evaluated = json.loads(capfd.readouterr().out)
    assert evaluated["prompts"] == 6  # the places that it holds out
    assert evaluated["metrics"]["rewards/words/mean"] > 0
    assert main(["check", *command, "--json"]) == 0
    # verifiers itself does not take an empty reply for one.
    failures = r"\d+ of \d+ games failed, all of the player who says nothing"
    assert re.search(failures, capfd.readouterr().out)
