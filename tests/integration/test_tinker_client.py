"""The real Tinker client against the verbs over a fake engine: it learns, keeps its order, survives lost answers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.verb_server import KEY, VerbServer, serve_verbs

DRIVER = Path(__file__).parents[1] / "tinker_driver.py"
UNIFORM = -math.log(28)
"""Of every letter of the fake's alphabet, before it has learnt anything."""


class Driver:
    """`tests/tinker_driver.py`, begun once for this module."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, name: str, server: VerbServer, key: str = KEY) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"do": name, "url": server.url, "key": key}),
            file=self._process.stdin,
            flush=True,
        )
        answer = json.loads(self._process.stdout.readline())
        assert "result" in answer, answer
        return answer["result"]

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VerbServer]:
    with serve_verbs(tmp_path) as server:
        yield server


def test_supervised_with_every_call_in_flight(driver: Driver, server: VerbServer) -> None:
    found = driver.do("sft", server)
    assert found["losses"][0] == pytest.approx(-3 * UNIFORM)
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < 0.6 * found["losses"][0]
    assert found["first"] == pytest.approx([UNIFORM] * 4)
    assert found["shape"] == [4]
    assert min(found["norms"]) > 0
    assert found["again"]
    verbs = [verb for verb, _ in server.engine.calls]
    assert verbs == ["create_model", *["forward_backward", "optim_step"] * 10, "drop"]


def test_grpo(driver: Driver, server: VerbServer) -> None:
    rewards = driver.do("grpo", server)["rewards"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.4, rewards
    dropped = [name for verb, name in server.engine.calls if verb == "drop_sampler"]
    assert (
        len(dropped) == len(set(dropped)) == 12
    )  # all but the last eight on the way, the rest with the session


def test_lost_answers_change_nothing(driver: Driver, server: VerbServer, tmp_path: Path) -> None:
    """Some answers to POSTs are lost after they were acted upon, so the client sends them again."""
    expected = driver.do("sft", server)
    with serve_verbs(tmp_path / "lossy") as lossy:
        lossy.lose = lambda path, number: (
            path in ("create_session", "create_model", "forward_backward", "optim_step")
            and number in (1, 4)
        )
        assert driver.do("sft", lossy) == expected
        assert lossy.times("forward_backward") > server.times("forward_backward")
        verbs = [verb for verb, _ in lossy.engine.calls]
        assert verbs == [verb for verb, _ in server.engine.calls]


def test_losses_have_the_values_that_the_client_documents(
    driver: Driver, server: VerbServer
) -> None:
    found = driver.do("policy_losses", server)
    now = sum(found["now"])
    assert found["losses"] == pytest.approx(
        {"importance_sampling": -2 * math.e, "ppo": -2 * 1.2, "cispo": -2.0 * now}, rel=1e-5
    )


def test_a_loss_of_the_clients_own(driver: Driver, server: VerbServer) -> None:
    assert driver.do("custom", server)["loss"] == pytest.approx(4 * UNIFORM**2)
    verbs = [verb for verb, _ in server.engine.calls]
    assert verbs == ["create_model", "forward", "forward_backward", "drop"]


def test_states(driver: Driver, server: VerbServer) -> None:
    found = driver.do("states", server)
    assert found["saved"] == found["back"] == found["fresh"]
    assert found["moved"] < found["saved"]
    assert found["path"].endswith(":train:0/weights/one")
    assert found["sampler_path"].endswith(":train:0/sampler_weights/one")
    assert (found["rank"], found["base"]) == (4, "letters")
    logprobs = found["prompt_logprobs"]
    assert logprobs[0] is None
    assert -2 * logprobs[3] - logprobs[4] == pytest.approx(found["saved"], rel=1e-5)
    assert found["last"] == [None, None, None, None, logprobs[4]]
    assert "something saved as one already" in found["taken"]
    assert "nothing saved as weights/onex" in found["absent"]
    assert "for samplers alone" in found["for_samplers"]


def test_refusals_come_at_once_by_name_and_the_training_goes_on(
    driver: Driver, server: VerbServer
) -> None:
    found = driver.do("refusals", server)
    expected = {
        "loss": "The loss 'dro' is not supported",
        "soft": "one number for each token",
        "external": "TrainingClient.save_weights_external: not supported",
        "ttl": "ttl_seconds",
        "muon": "adam_params",
        "path": "is no path of saved weights",
        "base": "'gpt-17' is not served here. There are: letters",
        "topk": "topk_prompt_logprobs",
        "runs": "RestClient.list_training_runs: not supported",
        "session": "RestClient.get_session: not supported",
    }
    for name, part in expected.items():
        assert found[name].startswith("BadRequestError"), found[name]
        assert part in found[name]
    assert found["after"] == {"grad_norm": 0.0}
    assert max(server.times(path) for path in ("save_weights_external", "training_runs")) == 1


def test_a_wrong_key(driver: Driver, server: VerbServer) -> None:
    assert driver.do("wrong_key", server, key="tml-1-other")["error"].startswith(
        "AuthenticationError"
    )
    assert server.engine.calls == []
