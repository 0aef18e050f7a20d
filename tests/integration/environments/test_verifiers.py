"""Environments of verifiers, of both its interfaces, in the virtual environments that `make test-environments` makes.

1. Examples are listed, those that are held out too.
2. An attempt of several turns, with a tool, is recorded with its rewards' parts and metrics, and trained as it was sampled.
3. A judge and a user who are models themselves are asked at their own endpoints, and nothing that they say is trained.
4. Training is recorded, a resume says what is played again, and an evaluation scores the held-out examples.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from groupwise.cli.main import main
from groupwise.core.types import Rollout
from groupwise.tasks.contract import load_task
from groupwise.tasks.rollouts.external import ExternalLimits, ExternalRollouts
from tests.chat import chat_tokenizer
from tests.fake_openai_server import Service, scripted, serve
from tests.scripted import ScriptedSampler, ask_for

CONFIG = Path(__file__).parents[3] / "examples" / "11_verifiers" / "config.yaml"
LIMITS = ExternalLimits(
    max_turns=4, max_tokens=4000, max_seconds=120.0, max_concurrent=64, start_limit=120.0
)
TOKENIZER = chat_tokenizer("chatml")
SIMULATED_USER = {
    "id": "user-sim",
    "assistant": {"harness": {"id": "null"}},
    "user": {
        "model": "user",
        "client": {"type": "eval", "base_url": "USER_URL", "api_key_var": "OPENAI_API_KEY"},
    },
}


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


@pytest.mark.timeout(300)
async def test_a_judge_of_ones_own_and_rewards_of_a_whole_group():
    """The judge is any server of the protocol; if it fails, so does what it should have judged."""

    async def refuse(number: int) -> Response | None:
        return Response(status_code=400) if number >= 3 else None

    def say(seed: int, seen: str) -> str:
        return "rose " * (1 + seed % 7)

    verdicts = scripted(lambda text, seed: "yes" if "rose rose" in text else "no")
    with serve(Service(verdicts, models=("gpt-4.1-nano",))) as judge:
        judge.interfere = refuse
        variables = {
            "PYTHONPATH": str(Path(__file__).parent),
            "OPENAI_BASE_URL": judge.url,
            "OPENAI_API_KEY": "any",
        }
        task = {"environment": "fruits", "variables": variables}
        played = await play("verifiers:judged_poems", say, 3, examples=2, **task)
    poems, unjudged = played[:3], played[3:]
    lengths = [len(poem.completion) for poem in poems]
    parts = [{part.name: (part.value, part.weight) for part in poem.parts} for poem in poems]
    assert [each["shortest"] for each in parts] == [
        (float(length == min(lengths)), 0.5) for length in lengths
    ]
    assert [each["praise"] for each in parts] == [
        (float("rose rose" in poem.completion), 1.0) for poem in poems
    ]
    assert {rollout.outcome for rollout in unjudged} == {"failed"}
    assert "praise" in str(unjudged[0].reason)


@pytest.mark.timeout(300)
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
async def test_a_judge_of_verifiers_0_4():
    """It is configured by the arguments; one that fails costs the attempt, and no reward of 0 is made of it."""

    async def refuse(number: int) -> Response | None:
        return Response(status_code=400) if number == 1 else None

    verdicts = scripted(lambda text, seed: "yes" if "a dozen" in text else "no")
    with serve(Service(verdicts, models=("gpt-4.1-nano",), key="judge-key")) as judge:
        judge.interfere = refuse
        reference = {
            "id": "reference",
            "base_url": judge.url,
            "api_key_var": "JUDGE_KEY",
            "model": "gpt-4.1-nano",
            "weight": 0.5,
        }
        args = {"taskset": {"task": {"judges": [reference]}}}
        variables = {"JUDGE_KEY": "judge-key"}
        task = {"args": args, "variables": variables}
        judged, unjudged = await play(
            "verifiers:sums-tool", lambda seed, seen: "a dozen", 1, examples=2, **task
        )
    values = {part.name: (part.value, part.weight) for part in judged.parts}
    assert (values["correct"], values["reference"]) == ((0.0, 1.0), (1.0, 0.5))
    assert unjudged.outcome == "failed"
    assert "400" in str(unjudged.reason)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("spec", "own_keys", "opening", "reward"),
    [
        (
            "verifiers:simulated_traveller",
            {"environment": "fruits"},
            "I want to travel.",
            "named_rome",
        ),
        ("verifiers:sums-tool", {"args": SIMULATED_USER}, "Let us travel.", "user_turns"),
    ],
    ids=["0.1", "0.4"],
)
async def test_a_user_who_is_simulated_by_a_model(
    spec: str, own_keys: dict[str, Any], opening: str, reward: str
):
    """Its turns are in the transcript as the environment's; its calls go to its endpoint, and the policy answers none of them."""
    replies = {"Where to?": "To Rome.", "So Rome it is.": "###DONE###"}
    seen_by_policy: list[str] = []

    def say(seed: int, seen: str) -> str:
        seen_by_policy.append(seen)
        return "So Rome it is." if "To Rome." in seen else "Where to?"

    user = Service(scripted(lambda text, seed: replies.get(text, opening)), models=("user",))
    with serve(user):
        variables = {
            "PYTHONPATH": str(Path(__file__).parent),
            "OPENAI_BASE_URL": user.url,
            "OPENAI_API_KEY": "any",
        }
        task = json.loads(json.dumps(own_keys).replace("USER_URL", user.url))
        (rollout,) = await play(spec, say, 1, variables=variables, **task)
    assert rollout.reason is None
    assert rollout.messages is not None
    assert [message["content"] for message in rollout.messages] == [
        "Where to?",
        "To Rome.",
        "So Rome it is.",
    ]
    assert opening in TOKENIZER.decode(rollout.prompt_ids)
    spoken = [(s.source, TOKENIZER.decode(s.token_ids)) for s in rollout.segments]
    assert [source for source, _ in spoken] == ["policy", "environment", "policy"]
    assert "To Rome." in spoken[1][1]
    assert len(seen_by_policy) == 2
    assert {asked["model"] for asked in user.asked} == {"user"}
    assert (reward, True) in [(part.name, bool(part.value)) for part in rollout.parts]


@pytest.mark.timeout(400)
def test_it_trains_goes_on_and_is_evaluated(
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
    assert "8 of 72 games failed, all of the player who says nothing" in capfd.readouterr().out
