"""Two steps of agents of openai-agents and of langchain. All clients, until they have learnt, are `make soak SUITE=agents`."""

from __future__ import annotations

import pytest

from tests.integration.agents.running import check_features, check_record, check_refusals, train
from tests.integration.server.server_process import Server

pytestmark = pytest.mark.timeout(300)
STEPS, TRAJECTORIES = 2, 4


@pytest.mark.parametrize("words", ["openai_agents.py responses", "langchain_agent.py chat"])
def test_a_client_trains_as_it_stands(words: str, server: Server) -> None:
    run = words.partition("_")[0]
    report = train(server, words.split(), run, STEPS, TRAJECTORIES)
    check_record(server, run, report, TRAJECTORIES)
    check_features(report)
    check_refusals(report)
