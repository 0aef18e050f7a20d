"""The real server of vLLM, started as `docs/how-to/vllm.md` says, in its build for CPUs, which `scripts/real_environment.py` installs.

Its model is a small Llama with random weights, in float32, so that its log-probabilities are those of the learner to a thousandth.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from runpy import run_path

import httpx2
import torch

from groupwise.core.processes.program import ProcessGroup, free_port
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.servers.spawned_server import SERVE
from tests.processes import wait_until

ROOT = Path(__file__).parents[3]
where = run_path(str(ROOT / "scripts/real_environment.py"))["where"]
BUILD_FOR_CPUS: Path = where("vllm")
GIVEN = os.environ.get("GROUPWISE_VLLM_PYTHON")
PYTHON = Path(GIVEN or BUILD_FOR_CPUS / "bin/python")
"""That of another release, or of one for GPUs, if the variable names it."""
OLDEST: Path = where("vllm-oldest") / "bin/python"
"""That of the oldest release that is supported."""
NAME = "small"
"""The model's name in requests."""
LORA = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")
ARGUMENTS = (
    *("--served-model-name", NAME, "--dtype", "float32", "--host", "127.0.0.1"),
    *(*LORA, "--max-model-len", "256", "--logprobs-mode", "processed_logprobs"),
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
)
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_CI_ENV": "1",  # nothing is compiled, which takes most of the time until it answers
    "OMP_NUM_THREADS": "1",
}
START_S = 420.0
"""Seconds that it may take to answer on a busy machine; 30 on a quiet one."""


def write_model(folder: Path, *, tie_word_embeddings: bool = True) -> None:
    """Write a small model whose random weights are large enough that an adapter changes its completions."""
    # Heads of 32 are the fewest dimensions that vLLM computes on a CPU.
    model = tiny_model(hidden_size=64)
    if not tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() == 2 else 1.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    # Older releases of vLLM come with transformers 4, which names these otherwise.
    settings = folder / "tokenizer_config.json"
    fields = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    fields["additional_special_tokens"] = fields.pop("extra_special_tokens", [])
    settings.write_text(json.dumps(fields))


class RealServer:
    """A server that may be ended and begun again at its address."""

    def __init__(self, python: Path, model: Path, folder: Path, *, whole: bool = False) -> None:
        """`whole`: it takes all weights of a model, not adapters."""
        self.python = python
        self.model = model
        self._arguments = [each for each in ARGUMENTS if not whole or each not in LORA]
        self._environment = {**ENVIRONMENT, **({"VLLM_SERVER_DEV_MODE": "1"} if whole else {})}
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: ProcessGroup | None = None

    def begin(self) -> None:
        """Start it; `wait` waits until it answers."""
        packages = {}
        if self.python.is_relative_to(BUILD_FOR_CPUS):  # it is packaged as vllm-cpu
            named = self._folder / "vllm-0+cpu.dist-info"
            named.mkdir(exist_ok=True)
            (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
            packages = {"PYTHONPATH": str(self._folder)}
        self._process = ProcessGroup(
            [
                str(self.python),
                "-c",
                SERVE,
                str(self.model),
                *self._arguments,
                "--port",
                str(self._port),
            ],
            folder=self._folder,
            log=self._folder / "vllm.log",
            environment={**self._environment, **packages},
        )

    def wait(self) -> None:
        """Until it answers."""

        def answers() -> bool:
            assert self._process is not None
            assert not self._process.has_ended, self._process.last_output()
            try:
                return bool(self.models())
            except httpx2.TransportError:
                return False

        wait_until(answers, "vLLM", START_S)

    def models(self) -> list[str]:
        """The names of its base and adapters."""
        return [each["id"] for each in httpx2.get(f"{self.url}/v1/models").json()["data"]]

    def counter(self, name: str) -> float:
        """One of its metrics, summed over its engines."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def end(self) -> None:
        """End it with all its processes. May be repeated."""
        if self._process is not None:
            self._process.end()
