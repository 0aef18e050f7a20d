"""The functions in kernels as Colab and Kaggle have them: secrets are found, and what is shown is drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kernels import ROOT, Kernel, text
from tests.platform_kernel import SECRETS

pytestmark = pytest.mark.slow

CELLS = """
from groupwise.notebook import *

config = TrainingConfig(
    model="tiny", dataset="arithmetic", dataset_max=40, num_batches=4, train_fraction=0.75, num_generations=2, total_generation_steps=8,
    learning_rate=0.05, beta=0.0, lora_rank=4, lora_alpha=8, overrides={"run.processes": 1},
)
"""


@pytest.fixture(params=["colab", pytest.param("kaggle", marks=pytest.mark.soak(suite="notebook"))])
def platform(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The name of a kernel of that kind."""
    spec = tmp_path / "jupyter" / "kernels" / request.param
    spec.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.platform_kernel", request.param]
    described = {"argv": [*words, "-f", "{connection_file}"], "display_name": request.param, "language": "python"}  # fmt: skip
    (spec / "kernel.json").write_text(json.dumps(described))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    return request.param


def test_secrets_are_found_and_the_page_is_drawn(platform: str, tmp_path: Path) -> None:
    with Kernel(tmp_path, platform) as kernel:
        kernel.run(CELLS)
        [table] = kernel.run("session = prepare_session(config)")
        assert "data" in table, table
        html = table["data"]["text/html"]
        assert f"hf_token from {platform.capitalize()}" in html
        [page] = kernel.run("state = train_grpo(config, session)")
        assert "step 3/3" in page["data"]["text/html"]
        assert page["data"]["text/html"].count("<img") >= 2
        [answer] = kernel.run("answer = quick_test(config, session)")
        everything = "\n".join(text([each]) for each in (table, page, answer))
        assert text(kernel.run("import os; print(len(os.environ['HF_TOKEN']))")).strip() == "20"
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    for secret in SECRETS.values():
        assert secret not in everything
        assert not any(secret.encode() in content for content in files)
