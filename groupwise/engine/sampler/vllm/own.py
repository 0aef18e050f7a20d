"""A vLLM server that a run starts for itself (`sampler.vllm_python`), restarts if it ends, and ends with itself.

It runs in its own Python environment. It listens on the loopback interface only, and answers only callers with a key that no other program
has: the key is passed in the server's environment, never in its arguments. When this process ends for any reason, the server ends as well.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from groupwise.api.openai_client.client import Endpoint
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.processes.program import free_port
from groupwise.core.retry import Timing
from groupwise.engine.sampler.vllm.servers import Server

logger = logging.getLogger(__name__)

PROGRAM = ("-m", "vllm.entrypoints.openai.api_server")
HOST = "127.0.0.1"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Possible values of vLLM's --max-lora-rank; it refuses adapters of a larger rank."""
GRACE = 20.0
"""Seconds that a server may take to end after SIGTERM, before it is killed."""
FAST = 3
"""Number of consecutive ends before the first answer after which the server is given up."""
LOOKS_EVERY = 0.5
LAST_WORDS = 2000
"""Characters of its log that an error message quotes."""
PARENT_ENDS = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Program that asks the kernel to end it with the thread that started it, then becomes the server (prctl(2), PR_SET_PDEATHSIG)."""


def largest_rank(rank: int) -> int:
    """The --max-lora-rank to set for adapters of this rank."""
    return next((supported for supported in RANKS if supported >= rank), rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Describes the server to start."""

    python: str
    """Interpreter of the environment with vLLM."""
    location: str
    """Location of the base: a folder or a hub id."""
    revision: str | None
    name: str
    """Name of the base in requests."""
    dtype: str
    rank: int
    """Rank of the adapters."""
    longest: int
    """Most tokens of prompt and completion together."""
    memory: float
    """Share of each GPU's memory that it may use."""
    gpus: tuple[str, ...] | None
    """Values for CUDA_VISIBLE_DEVICES; None: no restriction."""
    parallel: int = 1
    """Number of GPUs that share each product (tensor parallelism)."""
    in_4bit: bool = False
    """True to load the base in 4 bits, as the learner does."""
    trust_remote_code: bool = False

    def arguments(self, port: int) -> tuple[str, ...]:
        """Command-line arguments of vLLM's server."""
        return (
            *PROGRAM,
            f"--model={self.location}",
            *([f"--revision={self.revision}"] if self.revision else []),
            f"--served-model-name={self.name}",
            f"--host={HOST}",
            f"--port={port}",
            f"--dtype={self.dtype}",
            f"--max-model-len={self.longest}",
            "--enable-lora",
            f"--max-lora-rank={largest_rank(self.rank)}",
            "--max-loras=2",
            "--logprobs-mode=processed_logprobs",
            f"--gpu-memory-utilization={self.memory}",
            f"--tensor-parallel-size={self.parallel}",
            *(["--quantization=bitsandbytes"] if self.in_4bit else []),
            *(["--trust-remote-code"] if self.trust_remote_code else []),
        )


@dataclass(frozen=True, slots=True)
class OwnEndpoint(Endpoint):
    """An endpoint whose key is not read from an environment variable."""

    secret: str = field(default="", repr=False)

    def key(self) -> str:
        """See `Endpoint.key`."""
        return self.secret


class SpawnedServer:
    """The server of this run; see the module's docstring. `up` starts it."""

    def __init__(self, spec: ServerSpec, log: Path, *, timeout: float) -> None:
        """`log`: file for the server's output, emptied at the start of each run. `timeout`: seconds for one request."""
        self._settings = spec
        self.log = log
        """File of the server's output."""
        self._secret = secrets.token_urlsafe(32)
        self._port = free_port()
        self.endpoint = OwnEndpoint(
            f"http://{HOST}:{self._port}", spec.name, timeout=timeout, secret=self._secret
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: threading.Thread | None = None
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._gave_up = False

    async def up(self, server: Server, patience: float, timing: Timing) -> None:
        """Start it unless it is running, and wait until it answers. Raises UsageError with its last output if it does not."""
        if self._supervisor is None:
            self._start_supervisor()
        deadline = timing.clock() + patience
        while not self._answered.is_set():
            with suppress(EndpointError):
                await server.client.ask("GET", "/models", None, bytes, 0)
                self._answered.set()
                return
            if self._gave_up or timing.clock() >= deadline:
                why = "ended" if self._gave_up else f"has not answered for {patience:g} s"
                self.close()
                words = ""
                with suppress(OSError):
                    words = self.log.read_text(errors="replace")[-LAST_WORDS:].strip()
                raise UsageError(
                    f"The vLLM of sampler.vllm_python ({self._settings.python}) {why}. Its last words, in {self.log}:\n{words or 'none'}"
                )
            await timing.sleep(LOOKS_EVERY)

    def close(self) -> None:
        """End the server. May be repeated."""
        self._closing.set()
        if self._supervisor is not None:
            self._supervisor.join()

    def _start_supervisor(self) -> None:
        python = Path(self._settings.python).expanduser()
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise UsageError(
                f"sampler.vllm_python is {self._settings.python}, where there is no program. Name the Python of an environment that has "
                "vLLM, as /opt/vllm/bin/python."
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._supervisor = threading.Thread(target=self._keep_running, name="vllm", daemon=True)
        self._supervisor.start()

    def _keep_running(self) -> None:
        """Keep a server running until `close`. This thread must outlive it, because the kernel ends it with the thread that started it."""
        failed = 0
        while not self._closing.is_set():
            with self.log.open("ab") as log:
                process = self._start_server(log)
                while process.poll() is None and not self._closing.wait(LOOKS_EVERY):
                    pass
                _end_server(process)
            if self._closing.is_set():
                return
            failed = 0 if self._answered.is_set() else failed + 1
            if failed == FAST:
                self._gave_up = True
                return
            logger.warning(
                "the vLLM of this run ended (exit status %s) and is begun anew; its words are in %s",
                process.returncode,
                self.log,
            )

    def _start_server(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        python = str(Path(self._settings.python).expanduser())
        words = [sys.executable, "-I", "-S", "-c", PARENT_ENDS, str(os.getpid())]
        environment = {"VLLM_API_KEY": self._secret, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        if self._settings.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._settings.gpus)
        of_this_python = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        inherited = {key: value for key, value in os.environ.items() if key not in of_this_python}
        return subprocess.Popen(
            [*words, python, *self._settings.arguments(self._port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited, **environment},
            start_new_session=True,
        )


def free_gpus(
    count: int, parallel: int, memory: float, learners: int = 1
) -> tuple[str, ...] | None:
    """GPUs for a server that the learners on the first of `count` do not use; None without GPUs. Raises UsageError if too few."""
    if count == 0:
        return None
    visible = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = [gpu for gpu in visible if gpu] or [str(number) for number in range(count)]
    if len(gpus) >= learners + parallel:
        return tuple(gpus[learners : learners + parallel])
    if learners > 1:
        raise UsageError(
            f"{learners} learners of this machine and sampler.tensor_parallel_size {parallel} need {learners + parallel} GPUs, and there "
            f"are {len(gpus)}. Lower distributed.learners, or add GPUs."
        )
    if parallel > 1:
        raise UsageError(
            f"sampler.tensor_parallel_size is {parallel}, but beside the learner's GPU there are {len(gpus) - 1}. Lower it."
        )
    if memory > 0.6:
        raise UsageError(
            f"sampler.gpu_memory_utilization is {memory:g}, but there is one GPU, on which the run learns, too. Set it to 0.5 or less, or "
            "add a GPU."
        )
    return tuple(gpus)


def _end_server(process: subprocess.Popen[bytes]) -> None:
    """End a server with all processes that it started; they are in its process group."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
