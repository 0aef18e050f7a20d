"""The state of an attempt, read from its files and locks. The job can write to these files too, so every record is checked first."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.cgroups import is_cgroup_of
from groupwise.jobs.hosts.runner.checkpoints import MAX_STEPS, checkpoints_of
from groupwise.jobs.hosts.runner.files import (
    TAIL,
    cell_words,
    modification_time,
    number_in,
    read_end,
    read_json,
    read_text,
    set_cell,
    size_of,
)
from groupwise.jobs.hosts.runner.locks import is_locked
from groupwise.jobs.hosts.runner.processes import AttemptProcesses, boot_clock, boot_id
from groupwise.jobs.hosts.runner.protocol import (
    GPU_UUID,
    are_words,
    as_list,
    as_object,
    is_amount,
    is_count,
    is_small,
    is_word,
)
from groupwise.jobs.hosts.runner.root import TOKEN
from groupwise.jobs.hosts.runner.work_folder import paths_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Attempt

MAX_GPUS = 256
"""Most GPUs that the state of one attempt may list."""
ENGINE_LOG = "engine.log"


def state_of(attempt: Attempt) -> dict[str, Any] | None:
    """The content of the state file, without fields that a supervisor could not have written: the job can write to it too. None if it is
    missing."""
    record = read_json(attempt.at("state.json"))
    if record is None:
        return None
    state = {
        name: value
        for name, value in record.items()
        if name in STATE_FIELDS and STATE_FIELDS[name](value)
    }
    limits, cgroups = as_object(record.get("limits")) or {}, as_object(record.get("cgroup")) or {}
    state["limits"] = {name: value for name, value in limits.items() if is_amount(value)}
    state["cgroup"] = {n: folder for n, folder in cgroups.items() if is_cgroup_of(attempt, folder)}
    for name in ("artefacts", "checkpoints"):
        state[name] = paths_in(record.get(name))
    if state.get("phase") == "refused" and "refused" not in state:
        del state["phase"]
    return state


def is_refusal(value: Any) -> bool:
    """True for a record in the form that `LaunchRefused` creates."""
    record = as_object(value) or {}
    texts = [record.get("code"), record.get("message"), record.get("holder", "")]
    return set(record) <= {"code", "message", "holder"} and all(map(is_word, texts))


def are_gpus(value: Any) -> bool:
    """True for a list of GPU UUIDs as in a launch request, MAX_GPUS at most."""
    if not isinstance(value, list) or len(as_list(value)) > MAX_GPUS:
        return False
    return all(isinstance(name, str) and GPU_UUID.fullmatch(name) for name in as_list(value))


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


def exit_of(attempt: Attempt, name: str) -> dict[str, Any] | None:
    """An exit record, without values that a supervisor could not have written. None if it is missing."""
    document = read_json(attempt.at(name))
    if document is None or document.get("reason") not in REASONS:
        return None
    values = {name: document.get(name) for name in EXIT_FIELDS}
    record = {name: value if EXIT_FIELDS[name](value) else None for name, value in values.items()}
    texts = {name: document.get(name) for name in ("reason", "message", "tail")}
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
    "step": lambda value: is_count(value, MAX_STEPS - 1),
    "leftovers": is_small,
}


def guarded_member(
    attempt: Attempt, progress: tuple[int, int | None] | None = None
) -> dict[str, Any]:
    """`member` for answers about many attempts: if one cannot be read, the others are still reported."""
    try:
        return member(attempt, progress)
    except Exception:  # noqa: BLE001  (its job may have put anything there)
        is_supervised = is_locked(attempt.at("supervisor.lock"))
        fields = {
            "state": "running" if is_supervised else "lost",
            "boot_id": boot_id(),
            "same_boot": True,
        }
        return {
            **absent_member(attempt),
            **fields,
            "survivors": None if is_supervised else count_survivors(attempt, {}),
        }


def member(attempt: Attempt, progress: tuple[int, int | None] | None = None) -> dict[str, Any]:
    """Everything known about an attempt: the `member` of `protocol.py`. `progress`: the number of checkpoints and the newest step, if the
    caller has just counted them."""
    # The order matters. Only the holder of the lock writes, so files that are read after the lock was found free are final.
    is_supervised = is_locked(attempt.at("supervisor.lock"))
    exit_record = exit_of(attempt, "exit.json")
    if exit_record is None and not is_supervised:
        exit_record = exit_of(attempt, "outcome.json")
    state = state_of(attempt)
    if state is None and not os.path.isdir(attempt.path):
        return absent_member(attempt)
    state = state or {}
    current_state = state_name(state, is_supervised, exit_record, os.path.exists(attempt.at(TOKEN)))
    if exit_record is not None and exit_record["finished_at"] is not None:
        # The age, because the caller cannot compare this machine's clock with others.
        exit_record["age"] = max(0.0, time.time() - exit_record["finished_at"])
    same_boot = state.get("boot_id") == boot_id()
    # The boot-clock time of the supervisor's last heartbeat.
    beat = number_in(cell_words(attempt.at("heartbeat")))
    if exit_record is not None and exit_record["checkpoints"] is not None:
        count, step = exit_record["checkpoints"], exit_record["step"]
    elif progress is not None:
        count, step = progress
    elif current_state in ("voided", "refused", "claimed", "queued"):
        count, step = 0, None
    else:
        count, step = count_checkpoints(attempt, state)
    answer = absent_member(attempt)
    answer.update({name: state.get(name) for name in MEMBER_FIELDS})
    answer.update(
        state=current_state,
        same_boot=same_boot,
        log_size=size_of(attempt.at("log")),
        heartbeat_age=None if beat is None or not same_boot else max(0.0, boot_clock() - beat),
        checkpoints=count,
        step=step,
        exit=exit_record if current_state == "exited" else None,
        gpus=state.get("gpus", []),
        refused=state.get("refused"),
        survivors=count_survivors(attempt, state) if current_state == "lost" else None,
    )
    if state.get("engine"):
        # To judge an attempt, a caller needs these in addition to the engine's own answer.
        log = "" if current_state in ("running", "exited") else read_end(attempt.at(ENGINE_LOG))
        answer.update(
            {
                "engine_options": state.get("engine_options") or [],
                "folder": attempt.path,
                "age": max(0.0, time.time() - state.get("claimed_at", 0.0)),
                "beat_age": max(0.0, time.time() - modification_time(attempt.at("heartbeat"))),
                "engine_says": log,
            }
        )
    return answer


MEMBER_FIELDS = (
    *("rank", "boot_id", "pid", "start_ticks", "method", "started_at"),
    *("share_mb", "slot", "engine"),
)


def absent_member(attempt: Attempt) -> dict[str, Any]:
    """The answer for an attempt that does not exist here."""
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


def state_name(
    state: dict[str, Any],
    is_supervised: bool,
    exit_record: dict[str, Any] | None,
    has_token: bool = False,
) -> str:
    """The state's name, from the table in `protocol.py`. `has_token`: whether the attempt has taken its token."""
    phase = state.get("phase")
    if phase in ("voided", "refused"):
        return phase
    if exit_record is not None:
        return "exited"
    if is_supervised:
        return "running" if phase == "running" else "claimed"
    if phase == "queued" and has_token:
        return "queued"
    return "lost" if state.get("boot_id") in (None, boot_id()) else "rebooted"


def count_checkpoints(attempt: Attempt, state: dict[str, Any]) -> tuple[int, int | None]:
    """Count the checkpoints; also returns the newest step. (0, None) if that fails: files written by the job must not break the exit
    record, or an answer about other attempts."""
    try:
        checkpoints = checkpoints_of(attempt, state.get("checkpoints") or ())
    except Exception:  # noqa: BLE001  (see above)
        return 0, None
    return len(checkpoints), checkpoints[-1].step if checkpoints else None


def held_locks(attempt: Attempt, uuids: Sequence[str], share: object) -> list[dict[str, Any]]:
    """Locks of this attempt that are still held."""
    locks: list[dict[str, Any]] = []
    if is_locked(attempt.at("supervisor.lock")):
        locks.append({"what": "lock", "detail": "the supervisor has not ended"})
    for uuid in uuids:
        if share is None:
            path = attempt.root.gpu_lock(uuid)
            # If the lock file names another attempt, that one has the GPU by now.
            ours = read_text(path).strip() in ("", attempt.name)
        else:
            path, ours = os.path.join(attempt.root.shares(uuid), attempt.name), True
        if ours and is_locked(path):
            locks.append({"what": "lock", "detail": f"the lock of {uuid} is held"})
    return locks


def count_survivors(attempt: Attempt, state: dict[str, Any]) -> int:
    """The number of living processes of an attempt whose supervisor has ended; 1 if only held locks show that there are any."""
    locks = held_locks(attempt, state.get("gpus", []), state.get("share_mb"))
    return len(AttemptProcesses(attempt, state).scan()) or int(bool(locks))


def record_contact(attempt: Attempt, clock: float | None = None) -> bool:
    """Record contact with the control plane, now or at `clock` (boot-clock seconds). A recorded contact is never replaced by an earlier
    one. False if it cannot be recorded."""
    now, path = boot_clock(), attempt.at("contact")
    stamp = now if clock is None else min(now, clock)
    previous = number_in(cell_words(path))
    if previous is not None and previous >= stamp:
        return True
    try:
        return set_cell(path, f"{stamp:.3f}")
    except OSError:  # do not fail: the same request names other attempts
        return False
