"""A job to run on a machine: `JobSpec`, plain data that is sent to the runner and stored in the database.

Its creators (a fleet's admission, a cloud backend) check it once, with `problems`; the runner repeats the checks, since it does not
trust its callers. No part of a spec ever becomes part of a shell command: the command is an argument list, and the whole spec is sent on
standard input."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ATTEMPT_VARIABLE = "GROUPWISE_ATTEMPT"
"""The environment variable that contains `<job>.<epoch>` in every process of an attempt."""
MAX_ARTEFACTS = 1_000_000
"""Most output files that a job may have on a machine; the same as in `runner/artefacts.py`."""
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
"""Valid job names. The pattern is strict, because they name folders and control groups on every machine."""
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_SHELL_SIGNS = re.compile(r"[;&|<>$*?()`~#]")
LONGEST_LINE = 2000
"""Characters of a quoted command line that a message repeats."""
RESERVED_NAMES = frozenset(
    "PATH HOME SHELL USER LOGNAME IFS ENV BASH_ENV CDPATH GLOBIGNORE SHELLOPTS BASHOPTS PS4 PROMPT_COMMAND "
    "PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONINSPECT PYTHONEXECUTABLE PYTHONUSERBASE PYTHONWARNINGS PYTHONBREAKPOINT "
    "PYTHONPLATLIBDIR PYTHONPYCACHEPREFIX PYTHONCASEOK ZDOTDIR GLIBC_TUNABLES GCONV_PATH LOCPATH HOSTALIASES OPENSSL_CONF "
    "OPENSSL_MODULES PERL5LIB PERLLIB PERL5OPT PERL5DB RUBYLIB RUBYOPT GEM_HOME GEM_PATH BUNDLE_GEMFILE NODE_OPTIONS NODE_PATH "
    "JAVA_TOOL_OPTIONS _JAVA_OPTIONS JDK_JAVA_OPTIONS CLASSPATH PYTHON_PRESITE PHPRC PHP_INI_SCAN_DIR TCLLIBPATH "
    "R_ENVIRON R_ENVIRON_USER R_PROFILE R_PROFILE_USER R_LIBS R_LIBS_SITE R_LIBS_USER JULIA_LOAD_PATH JULIA_DEPOT_PATH "
    "DOTNET_STARTUP_HOOKS CORECLR_PROFILER CORECLR_PROFILER_PATH OMP_TOOL_LIBRARIES OCL_ICD_FILENAMES OCL_ICD_VENDORS "
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL "
    "CUDA_INJECTION32_PATH CUDA_INJECTION64_PATH "
    "NVTX_INJECTION32_PATH NVTX_INJECTION64_PATH NCCL_CONF_FILE NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN "
    "NCCL_ENV_PLUGIN NCCL_GIN_PLUGIN UCX_MODULE_DIR FI_PROVIDER_PATH HWLOC_PLUGINS_PATH "
    "RESUME_FROM ATTEMPT PREVIOUS_FAILURE MASTER_ADDR MASTER_PORT NNODES NODE_RANK "
    "GROUPWISE_OUTPUT GROUPWISE_RENDEZVOUS GROUPWISE_KEY_FILE".split()
)
RESERVED_PREFIXES = (
    "LD_",
    "DYLD_",
    "BASH_FUNC_",
    "GIT_",
    "SSH_",
    "LUA_",
    "GROUPWISE_ATTEMPT",
    "GROUPWISE_RUNNER",
)
"""Variables that determine which program runs, or that the runner itself sets: users may not set them."""
MAX_ARGUMENTS = 4096
LONGEST_ARGUMENT = 128 * 1024 - 1
"""Bytes of one argument, or of one variable as NAME=VALUE: the kernel's limit (MAX_ARG_STRLEN) counts a NUL byte at its end."""
MAX_COMMAND_BYTES = 1_800_000
"""Bytes of all arguments and variables together. The kernel allows 2 MiB, of which the machine's own variables take some."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a manifest."""

    sha256: str
    mode: int
    """Permission bits, e.g. 0o644."""
    size: int
    """Size in bytes."""


Manifest = Mapping[str, FileEntry]
"""Maps a relative path with `/` as separator to its file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an attempt. None: no limit."""

    time_seconds: float | None = None
    """Time limit, counted from the start of the command; then TERM, `grace_seconds`, KILL."""
    grace_seconds: float = 30.0
    """Seconds between TERM and KILL, for every reason to end it."""
    ram_mb: int | None = None
    disk_mb: int | None = None
    """Disk space in MB that must be free on the machine before the start."""
    artefact_mb: int = 20_000
    artefact_files: int = 100_000
    """Largest number of artefact files that a job may leave. It cannot be more than MAX_ARTEFACTS."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A command with its environment and files. At the start the working folder contains only `files`."""

    arguments: tuple[str, ...]
    """The argument list. The first is searched on PATH, which starts with the folder of the machine's `python`."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Manifest = field(default_factory=dict[str, FileEntry])
    secrets: tuple[str, ...] = ()
    """Names of environment variables whose values are sent separately from the spec and stored nowhere."""
    artefacts: tuple[str, ...] = ("outputs",)
    """Files and folders to fetch after the end, relative to the working folder."""
    checkpoints: tuple[str, ...] = ("outputs",)
    """Folders relative to the working folder; folders in them with a `manifest.json` are checkpoints."""
    limits: Limits = field(default_factory=Limits)


def problems(spec: JobSpec) -> list[str]:
    """All problems of a spec, as messages for its author; empty if it is valid."""
    arguments = spec.arguments
    messages: list[str] = []
    if not arguments or not arguments[0]:
        messages.append("there is no command: the first argument is the program")
    else:
        messages += _program_problems(spec)
    messages += [
        f"argument {n} has a NUL character in it" for n, a in enumerate(arguments) if "\0" in a
    ]
    if len(arguments) > MAX_ARGUMENTS:
        messages.append(f"{len(arguments)} arguments; at most {MAX_ARGUMENTS} are passed on")
    sizes = [len(argument.encode("utf-8", "replace")) for argument in arguments]
    if max(sizes, default=0) > LONGEST_ARGUMENT:
        messages.append(f"an argument is longer than {LONGEST_ARGUMENT} bytes; put it into a file")
    variable_sizes = {
        name: len(f"{name}={value}".encode("utf-8", "replace"))
        for name, value in spec.environment.items()
    }
    messages += [
        f"environment variable {name[:80]} is longer than {LONGEST_ARGUMENT} bytes; put its value into a file"
        for name, size in variable_sizes.items()
        if size > LONGEST_ARGUMENT
    ]
    if (total := sum((*sizes, *variable_sizes.values()))) > MAX_COMMAND_BYTES:
        messages.append(
            f"arguments and environment have {total:,} bytes; at most {MAX_COMMAND_BYTES:,} can be passed on: put data into a file"
        )
    messages += name_problems("environment", spec.environment)
    messages += name_problems("secret", spec.secrets)
    for name, value in spec.environment.items():
        if "\0" in value:
            messages.append(f"environment variable {name} has a NUL character in its value")
        if name in spec.secrets:
            messages.append(
                f"{name} is given as a secret and as a plain variable; give one of the two"
            )
    paths_by_kind = {
        "file": spec.files,
        "artefact": spec.artefacts,
        "checkpoint folder": spec.checkpoints,
    }
    for kind, paths in paths_by_kind.items():
        for path in paths:
            messages += path_problems(kind, path)
    return messages


def _program_problems(spec: JobSpec) -> list[str]:
    """Why no machine can run the program, as far as the spec alone shows it."""
    program = spec.arguments[0]
    path = posixpath.normpath(program)
    is_own_file = "/" in program and not program.startswith("/") and not path.startswith("../")
    entry = spec.files.get(path)
    if not (entry and is_own_file) and (problem := one_word_problem(spec.arguments)):
        if _SHELL_SIGNS.search(program):
            shell = f"-- sh -c {shlex.quote(program.strip()[:LONGEST_LINE])}"
            problem = (
                f"the command is one word, with signs that only a shell understands: `{shell}`"
            )
        return [problem]
    if not is_own_file or "\0" in program:
        return []
    if entry is None:
        return [
            f"{program[:200]}: no file of the job has this path, and its working folder holds no others: `--file {path[:200]}`"
        ]
    if not entry.mode & 0o111:
        return [
            f"{program[:200]} is not executable: chmod +x, and submit again; or name its interpreter, `-- sh {path[:200]}`"
        ]
    return []


def one_word_problem(arguments: Sequence[str]) -> str | None:
    """The problem of a command whose words were quoted together, as a message; None if it is written in words."""
    if len(arguments) != 1 or len(arguments[0].split()) < 2:
        return None
    line = arguments[0].strip()[:200]
    return f"the command is one word, {line!r}: write its words apart, `-- {line}`"


def name_problems(what: str, names: Iterable[str]) -> list[str]:
    """Problems with the names of variables that a job sets, as messages; empty if there are none."""
    messages: list[str] = []
    for name in names:
        if not ENVIRONMENT_NAME.fullmatch(name):
            messages.append(
                f"{what} {name[:80]!r}: this is not a name of an environment variable: letters, digits and _, no digit first"
            )
        elif name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
            messages.append(
                f"{what} {name}: this variable is not for jobs to set: it decides which program runs, or the runner sets it"
            )
    return messages


def path_problems(what: str, path: str) -> list[str]:
    """Why a path is not a valid one inside the working folder; empty if it is."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(p in ("", ".", "..") for p in parts):
        return [
            f"{what} {path[:200]!r}: a path relative to the working folder is wanted, without `..`"
        ]
    return []


def file_entry(document: object) -> FileEntry | None:
    """Parse an entry of the form [sha256, mode, size]; None if it is not one."""
    match document:
        case [str(sha256), int(mode), int(size)] if (
            SHA256.fullmatch(sha256) and 0 <= size < 1 << 63
        ):
            return FileEntry(sha256, mode & 0o777, size)
        case _:
            return None


def as_json(spec: JobSpec) -> dict[str, Any]:
    """The JSON form in which a spec is sent and stored."""
    limits = spec.limits
    return {
        "arguments": list(spec.arguments),
        "environment": dict(spec.environment),
        "files": {path: [f.sha256, f.mode, f.size] for path, f in spec.files.items()},
        "secrets": list(spec.secrets),
        "artefacts": list(spec.artefacts),
        "checkpoints": list(spec.checkpoints),
        "limits": {name: getattr(limits, name) for name in Limits.__slots__},
    }


def from_json(document: Mapping[str, Any]) -> JobSpec:
    """Read a spec that `as_json` wrote; it is not checked again."""
    return JobSpec(
        arguments=tuple(document["arguments"]),
        environment=dict(document["environment"]),
        files={path: FileEntry(*entry) for path, entry in document["files"].items()},
        secrets=tuple(document["secrets"]),
        artefacts=tuple(document["artefacts"]),
        checkpoints=tuple(document["checkpoints"]),
        limits=Limits(**document["limits"]),
    )


def spec_hash(spec: JobSpec) -> str:
    """A SHA-256 that is equal for specs with the same content."""
    canonical = json.dumps(as_json(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
