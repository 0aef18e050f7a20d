"""The real Tinker client against `groupwise serve` and its real engine.

1. The programs of the page run as they stand and learn; losses have the values that the client documents.
2. The gradient is that of the learner in this process, to the bit.
3. An engine that is killed, or the whole server, costs time and changes nothing: the loop goes on, and its losses are those of one that
   nothing has happened to. What was answered stays answered, and what was sampled is sampled again.
4. Models live beside a run, over its base, and after it; a run does not begin while clients have models.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.client.errors import Refused
from groupwise.api.client.training_client import TrainingClient
from groupwise.api.schemas.keys import Role, new_key
from groupwise.core.types import LossSpec, OptimiserParams, Row
from groupwise.engine.distributed.multi_adapter import NewModel
from groupwise.engine.models.config import LoraConfig
from groupwise.server.tinker.compatibility import CLIENT_VERSION, EXAMPLES, METHODS
from groupwise.training import placement
from groupwise.training.assembly.start import models_over, start_base
from groupwise.training.config import load_config
from tests.integration.server.server_process import Server, running

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parent / "tinker_driver.py"
TEXT = (11, 12, 13, 14, 15, 16, 17, 18)
WEIGHTS = (0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
STEPS = 7
KEYS = {role: new_key(role) for role in Role}
TINKER_KEY = KEYS[Role.TRAIN].key.replace("gw-", "tml-")


class Client:
    """`tinker_driver.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": what, **arguments}), file=self._process.stdin, flush=True)

    def end(self, what: str = "result") -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        assert what in answer, answer
        return answer[what]

    def do(self, what: str, **arguments: Any) -> Any:
        self.begin(what, **arguments)
        return self.end()

    def expect_refusal(self, what: str, **arguments: Any) -> str:
        self.begin(what, **arguments)
        return self.end("error")

    def step(self, number: int) -> tuple[float, float]:
        return self.do("forward_backward", shift=number), self.do("optim_step")

    def steps(self, numbers: range) -> list[tuple[float, float]]:
        return [self.step(number) for number in numbers]

    def connect(self, server: Server) -> None:
        self.do("connect", url=server.url, key=TINKER_KEY)

    def anew(self, server: Server) -> None:
        """Another model in the place of those that there are."""
        self.do("close")
        self.connect(server)
        self.do("create")

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests, which asks for keys. A state is kept at every third update."""
    folder = tmp_path_factory.mktemp("verbs")
    (folder / "keys").write_text("".join(f"{key.line}\n" for key in KEYS.values()))
    words = (f"key_file={folder / 'keys'}", "keep_models_every=3", "max_models=2")
    with running(folder / "out", *words) as server:
        yield server


@pytest.fixture(scope="module")
def process() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def client(process: Client, server: Server) -> Iterator[Client]:
    process.connect(server)
    yield process
    process.do("close")


@pytest.fixture(scope="module")
def expected(process: Client, server: Server) -> list[tuple[float, float]]:
    """Losses and norms of a loop that nothing happens to."""
    process.connect(server)
    process.do("create")
    losses = process.steps(range(STEPS))
    process.do("close")
    return losses


def kill_engine(server: Server) -> None:
    pid = server.engine()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


# 1, 2


@pytest.mark.parametrize(("title", "program"), EXAMPLES)
def test_programs_of_the_page_learn(server: Server, title: str, program: str) -> None:
    variables = {"BASE_URL": server.url, "API_KEY": TINKER_KEY, "TELEMETRY": "0"}
    environment = os.environ | {f"TINKER_{name}": value for name, value in variables.items()}
    words = [sys.executable, "-c", program]
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    match = re.search(r"(loss|reward) (\S+) -> (\S+)", run.stdout)
    assert match is not None, run.stdout
    before, after = float(match[2]), float(match[3])
    assert after < before / 2 if match[1] == "loss" else after > before + 0.3


def test_losses_and_methods_are_those_that_the_client_documents(client: Client) -> None:
    owners = dict.fromkeys(each.owner for each in METHODS)
    table = {
        owner: sorted(each.name for each in METHODS if each.owner == owner) for owner in owners
    }
    assert client.do("methods") == [CLIENT_VERSION, table]
    client.do("create")
    results = client.do("policy_losses")
    now = results["now"]
    assert results["losses"] == pytest.approx(
        {
            "importance_sampling": -2 * math.e,
            "ppo": -2 * 1.2,
            "cispo": -2.0 * sum(now[-2:]),
            "dro": 0.5 - sum(now[-2:]),
            "gspo": -2 * 1.0004,
        },
        rel=1e-4,
    )
    assert results["custom"] == pytest.approx(sum(value**2 for value in now), rel=1e-4)


def test_distillation_from_the_likeliest_tokens(client: Client) -> None:
    """The numbers of the teacher are those that the learner begins with, because both are the base; then the loss falls."""
    client.do("create")
    results = client.do("distil", steps=5)
    logprobs = [value for place in results["logprobs"] for value in place]
    top = [value for place in results["top"] for value in place]
    assert results["first"] is None
    assert logprobs == pytest.approx(top, abs=2e-2)
    assert results["named"] == pytest.approx(results["top"][2], abs=1e-3)
    assert [len(place) for place in results["drawn"]] == [2]
    assert results["shapes"] == [[7, 3], [7, 3]]
    pairs = [*zip(results["logprobs"], results["weights"], strict=True)]
    total = sum(
        -logprob * weight
        for place in (*pairs, pairs[4])
        for logprob, weight in zip(*place, strict=True)
    )
    assert results["losses"][0] == pytest.approx(total, rel=1e-4)
    assert results["losses"] == sorted(results["losses"], reverse=True)


async def test_the_gradient_is_that_of_the_learner(
    client: Client, server: Server, tmp_path: Path
) -> None:
    model = client.do("create", unembed=False)
    losses = [client.do("forward_backward", shift=shift) for shift in (0, 3)]
    norm = client.do("optim_step", rate=0.02)
    client.do("save", name="one")
    folder = server.folder / "verbs" / model.replace(":", "_") / "weights" / "one"

    config = load_config({"model": {"name": "tiny"}}).config
    base = await start_base(config, placement.choose_layout(config, 20))
    with closing(base):
        new = NewModel(run="here", folder=str(tmp_path), seed=1, lora=LoraConfig(r=4))
        learner = (await models_over(base, 1).add("here", new)).learner
        sums = [
            await learner.forward_backward([_row(shift)], LossSpec("given"), {"policy": 1.0})
            for shift in (0, 3)
        ]
        assert [each["loss/policy"] for each in sums] == losses
        params = OptimiserParams(0.02, None, 0.0, 0.9, 0.95, 1e-12)
        assert (await learner.update(params)).grad_norm == norm
        await learner.save(str(tmp_path))
    weights = "adapter_model.safetensors"
    assert (tmp_path / weights).read_bytes() == (folder / weights).read_bytes()


def _row(shift: int) -> Row:
    tokens = tuple(token + shift for token in TEXT)
    mask = tuple(int(weight != 0) for weight in WEIGHTS)
    return Row(tokens[:1], tokens[1:], mask, (0.0,) * 7, 0.0, 1.0, credits=WEIGHTS)


# 3


def test_engines_and_servers_that_are_killed_change_nothing(
    client: Client, server: Server, expected: list[Any]
) -> None:
    client.do("create")
    results: list[Any] = []
    for number in range(STEPS):
        loss = client.do("forward_backward", shift=number)
        if number == 1:  # before a state was kept, and after
            kill_engine(server)
        if number == 4:
            server.kill()
            server.begin()
        results.append([loss, client.do("optim_step")])
    assert results == [list(each) for each in expected]


@pytest.mark.soak(suite="kills")
def test_killing_engine_or_server_changes_no_result(client: Client, server: Server) -> None:
    client.do("create")
    client.do("begin", steps=12)
    expected = client.do("losses")
    client.anew(server)
    client.do("begin", steps=12)
    client.begin("losses")
    kill_engine(server)
    assert client.end() == expected
    client.anew(server)
    client.do("begin", steps=12)
    client.begin("losses")
    server.kill()
    server.begin()
    assert client.end() == expected
    client.anew(server)
    client.do("begin", steps=60)
    client.begin("losses")
    assert server.end() == 0
    server.begin()
    assert client.end()[:12] == expected
    again = client.do("logprobs")
    client.do("sampler")
    drawn, known = client.do("sample", seed=3), client.do("prompt_logprobs")
    client.do("forward_backward")
    client.do("optim_step")
    server.kill()
    server.begin()
    assert client.do("logprobs") == again
    assert (client.do("sample", seed=3), client.do("prompt_logprobs")) == (drawn, known)


def test_states(client: Client, server: Server) -> None:
    client.do("create")
    client.step(0)
    path = client.do("save", name="one")
    later = client.steps(range(1, 3))
    client.do("load", path=path, optimiser=True)
    assert client.steps(range(1, 3)) == later
    client.do("load", path=path, optimiser=False)
    fresh = client.steps(range(1, 3))
    assert (fresh[0] == later[0], fresh[1] == later[1]) == (True, False)
    client.do("create_from", path=path)
    assert client.steps(range(1, 3)) == later


# 4


def test_models_beside_a_run_and_after_it(
    process: Client, server: Server, expected: list[Any]
) -> None:
    start: Any = {"model_id": "tiny", "max_steps": 3, "max_completion_length": 8, "lora": {}}
    with TrainingClient(server.url, api_key=KEYS[Role.ADMIN].key) as asking:
        process.connect(server)
        process.do("create")
        with pytest.raises(Refused, match="end their sessions first"):
            asking.start(**start)
        asking.start(**start, replace=True)
        assert "had to make way" in process.expect_refusal("forward_backward")
        process.connect(server)
        process.do("create")
        first_steps = process.steps(range(2))
        assert len(asking.completions("a").completions) == 8
        refused = process.expect_refusal("create", base="smollm2-135m-instruct")
        assert "tiny is in memory" in refused
        assert "max_models is 2" in process.expect_refusal("create", seed=2)
        asking.stop()
        assert [*first_steps, *process.steps(range(2, 4))] == expected[:4]
        process.do("close")
        asking.start(model_id="tiny", adapter="full")
        process.connect(server)
        assert "trains all weights" in process.expect_refusal("create")
        process.do("close")
