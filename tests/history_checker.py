"""Checks a recorded history against the fleet's guarantees, without using the fleet's own code (a Jepsen-style checker).

The test and its fake trainers write the history: trainers write when they start, step and stop; the test writes what it asked for, what
it did to machines and what it was told, and at the end what it finds. A record is a flat JSON object; `at` orders them (seconds or
numbers, of one clock), `what` says what happened:

    accepted            job [time_limit]                    somebody was told that the job is taken
    start               job epoch rank vm gpus [share_mb members resumed]   its command begins, as one of so many, from that step
    step                job epoch rank vm                   it is alive
    child               job epoch rank vm                   something that it left behind is alive
    clash               job epoch over holder               somebody else had the same GPU, or ran the same, at that very moment
    saved               job epoch step                      a checkpoint is complete
    made                job epoch rank path data            it has written that, to be fetched
    stop                job epoch rank vm code [why]        it has ended; a negative code is a signal. `why` cancelled: the runner ended it
    gone                job epoch rank vm                   the test killed it, so that it could write no stop
    refused             job epoch rank vm                   its runner would not begin it
    supervisor_killed   job epoch rank vm                   the test killed what watches over it
    power_off           vm                                  everything that ran there is gone
    cancel_requested    job
    lost                vm                                  an operator says that it does not come back
    status              job status generation [exit_code]   what somebody was told, or found
    wrote               job epoch rank data                 what the command printed, in pieces
    mirrored            job epoch rank data [whole]         what the fleet has of that; `whole` when the attempt is over
    kept                job epoch rank path data            what the fleet has of that
    reserved            job epoch vm gpu                    a reservation that is open at the end
    left                job epoch vm                        a process that is there at the end
    attempt             job epoch generation vms outcome failure charged   what the fleet says of an attempt in the end

`violations` describes every guarantee that the history violates. A start without an end runs until the history ends: what nobody saw
ending is taken to have gone on.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Record = Mapping[str, Any]

FINAL = {"completed", "failed", "cancelled"}
RETRIED_FROM = {"failed", "cancelled"}
EXCUSES = {"refused", "supervisor_killed"}
"""After one of these the fleet may end the rest of an attempt."""
STOP_DELAY_S = 1.0
"""Seconds that may pass between a request to end something and its last sign of life."""
WRITE_DELAY_S = 5.0
"""Seconds after an end in which a power loss may also lose the record of that end."""
CHARGED = 3
"""Number of attempts of one generation that may end by the job's own fault: the first and two retries."""
USER_ERRORS = {2, *range(64, 79)}


@dataclass(frozen=True, slots=True)
class Execution:
    """One member of one attempt, from its start to its end."""

    job: str
    epoch: int
    rank: int
    vm: str
    gpus: tuple[str, ...]
    share_mb: int | None
    members: int
    begin: float
    end: float
    code: int | None
    """The exit code; None: nobody saw it stop."""
    why: str | None
    seen: float
    """When one of its processes was last seen alive, also after its end."""

    def __str__(self) -> str:
        return f"{self.job}.{self.epoch} rank {self.rank} on {self.vm}"

    def overlaps(self, other: Execution) -> bool:
        """True if both were alive at the same time."""
        return self.begin < other.until and other.begin < self.until

    @property
    def until(self) -> float:
        """The last time at which one of its processes was certainly alive."""
        return max(self.end, self.seen)

    def alive(self, at: float) -> bool:
        """True if one of its processes was alive at that time."""
        return self.begin <= at < self.until


def violations(
    history: Iterable[Record],
    *,
    settled: bool = True,
    gpu_memory_mb: int | None = None,
) -> list[str]:
    """One sentence for each violation. `settled`: at the end everything had time to finish."""
    ordered = sorted(history, key=lambda r: r["at"])
    runs = _executions(ordered)
    return [
        *_twice(runs),
        *_overlapping(ordered, runs),
        *_clashes(ordered),
        *_shared_gpus(runs, gpu_memory_mb),
        *_not_final(ordered),
        *_wrong_outcomes(ordered, runs),
        *_ran_again(ordered, runs),
        *_alive_after_cancel(ordered, runs),
        *_ended_without_cause(ordered, runs),
        *_wrong_logs(ordered),
        *_wrong_artefacts(ordered),
        *_wrong_resumes(ordered),
        *_wrong_ends(ordered, runs),
        *_charged_too_often(ordered),
        *(_never_finished(ordered) if settled else ()),
        *(_leaked(ordered) if settled else ()),
        *(_left(ordered) if settled else ()),
    ]


def assert_no_violations(history: Iterable[Record], **how: Any) -> None:
    """Fails with all violations and the history."""
    kept = list(history)
    found = violations(kept, **how)
    told = "\n".join(json.dumps(record, default=str) for record in kept)
    assert not found, "\n".join(found) + "\n\n" + told


# ---------------------------------------------------------------------------------------------------------------------------------------
# Who ran when
# ---------------------------------------------------------------------------------------------------------------------------------------


def _executions(ordered: Sequence[Record]) -> list[Execution]:
    seen = {_member(r): r["at"] for r in ordered if r["what"] == "child"}
    runs: list[Execution] = []
    for index, start in enumerate(ordered):
        if start["what"] == "start":
            runs.append(
                Execution(
                    *(start["job"], start["epoch"], start["rank"], start["vm"]),
                    *(tuple(start["gpus"]), start.get("share_mb"), start.get("members", 1)),
                    *(start["at"], *_end_of(start, ordered[index + 1 :])),
                    seen.get(_member(start), 0.0),
                )
            )
    return runs


def _member(record: Record) -> tuple[Any, ...]:
    return record["job"], record["epoch"], record["rank"], record["vm"]


def _end_of(start: Record, later: Sequence[Record]) -> tuple[float, int | None, str | None]:
    for record in later:
        what = record["what"]
        if what == "power_off" and record["vm"] == start["vm"]:
            return record["at"], None, "power_off"
        if what in ("stop", "gone") and _member(record) == _member(start):
            return record["at"], record.get("code"), record.get("why", what)
    return math.inf, None, None


def _by(what: str, records: Iterable[Any]) -> dict[Any, list[Any]]:
    """Group runs or records by this field, in their order."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for each in records:
        found[each[what] if isinstance(each, Mapping) else getattr(each, what)].append(each)
    return found


# ---------------------------------------------------------------------------------------------------------------------------------------
# What was promised
# ---------------------------------------------------------------------------------------------------------------------------------------


def _twice(runs: Sequence[Execution]) -> list[str]:
    count = Counter((run.job, run.epoch, run.rank) for run in runs)
    return [
        f"{job}.{epoch} rank {rank}: the same member of the same attempt began twice"
        for (job, epoch, rank), times in count.items()
        if times > 1
    ]


def _overlapping(ordered: Sequence[Record], runs: Sequence[Execution]) -> list[str]:
    """Executions on a machine that an operator declared lost before the other one started are not counted."""
    lost = _by("vm", (r for r in ordered if r["what"] == "lost"))

    def given_up(one: Execution, other: Execution) -> bool:
        return any(one.begin < r["at"] <= other.begin for r in lost.get(one.vm, ()))

    return [
        f"{one} and {other}: two executions of one job at the same time"
        for mine in _by("job", runs).values()
        for index, one in enumerate(mine)
        for other in mine[index + 1 :]
        if one.epoch != other.epoch
        and one.overlaps(other)
        and not given_up(one, other)
        and not given_up(other, one)
    ]


def _clashes(ordered: Sequence[Record]) -> list[str]:
    lost = _by("vm", (r for r in ordered if r["what"] == "lost"))
    where = {(r["job"], r["epoch"]): r["vm"] for r in ordered if r["what"] == "start"}

    def given_up(record: Record) -> bool:
        """True if the job's other execution is on a machine that an operator had declared lost."""
        job, epoch, *_ = record["holder"].rsplit(".", 2)
        before = lost.get(where.get((job, int(epoch))), ())
        same = job == record["job"] and not record["over"].startswith("gpu")
        return same and any(r["at"] <= record["at"] for r in before)

    return [
        f"{r['job']}.{r['epoch']} found {r['over']} in the hands of {r['holder']}"
        for r in ordered
        if r["what"] == "clash" and not given_up(r)
    ]


def _shared_gpus(runs: Sequence[Execution], memory_mb: int | None) -> list[str]:
    users: dict[tuple[str, str], list[Execution]] = defaultdict(list)
    for run in runs:
        for gpu in run.gpus:
            users[run.vm, gpu].append(run)
    found: list[str] = []
    for (vm, gpu), mine in users.items():
        for index, one in enumerate(mine):
            beside = [o for o in mine[:index] if o.alive(one.begin)]
            whole = [o for o in beside if o.share_mb is None or one.share_mb is None]
            found += [f"{one} and {o}: both have GPU {gpu} of {vm}" for o in whole]
            used = sum(o.share_mb or 0 for o in (*beside, one))
            if memory_mb is not None and not whole and used > memory_mb:
                found.append(f"{one}: shares of GPU {gpu} of {vm} come to {used} of {memory_mb} MB")
    return found


def _statuses(ordered: Sequence[Record]) -> dict[str, list[Record]]:
    return _by("job", (r for r in ordered if r["what"] == "status"))


def _not_final(ordered: Sequence[Record]) -> list[str]:
    found: list[str] = []
    for job, told in _statuses(ordered).items():
        for before, after in pairwise(told):
            same = before["generation"] == after["generation"]
            if same and before["status"] in FINAL and after["status"] != before["status"]:
                found.append(f"{job} was {before['status']} and became {after['status']}")
            if after["generation"] < before["generation"]:
                found.append(f"{job} went back to generation {after['generation']}")
            if not same and before["status"] == "completed":
                found.append(f"{job} was completed and was begun again")
    return found


def _attempts(runs: Sequence[Execution]) -> dict[int, list[Execution]]:
    return _by("epoch", sorted(runs, key=lambda r: (r.epoch, r.rank)))


def _succeeded(attempt: Sequence[Execution]) -> bool:
    """True if all members ran and ended by themselves with success."""
    whole = len(attempt) == attempt[0].members
    return whole and all(run.code == 0 and run.why != "cancelled" for run in attempt)


def _contested(ordered: Sequence[Record], attempt: Sequence[Execution]) -> bool:
    """True if a fault may have hidden the attempt's success from the fleet, or made the fleet doubt it."""
    return any(_contests(record, run) for record in ordered for run in attempt)


def _contests(record: Record, run: Execution) -> bool:
    mine, here, at = record.get("job") == run.job, record.get("vm") == run.vm, record["at"]
    match record["what"]:
        case "supervisor_killed":
            return mine and record["epoch"] == run.epoch
        case "cancel_requested":
            return mine and run.begin <= at <= run.end
        case "accepted":
            return mine and run.end - run.begin > record.get("time_limit", math.inf) - STOP_DELAY_S
        case "power_off":
            return here and run.end <= at <= run.end + WRITE_DELAY_S
        case "lost":
            return here and at > run.begin
        case _:
            return False


def _codes(
    ordered: Sequence[Record], job: str, attempts: Mapping[int, Sequence[Execution]]
) -> set[int | None]:
    """With which the last attempt of a job may have exited, as a shell would say it. What was killed for a cancellation need not have had
    a last word, nor a first one: of that nobody wrote anything but the fleet. Nor need one that was killed at its time limit."""
    newest = max(attempts)
    codes = {_as_shell(run.code) for run in attempts[newest]}
    cancelled = {
        r["epoch"]
        for r in ordered
        if r["what"] == "attempt" and r["job"] == job and r["outcome"] == "cancelled"
    }
    if any(epoch > newest for epoch in cancelled):
        return {143, 137}
    killed = cancelled | {
        r["epoch"] for r in ordered if r["what"] == "attempt" and r["failure"] == "time_limit"
    }
    return codes | {143, 137} if newest in killed and None in codes else codes


def _wrong_outcomes(ordered: Sequence[Record], runs: Sequence[Execution]) -> list[str]:
    found: list[str] = []
    by_job = _by("job", runs)
    for job, told in _statuses(ordered).items():
        last = told[-1]
        attempts = _attempts([r for r in by_job.get(job, ()) if r.begin < last["at"]])
        if last["status"] == "completed" and not any(map(_succeeded, attempts.values())):
            found.append(f"{job} is completed, and no attempt of it succeeded")
        thrown_away = last["status"] in RETRIED_FROM and any(
            _succeeded(attempt) and not _contested(ordered, attempt)
            for attempt in attempts.values()
        )
        if thrown_away and last["generation"] == 0:
            found.append(f"{job} is {last['status']}, and an attempt of it succeeded")
        if (code := last.get("exit_code")) is not None and last["status"] in FINAL and attempts:
            codes = _codes(ordered, job, attempts)
            if code not in codes:
                found.append(f"{job} is said to have exited with {code}; it did with {codes}")
    return found


def _as_shell(code: int | None) -> int | None:
    return 128 - code if code is not None and code < 0 else code


def _ran_again(ordered: Sequence[Record], runs: Sequence[Execution]) -> list[str]:
    """Jobs that ran again although they had succeeded, and those that did not although their artefacts were lost with a machine."""
    found: list[str] = []
    for job, mine in _by("job", runs).items():
        attempts = _attempts(mine)
        done = [
            epoch
            for epoch, attempt in attempts.items()
            if _succeeded(attempt) and not _contested(ordered, attempt)
        ]
        if done and max(attempts) > min(done):
            found.append(f"{job} was run again after {job}.{min(done)} had succeeded")
    return found


def _alive_after_cancel(ordered: Sequence[Record], runs: Sequence[Execution]) -> list[str]:
    found: list[str] = []
    for job, told in _statuses(ordered).items():
        for record in told:
            if record["status"] == "cancelled":
                alive = [r for r in runs if r.job == job and r.alive(record["at"])]
                found += [f"{run} was alive when {job} was said to be cancelled" for run in alive]
    return found


def _ended_without_cause(ordered: Sequence[Record], runs: Sequence[Execution]) -> list[str]:
    """The fleet ended an execution that nobody had cancelled, on which no limit had passed, and whose gang had not failed."""
    found: list[str] = []
    for run in runs:
        if run.why != "cancelled":
            continue
        before = [r for r in ordered if r["at"] < run.end + STOP_DELAY_S]
        wanted = any(r["what"] == "cancel_requested" and r["job"] == run.job for r in before)
        gang = [r for r in runs if (r.job, r.epoch) == (run.job, run.epoch) and r is not run]
        failed = any(r.end < run.end + STOP_DELAY_S and r.code != 0 for r in gang)
        limits = [r["time_limit"] for r in before if r.get("job") == run.job and "time_limit" in r]
        over = any(run.end - run.begin > limit - STOP_DELAY_S for limit in limits)
        given_up = any(
            r["what"] == "lost" and r["vm"] in {run.vm, *(g.vm for g in gang)} for r in before
        )
        excused = any(
            r["what"] in EXCUSES and (r["job"], r["epoch"]) == (run.job, run.epoch) for r in before
        )
        if not (wanted or failed or given_up or excused or over):
            found.append(f"{run} was healthy and was ended")
    return found


def _wrong_logs(ordered: Sequence[Record]) -> list[str]:
    written: dict[tuple[str, int, int], str] = defaultdict(str)
    found: list[str] = []
    for record in ordered:
        name = (record.get("job", ""), record.get("epoch", 0), record.get("rank", 0))
        if record["what"] == "wrote":
            written[name] += record["data"]
        if record["what"] == "mirrored":
            text, whole = record["data"], record.get("whole", False)
            if not written[name].startswith(text) or (whole and text != written[name]):
                found.append(f"{name[0]}.{name[1]}: its mirrored log is not what it wrote")
    return found


def _wrong_artefacts(ordered: Sequence[Record]) -> list[str]:
    """Artefacts of successful jobs that are missing or changed."""
    succeeded = {
        (r["job"], r["epoch"])
        for r in ordered
        if r["what"] == "attempt" and r["outcome"] == "succeeded"
    }
    kept = {
        (r["job"], r["epoch"], r["rank"], r["path"]): r["data"]
        for r in ordered
        if r["what"] == "kept"
    }
    return [
        f"{r['job']}.{r['epoch']} has succeeded, and its {r['path']} is not there as it was made"
        for r in ordered
        if r["what"] == "made"
        and (r["job"], r["epoch"]) in succeeded
        and kept.get((r["job"], r["epoch"], r["rank"], r["path"])) != r["data"]
    ]


def _wrong_resumes(ordered: Sequence[Record]) -> list[str]:
    saved: dict[str, set[int]] = defaultdict(set)
    found: list[str] = []
    for record in ordered:
        if record["what"] == "saved":
            saved[record["job"]].add(record["step"])
        step = record.get("resumed")
        if step is not None and step not in saved[record["job"]]:
            found.append(
                f"{record['job']}.{record['epoch']} went on from step {step}, where there is no whole checkpoint"
            )
    return found


def _wrong_ends(ordered: Sequence[Record], runs: Sequence[Execution]) -> list[str]:
    """Attempts whose record in the fleet disagrees with what happened to them."""
    said = [r for r in ordered if r["what"] == "attempt"]
    mine = [[e for e in runs if (e.job, e.epoch) == (r["job"], r["epoch"])] for r in said]
    found = [(r, _wrong_end(ordered, r, m)) for r, m in zip(said, mine, strict=True)]
    return [
        f"{r['job']}.{r['epoch']} is said to have ended {r['outcome']} ({r['failure']}), and {why}"
        for r, why in found
        if why
    ]


def _wrong_end(ordered: Sequence[Record], said: Record, mine: Sequence[Execution]) -> str | None:
    outcome, failure = said["outcome"], said["failure"]
    good = bool(mine) and _succeeded(mine)
    if outcome == "void" and mine:
        return "it ran"
    if outcome == "succeeded" and not good:
        return "it did not succeed"
    if outcome != "succeeded" and good and not _contested(ordered, mine):
        return "it succeeded"
    done = {r["what"] for r in ordered if r.get("job") == said["job"]}
    if outcome == "cancelled" and "cancel_requested" not in done:
        return "nobody wanted it cancelled"
    if outcome == "failed" and not _explained(ordered, said, mine, failure):
        return f"that is not what happened to it: {[(r.code, r.why) for r in mine]}"
    return None


def _explained(
    ordered: Sequence[Record], said: Record, mine: Sequence[Execution], failure: str
) -> bool:
    codes = {run.code for run in mine}
    named = {
        r["what"] for r in ordered if (r.get("job"), r.get("epoch")) == (said["job"], said["epoch"])
    }
    happened = {r["what"] for r in ordered if r.get("vm") in said["vms"]}
    match failure:
        case "user_error":
            return bool(codes & USER_ERRORS)
        case "crashed":
            return any(code not in {0, None, -9} for code in codes)
        case "killed":
            return -9 in codes
        case "supervisor_lost":
            return "supervisor_killed" in named
        case "reboot":
            return "power_off" in happened
        case "host_lost":
            return "lost" in happened
        case "launch_failure":
            return "refused" in named
        case "time_limit":
            return any("time_limit" in r for r in ordered if r.get("job") == said["job"])
        case "gpu_fault":
            return any(code != 0 for code in codes)
        case _:
            return False


def _charged_too_often(ordered: Sequence[Record]) -> list[str]:
    charged = (r for r in ordered if r["what"] == "attempt" and r["charged"])
    count = Counter((r["job"], r["generation"]) for r in charged)
    return [
        f"{job} was tried {tries} times in generation {generation} although it was at fault"
        for (job, generation), tries in count.items()
        if tries > CHARGED
    ]


def _left(ordered: Sequence[Record]) -> list[str]:
    return [
        f"something of {r['job']}.{r['epoch']} is alive on {r['vm']} in the end"
        for r in ordered
        if r["what"] == "left"
    ]


def _never_finished(ordered: Sequence[Record]) -> list[str]:
    told = _statuses(ordered)
    found: list[str] = []
    for record in ordered:
        if record["what"] == "accepted":
            job = record["job"]
            last = told[job][-1]["status"] if told.get(job) else "nowhere"
            if last not in FINAL:
                found.append(f"{job} was accepted and is {last} in the end")
    return found


def _leaked(ordered: Sequence[Record]) -> list[str]:
    last = {job: told[-1] for job, told in _statuses(ordered).items()}
    return [
        f"{r['job']}.{r['epoch']} still holds {r['gpu']} of {r['vm']}"
        for r in ordered
        if r["what"] == "reserved" and last.get(r["job"], {}).get("status") in FINAL
    ]
