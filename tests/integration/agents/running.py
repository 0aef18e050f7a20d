"""Programs of the clients, each a process in the environment of the clients (`scripts/real_environment.py agents`), and what they say."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from runpy import run_path
from statistics import mean
from typing import Any

import pytest

from groupwise.api.client import TrainingClient
from groupwise.runs.store import Store
from tests.integration.agents.workplace import MODEL
from tests.integration.server.server_process import Server
from tests.processes import wait_until

ENVIRONMENTS = run_path(str(Path(__file__).parents[3] / "scripts/real_environment.py"))
PYTHON: Path = ENVIRONMENTS["where"]("agents") / "bin/python"
PROGRAMS = Path(__file__).parent / "programs"
SETTINGS: dict[str, Any] = {
    "model_id": MODEL, "max_prompt_length": 512, "max_completion_length": 48, "groups_per_step": 1,
    "staleness": 0, "adapter": "full", "learning_rate": 1e-3, "training": {"lr_scheduler_type": "linear"}, "lease_seconds": 60,
}  # fmt: skip
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it is fetched when litellm is imported
    "OMP_NUM_THREADS": "1",
    "NO_PROXY": "127.0.0.1",
}

FEATURES: dict[str, Any] = {
    "handoff": ["handoff_call_item", "handoff_output_item"],
    "output_type": "Answer",
    "output_type after calls of tools": "Answer",
    "responses": "completed",
    "session": 4,
    "streamed tools": "tool_call",
    "structured output by function_calling": "Answer",
    "structured output by json_schema": "Answer",
    "tools": "check",
}
"""What a program shows of a feature; True of all others."""
ROUNDING = 0.2
"""Of log-probabilities in bfloat16, in which machines that can compute with it hold the model: 0.065 has been seen, 0.001 is the mean.
Another token would be off by 1 and more."""
REFUSALS = {
    "unknown model": ("NotFoundError", "latest"),
    "too long": ("BadRequestError", "prompt is too long"),
    "too long, as langchain says": ("ContextOverflowError", "prompt is too long"),
    "too long, as litellm says": ("ContextWindowExceededError", "prompt is too long"),
    "image": ("BadRequestError", "image"),
    "unknown field": ("BadRequestError", "beam_width"),
    "unknown response": ("NotFoundError", "previous_response_id"),
    "tool of OpenAI": ("BadRequestError", "runs no tools"),
}
"""The class of OpenAI's client that each exception is, and a part of its message."""


@dataclass(slots=True)
class Told:
    """What a program said."""

    rewards: list[float] = field(default_factory=list[float])
    """The mean of each step."""
    features: dict[str, Any] = field(default_factory=dict[str, Any])
    refusals: dict[str, tuple[list[str], str]] = field(
        default_factory=dict[str, tuple[list[str], str]]
    )
    """The names of the exception's class and its bases, and its message."""


def train(server: Server, words: Sequence[str], run: str, steps: int, trajectories: int) -> Told:
    """Start a run, have a program train it for so many steps, and read what it says."""
    with TrainingClient(server.url) as client:
        client.start(
            **SETTINGS, run_name=run, max_steps=steps, num_completions_per_prompt=trajectories
        )
        try:
            report = run_program(server, words, STEPS=steps, TRAJECTORIES=trajectories)
            wait_until(lambda: client.status().step == steps, f"step {steps}")
        finally:
            client.stop()
    return report


def run_program(server: Server, words: Sequence[str], **more: int) -> Told:
    """Run a program to its end, which must be a good one."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", str(PROGRAMS / words[0]), *words[1:]],
        env={**own, **OFFLINE, "GROUPWISE_URL": server.url, **{k: str(v) for k, v in more.items()}},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    report = Told()
    # litellm prints advice besides.
    for line in map(json.loads, (text for text in done.stdout.splitlines() if text[:2] == '{"')):
        if "reward" in line:
            report.rewards.append(line["reward"])
        elif "refusal" in line:
            report.refusals[line["refusal"]] = line["kinds"], line["message"]
        else:
            report.features[line["feature"]] = line["seen"]
    return report


def check_record(server: Server, run: str, report: Told, trajectories: int) -> None:
    """Each trajectory is trained once, with the reward that it was given. The learner saw what was sampled, of each turn."""
    steps = range(len(report.rewards))
    with Store.open(server.folder / f"runs/{run}/run.db", readonly=True) as store:
        groups = [group for step in steps for group in store.groups(step)]
    assert [len(group.rollouts) for group in groups] == [trajectories for _ in steps]
    for group, reward in zip(groups, report.rewards, strict=True):
        assert mean(rollout.reward or 0.0 for rollout in group.rollouts) == pytest.approx(reward)
    sampled = [
        [part for part in rollout.segments if part.source == "policy"]
        for group in groups
        for rollout in group.rollouts
    ]
    assert sum(map(len, sampled)) > len(sampled), "some trajectories have several turns"
    learnt = [part for part in chain.from_iterable(sampled) if part.learner_logprobs is not None]
    assert learnt, "a group whose rewards are all the same teaches nothing"
    for part in learnt:
        assert part.learner_logprobs == pytest.approx(part.sampling_logprobs, abs=ROUNDING)


def check_features(report: Told) -> None:
    """The program's own checks; and the types of what has no yes or no."""
    assert report.features == {name: FEATURES.get(name, True) for name in report.features}


def check_refusals(report: Told) -> None:
    """Each refusal is the client's own exception, and its message says what to do."""
    assert report.refusals
    for name, (kinds, message) in report.refusals.items():
        kind, words = REFUSALS[name]
        assert kind in kinds, (name, kinds)
        assert words in message, (name, message)
