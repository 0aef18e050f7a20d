"""The runner is the only file that runs on a machine. It is copied there under its hash, needs only Python 3.8, and is started by
`bootstrap.py`, once for each request. It leaves files below `root`, and one supervisor process for each attempt.

This module specifies the protocol and its guarantees, and contains what every request needs: refusals, and checks of JSON and fields.
Requests come from outside, and a job may have written any record, so everything is checked. The other modules of this folder are the other
pieces of the file (`runner_text.py`): `requests` answers a request, `attempt_folder` creates its folder once, `launch` starts it,
`supervisor` runs and ends it, `state` reads its state.

Roles
    control plane   sends requests (`driver.py`); may be disconnected or die at any moment and ask again: every verb is repeatable
    runner          this file, answering one request; may be killed between any two instructions
    supervisor      also this file, detached: starts the command of one attempt, ends it if necessary, records how it ended
    command         the job itself; a child of the supervisor in its own session, and in its own control group if one can be created

An attempt is a folder `attempts/<job>.<epoch>`. It is prepared under another name and renamed into place, so it is complete or does
not exist. If several `launch` and `void` requests race for it, exactly one creates it and determines its state. The supervisor holds a lock
on `supervisor.lock` from before the folder gets its name until the supervisor ends. So files and lock together always show the state:

    absent     no folder. This proves nothing: a launch may be on its way. Only `void` ensures that the attempt never starts
    queued     laid out for an engine (Slurm, Ray), and its token `queued.json` exists. The first to take the token decides: the engine
               (`begin.sh`) starts the attempt, `void` voids it. An engine may start it on another machine: if the lock is not visible
               from here, `lost` and `rebooted` prove nothing, and the caller has to ask the engine as well
    claimed    lock held, command not started yet (its files may still be being laid out)
    running    lock held; pid, start ticks and boot id were on disk before the command started
    exited     an exit record exists
    lost       lock free, no exit record, same boot: the supervisor was killed. If `pid` is null the command never ran, and `launch`
               or `void` of that epoch takes the folder over. Otherwise the kernel killed the command with its supervisor, but processes
               that the command started may live: `survivors` counts them, `kill` ends them. Do that before the job runs anywhere else.
               A held lock of one of its GPUs also proves a living process, and counts as one if no other is visible
    rebooted   lock free, no exit record, started in another boot: none of its processes is left
    voided     `void` came first: this epoch never ran and never will
    refused    `launch` refused it: nothing ran, and this epoch never will; `refused` contains the reason

Requests and answers
    A request is the line `GROUPWISE <protocol> <length> <sha256>`, a JSON body, and raw bytes if the verb takes them. An answer is
    the line `GROUPWISE-ANSWER <protocol> <length> <sha256> <payload length>`, a JSON body with "ok": true or "error": {code, message},
    and raw bytes. An error means that nothing was changed; its codes: truncated, protocol, no_python, bad_runner, bad_request,
    unknown_verb, missing_blobs (`missing` lists them), bad_blob, busy, disk_full, not_found, changed, refused_path, still_running,
    os_error, internal. Every body has: protocol, root ("~" and relative paths: below HOME), verb, runner. A field that is not listed
    here is ignored. While a verb in LONG makes progress, it sends a newline every SIGN_EVERY seconds before its answer, as a sign of life.

    hello     → protocols, python, hostname, user, boot_id, home, root, filesystem, cpus, ram_mb, disk_free_mb, cgroup {v2, memory},
                methods, time. Locks are unreliable on a network file system (`filesystem` "nfs4" or the like): choose another root there
    observe   probe? (argument list; without it nvidia-smi or tegrastats, and amd-smi or rocm-smi, are looked for), probe_timeout? →
                boot_id, time, load, cpus, ram_mb, ram_free_mb, disk_free_mb, gpus [{vendor, index, uuid, visible, model, memory_mb,
                memory_used_mb, utilisation, temperature, mig, integrated, problems}], apps [{uuid, pid, memory_mb, attempt, graphics?}],
                probe {tool, status, apps, lines_not_read, lost, exit, said}, attempts [member], quarantined,
                unremoved [path]: folders of forgotten attempts that this user cannot remove completely.
                A value that could not be read is null, never 0. A MIG device is a GPU with the index of its card. An integrated GPU has
                the machine's memory, and how much of it is used is null. `graphics`: a process that draws and computes, as of a desktop.
                status (of the GPUs) and apps (of the processes on them) ∈ ok, absent, failed, hung, garbage. lost: lines that say that a
                GPU cannot be reached; the status is that of the others. An app with `attempt` null does not belong to this root. Here
                `survivors` is counted for exited attempts too: those processes could not be killed. quarantined [{what:
                "folder"|"process", detail, pid?}]: unknown to this root; never touched
    missing   sha256 [...] → missing [...]
    put       blobs [[sha256, size], ...], payload: the bytes of all, in order → stored
    join      blob [sha256, size], parts [[sha256, size], ...] → stored. For a blob that is too large for one put; the parts are removed
    launch    job, epoch, rank, members, spec, gpus [uuid], share_mb?, slot?, environment, secrets, resume? {manifest, step, path?},
                deadman?, clock?, python?, method?, probe?, probe_timeout?, engine?, engine_options? → member. Answers when the command
                runs, or as `claimed` after LAUNCH_TIMEOUT seconds: then poll. If repeated, it answers with the state and ignores the
                body. With `engine` (its name) nothing is started here: the attempt is laid out as `queued`, and `sh <folder>/begin.sh`,
                run by that engine on a machine with the same folder, starts it there and ends with its exit status. The engine then
                assigns the GPUs. engine_options [word]: options for the engine, reported with the attempt, with which any
                client can submit it again
    void      job, epoch, because? → member (voided; or its state, if it had started)
    status    job, epoch → member
    wait      known {"<job>.<epoch>": {state?, log_size?, checkpoints?, step?, clock?}}, timeout, quiet? → attempts [member], when one
                differs from `known`, or at the timeout. A log that only grew is reported after `quiet` seconds (1) at the earliest
    touch     attempts ["<job>.<epoch>", ...] or {"<job>.<epoch>": clock} → touched [...]
    kill      job, epoch, grace → member, at once. The supervisor does the rest: poll until the state is `exited`. Without a supervisor
                the runner kills the remaining processes before it answers
    log       job, epoch, offset, limit → size, offset, payload
    manifest  job, epoch, what ("artefacts", "checkpoints", "all") → files {path: [sha256, mode, size]}, refused [[path, why]],
                refused_more {why: number of unlisted ones}, checkpoints [{path, step, files}], complete ones only, oldest first; all
                paths relative to the working folder
    run       arguments, timeout? → code (null: it did not end in time), out, err. Runs a program of the machine, not
                a job: for example an engine's command
    read      job, epoch, path, offset, limit, sha256? → size, payload; with sha256, `changed` if the file has another hash by now
    gather    job, epoch, files [[path, sha256, size], ...], MAX_GATHERED of them at most, LARGEST_GATHERED bytes together → whole
                [true or false, ...], payload: the bytes of the whole ones, in order. The others have changed, or cannot be read: `read`
                gives the reason
    keep      job, epoch, files [[path, sha256, size], ...] → kept. These files of the working folder become blobs, so a checkpoint need
                not leave the machine if the next attempt starts here too. `changed` if one has another hash by now
    release   job, epoch, gpus, share_mb?, idle_memory_mb?, probe?, probe_timeout? → clean, holders [{what, detail, pid?}]; `what` ∈
                lock, process, cgroup, memory. A whole GPU with more than idle_memory_mb in use, or that cannot be read, is not clean
    forget    job, epoch → forgotten. The folder is removed, and no launch of this or a lower epoch is ever accepted again
    sweep     keep [sha256, ...], older_than? (seconds, 3600) → removed. Removes blobs that are not in `keep` and were neither sent nor
                asked for within that time, remains of killed runners, and all runners of earlier releases except the newest

    member    job, epoch, rank, state, boot_id, same_boot, pid, start_ticks, method, started_at, log_size, heartbeat_age, checkpoints,
                step, exit, refused, survivors, clock, place (the root's name, given at its creation; null: it has none), gpus,
                share_mb, slot (as launched), engine, engine_options, folder, age (seconds since its creation), beat_age (seconds since
                its supervisor's last heartbeat, by the file's time), engine_says (the end of the engine's log of it)
    exit      code, signal, reason ("exited", "cancelled", "evicted" by its engine or by the owner of its machine, who writes the
                remaining seconds into the file `evict` of its folder, "time_limit", "deadman", "spawn_failed"), message,
                oom_kill (null: no control group counts them), seconds, cpu_seconds, max_rss_mb, finished_at, tail, gpus (how many it
                held), checkpoints, step, leftovers (processes that outlived the command and had to be ended)
    refused   code (lower_epoch, gpu_busy, gpu_missing, foreign_busy, disk_full, ram, bad_spec, unknown_program), message, holder?

Guarantees
    - At most one command per epoch; none for an epoch lower than the highest that this machine has seen of the job, nor for a forgotten
      one. The child waits until its supervisor has written its pid to disk; if the supervisor dies first, the command never starts.
    - GPUs are locked by files (`locks/gpu-…`), exclusively or by shares whose sum fits; the command's processes inherit the lock, which
      reveals a leaked process. `launch` refuses a GPU with a process on it that is not ours.
    - When the command ends, or is ended, all processes that it started are ended too: TERM, then KILL. They are found by control
      group, by descent (the supervisor adopts orphans), by GROUPWISE_ATTEMPT in their environment, and by a file that they inherited
      open. Only then is the exit record written. A pid is signalled only if its start ticks and boot id are the recorded ones.
    - Nothing that a job writes, into its folders or over the records of its own attempt, breaks answers about other attempts: the runner
      waits for no pipe, limits every read, and accepts only values that a supervisor may have written. A checkpoint's manifest has at most
      LARGEST_MANIFEST bytes, and if there are very many manifests, only the newest are read.
    - Clocks: the wall clock decides nothing. `deadman` counts boot-clock seconds since the last contact, which is a `launch`, `wait` or
      `touch` that names the attempt. If it includes `clock` (from the last member that the caller received), the time counts from then:
      so lost answers cannot keep an attempt alive that its control plane believes dead, and a late launch cannot start one.
      At most DEADMAN_GRACE seconds after the deadman expires, KILL is sent.
    - The log holds all output of the command and its processes, to the byte: the supervisor takes it from a pipe and appends it.
    - A full disk: verbs answer `disk_full`; a command never starts without its record. Disk space is reserved for the exit record, and for
      `void` and `forget`: a failed launch can be voided and old attempts can be removed.
    - Secrets are in the memory of launch, supervisor and command (and in the command's /proc/…/environ), and in no file, with one
      exception: an attempt that waits for an engine has them in its token, which only its user can read, and which is removed when the
      attempt starts or is voided.
    - `limits.ram_mb` is compared with the free memory before a launch. It is enforced only if a memory control group can be
      created (v1 or v2; usually only by root); otherwise a command may exceed it.

Not guaranteed: after its supervisor was killed, a process that left the tree, has neither our environment nor inherited files, and is in
no control group, is visible only by its memory on a GPU, or not at all. Attempts of one Unix user are not isolated from each other.
"""

from __future__ import annotations

import gc
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn, Protocol

    class Readable(Protocol):
        """A source of a blob's bytes: an open file or the payload of a request."""

        def read(self, size: int, /) -> bytes:
            """Read at most `size` bytes; empty at the end."""
            ...

    VerbAnswer = tuple[dict[str, Any], bytes]

PROTOCOL = 1
SPOKEN = (1,)
"""Versions of the protocol whose requests are answered and whose folders can be read."""
SHA256 = re.compile(r"[0-9a-f]{64}")
GPU_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")
LONGEST_WORD = 4096


class RequestRejected(Exception):
    """The request is rejected, and nothing was changed."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.body: dict[str, Any] = {"code": code, "message": message, **more}


class LaunchRefused(Exception):
    """A launch that is not possible. It is stored as the result of its epoch."""

    def __init__(self, code: str, message: str, holder: str | None = None) -> None:
        super().__init__(message)
        self.record: dict[str, Any] = {"code": code, "message": message}
        if holder:
            self.record["holder"] = holder


NO_JSON = (ValueError, RecursionError, MemoryError)
"""Errors that `parse_json` raises for hostile text."""


def parse_json(data: bytes) -> Any:
    """Parse JSON that a job may have written. Garbage collection is switched off meanwhile: a million lists would trigger it again and
    again.

    Only UTF-8 is accepted: for bytes that look like another encoding Python would import a codec."""
    gc.disable()
    try:
        text = data.decode("utf-8")
        return json.loads(text, parse_int=parse_integer, parse_constant=reject_constant)
    finally:
        gc.enable()


def parse_integer(digits: str) -> int:
    """Parse an integer of at most 20 digits, about 64 bits: parsing a number of a million digits takes minutes."""
    if len(digits) > 20:
        raise ValueError("a number of that many digits")
    return int(digits)


def reject_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which are not JSON."""
    raise ValueError(name)


def as_object(value: Any) -> dict[str, Any] | None:
    """The value if it is a JSON object, else None."""
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def as_list(value: Any) -> list[Any]:
    """The value if it is a JSON list, else an empty list."""
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def as_bytes(document: dict[str, Any]) -> bytes:
    """Encode as JSON in ASCII. Escapes make this possible for any text, even a lone surrogate."""
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def text_of(body: dict[str, Any], name: str) -> str:
    """A field that must be a string. Raises RequestRejected `bad_request`."""
    value = body[name]
    if not isinstance(value, str):
        raise RequestRejected("bad_request", f"{name}: text is expected")
    return value


def count_of(body: dict[str, Any], name: str, default: int | None = None) -> int:
    """A field that must be a non-negative integer. Raises RequestRejected `bad_request`."""
    value = body.get(name, default)
    if type(value) is not int or value < 0:
        raise RequestRejected("bad_request", f"{name}: a whole number from 0 is expected")
    return value


def seconds_of(body: dict[str, Any], name: str, default: float) -> float:
    """A field that must be a number of seconds. Raises RequestRejected `bad_request`."""
    value = body.get(name)
    if value is None:
        return default
    if not is_amount(value):
        raise RequestRejected("bad_request", f"{name}: seconds are expected")
    return float(value)


def is_count(value: Any, largest: int = 1 << 62) -> bool:
    """True for an integer from 0 to `largest`."""
    return type(value) is int and 0 <= value <= largest


def is_small(value: Any) -> bool:
    """True for a count that fits into 31 bits."""
    return is_count(value, (1 << 31) - 1)


def is_word(value: Any) -> bool:
    """True for a string of at most LONGEST_WORD characters."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD


def are_words(value: Any) -> bool:
    """True for a list of strings, each of at most LONGEST_WORD characters."""
    return isinstance(value, list) and all(map(is_word, as_list(value)))


def is_amount(value: Any) -> bool:
    """True for a number from 0 to 1e12."""
    return type(value) in (int, float) and 0 <= value < 1e12


def is_sha(value: Any) -> bool:
    """True for a SHA-256 in lower-case hex."""
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def is_utf8(text: str) -> bool:
    """False for a string with lone surrogates, by which Python represents bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shas_of(body: dict[str, Any], name: str) -> list[str]:
    """A list of hashes from a request. Raises RequestRejected `bad_request`."""
    hashes = [str(sha) for sha in body[name]]
    if not all(SHA256.fullmatch(sha) for sha in hashes):
        raise RequestRejected("bad_request", f"{name}: sha256 in hex are expected")
    return hashes


def blobs_of(entries: Sequence[Any], name: str) -> list[tuple[str, int]]:
    """SHA-256 and size in bytes of each blob in a field. Raises RequestRejected `bad_request`."""
    shas = shas_of({name: [entry[0] for entry in entries]}, name)
    return [(sha, count_of({"size": entries[n][1]}, "size")) for n, sha in enumerate(shas)]


def gpus_of(body: dict[str, Any]) -> list[str]:
    """The GPU UUIDs in a request; locks are named by them. Raises RequestRejected `bad_request`."""
    uuids = [str(uuid) for uuid in body.get("gpus") or ()]
    if not all(GPU_UUID.fullmatch(uuid) for uuid in uuids):
        raise RequestRejected("bad_request", "gpus: UUIDs as nvidia-smi shows them are expected")
    return uuids


def arguments_of(value: object) -> list[str]:
    """Check an argument list. Raises RequestRejected `bad_request`."""
    arguments: list[str] = []
    for item in as_list(value):
        if not isinstance(item, str) or "\0" in item:
            raise RequestRejected("bad_request", "an argument list holds texts without NUL")
        arguments.append(item)
    if not arguments or not arguments[0]:
        raise RequestRejected("bad_request", "an argument list with at least a program is expected")
    return arguments


class RequestProgress:
    """Counts the work that the current request has done. Signs of life are sent only while the count grows, so a hanging disk stops
    them."""

    done = 0


def traceback_summary(error: BaseException) -> str:
    """The functions in an error's traceback, each with the line counted from the function's first line: `verb_put+4, store_blob+11`."""
    frames: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_name}+{trace.tb_lineno - code.co_firstlineno}")
        trace = trace.tb_next
    return ", ".join(frames[1:])
