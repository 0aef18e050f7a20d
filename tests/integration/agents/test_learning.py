"""Each client, in each of the protocols that it speaks, has the model learn what its trajectories are rewarded for."""

from __future__ import annotations

from statistics import mean

import pytest

from tests.integration.agents.running import check_features, check_record, check_refusals, train
from tests.integration.server.server_process import Server

pytestmark = [pytest.mark.soak(suite="agents"), pytest.mark.timeout(600)]
STEPS, TRAJECTORIES = 20, 12


@pytest.mark.parametrize(
    "words",
    [
        "openai_chat.py",
        "openai_responses.py",
        "openai_agents.py responses",
        "openai_agents.py chat",
        "langchain_agent.py chat",
        "langchain_agent.py responses",
        "litellm_agent.py",
    ],
)
def test_the_reward_rises(words: str, server: Server) -> None:
    run = words.replace(".py", "").replace(" ", "_")
    report = train(server, words.split(), run, STEPS, TRAJECTORIES)
    check_record(server, run, report, TRAJECTORIES)
    check_features(report)
    check_refusals(report)
    print(words, report.rewards)
    assert mean(report.rewards[-4:]) > mean(report.rewards[:4]) + 0.1
