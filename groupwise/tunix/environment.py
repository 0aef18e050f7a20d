"""Tunix's environment: where it is, whether it is whole, and making it.

It is a virtual environment beside the one that holds this package, because the two want other versions of the same libraries. What it holds
is pinned in requirements.txt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from groupwise.cache import cache_folder
from groupwise.errors import UsageError
from groupwise.runs import durable
from groupwise.tunix.messages import Found, Look
from groupwise.tunix.process import WorkerProcess

Accelerator = Literal["cpu", "cuda", "tpu"]
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
VARIABLE = "GROUPWISE_TUNIX_PYTHON"
"""Names the Python of an environment that one has made oneself."""
EXTRAS: dict[Accelerator, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("jax[cuda13]",),
    "tpu": ("jax[tpu]",),
}
"""What JAX needs besides, for each kind of device."""
MADE = "made.json"
INSTALL = "groupwise fetch-tunix"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
"""Libraries below JAX say on stderr what concerns nobody."""
THREADS_OF_A_DEVICE = 4
"""Of devices that JAX makes of one CPU: where they have fewer, one that waits for the others takes the thread that these would need."""
COMPILED_BYTES = 4 << 30
"""Of compiled programs, the least used go first."""


def home() -> Path:
    """Where the environment is."""
    return cache_folder("tunix")


def python() -> Path:
    """The Python of the environment. Raises UsageError where there is none, or one of other versions."""
    if own := os.environ.get(VARIABLE):
        if not Path(own).is_file():
            raise UsageError(f"{VARIABLE} is {own}, but there is no such file.")
        return Path(own)
    made = _made()
    if made is None:
        raise UsageError(
            f"The backend tunix needs an environment of its own, in {home()}, and there is none. Make it (1.5 GB, a few minutes): "
            f"{INSTALL}, on a TPU {INSTALL} --accelerator tpu. Or name the Python of one that has google-tunix in {VARIABLE}."
        )
    if made["requirements"] != _digest():
        raise UsageError(
            f"The environment in {home()} was made for another version of groupwise. Make it anew: {INSTALL}."
        )
    return _interpreter()


def install(accelerator: Accelerator, *, anew: bool = False, say: bool = True) -> Path:
    """Make the environment, unless it is there and not wanted `anew`; gives its Python.

    Raises UsageError with pip's last words where it cannot be made.
    """
    wanted = {"requirements": _digest(), "accelerator": accelerator}
    if _made() == wanted and not anew:
        return _interpreter()
    folder = home()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    venv.create(folder, with_pip=False)
    words = [*_pip(), "-r", str(REQUIREMENTS), *EXTRAS[accelerator]]
    shown = None if say else subprocess.DEVNULL
    done = subprocess.run(words, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UsageError(
            f"The packages of requirements.txt could not be installed ({' '.join(words[:4])} …):\n{done.stderr[-2000:].strip()}"
        )
    durable.write_json(folder / MADE, wanted)
    return _interpreter()


@cache
def look() -> Found:
    """Versions and devices there, by asking a worker: two or three seconds, once."""
    worker = start_worker(None, (1, 1))
    try:
        return Found.model_validate(worker.call_now(Look()))
    finally:
        worker.close()


def mesh_of(wanted: tuple[int, int] | None) -> tuple[int, int]:
    """Devices for (fsdp, tp): those of the config, else all that there are."""
    return wanted or (look().devices, 1)


def start_worker(threads: int | None, mesh: tuple[int, int]) -> WorkerProcess:
    """A worker in the environment; on a CPU it computes with so many threads, and shows JAX as many devices as the mesh has."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    own = {**QUIET, **_compiled()}
    if (count := mesh[0] * mesh[1]) > 1:
        flags.append(f"--xla_force_host_platform_device_count={count}")
        own["NPROC"] = str(THREADS_OF_A_DEVICE * count)
    if threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    return WorkerProcess(python(), {**own, "XLA_FLAGS": " ".join(flags).strip()})


def _compiled() -> dict[str, str]:
    """Where JAX keeps what it has compiled, for the next worker: those of another processor would not run on this one."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    with suppress(OSError):
        told = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in told if line.startswith(("flags", "Features"))), "")
        kind = hashlib.sha256(flags.encode()).hexdigest()[:16]
        return {
            "JAX_COMPILATION_CACHE_DIR": str(cache_folder("tunix-compiled") / kind),
            "JAX_COMPILATION_CACHE_MAX_SIZE": str(COMPILED_BYTES),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return {}


def _made() -> dict[str, str] | None:
    if not (home() / MADE).is_file() or not _interpreter().is_file():
        return None
    return json.loads((home() / MADE).read_bytes())


def _interpreter() -> Path:
    return home() / "bin" / "python"


def _pip() -> list[str]:
    """What installs into it: this environment's pip, else uv. Its own would need ensurepip, which some systems leave out."""
    target = str(_interpreter())
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return [*own, "--python", target, "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", target]
    raise UsageError("There is neither pip nor uv to install packages with.")


def _digest() -> str:
    """Of what is required; not of what is said about it."""
    told = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    return hashlib.sha256("\n".join(filter(None, told)).encode()).hexdigest()[:16]
