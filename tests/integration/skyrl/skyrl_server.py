"""SkyRL's Tinker server as packaged, with its engine `jax` on the CPU, in an environment that `scripts/real_environment.py` makes.

The server begins its engine by `uv run`, for which the current folder is a project without packages, and the environment is named.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from string import ascii_lowercase

import httpx2

from tests.integration.cookbook.workplace import MODEL, write_model
from tests.ports import free_port
from tests.processes import wait_until

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = run_path(str(ROOT / "scripts/real_environment.py"))
ENVIRONMENT: Path = ENVIRONMENTS["where"]("skyrl")
PROJECT = """[project]
name = "service"
version = "0"
requires-python = ">=3.11"
[project.optional-dependencies]
tinker = []
jax = []
"""
ENGINE = {
    "max_lora_adapters": 32,
    "max_lora_rank": 8,
    "train_micro_batch_size": 8,
    "sample_max_num_sequences": 16,
}
START_S = 240.0
"""Seconds for JAX and the model to load on a busy machine."""


def letters(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Prompts of the toy task, answered by letters of the whole alphabet, half of which the task wants."""
    while True:
        answer = "".join(rng.choices(ascii_lowercase, k=8))
        yield f"write {rng.choice('abcde')}{rng.randrange(10)}:", f"{answer}<|im_end|>"


def make_model(folder: Path) -> Path:
    """A small Qwen3 that writes letters, with files as transformers 4 reads them."""
    model = folder / MODEL
    write_model(model, letters, steps=60, words=())
    config = json.loads((model / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "float32"}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    special = tokenizer.pop("extra_special_tokens")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": special}
    (model / "tokenizer_config.json").write_text(json.dumps({**tokenizer, **names}))
    return model


def client_packages(folder: Path) -> Path:
    """A folder for PYTHONPATH with the tinker package that speaks with the server, and nothing else of its environment."""
    packages = folder / "client"
    packages.mkdir()
    (installed,) = ENVIRONMENT.glob("lib/python*/site-packages/tinker")
    (packages / "tinker").symlink_to(installed)
    return packages


class SkyrlServer:
    """The server over one folder; may be killed and begun again."""

    def __init__(self, folder: Path) -> None:
        """`folder` has the model at `MODEL`."""
        self.folder = folder
        self.log = folder / "skyrl.log"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "pyproject.toml").write_text(PROJECT)

    def begin(self) -> None:
        """Start it and its engine, and wait until both answer."""
        words = [
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--base-model", MODEL, "--backend", "jax", "--backend-config", json.dumps(ENGINE)),
            *("--checkpoints-base", str(self.folder / "checkpoints")),
            *("--database-url", f"sqlite:///{self.folder}/tinker.db"),
        ]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}",
            "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT),
            "UV_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["uv", "run", "--no-sync", "--frozen", "-m", "tx.tinker.api", *words],
                executable=str(ENVIRONMENT / "bin/uv"),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # uv, server and engine end together
            )
        process = self._process

        def is_ready() -> bool:
            said = self.log.read_bytes()[before:].decode(errors="replace")
            assert process.poll() is None, said[-6000:]
            if "Starting background engine" not in said:
                return False
            try:
                return httpx2.get(f"{self.url}/api/v1/healthz", timeout=5.0).is_success
            except httpx2.HTTPError:
                return False

        wait_until(is_ready, "SkyRL's server", timeout_s=START_S)

    def kill(self) -> None:
        """Server and engine, as the kernel does where memory is short."""
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
