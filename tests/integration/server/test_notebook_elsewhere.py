"""The functions of a notebook against a real training server: the same policy as here, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.notebook import TrainingConfig, connect, run_full_pipeline
from tests.integration.server.server_process import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("served") / "output") as process:
        yield process


def digits(completions: list[str], **columns: object) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def config_of(folder: Path) -> TrainingConfig:
    return TrainingConfig(
        model="tiny", dataset="arithmetic", dataset_max=20, num_batches=2, num_generations=4, total_generation_steps=8, beta=0.0,
        learning_rate=0.05, lora_rank=4, lora_alpha=8, checkpoint_dir=str(folder / "digits"), overrides={"sampler.max_num_seqs": 8},
    )  # fmt: skip


def weights(path: str) -> bytes:
    return (Path(path) / "hf_lora" / "adapter_model.safetensors").read_bytes()


def test_the_same_calls_give_the_same_policy_on_a_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, here, path = run_full_pipeline(config_of(tmp_path / "here"), reward_functions=[digits])
    remote = connect(server.url)
    session, there, path_there = remote.run_full_pipeline(
        config_of(tmp_path / "there"), reward_functions=[digits]
    )
    assert weights(path) == weights(path_there)
    assert here.test_answer == there.test_answer
    assert f"torch, on {server.url}" in capsys.readouterr().out
    measured = remote.evaluate(session.config, session)
    assert measured["accuracy"] == session.run.evaluations()["after"]["accuracy"]
