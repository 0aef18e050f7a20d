"""The runner is the one file that works on a machine. It is copied there by its hash, needs only Python 3.8, and is started once for
every request by `bootstrap.py`. It leaves behind files below `root`, and one supervisor process for each attempt.

Roles
    control plane   sends requests (`driver.py`); may be cut off or die at any moment and ask again: every verb may be repeated
    runner          this file, answering one request; may be killed between any two instructions
    supervisor      this file too, detached: starts the command of one attempt, ends it if it must, records how it ended
    command         the job itself; a child of the supervisor in its own session, and in its own control group if one can be made

An attempt is a folder `attempts/<job>.<epoch>`. It is prepared under another name and renamed into place, so it exists whole or not at
all. If several `launch` and `void` requests race for it, exactly one makes it and decides what it is. The supervisor holds a lock on its
`supervisor.lock` from before the folder has its name until the supervisor ends. So files and lock together always tell the state:

    absent     no folder. This proves nothing: a launch may be on its way. Only `void` ensures that the attempt never begins
    queued     laid out for an engine (Slurm, Ray), its token `queued.json` is there. The first to take the token decides: the engine
               (`begin.sh`) begins the attempt, `void` voids it. An engine may begin it on another machine: if the lock cannot be seen
               from here, `lost` and `rebooted` prove nothing, and the caller has to ask the engine as well
    claimed    lock held, the command has not been started (its files may be being laid out)
    running    lock held, and pid, start ticks and boot id were on disk before the command began
    exited     there is an exit record
    lost       lock free, no exit record, same boot: the supervisor was killed. If `pid` is null the command never ran, and `launch`
               or `void` of that epoch takes the folder over. Otherwise the kernel killed the command with its supervisor, but processes
               that it had started may live: `survivors` counts them, `kill` ends them. Do that before the job runs anywhere else.
               A held lock of one of its GPUs also shows a living process, counted as one if no other can be seen
    rebooted   lock free, no exit record, begun in another boot: nothing of it is left
    voided     `void` came first: this epoch never ran and never will
    refused    `launch` refused it: nothing ran, and this epoch never will; `refused` says why

Requests and answers
    A request is the line `GROUPWISE <protocol> <length> <sha256>`, a JSON body, and raw bytes where the verb takes them. An answer is
    the line `GROUPWISE-ANSWER <protocol> <length> <sha256> <payload length>`, a JSON body with "ok": true or "error": {code, message},
    and raw bytes. An error means that nothing was changed; its codes: truncated, protocol, no_python, bad_runner, bad_request,
    unknown_verb, missing_blobs (`missing` lists them), bad_blob, busy, disk_full, not_found, changed, refused_path, still_running,
    os_error, internal. Every body has: protocol, root ("~" and relative paths: below HOME), verb, runner. A field that is not listed
    here is ignored. While a verb of LONG makes progress, it sends a line end every SIGN_EVERY before its answer, as a sign of life.

    hello     → protocols, python, hostname, user, boot_id, home, root, filesystem, cpus, ram_mb, disk_free_mb, cgroup {v2, memory},
                methods, time. Locks do not hold on a network file system (`filesystem` "nfs4" or the like): choose another root there
    observe   probe? (argument list, default ["nvidia-smi"]), probe_timeout? → boot_id, time, load, cpus, ram_mb, ram_free_mb,
                disk_free_mb, gpus [{index, uuid, model, memory_mb, memory_used_mb, utilisation, temperature, mig, mig_devices, problems}],
                apps [{uuid, pid, memory_mb, attempt}], probe {status, apps, lines_not_read, exit, said}, attempts [member], quarantined,
                unremoved [path]: folders of forgotten attempts that this user cannot remove completely.
                A value that could not be read is null, never 0. status (of the GPUs) and apps (of the processes on them) ∈ ok, absent,
                failed, hung, garbage. An app with `attempt` null is not of this root. Here `survivors` is counted for exited attempts
                too: those processes could not be killed. quarantined [{what: "folder"|"process", detail, pid?}]: not known here; never
                touched
    missing   sha256 [...] → missing [...]
    put       blobs [[sha256, size], ...], payload; the bytes of all, in order → stored
    join      blob [sha256, size], parts [[sha256, size], ...] → stored. For a blob that is too large for one put; the parts are removed
    launch    job, epoch, rank, members, spec, gpus [uuid], share_mb?, slot?, environment, secrets, resume? {manifest, step, path?},
                deadman?, clock?, python?, method?, probe?, probe_timeout?, engine?, engine_options? → member. Answers when the command
                runs, or after LAUNCH_PATIENCE as `claimed`: look again. If repeated, it answers with the state and ignores the body. With
                `engine` (its name) nothing is begun here: the attempt is laid out and `queued`, and `sh <folder>/begin.sh`, run by that
                engine on a machine with the same folder, begins it there and ends with its exit status. The engine assigns the GPUs
                then. engine_options [word]: options for the engine, reported with the attempt so that any client can ask it again
    void      job, epoch, because? → member (voided; or what it is, if it had begun)
    status    job, epoch → member
    wait      known {"<job>.<epoch>": {state?, log_size?, checkpoints?, step?, clock?}}, timeout, quiet? → attempts [member], when one
                differs from `known`, or at the timeout. A log that only grew is reported after `quiet` seconds (1) at the earliest
    touch     attempts ["<job>.<epoch>", ...] or {"<job>.<epoch>": clock} → touched [...]
    kill      job, epoch, grace → member, at once. The supervisor does the rest: poll until the state is `exited`. Without a supervisor
                the runner kills what is left before it answers
    log       job, epoch, offset, limit → size, offset, payload
    manifest  job, epoch, what ("artefacts", "checkpoints", "all") → files {path: [sha256, mode, size]}, refused [[path, why]],
                refused_more {why: how many beside those}, checkpoints [{path, step, files}], complete ones only, oldest first; all
                paths relative to the working folder
    run       arguments, timeout? → code (null: it did not end in time), out, err. A program of the machine, such as an engine's; not a job
    read      job, epoch, path, offset, limit, sha256? → size, payload; with sha256, `changed` if the file has another hash by now
    gather    job, epoch, files [[path, sha256, size], ...], MOST_GATHERED of them at most, LARGEST_GATHERED bytes together → whole
                [true or false, ...], payload; the bytes of those that are whole, in order. The others have changed, or cannot be read:
                `read` says why
    keep      job, epoch, files [[path, sha256, size], ...] → kept. These files of the working folder become blobs, so a checkpoint need
                not leave the machine if the next attempt begins here too. `changed` if one has another hash by now
    release   job, epoch, gpus, share_mb?, idle_memory_mb?, probe?, probe_timeout? → clean, holders [{what, detail, pid?}]; `what` ∈
                lock, process, cgroup, memory. A whole GPU with more than idle_memory_mb in use, or that cannot be read, is not clean
    forget    job, epoch → forgotten. The folder is removed, and no launch of this or a lower epoch is ever accepted again
    sweep     keep [sha256, ...], older_than? (seconds, 3600) → removed. Removes blobs that were neither sent nor asked for since, what
                killed runners left behind, and all runners of earlier releases but the newest

    member    job, epoch, rank, state, boot_id, same_boot, pid, start_ticks, method, started_at, log_size, heartbeat_age, checkpoints,
                step, exit, refused, survivors, clock, place (the name that this root was given when it was made; null: it has none),
                gpus, share_mb, slot (that it was begun with), engine, engine_options, folder, age (seconds since it was made), beat_age
                (seconds since its supervisor's last sign of life, by the file's time), engine_says (the end of the engine's log of it)
    exit      code, signal, reason ("exited", "cancelled", "evicted" by its engine or by the owner of its machine, who writes the
                seconds that are left into the file `evict` of its folder, "time_limit", "deadman", "spawn_failed"), message,
                oom_kill (null: no control group that counts), seconds, cpu_seconds, max_rss_mb, finished_at, tail, gpus (how many it
                held), checkpoints, step, leftovers (processes that were left and had to be ended after the command ended by itself)
    refused   code (lower_epoch, gpu_busy, gpu_missing, foreign_busy, disk_full, ram, bad_spec, unknown_program), message, holder?

Guarantees
    - At most one command per epoch; none for an epoch lower than the highest that this machine has seen of the job, nor for a forgotten
      one. The child waits for its supervisor's word, which comes only once its pid is on disk; if the supervisor dies first, the command
      never begins.
    - GPUs are locked by files (`locks/gpu-…`), exclusively or by shares whose sum fits; the command's processes inherit the lock, so a
      leaked process shows. `launch` refuses a GPU with a process on it that is not ours.
    - When the command ends, or is ended, everything that it started is ended too: TERM, then KILL. Its processes are found by control
      group, by descent (the supervisor adopts orphans), by GROUPWISE_ATTEMPT in their environment, and by a file that they inherited
      open. Only then is the exit record written. A pid is signalled only if its start ticks and boot are those that were seen.
    - Whatever a job writes, into its folders or over the records of its own attempt, breaks no answer about others: the runner waits for
      no pipe, reads nothing without end, and trusts a record only as far as a supervisor may have written it so. A checkpoint's manifest
      has at most LARGEST_MANIFEST bytes, and of very many only the newest are read.
    - Clocks: the wall clock decides nothing. `deadman` counts boot-clock seconds since the last contact, which is a `launch`, `wait` or
      `touch` that names the attempt. If it gives `clock` (from the last member that came back), the time counts from then: so answers
      that do not arrive cannot keep an attempt alive that its control plane believes dead, nor can a late launch begin one.
      After the deadman at most DEADMAN_GRACE passes until KILL.
    - The log holds all output of the command and its processes, to the byte: the supervisor takes it from a pipe and appends it.
    - A full disk: verbs answer `disk_full`; a command never starts without its record. Room is set aside for the exit record, and for
      `void` and `forget`, so that a launch that failed there can be given up and old attempts can be removed.
    - Secrets are in the memory of launch, supervisor and command (and in the command's /proc/…/environ), and in no file. Only an attempt
      that waits for an engine has them on disk: in its token, readable by its user alone and removed when it begins or is voided.
    - `limits.ram_mb` is compared with the free memory before a launch. It is enforced only if a memory control group can be
      made (v1 or v2: mostly as root); otherwise a command may outgrow it.

Not guaranteed: after its supervisor was killed, a process that left the tree, has neither our environment nor inherited files, and is in
no control group, is seen only by the memory it holds on a GPU, or not at all. Attempts of one Unix user are not shielded from each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import hashlib
import itertools
import json
import math
import os
import re
import resource
import select
import signal
import stat
import sys
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING without its 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from typing import Any, BinaryIO, NoReturn, Protocol

    class Readable(Protocol):
        """Anything that a blob can be read from."""

        def read(self, most: int, /) -> bytes:
            """Read at most that many bytes; none at the end."""
            ...

    Answered = tuple[dict[str, Any], bytes]

PROTOCOL = 1
SPOKEN = (1,)
"""Protocols whose requests are answered and whose folders are understood."""

ATTEMPT_VARIABLE = "GROUPWISE_ATTEMPT"
FOLDER_VARIABLE = "GROUPWISE_RUNNER_FOLDER"
"""Beside the attempt's name: two roots on one machine may hold members of the same attempt."""

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
GPU_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")
MOST_GPUS = 256
"""Most GPUs that the state of one attempt may list."""
ATTEMPT_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,79})\.(0|[1-9][0-9]{0,18})")
MOST_EPOCH = (1 << 62) - 1
"""Highest epoch that is accepted, although `ATTEMPT_NAME` has digits for more."""
RUNNER_FILE = re.compile(r"[0-9a-f]{64}\.py")
UNIT = re.compile(r"groupwise-(.+\.[0-9]+)-[0-9a-f]{8}")
RESERVED_NAMES = frozenset(
    "PATH HOME SHELL USER LOGNAME IFS ENV BASH_ENV CDPATH GLOBIGNORE SHELLOPTS BASHOPTS PS4 PROMPT_COMMAND "
    "PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONINSPECT PYTHONEXECUTABLE PYTHONUSERBASE PYTHONWARNINGS PYTHONBREAKPOINT "
    "PYTHONPLATLIBDIR PYTHONPYCACHEPREFIX PYTHONCASEOK ZDOTDIR GLIBC_TUNABLES GCONV_PATH LOCPATH HOSTALIASES OPENSSL_CONF "
    "OPENSSL_MODULES PERL5LIB PERLLIB PERL5OPT PERL5DB RUBYLIB RUBYOPT GEM_HOME GEM_PATH BUNDLE_GEMFILE NODE_OPTIONS NODE_PATH "
    "JAVA_TOOL_OPTIONS _JAVA_OPTIONS JDK_JAVA_OPTIONS CLASSPATH PYTHON_PRESITE PHPRC PHP_INI_SCAN_DIR TCLLIBPATH "
    "R_ENVIRON R_ENVIRON_USER R_PROFILE R_PROFILE_USER R_LIBS R_LIBS_SITE R_LIBS_USER JULIA_LOAD_PATH JULIA_DEPOT_PATH "
    "DOTNET_STARTUP_HOOKS CORECLR_PROFILER CORECLR_PROFILER_PATH OMP_TOOL_LIBRARIES OCL_ICD_FILENAMES OCL_ICD_VENDORS "
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES CUDA_INJECTION32_PATH CUDA_INJECTION64_PATH "
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
"""The same names as in `spec.py`, which a test compares: the runner trusts no caller."""

LAUNCH_PATIENCE = 20.0
"""Time in seconds that `launch` waits for its supervisor's first word."""
PROBE_TIMEOUT = 10.0
"""Default time in seconds for one round of the GPU probe."""
PROBES = 4
GHOST_LOOKS = 3
SCOPE_PATIENCE = 5.0
LOCK_PATIENCE = 10.0
"""Time in seconds to wait for locks that are held only while a request is answered."""
GPU_LOCK_PATIENCE = 1.0
"""Time in seconds to wait for a GPU's lock, which a release check touches for an instant."""
HEARTBEAT = 5.0
TICK = 1.0
"""Time in seconds between looks of the supervisor, if nothing wakes it."""
LEAVING = 0.3
"""Time in seconds for processes to leave by themselves after the command has ended, before the rest get TERM."""
EVICT = "evict"
"""Name of the file that says how many seconds are left."""
EVICT_GRACE = 25.0
"""Time in seconds from an engine's TERM to our KILL; Slurm kills after 30 (KillWait), and whatever it kills leaves no record."""
RUN_PATIENCE = 60.0
LARGEST_SAID = 4 << 20
"""Most bytes of output kept from a program started by `run`."""
TOKEN = "queued.json"
ENGINE_LOG = "engine.log"
ENGINE_PREFIXES = ("SLURM_", "SLURMD_", "RAY_")
"""Prefixes of the variables that an engine sets about its machines and ranks; the command receives them."""
LEFTOVER_GRACE = 5.0
"""Time in seconds between TERM and KILL for processes that outlived the command."""
KILL_PATIENCE = 10.0
"""Time in seconds for killed processes to go; one in uninterruptible sleep does not."""
DEADMAN_GRACE = 30.0
"""Time in seconds: the controller adds a minute to the deadman before it runs the job elsewhere; TERM and KILL fit into it."""
KILL_VERB_PATIENCE = 2.0
TAIL = 4000
"""Bytes of the log in the exit record."""
RESERVE = 48 * 1024
"""Bytes set aside for the exit record: the tail, each byte as `\\u0000` at worst, and the rest."""
SPARE = 256 * 1024
"""Bytes set aside in a root for `void` and `forget` on a full disk; more than a launch leaves over when it has claimed its folder."""
CELL = 64
"""Bytes of a file that is overwritten in place, which needs no room on a full disk."""
LARGEST_READ = 64 << 20
LOG_PIECE = 1 << 20
"""Bytes of the command's output that are read at once."""
LOG_PATIENCE = 60.0
"""Time in seconds for a log that cannot be written to become writable again; its command blocks when it writes more."""
LAST_WORDS = 1.0
"""Time in seconds for output that still arrives after the command has ended, from processes it left behind."""
ROOM_PATIENCE = 5.0
"""Time in seconds for room to be made for the last of a log; its very end stands in the exit record as well."""
CLONE = 0x40049409
"""FICLONE of the kernel: a file of its own that shares its blocks with another until one of them is changed."""
MOST_GATHERED = 1000
"""Most files in one `gather`: some tenths of a second."""
LARGEST_GATHERED = 4 << 20
"""Most bytes in one `gather`, all files together."""
BLOB_TIME = 1_000_000_000
"""Modification time of a blob, in seconds: one that was written to since has another."""
SIGN_EVERY = 10.0
"""Time in seconds between signs of life."""
KEPT_EVERY = 20.0
"""Time in seconds between saves of the hashes while files are read: the caller may not wait for the end of it."""
SETTLED = 2.0
"""Time in seconds after which another change of a file shows in its times."""
MOST_ENTRIES = 200_000
"""Files and folders looked at below a working folder, unless its job may leave more."""
MOST_ARTEFACTS = 1_000_000
"""Files of a job, and as many folders; no limit of a job goes beyond."""
LARGEST_LISTING = 192 << 20
"""Bytes of the files in an answer: MOST_ARTEFACTS with paths of 100 letters. The client reads more (LARGEST_MANIFEST in `driver.py`)."""
MOST_REFUSED = 1000
"""Most refused files that an answer lists one by one, of each kind."""
REFUSED_TOGETHER = 4 << 20
"""Most bytes that those refused files take up in an answer."""
LARGEST_TEXT = 16 << 20
LARGEST_RECORD = 4 << 20
"""Bytes of a file of ours in an attempt's folder: its job runs as the same user, and may write anything there."""
LARGEST_TOKEN = 256 << 20
"""Bytes of a request that waits for an engine: a job may have a hundred thousand files."""
LARGEST_HASHES = 64 << 20
HASHES_EACH = 400
"""Bytes for one file, where a job may leave so many that it comes to more."""
LARGEST_MANIFEST = 4 << 20
"""Bytes of the `manifest.json` of a checkpoint: some 30,000 files. What is larger is something else of that name, and is not read."""
MOST_MANIFESTS = 10_000
MANIFESTS_TOGETHER = 32 << 20
"""Bytes that one look at the checkpoints of an attempt reads: a second."""
REMEMBERED_ABOVE = 64 << 10
"""Bytes; smaller files that are no checkpoint's manifest are read again sooner than remembered."""
STAYS = ".stays"
"""Prefix of a folder that could not be removed, or not all of it."""
MOST_UNREMOVED = 20
"""Most of those folders that an answer lists."""
LONGEST_WORD = 4096
LONGEST_MARK = 200


# --- refusals, clocks ---------------------------------------------------------------------------


class Refusal(Exception):
    """The request is not carried out, and nothing was changed."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.body: dict[str, Any] = {"code": code, "message": message, **more}


class Refused(Exception):
    """A launch that is not possible; it becomes the record of its epoch."""

    def __init__(self, code: str, message: str, holder: str | None = None) -> None:
        super().__init__(message)
        self.record: dict[str, Any] = {"code": code, "message": message}
        if holder:
            self.record["holder"] = holder


def boot_clock() -> float:
    """Seconds since the machine started, including time asleep; no process can set this clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Differs after each start of the machine."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def is_full(error: OSError) -> bool:
    """True if the disk or this user's quota is full, or the file would exceed the largest size allowed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# --- files that are whole or absent -------------------------------------------------------------


def open_plain(path: str, how: int = os.O_RDONLY) -> int:
    """Open a plain file and nothing else, OSError otherwise: opening a pipe blocks, and a job may put one in place of a file of ours."""
    fd = os.open(path, how | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "no plain file", path)


def read_plain(path: str, most: int) -> bytes:
    """Read a plain file, up to that many bytes."""
    fd, found = open_plain(path), bytearray()
    try:
        while len(found) < most:
            data = os.read(fd, min(most - len(found), 1 << 16))
            if not data:
                break
            found += data
    finally:
        os.close(fd)
    return bytes(found)


def read_text(path: str, most: int = LARGEST_TEXT) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return read_plain(path, most).decode("utf-8", "replace")
    except OSError:
        return ""


def read_json(path: str, most: int = LARGEST_RECORD) -> dict[str, Any] | None:
    """A JSON object from a file; None if the file is missing, damaged or longer than `most`."""
    try:
        data = read_plain(path, most + 1)
        return as_object(parse_json(data)) if len(data) <= most else None
    except (OSError, *NO_JSON):
        return None


NO_JSON = (ValueError, RecursionError, MemoryError)
"""Errors that `parse_json` raises for hostile text."""


def parse_json(data: bytes) -> Any:
    """Parse JSON that a job may have written. The garbage collector is off meanwhile: a million lists would trigger it over and over.

    Only UTF-8 is accepted: for bytes that look like another encoding Python would import a codec."""
    gc.disable()
    try:
        text = data.decode("utf-8")
        return json.loads(text, parse_int=whole_number, parse_constant=no_number)
    finally:
        gc.enable()


def whole_number(digits: str) -> int:
    """Parse an integer of at most 20 digits, about 64 bits: reading one of a million digits takes minutes."""
    if len(digits) > 20:
        raise ValueError("a number of that many digits")
    return int(digits)


def no_number(name: str) -> NoReturn:
    """Reject NaN and the like, which are not JSON."""
    raise ValueError(name)


def as_object(value: Any) -> dict[str, Any] | None:
    """A JSON object; None for all else."""
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def as_list(value: Any) -> list[Any]:
    """A JSON list; empty for all else."""
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def sync_folder(path: str) -> None:
    """Write a folder's entries to disk, so that names in it survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: str, data: bytes) -> None:
    """Write a new file to disk; its name is safe only after `sync_folder`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str, document: dict[str, Any]) -> None:
    """Replace a file atomically and durably; if that fails the old one stands."""
    new = f"{path}.{os.getpid()}.new"
    try:
        write_file(new, as_bytes(document))
        os.rename(new, path)
    except OSError:
        remove_file(new)
        raise
    sync_folder(os.path.dirname(path))


def as_bytes(document: dict[str, Any]) -> bytes:
    """Encode as JSON in ASCII, which holds any text, even a lone surrogate."""
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def remove_file(path: str) -> None:
    """Remove a file if it is there and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Remove as much of a folder as possible. A job may have closed its folders or nested them without end: each is opened for this user,
    and deeper ones are moved to the top before they are emptied."""
    with contextlib.suppress(OSError):
        top = open_folder(path)
        try:
            todo = empty(top, top)
            while todo:
                name = todo.pop()
                with contextlib.suppress(OSError):
                    todo += empty_named(name, top)
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(path)


def remove_or_name(path: str) -> None:
    """Remove a folder. If some of it stays, because only another user may remove it, rename it with the prefix STAYS."""
    remove_tree(path)
    above, name = os.path.split(path)
    if not name.startswith(STAYS):
        with contextlib.suppress(OSError):
            os.rename(path, os.path.join(above, STAYS + name))


def open_folder(name: str, above: int | None = None) -> int:
    """Open a folder that is not a link, with all permissions for its owner if that is this user."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        same = f"/proc/self/fd/{found}"
        with contextlib.suppress(OSError):  # it is another user's
            os.chmod(same, 0o700)
        return os.open(same, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)


def empty(folder: int, top: int) -> list[str]:
    """Remove everything but folders, and move those into `top`; returns the names that they have there."""
    found: list[str] = []
    with os.scandir(folder) as entries:
        inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in inside:
        with contextlib.suppress(OSError):  # that one stays
            if not is_folder:
                os.unlink(name, dir_fd=folder)
            elif folder == top:
                found.append(name)
            else:
                found += move_up(name, folder, top)
    return found


def empty_named(name: str, top: int) -> list[str]:
    """Call `empty` on a folder in `top`."""
    folder = open_folder(name, top)
    try:
        return empty(folder, top)
    finally:
        os.close(folder)


def move_up(name: str, folder: int, top: int) -> list[str]:
    """Move a folder into `top` and return its new name; an empty one is just removed. Moving a folder needs write permission for it,
    removing an empty one only for the folder around it."""
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=folder)
        return []
    os.close(open_folder(name, folder))
    new = os.urandom(16).hex()
    os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    return [new]


def make_folder(path: str) -> str:
    """Create a folder and its missing parents, for this user alone."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def set_cell(path: str, text: str) -> bool:
    """Overwrite a small file in place: one write, no new room. False if there is no such file."""
    try:
        fd = open_plain(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.pwrite(fd, text.ljust(CELL)[:CELL].encode("ascii"), 0)
    finally:
        os.close(fd)
    return True


def cell_words(path: str) -> list[str]:
    """Words in a cell, a small file as `set_cell` writes it."""
    return read_text(path, CELL).split()


def number_in(words: Sequence[str]) -> float | None:
    """The first word as a number; None if it is none, or 1e12 or more."""
    try:
        found = float(words[0])
    except (IndexError, ValueError):
        return None
    return found if abs(found) < 1e12 else None


# --- locks: they end with the last process that has them open -----------------------------------


def take_lock(path: str, how: int = fcntl.LOCK_EX, patience: float = 0.0) -> int | None:
    """The open file that holds the lock; None if another process holds it for all of `patience` seconds."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(fd)
                return None
        except BaseException:
            os.close(fd)
            raise
        time.sleep(0.01)


def is_locked(path: str) -> bool:
    """True if another process holds the lock exclusively."""
    try:
        fd = open_plain(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def alone(folder: str) -> Generator[None, None, None]:
    """Lock for slow work that may be requested again after its caller was cut off: later requests wait, then find it done. The process
    exits if the caller of this request hangs up meanwhile."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = select.poll()
    listener.register(1, 0)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if listener.poll(100):
                    os._exit(0)  # the caller hung up
        yield
    finally:
        os.close(lock)


class HeldLock:
    """A lock for the length of a `with`, released at once even if a child was forked meanwhile. Raises Refusal `busy`."""

    def __init__(self, path: str, how: int = fcntl.LOCK_EX) -> None:
        self.path, self.how = path, how

    def __enter__(self) -> None:
        fd = take_lock(self.path, self.how, LOCK_PATIENCE)
        if fd is None:
            raise Refusal("busy", f"another request holds {os.path.basename(self.path)}; ask again")
        self.fd = fd

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


# --- where things are ---------------------------------------------------------------------------


class Root:
    """The folder on a machine that holds everything the runner keeps."""

    def __init__(self, path: str) -> None:
        self.path = path

    def at(self, *parts: str) -> str:
        """A path in it."""
        return os.path.join(self.path, *parts)

    def place(self) -> str | None:
        """The root's own permanent name: a root with another name knows nothing of attempts begun in this one. None if it could not be
        made."""
        path = self.at("place")
        name = read_text(path, CELL)
        if name:
            return name
        new = f"{path}.{os.getpid()}.new"
        try:
            make_folder(self.path)
            write_file(new, os.urandom(16).hex().encode())
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # of several requests, the first names it
            remove_file(new)
            sync_folder(self.path)
        except OSError:
            remove_file(new)
        return read_text(path, CELL) or None

    def lock(self, name: str) -> str:
        """The path of a lock file."""
        return os.path.join(make_folder(self.at("locks")), name)

    def job_lock(self, job: str) -> HeldLock:
        """Lock held while deciding which request makes an attempt of this job; several jobs share one."""
        return HeldLock(self.lock(f"jobs-{hashlib.sha256(job.encode()).hexdigest()[:2]}"))

    def gpu_lock(self, uuid: str) -> str:
        """The path of a GPU's lock: exclusive for a whole GPU, shared for shares of it."""
        return self.lock(f"gpu-{as_file_name(uuid)}.lock")

    def shares(self, uuid: str) -> str:
        """The folder with one locked file for each share of a GPU."""
        return make_folder(self.at("locks", f"shares-{as_file_name(uuid)}"))

    def blob(self, sha: str) -> str:
        """The path of a blob, by its hash."""
        return self.at("blobs", sha[:2], sha)

    def highest(self, job: str) -> dict[str, Any]:
        """{"highest": epoch, "forgotten": epoch}, -1 where there was none."""
        return {"highest": -1, "forgotten": -1, **(read_json(self.at("epochs", job)) or {})}

    def note_epoch(self, job: str, **seen: int) -> None:
        """Raise the numbers that `highest` returns; none ever falls."""
        known = self.highest(job)
        raised = {name: max(known[name], seen.get(name, -1)) for name in ("highest", "forgotten")}
        if raised != known:
            make_folder(self.at("epochs"))
            write_json(self.at("epochs", job), raised)


def as_file_name(uuid: str) -> str:
    """The UUID as a file name: those of MIG devices have slashes."""
    return re.sub(r"[^A-Za-z0-9-]", "_", uuid)


def root_of(body: dict[str, Any]) -> Root:
    """The root that a request names; relative paths and "~" are below HOME."""
    return Root(os.path.join(os.path.expanduser("~"), os.path.expanduser(text_of(body, "root"))))


class Attempt:
    """One folder `attempts/<job>.<epoch>`."""

    def __init__(self, root: Root, job: str, epoch: int) -> None:
        self.root, self.job, self.epoch = root, job, epoch
        self.name = f"{job}.{epoch}"
        self.path = root.at("attempts", self.name)

    def at(self, *parts: str) -> str:
        """A path in it."""
        return os.path.join(self.path, *parts)

    @property
    def work(self) -> str:
        """The working folder of the command."""
        return self.at("work")


def attempt_of(root: Root, body: dict[str, Any]) -> Attempt:
    """The attempt that a request names."""
    job, epoch = text_of(body, "job"), body["epoch"]
    if not JOB_ID.fullmatch(job):
        raise Refusal("bad_request", "job: 1 to 80 letters, digits, _ and - are expected")
    if not is_count(epoch, MOST_EPOCH):
        raise Refusal("bad_request", "epoch: a whole number from 0 is expected")
    return Attempt(root, job, epoch)


def attempt_by_name(root: Root, name: str) -> Attempt:
    """The attempt named `<job>.<epoch>`. Raises Refusal `bad_request`."""
    found = ATTEMPT_NAME.fullmatch(name)
    if not found:
        raise Refusal("bad_request", "an attempt is named <job>.<epoch>")
    return Attempt(root, found.group(1), int(found.group(2)))


def text_of(body: dict[str, Any], name: str) -> str:
    """A field that must be text."""
    value = body[name]
    if not isinstance(value, str):
        raise Refusal("bad_request", f"{name}: text is expected")
    return value


def count_of(body: dict[str, Any], name: str, default: int | None = None) -> int:
    """A field that must be a whole number, not negative."""
    value = body.get(name, default)
    if type(value) is not int or value < 0:
        raise Refusal("bad_request", f"{name}: a whole number from 0 is expected")
    return value


def seconds_of(body: dict[str, Any], name: str, default: float) -> float:
    """A field that must be seconds."""
    value = body.get(name)
    if value is None:
        return default
    if not is_amount(value):
        raise Refusal("bad_request", f"{name}: seconds are expected")
    return float(value)


def is_count(value: Any, most: int = 1 << 62) -> bool:
    """True for a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_small(value: Any) -> bool:
    """True for a count that fits into 31 bits."""
    return is_count(value, (1 << 31) - 1)


def is_word(value: Any) -> bool:
    """True for a text of at most LONGEST_WORD characters."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD


def are_words(value: Any) -> bool:
    """True for a list of texts, each of at most LONGEST_WORD characters."""
    return isinstance(value, list) and all(map(is_word, as_list(value)))


def is_amount(value: Any) -> bool:
    """True for a number from 0 to 1e12."""
    return type(value) in (int, float) and 0 <= value < 1e12


# --- processes ----------------------------------------------------------------------------------


class Process:
    """The fields of /proc/<pid>/stat that are needed here."""

    def __init__(self, pid: int, fields: list[str]) -> None:
        self.pid = pid
        # One whose first thread has ended looks like a zombie while its others go on.
        self.zombie = fields[0] in "ZX" and int(fields[17]) <= 1
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.ticks = int(fields[19])
        """Clock ticks from the start of the machine to its own: with the boot id they tell a reused pid apart."""


def process(pid: int) -> Process | None:
    """The process with this pid; None if there is none."""
    text = read_text(f"/proc/{pid}/stat")
    try:
        return Process(pid, text[text.rindex(")") + 2 :].split())
    except (ValueError, IndexError):
        return None


def processes() -> Iterator[Process]:
    """All processes but this one, zombies too."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me:
            found = process(int(name))
            if found:
                yield found


def marker_of(pid: int, root: Root) -> str | None:
    """The attempt named in the environment that a process was started with, if it is one of this root. None if the environment cannot be
    read, as that of another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    environment = dict(e.split(b"=", 1) for e in entries if b"=" in e)
    name = environment.get(ATTEMPT_VARIABLE.encode())
    if name is None:
        return None
    folder = environment.get(FOLDER_VARIABLE.encode())
    text = name[:LONGEST_MARK].decode("utf-8", "replace")
    here = folder is None or os.fsdecode(folder) == root.at("attempts", text)
    return text if here else None


def has_open(pid: int, path: str) -> bool:
    """True if a process has the file open. This finds those that overwrote their environment, as programs that set their title do."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") == path:
                return True
        except OSError:
            continue
    return False


def send(pid: int, ticks: int, signum: int) -> None:
    """Signal that process and no other: a pid that was reused has other start ticks."""
    opener = getattr(os, "pidfd_open", None)  # from Python 3.9
    try:
        fd = opener(pid) if opener else None
    except ProcessLookupError:
        return
    except OSError:  # a kernel before 5.3, or a filter that refuses
        fd = None
    try:
        found = process(pid)
        if found is None or found.ticks != ticks or found.zombie:
            return
        if fd is None:
            os.kill(pid, signum)
        else:
            signal.pidfd_send_signal(fd, signum)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        if fd is not None:
            os.close(fd)


class Belonging:
    """The processes that belong to an attempt, looked up again on each call."""

    def __init__(
        self, attempt: Attempt, state: dict[str, Any], supervisor: int | None = None
    ) -> None:
        self.attempt = attempt
        self.group = Group.from_record(state.get("cgroup"))
        self.supervisor = supervisor
        self.child = (state.get("pid"), state.get("start_ticks"))
        self.same_boot = state.get("boot_id") == boot_id()

    def alive(self) -> dict[int, Process]:
        """Living processes by pid. An empty look is repeated: between two names in /proc a process may move to another pid."""
        return self.look() or self.look()

    def look(self) -> dict[int, Process]:
        """Look once; may miss a process that moves to another pid meanwhile."""
        everyone = {p.pid: p for p in processes() if not p.zombie}
        below = self._descendants(everyone) if self.supervisor else ()
        grouped = self.group.pids()
        return {
            pid: p
            for pid, p in everyone.items()
            if pid in below
            or pid in grouped
            or (self.same_boot and (p.pid, p.ticks) == self.child)
            or self._is_marked(pid)
        }

    def _is_marked(self, pid: int) -> bool:
        marked = marker_of(pid, self.attempt.root) == self.attempt.name
        return marked or has_open(pid, self.attempt.at("tether"))

    def _descendants(self, everyone: dict[int, Process]) -> frozenset[int]:
        children: dict[int, list[int]] = {}
        for p in everyone.values():
            children.setdefault(p.parent, []).append(p.pid)
        found: set[int] = set()
        todo = [self.supervisor or 0]
        while todo:
            new = [pid for pid in children.get(todo.pop(), []) if pid not in found]
            found.update(new)
            todo.extend(new)
        return frozenset(found)

    def terminate(self, but_session: int) -> None:
        """Send TERM to all outside `but_session`, which has had it: a second TERM means more than the first to some programs."""
        for p in self.alive().values():
            if p.session != but_session:
                send(p.pid, p.ticks, signal.SIGTERM)

    def kill(self, patience: float) -> dict[int, Process]:
        """Send KILL until nothing is left or `patience` seconds have passed; returns what is left."""
        until = time.monotonic() + patience
        while True:
            self.group.kill()
            found = self.alive()
            for p in found.values():
                send(p.pid, p.ticks, signal.SIGKILL)
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.02)


def reap_adopted(but: int | None = None) -> None:
    """Reap orphans that were handed to this process. `but`: a child that is left a zombie."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == but:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


# --- control groups -----------------------------------------------------------------------------


class Group:
    """The control groups of one attempt: one of v2, to find and kill its processes, one with the memory controller. Either may lack."""

    def __init__(self, v2: str | None = None, memory: str | None = None) -> None:
        self.v2, self.memory = v2, memory

    @staticmethod
    def from_record(record: dict[str, Any] | None) -> Group:
        """Build the groups that a state file names."""
        return Group((record or {}).get("v2"), (record or {}).get("memory"))

    def record(self) -> dict[str, Any]:
        """The groups as the state file keeps them."""
        return {"v2": self.v2, "memory": self.memory}

    def folders(self) -> list[str]:
        """Both folders, or one if they are the same."""
        return [f for f in dict.fromkeys((self.v2, self.memory)) if f]

    def take_in(self, pid: int) -> None:
        """Move a process that is in neither group yet into both. A group that refuses it is removed and given up."""
        for name in ("v2", "memory"):
            folder = getattr(self, name)
            if folder and not write_control(os.path.join(folder, "cgroup.procs"), str(pid)):
                remove_group(folder)
                setattr(self, name, None)

    def limit(self, ram_mb: int | None) -> None:
        """Limit memory, if there is a memory group."""
        if not self.memory or ram_mb is None:
            return
        size = str(ram_mb << 20)
        for name, value in (
            ("memory.limit_in_bytes", size),
            ("memory.max", size),
            ("memory.swap.max", "0"),
        ):
            if os.path.exists(os.path.join(self.memory, name)):
                write_control(os.path.join(self.memory, name), value)

    def oom_kills(self) -> int | None:
        """How many of its processes the kernel has killed for memory; None if that is not counted."""
        if not self.memory:
            return None
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(
                r"^oom_kill (\d+)$", read_text(os.path.join(self.memory, name)), re.MULTILINE
            )
            if found:
                return int(found.group(1))
        return None

    def pids(self) -> frozenset[int]:
        """Processes in the groups, and in groups that the command made below them."""
        found: set[int] = set()
        for folder in self.folders():
            for below, _, _ in os.walk(folder):
                listed = read_text(os.path.join(below, "cgroup.procs")).split()
                found.update(int(pid) for pid in listed)
        return frozenset(found)

    def kill(self) -> None:
        """Kill all at once, even while they fork. Kernels before 5.14 cannot; signals have to do there."""
        if self.v2:
            write_control(os.path.join(self.v2, "cgroup.kill"), "1")

    def remove(self) -> None:
        """Remove the groups if they are empty."""
        for folder in self.folders():
            remove_group(folder)


def write_control(path: str, value: str) -> bool:
    """Write to a control file; False if the kernel refuses."""
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, value.encode("ascii"))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove_group(folder: str) -> None:
    """Remove a group and those below it; the kernel refuses while processes are in it."""
    for below, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(below)
        except OSError:
            return


def own_groups() -> dict[str, str]:
    """Folder of this process's control group: "v2", and "memory" where that controller is of v1."""
    inside: dict[str, str] = {}
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        inside.update((name, path) for name in controllers.split(",") or [""])
    found: dict[str, str] = {}
    for line in read_text("/proc/self/mounts").splitlines():
        _, mount, kind, options = line.split(" ")[:4]
        mount = mount.replace("\\040", " ")
        if kind == "cgroup2" and "" in inside:
            found.setdefault("v2", mount + inside[""].rstrip("/"))
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in inside:
            found.setdefault("memory", mount + inside["memory"].rstrip("/"))
    return {name: folder for name, folder in found.items() if os.path.isdir(folder)}


def is_group_of(attempt: Attempt, folder: object) -> bool:
    """True if a supervisor may have made this control group for the attempt. Checked because all below a folder that a state file names is
    read, and killed."""
    if not isinstance(folder, str) or os.path.normpath(folder) != folder:
        return False
    mounts = [line.split(" ")[1:3] for line in read_text("/proc/self/mounts").splitlines()]
    groups = [mount for mount, kind in mounts if kind in ("cgroup", "cgroup2")]
    above = tuple(mount.replace("\\040", " ").rstrip("/") + "/" for mount in groups)
    return os.path.basename(folder) == unit_of(attempt) and folder.startswith(above)


def unit_of(attempt: Attempt) -> str:
    """The name of its control groups. It includes a hash of the path: two roots on one machine may hold members of the same attempt."""
    return f"groupwise-{attempt.name}-{hashlib.sha256(os.fsencode(attempt.path)).hexdigest()[:8]}"


def remove_stray_groups(root: Root) -> None:
    """Remove empty groups of this root's attempts that have no supervisor: it was killed before it could write down where they are."""
    for parent in own_groups().values():
        for name in os.listdir(parent):
            found = UNIT.fullmatch(name)
            attempt = attempt_by_name(root, found.group(1)) if found else None
            ours = attempt is not None and unit_of(attempt) == name
            if attempt and ours and not is_locked(attempt.at("supervisor.lock")):
                remove_group(os.path.join(parent, name))


def make_group(name: str, scope: str | None = None) -> Group:
    """New control groups below the one of this process, or below `scope`, as far as that is permitted."""
    own = {**own_groups(), **({"v2": scope} if scope else {})}
    v2 = make_leaf(own["v2"], name) if "v2" in own else None
    if "memory" in own:
        return Group(v2, make_leaf(own["memory"], name))
    if v2 and not os.path.exists(os.path.join(v2, "memory.max")):
        write_control(os.path.join(own["v2"], "cgroup.subtree_control"), "+memory")
    return Group(v2, v2 if v2 and os.path.exists(os.path.join(v2, "memory.max")) else None)


def make_leaf(parent: str, name: str) -> str | None:
    """Make a group; None if that is not permitted. The folder may be left from a launch that died."""
    folder = os.path.join(parent, name)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return None
    if os.access(os.path.join(folder, "cgroup.procs"), os.W_OK):
        return folder
    remove_group(folder)
    return None


# --- nvidia-smi ---------------------------------------------------------------------------------

GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "mig.mode.current",
)
OLD_GPU_FIELDS = GPU_FIELDS[:-1]
"""Fields for drivers before MIG, which refuse the whole query because of one field."""
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
NOTHING = frozenset(
    "|n/a|not supported|not available|insufficient permissions|requested functionality has been deprecated".split(
        "|"
    )
)
"""Cells that mean "no value" and are no fault."""
NUMBER = re.compile(r"(\d{1,9})(?:\.\d*)?\s*(?:MiB|MB|%|C|W)?", re.IGNORECASE)
MIG_LINE = re.compile(r"\s*MIG\s+(\S+)\s+Device\s+(\d+):\s+\(UUID:\s*(MIG-[A-Za-z0-9/-]+)\)\s*")
GPU_LINE = re.compile(r"GPU\s+\d+:.*\(UUID:\s*(GPU-[A-Za-z0-9-]+)\)\s*")


def plain(cell: str) -> str:
    """The cell without blanks and brackets, in lower case."""
    return cell.strip().strip("[]").strip().lower()


def number(cell: str) -> int | None:
    """The cell as a whole number that is not negative, with or without its unit; else None."""
    found = NUMBER.fullmatch(cell.strip().strip("[]").strip())
    return int(found.group(1)) if found else None


def rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Split into lines with one cell for each field, and unreadable lines. A last line without its line end was cut off."""
    found: list[dict[str, str]] = []
    not_read: list[str] = []
    lines = text.split("\n")
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        if len(cells) == len(fields) and at < len(lines) - 1:
            found.append({name: cells[n] for n, name in enumerate(fields)})
        else:
            not_read.append(line.strip()[:200])
    return found, not_read


def parse_gpus(
    text: str, fields: Sequence[str] = GPU_FIELDS
) -> tuple[list[dict[str, Any]], list[str]]:
    """GPUs, and the lines that describe none."""
    found, not_read = rows(text, fields)
    gpus: dict[str, dict[str, Any]] = {}
    for row in found:
        uuid, index = row["uuid"].strip("[] "), number(row["index"])
        if (
            index is None
            or not uuid.startswith("GPU-")
            or not GPU_UUID.fullmatch(uuid)
            or uuid in gpus
        ):
            not_read.append(", ".join(row.values())[:200])
            continue
        # Values that it does not give are None, and listed in `problems` if that is a fault.
        total, used = number(row["memory.total"]), number(row["memory.used"])
        mig = plain(row.get("mig.mode.current", "")) == "enabled"
        problems = [
            f"{name}: {cell[:100]}"
            for name, cell in row.items()
            if name not in ("index", "uuid") and is_fault(name, cell, mig)
        ]
        if total is not None and used is not None and used > total:
            problems.append(f"memory.used: {used} of {total} MiB")
            used = None
        gpus[uuid] = {
            "index": index,
            "uuid": uuid,
            "model": None if plain(row["name"]) in NOTHING else row["name"],
            "memory_mb": total,
            "memory_used_mb": used,
            "utilisation": number(row["utilization.gpu"]),
            "temperature": number(row["temperature.gpu"]),
            "mig": mig,
            "mig_devices": [],
            "problems": problems,
        }
    return list(gpus.values()), not_read


def is_fault(name: str, cell: str, mig: bool) -> bool:
    """True if the cell shows an error, or the GPU hides its memory. One with MIG may hide it."""
    if name == "name":
        said = plain(cell)
        return said in ("err!", "gpu is lost") or "unknown error" in said
    if name == "mig.mode.current":
        return plain(cell) not in NOTHING | {"enabled", "disabled"}
    if plain(cell) in NOTHING:
        return name.startswith("memory.") and not mig
    return number(cell) is None


def parse_apps(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Processes on GPUs, and the lines that name none."""
    found, not_read = rows(text, APP_FIELDS)
    apps: list[dict[str, Any]] = []
    for row in found:
        uuid, pid = row["gpu_uuid"].strip("[] "), number(row["pid"])
        if pid is None or not GPU_UUID.fullmatch(uuid):
            not_read.append(", ".join(row.values())[:200])
            continue
        apps.append({"uuid": uuid, "pid": pid, "memory_mb": number(row["used_memory"])})
    return apps, not_read


def parse_mig(listing: str, xml: str) -> dict[str, list[dict[str, Any]]]:
    """MIG devices by the UUID of their GPU: from `-L`, and their memory from `-q -x`."""
    found: dict[str, list[dict[str, Any]]] = {}
    gpu = ""
    for line in listing.splitlines():
        whole, part = GPU_LINE.fullmatch(line), MIG_LINE.fullmatch(line)
        if whole:
            gpu = whole.group(1)
        elif part and gpu:
            profile, index, uuid = part.groups()
            memory = mig_memory(xml).get((gpu, int(index)))
            device = {"index": int(index), "uuid": uuid, "profile": profile, "memory_mb": memory}
            found.setdefault(gpu, []).append(device)
    return found


def mig_memory(xml: str) -> dict[tuple[str, int], int | None]:
    """MiB by GPU and index of the device; empty if it cannot be read."""
    from xml.etree import ElementTree

    try:
        log = ElementTree.fromstring(xml)
    except (ElementTree.ParseError, ValueError):
        return {}
    found: dict[tuple[str, int], int | None] = {}
    for gpu in log.iter("gpu"):
        for device in gpu.iter("mig_device"):
            index = number(device.findtext("index") or "")
            if index is not None:
                total = number(device.findtext("fb_memory_usage/total") or "")
                found[(gpu.findtext("uuid") or "").strip(), index] = total
    return found


class ProbeOutput:
    """The outcome of one command of the probe."""

    def __init__(
        self, status: str, text: str = "", complaint: str = "", exit: int | None = None
    ) -> None:
        self.status, self.text, self.complaint, self.exit = status, text, complaint, exit
        """status ∈ ok, absent, failed, hung."""


class Probe:
    """Calls nvidia-smi. A tool that hangs in the kernel cannot be killed, so at most PROBES rounds of it run at once."""

    def __init__(self, root: Root, body: dict[str, Any]) -> None:
        self.root = root
        self.command = arguments_of(body.get("probe") or ["nvidia-smi"])
        self.timeout = seconds_of(body, "probe_timeout", PROBE_TIMEOUT)
        self.until = 0.0

    def ask(self, *questions: Sequence[str]) -> list[ProbeOutput]:
        """Ask all questions at once, within the time limit."""
        lock = self._lock()
        if lock is None:
            return [
                ProbeOutput("hung", complaint="earlier calls of it still hang") for _ in questions
            ]
        self.until = time.monotonic() + self.timeout
        try:
            return self._ask(questions, lock)
        finally:
            os.close(lock)

    def _lock(self) -> int | None:
        until = time.monotonic() + self.timeout
        while True:
            for n in range(PROBES):
                fd = take_lock(self.root.lock(f"probe-{n}.lock"))
                if fd is not None:
                    return fd
            if time.monotonic() > until:
                return None
            time.sleep(0.02)

    def _left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def _ask(self, questions: Sequence[Sequence[str]], lock: int) -> list[ProbeOutput]:
        import subprocess

        if not find_program(self.command[0], os.environ.get("PATH", os.defpath)):
            return [
                ProbeOutput("absent", complaint=f"there is no {self.command[0]}") for _ in questions
            ]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for question in questions:
                running.append(  # noqa: PERF401  (one that cannot be started must not hide those before it)
                    subprocess.Popen(
                        [*self.command, *question],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env={**os.environ, "LC_ALL": "C"},
                        start_new_session=True,
                        pass_fds=(lock,),  # held for as long as one of them lives
                    )
                )
        except OSError as error:
            for begun in running:
                end_probe(begun)
            return [ProbeOutput("failed", complaint=str(error)) for _ in questions]
        streams = [s for begun in running for s in (begun.stdout, begun.stderr) if s]
        outputs = {s.fileno(): b"" for s in streams}
        poller = select.poll()
        waiting = set(outputs)
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and self._left():
            for fd, _ in poller.poll(self._left() * 1000):
                data = os.read(fd, 65536)
                outputs[fd] += data
                if not data or len(outputs[fd]) > 1 << 22:
                    poller.unregister(fd)
                    waiting.discard(fd)
        return [self._outcome(begun, outputs) for begun in running]

    def _outcome(self, begun: Any, outputs: dict[int, bytes]) -> ProbeOutput:
        """The outcome of one process. One that did not end in time is killed and not waited for: in the kernel it may never die."""
        text, complaint = (
            outputs[stream.fileno()].decode("utf-8", "replace")
            for stream in (begun.stdout, begun.stderr)
        )
        while begun.poll() is None and self._left():
            time.sleep(0.005)
        code = begun.poll()
        end_probe(begun)
        if code is None:
            return ProbeOutput("hung", text, complaint)
        return ProbeOutput("failed" if code else "ok", text, complaint, code)


def end_probe(begun: Any) -> None:
    """Kill the probe's process group and close its streams."""
    if begun.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(begun.pid, signal.SIGKILL)
        until = time.monotonic() + 0.2
        while begun.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
    begun.stdout.close()
    begun.stderr.close()
    if begun.returncode is None:
        begun.returncode = -9  # so that Popen does not warn of a child that was not waited for


class GpuReport:
    """GPUs and the processes on them, as far as the probe showed them."""

    def __init__(self) -> None:
        self.gpus: list[dict[str, Any]] = []
        self.apps: list[dict[str, Any]] = []
        self.status = self.apps_status = "absent"
        self.not_read: list[str] = []
        self.exit: int | None = None
        self.said = ""

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """The GPU with this UUID; None if it is not there or cannot be read."""
        return next((g for g in self.gpus if g["uuid"] == uuid), None)

    def summary(self) -> dict[str, Any]:
        """The outcome of the probe, for an answer."""
        return {
            "status": self.status,
            "apps": self.apps_status,
            "lines_not_read": self.not_read[:20],
            "exit": self.exit,
            "said": self.said,
        }


def look_at_gpus(root: Root, body: dict[str, Any]) -> GpuReport:
    """Run one round of the probe."""
    probe, seen = Probe(root, body), GpuReport()
    about_gpus, about_apps = probe.ask(
        question("gpu", GPU_FIELDS), question("compute-apps", APP_FIELDS)
    )
    fields = GPU_FIELDS
    if (
        about_gpus.status == "failed"
        and "mig.mode.current" in about_gpus.text + about_gpus.complaint
    ):
        fields = OLD_GPU_FIELDS
        (about_gpus,) = probe.ask(question("gpu", fields))
    seen.gpus, not_read = parse_gpus(about_gpus.text, fields)
    seen.apps, apps_not_read = parse_apps(about_apps.text)
    seen.status = probe_status(about_gpus, not_read, seen.gpus)
    seen.apps_status = probe_status(about_apps, apps_not_read, seen.apps)
    seen.not_read = not_read + apps_not_read
    seen.exit = about_gpus.exit
    seen.said = (about_gpus.complaint or about_apps.complaint).strip()[:500]
    for app in seen.apps:
        app["attempt"] = marker_of(app["pid"], root)
    if any(gpu["mig"] for gpu in seen.gpus):
        listing, xml = probe.ask(("-L",), ("-q", "-x"))
        devices = parse_mig(listing.text, xml.text)
        for gpu in seen.gpus:
            gpu["mig_devices"] = devices.get(gpu["uuid"], [])
    return seen


def question(what: str, fields: Sequence[str]) -> tuple[str, ...]:
    """The arguments that ask for those fields, in that order."""
    return (f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")


def probe_status(said: ProbeOutput, not_read: list[str], found: list[Any]) -> str:
    """The probe's status: `garbage` only if no line could be read. If some could, it stays ok, and the caller sees the unread ones too."""
    return "garbage" if said.status == "ok" and not_read and not found else said.status


def arguments_of(value: object) -> list[str]:
    """Check an argument list. Raises Refusal `bad_request`."""
    found: list[str] = []
    for item in as_list(value):
        if not isinstance(item, str) or "\0" in item:
            raise Refusal("bad_request", "an argument list holds texts without NUL")
        found.append(item)
    if not found or not found[0]:
        raise Refusal("bad_request", "an argument list with at least a program is expected")
    return found


# --- blobs: content by its hash -----------------------------------------------------------------


def has_blob(root: Root, sha: str) -> bool:
    """True if the blob is there and unchanged. One that was written to is hashed again, and removed if its content differs."""
    path = root.blob(sha)
    try:
        found = os.lstat(path)
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode):
        return False
    if found.st_mtime_ns == BLOB_TIME * 10**9:
        return True
    with open(path, "rb") as file:
        if hash_of(file) == sha:
            os.utime(path, (BLOB_TIME, BLOB_TIME))
            return True
    remove_file(path)
    return False


class Work:
    """Counts the work that a request has done, for signs of life: a disk that hangs adds none."""

    done = 0


def hash_of(file: BinaryIO) -> str:
    """SHA-256 of the rest of a file."""
    digest = hashlib.sha256()
    while True:
        data = file.read(1 << 20)
        Work.done += 1
        if not data:
            return digest.hexdigest()
        digest.update(data)


def store_blob(root: Root, sha: str, size: int, source: Readable, by: str | None = None) -> None:
    """Read `size` bytes and keep them if their hash is `sha`, else raise Refusal. The caller holds the lock of blobs, shared. `by` replaces
    this process's id in the temporary name, so that a torn file is overwritten by the next request with that name."""
    folder = make_folder(os.path.dirname(root.blob(sha)))
    new = os.path.join(folder, f"{sha}.{by or os.getpid()}.new")
    digest, left = hashlib.sha256(), size
    try:
        with open(
            os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
        ) as file:
            while left:
                data = source.read(min(left, 1 << 20))
                if not data:
                    raise Refusal("truncated", f"the payload ended {left} bytes before its end")
                digest.update(data)
                file.write(data)
                left -= len(data)
                Work.done += 1
            if digest.hexdigest() != sha:
                raise Refusal("bad_blob", f"{sha}: the bytes sent have another hash")
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            os.utime(file.fileno(), (BLOB_TIME, BLOB_TIME))
            os.fsync(file.fileno())
        os.rename(new, root.blob(sha))
    except BaseException:
        remove_file(new)
        raise
    sync_folder(folder)


def lay_out(root: Root, work: str, manifest: dict[str, list[Any]]) -> Iterator[None]:
    """Put the files of a manifest into the working folder, where the command may change them. Yields now and then, so the caller may
    stop."""
    for path, (sha, mode, _) in manifest.items():
        target = os.path.join(work, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        yield from copy_blob(root.blob(sha), target, sha, mode & 0o777)


def copy_blob(blob: str, target: str, sha: str, mode: int) -> Iterator[None]:
    """Make an independent copy: a clone if the file system can, else a verified copy. Raises Refused if the blob is damaged."""
    remove_file(target)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(blob, "rb") as source, open(fd, "wb") as file:
        try:  # with a clone, `file` shares the blob's content until one of them is changed
            fcntl.ioctl(file.fileno(), CLONE, source.fileno())
            sound = True
        except OSError:  # this file system cannot clone
            sound = (yield from copy_pieces(source, file)) == sha
        os.fchmod(file.fileno(), mode)
    if not sound:
        remove_file(blob)
        raise Refused(
            "bad_spec",
            f"blob {sha} was damaged on this machine's disk; it has been removed, send it again",
        )


def copy_pieces(source: BinaryIO, file: BinaryIO) -> Generator[None, None, str]:
    """Copy in pieces, yielding between them; returns the hash."""
    digest = hashlib.sha256()
    while True:
        data = source.read(1 << 20)
        yield
        if not data:
            return digest.hexdigest()
        digest.update(data)
        file.write(data)


# --- the working folder, read without following any link ----------------------------------------


KINDS = {
    stat.S_IFLNK: "link",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}
NO_FILES = frozenset({*KINDS.values(), "special"})
"""Reasons for refusal that are no loss; any other means that a file is missing from the answer."""


def parts_of(path: object) -> list[str]:
    """The parts of a path inside the working folder. Raises Refusal `refused_path`."""
    parts = path.split("/") if isinstance(path, str) else [""]
    whole = "".join(parts)
    if "\0" in whole or any(p in ("", ".", "..") for p in parts) or not is_utf8(whole):
        raise Refusal(
            "refused_path", "a path relative to the working folder is expected, without .."
        )
    return parts


def is_utf8(text: str) -> bool:
    """False for a text with lone surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def open_inside(work: str, path: str) -> int:
    """Open a file or folder below the working folder. Each part is opened from the one before, so no link is ever followed."""
    parts = parts_of(path)
    try:
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise Refusal("not_found", "the attempt has no working folder on this machine") from None
    for part in parts:
        try:
            kind = stat.S_IFMT(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode)
            if kind in KINDS:  # to open a device may do something
                raise Refusal(
                    "refused_path", f"{path}: a {KINDS[kind]} stands there", kind=KINDS[kind]
                )
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        except FileNotFoundError:
            raise Refusal("not_found", f"{path} is not in the working folder") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            # It was replaced a moment ago, or is below a file.
            message = f"{path}: not all above it are folders"
            raise Refusal("refused_path", message, kind="link") from None
        finally:
            os.close(fd)
        fd = below
    return fd


def read_inside(work: str, path: str, most: int) -> bytes:
    """Read a file of the working folder, up to `most` bytes."""
    with open(open_regular(work, path), "rb") as file:
        return file.read(most)


def whole_inside(work: str, path: str, sha: str, size: int) -> bytes | None:
    """A file's bytes if it still has that size and hash, else None. A file that has grown, or has no end, is read no further."""
    try:
        data = read_inside(work, path, size + 1)
    except (OSError, Refusal):
        return None
    return data if len(data) == size and hashlib.sha256(data).hexdigest() == sha else None


def open_regular(work: str, path: str) -> int:
    """Open a plain file below the working folder; Refusal for anything else."""
    fd = open_inside(work, path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refusal("refused_path", f"{path} is no plain file", kind="folder")
    return fd


DEEPEST = 60


class Walk:
    """All plain files below some folders of the working folder; `refused` maps every other path to the reason why it is not taken."""

    def __init__(self, work: str, most: int | None = None) -> None:
        self.work, self.most = work, MOST_ENTRIES if most is None else most
        self.files: dict[str, os.stat_result] = {}
        self.refused: dict[str, str] = {}
        self.seen = 0

    def enter(self, path: str) -> None:
        """Add a file or folder; one that is missing is skipped."""
        try:
            fd = open_inside(self.work, path)
        except (Refusal, OSError) as error:
            if not isinstance(error, Refusal):
                self.refused[path] = "unreadable"
            elif error.body["code"] != "not_found":
                self.refused[path] = error.body["kind"]
            return
        try:
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                self._folder(fd, path, 0)
            else:
                self._entry(path, found)
        finally:
            os.close(fd)

    def _folder(self, fd: int, path: str, depth: int) -> None:
        try:
            with os.scandir(fd) as entries:
                names = sorted(e.name for e in itertools.islice(entries, self._left()))
        except OSError:
            self.refused[path] = "unreadable"
            return
        for name in names:
            self.seen += 1
            Work.done += 1
            below = f"{path}/{name}"
            if self.seen > self.most:
                self.refused[path] = "too_many"
                return
            if not is_utf8(name):
                self.refused[below.encode("utf-8", "replace").decode()] = "not_utf8"
                continue
            try:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue  # gone meanwhile
            self._one(fd, name, below, found, depth)

    def _left(self) -> int:
        """How many more names to list; one beyond the limit shows that there are too many."""
        return max(0, self.most - self.seen) + 1

    def _one(self, fd: int, name: str, below: str, found: os.stat_result, depth: int) -> None:
        if not stat.S_ISDIR(found.st_mode):
            self._entry(below, found)
        elif depth >= DEEPEST:
            self.refused[below] = "too_deep"
        else:
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except OSError:
                self.refused[below] = "unreadable"
                return
            try:
                self._folder(inner, below, depth + 1)
            finally:
                os.close(inner)

    def _entry(self, path: str, found: os.stat_result) -> None:
        if stat.S_ISREG(found.st_mode):
            self.files[path] = found
        else:
            self.refused[path] = KINDS.get(stat.S_IFMT(found.st_mode), "special")


class Hashes:
    """SHA-256 of files, remembered while size, inode and times stay the same: callers ask for gigabytes again and again."""

    def __init__(self, attempt: Attempt) -> None:
        self.path, self.work = attempt.at("hashes.json"), attempt.work
        most = most_artefacts(state_of(attempt) or {}) * HASHES_EACH
        self.known = read_json(self.path, max(LARGEST_HASHES, most)) or {}
        self.new = False
        self.keep_at = time.monotonic() + KEPT_EVERY

    def of(self, path: str) -> str | None:
        """A file's hash; None if it changed while it was read. OSError if it cannot be read, Refusal if it is no plain file any more."""
        with open(open_regular(self.work, path), "rb") as file:
            before = identity(os.fstat(file.fileno()))
            entry = as_list(self.known.get(path))
            if entry[:1] == [before] and is_sha(entry[-1]):
                return str(entry[-1])
            sha = hash_of(file)
            if identity(os.fstat(file.fileno())) != before:
                return None
        if time.time() - before[2] / 1e9 > SETTLED:
            self.known[path] = [before, sha]
            self.new = True
        if time.monotonic() >= self.keep_at:
            self.keep()
            self.keep_at = time.monotonic() + KEPT_EVERY
        return sha

    def keep(self) -> None:
        """Save the hashes for the next request; if the disk refuses, nothing is lost."""
        if self.new:
            with contextlib.suppress(OSError):
                write_json(self.path, self.known)
                self.new = False


def identity(found: os.stat_result) -> list[int]:
    """Differs when a file was written to or replaced."""
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


MOST_STEPS = 1 << 63
"""Highest step that a database can hold, plus one."""


class Checkpoint:
    """A folder whose `manifest.json`, which is written last, names a step and files that are all there."""

    def __init__(self, walk: Walk, path: str, step: int, files: dict[str, dict[str, Any]]) -> None:
        self.path, self.step, self.files = path, step, files
        self.found = walk.files

    @property
    def manifest(self) -> str:
        """The path of its `manifest.json`."""
        return self.path + "/manifest.json"


def checkpoints_of(attempt: Attempt, folders: Iterable[str]) -> list[Checkpoint]:
    """Complete checkpoints in order of their steps, without folders that are under construction. If there are very many or very large
    manifests, only the newest are read."""
    walk = Walk(attempt.work)
    for folder in folders:
        walk.enter(folder)
    others, left = OtherManifests(attempt), MANIFESTS_TOGETHER
    found: list[Checkpoint] = []
    manifests = [p for p in walk.files if p.endswith("/manifest.json") and "/." not in "/" + p]
    manifests.sort(key=lambda p: walk.files[p].st_mtime_ns, reverse=True)
    for path in manifests[:MOST_MANIFESTS]:
        file = walk.files[path]
        if file.st_size > min(left, LARGEST_MANIFEST) or others.has(file):
            continue
        left -= file.st_size
        checkpoint = checkpoint_of(walk, path)
        if checkpoint is None:
            others.note(file)
        elif is_complete(checkpoint):
            found.append(checkpoint)
    others.keep()
    return sorted(found, key=lambda c: (c.step, c.path))


def checkpoint_of(walk: Walk, path: str) -> Checkpoint | None:
    """Read a manifest; None if it describes no checkpoint, since any file may have that name."""
    try:
        manifest = parse_json(read_inside(walk.work, path, LARGEST_MANIFEST))
        step, files = manifest["step"], manifest["files"]
        right = is_count(step, MOST_STEPS - 1) and all(
            is_count(entry["size"]) and is_sha(entry["sha256"]) for entry in files.values()
        )
    except (Refusal, OSError, *NO_JSON, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(walk, path.rpartition("/")[0], step, files) if right else None


def is_complete(checkpoint: Checkpoint) -> bool:
    """True if each of its files is there with the right size."""
    for path, entry in checkpoint.files.items():
        found = checkpoint.found.get(checkpoint.path + "/" + path)
        if found is None or found.st_size != entry["size"]:
            return False
    return True


class OtherManifests:
    """Large files named `manifest.json` that belong to no checkpoint, as in data sets: not read again while they stay unchanged."""

    def __init__(self, attempt: Attempt) -> None:
        self.path = attempt.at("others.json")
        self.known = as_list((read_json(self.path) or {}).get("seen"))
        self.seen: list[list[int]] = []
        self.keys = {
            tuple(entry) for entry in map(as_list, self.known) if all(map(is_count, entry))
        }

    def has(self, file: os.stat_result) -> bool:
        """True if this file was read before and is unchanged."""
        same = tuple(identity(file)) in self.keys
        if same:
            self.seen.append(identity(file))
        return same

    def note(self, file: os.stat_result) -> None:
        """Remember that it was read, unless it was just written: it might be written again without a sign of it."""
        if file.st_size > REMEMBERED_ABOVE and time.time() - file.st_ctime > SETTLED:
            self.seen.append(identity(file))

    def keep(self) -> None:
        """Save the list for the next look; if the disk refuses, nothing is lost."""
        if self.seen != self.known:
            with contextlib.suppress(OSError):
                write_json(self.path, {"seen": self.seen})


def is_sha(value: Any) -> bool:
    """True for a SHA-256 in lower-case hex."""
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


# --- the state of an attempt --------------------------------------------------------------------


def state_of(attempt: Attempt) -> dict[str, Any] | None:
    """The state file, without fields that a supervisor could not have written: the job can write there too. None if there is none."""
    found = read_json(attempt.at("state.json"))
    if found is None:
        return None
    state = {name: value for name, value in found.items() if STATE_FIELDS.get(name, no)(value)}
    limits, group = as_object(found.get("limits")) or {}, as_object(found.get("cgroup")) or {}
    state["limits"] = {name: value for name, value in limits.items() if is_amount(value)}
    state["cgroup"] = {n: folder for n, folder in group.items() if is_group_of(attempt, folder)}
    for name in ("artefacts", "checkpoints"):
        state[name] = paths_in(found.get(name))
    if state.get("phase") == "refused" and "refused" not in state:
        del state["phase"]
    return state


def is_refusal(value: Any) -> bool:
    """True for a record as `Refused` makes it."""
    found = as_object(value) or {}
    told = [found.get("code"), found.get("message"), found.get("holder", "")]
    return set(found) <= {"code", "message", "holder"} and all(map(is_word, told))


def are_gpus(value: Any) -> bool:
    """True for GPU UUIDs as a launch names them, MOST_GPUS at most."""
    if not isinstance(value, list) or len(as_list(value)) > MOST_GPUS:
        return False
    return all(isinstance(name, str) and GPU_UUID.fullmatch(name) for name in as_list(value))


def no(_value: Any) -> bool:
    """Reject a field: it is either unknown, or checked elsewhere."""
    return False


STATE_FIELDS: dict[str, Callable[[Any], bool]] = {
    "phase": is_word,
    "rank": is_small,
    "boot_id": is_word,
    "pid": is_count,
    "start_ticks": is_count,
    "method": is_word,
    "started_at": is_amount,
    "gpus": are_gpus,
    "share_mb": is_small,
    "slot": is_small,
    "refused": is_refusal,
    "engine": is_word,
    "engine_options": are_words,
    "claimed_at": is_amount,
}


def paths_in(value: Any) -> list[str]:
    """The paths of a list that lie inside the working folder."""
    found: list[str] = []
    for path in as_list(value):
        with contextlib.suppress(Refusal):
            parts_of(path)
            found.append(path)
    return found


def exit_of(attempt: Attempt, name: str) -> dict[str, Any] | None:
    """An exit record, without values that a supervisor could not have written. None if there is none."""
    found = read_json(attempt.at(name))
    if found is None or found.get("reason") not in REASONS:
        return None
    told = {name: found.get(name) for name in EXIT_FIELDS}
    record = {name: value if EXIT_FIELDS[name](value) else None for name, value in told.items()}
    texts = {name: found.get(name) for name in ("reason", "message", "tail")}
    record.update((n, text[:TAIL] if isinstance(text, str) else "") for n, text in texts.items())
    return record


REASONS = ("exited", "cancelled", "evicted", "time_limit", "deadman", "spawn_failed")
EXIT_FIELDS: dict[str, Callable[[Any], bool]] = {
    "code": lambda value: is_count(value, 255),
    "signal": lambda value: is_count(value, 255),
    "oom_kill": is_small,
    "seconds": is_amount,
    "cpu_seconds": is_amount,
    "max_rss_mb": is_amount,
    "finished_at": is_amount,
    "gpus": is_small,
    "checkpoints": is_small,
    "step": lambda value: is_count(value, MOST_STEPS - 1),
    "leftovers": is_small,
}


def guarded_member(
    attempt: Attempt, progress: tuple[int, int | None] | None = None
) -> dict[str, Any]:
    """`member` for answers about many attempts: if one cannot be read, the others are still reported."""
    try:
        return member(attempt, progress)
    except Exception:  # noqa: BLE001  (its job may have put anything there)
        held = is_locked(attempt.at("supervisor.lock"))
        here = {"state": "running" if held else "lost", "boot_id": boot_id(), "same_boot": True}
        return {**blank(attempt), **here, "survivors": None if held else survivors(attempt, {})}


def member(attempt: Attempt, progress: tuple[int, int | None] | None = None) -> dict[str, Any]:
    """Everything known about an attempt. `progress`: the number of checkpoints and the newest step, if they were counted a moment ago."""
    # The order matters: what is read after the lock was seen free is final, since only its holder writes.
    held = is_locked(attempt.at("supervisor.lock"))
    ended = exit_of(attempt, "exit.json")
    if ended is None and not held:
        ended = exit_of(attempt, "outcome.json")
    state = state_of(attempt)
    if state is None and not os.path.isdir(attempt.path):
        return blank(attempt)
    state = state or {}
    word = state_word(state, held, ended, os.path.exists(attempt.at(TOKEN)))
    same_boot = state.get("boot_id") == boot_id()
    count, step = progress_of(attempt, state, word, ended, progress)
    found = blank(attempt)
    found.update({name: state.get(name) for name in MEMBER_FIELDS})
    found.update(
        state=word,
        same_boot=same_boot,
        log_size=size_of(attempt.at("log")),
        heartbeat_age=heartbeat_age(attempt) if same_boot else None,
        checkpoints=count,
        step=step,
        exit=with_age(ended) if word == "exited" else None,
        gpus=state.get("gpus", []),
        refused=state.get("refused"),
        survivors=survivors(attempt, state) if word == "lost" else None,
    )
    if state.get("engine"):
        # A caller needs these, beside the engine's own answer, to judge an attempt.
        said = "" if word in ("running", "exited") else read_end(attempt.at(ENGINE_LOG))
        found.update(
            {
                "engine_options": state.get("engine_options") or [],
                "folder": attempt.path,
                "age": max(0.0, time.time() - state.get("claimed_at", 0.0)),
                "beat_age": max(0.0, time.time() - modified(attempt.at("heartbeat"))),
                "engine_says": said,
            }
        )
    return found


MEMBER_FIELDS = (
    *("rank", "boot_id", "pid", "start_ticks", "method", "started_at"),
    *("share_mb", "slot", "engine"),
)


def read_end(path: str) -> str:
    """The last TAIL bytes of a file; empty if it cannot be read."""
    try:
        fd = open_plain(path)
    except OSError:
        return ""
    try:
        return os.pread(fd, TAIL, max(0, os.fstat(fd).st_size - TAIL)).decode("utf-8", "replace")
    finally:
        os.close(fd)


def with_age(ended: dict[str, Any] | None) -> dict[str, Any] | None:
    """An exit record with its age in seconds: a caller that compares machines does not know their clocks."""
    then = (ended or {}).get("finished_at")
    if ended is None or not isinstance(then, (int, float)):
        return ended
    return {**ended, "age": max(0.0, time.time() - then)}


def blank(attempt: Attempt) -> dict[str, Any]:
    """The answer for an attempt that is not here."""
    return {
        "job": attempt.job,
        "epoch": attempt.epoch,
        "rank": None,
        "state": "absent",
        "boot_id": None,
        "same_boot": None,
        "pid": None,
        "start_ticks": None,
        "method": None,
        "started_at": None,
        "gpus": [],
        "share_mb": None,
        "slot": None,
        "log_size": 0,
        "heartbeat_age": None,
        "checkpoints": 0,
        "step": None,
        "exit": None,
        "refused": None,
        "survivors": None,
        "clock": boot_clock(),
        "place": attempt.root.place(),
        "engine": None,
    }


def state_word(
    state: dict[str, Any], held: bool, ended: dict[str, Any] | None, waits: bool = False
) -> str:
    """The state, by the table at the top of this file. `waits`: its token is there."""
    phase = state.get("phase")
    if phase in ("voided", "refused"):
        return phase
    if ended is not None:
        return "exited"
    if held:
        return "running" if phase == "running" else "claimed"
    if phase == "queued" and waits:
        return "queued"
    return "lost" if state.get("boot_id") in (None, boot_id()) else "rebooted"


def progress_of(
    attempt: Attempt,
    state: dict[str, Any],
    word: str,
    ended: dict[str, Any] | None,
    progress: tuple[int, int | None] | None,
) -> tuple[int, int | None]:
    """The number of complete checkpoints, and the step of the newest."""
    if ended is not None and ended["checkpoints"] is not None:
        return ended["checkpoints"], ended["step"]
    if progress is not None:
        return progress
    if word in ("voided", "refused", "claimed", "queued"):
        return 0, None
    return count_checkpoints(attempt, state)


def count_checkpoints(attempt: Attempt, state: dict[str, Any]) -> tuple[int, int | None]:
    """Count checkpoints in their folders; (0, None) if that fails, because neither the exit record nor an answer about other attempts may
    depend on what a job puts there."""
    try:
        found = checkpoints_of(attempt, state.get("checkpoints") or ())
    except Exception:  # noqa: BLE001  (see above)
        return 0, None
    return len(found), found[-1].step if found else None


def size_of(path: str) -> int:
    """A file's size in bytes; 0 if it is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def heartbeat_age(attempt: Attempt) -> float | None:
    """Seconds since the supervisor last wrote that it lives."""
    beat = number_in(cell_words(attempt.at("heartbeat")))
    return None if beat is None else max(0.0, boot_clock() - beat)


def survivors(attempt: Attempt, state: dict[str, Any]) -> int:
    """The number of processes of an attempt whose supervisor is gone; 1 if only its locks show that there are any."""
    held = held_locks(attempt, state.get("gpus", []), state.get("share_mb"))
    return len(Belonging(attempt, state).look()) or int(bool(held))


def contact(attempt: Attempt, clock: float | None = None) -> bool:
    """Record contact with the control plane, now or at that time of the boot clock. Never moves back."""
    now, path = boot_clock(), attempt.at("contact")
    stamp = now if clock is None else min(now, clock)
    before = number_in(cell_words(path))
    if before is not None and before >= stamp:
        return True
    try:
        return set_cell(path, f"{stamp:.3f}")
    except OSError:  # others are named in the same breath
        return False


def attempts_here(root: Root) -> tuple[list[Attempt], list[str]]:
    """All attempts, and names below `attempts` that are no attempts; those that begin with a dot are being prepared."""
    try:
        names = sorted(os.listdir(root.at("attempts")))
    except OSError:
        return [], []
    found = [attempt_by_name(root, name) for name in names if ATTEMPT_NAME.fullmatch(name)]
    found = [attempt for attempt in found if is_count(attempt.epoch, MOST_EPOCH)]
    known = {attempt.name for attempt in found}
    return found, [name for name in names if name not in known and not name.startswith(".")]


def unremoved(root: Root) -> list[str]:
    """Folders of forgotten attempts that still take up room, because this user may not remove all that is in them."""
    try:
        names = sorted(os.listdir(root.at("attempts")))
    except OSError:
        return []
    return [root.at("attempts", n) for n in names if n.startswith(STAYS)][:MOST_UNREMOVED]


# --- verbs --------------------------------------------------------------------------------------


def verb_hello(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Describe this machine."""
    make_folder(root.path)
    own = own_groups()
    answer = {
        "protocols": list(SPOKEN),
        "python": ".".join(map(str, sys.version_info[:3])),
        "hostname": os.uname().nodename,
        "user": user_name(),
        "boot_id": boot_id(),
        "home": os.path.expanduser("~"),
        "root": root.path,
        "filesystem": filesystem_of(root.path),
        "cgroup": {name: may_make_groups(own.get(name)) for name in ("v2", "memory")},
        "methods": methods(),
        **load_of(root),
    }
    return answer, b""


def user_name() -> str:
    """The name of the user that the runner works as; its number if it has no name."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def load_of(root: Root) -> dict[str, Any]:
    """Processor, memory and disk at this moment."""
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text("/proc/meminfo"), re.MULTILINE))
    disk = os.statvfs(make_folder(root.path))
    return {
        "time": time.time(),
        "load": list(os.getloadavg()),
        "cpus": len(os.sched_getaffinity(0)),
        "ram_mb": int(memory.get("MemTotal", 0)) >> 10,
        "ram_free_mb": int(memory.get("MemAvailable", memory.get("MemFree", 0))) >> 10,
        "disk_free_mb": disk.f_bavail * disk.f_frsize >> 20,
    }


def filesystem_of(path: str) -> str | None:
    """The file system's type, found by the longest mount point above the path."""
    path = os.path.realpath(path) + "/"
    best, kind = "", None
    for line in read_text("/proc/self/mounts").splitlines():
        _, mount, found = line.split(" ")[:3]
        mount = mount.replace("\\040", " ").rstrip("/") + "/"
        if path.startswith(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def may_make_groups(folder: str | None) -> bool:
    """True if groups may be made below that control group."""
    return folder is not None and os.access(folder, os.W_OK)


def methods() -> list[str]:
    """Ways to place a supervisor here, the best first."""
    found = ["session"]
    if may_make_groups(own_groups().get("v2")):
        found.insert(0, "cgroup")
    if os.path.isdir("/run/systemd/system") and os.geteuid() == 0:
        found.insert(0, "systemd")
    return found


def verb_observe(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Report GPUs, processes and attempts in one answer, for a poller."""
    seen = look_at_gpus(root, body)
    here, strange = attempts_here(root)
    told = {attempt.name: guarded_member(attempt) for attempt in here}
    over = {name: found for name, found in told.items() if found["state"] == "exited"}
    for found in over.values():
        found["survivors"] = 0
    quarantined: list[dict[str, Any]] = [{"what": "folder", "detail": name} for name in strange]
    # After what they belong to was read: what has exited has ended them before.
    for p in processes():
        marked = None if p.zombie else marker_of(p.pid, root)
        if marked in over:
            over[marked]["survivors"] += 1
        elif marked and marked not in told:
            quarantined.append({"what": "process", "detail": marked, "pid": p.pid})
    answer = {
        "boot_id": boot_id(),
        **load_of(root),
        "gpus": seen.gpus,
        "apps": seen.apps,
        "probe": seen.summary(),
        "attempts": list(told.values()),
        "quarantined": quarantined,
        "unremoved": unremoved(root),
    }
    return answer, b""


def shas_of(body: dict[str, Any], name: str) -> list[str]:
    """A list of hashes from a request. Raises Refusal `bad_request`."""
    found = [str(sha) for sha in body[name]]
    if not all(SHA256.fullmatch(sha) for sha in found):
        raise Refusal("bad_request", f"{name}: sha256 in hex are expected")
    return found


def verb_missing(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """List the blobs that have to be sent. Those that are here are about to be used, so no sweep takes them for a while."""
    return {"missing": [sha for sha in shas_of(body, "sha256") if not spare_blob(root, sha)]}, b""


def spare_blob(root: Root, sha: str) -> bool:
    """True if the blob is here; it then counts as changed now, which protects it from a sweep. `launch` looks again, under the lock."""
    try:
        if has_blob(root, sha):
            os.utime(root.blob(sha), (BLOB_TIME, BLOB_TIME))
            return True
    except FileNotFoundError:
        pass  # a sweep was quicker
    return False


def verb_put(root: Root, body: dict[str, Any], payload: BinaryIO) -> Answered:
    """Store blobs; those that came whole are kept even if a later one did not."""
    shas = shas_of({"blobs": [entry[0] for entry in body["blobs"]]}, "blobs")
    sizes = [count_of({"size": entry[1]}, "size") for entry in body["blobs"]]
    if sum(sizes) != body.get("payload", 0):
        raise Refusal(
            "bad_request", "payload: as many bytes as the blobs have together are expected"
        )
    with HeldLock(root.lock("blobs.lock"), fcntl.LOCK_SH):
        for n, sha in enumerate(shas):
            store_blob(root, sha, sizes[n], payload)
    return {"stored": shas}, b""


def verb_join(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Join parts that were sent before into one blob, then remove the parts."""
    (sha,) = shas_of({"blob": [body["blob"][0]]}, "blob")
    size = count_of({"size": body["blob"][1]}, "size")
    parts = shas_of({"parts": [entry[0] for entry in body["parts"]]}, "parts")
    folder = make_folder(os.path.dirname(root.blob(sha)))
    with alone(folder), HeldLock(root.lock("blobs.lock"), fcntl.LOCK_SH):
        if not has_blob(root, sha):
            missing = [part for part in parts if not has_blob(root, part)]
            if missing:
                raise Refusal(
                    "missing_blobs", f"{len(missing)} parts are not here", missing=missing
                )
            store_blob(root, sha, size, JoinedFiles([root.blob(part) for part in parts]), "join")
        for part in parts:
            if part != sha:
                remove_file(root.blob(part))
    return {"stored": [sha]}, b""


class JoinedFiles:
    """Several files, read one after the other as one."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths[::-1]
        self.file: BinaryIO | None = None

    def read(self, most: int) -> bytes:
        """Read from the current file; empty at the end of the last."""
        while True:
            if self.file is None:
                if not self.paths:
                    return b""
                self.file = open(self.paths.pop(), "rb")  # noqa: SIM115  (closed below, or with the process)
            data = self.file.read(most)
            if data:
                return data
            self.file.close()
            self.file = None


def verb_void(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Ensure that this epoch never begins, unless it has begun already."""
    attempt = attempt_of(root, body)
    because = text_of(body, "because")[:LONGEST_WORD] if body.get("because") else ""
    with_spare(root, lambda: make_void(root, attempt, because))
    return member(attempt), b""


def make_void(root: Root, attempt: Attempt, because: str = "") -> None:
    """Make the folder that marks the epoch as void, if it has none."""
    with root.job_lock(attempt.job):
        take_over_unbegun(attempt)
        withdraw(attempt, because)
        if not os.path.isdir(attempt.path):
            root.note_epoch(attempt.job, highest=attempt.epoch)
            claim(attempt, {"phase": "voided"})


def withdraw(attempt: Attempt, because: str) -> None:
    """Void a queued attempt by taking its token before its engine does."""
    state = read_json(attempt.at("state.json")) or {}
    if state.get("phase") != "queued":
        return
    taken, voided = attempt.at(TOKEN + ".voided"), {**state, "phase": "voided"}
    if because:
        voided["refused"] = {"code": "voided", "message": because}
    if not take_token(attempt, taken) and not os.path.exists(taken):
        return
    write_json(attempt.at("state.json"), voided)
    remove_file(taken)


def take_token(attempt: Attempt, target: str) -> bool:
    """Rename the token; of all that try, one succeeds."""
    try:
        os.rename(attempt.at(TOKEN), target)
    except FileNotFoundError:
        return False
    sync_folder(attempt.path)
    return True


def keep_spare(root: Root) -> None:
    """Set aside the room that `with_spare` uses; OSError, and nothing kept, if the disk is too full for it."""
    path = root.at("spare")
    if size_of(path) == SPARE:
        return
    try:
        make_folder(root.path)
        write_file(path, os.urandom(SPARE))  # what could be compressed would be no room
    except OSError:
        remove_file(path)
        raise


def with_spare(root: Root, work: Callable[[], None]) -> None:
    """Do the work; if the disk is full, do it again in the room that was set aside. The next launch sets it aside again, or does not
    begin."""
    try:
        work()
    except OSError as error:
        if not is_full(error):
            raise
        remove_file(root.at("spare"))
        work()


def verb_status(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """The state of one attempt."""
    return member(attempt_of(root, body)), b""


def verb_touch(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Record contact with attempts."""
    clocks = as_object(body["attempts"]) or dict.fromkeys(body["attempts"])
    touched = [n for n, clock in clocks.items() if contact(attempt_by_name(root, n), clock)]
    return {"touched": touched}, b""


class WatchedAttempt:
    """One attempt that a `wait` request watches."""

    def __init__(self, attempt: Attempt, known: dict[str, Any]) -> None:
        self.attempt, self.known = attempt, known
        self.next_count = 0.0
        self.progress: tuple[int, int | None] | None = None
        contact(attempt, known.get("clock"))

    def look(self) -> dict[str, Any]:
        """Its state now. Checkpoints are counted more rarely, because that reads folders."""
        begun = time.monotonic()
        if begun >= self.next_count:
            self.progress = None
        found = guarded_member(self.attempt, self.progress)
        if self.progress is None:
            self.progress = found["checkpoints"], found["step"]
            self.next_count = time.monotonic() + max(1.0, 20 * (time.monotonic() - begun))
        return found

    def differs(self, found: dict[str, Any], log_too: bool) -> bool:
        """True if the state differs from what the caller knows."""
        names = ["state", "checkpoints", "step"] + ["log_size"] * log_too
        return any(name in self.known and self.known[name] != found[name] for name in names)


def verb_wait(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Answer when an attempt differs from what the caller knows, or at the timeout."""
    begun = time.monotonic()
    until = begun + seconds_of(body, "timeout", 0.0)
    loud = begun + seconds_of(body, "quiet", 1.0)
    watched = [
        WatchedAttempt(attempt_by_name(root, n), known) for n, known in body["known"].items()
    ]
    listener = select.poll()
    listener.register(1, 0)
    while True:
        now = time.monotonic()
        found = [w.look() for w in watched]
        if now >= until or any(w.differs(found[n], now >= loud) for n, w in enumerate(watched)):
            return {"attempts": found}, b""
        if listener.poll(max(1, int(min(0.1, until - now) * 1000))):
            os._exit(0)  # the caller hung up


def verb_kill(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """End the command, through its supervisor if there is one."""
    attempt = attempt_of(root, body)
    grace = seconds_of(body, "grace", 30.0)
    before = number_in(cell_words(attempt.at("cancel")))
    least = grace if before is None else min(before, grace)
    if is_locked(attempt.at("supervisor.lock")) and set_cell(attempt.at("cancel"), f"{least:.3f}"):
        ring(attempt)
    elif (state_of(attempt) or {}).get("engine"):  # its supervisor may live on another machine
        set_cell(attempt.at("cancel"), f"{least:.3f}")
        kill_leftovers(attempt)
    else:  # no supervisor lives to hear of it
        kill_leftovers(attempt)
    return member(attempt), b""


def kill_leftovers(attempt: Attempt) -> None:
    """Kill at once what is left of an attempt without a supervisor: nothing can record its exit any more, so waiting gains nothing."""
    state = state_of(attempt) or {}
    if state.get("boot_id") not in (None, boot_id()):
        return
    # Where no pid is known they are found by their mark: the folder may have been removed.
    belonging = Belonging(attempt, state)
    if not belonging.kill(KILL_VERB_PATIENCE):
        belonging.group.remove()


def evict(attempt: Attempt, seconds: float) -> None:
    """Ask the supervisor to end the command within that time; used when the machine has to be given back."""
    new = attempt.at(f"{EVICT}.new")
    write_file(new, f"{seconds:g}".encode("ascii"))
    os.replace(new, attempt.at(EVICT))
    ring(attempt)


def ring(attempt: Attempt) -> None:
    """Wake the supervisor; without a bell it looks every TICK."""
    try:
        fd = os.open(attempt.at("bell"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(fd, b"!")
    except OSError:
        pass
    finally:
        os.close(fd)


def verb_run(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Run a program of the machine to its end, for RUN_PATIENCE seconds at most."""
    import subprocess

    arguments = arguments_of(body.get("arguments"))
    program = find_program(arguments[0], path_of(None))
    if program is None:
        raise Refusal("unknown_program", f"there is no program {arguments[0]:.200} on PATH")
    patience = min(seconds_of(body, "timeout", RUN_PATIENCE), RUN_PATIENCE)
    with subprocess.Popen(
        [program, *arguments[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=os.path.expanduser("~"),
        start_new_session=True,
    ) as running:
        code: int | None = None
        try:
            out, err = running.communicate(timeout=patience)
            code = running.returncode
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            out, err = running.communicate()
    told = [said[:LARGEST_SAID].decode("utf-8", "replace") for said in (out, err)]
    return {"code": code, "out": told[0], "err": told[1]}, b""


def slice_of(body: dict[str, Any]) -> tuple[int, int]:
    """Offset and limit of a request."""
    return count_of(body, "offset", 0), min(count_of(body, "limit", LARGEST_READ), LARGEST_READ)


def verb_log(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Read the command's output from a byte on."""
    attempt = attempt_of(root, body)
    offset, limit = slice_of(body)
    try:
        fd = open_plain(attempt.at("log"))
    except OSError:
        return {"size": 0, "offset": offset}, b""
    try:
        data = os.pread(fd, limit, offset)
        return {"size": os.fstat(fd).st_size, "offset": offset}, data
    finally:
        os.close(fd)


def verb_read(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Read part of a file of the working folder."""
    attempt, path = attempt_of(root, body), text_of(body, "path")
    offset, limit = slice_of(body)
    expected = body.get("sha256")
    if expected is not None:
        hashes = Hashes(attempt)
        if hashes.of(path) != expected:
            raise Refusal("changed", f"{path} is not what it was: its hash is another")
        hashes.keep()
    fd = open_regular(attempt.work, path)
    try:
        data = os.pread(fd, limit, offset)
        return {"size": os.fstat(fd).st_size, "offset": offset}, data
    finally:
        os.close(fd)


def verb_gather(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Read many small files of the working folder in one answer: starting a process for each takes longer than reading it."""
    attempt, files = attempt_of(root, body), body["files"]
    paths = [text_of({"path": entry[0]}, "path") for entry in files]
    shas = shas_of({"files": [entry[1] for entry in files]}, "files")
    sizes = [count_of({"size": entry[2]}, "size") for entry in files]
    if len(files) > MOST_GATHERED or sum(sizes) > LARGEST_GATHERED:
        raise Refusal(
            "bad_request",
            f"files: at most {MOST_GATHERED} of together {LARGEST_GATHERED} bytes are expected",
        )
    found = [whole_inside(attempt.work, path, shas[n], sizes[n]) for n, path in enumerate(paths)]
    return {"whole": [data is not None for data in found]}, b"".join(filter(None, found))


def verb_keep(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Store files of the working folder as blobs; if one has changed, those before it are kept."""
    attempt, files = attempt_of(root, body), body["files"]
    paths = [text_of({"path": entry[0]}, "path") for entry in files]
    shas = shas_of({"files": [entry[1] for entry in files]}, "files")
    sizes = [count_of({"size": entry[2]}, "size") for entry in files]
    with HeldLock(root.lock("blobs.lock"), fcntl.LOCK_SH):
        for n, sha in enumerate(shas):
            if not has_blob(root, sha):
                keep_file(root, attempt.work, paths[n], sha, sizes[n])
    return {"kept": shas}, b""


def keep_file(root: Root, work: str, path: str, sha: str, size: int) -> None:
    """Store a copy, because the command may go on writing to the file."""
    with open(open_regular(work, path), "rb") as file:
        try:
            store_blob(root, sha, size, file)
        except Refusal as refusal:
            if refusal.body["code"] not in ("truncated", "bad_blob"):
                raise
            raise Refusal("changed", f"{path} is not what it was: its hash is another") from None


def verb_manifest(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """List the files and checkpoints that can be fetched."""
    attempt, what = attempt_of(root, body), text_of(body, "what")
    if what not in ("artefacts", "checkpoints", "all"):
        raise Refusal("bad_request", "what: artefacts, checkpoints or all")
    state = state_of(attempt) or {}
    answer: dict[str, Any] = {"files": {}, "refused": [], "refused_more": {}, "checkpoints": []}
    if what != "checkpoints" and os.path.isdir(attempt.path):
        with alone(attempt.path):
            answer.update(Artefacts(attempt, state).listed())
    if what != "artefacts":
        # Oldest first; only the newest if an answer does not hold them all.
        hashes, room = Hashes(attempt), LARGEST_LISTING
        found: list[dict[str, Any]] = []
        for checkpoint in reversed(checkpoints_of(attempt, state.get("checkpoints") or ())):
            told = listed_checkpoint(checkpoint, hashes)
            size = sum(map(told_size, told["files"])) if told else 0
            if told and size <= room:
                room -= size
                found.append(told)
        hashes.keep()
        answer["checkpoints"] = found[::-1]
    return answer, b""


class Artefacts:
    """The files that a job leaves behind, within its limits and within the size of an answer."""

    def __init__(self, attempt: Attempt, state: dict[str, Any]) -> None:
        limits: dict[str, Any] = state.get("limits") or {}
        most_mb = limits.get("artefact_mb")
        self.bytes_left = (20_000 if most_mb is None else int(most_mb)) << 20
        self.files_left = most_artefacts(state)
        self.room = LARGEST_LISTING
        self.hashes = Hashes(attempt)
        self.walk = Walk(attempt.work, max(MOST_ENTRIES, 2 * self.files_left))
        self.named: list[str] = state.get("artefacts") or []
        self.files: dict[str, list[Any]] = {}
        self.refused: dict[bool, list[list[str]]] = {True: [], False: []}
        """Refused files for which the job fails (True), and the others: each kind has room of its own."""
        self.refused_room = {True: REFUSED_TOGETHER, False: REFUSED_TOGETHER}
        self.more: dict[str, int] = {}
        """How many more of each kind are refused, beside those."""

    def listed(self) -> dict[str, Any]:
        """The files in order of their names, and those that are refused."""
        for path in self.named:
            self.walk.enter(path)
        for path, why in self.walk.refused.items():
            self._refuse(path, why)
        for path in sorted(self.walk.files):
            self._take(path, self.walk.files[path])
        self.hashes.keep()
        refused = self.refused[True] + self.refused[False]
        return {"files": self.files, "refused": refused, "refused_more": self.more}

    def _refuse(self, path: str, why: str) -> None:
        weighs = path in self.named or why not in NO_FILES
        self.refused_room[weighs] -= told_size(path)
        if self.refused_room[weighs] < 0 or len(self.refused[weighs]) >= MOST_REFUSED:
            self.more[why] = self.more.get(why, 0) + 1
        else:
            self.refused[weighs].append([path, why])

    def _take(self, path: str, found: os.stat_result) -> None:
        self.room -= told_size(path)
        if not self.files_left or self.room < 0:
            return self._refuse(path, "too_many")
        if found.st_size > self.bytes_left:
            return self._refuse(path, "too_large")
        try:
            sha = self.hashes.of(path)
        except PermissionError:
            return self._refuse(path, "unreadable")
        except OSError:
            return self._refuse(path, "broken")
        except Refusal:
            sha = None
        if sha is None:
            return self._refuse(path, "changing")
        self.files[path] = [sha, stat.S_IMODE(found.st_mode), found.st_size]
        self.files_left -= 1
        self.bytes_left -= found.st_size
        return None


def most_artefacts(state: dict[str, Any]) -> int:
    """How many files the job may leave."""
    limits: dict[str, Any] = state.get("limits") or {}
    most = limits.get("artefact_files")
    return min(100_000 if most is None else int(most), MOST_ARTEFACTS)


def told_size(path: str) -> int:
    """Most bytes that one file takes up in an answer."""
    return len(json.dumps(path)) + 96


def listed_checkpoint(checkpoint: Checkpoint, hashes: Hashes) -> dict[str, Any] | None:
    """One checkpoint with its manifest among its files; None if it is changing. The hashes are the manifest's claim: the client verifies
    them."""
    hashed = {checkpoint.path + "/" + p: e["sha256"] for p, e in checkpoint.files.items()}
    hashed[checkpoint.manifest] = None
    with contextlib.suppress(OSError, Refusal):  # it is another one by now
        hashed[checkpoint.manifest] = hashes.of(checkpoint.manifest)
    if hashed[checkpoint.manifest] is None:
        return None
    found = {path: checkpoint.found[path] for path in hashed}
    files = {path: [hashed[path], stat.S_IMODE(f.st_mode), f.st_size] for path, f in found.items()}
    return {"path": checkpoint.path, "step": checkpoint.step, "files": files}


def verb_release(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Report everything that an attempt still holds; clean if there is nothing."""
    attempt = attempt_of(root, body)
    uuids, share = gpus_of(body), body.get("share_mb")
    state = state_of(attempt) or {}
    holders = held_locks(attempt, uuids, share)
    belonging = Belonging(attempt, state)
    grouped = belonging.group.pids()
    for pid in sorted(belonging.alive()):
        what = "cgroup" if pid in grouped else "process"
        holders.append({"what": what, "detail": command_of(pid), "pid": pid})
    if uuids and share is None:
        holders.extend(memory_holders(root, body, uuids))
    if not holders:
        belonging.group.remove()
        for uuid in uuids:
            with HeldLock(root.lock("shares.lock")):
                path = os.path.join(root.shares(uuid), attempt.name)
                if not is_locked(path):
                    remove_file(path)
    return {"clean": not holders, "holders": holders}, b""


def gpus_of(body: dict[str, Any]) -> list[str]:
    """GPU UUIDs of a request, by which locks are named. Raises Refusal `bad_request`."""
    found = [str(uuid) for uuid in body.get("gpus") or ()]
    if not all(GPU_UUID.fullmatch(uuid) for uuid in found):
        raise Refusal("bad_request", "gpus: UUIDs as nvidia-smi shows them are expected")
    return found


def held_locks(attempt: Attempt, uuids: Sequence[str], share: object) -> list[dict[str, Any]]:
    """Locks of this attempt that are still held."""
    found: list[dict[str, Any]] = []
    if is_locked(attempt.at("supervisor.lock")):
        found.append({"what": "lock", "detail": "the supervisor has not ended"})
    for uuid in uuids:
        if share is None:
            path = attempt.root.gpu_lock(uuid)
            ours = read_text(path).strip() in ("", attempt.name)  # else it is another's by now
        else:
            path, ours = os.path.join(attempt.root.shares(uuid), attempt.name), True
        if ours and is_locked(path):
            found.append({"what": "lock", "detail": f"the lock of {uuid} is held"})
    return found


def command_of(pid: int) -> str:
    """The name of a process's program, without its arguments."""
    return read_text(f"/proc/{pid}/comm").strip()


def memory_holders(root: Root, body: dict[str, Any], uuids: Sequence[str]) -> list[dict[str, Any]]:
    """Whole GPUs that are not idle, or cannot be shown to be."""
    seen = look_at_gpus(root, body)
    found: list[dict[str, Any]] = []
    idle = body.get("idle_memory_mb")
    for uuid in uuids:
        gpu = seen.gpu(uuid)
        used = gpu["memory_used_mb"] if gpu else None
        if used is None and not uuid.startswith("MIG-"):
            detail = f"{uuid} cannot be read ({seen.status})"
            found.append({"what": "memory", "detail": detail})
        elif idle is not None and used is not None and used > idle:
            detail = f"{uuid} has {used} MiB in use; idle is {idle}"
            found.append({"what": "memory", "detail": detail})
        for app in seen.apps:
            if app["uuid"] == uuid:
                detail = "{} is used by {}".format(uuid, command_of(app["pid"]) or "a process")
                found.append({"what": "memory", "detail": detail, "pid": app["pid"]})
    return found


def verb_forget(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Remove everything of an attempt but the record that it existed."""
    attempt = attempt_of(root, body)
    with_spare(root, lambda: make_forgotten(root, attempt))
    return {"forgotten": True}, b""


def make_forgotten(root: Root, attempt: Attempt) -> None:
    """Record that it existed, then remove it."""
    with root.job_lock(attempt.job):
        state = state_of(attempt) or {}
        if is_locked(attempt.at("supervisor.lock")) or Belonging(attempt, state).alive():
            raise Refusal("still_running", f"{attempt.name} has processes; end it first")
        if os.path.exists(attempt.at(TOKEN)):
            raise Refusal("still_running", f"{attempt.name} waits for its engine; void it first")
        root.note_epoch(attempt.job, highest=attempt.epoch, forgotten=attempt.epoch)
        clear_away(attempt)


def clear_away(attempt: Attempt) -> None:
    """Rename the folder away at once, then remove as much of it as possible. `sweep` takes the rest."""
    away = attempt.root.at("attempts", f".gone-{attempt.name}-{os.urandom(4).hex()}")
    try:
        os.rename(attempt.path, away)
    except FileNotFoundError:
        return
    sync_folder(os.path.dirname(away))
    remove_or_name(away)


def verb_sweep(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Remove unwanted blobs, and what killed runners left. `older_than` spares what a launch under way has just sent."""
    keep = set(shas_of(body, "keep"))
    before = time.time() - seconds_of(body, "older_than", 3600.0)
    removed = remove_old_runners(root, text_of(body, "runner"), before)
    for folder, _folders, names in os.walk(root.at("blobs")):
        with HeldLock(root.lock("blobs.lock")):  # taken again for each folder: launches wait for it
            for name in names:
                path = os.path.join(folder, name)
                if name not in keep and changed_before(path, before):
                    remove_file(path)
                    removed += 1
    remove_stray_groups(root)
    for folder in (root.at("attempts"), root.at("epochs"), root.at("runners")):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if (name.startswith(".") or name.endswith(".new")) and changed_before(path, before):
                remove_or_name(path) if os.path.isdir(path) else remove_file(path)
    return {"removed": removed}, b""


def remove_old_runners(root: Root, current: str, before: float) -> int:
    """Remove all runners but this one and the newest other: during an upgrade both are asked for. A caller that misses one sends it
    again."""
    try:
        names = os.listdir(root.at("runners"))
    except OSError:
        return 0
    found = [name[:64] for name in names if RUNNER_FILE.fullmatch(name) and name[:64] != current]
    found.sort(key=lambda sha: modified(root.at("runners", sha + ".py")))
    gone = set(found[:-1])
    old = [root.at("runners", name) for name in names if name[:64] in gone]
    old = [path for path in old if changed_before(path, before)]
    for path in old:
        remove_file(path)
    return len(old)


def modified(path: str) -> float:
    """Modification time of a file; 0 if it is not there."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def changed_before(path: str, moment: float) -> bool:
    """True if it last changed at `moment` or before, by the one file time that cannot be set."""
    try:
        return os.lstat(path).st_ctime <= moment
    except OSError:
        return False


# --- launch: from a request to a claimed folder -------------------------------------------------


class Order:
    """A checked launch request. An ill-formed one raises Refusal; one that is well-formed but not possible, Refused, which ends that
    epoch."""

    def __init__(self, root: Root, body: dict[str, Any]) -> None:
        self.root, self.body = root, body
        self.attempt = attempt_of(root, body)
        self.rank, self.members = count_of(body, "rank", 0), count_of(body, "members", 1)
        self.gpus = gpus_of(body)
        self.share_mb = None if body.get("share_mb") is None else count_of(body, "share_mb")
        self.slot = None if body.get("slot") is None else count_of(body, "slot")
        self.deadman: float | None = seconds_of(body, "deadman", 0.0) or None
        self.heard = boot_clock()
        """Boot-clock time of the last contact: now, or when the control plane had last heard from here before it sent this."""
        if body.get("clock") is not None:
            self.heard = min(self.heard, seconds_of(body, "clock", 0.0))
        self.method: str | None = body.get("method")
        self.engine: str | None = text_of(body, "engine") if body.get("engine") else None
        self.engine_options: list[str] = as_list(body.get("engine_options"))
        self.spec: dict[str, Any] = body["spec"]
        self.limits: dict[str, Any] = self.spec.get("limits") or {}
        self.files: dict[str, list[Any]] = dict(self.spec.get("files") or {})
        resume: dict[str, Any] = body.get("resume") or {}
        self.resume_files: dict[str, list[Any]] = dict(resume.get("manifest") or {})
        self.resume_path: str | None = resume.get("path") or top_of(self.resume_files)
        self.environment: dict[str, str] = dict(body.get("environment") or {})
        self.secrets: dict[str, str] = dict(body.pop("secrets", None) or {})
        self.path = path_of(body.get("python"))
        self.memory_mb: dict[str, int | None] = {}
        """Memory of each GPU in MiB, filled in once they have been looked at."""
        if len(as_bytes(self.first_state())) > LARGEST_RECORD // 2:
            raise Refusal("bad_request", "its lists of artefacts and checkpoints are too long")

    def check(self) -> None:
        """Raises Refused with everything that is wrong with the spec."""
        if self.engine and (self.gpus or self.slot is not None or self.deadman is not None):
            raise Refusal("bad_request", "GPUs and slots are the engine's, and it has no deadman")
        if not are_words(self.engine_options):
            raise Refusal("bad_request", "engine_options are words of a command line")
        found = list(self._problems())
        if found:
            raise Refused("bad_spec", "; ".join(found))

    def _problems(self) -> Iterator[str]:
        try:
            arguments_of(self.spec.get("arguments"))
        except Refusal as refusal:
            yield str(refusal)
        for name, value in self.limits.items():
            if not (value is None or is_amount(value)):
                yield f"limits.{name}: a number from 0 is expected"
        own: dict[str, Any] = self.spec.get("environment") or {}
        for name in (*own, *self.secrets):
            if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
                yield f"the environment variable {name} is not for jobs to set"
        values: list[tuple[str, Any]] = [
            *own.items(),
            *self.environment.items(),
            *self.secrets.items(),
        ]
        for name, value in values:
            if not ENVIRONMENT_NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
                yield f"{name!r:.80} is no environment variable, or its value is no text"
        for name in self.spec.get("secrets") or ():
            if name not in self.secrets:
                yield f"the secret {name} has no value"
        yield from self._path_problems()

    def _path_problems(self) -> Iterator[str]:
        manifest = {**self.files, **self.resume_files}
        named = [self.resume_path] if self.resume_path else []
        for path in (*manifest, *self.artefacts, *self.checkpoints, *named):
            try:
                parts_of(path)
            except Refusal:
                yield f"{path!r:.200} is no path inside the working folder"
        for path, entry in manifest.items():
            if (
                len(entry) != 3
                or not SHA256.fullmatch(str(entry[0]))
                or any(type(n) is not int for n in entry[1:])
            ):
                yield f"{path!r:.200}: [sha256, mode, size] is expected"

    @property
    def artefacts(self) -> list[str]:
        """Paths of the artefacts in the working folder."""
        return list(self.spec.get("artefacts") or ())

    @property
    def checkpoints(self) -> list[str]:
        """Folders of checkpoints in the working folder."""
        return list(self.spec.get("checkpoints") or ())

    @property
    def grace(self) -> float:
        """Time in seconds between TERM and KILL."""
        grace = self.limits.get("grace_seconds")
        return 30.0 if grace is None else float(grace)

    def missing(self) -> list[str]:
        """Blobs that are not here."""
        wanted = {str(e[0]) for e in (*self.files.values(), *self.resume_files.values())}
        return sorted(sha for sha in wanted if not has_blob(self.root, sha))

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


def top_of(manifest: Iterable[str]) -> str | None:
    """The folder of a checkpoint's files: the one with the uppermost manifest.json."""
    found = [path.rpartition("/")[0] for path in manifest if path.split("/")[-1] == "manifest.json"]
    return min(found, key=len) if found else None


def path_of(python: object) -> str:
    """PATH of the command: the folder of the machine's python first, then PATH as a login has it."""
    path = os.environ.get("PATH") or "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if isinstance(python, str) and "/" in python:
        return (
            os.path.dirname(os.path.join(os.path.expanduser("~"), os.path.expanduser(python)))
            + ":"
            + path
        )
    return path


def verb_launch(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Start the command of an attempt, once."""
    order = Order(root, body)
    attempt = order.attempt
    if os.path.isdir(attempt.path) and not was_unbegun(attempt):
        contact(attempt, order.heard)
        return member(attempt), b""
    visible: str | None = None
    refused: dict[str, Any] | None = None
    try:
        order.check()
        missing = order.missing()
        if missing:
            raise Refusal(
                "missing_blobs", f"{len(missing)} blobs have to be sent first", missing=missing
            )
        check_room(order)
        if not order.engine:
            check_program(order)
            visible = resolve_gpus(order)
    except Refused as refusal:
        refused = refusal.record
    keep_spare(root)
    with root.job_lock(attempt.job):
        take_over_unbegun(attempt)
        if os.path.isdir(attempt.path):
            return member(attempt), b""
        known = root.highest(attempt.job)
        if attempt.epoch < known["highest"] or attempt.epoch <= known["forgotten"]:
            return too_late(attempt, known), b""
        root.note_epoch(attempt.job, highest=attempt.epoch)
        if refused:
            claim(attempt, {"phase": "refused", "refused": refused, **order.first_state()})
            return member(attempt), b""
        report = enqueue(order) if order.engine else begin(order, visible)
    if report is not None:
        select.select([report], [], [], LAUNCH_PATIENCE)  # readable: it spoke, or it ended
        os.close(report)
    return member(attempt), b""


def too_late(attempt: Attempt, known: dict[str, Any]) -> dict[str, Any]:
    """The answer to an epoch that has been overtaken; no folder is made for it, and none ever will be."""
    what = "forgotten" if attempt.epoch <= known["forgotten"] else "overtaken"
    message = f"epoch {attempt.epoch} was {what}: this machine has seen {known['highest']}"
    return {
        **blank(attempt),
        "state": "refused",
        "refused": {"code": "lower_epoch", "message": message, "highest": known["highest"]},
    }


def was_unbegun(attempt: Attempt) -> bool:
    """True if it was claimed by a launch that was killed before its command began."""
    state = state_of(attempt) or {}
    return (
        state.get("phase") == "claimed"
        and not state.get("engine")
        and not is_locked(attempt.at("supervisor.lock"))
        and not os.path.exists(attempt.at("exit.json"))
    )


def take_over_unbegun(attempt: Attempt) -> None:
    """Remove an unbegun attempt. The child of a supervisor begins only after the state says `running`, so nothing of it runs."""
    if not was_unbegun(attempt):
        return
    lock = take_lock(attempt.at("supervisor.lock"))
    if lock is not None:
        try:
            # Look again under its lock: the supervisor may have gone on and ended meanwhile.
            state = state_of(attempt) or {}
            if state.get("phase") == "claimed" and not os.path.exists(attempt.at("exit.json")):
                clear_away(attempt)
        finally:
            os.close(lock)


def claim(
    attempt: Attempt,
    state: dict[str, Any],
    heard: float = 0.0,
    fill: Callable[[str], None] | None = None,
) -> int | None:
    """Make the folder of an attempt atomically; OSError if the disk is full. Returns the lock of its supervisor, held, or None if it needs
    none. `fill` puts more into the folder."""
    above = make_folder(attempt.root.at("attempts"))
    new = os.path.join(above, f".new-{attempt.name}-{os.urandom(4).hex()}")
    os.mkdir(new, 0o700)
    lock = None
    try:
        if state["phase"] == "claimed":
            lock = take_lock(os.path.join(new, "supervisor.lock"))
            furnish(new, heard)
        if fill is not None:
            furnish(new, heard)
            fill(new)
        document = {
            "protocol": PROTOCOL,
            "job": attempt.job,
            "epoch": attempt.epoch,
            "boot_id": boot_id(),
            "claimed_at": time.time(),
            **state,
        }
        write_json(os.path.join(new, "state.json"), document)
        os.rename(new, attempt.path)
        sync_folder(above)
    except BaseException:
        remove_tree(new)
        if lock is not None:
            os.close(lock)
        raise
    return lock


def furnish(folder: str, heard: float) -> None:
    """Create all files that are written later, so that a full disk cannot prevent it."""
    cells = {"contact": f"{heard:.3f}", "heartbeat": f"{boot_clock():.3f}", "cancel": ""}
    for name, text in cells.items():
        write_file(os.path.join(folder, name), text.ljust(CELL).encode("ascii"))
    write_file(os.path.join(folder, "reserve"), b" " * RESERVE)
    for name in ("log", "tether"):
        write_file(os.path.join(folder, name), b"")
    os.mkdir(os.path.join(folder, "work"), 0o700)
    with contextlib.suppress(OSError):
        # Some file systems have no pipes: the supervisor then looks every TICK.
        os.mkfifo(os.path.join(folder, "bell"), 0o600)


def check_room(order: Order) -> None:
    """Check disk and memory, Refused if there is too little. With an engine only the disk: memory is that of another machine."""
    load = load_of(order.root)
    disk, ram = order.limits.get("disk_mb"), order.limits.get("ram_mb")
    ram = None if order.engine else ram
    if disk is not None and load["disk_free_mb"] < disk:
        raise Refused("disk_full", f"{load['disk_free_mb']} MB are free, {disk} are asked for")
    if ram is not None and load["ram_free_mb"] < ram:
        raise Refused("ram", f"{load['ram_free_mb']} MB of memory are free, {ram} are asked for")


def check_program(order: Order) -> None:
    """Check that the command's program is there, else Refused; one that is among the job's files is not looked for."""
    program = order.spec["arguments"][0]
    if "/" in program and not os.path.isabs(program):
        return
    if not find_program(program, order.path):
        where = "" if "/" in program else f"on PATH, which is {order.path}"
        raise Refused("unknown_program", f"there is no program {program:.200} {where}")


def find_program(program: str, path: str) -> str | None:
    """The program's path, found as a shell would; None if there is none."""
    places = [""] if "/" in program else path.split(":")
    for place in places:
        if not place.startswith("/") and "/" not in program:
            continue  # a name is never looked for in the working folder
        full = os.path.join(place, program)
        if os.path.isfile(full) and os.access(full, os.X_OK):
            return full
    return None


def resolve_gpus(order: Order) -> str:
    """The value of CUDA_VISIBLE_DEVICES: current indices in bus order; MIG devices by name."""
    if not order.gpus:
        return ""
    seen = look_at_gpus(order.root, order.body)
    for _ in range(GHOST_LOOKS):
        if not any(app["uuid"] in order.gpus and process(app["pid"]) is None for app in seen.apps):
            break
        # It ended between the tool's look and ours; or its pid means nothing in this container, and stays.
        seen = look_at_gpus(order.root, order.body)
    return ",".join(resolve_gpu(order, seen, uuid) for uuid in order.gpus)


def resolve_gpu(order: Order, seen: GpuReport, uuid: str) -> str:
    """One GPU's index or MIG name; Refused if it is missing, ill, or in use."""
    device = next((d for g in seen.gpus for d in g["mig_devices"] if d["uuid"] == uuid), None)
    gpu = seen.gpu(uuid)
    if gpu is None and device is None:
        message = f"no GPU {uuid} here: nvidia-smi {seen.status}"
        raise Refused("gpu_missing", message + (f" ({seen.said})" if seen.said else ""))
    if gpu is not None and gpu["problems"]:
        raise Refused("gpu_missing", "{} is ill: {}".format(uuid, "; ".join(gpu["problems"])))
    if gpu is not None and gpu["mig"]:
        raise Refused("gpu_missing", f"{uuid} is divided by MIG; name one of its devices")
    if seen.apps_status != "ok":
        raise Refused("gpu_missing", f"who uses {uuid} cannot be read: {seen.apps_status}")
    for app in seen.apps:
        if app["uuid"] == uuid:
            # Only another share of the same GPU may hold it too.
            attempt, pid = app["attempt"], app["pid"]
            holder = attempt or f"{command_of(pid) or 'a process'} (pid {pid})"
            if attempt is None:
                raise Refused(
                    "foreign_busy", "{} is used by {}".format(app["uuid"], holder), holder
                )
            if order.share_mb is None:
                raise Refused(
                    "gpu_busy", "{} is still used by {}".format(app["uuid"], holder), holder
                )
    order.memory_mb[uuid] = (gpu or device or {})["memory_mb"]
    return uuid if gpu is None else str(gpu["index"])


def take_gpus(order: Order) -> list[int]:
    """Take the locks of all GPUs and of the slot, or none of them."""
    taken: list[int] = []
    try:
        for uuid in sorted(order.gpus):
            taken.extend(take_gpu(order, uuid))
        if order.slot is not None:
            path = order.root.lock(f"slot-{order.slot}.lock")
            taken.append(take_named(path, order.attempt.name, f"slot {order.slot}"))
    except BaseException:
        for fd in taken:
            os.close(fd)
        raise
    return taken


def take_named(path: str, name: str, what: str) -> int:
    """Take an exclusive lock and write the holder's name into its file. Raises Refused."""
    fd = take_lock(path, fcntl.LOCK_EX, GPU_LOCK_PATIENCE)
    if fd is None:
        holder = read_text(path).strip() or "somebody"
        raise Refused("gpu_busy", f"{what} is held by {holder}", holder)
    os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):  # the disk is full; it is for people
        os.pwrite(fd, name.encode("ascii"), 0)
    return fd


def take_gpu(order: Order, uuid: str) -> list[int]:
    """Lock a GPU: exclusively for a whole one; for a share jointly, plus a file of the share's own that says how much it takes."""
    path = order.root.gpu_lock(uuid)
    if order.share_mb is None:
        return [take_named(path, order.attempt.name, uuid)]
    fd = take_lock(path, fcntl.LOCK_SH, GPU_LOCK_PATIENCE)
    if fd is None:
        holder = read_text(path).strip() or "somebody"
        raise Refused("gpu_busy", f"{uuid} is held by {holder}", holder)
    try:
        return [fd, take_share(order, uuid, order.share_mb)]
    except BaseException:
        os.close(fd)
        raise


def take_share(order: Order, uuid: str, share_mb: int) -> int:
    """Take a share if it fits beside those that are held. A share lasts as long as the lock on its file, so no counter has to be kept."""
    folder = order.root.shares(uuid)
    total = order.memory_mb.get(uuid) or 0
    with HeldLock(order.root.lock("shares.lock")):
        others = {name: share_held(os.path.join(folder, name)) for name in os.listdir(folder)}
        used = sum(others.values())
        if used + share_mb > total:
            holder = ", ".join(sorted(name for name, held in others.items() if held))
            message = f"{uuid} has {total} MiB, {used} are shared out to others ({holder})"
            raise Refused("gpu_busy", message, holder)
        fd = take_lock(os.path.join(folder, order.attempt.name))
        assert fd is not None, "a share is taken under the lock of its job"
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d" % share_mb, 0)
        return fd


def share_held(path: str) -> int:
    """MiB of a share that is held; the file of one that is not held is removed."""
    if is_locked(path):
        return int(number_in(cell_words(path)) or 0)
    remove_file(path)
    return 0


def enqueue(order: Order) -> None:
    """Claim the folder with everything in it that the engine needs to begin."""
    blobs = take_lock(order.root.lock("blobs.lock"), fcntl.LOCK_SH, LOCK_PATIENCE)
    if blobs is None or order.missing():
        raise Refusal("busy", "blobs are being swept; ask again")
    try:
        state = {"phase": "queued", **order.first_state()}
        claim(order.attempt, state, order.heard, lambda folder: fill_queued(order, folder))
    except Refused as refusal:
        claim(order.attempt, {"phase": "refused", "refused": refusal.record, **order.first_state()})
    finally:
        os.close(blobs)


BEGIN = """#!/bin/sh
exec python3 -I -S -X utf8 {runner} {folder}
"""


def fill_queued(order: Order, folder: str) -> None:
    """Write the job's files, this file, the script that the engine runs, and the token."""
    import shlex

    attempt, work = order.attempt, os.path.join(folder, "work")
    try:
        for manifest in (order.files, order.resume_files):
            for _ in lay_out(order.root, work, manifest):
                pass
    except OSError as error:
        if is_full(error):
            raise
        raise Refused("bad_spec", f"its files cannot be laid out: {error}") from None
    for path in order.artefacts[:1]:
        make_folder(os.path.dirname(os.path.join(work, path)))
    with open(__file__, "rb") as text:
        write_file(os.path.join(folder, "runner.py"), text.read())
    runner, own = shlex.quote(attempt.at("runner.py")), shlex.quote(attempt.path)
    begins = BEGIN.format(runner=runner, folder=own).encode()
    write_file(os.path.join(folder, "begin.sh"), begins)
    asked = {name: value for name, value in order.body.items() if name not in ("clock", "source")}
    token = {**asked, "root": os.path.abspath(order.root.path), "secrets": order.secrets}
    write_file(os.path.join(folder, TOKEN), as_bytes(token))
    write_file(os.path.join(folder, ENGINE_LOG), b"")
    write_file(os.path.join(folder, "supervisor.lock"), b"")


def supervise(folder: str) -> int:
    """Run by `begin.sh`: begin a queued attempt in the foreground, on the machine that its engine has chosen.

    Returns the exit status of the command, as shells have it."""
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can be answered
    known = read_json(os.path.join(folder, "state.json")) or {}
    if not known:
        return complain(
            f"{folder} is not there any more: it was removed, or is not on this machine"
        )
    attempt = attempt_by_name(
        Root(os.path.dirname(os.path.dirname(folder))), os.path.basename(folder)
    )
    lock = take_lock(attempt.at("supervisor.lock"), patience=LOCK_PATIENCE)
    taken = attempt.at(f"{TOKEN}.{os.urandom(4).hex()}")
    if lock is None or not take_token(attempt, taken):
        return complain(f"{attempt.name} was begun before, or voided; nothing is begun again")
    body = read_json(taken, LARGEST_TOKEN) or {}
    remove_file(taken)
    order = Order(attempt.root, body)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    Supervisor(order, visible, [lock], *nothing).run()
    ended = exit_of(attempt, "exit.json") or {}
    if ended.get("signal") is not None:
        return 128 + int(ended["signal"])
    return 1 if ended.get("code") is None else int(ended["code"])


def complain(message: str) -> int:
    """Write to the engine's log and succeed: an attempt that was handed out twice has not failed."""
    os.write(2, (message + "\n").encode("utf-8", "replace"))
    return 0


def begin(order: Order, visible: str | None) -> int | None:
    """Take locks, claim the folder, fork the supervisor. Returns a pipe that becomes readable once there is a state to see; None if
    refused."""
    attempt = order.attempt
    try:
        locks = take_gpus(order)
    except Refused as refusal:
        claim(attempt, {"phase": "refused", "refused": refusal.record, **order.first_state()})
        return None
    blobs = take_lock(order.root.lock("blobs.lock"), fcntl.LOCK_SH, LOCK_PATIENCE)
    if blobs is None or order.missing():
        raise Refusal("busy", "blobs are being swept; ask again")
    state = {"phase": "claimed", **order.first_state()}
    lock = claim(attempt, state, order.heard)
    assert lock is not None, "a claimed folder has a lock"
    hear, speak = os.pipe()
    between = os.fork()
    if between == 0:
        detach(order, visible or "", [lock, *locks], blobs, speak)
    for fd in (lock, *locks, blobs, speak):
        os.close(fd)
    os.waitpid(between, 0)
    return hear


def detach(order: Order, visible: str, locks: list[int], blobs: int, speak: int) -> NoReturn:
    """Fork a grandchild in its own session, adopted by init or a subreaper, which becomes the supervisor."""
    try:
        os.setsid()
        if os.fork() == 0:
            Supervisor(order, visible, locks, blobs, speak).run()
    except BaseException as error:  # noqa: BLE001
        # This process is a copy of one that has an answer to give: whatever happened, it must not go on as that.
        told = f"{type(error).__name__} at {lines_of(error)}: {error}\n"
        os.write(2, told.encode("utf-8", "replace"))
    finally:
        os._exit(0)


# --- the supervisor -----------------------------------------------------------------------------


def prctl(option: int, value: object) -> None:
    """Call the kernel's prctl; skipped if Python has no ctypes."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


SET_DEATH_SIGNAL, SET_NAME, SET_SUBREAPER = 1, 15, 36


class Supervisor:
    """Lives as long as the command and everything that it started. Apart from the cells, only the supervisor writes to its folder.

    After `settle` nothing more is imported: over days the machine's Python may be replaced by another one."""

    def __init__(
        self, order: Order, visible: str, locks: list[int], blobs: int, speak: int
    ) -> None:
        self.order, self.visible = order, visible
        self.attempt = order.attempt
        self.lock, self.inherited = locks[0], locks[1:]
        self.blobs, self.speak = blobs, speak
        self.state: dict[str, Any] = read_json(self.attempt.at("state.json")) or {}
        self.child = 0
        self.log: Log | None = None
        self.begun = time.monotonic()
        self.next_beat = self.ended_at = 0.0
        self.last_contact = order.heard
        self.ending: Ending | None = None
        self.killed = False
        self.tell_at = math.inf
        """When the command is asked to end, which happens once."""
        self.user = ""
        self.left = 0
        self.waker = self.bell = -1
        self.evicted = False

    def run(self) -> None:
        """Run the attempt from its files to its exit record."""
        self.settle()
        try:
            if self.order.engine:
                # It may have been laid out on another machine: from here on it belongs to this
                # one.
                self.state.update(
                    phase="claimed", boot_id=boot_id(), claimed_by=os.uname().nodename
                )
                write_json(self.attempt.at("state.json"), self.state)
                check_program(self.order)
            else:
                self.lay_out()
        except Refused as refusal:
            return self.refuse(refusal.record)
        except OSError as error:
            code = "disk_full" if is_full(error) else "bad_spec"
            return self.refuse({"code": code, "message": f"its files cannot be laid out: {error}"})
        os.close(self.blobs)
        # Its deadman may be over, or it was cancelled meanwhile.
        failure = self.reason() or self.start()
        if failure:
            return self.finish(failure, None)
        self.say()
        ended = self.watch()
        self.ended_at = time.monotonic()
        left = self.end_leftovers(ended)
        ending = self.ending or Ending("exited", "", 0.0)
        if left:
            names = ", ".join(f"{command_of(pid)} (pid {pid})" for pid in sorted(left))
            ending.message += f" still alive: {names}"
        return self.finish(ending, ended)

    # - before the command

    def settle(self) -> None:
        """Detach from the caller: streams, signals, folder, control group. Become the adopter of whatever the command leaves behind."""
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        if self.order.engine:
            signal.signal(signal.SIGTERM, self.evict)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.chdir("/")
        self.user = user_name()
        self.leave_streams()
        # Two things wake it early: the end of a child, and the bell.
        self.waker, wake = os.pipe()
        for fd in (self.waker, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, woken)
        with contextlib.suppress(OSError):
            # Open for writing too, so that it has no end while no request rings it.
            self.bell = os.open(self.attempt.at("bell"), os.O_RDWR | os.O_NONBLOCK)
        prctl(SET_SUBREAPER, 1)
        prctl(SET_NAME, b"groupwise-super")
        unit = unit_of(self.attempt)
        # An engine counts and ends what is in the group that it made.
        chosen = ["session"] if self.order.engine else methods()
        if self.order.method in chosen:
            chosen = chosen[chosen.index(self.order.method) :]
        scope = enter_scope(unit) if chosen[0] == "systemd" else None
        if chosen[0] == "systemd" and scope is None:
            chosen = chosen[1:]
        self.group = Group() if chosen[0] == "session" else make_group(unit, scope)
        self.group.limit(self.order.limits.get("ram_mb"))
        self.state["method"] = chosen[0]

    def leave_streams(self) -> None:
        """Close the request's channel, which ends once no process has it open. This process's own errors go to a file."""
        keep = {self.lock, self.blobs, self.speak, *self.inherited}
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.close(int(name))
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            path = self.attempt.at("supervisor.err")
            complaints = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            complaints = nothing
        for target, source in ((0, nothing), (1, nothing), (2, complaints)):
            os.dup2(source, target)

    def lay_out(self) -> None:
        """Put the files into the working folder, unless it is cancelled or its deadman expires meanwhile."""
        root, work, look_at = self.order.root, self.attempt.work, time.monotonic() + TICK
        for manifest in (self.order.files, self.order.resume_files):
            for _ in lay_out(root, work, manifest):
                if time.monotonic() >= look_at:
                    self.beat()
                    look_at = time.monotonic() + TICK
                    if self.reason():
                        return
        for path in self.order.artefacts[:1]:
            make_folder(os.path.dirname(os.path.join(self.attempt.work, path)))

    def evict(self, _signum: int, _frame: object) -> None:
        """Signal handler: the engine wants its machine back."""
        self.evicted = True

    def refuse(self, record: dict[str, Any]) -> None:
        """Record that nothing ran and nothing will."""
        remove_tree(self.attempt.work)
        self.state.update(phase="refused", refused=record)
        try:
            write_json(self.attempt.at("state.json"), self.state)
        except OSError:
            self.finish(Ending("spawn_failed", record["message"], 0.0, code=126), None)
        self.group.remove()
        self.say()

    def say(self) -> None:
        """Tell `launch` that there is a state to see."""
        os.close(self.speak)

    def start(self) -> Ending | None:
        """Fork the child, record it, let it begin. Returns why it could not begin, or None."""
        go_on, go = os.pipe()
        failed, failure = os.pipe()
        environment = command_environment(self.order, self.visible, self.user)
        tether = os.open(self.attempt.at("tether"), os.O_RDONLY)
        try:
            log = self.log = Log(self.attempt.at("log"))
        except OSError as error:
            message = f"its log cannot be opened: {error.strerror}"
            return Ending("spawn_failed", message, 0.0, code=126)
        try:
            self.child = os.fork()
        except OSError as error:
            return Ending(
                "spawn_failed", f"no process can be made: {error.strerror}", 0.0, code=126
            )
        if self.child == 0:
            for fd in (go, failed, self.lock, self.speak):
                os.close(fd)
            become(self.order, environment, go_on, failure, log.sink, [tether, *self.inherited])
        self.order.secrets.clear()
        environment.clear()
        for fd in (go_on, failure, tether):
            os.close(fd)
        try:
            self.record_child()
            with contextlib.suppress(BrokenPipeError):
                # If something has killed it, its end is seen like any other.
                os.write(go, b"!")
        except OSError as error:
            os.close(go)
            os.waitpid(self.child, 0)
            return Ending(
                "spawn_failed", f"its record cannot be written: {error.strerror}", 0.0, code=126
            )
        os.close(go)
        return self.spawn_failure(failed)

    def record_child(self) -> None:
        """Write the child's pid and start ticks to disk before the command begins."""
        self.group.take_in(self.child)
        if self.state["method"] == "cgroup" and not self.group.v2:
            self.state["method"] = "session"
        found = process(self.child)
        self.begun = time.monotonic()
        self.state.update(
            phase="running",
            pid=self.child,
            start_ticks=found.ticks if found else None,
            supervisor=os.getpid(),
            cgroup=self.group.record(),
            started_at=time.time(),
        )
        write_json(self.attempt.at("state.json"), self.state)

    def spawn_failure(self, failed: int) -> Ending | None:
        """Why the program could not begin; None once the pipe closes without a word, since then it has."""
        with open(failed, "rb") as pipe:
            words = pipe.read(16).split()
        if not words:
            return None
        os.waitpid(self.child, 0)
        number = int(words[0])
        code = 127 if number in (errno.ENOENT, errno.ENOTDIR) else 126
        program = self.order.spec["arguments"][0]
        return Ending("spawn_failed", f"{program:.200}: {os.strerror(number)}", 0.0, code=code)

    # - while it runs

    def watch(self) -> Any:
        """Wait until the child has ended and return how. It stays a zombie until all is over, so that its pid is not reused."""
        while True:
            ended = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended
            reap_adopted(but=self.child)
            self.beat()
            # TERM when there is a reason, KILL when its time is up, and KILL again until it works.
            reason = self.reason()
            now = time.monotonic()
            if reason and not self.ending:
                self.ending = reason
                # An engine that sent us TERM usually sends it to all processes of a job, and some programs take a second TERM as haste.
                self.tell_at = (now + reason.kill_at) / 2 if self.evicted else now
            elif reason and self.ending:
                self.ending.kill_at = min(self.ending.kill_at, reason.kill_at)
            if now >= self.tell_at:
                self.terminate()
                self.tell_at = math.inf
            if self.ending and time.monotonic() >= self.ending.kill_at:
                self.belonging().kill(patience=0.0)
                self.killed = True
            self.sleep()

    def sleep(self, due: float = TICK) -> None:
        """Sleep until something wakes it or the next look is due, and write the command's output to its log meanwhile."""
        if self.ending and not self.killed:
            due = min(due, max(0.02, self.ending.kill_at - time.monotonic()))
        until = time.monotonic() + due
        alarms = [fd for fd in (self.waker, self.bell) if fd >= 0]
        log = self.log
        assert log is not None, "a command has a log"
        woken = False
        while not woken and due > 0:
            ready = select.select([*alarms, *log.sources()], [], [], due)[0]
            log.write_down()
            for fd in set(alarms).intersection(ready):
                woken = True
                with contextlib.suppress(OSError):
                    os.read(fd, 4096)
            due = until - time.monotonic()

    def beat(self) -> None:
        """Write a sign of life, every HEARTBEAT seconds."""
        if time.monotonic() >= self.next_beat:
            with contextlib.suppress(OSError):  # the supervisor goes on without it
                set_cell(self.attempt.at("heartbeat"), f"{boot_clock():.3f}")
            self.next_beat = time.monotonic() + HEARTBEAT

    def reason(self) -> Ending | None:
        """Why the command has to end; None if it may go on."""
        now = time.monotonic()
        grace = number_in(cell_words(self.attempt.at("cancel")))
        if grace is not None:
            since = self.ending.since if self.ending else now
            return Ending("cancelled", "", since + grace)
        if self.ending:
            return None
        notice = number_in(cell_words(self.attempt.at(EVICT)))
        if notice is None and self.evicted:
            notice = min(self.order.grace, EVICT_GRACE)
        if notice is not None:
            message = "its machine is wanted back by whom it was rented from"
            if self.order.engine:
                message = f"{self.order.engine} ended it: its machine was wanted back, its time was up, or somebody told it to"
            return Ending("evicted", message, now + notice)
        limit = self.order.limits.get("time_seconds")
        if limit is not None and self.child and now - self.begun >= limit:
            message = f"its time limit of {limit:g} s was reached"
            return Ending("time_limit", message, now + self.order.grace)
        if self.order.deadman is not None and self.silence() >= self.order.deadman:
            message = f"no contact with the control plane for {self.order.deadman:g} s"
            # Counted from the contact: a machine that slept through all of it kills at once.
            grace = min(self.order.grace, DEADMAN_GRACE)
            left = self.order.deadman + grace - self.silence()
            return Ending("deadman", message, now + left)
        return None

    def silence(self) -> float:
        """Boot-clock seconds since the last contact."""
        told = number_in(cell_words(self.attempt.at("contact")))
        self.last_contact = max(self.last_contact, told or 0.0)
        return boot_clock() - self.last_contact

    def terminate(self) -> None:
        """Send TERM to the command's session, and CONT, because a stopped process has to continue to receive it."""
        for signum in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(OSError):  # it may have become another user's
                os.killpg(self.child, signum)

    def belonging(self) -> Belonging:
        """Everything that belongs to the attempt."""
        return Belonging(self.attempt, self.state, supervisor=os.getpid())

    # - after it

    def end_leftovers(self, ended: Any) -> dict[int, Process]:
        """End the processes that outlived the command; returns those that could not be ended."""
        belonging = self.belonging()
        if not belonging.alive():
            return {}
        # How the command ended is known from here on, whatever becomes of this process.
        self.hear_out(LAST_WORDS)
        with contextlib.suppress(OSError):
            ending = self.ending or Ending("exited", "", 0.0)
            write_json(self.attempt.at("outcome.json"), self.exit_record(ending, ended))
        if self.ending:
            belonging.terminate(but_session=self.child)
        else:
            self.left = len(self.wait_for_leavers(belonging))
            belonging.terminate(but_session=0)
        while time.monotonic() < self.leftovers_until() and belonging.alive():
            reap_adopted(but=self.child)
            self.beat()
            self.sleep(0.05)
        return belonging.kill(KILL_PATIENCE)

    def wait_for_leavers(self, belonging: Belonging) -> dict[int, Process]:
        """Processes that are left after LEAVING seconds; helpers that see the command end go by themselves."""
        until = time.monotonic() + LEAVING
        while True:
            found = belonging.alive()
            if not found or time.monotonic() >= until:
                return found
            reap_adopted(but=self.child)
            self.sleep(0.02)

    def hear_out(self, patience: float) -> None:
        """Write all output to the log, for at most `patience` seconds."""
        until = time.monotonic() + patience
        while self.log and (self.log.write_down() or self.log.unwritten):
            if time.monotonic() >= until:
                return
            if self.log.unwritten:
                self.beat()
                time.sleep(0.05)

    def leftovers_until(self) -> float:
        """When leftovers are killed: after the grace of a requested end, or soon after the command ended by itself."""
        reason = self.reason()
        if self.ending:
            return min(self.ending.kill_at, reason.kill_at if reason else self.ending.kill_at)
        own = self.ended_at + min(self.order.grace, LEFTOVER_GRACE)
        return min(own, reason.kill_at) if reason else own

    def finish(self, ending: Ending, ended: Any) -> None:
        """Reap the child, write the record, end."""
        if ended is not None:
            reap_adopted()
            self.hear_out(ROOM_PATIENCE if self.log and self.log.unwritten else LAST_WORDS)
        record = self.exit_record(ending, ended)
        # If its folder was removed, and with it the lock that it holds, a record has no place and
        # no reader.
        while os.fstat(self.lock).st_nlink > 0 and not save_exit(self.attempt, record):
            make_way(self.attempt)
            self.beat()
            time.sleep(TICK)
        self.group.remove()
        # A launch may still wait for the first word.
        with contextlib.suppress(OSError):  # it has been said
            self.say()

    def exit_record(self, ending: Ending, ended: Any) -> dict[str, Any]:
        """The record of how the command ended."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, signum = ending.code, None
        if ended is not None and ended.si_code == os.CLD_EXITED:
            code = ended.si_status
        elif ended is not None:
            signum = ended.si_status
        count, step = count_checkpoints(self.attempt, self.state)
        return {
            "code": code,
            "signal": signum,
            "reason": ending.reason,
            "message": ending.message.strip(),
            "oom_kill": self.group.oom_kills(),
            "seconds": round(time.monotonic() - self.begun, 3) if self.child else 0.0,
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
            "max_rss_mb": used.ru_maxrss >> 10,
            "finished_at": time.time(),
            "tail": self.log.tail() if self.log else "",
            "gpus": len(self.order.gpus) or len([each for each in self.visible.split(",") if each]),
            "checkpoints": count,
            "step": step,
            "leftovers": self.left,
        }


class Ending:
    """Why the command has to end, and when it is killed."""

    def __init__(self, reason: str, message: str, kill_at: float, code: int | None = None) -> None:
        self.reason, self.message, self.kill_at, self.code = reason, message, kill_at, code
        self.since = time.monotonic()


def woken(_signum: int, _frame: object) -> None:
    """Do nothing: by now Python has written to the pipe that wakes the supervisor."""


class Log:
    """Collects the output of a command and its processes. It comes through a pipe, because a process that opens /dev/stderr again would
    truncate a file.

    If the file cannot be written, the command blocks once the pipe is full; after LOG_PATIENCE the pipe is closed."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self.source, self.sink = os.pipe()  # the sink stays open, so that the pipe has no end
        os.set_blocking(self.source, False)
        self.unwritten = b""
        self.last = b""
        self.problem = ""
        self.stuck_at: float | None = None
        self.is_closed = False

    def sources(self) -> list[int]:
        """Descriptors to listen to; none while output is unwritten, or after the pipe is closed."""
        return [] if self.unwritten or self.is_closed else [self.source]

    def write_down(self) -> bool:
        """Move some output from the pipe to the file; False if there was none, or it could not be written."""
        if self.is_closed:
            return False
        if not self.unwritten:
            try:
                self.unwritten = os.read(self.source, LOG_PIECE)
            except BlockingIOError:
                return False
            self.last = (self.last + self.unwritten[-TAIL:])[-TAIL:]
        try:
            written = os.write(self.file, self.unwritten)
        except OSError as error:
            self.fail(error)
            return False
        self.unwritten, self.stuck_at, self.problem = self.unwritten[written:], None, ""
        return True

    def fail(self, error: OSError) -> None:
        """Note that the file cannot be written now; after LOG_PATIENCE give up."""
        now = time.monotonic()
        self.stuck_at = now if self.stuck_at is None else self.stuck_at
        self.problem = f"\n[its log could not be written: {error.strerror}]\n"
        if now - self.stuck_at >= LOG_PATIENCE:
            self.is_closed, self.unwritten = True, b""
            os.close(self.source)

    def tail(self) -> str:
        """The end of the output, as text, with a note if the log could not be written."""
        kept = TAIL - len(self.problem.encode())
        return self.last[-kept:].decode("utf-8", "replace") + self.problem


def save_exit(attempt: Attempt, record: dict[str, Any]) -> bool:
    """Write the exit record atomically and durably; False if that failed. On a full disk it overwrites the reserve in place, padded with
    blanks, and renames it."""
    try:
        write_json(attempt.at("exit.json"), record)
        return True
    except OSError:
        pass
    try:
        fd = os.open(attempt.at("reserve"), os.O_WRONLY | os.O_NOFOLLOW)
        with open(fd, "wb") as file:
            file.write(as_bytes(record).ljust(RESERVE))
            file.flush()
            os.fsync(file.fileno())
        os.rename(attempt.at("reserve"), attempt.at("exit.json"))
        sync_folder(attempt.path)
        return True
    except OSError:
        return False


def make_way(attempt: Attempt) -> None:
    """Make room for an exit record if a job has made a folder in its place, or has closed the folder around it."""
    with contextlib.suppress(OSError):
        os.chmod(attempt.path, 0o700)
    for path in (attempt.at("exit.json"), f"{attempt.at('exit.json')}.{os.getpid()}.new"):
        if os.path.isdir(path) and not os.path.islink(path):
            with contextlib.suppress(OSError):
                os.rename(path, f"{path}.{os.urandom(4).hex()}")


def command_environment(order: Order, visible: str, user: str) -> dict[str, str]:
    """The command's environment: a little of the machine's, then the job's, its secrets, and the runner's own variables."""
    attempt = order.attempt
    outer = os.environ.items() if order.engine else ()
    environment = {
        **{name: text for name, text in outer if name.startswith(ENGINE_PREFIXES)},
        "HOME": os.path.expanduser("~"),
        "USER": user,
        "LOGNAME": user,
        "LANG": os.environ.get("LANG") or "C.UTF-8",
        "PYTHONUNBUFFERED": "1",  # its output is a pipe, in which lines would wait for kilobytes of others
        **order.spec.get("environment", {}),
        **order.environment,
        **order.secrets,
        "PATH": order.path,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
        ATTEMPT_VARIABLE: attempt.name,
        FOLDER_VARIABLE: attempt.path,
    }
    if order.artefacts:
        environment["GROUPWISE_OUTPUT"] = os.path.join(attempt.work, order.artefacts[0])
    if order.resume_path:
        environment["RESUME_FROM"] = os.path.join(attempt.work, order.resume_path)
    if order.members > 1:
        environment["NODE_RANK"], environment["NNODES"] = str(order.rank), str(order.members)
        environment["GROUPWISE_RENDEZVOUS"] = attempt.name
    return environment


def become(
    order: Order,
    environment: dict[str, str],
    go_on: int,
    failure: int,
    log: int,
    inherited: list[int],
) -> NoReturn:
    """Runs in the child: wait for the supervisor's word, then become the command. The child dies with its supervisor."""
    try:
        os.setsid()
        prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL))
        if os.read(go_on, 1):
            exec_command(order, environment, log, inherited)
    except OSError as error:
        os.write(failure, b"%d" % (error.errno or errno.EIO))
    except BaseException:  # noqa: BLE001  (it must not go on as a second supervisor, whatever exec would not take)
        os.write(failure, b"%d" % errno.EINVAL)
    finally:
        os._exit(127)


def exec_command(
    order: Order, environment: dict[str, str], log: int, inherited: list[int]
) -> NoReturn:
    """Set up streams, folder and signals as a program expects them, then execute it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    for fd in inherited:
        os.set_inheritable(fd, True)
    os.chdir(order.attempt.work)
    os.umask(0o022)
    for signum in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGPIPE,
        signal.SIGCHLD,
        signal.SIGXFSZ,
    ):
        signal.signal(signum, signal.SIG_DFL)
    arguments = order.spec["arguments"]
    program = find_program(arguments[0], order.path) or arguments[0]
    os.execve(program, arguments, environment)


def enter_scope(unit: str) -> str | None:
    """Have the system's service manager put this process into a transient scope, out of the login session, which may be ended as a whole.

    Returns the scope's control group, or None. This process moves into a group below it, since only an empty group may hand its controllers
    on."""
    import subprocess

    names = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
    method = ("org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))")
    settings = ("2", "PIDs", "au", "1", str(os.getpid()), "Delegate", "b", "true", "0")
    call = ("busctl", "call", *names, *method, unit + ".scope", "fail", *settings)
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(call, stdin=quiet, stdout=quiet, timeout=SCOPE_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    until = time.monotonic() + SCOPE_PATIENCE
    while unit not in own_groups().get("v2", ""):
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
    scope = own_groups()["v2"]
    inner = make_leaf(scope, "supervisor")
    if inner:
        write_control(os.path.join(inner, "cgroup.procs"), str(os.getpid()))
    return scope


# --- one request --------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Root, dict[str, Any], BinaryIO], Answered]] = {
    "hello": verb_hello,
    "observe": verb_observe,
    "missing": verb_missing,
    "put": verb_put,
    "join": verb_join,
    "launch": verb_launch,
    "void": verb_void,
    "status": verb_status,
    "wait": verb_wait,
    "touch": verb_touch,
    "kill": verb_kill,
    "run": verb_run,
    "log": verb_log,
    "manifest": verb_manifest,
    "read": verb_read,
    "gather": verb_gather,
    "keep": verb_keep,
    "release": verb_release,
    "forget": verb_forget,
    "sweep": verb_sweep,
}
LONG = frozenset({"join", "keep", "manifest"})
"""Verbs that read as much as a job has made."""


def answer_request(body: dict[str, Any], payload: BinaryIO) -> NoReturn:
    """Answer one request; the bootstrap calls this after length and hash of the body agreed."""
    os.umask(0o077)
    try:
        if body.get("protocol") not in SPOKEN:
            raise Refusal("protocol", "this runner speaks {}".format(", ".join(map(str, SPOKEN))))
        verb = VERBS.get(text_of(body, "verb"))
        if verb is None:
            raise Refusal("unknown_verb", "there are: {}".format(", ".join(VERBS)))
        slow = body["verb"] in LONG or body.get("engine")
        with signs() if slow else contextlib.nullcontext():
            answer, data = verb(root_of(body), body, payload)
        answer = {"ok": True, **answer}
    except Refusal as refusal:
        answer, data = {"error": refusal.body}, b""
    except OSError as error:
        code = "disk_full" if is_full(error) else "os_error"
        answer, data = {"error": {"code": code, "message": str(error)}}, b""
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        # Bodies come from outside, and anything may be in them. Not the message: it may hold a value.
        where = lines_of(error)
        message = f"a field is missing or of another kind than expected ({type(error).__name__} at {where})"
        answer, data = {"error": {"code": "bad_request", "message": message}}, b""
    send_answer(answer, data)


@contextlib.contextmanager
def signs() -> Generator[None, None, None]:
    """Send signs of life while the request makes progress."""
    import threading

    working = threading.Lock()

    def give() -> None:
        told = Work.done
        with contextlib.suppress(OSError):  # the caller hung up; it will ask again
            while not working.acquire(timeout=SIGN_EVERY):
                told = sign(told)

    thread = threading.Thread(target=give)
    try:
        with working:
            with contextlib.suppress(RuntimeError):  # this user may have no more threads
                thread.start()
            yield
    finally:
        if thread.ident is not None:
            thread.join()  # nothing comes in between the bytes of the answer


def sign(told: int) -> int:
    """Send one sign if more was done than `told`; returns how much has been done by now."""
    done = Work.done
    if done != told:
        os.write(1, b"\n")
    return done


def lines_of(error: BaseException) -> str:
    """Line numbers of this file that an error came through."""
    found: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        found.append(str(trace.tb_lineno))
        trace = trace.tb_next
    return ", ".join(found[1:])


def send_answer(answer: dict[str, Any], data: bytes) -> NoReturn:
    """Write the answer and exit at once, without Python's clean-up."""
    text = as_bytes(answer)
    sha = hashlib.sha256(text).hexdigest()
    head = f"GROUPWISE-ANSWER {PROTOCOL} {len(text)} {sha} {len(data)}\n"
    whole = memoryview(head.encode("ascii") + text + data)
    try:
        while whole:
            whole = whole[os.write(1, whole) :]
    except OSError:
        pass  # the caller has gone
    os._exit(0)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1]))
