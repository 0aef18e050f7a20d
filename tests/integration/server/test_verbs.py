"""The real Tinker client against `groupwise serve` and its real engine.

1. Supervised loops and loops of RL learn, with calls in flight.
2. The gradient is that of the learner in this process, to the bit.
3. An engine that is killed, or the whole server, costs time and changes nothing: the loop goes on, and its losses are those of one that
   nothing has happened to. What was answered stays answered, and what was sampled is sampled again.
4. Models live beside a run, over its base, and after it; a run does not begin while clients have models.
5. The programs of the page run as they stand.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise import build, machine_layout
from groupwise.client.errors import Refused
from groupwise.client.training_client import TrainingClient
from groupwise.config import load_config
from groupwise.models.config import LoraConfig
from groupwise.ranks.beside import NewModel
from groupwise.server.verbs.compatibility import EXAMPLES
from groupwise.types import LossSpec, OptimiserParams, Row
from groupwise.wire.keys import Role, new_key
from tests.integration.server.running import Server, running

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parent / "verbs_driver.py"
TEXT = (11, 12, 13, 14, 15, 16, 17, 18)
WEIGHTS = (0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
STEPS = 7


class Client:
    """`verbs_driver.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": what, **arguments}), file=self._process.stdin, flush=True)

    def end(self) -> Any:
        answer = self._answer()
        assert "result" in answer, answer
        return answer["result"]

    def do(self, what: str, **arguments: Any) -> Any:
        self.begin(what, **arguments)
        return self.end()

    def refused(self, what: str, **arguments: Any) -> str:
        self.begin(what, **arguments)
        return self._answer()["error"]

    def step(self, number: int) -> tuple[float, float]:
        return self.do("forward_backward", shift=number), self.do("optim_step")

    def steps(self, numbers: range) -> list[tuple[float, float]]:
        return [self.step(number) for number in numbers]

    def connect(self, server: Server, key: str = "tml-any-thing") -> None:
        self.do("connect", url=server.url, key=key)

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for most tests, as each begins engines enough of its own. A state is kept at every third update."""
    with running(tmp_path_factory.mktemp("verbs") / "out", "keep_models_every=3") as server:
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
    found = process.steps(range(STEPS))
    process.do("close")
    return found


def kill_engine(server: Server) -> None:
    pid = server.engine()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


# 1, 2


def test_a_supervised_loop_learns(client: Client) -> None:
    client.do("create")
    client.do("begin", steps=25, rate=0.05, same=True)
    losses = client.do("losses")
    assert losses[-1] < 0.5 * losses[0], losses


def test_a_loop_of_rl_learns(client: Client) -> None:
    client.do("create", rank=8)
    rewards = client.do("grpo", steps=15, rate=0.1)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards


async def test_the_gradient_is_that_of_the_learner(
    client: Client, server: Server, tmp_path: Path
) -> None:
    model = client.do("create", unembed=False)
    told = [client.do("forward_backward", shift=shift) for shift in (0, 3)]
    norm = client.do("optim_step", rate=0.02)
    client.do("save", name="one")
    folder = server.folder / "verbs" / model.replace(":", "_") / "weights" / "one"

    config = load_config({"model": {"name": "tiny"}}).config
    base = await build.start_base(config, machine_layout.choose_layout(config, 20))
    with closing(base):
        new = NewModel(run="here", folder=str(tmp_path), seed=1, lora=LoraConfig(r=4))
        learner = (await build.models_over(base, 1).add("here", new)).learner
        sums = [
            await learner.forward_backward([_row(shift)], LossSpec("given"), {"policy": 1.0})
            for shift in (0, 3)
        ]
        assert [each["loss/policy"] for each in sums] == told
        params = OptimiserParams(0.02, None, 0.0, 0.9, 0.95, 1e-12)
        assert (await learner.update(params)).grad_norm == norm
        learner.save(str(tmp_path))
    weights = "adapter_model.safetensors"
    assert (tmp_path / weights).read_bytes() == (folder / weights).read_bytes()


def _row(shift: int) -> Row:
    tokens = tuple(token + shift for token in TEXT)
    mask = tuple(int(weight != 0) for weight in WEIGHTS)
    return Row(tokens[:1], tokens[1:], mask, (0.0,) * 7, 0.0, 1.0, credits=WEIGHTS)


# 3


def test_engines_that_are_killed_change_nothing(
    client: Client, server: Server, expected: list[Any]
) -> None:
    client.do("create")
    found: list[Any] = []
    for number in range(STEPS):
        loss = client.do("forward_backward", shift=number)
        if number in (1, 4):  # before a state was kept, and after
            kill_engine(server)
        found.append([loss, client.do("optim_step")])
    assert found == [list(each) for each in expected]


def test_servers_that_are_killed_or_ended_change_nothing(
    client: Client, server: Server, expected: list[Any]
) -> None:
    client.do("create")
    found: list[Any] = []
    for number in range(STEPS):
        loss = client.do("forward_backward", shift=number)
        if number == 1:
            server.kill()
            server.begin()
        if number == 4:
            assert server.end() == 0
            server.begin()
        found.append([loss, client.do("optim_step")])
    assert found == [list(each) for each in expected]


def test_what_waits_is_done_and_what_was_answered_stays(client: Client, server: Server) -> None:
    client.do("create")
    client.do("begin", steps=12)
    expected = client.do("losses")
    client.do("create")
    client.do("begin", steps=12)
    client.begin("losses")
    kill_engine(server)
    assert client.end() == expected
    client.do("create")
    client.do("begin", steps=12)
    client.begin("losses")
    server.kill()
    server.begin()
    assert client.end() == expected
    client.do("create")
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
    kill_engine(server)
    assert client.steps(range(1, 3)) == later
    client.do("load", path=path, optimiser=False)
    fresh = client.steps(range(1, 3))
    assert (fresh[0] == later[0], fresh[1] == later[1]) == (True, False)
    client.do("create_from", path=path)
    assert client.steps(range(1, 3)) == later


# 4


def test_models_beside_a_run_and_after_it(process: Client, tmp_path: Path) -> None:
    start: Any = {"model_id": "tiny", "max_steps": 3, "max_completion_length": 8, "lora": {}}
    with running(tmp_path / "out", "max_models=2") as server, TrainingClient(server.url) as asking:
        process.connect(server)
        process.do("create")
        expected = process.steps(range(4))
        with pytest.raises(Refused, match=r"let go of in \d+ unless.*end their sessions first"):
            asking.start(**start)
        asking.start(**start, replace=True)
        assert "had to make way" in process.refused("forward_backward")
        process.connect(server)
        process.do("create")
        found = process.steps(range(2))
        assert len(asking.completions("a").completions) == 8
        refused = process.refused("create", base="smollm2-135m-instruct")
        assert "tiny is in memory, for the run" in refused
        assert "max_models" in process.refused("create", seed=2)
        asking.stop()
        assert [*found, *process.steps(range(2, 4))] == expected
        process.do("close")
        asking.start(model_id="tiny", adapter="full")
        process.connect(server)
        assert "trains all weights" in process.refused("create")
        process.do("close")


# 5, and who may


@pytest.mark.parametrize(("title", "program"), EXAMPLES)
def test_programs_of_the_page(server: Server, title: str, program: str) -> None:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-any-thing",
        "TINKER_TELEMETRY": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"(loss|reward) (\S+) -> (\S+)", run.stdout)
    assert found is not None, run.stdout
    before, after = float(found[2]), float(found[3])
    assert after < before / 2 if found[1] == "loss" else after > before + 0.3


def test_keys_and_roles(process: Client, tmp_path: Path) -> None:
    trains, reads = new_key(Role.TRAIN), new_key(Role.READ)
    keys = tmp_path / "keys"
    keys.write_text(f"{trains.line}\n{reads.line}\n")
    words = (f"key_file={keys}", "max_body_bytes=2048")
    with running(tmp_path / "out", *words) as server:
        process.connect(server, trains.key.replace("gw-", "tml-"))
        process.do("create")
        process.do("close")
        url = f"{server.url}/api/v1"
        read = {"x-api-key": reads.key.replace("gw-", "tml-")}
        assert httpx2.get(f"{url}/get_server_capabilities").status_code == 401
        assert httpx2.get(f"{url}/get_server_capabilities", headers=read).status_code == 200
        body = {"tags": [], "sdk_version": "0"}
        assert httpx2.post(f"{url}/create_session", headers=read, json=body).status_code == 403
        key = {"x-api-key": trains.key}
        large = httpx2.post(f"{url}/telemetry", headers=key, content=b"x" * 3000)
        assert large.status_code == 413
        told = httpx2.get(f"{server.url}/metrics", headers=read).text
        assert 'route="/api/v1",status="403"' in told
