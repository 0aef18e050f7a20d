"""Tunix's virtual environment: finds it, checks that it is complete, and creates it.

It is separate from the environment of this package, because the two need different versions of the same libraries. Its packages are pinned
in requirements.txt.

Each environment is created in a new folder, and `made.json` names the one in use. That file is replaced once the new environment is
complete, so an installation that fails or is interrupted leaves the previous one in use. Folders that `made.json` does not name are then
removed. A lock lets only one process create an environment at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from groupwise.core import atomic_files
from groupwise.core.accelerators import accelerator as of_this_machine
from groupwise.core.cache import cache_folder
from groupwise.core.errors import RunError, UsageError
from groupwise.core.virtual_environments import LOCK, exclusive, make
from groupwise.engine.backends.tunix.messages import TPU_IN_USE_ADVICE, Look, WorkerInfo
from groupwise.engine.backends.tunix.process import WorkerProcess, own_environment

logger = logging.getLogger(__name__)

Accelerator = Literal["cpu", "cuda", "tpu"]
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
VARIABLE = "GROUPWISE_TUNIX_PYTHON"
"""Environment variable with the path of the Python of an environment that the user created."""
EXTRAS: dict[Accelerator, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("jax[cuda13]",),
    "tpu": ("jax[tpu]",),
}
"""Additional packages that JAX needs for each kind of device."""
PLATFORMS = "JAX_PLATFORMS"
"""Environment variable with the platforms that JAX may use."""
USUAL_SECONDS, MAX_SECONDS = 20.0, 300.0
"""Seconds in which JAX usually opens its devices, and after which this module gives up."""
MADE = "made.json"
INSTALL = "groupwise fetch-tunix"
QUIET_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "GRPC_VERBOSITY": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Silences stderr messages of libraries that JAX uses; they do not help users."""
THREADS_OF_A_DEVICE = 4
"""Threads per device if JAX splits one CPU into several. With fewer, a device that waits for the others may occupy a thread they need."""
COMPILED_BYTES = 4 << 30
"""Size limit in bytes of the cache of compiled programs; the least used are removed first."""
REPEATABLE = "--xla_gpu_deterministic_ops=true"
"""Without this flag a GPU adds sums in any order, and a resumed run would get other bits."""


def home() -> Path:
    """The folder that holds the environment."""
    return cache_folder("tunix")


def python() -> Path:
    """The Python of the environment. Raises UsageError if there is none, or if it was created for other requirements."""
    if override := os.environ.get(VARIABLE):
        if not Path(override).is_file():
            raise UsageError(f"{VARIABLE} is {override}, but there is no such file.")
        if not os.access(override, os.X_OK):
            raise UsageError(
                f"{VARIABLE} is {override}, which is not a program; name the Python of an environment."
            )
        return Path(override)
    record = _read_record()
    if record is None:
        raise UsageError(
            f"The backend tunix needs an environment of its own, in {home()}, and there is none. Make it (1.5 GB, a few minutes): "
            f"{_install_words()}. Or name the Python of one that has google-tunix in {VARIABLE}."
        )
    if record["requirements"] != _requirements_digest():
        raise UsageError(
            f"The environment in {home()} was made for another version of groupwise. Make it again: {_install_words()}."
        )
    return _interpreter(record)


def accelerator() -> Accelerator:
    """JAX's default device: that of the environment created here, or else that of this machine."""
    record = _read_record()
    if record is not None and record["accelerator"] in EXTRAS:
        return record["accelerator"]
    return _detect_accelerator()


def install(kind: Accelerator | None = None, *, anew: bool = False, say: bool = True) -> Path:
    """Create the environment and return its Python; an up-to-date one is kept, unless `anew`. `kind` defaults to `accelerator()`.

    Raises UsageError with pip's last output if it cannot be created; the previous environment then stays in use.
    """
    with exclusive(home()):
        target = kind or accelerator()
        record = _read_record()
        if (
            record
            and (record["requirements"], record["accelerator"]) == (_requirements_digest(), target)
            and not anew
        ):
            return _interpreter(record)
        folder = Path(tempfile.mkdtemp(prefix=f"{target}-", dir=home()))
        try:
            make(
                folder,
                ["-r", str(REQUIREMENTS), *EXTRAS[target]],
                what="The packages of requirements.txt",
                say=say,
                environment=own_environment(),
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        record = {
            "requirements": _requirements_digest(),
            "accelerator": target,
            "folder": folder.name,
        }
        atomic_files.write_json(home() / MADE, record)
        for entry in home().iterdir():
            if entry.name in (MADE, LOCK, folder.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        return _interpreter(record)


def _install_words() -> str:
    return f"{INSTALL} --accelerator {accelerator()}"


def _detect_accelerator() -> Accelerator:
    device = of_this_machine()
    return "cuda" if device == "gpu" else device


def query_worker() -> WorkerInfo:
    """Versions and devices as a worker reports them. Takes some seconds, once for each environment and settings of JAX.

    Warns if the machine has an accelerator that JAX does not see, unless the user has set JAX_PLATFORMS. Raises UsageError if JAX cannot
    open its devices, or not within `MAX_SECONDS`.
    """
    return _look_once(python(), *(os.environ.get(name) for name in (PLATFORMS, "XLA_FLAGS")))


@cache
def _look_once(interpreter: Path, *settings: str | None) -> WorkerInfo:
    worker = start_worker(None, (1, 1))
    try:
        future = worker.begin(Look())
        try:
            answer = future.result(USUAL_SECONDS)
        except TimeoutError:
            logger.warning(
                "JAX has not opened its devices after %.0f s; waiting for up to %.0f s",
                USUAL_SECONDS,
                MAX_SECONDS,
            )
            answer = future.result(MAX_SECONDS - USUAL_SECONDS)
        report = WorkerInfo.model_validate(answer)
    except TimeoutError:
        raise UsageError(
            f"JAX has not opened its devices within {MAX_SECONDS:.0f} s. {TPU_IN_USE_ADVICE} One worker has the TPUs of one host: a slice "
            f"of several hosts waits for the others.{worker.last_output()}"
        ) from None
    except RunError as error:
        raise UsageError(
            f"{interpreter} cannot start Tunix's worker; {INSTALL} --again makes the environment again. {error}"
        ) from error
    finally:
        worker.close()
    detected = _detect_accelerator()
    if report.platform == "cpu" != detected and PLATFORMS not in os.environ:
        logger.warning(
            "this machine has a %s, but JAX sees its CPU alone, and computes there. Make Tunix's environment for it: "
            "%s --accelerator %s",
            "TPU" if detected == "tpu" else "GPU",
            INSTALL,
            detected,
        )
    return report


def mesh_of(shape: tuple[int, int] | None) -> tuple[int, int]:
    """Number of devices for the axes (fsdp, tp): those of the config, or else all devices on the first axis."""
    return shape or (query_worker().devices, 1)


def start_worker(threads: int | None, mesh: tuple[int, int]) -> WorkerProcess:
    """Start a worker in the environment. On a CPU it computes with `threads` threads, and JAX sees as many devices as the mesh has; each
    device needs `THREADS_OF_A_DEVICE` threads."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    environment = {**QUIET_ENVIRONMENT, **_compilation_cache()}
    record = None if os.environ.get(VARIABLE) else _read_record()
    if record is not None and record["accelerator"] != "cpu" and PLATFORMS not in os.environ:
        # JAX fails if it cannot open a named device; without a name it would silently use the CPU.
        environment[PLATFORMS] = f"{record['accelerator']},cpu"
    least = 0
    if (count := mesh[0] * mesh[1]) > 1:
        flags.append(f"--xla_force_host_platform_device_count={count}")
        least = THREADS_OF_A_DEVICE * count
    if most := max(least, threads or 0):
        environment["NPROC"] = str(most)  # XLA reads the number of CPU threads from it
    if accelerator() == "cuda":
        flags.append(REPEATABLE)
    if threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    return WorkerProcess(python(), {**environment, "XLA_FLAGS": " ".join(flags).strip()})


def _compilation_cache() -> dict[str, str]:
    """Variables for JAX's cache of compiled programs. Each kind of CPU has its own folder, since programs run on one kind only."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        kind = hashlib.sha256(flags.encode()).hexdigest()[:16]
        return {
            "JAX_COMPILATION_CACHE_DIR": str(cache_folder("tunix-compiled") / kind),
            "JAX_COMPILATION_CACHE_MAX_SIZE": str(COMPILED_BYTES),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return {}


def _read_record() -> dict[str, Any] | None:
    """Facts about the environment in use; None if there is none, or if they cannot be read."""
    try:
        record = json.loads((home() / MADE).read_bytes())
        keys = {"requirements", "accelerator", "folder"}
        complete = keys <= record.keys() and _interpreter(record).is_file()
    except (OSError, ValueError, AttributeError):
        return None
    return record if complete else None


def _interpreter(record: Mapping[str, Any]) -> Path:
    return home() / record["folder"] / "bin" / "python"


def _requirements_digest() -> str:
    """Digest of the requirements without their comments."""
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]
