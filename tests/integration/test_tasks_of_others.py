"""Task files written for other frameworks run here with at most two lines added at their end, and give the same rewards as there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.core.reward_call.text import as_completion
from groupwise.runs.store import Store
from groupwise.tasks.contract import load_task
from groupwise.training.config import load_config, view

FOLDER = Path(__file__).parents[1] / "fixtures" / "tasks_of_others"
TALK = [
    {"role": "assistant", "content": "<tool_call>…</tool_call>"},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": "It is 6."},
]
GOOD: dict[str, Any] = {
    "unsloth_gsm8k": "<reasoning>0 + 0</reasoning>\n<answer>0</answer>",
    "r1_countdown": "1 and 2 and 2 </think>\n<answer>1 + 2 + 2</answer>",
    "open_r1": "<think>\n0 + 1\n</think>\n\n<answer>\n$1$ print\n</answer>",
    "wordle_plugin": "<think>…</think> <guess>crane</guess>",
    "trl_tools": TALK,
    "tunix_gemma": "<reasoning>1 + 1</reasoning><answer>2</answer>",
}
PARTS = {
    "unsloth_gsm8k": [0.5, 0.5, 2.0], "r1_countdown": [1.0, 1.0], "open_r1": [1.0, 1.0, pytest.approx(0.99, abs=0.02), 0.0, 1.0],
    "wordle_plugin": [1.0, pytest.approx(0.4), 2.0], "trl_tools": [1.0, 0.1], "tunix_gemma": [3.0, 2.0, 3.0, 1.5],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_task_of_others_trains_and_pays_for_what_is_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = FOLDER / f"{name}.py"
    turns = {"type": "environment", "max_turns": 2} if name == "trl_tools" else {}
    config = {
        "model": {"name": "tiny"},
        "sampler": {"max_completion_length": 6, "max_num_seqs": 8},
        "training": {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2},
        "rollout": turns,
        "run": {"name": "others", "threads": 1},
    }
    result = groupwise.rl(config, str(file))
    with Store.open(result.folder / "run.db", readonly=True) as store:
        outcomes = {r.outcome for group in store.groups(0) for r in group.rollouts}
    assert (result.exit_code, outcomes) == (0, {"scored"})

    task, given = load_task(str(file)), view(load_config(config).config)
    example = task.rl_examples(given)[0]
    bad = [{"role": "assistant", "content": "no"}] if name == "trl_tools" else "no"
    both = (GOOD[name], bad)
    said: list[Any] = [t if isinstance(t, list) else as_completion(example.prompt, t) for t in both]
    columns = {column: [value] * 2 for column, value in example.columns.items()}
    request = ScoreRequest(0, [example.prompt] * 2, said, [[1], [2]], columns, 0, 1)
    members = asyncio.run(task.rubric(given, None).score(request)).members
    assert [part.value for part in members[0].parts] == PARTS[name]
    assert members[0].reward > (members[1].reward or 0.0)
