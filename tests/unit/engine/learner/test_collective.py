"""What processes under torchrun exchange by its store, a real one, and how long they wait for it."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from groupwise.core.errors import WorkerLostError
from groupwise.engine.learner import collective


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As torchrun has it; this process is the second one of two."""
    found = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    words = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words |= {"MASTER_PORT": str(found.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, word in words.items():
        monkeypatch.setenv(name, word)
    monkeypatch.setattr(collective, "_stores", [])
    return found


def test_a_published_value_can_be_read(store: Any) -> None:
    collective.publish_value("line", "host 1 word")
    assert collective.read_published("line") == "host 1 word"


def test_a_rank_without_a_published_value_is_given_up_after_the_timeout(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "RENDEZVOUS_TIMEOUT", timedelta(seconds=0.3))
    with pytest.raises(WorkerLostError, match=r"0\.005 minutes"):
        collective.read_published("line")
