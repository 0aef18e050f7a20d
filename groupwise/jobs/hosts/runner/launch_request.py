"""A launch request, and the checks whether it is possible on this machine."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.blobs import has_blob, lay_out
from groupwise.jobs.hosts.runner.files import LARGEST_RECORD, make_folder, write_file
from groupwise.jobs.hosts.runner.observe import load_of
from groupwise.jobs.hosts.runner.processes import (
    boot_clock,
    find_program,
    path_of,
    python_of,
)
from groupwise.jobs.hosts.runner.protocol import (
    SHA256,
    LaunchRefused,
    RequestRejected,
    are_words,
    arguments_of,
    as_bytes,
    as_list,
    count_of,
    gpus_of,
    is_amount,
    seconds_of,
    text_of,
)
from groupwise.jobs.hosts.runner.root import attempt_of
from groupwise.jobs.hosts.runner.work_folder import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Root

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
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
"""The same names as in `spec.py`, which a test verifies. They are checked here too, because the runner does not trust its callers."""
LARGEST_TOKEN = 256 << 20
"""Most bytes of a stored request that waits for an engine: it may list a hundred thousand files."""


class LaunchRequest:
    """A checked launch request. A malformed request raises RequestRejected. A well-formed one that is not possible raises LaunchRefused,
    which becomes the final result of its epoch."""

    def __init__(self, root: Root, body: dict[str, Any]) -> None:
        self.root, self.body = root, body
        self.attempt = attempt_of(root, body)
        self.rank, self.members = count_of(body, "rank", 0), count_of(body, "members", 1)
        self.gpus = gpus_of(body)
        self.share_mb = None if body.get("share_mb") is None else count_of(body, "share_mb")
        self.slot = None if body.get("slot") is None else count_of(body, "slot")
        self.deadman: float | None = seconds_of(body, "deadman", 0.0) or None
        self.last_contact = boot_clock()
        """Boot-clock time of the last contact: now, or the time at which the control plane, before it sent this, had last heard from this
        machine."""
        if body.get("clock") is not None:
            self.last_contact = min(self.last_contact, seconds_of(body, "clock", 0.0))
        self.method: str | None = body.get("method")
        self.engine: str | None = text_of(body, "engine") if body.get("engine") else None
        self.engine_options: list[str] = as_list(body.get("engine_options"))
        self.spec: dict[str, Any] = body["spec"]
        self.limits: dict[str, Any] = self.spec.get("limits") or {}
        self.files: dict[str, list[Any]] = dict(self.spec.get("files") or {})
        resume: dict[str, Any] = body.get("resume") or {}
        self.resume_files: dict[str, list[Any]] = dict(resume.get("manifest") or {})
        # The checkpoint's folder is the one with the topmost manifest.
        manifests = [p for p in self.resume_files if p.split("/")[-1] == "manifest.json"]
        tops = [path.rpartition("/")[0] for path in manifests]
        self.resume_path: str | None = resume.get("path") or min(tops, key=len, default=None)
        self.environment: dict[str, str] = dict(body.get("environment") or {})
        self.secrets: dict[str, str] = dict(body.pop("secrets", None) or {})
        self.path = path_of(body.get("python"))
        self.python = python_of(body.get("python"), self.path)
        self.aliases = [name for name in ("python", "python3") if not self._means_python(name)]
        """Names that would find another interpreter than the machine's, or none: stock Debian has no `python`."""
        if self.aliases:
            self.path = self.attempt.at("bin") + ":" + self.path
        self.memory_mb: dict[str, int | None] = {}
        """Memory of each GPU in MB, filled in by the GPU probe."""
        if len(as_bytes(self.first_state())) > LARGEST_RECORD // 2:
            raise RequestRejected(
                "bad_request", "its lists of artefacts and checkpoints are too long"
            )

    def check(self) -> None:
        """Check the spec. Raises LaunchRefused with a list of all problems."""
        if self.engine and (self.gpus or self.slot is not None or self.deadman is not None):
            raise RequestRejected(
                "bad_request", "GPUs and slots are the engine's, and it has no deadman"
            )
        if not are_words(self.engine_options):
            raise RequestRejected("bad_request", "engine_options are words of a command line")
        problems = list(self._spec_problems())
        if problems:
            raise LaunchRefused("bad_spec", "; ".join(problems))

    def _spec_problems(self) -> Iterator[str]:
        try:
            arguments_of(self.spec.get("arguments"))
        except RequestRejected as refusal:
            yield str(refusal)
        for name, value in self.limits.items():
            if not (value is None or is_amount(value)):
                yield f"limits.{name}: a number from 0 is expected"
        variables: dict[str, Any] = self.spec.get("environment") or {}
        for name in (*variables, *self.secrets):
            if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
                yield f"the environment variable {name} is not for jobs to set"
        values: list[tuple[str, Any]] = [
            *variables.items(),
            *self.environment.items(),
            *self.secrets.items(),
        ]
        for name, value in values:
            if not ENVIRONMENT_NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
                yield f"{name!r:.80} is not an environment variable, or its value is not text"
        for name in self.spec.get("secrets") or ():
            if name not in self.secrets:
                yield f"the secret {name} has no value"
        yield from self._path_problems()

    def _path_problems(self) -> Iterator[str]:
        manifest = {**self.files, **self.resume_files}
        paths = [self.resume_path] if self.resume_path else []
        for path in (*manifest, *self.artefacts, *self.checkpoints, *paths):
            try:
                parts_of(path)
            except RequestRejected:
                yield f"{path!r:.200} is not a path inside the working folder"
        for path, entry in manifest.items():
            if (
                len(entry) != 3
                or not SHA256.fullmatch(str(entry[0]))
                or any(type(n) is not int for n in entry[1:])
            ):
                yield f"{path!r:.200}: [sha256, mode, size] is expected"

    @property
    def artefacts(self) -> list[str]:
        """Paths of the output files, relative to the working folder."""
        return list(self.spec.get("artefacts") or ())

    @property
    def checkpoints(self) -> list[str]:
        """Folders that contain checkpoints, relative to the working folder."""
        return list(self.spec.get("checkpoints") or ())

    @property
    def grace(self) -> float:
        """Seconds between TERM and KILL."""
        grace = self.limits.get("grace_seconds")
        return 30.0 if grace is None else float(grace)

    def missing(self) -> list[str]:
        """Hashes of the blobs that this machine does not have."""
        hashes = {str(e[0]) for e in (*self.files.values(), *self.resume_files.values())}
        return sorted(sha for sha in hashes if not has_blob(self.root, sha))

    def _means_python(self, name: str) -> bool:
        """True if this name on PATH is the machine's interpreter. It must be in the same folder, too: links to one interpreter in two
        folders belong to different environments."""
        found = find_program(name, self.path)
        return (
            found is not None
            and os.path.dirname(found) == os.path.dirname(self.python)
            and os.path.realpath(found) == os.path.realpath(self.python)
        )

    def write_aliases(self) -> None:
        """Write a script for each alias. Not links: through a link elsewhere, Python does not find its virtual environment."""
        quoted = self.python.replace("'", "'\\''")
        for name in self.aliases:
            path = os.path.join(make_folder(self.attempt.at("bin")), name)
            write_file(path, os.fsencode(f"#!/bin/sh\nexec '{quoted}' \"$@\"\n"))
            os.chmod(path, 0o700)

    def lay_out(self, work: str) -> Iterator[None]:
        """Copy the job's files into a working folder, and create the parent folder of its output. Yields regularly, so the caller can stop
        it."""
        yield from lay_out(self.root, work, {**self.files, **self.resume_files})
        for path in self.artefacts[:1]:
            make_folder(os.path.dirname(os.path.join(work, path)))

    def first_state(self) -> dict[str, Any]:
        """The fields that every state file of this attempt has."""
        return {
            "rank": self.rank,
            "gpus": self.gpus,
            "share_mb": self.share_mb,
            "slot": self.slot,
            "engine": self.engine,
            "engine_options": self.engine_options,
            "deadman": self.deadman,
            "artefacts": self.artefacts,
            "checkpoints": self.checkpoints,
            "limits": self.limits,
        }


def check_free_space(request: LaunchRequest) -> None:
    """Check free disk space and memory; raises LaunchRefused if there is too little. With an engine check the disk only: the job uses
    another machine's memory."""
    load = load_of(request.root)
    disk, ram = request.limits.get("disk_mb"), request.limits.get("ram_mb")
    ram = None if request.engine else ram
    if disk is not None and load["disk_free_mb"] < disk:
        raise LaunchRefused(
            "disk_full", f"{load['disk_free_mb']} MB are free, {disk} are asked for"
        )
    if ram is not None and load["ram_free_mb"] < ram:
        raise LaunchRefused(
            "ram", f"{load['ram_free_mb']} MB of memory are free, {ram} are asked for"
        )


def check_program(request: LaunchRequest) -> None:
    """Check that the command's program exists; raises LaunchRefused if not. A relative path is not checked: it names one of the job's
    files."""
    program = request.spec["arguments"][0]
    if program in request.aliases:
        program = request.python
    if "/" in program and not os.path.isabs(program):
        return
    if not find_program(program, request.path):
        count = len(request.path.split(":"))
        location = "" if "/" in program else f" in the {count} folders of PATH"
        raise LaunchRefused("unknown_program", f"there is no program {program:.200}{location}")
