"""The worker process: when it ends, and its errors for torn files and invalid requests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.core.errors import CheckpointError, ModelError, RunError
from groupwise.core.types import GroupRequest, SamplingParams
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import start_training
from groupwise.training.config import load_config
from tests.processes import all_gone
from tests.tunix_models import model_of

ORPHAN = """
import os, signal, time
from concurrent.futures import ThreadPoolExecutor
from groupwise.engine.backends.tunix.environment import start_worker
from groupwise.engine.backends.tunix.messages import Look
with ThreadPoolExecutor(1) as other:
    worker = other.submit(start_worker, 1, (1, 1)).result()
print(worker.call_now(Look())["devices"], worker.pid, flush=True)  # the thread that asked for it has ended
if os.fork() == 0:
    time.sleep(60)  # holds the socket
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_its_parent_though_a_child_of_that_lives_on() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdout is not None
    try:
        devices, worker = map(int, program.stdout.readline().split())
        assert program.wait(30) == -signal.SIGKILL
        assert devices >= 1
        assert all_gone([worker])
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.stdout.close()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    values = {
        "model": {"name": str(model_of("llama", layers=2)), "backend": "tunix"},
        "lora": {"r": 4, "alpha": 8},
        "sampler": {"max_num_seqs": 16, "max_completion_length": 24},
        "run": {"threads": 1},
    }
    config = load_config(values).config
    layout = placement.choose_layout(config, 40)
    folder = tmp_path_factory.mktemp("published")
    with closing(asyncio.run(start_training(config, layout, "run", folder))) as made:
        yield made


@pytest.mark.parametrize("torn", ["adapter_model.safetensors", "orbax"])
def test_a_torn_checkpoint_is_reported_as_such(parts: Parts, torn: str, tmp_path: Path) -> None:
    asyncio.run(parts.learner.save(str(tmp_path)))
    parts.learner.load(str(tmp_path))
    place = tmp_path / torn
    files = [each for each in place.rglob("*") if each.is_file()] if place.is_dir() else [place]
    for file in files:
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=f"{tmp_path} is torn") as told:
        parts.learner.load(str(tmp_path))
    assert "Traceback" not in str(told.value)


def test_a_request_that_does_not_fit_fails_alone(parts: Parts) -> None:
    fits, does_not = tuple(range(2, 22)), tuple(range(2, 122))
    params = SamplingParams(20, 1.0, (1,))
    asked = [GroupRequest(n, ids, (1, 2), params) for n, ids in enumerate((fits, does_not, fits))]

    async def all_at_once() -> list[object]:
        waits = [parts.sampler.generate(each) for each in asked]
        return await asyncio.gather(*waits, return_exceptions=True)

    one, other, third = asyncio.run(all_at_once())
    assert isinstance(other, RunError)
    assert one == third
    assert len(one) == 2  # type: ignore[arg-type]


def test_a_publication_that_is_gone_is_reported_as_such(parts: Parts) -> None:
    policy = asyncio.run(parts.learner.publish(1))
    (Path(policy.path) / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is torn"):
        asyncio.run(parts.sampler.load(policy))
