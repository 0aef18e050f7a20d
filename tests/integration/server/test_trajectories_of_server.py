"""Multi-turn agents with a server that is killed: each trajectory is trained once, with each of its calls once.

The agents know nothing of it: the client of OpenAI sends its calls again by itself, and so does ours with the rewards.
"""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai

from groupwise.api.client import TrainingClient
from groupwise.core.types import Group, from_json
from tests.integration.server.server_process import FAKE, Server
from tests.processes import wait_until

AGENTS, ROUNDS, TURNS, KILLS = 4, 6, 3, 3
SETTINGS: dict[str, Any] = {
    "model_id": "tiny", "max_completion_length": 6, "num_completions_per_prompt": AGENTS, "groups_per_step": 1,
    "staleness": 0, "save_steps": 100, "run_name": "agents",
}  # fmt: skip


def play(url: str, agent: int) -> list[list[str]]:
    """The ids of the calls of each of its trajectories."""
    played: list[list[str]] = []
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=60) as client,
        TrainingClient(url, retry_timeout=60) as server,
    ):
        for game in range(ROUNDS):
            messages: list[Any] = [{"role": "user", "content": "abc"}]
            metadata = {"trajectory": f"{agent}-{game}", "group": "s"}
            played.append([])
            for _ in range(TURNS):
                answer = client.chat.completions.create(
                    model="latest", messages=messages, store=True, metadata=metadata
                )
                played[-1].append(answer.id.removeprefix("chatcmpl-"))
                text = answer.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "abc"},
                ]
            server.reward_trajectory(metadata["trajectory"], float(agent))
    return played


def test_each_call_and_each_reward_counts_once_whenever_the_server_is_killed(tmp_path) -> None:
    server = Server(tmp_path / "output", "max_engine_restarts=1000", command=FAKE)
    server.begin()
    try:
        with TrainingClient(server.url, retry_timeout=60) as client:
            client.start(**SETTINGS, max_steps=ROUNDS)
            with ThreadPoolExecutor(AGENTS) as threads:
                agents = [threads.submit(play, server.url, agent) for agent in range(AGENTS)]
                for kill in range(KILLS):
                    wait_until(lambda kill=kill: (client.status().step or 0) > kill, "a step")
                    time.sleep(0.07 * kill)  # in the middle of the agents' calls
                    server.kill()
                    server.begin()
                played = [trajectory for agent in agents for trajectory in agent.result()]
            wait_until(lambda: client.status().phase == "finished", "the last step")
    finally:
        server.end()
    with closing(sqlite3.connect(server.folder / "server.db")) as ledger:
        calls = dict[tuple[str, int], list[str]]()
        for call, group, member in ledger.execute(
            "SELECT call, id, member FROM turns ORDER BY position"
        ):
            calls.setdefault((group, member), []).append(call)
        states = ledger.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
        records = [from_json(Group, row[0]) for row in ledger.execute("SELECT record FROM records")]
    assert sorted(calls.values()) == sorted(played)
    assert dict(states)["trained"] == ROUNDS
    assert sum(len(group.rollouts) for group in records) == AGENTS * ROUNDS
    for rollout in (rollout for group in records for rollout in group.rollouts):
        assert sum(part.source == "policy" for part in rollout.segments) == TURNS
