"""Prints jobs, machines and the state of a fleet in a terminal: tables and pairs, from the documents that the API returns."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.cells import cell_len

from groupwise.cli.printing import fold, print_pairs, print_section, print_table, print_text
from groupwise.core.terminal.quantities import counted, duration
from groupwise.core.terminal.text import command_line, one_line, shorten

Document = Mapping[str, Any]

MIN_REASON = 20
"""Cells that the reasons in the last column of a table get at least, if they need them."""
TIMES = frozenset({"age", "time"})
"""Columns of tables that show only the larger unit if the terminal is too narrow."""
WORDS = frozenset({"kind", "project", "where", "address", "model"})
"""Columns that are cut off if it is still too narrow."""
MIN_CELL = 8
"""Smallest width in cells to which these columns are cut."""
MIN_NAME = 12
"""Smallest width in cells to which a machine's name is shortened, as a last resort."""
LONGEST_COMMAND = 400
TAIL_LINES = 5
NOT_SHOWN = frozenset({"spec_hash", "seats", "tail", "state"})
"""Parts of events that appear elsewhere on the page or mean nothing to people; `--json` has them."""
NOT_FACTS = frozenset({"machine_time", "missed_at", "untracked"})
"""Facts of a machine that are for programs, or are shown in another form; `--json` has them."""
FINAL = frozenset({"completed", "failed", "cancelled"})


def clock_time(seconds: float | None) -> str:
    """Seconds since 1970 as local time, with seconds."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def stamp(text: str | None) -> float | None:
    """A timestamp of a document in seconds since 1970."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def megabytes(size: float | None) -> str:
    """A size in MB as text, such as `24 GB`."""
    if size is None:
        return ""
    if size >= 1e6:
        return f"{size / 1e6:.3g} TB"
    return f"{size / 1000:.3g} GB" if size >= 1000 else f"{size:.0f} MB"


# Jobs


def print_jobs(jobs: Sequence[Document], now: float) -> None:
    """Print a list of jobs, one per line."""
    has_several_projects = len({job["project"] for job in jobs}) > 1
    head = (
        "job",
        "status",
        "kind",
        *(("project",) if has_several_projects else ()),
        "where",
        "age",
        "time",
        "",
    )
    rows = [
        (
            job["job_id"],
            _status_text(job),
            job["job_type"],
            *((job["project"],) if has_several_projects else ()),
            _machine_text(job),
            duration(now - (stamp(job["created_at"]) or now)),
            _time_text(job, now),
            one_line(_remark(job)),
        )
        for job in jobs
    ]
    _print_with_remarks(head, rows)


def _print_with_remarks(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, least_name: int | None = None
) -> None:
    """Print a table whose last column gets the rest of the terminal's width. If that is too little, other columns shrink.
    Without a terminal nothing is cut.

    `least_name`: smallest width in cells of the first column, which shrinks last; None: it never shrinks.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        least_width = min(MIN_REASON, max(cell_len(row[-1]) for row in rows))
        rows = _fit_to_width(head, rows, width - least_width)
        if (
            least_name is not None
            and (excess := sum(_widths(head, rows)) + least_width - width) > 0
        ):
            room = max(least_name, max(cell_len(row[0]) for row in rows) - excess)
            # Cut in the middle: names of machines, which are ASCII, often differ only at their ends.
            suffix_length = (room - 1) // 2
            for index, row in enumerate(rows):
                if cell_len(row[0]) > room:
                    name = _truncate(row[0], room - suffix_length) + row[0][-suffix_length:]
                    rows[index] = _replace_cell(row, 0, name)
        longest = max(1, width - sum(_widths(head, rows)))
        rows = [(*row[:-1], _truncate(row[-1], longest)) for row in rows]
    print_table([head, *rows])


def _widths(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Widths of all columns but the last, including the gap after each."""
    columns = zip(*(row[:-1] for row in (head, *rows)), strict=True)
    return [max(map(cell_len, column)) + 2 for column in columns]


def _fit_to_width(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int
) -> list[tuple[str, ...]]:
    """The rows with cells cut to fit the width. The first column is kept complete, because people type its ids in again."""
    fitted = list(rows)
    if sum(_widths(head, fitted)) > width:
        time_columns = [column for column, name in enumerate(head) if name in TIMES]
        for column in time_columns:
            fitted = [
                _replace_cell(row, column, " ".join(row[column].split()[:2])) for row in fitted
            ]
    text_columns = [column for column, name in enumerate(head) if name in WORDS]
    while sum(widths := _widths(head, fitted)) > width:
        column = max(text_columns, key=widths.__getitem__)
        room = widths[column] - 3
        if room < max(MIN_CELL, cell_len(head[column])):
            break
        fitted = [_replace_cell(row, column, _truncate(row[column], room)) for row in fitted]
    return fitted


def _replace_cell(row: tuple[str, ...], index: int, cell: str) -> tuple[str, ...]:
    return (*row[:index], cell, *row[index + 1 :])


def _truncate(text: str, cells: int) -> str:
    """Cut a text to this number of terminal cells, with `…` at its end if something was cut off."""
    if cell_len(text) <= cells:
        return text
    text = text[: cells - 1]
    while cell_len(text) >= cells:
        text = text[:-1]
    return f"{text}…"


def _status_text(job: Document) -> str:
    if job["status"] == "running" and job["cancel_requested_at"] is not None:
        return "cancelling"
    code = job["exit_code"]
    exit_text = f" ({code})" if code not in (None, 0) and job["status"] == "failed" else ""
    return f"{job['status']}{exit_text}"


def _machine_text(job: Document) -> str:
    """Where it runs or has ended; empty while it waits, also between two attempts."""
    if job["assigned_vm"] is None or job["start_time"] is None:
        return ""
    return job["assigned_vm"] + ("" if job["gpu_index"] is None else f":{job['gpu_index']}")


def _time_text(job: Document, now: float) -> str:
    """How long the command of the newest attempt took, or has taken so far; empty if it has not started."""
    if job["running_at"] is None:
        return ""
    return duration(max(0.0, (job["ran_until"] or now) - job["running_at"]))


def _remark(job: Document) -> str:
    parts = [job["name"] or ""]
    if job["status"] == "pending":
        parts.append("; ".join(job["blocked_reasons"] or ()))
    elif job["status"] == "failed":
        parts.append(job["failure_reason"] or "")
    parts.append(job.get("warning") or "")
    if job["retry_count"] and job["status"] not in FINAL:
        parts.append(f"retry {job['retry_count']}")
    return " · ".join(text for text in parts if text)


def print_job(job: Document, now: float) -> None:
    """Print everything about one job."""
    arguments = job["arguments"]
    submitter = job["submitted_by"] or "SQL"
    print_pairs(
        [
            ("job", job["job_id"]),
            ("name", job["name"]),
            ("status", _status_text(job)),
            ("reason", job["failure_reason"] or _reason_of_stop(job)),
            *(("waits" if n == 0 else "", reason) for n, reason in enumerate(job["waiting"])),
            ("exit code", job["exit_code"] if job["status"] in FINAL else None),
            ("kind", job["job_type"]),
            ("command", arguments and shorten(command_line(arguments), LONGEST_COMMAND)),
            ("project", job["project"]),
            ("priority", job["priority"] or None),
            ("needs", needs_text(job["resources"] or {})),
            ("on", _machine_text(job)),
            ("submitted", f"{clock_time(stamp(job['created_at']))} by {submitter}"),
            ("started", clock_time(job["running_at"])),
            ("ended", clock_time(stamp(job["end_time"]))),
            ("took", _time_text(job, now) if job["end_time"] else None),
            ("retries", job["retry_count"] or None),
            ("resumed", job["generation"] or None),
            ("log", job["log_path"]),
            ("checkpoints", _checkpoint_text(job, now)),
        ]
    )
    for number, attempt in enumerate(job["attempts"], 1):
        _print_attempt(job["job_id"], number, attempt, now)
    # The attempts' events are shown above; --json has all events.
    of_job = [event for event in job["events"] if event["kind"].startswith("job.")]
    print_section("events", [event_line(event) for event in of_job])


def _reason_of_stop(job: Document) -> str | None:
    """The reason of the last `stop`; None if the job was not stopped, or no reason was given."""
    if job["status"] != "cancelled" and job["cancel_requested_at"] is None:
        return None
    kinds = ("job.cancelled", "job.cancel_requested")
    details: list[Document] = [e["detail"] or {} for e in job["events"] if e["kind"] in kinds]
    return next((str(d["reason"]) for d in reversed(details) if d.get("reason")), None)


def _checkpoint_text(job: Document, now: float) -> str | None:
    """The checkpoint from which the next attempt would resume, and those that could not be mirrored; None if there is none."""
    undamaged = [each for each in job["checkpoints"] if each["damaged_at"] is None]
    lines = [
        f"step {c['step']}, mirrored {duration(now - c['mirrored_at'])} ago" for c in undamaged[:1]
    ]
    if len(undamaged) > 1:
        lines.append(f"and {len(undamaged) - 1} older")
    members = [
        m for attempt in job["attempts"] if attempt["ended_at"] is None for m in attempt["members"]
    ]
    lines += [m["handle"]["not_mirrored"] for m in members if "not_mirrored" in m["handle"]]
    return "; ".join(lines) or None


def needs_text(resources: Document) -> str:
    """What a job asks for."""
    return ", ".join(
        "a prepared machine" if name == "prepared" else f"{name} {_value_text(value)}"
        for name, value in resources.items()
        if value not in (None, [], {}, "")
    )


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())  # type: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        items = [str(item) for item in value]  # type: ignore[reportUnknownVariableType]
        return ("; " if any(" " in item for item in items) else ",").join(items)
    return str(value)


def _print_attempt(job_id: str, number: int, attempt: Document, now: float) -> None:
    ended_at = attempt["ended_at"]
    started_at = attempt["running_at"]
    verdict = attempt["outcome"] or attempt["state"]
    if attempt["failure_class"]:
        verdict += f" ({attempt['failure_class']}{'' if attempt['charged'] else ', not charged'})"
    print_section(
        f"attempt {number} of the job, number {attempt['epoch']} of the fleet",
        [
            ("state", verdict),
            *(
                (f"rank {m['rank']}" if len(attempt["members"]) > 1 else "on", _member_text(m))
                for m in attempt["members"]
            ),
            ("placed", clock_time(attempt["created_at"])),
            ("running", clock_time(started_at)),
            ("ended", clock_time(ended_at)),
            ("took", duration((ended_at or now) - started_at) if started_at is not None else None),
            ("from step", attempt["resumed_from_step"]),
            ("machine", "does not answer" if attempt["contact"] != "ok" and not ended_at else None),
            ("cleanup", attempt["cleanup"] if ended_at and attempt["cleanup"] != "clean" else None),
            *_evidence_pairs(
                attempt["evidence"],
                f"groupwise fleet logs {job_id} --attempt {attempt['epoch']}",
            ),
        ],
    )


def _member_text(member: Document) -> str:
    gpus = ", ".join(str(gpu["index"]) for gpu in member["gpus"])
    return (
        f"{member['vm_id']}{f' GPU {gpus}' if gpus else ''} ({member['state'] or 'not spoken to'})"
    )


def _evidence_pairs(evidence: Document, log_command: str) -> list[tuple[str, str]]:
    """The evidence for the outcome of an attempt: each member's exit record, and the last lines of its log; all of it: `log_command`."""
    pairs = [("because", str(evidence["because"]))] if evidence.get("because") else []
    members: list[Document] = evidence.get("members") or []
    for member in members:
        prefix = f"rank {member['rank']} " if len(members) > 1 else ""
        if left_out := member.get("left_out"):
            pairs.append(
                (
                    f"{prefix}left out",
                    f"{left_out} links or the like; `groupwise fleet fetch` names them",
                )
            )
        record: Document | None = member.get("exit")
        if record is None:
            continue
        pairs.append((f"{prefix}exit", how_it_ended(record)))
        lines = [shorten(one_line(line), 160) for line in record["tail"].splitlines()]
        if len(lines) > TAIL_LINES:
            rank = f" --rank {member['rank']}" if member["rank"] else ""
            lines = ["…", *lines[-TAIL_LINES:], f"(the whole log: `{log_command}{rank}`)"]
        pairs += [("" if n else f"{prefix}said", line) for n, line in enumerate(lines)]
    other_evidence = {k: v for k, v in evidence.items() if k not in ("because", "members", "rank")}
    return [
        *pairs,
        *(
            (name, shorten(_value_text(value), LONGEST_COMMAND))
            for name, value in other_evidence.items()
        ),
    ]


def how_it_ended(record: Document) -> str:
    """How a command ended, from its exit record."""
    ending = (
        f"signal {record['signal']}" if record["signal"] is not None else f"code {record['code']}"
    )
    reason = "" if record["reason"] == "exited" else f", {record['reason'].replace('_', ' ')}"
    memory = ", some of it ended by the kernel for lack of memory" if record.get("oom_kill") else ""
    leftover_count = record.get("leftovers") or 0
    leftovers = (
        f"; ended {leftover_count} of its processes that were left" if leftover_count else ""
    )
    return ending + reason + memory + leftovers


def event_line(event: Document) -> tuple[str, str]:
    """The time of an event, and its text with the actor."""
    changes: dict[str, Any] = {**(event["after"] or {}), **(event["detail"] or {})}
    detail = {name: value for name, value in changes.items() if name not in NOT_SHOWN}
    status = detail.pop("status", None)
    title = (
        event["kind"]
        if status is None or str(event["kind"]).endswith(str(status))
        else f"{event['kind']} → {status}"
    )
    details = ", ".join(
        f"{k} {_value_text(v)}" for k, v in detail.items() if v not in (None, "", [], {})
    )
    text = one_line(f"{title} by {event['actor']}" + (f": {details}" if details else ""))
    return clock_time(event["at"]), shorten(text, 160) if sys.stdout.isatty() else text


# Machines


def print_machines(machines: Sequence[Document]) -> None:
    """Print a list of machines, one per line."""
    head = ("machine", "state", "address", "GPUs free", "model", "CPUs", "RAM", "jobs", "")
    rows: list[tuple[str, ...]] = []
    for vm in machines:
        if engine := vm.get("engine"):
            free_resources = f"{vm['available_slots']}/{vm['total_slots']} slots"
            models = {str(engine.get("gpu_model") or engine.get("name"))}
        else:
            free_resources = (
                f"{vm['available_gpus']}/{vm['total_gpus']}" if vm["total_gpus"] else "-"
            )
            models = {gpu["model"] for gpu in vm["gpus"] if gpu["model"]}
        rows.append(
            (
                vm["vm_id"],
                vm["state"],
                _address_text(vm),
                free_resources,
                ", ".join(sorted(models)),
                str(vm["facts"].get("cpus") or ""),
                megabytes(vm["facts"].get("ram_mb")),
                str(len(_jobs_on(vm))),
                one_line(_machine_remark(vm)),
            )
        )
    _print_with_remarks(head, rows, least_name=MIN_NAME)


def engine_line(vm: Document) -> str | None:
    """The scheduler (Slurm, Ray) that starts jobs for a machine, with its resources; None: the machine starts jobs itself."""
    engine: Document | None = vm["engine"]
    if engine is None:
        return None
    model, memory = engine.get("gpu_model"), engine.get("gpu_memory_mb")
    parts = [
        f"{vm['available_slots']} of {counted(vm['total_slots'], 'slot')} free",
        f"GPUs for a job: {engine.get('gpus') or 'none'}",
        *([model] if model else []),
        *([megabytes(memory)] if memory else []),
        *([shlex.join(engine["options"])] if engine.get("options") else []),
        *([engine["address"]] if engine.get("address") else []),
    ]
    return f"{engine.get('name')}: {', '.join(parts)}"


def _address_text(vm: Document) -> str:
    if vm["transport"] == "local":
        return "this machine"
    port = "" if vm["port"] == 22 else f":{vm['port']}"
    # The API hides the user from keys that are bound to projects.
    user = "" if vm["user"] is None else f"{vm['user']}@"
    return f"{user}{vm['ip_address']}{port}"


def _jobs_on(vm: Document) -> list[str]:
    holders = [holder for gpu in vm["gpus"] for holder in gpu["held_by"]] + vm["cpu_slots_held_by"]
    return sorted({holder["job_id"] or "a job of another project" for holder in holders})


def _machine_remark(vm: Document) -> str:
    if vm["state"] == "untrusted":
        fingerprint = vm["seen_fingerprint"]
        return (
            f"shows {fingerprint}; `groupwise fleet vm trust {vm['vm_id']}`"
            if fingerprint
            else vm["problem"] or ""
        )
    return vm["drain_reason"] or vm["problem"] or ""


def print_machine(vm: Document, now: float) -> None:
    """Print everything about one machine."""
    facts = vm["facts"]
    unreachable = vm["unreachable_since"]
    print_pairs(
        [
            ("machine", vm["vm_id"]),
            ("state", vm["state"]),
            ("problem", vm["problem"]),
            ("drained because", vm["drain_reason"]),
            ("silent for", duration(now - unreachable) if unreachable else None),
            ("address", _address_text(vm)),
            ("through", vm["jump"] and vm["jump"].get("host")),
            ("SSH key", vm["ssh_key_path"]),
            ("host key", vm["fingerprint"]),
            ("shows", vm["seen_fingerprint"]),
            ("work folder", vm["workdir"]),
            ("python", vm["python"]),
            ("engine", engine_line(vm)),
            ("labels", _value_text(vm["labels"])),
            ("CPU slots", vm["cpu_slots"]),
            ("jobs of", ", ".join(vm["projects"] or ())),
            ("deadman", duration(vm["deadman"]) if vm["deadman"] else None),
            ("probe", " ".join(vm["probe"] or ())),
            ("last polled", clock_time(stamp(vm["last_polled"]))),
            ("did not answer", clock_time(facts.get("missed_at"))),
            *(
                (f"  {name}", _value_text(value))
                for name, value in sorted(facts.items())
                if value not in (None, "", [], {}) and name not in NOT_FACTS
            ),
            ("jobs", ", ".join(_jobs_on(vm))),
            ("untracked", ", ".join(_stray_text(stray) for stray in facts.get("untracked") or ())),
        ]
    )
    if vm["gpus"]:
        print_text("")
        head = ("GPU", "model", "memory", "used", "busy", "°C", "state", "held by")
        print_table([head, *(_gpu_row(gpu) for gpu in vm["gpus"])])
    print_section("events", [event_line(event) for event in vm.get("events", ())])


def _stray_text(stray: Document) -> str:
    """A process or attempt on the machine that the fleet does not know."""
    since = f" since {clock_time(stray['since'])}" if stray.get("since") else ""
    pid = f" (pid {stray['pid']})" if stray.get("pid") else ""
    return f"{stray['what']} {stray['detail']}{pid}{since}"


def _gpu_row(gpu: Document) -> tuple[str, ...]:
    state = (
        f"quarantined: {gpu['quarantine_reason']}" if gpu["quarantine_reason"] else gpu["observed"]
    )
    if gpu["detail"] and not gpu["quarantine_reason"]:
        state += f" ({gpu['detail']})"
    holders: list[str] = []
    for holder in gpu["held_by"]:
        job = holder["job_id"] or "a job of another project"
        share = f" {megabytes(holder['share_mb'])}" if holder["share_mb"] else ""
        cleanup_note = f" (ended, {holder['cleanup']})" if holder["cleanup"] else ""
        holders.append(job + share + cleanup_note)
    return (
        f"{gpu['index']} {gpu['uuid']}",
        gpu["model"] or "?",
        megabytes(gpu["memory_mb"]),
        megabytes(gpu["memory_used_mb"]),
        "" if gpu["utilisation"] is None else f"{gpu['utilisation']} %",
        "" if gpu["temperature"] is None else str(gpu["temperature"]),
        state,
        ", ".join(holders),
    )


# The fleet as a whole


def print_status(fleet_status: Document) -> None:
    """Print the state of a fleet in a few lines, wrapped in a terminal."""
    counts = {status: count for status, count in fleet_status["jobs"].items() if count}
    machines = fleet_status["machines"]
    gpus = (
        f", {machines['gpus_available']} of {counted(machines['gpus'], 'GPU')} free"
        if machines["gpus"]
        else ""
    )
    age = machines.get("outdated_seconds")  # an older fleet does not say it
    outdated = "" if age is None else f"; nothing has looked at them for {duration(age)}"
    roles: dict[str, list[str]] = {}
    for process in fleet_status["processes"]:
        if process["alive"]:
            place = f"process {process['pid']} on {process['host']}"
            roles.setdefault(place, []).append(process["role"])
    jobs = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none yet"
    facts = {
        "jobs": [jobs],
        "machines": [
            f"{machines['ready']} of {machines['total']} ready{gpus}{outdated}"
            if machines["total"]
            else "none; `groupwise fleet vm add` adds one"
        ],
        "running": [f"{place}: {', '.join(names)}" for place, names in roles.items()],
    }
    margin = max(map(len, facts)) + 2
    for name, texts in facts.items():
        lines = [line for text in texts for line in fold(one_line(text), margin)]
        for number, line in enumerate(lines):
            print_text(f"{'' if number else name:<{margin}}{line}")
    if fleet_status["alarms"]:
        print_text("")
    for alarm in fleet_status["alarms"]:
        _print_folded("! ", alarm["message"])
        _print_folded("  → ", alarm["remedy"])


def _print_folded(mark: str, text: str) -> None:
    """Print a text after a mark, wrapped in a terminal."""
    for number, line in enumerate(fold(one_line(text), len(mark))):
        print_text(f"{mark if number == 0 else ' ' * len(mark)}{line}")


def print_projects(projects: Sequence[Document]) -> None:
    """Print a list of projects, one per line."""
    head = ("project", "weight", "waiting", "running", "GPUs", "GPUs at most", "waiting at most")
    print_table(
        [
            head,
            *(
                (
                    project["name"],
                    f"{project['weight']:g}",
                    str(project["waiting"]),
                    str(project["running"]),
                    str(project["gpus_in_use"]),
                    *(
                        "-" if project[limit] is None else str(project[limit])
                        for limit in ("max_gpus", "max_waiting")
                    ),
                )
                for project in projects
            ),
        ]
    )
