"""The whole way: clients over HTTP, the server's process, the engine's process, a real model.

1. With the same seed, rewards and groups the policy is that of `groupwise rl`, bit for bit: with one client and with 64,
   at any staleness.
2. A version that is downloaded is the one that its fingerprint names, and loads, whatever becomes of its run.
"""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.api.client import AsyncTrainingClient, TrainingClient, train
from groupwise.runs.store import Store
from tests.integration.server.server_process import Server, running

TOY = Path(__file__).parents[1] / "toy_task.py"
STEPS = 8
SIZE = 8
SETTINGS: dict[str, Any] = {
    "model_id": "tiny", "adapter": "new", "lora": {"r": 4, "alpha": 8}, "max_completion_length": 6,
    "num_completions_per_prompt": 4, "groups_per_step": SIZE, "learning_rate": 0.01,
    "max_steps": STEPS, "staleness": 0, "max_prompt_length": 16, "sampler": {"max_num_seqs": 8},
    "training": {"seed": 3}, "replace": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(tmp_path_factory.mktemp("served") / "output") as process:
        yield process


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The same training by `groupwise rl`, laid out as this machine suggests, as the server does; the parameter is the staleness."""
    config = {
        "model": {"name": "tiny"}, "lora": {"r": 4, "alpha": 8}, "sampler": {"max_completion_length": 6, "max_num_seqs": 8},
        "training": {"max_steps": STEPS, "prompts_per_step": SIZE, "num_generations": 4, "learning_rate": 0.01, "seed": 3,
                     "max_off_policy_steps": request.param},
        "rewards": {"in_process": True}, "eval": {"before_and_after": False},
        "run": {"name": "alone", "dir": str(tmp_path_factory.mktemp("alone"))},
    }  # fmt: skip
    return groupwise.rl(config, str(TOY)).folder


def share(texts: Sequence[str]) -> list[float]:
    """As the toy task rewards."""
    return [sum(letter in "abcdefghijklm" for letter in text) / 6 for text in texts]


def prompts_of(run: Path) -> list[str]:
    """In the order of draws."""
    with Store.open(run / "run.db", readonly=True) as store:
        groups = [group for step in range(STEPS) for group in store.groups(step)]
    return [str(group.example.prompt) for group in sorted(groups, key=lambda group: group.draw)]


def fingerprints(run: Path) -> list[str]:
    with Store.open(run / "run.db", readonly=True) as store:
        return [record.fingerprint_out for record in store.steps()]


@pytest.mark.parametrize(
    ("clients", "staleness", "in_process"),
    [
        pytest.param(1, 0, 0, marks=pytest.mark.soak(suite="server")),
        (64, 0, 0),
        pytest.param(1, 1, 1, marks=pytest.mark.soak(suite="server")),
        (8, 1, 1),
    ],
    indirect=["in_process"],
)
async def test_the_policy_is_that_of_the_loop_in_one_process(
    clients: int, staleness: int, server: Server, in_process: Path
) -> None:
    prompts = prompts_of(in_process)

    async def client(first: int) -> None:
        """Its share of the draws, in whatever order the server lets it."""
        async with AsyncTrainingClient(server.url) as one:
            for draw in range(first, len(prompts), clients):
                group = await one.completions(prompts[draw], draw=draw)
                await one.rewards(group, share(group.completions))

    async with AsyncTrainingClient(server.url) as one:
        settings = {**SETTINGS, "staleness": staleness, "run_name": f"with-{clients}"}
        begun = await one.start(**settings)
    assert len(prompts) >= clients, "each client has a draw of its own"
    await asyncio.gather(*(client(first) for first in reversed(range(clients))))
    await _finished(server.url)
    assert fingerprints(server.folder / "runs" / begun.run_id) == fingerprints(in_process)
    async with AsyncTrainingClient(server.url) as one:
        assert (await one.status()).not_repeatable is None


async def _finished(url: str) -> None:
    async with AsyncTrainingClient(url) as one:
        status = await one.status()
        async for event in one.events(after=0):
            if event.kind == "finished" and event.run_id == status.run_id:
                return


def test_a_version_is_downloaded_whole_and_loads_whatever_becomes_of_its_run(
    server: Server, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groupwise.engine.models.lora import fingerprint

    def longer(completions: list[str], **_: object) -> list[float]:
        return [float(len(text)) for text in completions]

    examples = [{"prompt": "abc"}]
    settings: Any = {"max_steps": 4, "groups_per_step": 1, "staleness": 0, "save_steps": 1}
    with TrainingClient(server.url) as client:
        run = client.start(**settings, save_total_limit=1, replace=True).run_id
        train(client, examples, longer, steps=1, progress=False)
        step = client.save_checkpoint("early").step
        first = client.model(to=tmp_path / "first.zip").read_bytes()
        status = client.status()
        train(client, examples, longer, steps=4, first_draw=1, progress=False)
        assert {each.address for each in client.checkpoints().checkpoints} >= {"early"}
        assert (run, step) in client.status().versions

        def downloads() -> set[bytes]:
            names = ("early", f"{run}@{step}")
            return {client.model(name, to=tmp_path / "again.zip").read_bytes() for name in names}

        assert downloads() == {first}
        client.start(groups_per_step=1, replace=True, run_name="another")
        client.stop()
        server.end()
        server.begin()
        assert downloads() == {first}
        assert client.tokenizer().hash
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        archive.extractall(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert fingerprint(dict(model.named_parameters())) == status.fingerprint
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([10, 11])
