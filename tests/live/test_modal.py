"""The real Modal, where there is a token for it and somebody says so. What it does costs some cents, and is asked for by

GROUPWISE_LIVE_MODAL=1 .venv/bin/python -m pytest tests/live/test_modal.py -m gpu
"""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from groupwise.jobs.clouds.backend import Order, Outcome
from groupwise.jobs.clouds.modal.backend import ModalBackend
from groupwise.jobs.clouds.modal.live import LiveModal
from groupwise.jobs.clouds.modal.runner import ModalRunner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import JobSpec, Limits

VARIABLE = "GROUPWISE_LIVE_MODAL"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        VARIABLE not in os.environ, reason=f"it costs money: {VARIABLE}=1 asks for it"
    ),
]
SCRIPT = """\
import hashlib, os, subprocess
print(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout)
print(hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest())
os.mkdir("outputs")
open("outputs/x", "w").write("made")
"""


@pytest.fixture
async def backend() -> AsyncIterator[ModalBackend]:
    port = LiveModal()
    if await port.workspace() is None:
        pytest.skip("there is no token of Modal here")
    found = ModalBackend("modal", ModalRunner(port), "Modal")
    yield found
    await found.close()


async def test_a_job_has_a_gpu_its_secret_and_comes_back(
    backend: ModalBackend, tmp_path: Path
) -> None:
    spec = JobSpec(("python3", "-c", SCRIPT), secrets=("TOKEN",), limits=Limits(time_seconds=300))
    name = f"live-{int(time.time())}"
    order = Order(name, spec, 1, secrets={"TOKEN": "value"}, place_options={"gpu": "A10G"})
    handle = await backend.submit(order, BlobStore(tmp_path / "blobs"))
    status = await backend.status(handle)
    while status.ending is None:
        status = await backend.wait(handle, status, 60)
    assert status.ending.outcome is Outcome.SUCCEEDED
    log = (await backend.log(handle, 0, 1 << 16)).data.decode()
    assert "A10" in log
    await backend.fetch(handle, tmp_path / "results")
    assert (tmp_path / "results/outputs/x").read_text() == "made"
    await backend.cleanup(handle)
