"""Guards of the fleet that are taken away on purpose in a copy of the package, and the tests that must fail then.

A guard is what keeps one promise of the fleet when something else goes wrong: the owner in a WHERE, the lock around a look, the comparison
before a signal. It does nothing on a good day, so that nobody would miss it. `tests/mutating.py` runs these as it does those of
`tests/mutations.py`; the narrowest tests are named, because each costs a process. Those in `SLOW` start a server, or wait for something
that then never comes.
"""

from __future__ import annotations

from tests.mutating import Mutation

SLOW_IMPORTS = (
    "alembic.command",
    "asyncssh",
    "fastapi",
    "httpx2",
    "hypothesis",
    "psycopg",
    "pydantic",
    "sqlalchemy.orm",
    "typer",
    "uvicorn",
)
"""What the tests below need; torch is not among it."""

REAL = "tests/integration/fleet"
UNIT = "tests/unit/fleet"
HOSTS = "tests/unit/hosts"

ADMISSION = f"{UNIT}/queue/test_admission.py"
API = f"{UNIT}/test_client.py"
ARTEFACTS = f"{UNIT}/files/test_artefacts.py"
RECORDS = f"{UNIT}/attempts/test_records.py"
BUILDER = f"{UNIT}/machines/test_builder.py"
CLAIM = f"{UNIT}/queue/test_claim.py"
CLEARING = f"{UNIT}/machines/test_clearing.py"
DECIDE = f"{UNIT}/attempts/test_decide.py"
DISPATCHER = f"{UNIT}/test_dispatcher.py"
DRIVE = f"{UNIT}/attempts/test_drive.py"
FAILURES = f"{UNIT}/queue/test_failures.py"
FAULTS = f"{HOSTS}/test_runner_faults.py"
FILES = f"{HOSTS}/test_runner_files.py"
GPUS = f"{HOSTS}/test_runner_gpus.py"
LOGS = f"{UNIT}/files/test_logs.py"
OBSERVATION = f"{UNIT}/machines/test_observation.py"
POLLER = f"{UNIT}/test_poller.py"
PREPARE = f"{UNIT}/machines/test_prepare.py"
RACES = f"{REAL}/test_claim_races.py"
RUNNER = f"{HOSTS}/test_runner.py"
SCHEMA = f"{UNIT}/store/test_schema.py"
SQLITE = f"{UNIT}/store/test_database_of_sqlite.py"
SSH = f"{REAL}/test_ssh.py"
STORE = f"{UNIT}/files/test_clearing.py"
TRACKER = f"{UNIT}/test_tracker.py"
TRIGGERS = f"{UNIT}/store/test_triggers.py"
VERBS = f"{UNIT}/verbs"

QUICK = (
    # --- behind an engine -------------------------------------------------------------------------
    Mutation(
        "void before moving",
        "what waits for its engine is killed, and begins later",
        (
            (
                "fleet/attempts/decide.py",
                "        case Reading.ABSENT | Reading.QUEUED:\n            return (Void(member.rank),)\n"
                "        case Reading.CLAIMED | Reading.RUNNING:\n            return (Kill(member.rank),)\n"
                "        case Reading.LOST:\n            return (Kill(member.rank), CheckRelease(member.rank))\n"
                "        case _ if",
                "        case Reading.ABSENT:\n            return (Void(member.rank),)\n"
                "        case Reading.CLAIMED | Reading.RUNNING | Reading.QUEUED:\n            return (Kill(member.rank),)\n"
                "        case Reading.LOST:\n            return (Kill(member.rank), CheckRelease(member.rank))\n"
                "        case _ if",
            ),
        ),
        (f"{DECIDE}::test_what_waits_is_made_void_and_never_killed",),
    ),
    Mutation(
        "one folder for each row",
        "two machines may keep everything in one folder",
        (
            (
                "fleet/verbs/machines.py",
                "    vm.observed_round = seconds(session)  # who is looking at this moment looks at what it was\n"
                "    _require_own_folder(session, vm)\n",
                "    vm.observed_round = seconds(session)  # who is looking at this moment looks at what it was\n",
            ),
        ),
        (f"{VERBS}/test_machines.py::test_two_machines_of_one_folder_would_end_each_others_jobs",),
    ),
    Mutation(
        "silence is no end",
        "what was begun is lost while Slurm is away",
        (
            (
                "hosts/engines.py",
                "            return replace(state, engine_says=str(error))\n        return as_running(state)\n",
                "            return replace(state, engine_says=str(error))\n        return state\n",
            ),
        ),
        (f"{HOSTS}/test_slurm.py::test_what_was_begun_has_not_ended_while_slurm_is_away",),
    ),
    Mutation(
        "quota",
        "GPUs that an engine gives count for nothing",
        (
            (
                "fleet/queue/capacity.py",
                "        return len(self.held) + self.of_engines\n",
                "        return len(self.held)\n",
            ),
        ),
        (f"{CLAIM}::test_gpus_that_an_engine_gives_count_for_a_quota",),
    ),
    # --- who may write ----------------------------------------------------------------------------
    Mutation(
        "owner",
        "whoever names an epoch may write about it",
        (
            (
                "fleet/attempts/records.py",
                "    if attempt is None or attempt.owner != owner:\n",
                "    if attempt is None:\n",
            ),
        ),
        (f"{RECORDS}::test_who_has_been_replaced_writes_nothing",),
    ),
    Mutation(
        "owner",
        "whoever names an epoch may read it as its own",
        (
            (
                "fleet/attempts/records.py",
                '.where(Attempt.epoch.in_(_GIVEN), Attempt.owner == bindparam("owner"))',
                ".where(Attempt.epoch.in_(_GIVEN))",
            ),
        ),
        (f"{RECORDS}::test_who_has_been_replaced_reads_nothing",),
    ),
    Mutation(
        "together",
        "one attempt that cannot be read stops all others",
        (
            (
                "fleet/attempts/together.py",
                "            if len(keys) == 1:\n                return [error]\n",
                "            return [error] * len(keys)\n",
            ),
        ),
        (f"{UNIT}/attempts/test_together.py::test_who_cannot_be_read_stops_nobody",),
    ),
    Mutation(
        "epoch",
        "what is written about an attempt goes to any that the owner has",
        (
            (
                "fleet/attempts/records.py",
                "    select(Attempt)\n    .where(Attempt.epoch.in_(_GIVEN))\n",
                "    select(Attempt)\n",
            ),
        ),
        (f"{RECORDS}::test_a_write_is_about_the_attempt_that_it_names",),
    ),
    Mutation(
        "lease",
        "attempts are adopted whose owner lives",
        (
            (
                "fleet/attempts/records.py",
                "or_(Attempt.lease_until < now, ",
                "or_(Attempt.lease_until > 0, ",
            ),
        ),
        (f"{RECORDS}::test_an_attempt_is_adopted_once",),
    ),
    Mutation(
        "lease",
        "a lease is renewed by the clock of the dispatcher",
        (
            (
                "fleet/attempts/records.py",
                ".values(lease_until=clock() + lease)",
                ".values(lease_until=__import__('time').time() + lease)",
            ),
        ),
        (f"{RECORDS}::test_leases_are_counted_by_the_clock_of_the_database",),
    ),
    Mutation(
        "lease",
        "what ran out is told by the clock of the dispatcher",
        (
            (
                "fleet/attempts/records.py",
                "now = seconds(session)\n    found = session.scalars(",
                "now = __import__('time').time()\n    found = session.scalars(",
            ),
        ),
        (f"{RECORDS}::test_leases_are_counted_by_the_clock_of_the_database",),
    ),
    Mutation(
        "lease",
        "a claim is leased by the clock of the dispatcher",
        (
            (
                "fleet/queue/claim.py",
                '"lease_until": now + lease.seconds,',
                '"lease_until": __import__("time").time() + lease.seconds,',
            ),
        ),
        (f"{RECORDS}::test_leases_are_counted_by_the_clock_of_the_database",),
    ),
    Mutation(
        "lease",
        "a dispatcher counts its lease from the answer, not from the question",
        (
            (
                "fleet/dispatcher.py",
                "self._mine_until = asked + rhythm.lease",
                "self._mine_until = time.monotonic() + rhythm.lease",
            ),
        ),
        (f"{DISPATCHER}::test_a_lease_is_counted_from_before_it_was_asked_for",),
    ),
    # --- what the database refuses ----------------------------------------------------------------
    Mutation(
        "one live attempt",
        "a job may have two",
        (
            (
                "fleet/store/migrations/versions/0001_first.py",
                '"uq_attempts_live", "attempts", ["job_id"], unique=True,',
                '"uq_attempts_live", "attempts", ["job_id"], unique=False,',
            ),
            ("fleet/store/triggers.py", "if index.unique:", "if False:"),
        ),
        (f"{TRIGGERS}::test_one_live_attempt",),
    ),
    Mutation(
        "one reservation of a whole GPU",
        "neither index nor trigger",
        (
            (
                "fleet/store/migrations/versions/0001_first.py",
                '        "uq_reservations_gpu",\n        "reservations",\n        ["gpu_id"],\n        unique=True,',
                '        "uq_reservations_gpu",\n        "reservations",\n        ["gpu_id"],\n        unique=False,',
            ),
            (
                "fleet/store/triggers.py",
                "(SELECT count(*) {beside}) > 1 AND",
                "(SELECT count(*) {beside}) > 2 AND",
            ),
        ),
        (f"{TRIGGERS}::test_a_whole_gpu_is_held_once",),
    ),
    Mutation(
        "one reservation of a whole GPU",
        "the index is not unique",
        (
            (
                "fleet/store/migrations/versions/0001_first.py",
                '        "uq_reservations_gpu",\n        "reservations",\n        ["gpu_id"],\n        unique=True,',
                '        "uq_reservations_gpu",\n        "reservations",\n        ["gpu_id"],\n        unique=False,',
            ),
        ),
        (f"{SCHEMA}::test_the_way_leads_to_the_tables_of_the_code",),
    ),
    Mutation(
        "shares fit into a GPU",
        "their sum is not looked at",
        (
            (
                "fleet/store/triggers.py",
                "OR (SELECT sum(share_mb) {beside}) > ",
                "OR (SELECT min(share_mb) {beside}) > ",
            ),
        ),
        (f"{TRIGGERS}::test_shares_fit_into_the_memory",),
    ),
    Mutation(
        "one reservation of a slot",
        "the index is not unique",
        (
            (
                "fleet/store/migrations/versions/0001_first.py",
                '        ["vm_id", "slot"],\n        unique=True,',
                '        ["vm_id", "slot"],\n        unique=False,',
            ),
            ("fleet/store/triggers.py", "if index.unique:", "if False:"),
        ),
        (f"{TRIGGERS}::test_a_slot_is_held_once",),
    ),
    Mutation(
        "terminal states are final",
        "no trigger knows which status may follow which",
        (
            (
                "fleet/store/triggers.py",
                '    yield from _moves("job", "jobs", "status", states.JOB_MOVES)\n',
                "",
            ),
        ),
        (f"{TRIGGERS}::test_every_pair_of_job_statuses",),
    ),
    Mutation(
        "terminal states are final",
        "an attempt may come back from its end",
        (
            (
                "fleet/store/triggers.py",
                '    yield from _moves("attempt", "attempts", "state", states.ATTEMPT_MOVES)\n',
                "",
            ),
        ),
        (f"{TRIGGERS}::test_every_pair_of_attempt_states",),
    ),
    Mutation(
        "terminal states are final",
        "how an attempt ended may be written anew",
        (
            (
                "fleet/store/triggers.py",
                "f\"OLD.state = '{ended}' AND ({' OR '.join(f'NEW.",
                "f\"OLD.state = 'over' AND ({' OR '.join(f'NEW.",
            ),
        ),
        (f"{TRIGGERS}::test_how_an_attempt_ended_does_not_change",),
    ),
    Mutation(
        "terminal states are final",
        "an attempt that has ended ends once more",
        (
            (
                "fleet/attempts/ending.py",
                "    if attempt.state == AttemptState.ENDED:\n        return\n    job = job_of",
                "    job = job_of",
            ),
        ),
        (f"{RECORDS}::test_attempt_and_job_end_together_and_once",),
    ),
    Mutation(
        "a new generation",
        "a job is retried within its generation",
        (
            (
                "fleet/store/triggers.py",
                "NEW.generation <> OLD.generation + 1",
                "NEW.generation < OLD.generation",
            ),
        ),
        (f"{TRIGGERS}::test_a_job_is_retried_with_the_next_generation",),
    ),
    Mutation(
        "admission freezes",
        "what an admitted job runs may change",
        (
            (
                "fleet/store/triggers.py",
                "({' OR '.join(map(_set_once, FROZEN))}) AND NEW.generation = OLD.generation",
                "1 = 0",
            ),
        ),
        (f"{TRIGGERS}::test_what_an_admitted_job_runs_does_not_change",),
    ),
    Mutation(
        "admission freezes",
        "only the hash of what it runs may not",
        (
            (
                "fleet/store/triggers.py",
                'FROZEN = ("spec", "spec_hash", "resources", "admitted_at")',
                'FROZEN = ("spec_hash",)',
            ),
        ),
        (f"{TRIGGERS}::test_what_an_admitted_job_runs_does_not_change",),
    ),
    Mutation(
        "admission freezes",
        "what was written in columns may change after it was read",
        (
            (
                "fleet/store/triggers.py",
                "OLD.admitted_at IS NOT NULL AND ({' OR '.join(f'NEW.{name} <~> OLD.{name}' for name in ASKED)})",
                "OLD.admitted_at IS NOT NULL AND NEW.request <~> OLD.request",
            ),
        ),
        (f"{TRIGGERS}::test_what_an_admitted_job_runs_does_not_change",),
    ),
    Mutation(
        "a machine that launches nothing",
        "a GPU that somebody uses counts against its machine",
        (
            (
                "fleet/attempts/ending.py",
                "elsewhere = word in refusals.OF_JOBS or word in refusals.OF_GPUS",
                "elsewhere = word in refusals.OF_JOBS",
            ),
        ),
        (f"{RECORDS}::test_a_refusal_for_the_sake_of_a_gpu_is_that_gpus",),
    ),
    Mutation(
        "a machine that launches nothing",
        "is one whose job names a secret or a file that the control machine does not have",
        (
            (
                "fleet/attempts/decide.py",
                "    if refusals.code_of(member.refusal) in refusals.OURS:\n",
                "    if False:\n",
            ),
        ),
        (
            f"{DECIDE}::test_what_the_control_machine_does_not_have_is_no_word_of_a_machine",
            f"{DISPATCHER}::test_a_file_that_the_control_side_has_lost_is_no_fault_of_machines",
        ),
    ),
    # --- broken GPUs and strangers ----------------------------------------------------------------
    Mutation(
        "accused",
        "what one job prints puts a GPU out of use",
        (
            (
                "fleet/attempts/ending.py",
                "        if not proven and not _accused_before(session, attempt, gpu):\n",
                "        if False:\n",
            ),
        ),
        (f"{RECORDS}::test_what_one_job_says_of_a_gpu_puts_none_out_of_use",),
    ),
    Mutation(
        "accused",
        "one job that says it twice is believed",
        (
            (
                "fleet/attempts/ending.py",
                'if found is None or found["job_id"] == attempt.job_id:',
                "if found is None:",
            ),
        ),
        (f"{RECORDS}::test_what_one_job_says_of_a_gpu_puts_none_out_of_use",),
    ),
    Mutation(
        "accused",
        "what was said long ago counts",
        (
            (
                "fleet/attempts/ending.py",
                'return found["at"] > seconds(session) - ACCUSATION_SECONDS',
                "return True",
            ),
        ),
        (
            f"{RECORDS}::test_what_one_job_says_of_a_gpu_is_told_until_an_operator_clears_it_or_a_day_is_over",
        ),
    ),
    Mutation(
        "accused",
        "what an operator has cleared counts",
        (
            (
                "fleet/verbs/machines.py",
                "row.quarantined = row.accused = None",
                "row.quarantined = None",
            ),
        ),
        (
            f"{RECORDS}::test_what_one_job_says_of_a_gpu_is_told_until_an_operator_clears_it_or_a_day_is_over",
        ),
    ),
    Mutation(
        "accused",
        "a job gets the GPU again that it called broken",
        (
            (
                "fleet/queue/claim.py",
                "frozenset(self.machines), frozenset(self.gpus), ",
                "frozenset(self.machines), frozenset(), ",
            ),
        ),
        (f"{CLAIM}::test_what_a_job_called_broken_it_gets_only_where_nothing_else_will_do",),
    ),
    Mutation(
        "quarantined",
        "a machine that says so itself is believed no more than a log",
        (
            (
                "fleet/attempts/ending.py",
                'proven = bool(member.get("gpu_problems"))',
                "proven = False",
            ),
        ),
        (f"{RECORDS}::test_a_gpu_fault_puts_the_gpus_that_it_names_out_of_use",),
    ),
    Mutation(
        "quarantined",
        "a machine runs what stands in no table, and nobody is told",
        (
            (
                "fleet/machines/observation.py",
                "        if verdict is Stray.QUARANTINE and ",
                "        if False and ",
            ),
        ),
        (
            f"{OBSERVATION}::test_what_runs_and_stands_in_no_table_is_told_with_the_machine_while_it_runs",
        ),
    ),
    Mutation(
        "quarantined",
        "the tiny jobs of `doctor` are taken for strangers",
        (
            (
                "fleet/machines/observation.py",
                "Stray.QUARANTINE and not is_doctors(each.job, each.epoch):",
                "Stray.QUARANTINE:",
            ),
        ),
        (
            f"{OBSERVATION}::test_what_runs_and_stands_in_no_table_is_told_with_the_machine_while_it_runs",
        ),
    ),
    Mutation(
        "turns",
        "who goes before others of a project takes none of theirs",
        (("fleet/queue/turns.py", "missing += MARGIN * self._reach(gap)", "missing = 0.0"),),
        (f"{ADMISSION}::test_priority_within_a_project_takes_no_turns_from_others",),
    ),
    Mutation(
        "turns",
        "those that were put off stay where they were",
        (
            (
                "fleet/queue/turns.py",
                ".values(rank=Job.rank + gap.put_off)",
                ".values(rank=Job.rank)",
            ),
        ),
        (f"{ADMISSION}::test_the_order_within_a_project_is_by_time_less_priority",),
    ),
    Mutation(
        "quota",
        "what is booked is not counted again",
        (("fleet/queue/claim.py", "held=found.held, quotas=plan.quotas", "held=found.held"),),
        (f"{CLAIM}::test_a_share_is_not_begun_on_one_gpu_more_than_the_quota_has",),
    ),
    Mutation(
        "a key stands for an array",
        "as many lines as there are",
        (("fleet/queue/admission.py", "digest = _digest(project, requests)", "digest = project"),),
        (f"{ADMISSION}::test_one_key_one_array",),
    ),
    Mutation(
        "admission freezes",
        "a job is admitted again",
        (
            (
                "fleet/queue/admission.py",
                ".where(Job.admitted_at.is_(None), Job.status.in_(",
                ".where(Job.status.in_(",
            ),
        ),
        (f"{ADMISSION}::test_an_admitted_job_is_not_admitted_again",),
    ),
    Mutation(
        "events are append-only",
        "one may be changed",
        (("fleet/store/triggers.py", 'for on in ("UPDATE", "DELETE"):', 'for on in ("DELETE",):'),),
        (f"{TRIGGERS}::test_events_are_only_appended",),
    ),
    Mutation(
        "events are append-only",
        "one may be removed",
        (("fleet/store/triggers.py", 'for on in ("UPDATE", "DELETE"):', 'for on in ("UPDATE",):'),),
        (f"{TRIGGERS}::test_events_are_only_appended",),
    ),
    Mutation(
        "epoch",
        "one may be lower than those before it",
        (
            (
                "fleet/store/triggers.py",
                "other.job_id = NEW.job_id AND other.epoch > NEW.epoch)",
                "other.job_id = NEW.job_id AND 1 = 0)",
            ),
        ),
        (f"{TRIGGERS}::test_epochs_rise_and_stay",),
    ),
    Mutation(
        "what an attempt needs",
        "its members are deleted from under it",
        (
            (
                "fleet/store/triggers.py",
                '"attempt_members",\n        "DELETE",\n        f"EXISTS',
                '"attempt_members",\n        "DELETE",\n        f"1 = 0 AND EXISTS',
            ),
        ),
        (f"{TRIGGERS}::test_what_an_attempt_needs_is_not_deleted",),
    ),
    Mutation(
        "what an attempt needs",
        "its job, machine and GPU go where nobody asks for references",
        (
            (
                "fleet/store/triggers.py",
                "(_of_values, _of_replacements, _of_references)",
                "(_of_values, _of_replacements)",
            ),
        ),
        (f"{TRIGGERS}::test_what_an_attempt_needs_is_not_deleted",),
    ),
    Mutation(
        "what an attempt needs",
        "one without members has succeeded",
        (
            (
                "fleet/attempts/decide.py",
                "    assert view.members, (\n",
                "    assert view.job_id, (\n",
            ),
        ),
        (f"{DECIDE}::test_nothing_is_decided_about_an_attempt_without_members",),
    ),
    Mutation(
        "cancel",
        "a job that waits is asked to end, and never begins",
        (
            (
                "fleet/store/triggers.py",
                'f"NEW.cancel_requested_at IS NOT NULL AND',
                'f"1 = 0 AND',
            ),
        ),
        (f"{TRIGGERS}::test_only_a_job_that_runs_is_asked_to_end",),
    ),
    # --- versions ---------------------------------------------------------------------------------
    Mutation(
        "versions",
        "an older one puts its own triggers back",
        (("fleet/store/schema.py", "    if number > RULES:\n", "    if False:\n"),),
        (f"{SCHEMA}::test_newer_rules_are_left_alone",),
    ),
    Mutation(
        "versions",
        "tables change under whoever works with them",
        (
            (
                "fleet/store/schema.py",
                "        elif (who := used_by()) is not None:\n",
                "        elif (who := None) is not None:\n",
            ),
        ),
        (f"{SCHEMA}::test_what_somebody_works_with_is_left_alone",),
    ),
    Mutation(
        "versions",
        "who changed the tables before it saw the lock is not noticed",
        (
            (
                "fleet/up.py",
                "    migrate(database, lambda: processes.who_plays(folder, but=roles))\n",
                "",
            ),
        ),
        (
            f"{UNIT}/test_up.py::test_who_changed_the_tables_before_it_saw_the_lock_has_not_done_so_for_long",
        ),
    ),
    # --- transactions -----------------------------------------------------------------------------
    Mutation(
        "BEGIN IMMEDIATE",
        "who will write does not lock before it reads",
        (("fleet/store/engine.py", '"BEGIN" if reads else "BEGIN IMMEDIATE"', '"BEGIN"'),),
        (f"{SQLITE}::test_who_may_write_has_locked_before_it_reads",),
    ),
    Mutation(
        "a commit without an answer",
        "it is begun anew, or said not to have happened",
        (
            (
                "fleet/store/database.py",
                "        if _answer_is_missing(error):\n",
                "        if False:\n",
            ),
        ),
        (f"{SQLITE}::test_a_failed_write_at_commit_is_no_answer",),
    ),
    # --- claiming ---------------------------------------------------------------------------------
    Mutation(
        "claim",
        "a job that is to wait is claimed",
        (("fleet/queue/claim.py", "            Job.not_before <= now,\n", ""),),
        (f"{CLAIM}::test_what_may_not_begin_does_not",),
    ),
    Mutation(
        "claim",
        "a machine that nobody has looked at gets a job",
        (("fleet/queue/capacity.py", "(age > stale, ", "(age > 1e9, "),),
        (f"{CLAIM}::test_machines_that_get_nothing",),
    ),
    Mutation(
        "claim",
        "one reservation that is refused undoes the whole claim",
        (
            (
                "fleet/queue/claim.py",
                "    except IntegrityError:\n        # a row",
                "    except ZeroDivisionError:\n        # a row",
            ),
        ),
        (f"{CLAIM}::test_a_reservation_that_the_view_does_not_know_costs_one_job_its_turn",),
    ),
    # --- what is decided --------------------------------------------------------------------------
    Mutation(
        "written before it is sent",
        "a launch is sent before launching is written",
        (
            (
                "fleet/attempts/decide.py",
                "    return (Move(AttemptState.LAUNCHING),)",
                "    return tuple(Launch(m.rank) for m in view.members)",
            ),
        ),
        (f"{DECIDE}::test_a_reserved_attempt_is_launching_before_anything_is_sent",),
    ),
    Mutation(
        "void before moving on",
        "a launch is given up at once",
        (
            (
                "fleet/attempts/decide.py",
                "    return _once_still(view, end)\n\n\ndef _launch_given_up",
                "    return (end,)\n\n\ndef _launch_given_up",
            ),
        ),
        (
            f"{DECIDE}::test_a_launch_that_is_cancelled",
            f"{DECIDE}::test_a_launch_that_was_turned_down_before_it_was_claimed_is_made_void_first",
        ),
    ),
    Mutation(
        "void is acknowledged by the machine",
        "silence counts as void",
        (
            (
                "fleet/attempts/decide.py",
                "    if member.reading in NEVER:\n",
                "    if member.reading in NEVER | SILENT:\n",
            ),
        ),
        (f"{DECIDE}::test_a_launch_that_is_cancelled",),
    ),
    Mutation(
        "void is acknowledged by the machine",
        "an absent folder counts as void",
        (
            (
                "fleet/attempts/decide.py",
                "    if member.reading in NEVER:\n",
                "    if member.reading in {*NEVER, Reading.ABSENT}:\n",
            ),
        ),
        (f"{DECIDE}::test_a_launch_that_is_cancelled",),
    ),
    Mutation(
        "void is acknowledged by the machine",
        "void leaves nothing behind",
        (("hosts/runner.py", '            claim(attempt, {"phase": "voided"})\n', ""),),
        (f"{RUNNER}::test_what_was_voided_never_runs",),
    ),
    Mutation(
        "unreachable is not failed",
        "a member that is silent has failed",
        (("fleet/attempts/decide.py", "_MAY_GO_ON = SILENT | {", "_MAY_GO_ON = {"),),
        (f"{DECIDE}::test_a_silent_member_has_not_failed",),
    ),
    Mutation(
        "unreachable is not failed",
        "a machine that is silent is gone",
        (
            (
                "fleet/attempts/decide.py",
                "return (self.lost or self.deadman_over) and self.reading in SILENT",
                "return self.reading in SILENT",
            ),
        ),
        (f"{DECIDE}::test_running", f"{DECIDE}::test_launching"),
    ),
    Mutation(
        "unreachable is not failed",
        "a machine that answers is gone all the same",
        (
            (
                "fleet/attempts/decide.py",
                "return (self.lost or self.deadman_over) and self.reading in SILENT",
                "return self.lost or self.deadman_over",
            ),
        ),
        (f"{DECIDE}::test_a_machine_that_answers_is_not_gone_whatever_is_said_of_it",),
    ),
    Mutation(
        "exit code 0 wins",
        "a late cancellation makes a success a cancelled job",
        (
            (
                "fleet/queue/failures.py",
                "    if outcome is Outcome.SUCCEEDED:\n",
                "    if outcome is Outcome.SUCCEEDED and not job.cancel_requested:\n",
            ),
        ),
        (f"{FAILURES}::test_success_is_success_however_late_it_was_cancelled",),
    ),
    Mutation(
        "exit code 0 wins",
        "a late cancellation makes a success a cancelled attempt",
        (
            (
                "fleet/attempts/decide.py",
                "    end = _result(view)\n",
                '    end = _end(view, Outcome.CANCELLED, because="late") if view.cancel_requested else _result(view)\n',
            ),
        ),
        (f"{DECIDE}::test_exit_code_0_wins_against_a_late_cancellation",),
    ),
    Mutation(
        "cancelled means that nothing runs",
        "an exit record is proof enough",
        (
            (
                "fleet/attempts/decide.py",
                "return not view.cancel_requested or member.quiet is True",
                "return True",
            ),
        ),
        (f"{DECIDE}::test_a_cancellation_is_acknowledged_when_no_process_is_left",),
    ),
    Mutation(
        "a killed supervisor",
        "what it left behind is not looked at",
        (
            (
                "fleet/attempts/decide.py",
                "return member.reading is Reading.LOST and member.quiet is True",
                "return member.reading is Reading.LOST",
            ),
        ),
        (f"{DECIDE}::test_a_killed_supervisor_ends_an_attempt_once_nothing_of_it_runs",),
    ),
    Mutation(
        "foreign work is left alone",
        "what no table knows is killed",
        (
            (
                "fleet/attempts/decide.py",
                "        return Stray.QUARANTINE\n",
                "        return Stray.KILL\n",
            ),
        ),
        (f"{DECIDE}::test_strays",),
    ),
    Mutation(
        "a lower epoch is killed",
        "it is left to run",
        (("fleet/attempts/decide.py", "    return Stray.KILL\n", "    return Stray.LEAVE\n"),),
        (f"{DECIDE}::test_strays",),
    ),
    # --- what follows -----------------------------------------------------------------------------
    Mutation(
        "budgets",
        "a class is tried again without end",
        (
            (
                "fleet/queue/failures.py",
                "if most is not None and spent[failure] > most:",
                "if False:",
            ),
        ),
        (f"{FAILURES}::test_every_class_comes_to_an_end",),
    ),
    Mutation(
        "budgets",
        "charged failures are not counted together",
        (
            (
                "fleet/queue/failures.py",
                'spent["charged"] > policy.charged',
                "spent[failure] > policy.charged",
            ),
        ),
        (f"{FAILURES}::test_charged_failures_of_different_kinds_come_out_of_one_budget",),
    ),
    Mutation(
        "budgets",
        "machines may fail under a job without end",
        (("fleet/queue/failures.py", 'spent["free"] > FREE_RETRIES', 'spent["free"] < 0'),),
        (f"{FAILURES}::test_every_class_comes_to_an_end",),
    ),
    Mutation(
        "budgets",
        "a job that is to run once is run again after the loss of its machine",
        (("fleet/queue/failures.py", "if policy.once and ran else", "if False else"),),
        (f"{FAILURES}::test_a_job_that_is_to_run_once_is_not_begun_again_whatever_happens",),
    ),
    Mutation(
        "budgets",
        "what no machine has begun is not begun elsewhere where the job is to run once",
        (("fleet/queue/failures.py", "if policy.once and ran else", "if policy.once else"),),
        (f"{FAILURES}::test_what_never_ran_is_no_execution",),
    ),
    Mutation(
        "budgets",
        "what a job without a GPU writes is a GPU fault",
        (("hosts/failures.py", "had_gpu = record.gpus != 0", "had_gpu = True"),),
        (f"{HOSTS}/test_failures.py::test_a_job_without_a_gpu_has_no_gpu_fault",),
    ),
    Mutation(
        "release",
        "a live attempt gives back what it holds",
        (
            (
                "fleet/attempts/ending.py",
                '    assert attempt.state == AttemptState.ENDED, "nothing of a live attempt is given back"\n'
                "    member = session.get_one(Member, (epoch, rank))\n    member.released = True\n",
                "    member = session.get_one(Member, (epoch, rank))\n    member.released = True\n",
            ),
        ),
        (f"{RECORDS}::test_nothing_of_a_live_attempt_is_given_back",),
    ),
    Mutation(
        "release",
        "a lost machine is used again with what was on it",
        (
            (
                "fleet/attempts/records.py",
                "    if vm.lost_at is None or unfinished is not None:\n",
                "    if vm.lost_at is None:\n",
            ),
        ),
        (f"{RECORDS}::test_a_machine_is_welcome_back_when_nothing_is_left_there",),
    ),
    Mutation(
        "deadman",
        "without a margin",
        (
            (
                "fleet/attempts/drive.py",
                "return silent > deadman + DEADMAN_MARGIN",
                "return silent > deadman",
            ),
        ),
        (f"{DRIVE}::test_only_after_the_deadman_and_a_margin",),
    ),
    Mutation(
        "deadman",
        "one without a supervisor is over by it",
        (
            (
                "fleet/attempts/drive.py",
                " or member.recorded is Reading.LOST:\n",
                ":\n",
            ),
        ),
        (f"{DRIVE}::test_whatever_was_heard_but_that_its_supervisor_is_dead",),
    ),
    Mutation(
        "deadman",
        "a launch counts from when it arrives",
        (
            (
                "fleet/attempts/launching.py",
                "    if launch.deadman is None:\n        return launch\n",
                "    return launch\n",
            ),
        ),
        (f"{DISPATCHER}::test_a_deadman_frees_a_job_whose_launch_may_still_be_on_its_way",),
    ),
    Mutation(
        "deadman",
        "a machine begins what arrives after it",
        (
            (
                "hosts/runner.py",
                "        self.last_contact = order.heard\n",
                "        self.last_contact = boot_clock()\n",
            ),
        ),
        (f"{FAULTS}::test_a_launch_that_was_long_on_its_way_begins_nothing",),
    ),
    Mutation(
        "deadman",
        "a wait keeps it quiet for an attempt that is given up",
        (("fleet/attempts/watching.py", "if listener.hearing and (last := ", "if (last := "),),
        (
            f"{UNIT}/attempts/test_watching.py::test_the_deadman_of_an_attempt_that_is_written_down_as_silent_is_not_kept_quiet",
        ),
    ),
    Mutation(
        "release",
        "what a silent machine holds is given back by itself",
        (
            (
                "fleet/attempts/decide.py",
                "return (Abandon(member.rank),) if member.lost and not member.abandoned else ()",
                "return () if member.abandoned else (Abandon(member.rank),)",
            ),
        ),
        (f"{DECIDE}::test_cleaning_up",),
    ),
    Mutation(
        "repairs",
        "a job that somebody has just claimed is taken for a stray",
        (
            (
                "fleet/requeue.py",
                "strays = [job for job in found if job.job_id not in busy]",
                "strays = found",
            ),
            (
                "fleet/requeue.py",
                ".where(Job.status == JobStatus.RUNNING, ~live)",
                ".where(Job.status == JobStatus.RUNNING)",
            ),
            (
                "fleet/store/triggers.py",
                '"job_in_motion",\n        "jobs",\n        "UPDATE",\n        f"EXISTS',
                '"job_in_motion",\n        "jobs",\n        "UPDATE",\n        f"1 = 0 AND EXISTS',
            ),
        ),
        (f"{UNIT}/test_requeue.py::test_a_job_with_a_live_attempt_is_never_touched",),
    ),
    Mutation(
        "repairs",
        "what may still be held is given back",
        (("fleet/requeue.py", "            Attempt.cleanup == Cleanup.CLEAN,\n", ""),),
        (f"{UNIT}/test_requeue.py::test_what_may_still_be_held_stays_reserved",),
    ),
    # --- looking at machines ----------------------------------------------------------------------
    Mutation(
        "several misses",
        "one makes a machine unreachable",
        (
            (
                "fleet/machines/observation.py",
                "    if vm.misses >= MISSES and ",
                "    if vm.misses >= 1 and ",
            ),
        ),
        (f"{OBSERVATION}::test_three_misses_make_it_unreachable_and_one_answer_ends_that",),
    ),
    Mutation(
        "several misses",
        "several pollers count the same silence",
        (
            (
                "fleet/machines/observation.py",
                "if vm.misses and not _is_newer(asked_at - MISSES_APART, counted_at, now):",
                "if False:",
            ),
        ),
        (f"{OBSERVATION}::test_several_pollers_do_not_count_the_same_silence_twice",),
    ),
    Mutation(
        "older observations",
        "one overwrites a newer one",
        (
            (
                "fleet/machines/observation.py",
                "not _is_newer(asked_at, vm.observed_round, now) or _is_barred(vm)",
                "_is_barred(vm)",
            ),
        ),
        (f"{OBSERVATION}::test_an_older_look_never_overwrites_a_newer_one",),
    ),
    Mutation(
        "jumps of the database's clock",
        "a look of before the clock was set back stays the newest",
        (
            (
                "fleet/machines/observation.py",
                "return asked_at > known or known > now + records.AHEAD",
                "return asked_at > known",
            ),
        ),
        (
            f"{OBSERVATION}::test_what_is_dated_in_the_future_was_written_before_the_clock_was_set_back",
        ),
    ),
    Mutation(
        "jumps of the database's clock",
        "a lease of before the clock was set back holds for as long",
        (
            (
                "fleet/attempts/records.py",
                ", Attempt.lease_until > now + 2 * LONGEST_LEASE",
                "",
            ),
        ),
        (f"{RECORDS}::test_a_lease_that_was_given_before_the_clock_was_set_back_holds_nobody_up",),
    ),
    Mutation(
        "jumps of the database's clock",
        "a pause of before the clock was set back lasts as long",
        (
            (
                "fleet/requeue.py",
                "Job.not_before > now + LONGEST_PAUSE,",
                "Job.not_before > now + 1e9,",
            ),
        ),
        (f"{UNIT}/test_requeue.py::test_a_pause_that_was_counted_by_a_clock_of_before_ends",),
    ),
    Mutation(
        "jumps of the database's clock",
        "a deadman is over by the database's clock alone",
        (
            (
                "fleet/attempts/drive.py",
                "silent = min(row.now - since, now - self._silences.setdefault(member.rank, now))",
                "silent = row.now - since",
            ),
        ),
        (
            f"{UNIT}/attempts/test_drive.py::test_a_jump_of_the_databases_clock_ends_no_deadman_early",
        ),
    ),
    Mutation(
        "a restored database",
        "numbers of attempts that a machine has seen are given out again",
        (
            (
                "fleet/machines/observation.py",
                "    epochs.raise_above(session, [each",
                "    (lambda *_: None)(session, [each",
            ),
        ),
        (f"{OBSERVATION}::test_numbers_of_attempts_go_on_above_what_machines_have_seen",),
    ),
    Mutation(
        "a restored database",
        "a number that was refused as too low is followed by the next one",
        (("fleet/attempts/ending.py", "        epochs.raise_above(session, ", "        bool("),),
        (
            f"{UNIT}/test_dispatcher.py::test_after_a_restore_numbers_that_machines_have_seen_are_passed_over",
        ),
    ),
    Mutation(
        "a restored database",
        "a job begins beside what a machine runs of it and no table knows",
        (
            (
                "fleet/machines/observation.py",
                "HELD_UNTIL: unknown.hold_back(session, runs & jobs)}",
                "HELD_UNTIL: len(runs)}",
            ),
        ),
        (f"{OBSERVATION}::test_the_job_of_what_stands_in_no_table_does_not_begin_meanwhile",),
    ),
    Mutation(
        "one order of locks",
        "who looks at a machine locks it before the jobs that it holds back",
        (
            (
                "fleet/machines/observation.py",
                "    jobs = unknown.lock(session, {each.job for each in strays})\n"
                "    vm = _locked(session, vm_id)\n    now",
                "    vm = _locked(session, vm_id)\n"
                "    jobs = unknown.lock(session, {each.job for each in strays})\n    now",
            ),
        ),
        (
            f"{REAL}/test_machine_races.py::test_a_look_that_holds_a_job_back_and_a_claim_of_it_do_not_lock_each_other_out",
        ),
    ),
    Mutation(
        "one order of locks",
        "who looks at a machine locks its GPUs as it meets them",
        (
            (
                "fleet/machines/observation.py",
                "session.scalars(own.with_for_update(key_share=True))",
                "session.scalars(own)",
            ),
        ),
        (
            f"{REAL}/test_machine_races.py::test_a_look_and_the_end_of_an_attempt_lock_the_gpus_of_a_machine_in_one_order",
        ),
    ),
    Mutation(
        "a restored database",
        "a job begins beside what outlived its supervisor",
        (
            (
                "fleet/attempts/decide.py",
                "    if not runs and not survivors:\n",
                "    if not runs:\n",
            ),
        ),
        (f"{OBSERVATION}::test_what_outlives_its_supervisor_in_no_table_holds_its_job_back",),
    ),
    Mutation(
        "a restored database",
        "what outlived its supervisor does not count where only a lock shows it",
        (("hosts/runner.py", ".look()) or int(bool(held))", ".look())"),),
        (f"{FAULTS}::test_a_survivor_that_only_a_lock_shows_is_counted",),
    ),
    Mutation(
        "a restored database",
        "what is held by what no table knows is given to others",
        (
            (
                "fleet/queue/capacity.py",
                "        strays = unknown.holding(facts)",
                "        strays = unknown.Holding()",
            ),
        ),
        (
            f"{OBSERVATION}::test_what_is_held_by_what_stands_in_no_table_is_given_to_nobody_until_it_ends",
            f"{UNIT}/test_dispatcher.py::test_beside_what_no_table_knows_jobs_get_what_it_leaves",
        ),
    ),
    Mutation(
        "a restored database",
        "what another attempt has costs a job its retries",
        (("fleet/attempts/ending.py", "taken=_is_taken(move),", "taken=False,"),),
        (f"{RECORDS}::test_what_another_attempt_has_is_waited_for_and_costs_nothing",),
    ),
    Mutation(
        "projects: machines of their own",
        "a job is placed on a machine that is kept for others",
        (("fleet/queue/capacity.py", "else replace(each, closed=True)", "else each"),),
        (
            f"{UNIT}/queue/test_capacity.py::test_a_machine_is_kept_for_projects",
            f"{UNIT}/queue/test_capacity.py::test_one_that_is_kept_for_others_meanwhile_is_seen_under_its_lock",
        ),
    ),
    Mutation(
        "gangs",
        "a member begins before all machines have their files",
        (("fleet/attempts/decide.py", "if all(m.provided for m in to_begin):", "if True:"),),
        (f"{DECIDE}::test_no_member_of_a_gang_begins_before_all_machines_have_their_files",),
    ),
    Mutation(
        "gangs",
        "led by a machine that only itself finds",
        (
            (
                "fleet/queue/claim.py",
                "key=lambda seat: is_loopback(addresses[seat.vm_id])",
                "key=lambda seat: seat.vm_id",
            ),
        ),
        (f"{CLAIM}::test_a_gang_is_led_by_a_machine_that_others_find",),
    ),
    Mutation(
        "checkpoints travel",
        "nobody hears of those that are always gone",
        (
            (
                "fleet/attempts/records.py",
                "tell = not gone or in_a_row >= GONE_IN_A_ROW",
                "tell = not gone",
            ),
        ),
        (
            f"{UNIT}/files/test_mirror.py::test_those_that_are_gone_before_they_have_come_are_told_when_none_comes",
        ),
    ),
    Mutation(
        "checkpoints travel",
        "of a job that keeps two the first two alone",
        (
            (
                "fleet/attempts/drive.py",
                "size, (ear.last.checkpoints, ear.last.step)",
                "size, (ear.last.checkpoints, None)",
            ),
        ),
        (
            f"{UNIT}/test_dispatcher.py::test_of_a_job_that_keeps_its_last_checkpoints_each_is_mirrored",
        ),
    ),
    Mutation(
        "checkpoints travel",
        "whoever waits is not told of another one of as many",
        (("hosts/runner.py", '["state", "checkpoints", "step"]', '["state", "checkpoints"]'),),
        (
            f"{HOSTS}/test_runner_files.py::test_checkpoints_show_while_the_job_runs_and_in_its_record",
        ),
    ),
    Mutation(
        "a job's own files and log",
        "a log is a file that its command opens",
        (
            (
                "hosts/runner.py",
                "(1, log), (2, log)):",
                "(1, os.open(order.attempt.at('log'), 1025)), (2, os.open(order.attempt.at('log'), 1025))):",
            ),
        ),
        (f"{RUNNER}::test_who_writes_to_dev_stderr_empties_no_log",),
    ),
    Mutation(
        "a job's own files and log",
        "files are links of the machine's cache",
        (
            (
                "hosts/runner.py",
                "        yield from copy_blob(root.blob(sha), target, sha, mode & 0o777)\n",
                "        os.link(root.blob(sha), target)\n",
            ),
        ),
        (f"{HOSTS}/test_runner_files.py::test_what_a_job_does_to_its_files_harms_no_other",),
    ),
    Mutation(
        "a restored database",
        "jobs begin before it was looked what machines run",
        (
            (
                "fleet/dispatcher.py",
                "        return not self.not_asked\n",
                "        return True\n",
            ),
        ),
        (
            f"{UNIT}/test_dispatcher.py::test_after_a_standstill_nothing_begins_before_all_that_answered_were_looked_at",
        ),
    ),
    Mutation(
        "quotas",
        "what is over on a machine that fell silent counts for ever",
        (
            (
                "fleet/queue/capacity.py",
                'VM.contact != Contact.UNREACHABLE)\n"""For a quota',
                'VM.contact.is_not(None))\n"""For a quota',
            ),
        ),
        (
            f"{UNIT}/queue/test_capacity.py::test_a_quota_does_not_count_what_is_over_on_a_machine_that_fell_silent",
        ),
    ),
    Mutation(
        "absence proves nothing",
        "a probe with lines that nobody could read makes GPUs missing",
        (("fleet/machines/observation.py", "    if _is_whole(seen):\n", "    if True:\n"),),
        (f"{OBSERVATION}::test_absence_proves_nothing_where_the_probe_was_not_answered_whole",),
    ),
    Mutation(
        "an observation only subtracts",
        "processes of an attempt that does not hold the GPU are ours",
        (
            (
                "fleet/machines/observation.py",
                "if app.attempt not in own]",
                "if app.attempt is None]",
            ),
        ),
        (f"{OBSERVATION}::test_a_process_of_the_attempt_that_holds_the_gpu_is_not_foreign",),
    ),
    Mutation(
        "host key pin",
        "a changed key is believed on first use",
        (
            (
                "fleet/machines/observation.py",
                "    if vm.host_key is None and pin:\n",
                "    if pin:\n",
            ),
        ),
        (f"{OBSERVATION}::TestKeys::test_trust_on_first_use_pins_the_first_and_no_other",),
    ),
    Mutation(
        "machine",
        "becomes another place for its runner under what runs there",
        (
            (
                "fleet/verbs/machines.py",
                "    if moved := [name for name in PLACE if",
                "    if moved := [name for name in () if",
            ),
        ),
        (f"{VERBS}/test_machines.py::test_a_machine_in_use_stays_the_place_that_it_is",),
    ),
    Mutation(
        "admission freezes",
        "rows with which nothing can be done stand before others",
        (
            (
                "fleet/queue/admission.py",
                "        if len(stuck) == before or dealt_with == limit:\n",
                "        if stuck or dealt_with == limit:\n",
            ),
        ),
        (f"{ADMISSION}::test_rows_that_the_database_lets_nobody_refuse_stand_before_no_other",),
    ),
    # --- what keys of one project see -----------------------------------------------------------
    Mutation(
        "bound",
        "a key of one project is told how machines are reached",
        (("fleet/verbs/bound.py", "{**document, **nobodys, **untold", "{**document, **untold"),),
        (f"{UNIT}/verbs/test_bound.py::test_a_bound_key_does_not_see_through_machines",),
    ),
    Mutation(
        "bound",
        "why a job waits names whoever a GPU is kept for",
        (
            (
                "fleet/verbs/bound.py",
                "_KEPT.sub(lambda kept: _of_own(session, actor, kept), text)",
                "text",
            ),
        ),
        (f"{UNIT}/verbs/test_bound.py::test_a_bound_key_does_not_see_through_machines",),
    ),
    # --- events and those who read them -----------------------------------------------------------
    Mutation(
        "tracker",
        "its position moves before anybody has taken what it tells",
        (
            (
                "fleet/tracker.py",
                "position = min(waiting) - 1 if waiting else self._read",
                "position = self._read",
            ),
        ),
        (f"{TRACKER}::test_after_a_restart_it_goes_on_where_it_was_acknowledged",),
    ),
    Mutation(
        "tracker",
        "its position moves over those that wait for their place",
        (
            (
                "fleet/tracker.py",
                "waiting = [*self._untold, *(numbers[0] for numbers in self._later.values())]",
                "waiting = [*self._untold]",
            ),
        ),
        (f"{TRACKER}::test_many_that_wait_at_one_place_keep_none_of_the_others_from_being_read",),
    ),
    Mutation(
        "tracker",
        "its position moves back",
        (
            (
                "fleet/tracker.py",
                ".where(Cursor.name == name, Cursor.position < position)",
                ".where(Cursor.name == name)",
            ),
        ),
        (f"{TRACKER}::test_a_position_never_goes_back",),
    ),
    Mutation(
        "tracker",
        "NATS that is new is told of all history",
        (
            (
                "fleet/tracker.py",
                "first = 0 if tells_history else events.newest(session, seconds(session) - RECENT)",
                "first = 0",
            ),
        ),
        (f"{TRACKER}::test_news_that_are_new_begin_with_the_last_hour_and_say_so",),
    ),
    Mutation(
        "tracker",
        "where news began is not written down before something was told",
        (("fleet/tracker.py", "    keep_position(session, name, first)\n", ""),),
        (f"{TRACKER}::test_news_of_a_fleet_that_is_new_lose_nothing",),
    ),
    Mutation(
        "tracker",
        "what fits in no message of NATS is tried for ever",
        (
            (
                "fleet/tracker.py",
                " for e, text in messages if len(text) <= largest]",
                " for e, text in messages]",
            ),
        ),
        (f"{TRACKER}::test_an_end_that_fits_in_no_message_keeps_no_other_from_being_told",),
    ),
    Mutation(
        "doorbell",
        "the sockets of other machines are taken for dead ones",
        (
            (
                "fleet/doorbells/local.py",
                'if n.startswith(f"{self._system}-")]',
                'if n.endswith(".sock")]',
            ),
        ),
        (f"{UNIT}/doorbells/test_local.py::test_the_sockets_of_other_machines_are_left_alone",),
    ),
    Mutation(
        "tracker",
        "numbers that a database has lost and gave again are passed over",
        (
            (
                "fleet/tracker.py",
                "    _check(session, newest)\n    read = ",
                "    read = ",
            ),
        ),
        (f"{TRACKER}::test_a_database_that_has_lost_its_last_commits_is_read_anew",),
    ),
    Mutation(
        "tracker",
        "its position moves in a database that has lost what it read",
        (("fleet/tracker.py", "        _check(session, self._newest)\n", ""),),
        (f"{TRACKER}::test_no_position_is_written_into_a_database_that_has_lost_it",),
    ),
    # --- logs and artefacts -----------------------------------------------------------------------
    Mutation(
        "log",
        "bytes are added wherever the file ends",
        (
            (
                "fleet/files/logs.py",
                "        if size != offset:\n            return size\n",
                "        offset = size\n",
            ),
        ),
        (f"{LOGS}::test_bytes_are_added_only_where_the_file_ends",),
    ),
    Mutation(
        "log",
        "a torn end stays",
        (("fleet/files/logs.py", "        if size > reported:\n", "        if False:\n"),),
        (f"{LOGS}::test_what_may_be_torn_is_cut_off",),
    ),
    Mutation(
        "log",
        "a dispatcher that was replaced reports how far it is",
        (("fleet/files/logs.py", "    guarded(session, part.epoch, part.owner)\n", ""),),
        (f"{LOGS}::test_who_does_not_own_the_attempt_any_more_reports_nothing",),
    ),
    Mutation(
        "checkpoint",
        "a dispatcher that was replaced writes its row",
        (("fleet/files/mirror.py", "guarded(session, part.epoch, part.owner)", "None"),),
        (f"{UNIT}/files/test_mirror.py::test_who_does_not_own_the_attempt_any_more_writes_no_row",),
    ),
    # --- whose files they are ---------------------------------------------------------------------
    Mutation(
        "files of other projects",
        "are named by their hash",
        (
            (
                "fleet/store/rights.py",
                "    return frozenset(wanted) - found\n",
                "    return frozenset()\n",
            ),
        ),
        (
            f"{API}::test_nobody_gets_a_file_of_another_project_by_its_hash",
            f"{API}::test_what_another_project_has_is_sent_whole_all_the_same",
            f"{UNIT}/files/test_mirror.py::test_a_manifest_that_names_the_file_of_another_project_does_not_get_it",
            f"{UNIT}/files/test_artefacts.py::test_a_list_that_names_the_file_of_another_project_does_not_get_it",
        ),
    ),
    Mutation(
        "what others have begun to send",
        "is completed by whoever has the end",
        (
            (
                "fleet/store/rights.py",
                '    if projects is None:\n        return ""\n    return hash',
                '    return ""\n    return hash',
            ),
        ),
        (f"{API}::test_the_end_of_a_file_does_not_complete_what_somebody_else_has_begun",),
    ),
    Mutation(
        "a right that was given anew",
        "goes with the old blob",
        (
            (
                "fleet/store/rights.py",
                " & (BlobRight.at < clock() - age)\n    session",
                "\n    session",
            ),
        ),
        (f"{STORE}::test_a_right_to_what_is_sent_again_while_it_is_cleared_away_stays",),
    ),
    # --- what goes --------------------------------------------------------------------------------
    Mutation(
        "blobs that are young",
        "what nobody names yet is collected",
        (("hosts/files.py", "status.st_mtime + spared < moment", "status.st_mtime <= moment"),),
        (
            f"{STORE}::test_only_what_nothing_names_goes",
            f"{HOSTS}/test_files.py::test_what_nobody_names_is_collected_and_what_somebody_just_asked_for_is_not",
        ),
    ),
    Mutation(
        "the time before what is named",
        "it is looked at afterwards",
        (
            (
                "fleet/files/clearing.py",
                "        now, needed = store.now(), store.all_needed()\n        named = database.read(named_blobs)\n",
                "        named = database.read(named_blobs)\n        now, needed = store.now(), store.all_needed()\n",
            ),
        ),
        (f"{STORE}::test_what_is_put_while_it_is_asked_what_is_named_stays",),
    ),
    Mutation(
        "one collects",
        "several do",
        (
            (
                "fleet/files/clearing.py",
                "            yield False\n            return\n",
                "            pass\n",
            ),
        ),
        (f"{STORE}::test_one_process_at_a_time_collects",),
    ),
    Mutation(
        "an empty database",
        "names nothing, and is believed",
        (
            (
                "fleet/files/clearing.py",
                "    if not _has_had_jobs(session):\n        return None\n",
                "",
            ),
        ),
        (f"{STORE}::test_a_database_that_never_had_a_job_is_not_believed",),
    ),
    Mutation(
        "rows before files",
        "the files of a job go first",
        (
            (
                "fleet/verbs/prune.py",
                "        jobs = [\n            job\n            for some",
                "        for job in jobs:\n            remove_files(folders, job)\n"
                "        jobs = [\n            job\n            for some",
            ),
        ),
        (f"{STORE}::test_dying_at_any_instant_leaves_no_row_without_its_files",),
    ),
    Mutation(
        "pruned, or unknown",
        "files of jobs that no table knows go",
        (("fleet/files/clearing.py", "Event.kind == events.JOB_PRUNED,", ""),),
        (f"{STORE}::test_pruning_is_what_the_events_say",),
    ),
    Mutation(
        "what attempts go on from",
        "is collected with the checkpoint's row",
        (
            (
                "fleet/files/clearing.py",
                '        select(Attempt.resume_from["manifest"]).where(live),\n',
                "",
            ),
        ),
        (f"{STORE}::test_what_a_job_or_an_attempt_needs_is_named",),
    ),
    Mutation(
        "what a checkpoint on its way needs",
        "is collected meanwhile",
        (
            (
                "fleet/files/clearing.py",
                "store.collect(named | needed, now=now)",
                "store.collect(named, now=now)",
            ),
        ),
        (f"{UNIT}/files/test_mirror.py::test_what_a_mirror_needs_stays_however_long_it_takes",),
    ),
    Mutation(
        "folders of what is given up",
        "go before their machine was seen to hold nothing",
        (("fleet/machines/clearing.py", "over and row.released and", "over and"),),
        (f"{CLEARING}::test_what_is_not_over_for_certain_stays",),
    ),
    Mutation(
        "folders of strangers",
        "are forgotten",
        (
            (
                "fleet/machines/clearing.py",
                "    return [name for name in names if name in over]\n",
                "    return list(names)\n",
            ),
        ),
        (f"{CLEARING}::test_what_no_table_knows_stays",),
    ),
    Mutation(
        "the last folder of a job that goes on",
        "goes",
        (("fleet/machines/clearing.py", " and last.get(name[0]) != name[1]", ""),),
        (f"{CLEARING}::test_the_last_folder_of_a_job_that_goes_on_stays",),
    ),
    Mutation(
        "files that live attempts need",
        "are swept",
        (("fleet/machines/clearing.py", "runner.sweep(needed, ", "runner.sweep([], "),),
        (f"{CLEARING}::test_files_of_what_runs_are_not_swept",),
    ),
    Mutation(
        "files that were asked for",
        "are swept",
        (
            (
                "hosts/runner.py",
                "            os.utime(root.blob(sha), (BLOB_TIME, BLOB_TIME))\n            return True\n    except",
                "            return True\n    except",
            ),
        ),
        (f"{FILES}::test_what_was_asked_for_lately_is_not_swept",),
    ),
    Mutation(
        "a machine that is added again",
        "is used before it is emptied",
        (
            (
                "fleet/verbs/machines.py",
                "    if _left_there(session, new.vm_id):\n",
                "    if False:\n",
            ),
        ),
        (
            f"{VERBS}/test_machines.py::test_a_machine_that_was_given_up_and_is_added_again_is_not_used_before_it_is_emptied",
        ),
    ),
    Mutation(
        "a machine that is added again",
        "is believed to be what it was",
        (
            (
                "fleet/verbs/machines.py",
                "    _describe(vm, new)\n    vm.observed_round = seconds(session)",
                "    _describe(vm, new)\n    _ = seconds(session)",
            ),
        ),
        (
            f"{VERBS}/test_machines.py::test_a_look_that_was_under_way_at_what_it_was_before_says_nothing",
        ),
    ),
    Mutation(
        "what was given up on a lost machine",
        "is pruned, and nobody knows it when it is back",
        (
            (
                "fleet/verbs/prune.py",
                "(open_attempt, given_up, held)",
                "(open_attempt, held)",
            ),
        ),
        (
            f"{VERBS}/test_machines.py::test_what_was_given_up_on_a_lost_machine_is_not_pruned_before_it_is_back",
        ),
    ),
    Mutation(
        "artefacts by hash",
        "what comes is what was announced",
        (
            (
                "hosts/fetching.py",
                "    if hash_of(place) != entry.sha256:\n",
                "    if False:\n",
            ),
        ),
        (
            f"{ARTEFACTS}::test_what_an_earlier_try_left_torn_is_fetched_again",
            f"{ARTEFACTS}::test_a_file_that_never_is_what_the_list_says_is_a_problem",
        ),
    ),
    Mutation(
        "artefacts by hash",
        "a file is as long as a job makes it, also among many in one answer",
        (
            (
                "hosts/runner.py",
                "        data = read_inside(work, path, size + 1)\n",
                "        data = read_inside(work, path, -1)\n",
            ),
        ),
        (f"{FILES}::test_no_more_is_read_of_a_file_than_was_listed",),
    ),
    Mutation(
        "artefacts by hash",
        "who is cancelled leaves a folder to others to which a thread still writes",
        (("hosts/fetching.py", "        await asyncio.wait([working])\n", ""),),
        (f"{ARTEFACTS}::test_a_folder_is_given_up_when_nobody_writes_there_any_more",),
    ),
    Mutation(
        "artefacts stay in their folder",
        "paths are taken as the machine says them",
        (
            (
                "hosts/answers.py",
                '        problems = path_problems("file", path)\n',
                "        problems: list[str] = []\n",
            ),
        ),
        (
            f"{HOSTS}/test_answers.py::test_paths_that_leave_the_folder_are_refused_whatever_the_machine_says",
        ),
    ),
    Mutation(
        "artefacts stay in their folder",
        "links are listed as what they lead to",
        (
            (
                "hosts/runner.py",
                "                found = os.stat(name, dir_fd=fd, follow_symlinks=False)\n",
                "                found = os.stat(name, dir_fd=fd)\n",
            ),
        ),
        (f"{FILES}::test_what_is_no_plain_file_inside_is_refused",),
    ),
    Mutation(
        "artefacts stay in their folder",
        "a link that stands there is followed",
        (
            (
                "hosts/runner.py",
                "            if kind in KINDS:  # to open a device may do something\n",
                "            if False:\n",
            ),
            (
                "hosts/runner.py",
                "below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)",
                "below = os.open(part, os.O_RDONLY | os.O_NONBLOCK, dir_fd=fd)",
            ),
        ),
        (f"{FILES}::test_an_artefact_that_is_a_link_itself",),
    ),
    Mutation(
        "artefacts stay in their folder",
        "what becomes a link a moment before it is opened is followed",
        (
            (
                "hosts/runner.py",
                "below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)",
                "below = os.open(part, os.O_RDONLY | os.O_NONBLOCK, dir_fd=fd)",
            ),
        ),
        (f"{FILES}::test_what_becomes_a_link_a_moment_before_it_is_opened",),
    ),
    Mutation(
        "log",
        "a full disk leaves a part of what was added",
        (
            (
                "fleet/files/logs.py",
                "            os.ftruncate(file, offset)  # a full disk",
                "            pass  # a full disk",
            ),
        ),
        (f"{LOGS}::test_a_full_disk_is_told_and_leaves_the_file_as_it_was",),
    ),
    Mutation(
        "doorbell",
        "what a stranger sends is taken for ids",
        (
            (
                "fleet/doorbells/port.py",
                "for name in _names(document, DEEPEST) if JOB_ID.fullmatch(name))",
                "for name in _names(document, DEEPEST))",
            ),
        ),
        (f"{UNIT}/doorbells/test_port.py::test_only_ids_are_read_from_what_strangers_send",),
    ),
    # --- the runner -------------------------------------------------------------------------------
    Mutation(
        "signs of life",
        "a runner that says that it goes on is given up",
        (("hosts/framing.py", "        self._wait_on()\n", ""),),
        (
            "tests/contract/test_host_contract.py::test_who_gives_signs_of_life_is_waited_for_longer[local]",
        ),
    ),
    Mutation(
        "signs of life",
        "a runner whose disk hangs gives them",
        (("hosts/runner.py", "    if done != told:\n", "    if True:\n"),),
        (f"{FILES}::test_a_disk_that_hangs_gives_no_signs",),
    ),
    Mutation(
        "an acknowledgement of NATS",
        "it is the answer to a ping that overtook what was published",
        (
            (
                "fleet/doorbells/nats.py",
                "                await client.rtt()\n                await client.rtt()\n",
                "                await client.rtt()\n",
            ),
        ),
        (
            f"{UNIT}/doorbells/test_nats.py::test_the_last_ping_stands_behind_all_that_was_published",
        ),
    ),
    Mutation(
        "what takes long is done once",
        "artefacts are read by all who ask for them",
        (
            (
                "hosts/runner.py",
                "        with alone(attempt.path):\n",
                "        with contextlib.nullcontext():\n",
            ),
        ),
        (f"{FILES}::test_who_waits_for_another_one_ends_with_whoever_asked",),
    ),
    Mutation(
        "a supervisor needs no other Python",
        "it imports how to count what was used when its command has ended",
        (
            ("hosts/runner.py", "import resource\n", ""),
            (
                "hosts/runner.py",
                "        used = resource.getrusage(",
                "        import resource\n\n        used = resource.getrusage(",
            ),
        ),
        (f"{RUNNER}::test_a_supervisor_imports_nothing_once_it_has_settled",),
    ),
    Mutation(
        "what a job leaves is removed",
        "but for what it has closed",
        (("hosts/runner.py", "            os.chmod(same, 0o700)\n", "            pass\n"),),
        (f"{FILES}::test_folders_that_a_job_has_closed_or_nested_are_removed",),
    ),
    Mutation(
        "artefacts are whole",
        "links hide what is kept back",
        (
            (
                "hosts/runner.py",
                "weighs = path in self.named or why not in NO_FILES",
                "weighs = True",
            ),
        ),
        (f"{FILES}::test_of_very_much_that_is_refused_some_is_told_and_how_much_more",),
    ),
    Mutation(
        "a request is whole",
        "one whose hash is another is carried out",
        (("hosts/bootstrap.py", 'if sha(text).encode("ascii") != head.group(3):', "if not text:"),),
        (f"{RUNNER}::test_a_request_that_was_changed_does_nothing",),
    ),
    Mutation(
        "a request is whole",
        "one that was cut is carried out",
        (
            (
                "hosts/bootstrap.py",
                'if sha(text).encode("ascii") != head.group(3):',
                'if len(text) == int(head.group(2)) and sha(text).encode("ascii") != head.group(3):',
            ),
        ),
        (f"{RUNNER}::test_a_request_that_was_cut_does_nothing",),
    ),
    Mutation(
        "the runner that was named",
        "one that was damaged on the machine runs",
        (("hosts/bootstrap.py", "    if sha(here) != want:\n", "    if not here:\n"),),
        (f"{RUNNER}::test_a_damaged_runner_is_replaced_not_run",),
    ),
    Mutation(
        "the runner that was named",
        "any that is sent along runs",
        (("hosts/bootstrap.py", "        if sha(source) != want:\n", "        if not source:\n"),),
        (f"{RUNNER}::test_another_runner_than_the_named_one_is_refused",),
    ),
    Mutation(
        "an answer is whole",
        "one whose hash is another is read",
        (
            (
                "hosts/framing.py",
                'if hashlib.sha256(document).hexdigest().encode("ascii") != self._digest:',
                "if False:",
            ),
        ),
        (f"{HOSTS}/test_framing.py::test_an_answer_that_was_changed_is_none",),
    ),
    Mutation(
        "epoch",
        "a machine begins a lower one than it has seen",
        (
            (
                "hosts/runner.py",
                'if attempt.epoch < known["highest"] or attempt.epoch <= known["forgotten"]:',
                'if attempt.epoch <= known["forgotten"]:',
            ),
        ),
        (f"{RUNNER}::test_a_lower_epoch_is_refused",),
    ),
    Mutation(
        "epoch",
        "a machine begins one that it was told to forget",
        (
            (
                "hosts/runner.py",
                'if attempt.epoch < known["highest"] or attempt.epoch <= known["forgotten"]:',
                'if attempt.epoch < known["highest"]:',
            ),
        ),
        (f"{RUNNER}::test_a_forgotten_epoch_stays_refused",),
    ),
    Mutation(
        "void is acknowledged by the machine",
        "nothing is set aside for it on a full disk",
        (
            (
                "hosts/runner.py",
                '        remove_file(root.at("spare"))\n        work()\n',
                "        raise\n",
            ),
        ),
        (
            f"{FAULTS}::test_what_failed_to_begin_can_be_given_up_and_what_is_old_can_go_from_a_full_disk",
        ),
    ),
    Mutation(
        "one claim of an attempt",
        "launch and void decide side by side",
        (
            (
                "hosts/runner.py",
                "    with root.job_lock(attempt.job):\n        take_over_unbegun(attempt)\n        if os.path.isdir(attempt.path):\n",
                "    with contextlib.nullcontext():\n        take_over_unbegun(attempt)\n        if os.path.isdir(attempt.path):\n",
            ),
        ),
        (f"{FAULTS}::test_who_decides_is_decided_by_one_at_a_time",),
    ),
    Mutation(
        "one claim of an attempt",
        "a launch that is repeated begins anew",
        (
            (
                "hosts/runner.py",
                "    os.mkdir(new, 0o700)\n    lock = None\n",
                "    remove_tree(attempt.path)\n    os.mkdir(new, 0o700)\n    lock = None\n",
            ),
            (
                "hosts/runner.py",
                "    if os.path.isdir(attempt.path) and not was_unbegun(attempt):\n",
                "    if False:\n",
            ),
            (
                "hosts/runner.py",
                '        if os.path.isdir(attempt.path):\n            return member(attempt), b""\n        known',
                "        known",
            ),
        ),
        (f"{RUNNER}::test_launch_again_tells_the_state_and_starts_nothing",),
    ),
    Mutation(
        "one claim of an attempt",
        "a folder that is there already is no claim of somebody else",
        (
            (
                "hosts/runner.py",
                "        os.rename(new, attempt.path)\n        sync_folder(above)\n",
                "        remove_tree(attempt.path)\n        os.rename(new, attempt.path)\n        sync_folder(above)\n",
            ),
        ),
        (f"{FAULTS}::test_a_claim_never_takes_the_place_of_another",),
    ),
    Mutation(
        "supervisor.lock",
        "nobody holds it",
        (
            (
                "hosts/runner.py",
                '            lock = take_lock(os.path.join(new, "supervisor.lock"))\n',
                '            lock = os.open(os.path.join(new, "supervisor.lock"), os.O_RDWR | os.O_CREAT)\n',
            ),
        ),
        (f"{FAULTS}::test_what_is_being_claimed_is_left_alone",),
    ),
    Mutation(
        "supervisor.lock",
        "what a launch left is taken over without it",
        (
            (
                "hosts/runner.py",
                '        and not is_locked(attempt.at("supervisor.lock"))\n        and not',
                "        and not",
            ),
            (
                "hosts/runner.py",
                '    lock = take_lock(attempt.at("supervisor.lock"))\n    if lock is not None:\n',
                '    lock = os.open(attempt.at("supervisor.lock"), os.O_RDWR)\n    if lock is not None:\n',
            ),
        ),
        (f"{FAULTS}::test_what_is_being_claimed_is_left_alone",),
    ),
    Mutation(
        "pid before command",
        "a command begins before its record",
        (("hosts/runner.py", "        if os.read(go_on, 1):\n", "        if True:\n"),),
        (f"{FAULTS}::test_a_command_waits_for_the_word_of_its_supervisor",),
    ),
    Mutation(
        "GPU lock",
        "whole GPUs are locked as shares are",
        (
            (
                "hosts/runner.py",
                "    fd = take_lock(path, fcntl.LOCK_EX, GPU_LOCK_PATIENCE)\n",
                "    fd = take_lock(path, fcntl.LOCK_SH, GPU_LOCK_PATIENCE)\n",
            ),
        ),
        (f"{GPUS}::test_a_gpu_is_one_attempt_s",),
    ),
    Mutation(
        "GPU lock",
        "shares are not added up",
        (
            (
                "hosts/runner.py",
                "        if used + share_mb > total:\n",
                "        if share_mb > total:\n",
            ),
        ),
        (f"{GPUS}::test_shares_fit_beside_each_other",),
    ),
    Mutation(
        "GPU lock",
        "somebody else's process keeps nobody off",
        (("hosts/runner.py", "            refuse_company(order, app)\n", "            pass\n"),),
        (f"{GPUS}::test_a_foreign_process_keeps_us_off",),
    ),
    Mutation(
        "start ticks",
        "a pid is signalled whoever has it",
        (
            (
                "hosts/runner.py",
                "if found is None or found.ticks != ticks or found.zombie:",
                "if found is None or found.zombie:",
            ),
        ),
        (f"{FAULTS}::test_send_compares_before_it_signals",),
    ),
    Mutation(
        "start ticks",
        "a reused pid belongs to the attempt",
        (
            (
                "hosts/runner.py",
                "return self.same_boot and (p.pid, p.ticks) == self.child",
                "return self.same_boot and p.pid == self.child[0]",
            ),
        ),
        (f"{FAULTS}::test_a_pid_that_was_reused_is_not_killed",),
    ),
    Mutation(
        "boot id",
        "a pid of another boot belongs to the attempt",
        (
            (
                "hosts/runner.py",
                "return self.same_boot and (p.pid, p.ticks) == self.child",
                "return (p.pid, p.ticks) == self.child",
            ),
            (
                "hosts/runner.py",
                'if state.get("boot_id") not in (None, boot_id()):',
                "if False:",
            ),
        ),
        (f"{FAULTS}::test_a_pid_that_was_reused_is_not_killed",),
    ),
    Mutation(
        "deadman",
        "contact moves it back",
        (
            (
                "hosts/runner.py",
                "    if before is not None and before >= stamp:\n        return True\n",
                "",
            ),
        ),
        (f"{FAULTS}::test_the_deadman_counts_from_the_last_contact",),
    ),
    Mutation(
        "release: lock",
        "one that is held does not count",
        (
            (
                "hosts/runner.py",
                "    holders = held_locks(attempt, uuids, share)\n",
                "    holders: list[dict[str, Any]] = []\n",
            ),
        ),
        (f"{GPUS}::test_a_running_attempt_holds_its_gpu",),
    ),
    Mutation(
        "release: processes",
        "those that wrote over their environment do not count",
        (
            (
                "hosts/runner.py",
                'return marked or has_open(pid, self.attempt.at("tether"))',
                "return marked",
            ),
        ),
        (
            f"{FAULTS}::test_a_survivor_that_overwrote_its_environment_is_found_by_what_it_inherited",
        ),
    ),
    Mutation(
        "release: control group",
        "who is in it does not count",
        (("hosts/runner.py", "if pid in below or pid in grouped or ", "if pid in below or "),),
        (f"{FAULTS}::test_a_survivor_without_our_environment_is_found_by_its_control_group",),
    ),
    Mutation(
        "release: memory",
        "it is not looked at",
        (("hosts/runner.py", "    if uuids and share is None:\n", "    if False:\n"),),
        (f"{GPUS}::test_memory_has_to_be_seen_idle",),
    ),
    Mutation(
        "release: memory",
        "what cannot be read is idle",
        (
            (
                "hosts/runner.py",
                '        if used is None and not uuid.startswith("MIG-"):\n',
                "        if False:\n",
            ),
        ),
        (f"{GPUS}::test_memory_has_to_be_seen_idle",),
    ),
    Mutation(
        "release",
        "a GPU is given back while something holds it",
        (("fleet/attempts/drive.py", "        if found.clean:\n", "        if True:\n"),),
        (f"{DISPATCHER}::test_what_a_job_leaves_behind_keeps_its_gpu_until_it_is_gone",),
    ),
    Mutation(
        "the end is the end of everything",
        "what the command started lives on",
        (
            (
                "hosts/runner.py",
                "        left = self.end_leftovers(ended)\n",
                "        left: dict[int, Process] = {}\n",
            ),
        ),
        (f"{FAULTS}::test_nothing_outlives_an_end",),
    ),
    Mutation(
        "blobs by hash",
        "other bytes are kept under a name",
        (
            (
                "hosts/runner.py",
                '            if digest.hexdigest() != sha:\n                raise Refusal("bad_blob"',
                '            if False:\n                raise Refusal("bad_blob"',
            ),
        ),
        (f"{FILES}::test_bytes_of_another_hash_are_not_kept",),
    ),
    Mutation(
        "artefacts",
        "any file of the control machine is given out as one",
        (("fleet/verbs/left.py", "    if path not in named:\n", "    if False:\n"),),
        (f"{API}::test_artefacts_are_listed_and_fetched_whole",),
    ),
    Mutation(
        "artefacts",
        "a file of any job is given out as one of this job's checkpoints",
        (
            (
                "fleet/verbs/left.py",
                "    if sha256 not in _HASHES.of(",
                "    if False and sha256 not in _HASHES.of(",
            ),
        ),
        (f"{API}::test_checkpoints_are_listed_and_fetched_by_who_may_see_the_job",),
    ),
    Mutation(
        "fetch",
        "what came is not compared with its hash",
        (
            (
                "fleet/download.py",
                "    return size == entry.size and hashed.hexdigest() == entry.sha256\n",
                "    return size == entry.size\n",
            ),
        ),
        (
            f"{UNIT}/test_download.py::test_what_comes_and_is_wrong_is_not_kept",
            f"{UNIT}/test_download.py::test_what_is_torn_comes_again_from_the_beginning",
        ),
    ),
    Mutation(
        "fetch",
        "a path leads out of the folder",
        (
            (
                "fleet/download.py",
                '        if wrong := path_problems("file", path):\n',
                "        if wrong := []:\n",
            ),
        ),
        (f"{UNIT}/test_download.py::test_no_path_leads_out_of_the_folder",),
    ),
    Mutation(
        "fetch",
        "a file that is another one is replaced",
        (
            (
                "fleet/download.py",
                "    others = [path for path in here if not force or (folder / path).is_dir()]\n",
                "    others: list[str] = []\n",
            ),
        ),
        (
            f"{UNIT}/test_download.py::test_another_file_is_in_the_way",
            f"{UNIT}/test_download.py::test_a_link_is_another_file_and_is_replaced_itself",
        ),
    ),
    # --- names, variables, secrets ----------------------------------------------------------------
    Mutation(
        "job_id",
        "a row may have any",
        (
            (
                "fleet/queue/admission.py",
                "    if not JOB_ID.fullmatch(row.job_id):\n",
                "    if False:\n",
            ),
        ),
        (f"{ADMISSION}::test_ids_that_could_not_name_a_folder",),
    ),
    Mutation(
        "job_id",
        "a machine takes any",
        (("hosts/runner.py", "    if not JOB_ID.fullmatch(job):\n", "    if False:\n"),),
        (f"{RUNNER}::test_ill_formed_requests_are_refused_and_do_nothing",),
    ),
    Mutation(
        "environment",
        "the control plane passes every name on",
        (
            (
                "hosts/spec.py",
                "        elif name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):\n",
                "        elif name in RESERVED_NAMES:\n",
            ),
        ),
        (f"{HOSTS}/test_spec.py::test_variables_that_are_not_for_jobs_to_set",),
    ),
    Mutation(
        "environment",
        "a machine takes every name",
        (
            (
                "hosts/runner.py",
                "            if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):\n",
                "            if False:\n",
            ),
        ),
        (f"{RUNNER}::test_what_cannot_run_is_refused_for_good",),
    ),
    Mutation(
        "secrets by reference",
        "a job may name any file of the control machine",
        (
            (
                "fleet/queue/admission.py",
                "found += [] if found else fleet.allowed.problems(beyond.secrets)",
                "found += []",
            ),
        ),
        (f"{ADMISSION}::test_a_secret_that_the_operator_has_not_named_is_refused",),
    ),
    Mutation(
        "secrets by reference",
        "whoever reads them reads what any row names",
        (
            (
                "fleet/secrets.py",
                "        if (refusal := self._refusal(reference)) is not None:\n            raise",
                "        if (refusal := None) is not None:\n            raise",
            ),
        ),
        (f"{UNIT}/test_secrets.py::test_nothing_else",),
    ),
    Mutation(
        "secrets by reference",
        "a link leads out of the folder",
        (
            (
                "fleet/secrets.py",
                "if not any(_is_below(real, _root(each)) for each in self._named(path)):",
                "if False:",
            ),
        ),
        (f"{UNIT}/test_secrets.py::test_a_link_is_followed_within_the_folder_and_not_out_of_it",),
    ),
    Mutation(
        "webhooks",
        "they reach addresses that are not public",
        (("fleet/webhooks.py", "if not allow_private and (inner := ", "if False and (inner := "),),
        (f"{UNIT}/test_webhooks.py::test_nothing_is_sent_to_addresses_that_are_not_public",),
    ),
    # --- who may ask ------------------------------------------------------------------------------
    Mutation(
        "idempotency key",
        "it is not looked for",
        (("fleet/queue/admission.py", "    if key is not None:\n", "    if False:\n"),),
        (f"{ADMISSION}::test_one_key_one_job",),
    ),
    Mutation(
        "idempotency key",
        "it is one of the whole fleet",
        (
            (
                "fleet/queue/admission.py",
                "where(Job.project == project, Job.idempotency_key.in_(keys))",
                "where(Job.idempotency_key.in_(keys))",
            ),
        ),
        (f"{ADMISSION}::test_a_key_is_one_of_its_project",),
    ),
    Mutation(
        "idempotency key",
        "another request under it gets the job",
        (
            (
                "fleet/queue/admission.py",
                "if there.request_hash != digest or job_id not in (None, there.job_id):",
                "if job_id not in (None, there.job_id):",
            ),
        ),
        (f"{ADMISSION}::test_one_key_one_job",),
    ),
    Mutation(
        "projects",
        "a job of another one is shown",
        (
            (
                "fleet/verbs/find.py",
                "    if found is None or not actor.may_see(found.project):\n",
                "    if found is None:\n",
            ),
        ),
        (f"{VERBS}/test_jobs.py::test_a_job_of_another_project_does_not_exist",),
    ),
    Mutation(
        "projects",
        "a job comes after one of another",
        (
            (
                "fleet/queue/admission.py",
                "elif fleet.projects_of_jobs.get(job_id) != columns.project:",
                "elif job_id not in fleet.projects_of_jobs:",
            ),
        ),
        (f"{ADMISSION}::test_dependencies_are_jobs_of_the_same_project",),
    ),
    Mutation(
        "projects",
        "a key of one is a key of all",
        (
            (
                "fleet/api/serving.py",
                'Actor(f"key:{self.caller.key_id}", self.caller.projects)',
                'Actor(f"key:{self.caller.key_id}")',
            ),
        ),
        (f"{API}::test_a_key_of_a_project_sees_no_other",),
    ),
    Mutation(
        "patience",
        "who follows gives up as soon as who asks a short question",
        (
            (
                "fleet/patience.py",
                "if not is_passing(error) or now - since >= self._seconds:",
                "if error:",
            ),
        ),
        (f"{API}::test_who_follows_goes_on_where_the_fleet_was_away_and_loses_no_byte",),
    ),
    Mutation(
        "patience",
        "what a proxy says in place of the API is an answer",
        (("fleet/client.py", "if answer.status_code in OF_A_PROXY", "if not answer.status_code"),),
        (f"{API}::test_who_follows_goes_on_where_the_fleet_was_away_and_loses_no_byte",),
    ),
    Mutation(
        "exec",
        "a command whose reader was interrupted runs on",
        (
            (
                "cli/fleet_exec.py",
                "        _call_off(access, job_id)\n        raise\n",
                "        raise\n",
            ),
        ),
        (
            "tests/unit/cli/test_fleet.py::test_a_command_on_one_machine_that_is_interrupted_is_cancelled",
        ),
    ),
    Mutation(
        "projects",
        "who is bound to some changes machines",
        (
            (
                "fleet/verbs/actor.py",
                "        if self.projects is not None:\n",
                "        if False:\n",
            ),
        ),
        (f"{VERBS}/test_machines.py::test_who_is_bound_to_projects_changes_no_machine",),
    ),
    Mutation(
        "projects",
        "one submits for any",
        (("fleet/verbs/submission.py", "    if not actor.may_see(name):\n", "    if False:\n"),),
        (f"{VERBS}/test_others.py::test_one_submits_for_the_projects_that_one_may_see",),
    ),
    Mutation(
        "keys",
        "one that was revoked is still good",
        (
            (
                "fleet/api/callers.py",
                "if key is None or key.revoked_at is not None:",
                "if key is None:",
            ),
        ),
        (f"{API}::test_a_key_that_is_revoked_or_too_old_is_none",),
    ),
    Mutation(
        "keys",
        "one whose time is over is still good",
        (
            (
                "fleet/api/callers.py",
                "if key.expires_at is not None and seconds(session) >= key.expires_at:",
                "if False:",
            ),
        ),
        (f"{API}::test_a_key_that_is_revoked_or_too_old_is_none",),
    ),
    Mutation(
        "loopback without a key",
        "the API listens elsewhere without one",
        (
            (
                "fleet/api/serve.py",
                "    if not _has_keys(database, environment):\n",
                "    if False:\n",
            ),
        ),
        (f"{UNIT}/api/test_serve.py::test_other_machines_need_a_key",),
    ),
    Mutation(
        "loopback without a key",
        "keys travel in the clear",
        (("fleet/api/serve.py", "    if address.certificate is None:\n", "    if False:\n"),),
        (f"{UNIT}/api/test_serve.py::test_keys_do_not_travel_in_the_clear",),
    ),
    Mutation(
        "loopback without a key",
        "pages of other sites may ask",
        (
            (
                "fleet/api/app.py",
                "        local_only=open_to_this_machine,\n",
                "        local_only=False,\n",
            ),
        ),
        (f"{UNIT}/api/test_serve.py::test_without_a_key_only_this_machine_by_name",),
    ),
    # --- environments of machines -----------------------------------------------------------------
    Mutation(
        "environments",
        "what a killed build left is built upon",
        (
            (
                "fleet/machines/builder.py",
                "        clear(place)\n        try:\n",
                "        try:\n",
            ),
        ),
        (f"{BUILDER}::test_a_killed_build_leaves_nothing_that_is_taken_for_whole",),
    ),
    Mutation(
        "environments",
        "a folder without its marker is whole",
        (
            (
                "fleet/machines/builder.py",
                "    except (OSError, ValueError):\n        return None\n    works",
                '    except (OSError, ValueError):\n        said = {"groupwise": "1.0"}\n    works',
            ),
        ),
        (f"{BUILDER}::test_a_killed_build_leaves_nothing_that_is_taken_for_whole",),
    ),
    Mutation(
        "environments",
        "a marker is believed without a look",
        (
            (
                "fleet/machines/builder.py",
                '    if works == said.get("groupwise"):\n',
                "    if said:\n",
            ),
        ),
        (f"{BUILDER}::test_one_that_does_not_work_any_more_is_made_anew",),
    ),
    Mutation(
        "environments",
        "a pip that outlives its builder does not keep others away",
        (("fleet/machines/builder.py", "            pass_fds=(self.lock,),\n", ""),),
        (f"{BUILDER}::test_what_pip_leaves_running_keeps_others_from_building",),
    ),
    Mutation(
        "environments",
        "two build at once",
        (
            (
                "fleet/machines/builder.py",
                "    fcntl.flock(fd, fcntl.LOCK_EX)\n    return fd",
                "    return fd",
            ),
        ),
        (f"{BUILDER}::test_the_second_of_two_waits_and_finds_it_made",),
    ),
    Mutation(
        "environments",
        "one that a process uses is made anew under it",
        (("fleet/machines/builder.py", "    if users:\n", "    if not users and users:\n"),),
        (f"{BUILDER}::test_but_not_under_a_process_that_uses_it",),
    ),
    Mutation(
        "environments",
        "a job is known by its command alone",
        (
            (
                "fleet/machines/builder.py",
                '("cmdline", "environ", "maps")',
                '("cmdline", "maps")',
            ),
        ),
        (f"{BUILDER}::test_only_what_nobody_uses_or_keeps_is_removed",),
    ),
    Mutation(
        "environments",
        "one that is being built is removed",
        (
            (
                "fleet/machines/builder.py",
                "        if lock is None:\n            continue\n",
                "        if lock is None:\n            lock = os.open(os.devnull, os.O_RDONLY)\n",
            ),
        ),
        (f"{BUILDER}::test_only_what_nobody_uses_or_keeps_is_removed",),
    ),
    Mutation(
        "environments",
        "one that a row is about to name is removed",
        (
            (
                "fleet/machines/builder.py",
                "            if is_recent(place, order.asked_at):\n",
                "            if False:\n",
            ),
        ),
        (f"{BUILDER}::test_one_that_was_just_made_or_found_is_not_removed_before_a_row_names_it",),
    ),
    Mutation(
        "environments",
        "what was made long ago is taken in without a look",
        (
            (
                "fleet/machines/prepare.py",
                '            if _now_of(hello) - said["at"] <= TAKEN_IN:\n',
                "            if said:\n",
            ),
        ),
        (
            f"{UNIT}/machines/test_prepare.py::test_what_was_made_long_ago_is_looked_at_before_it_is_taken_in",
        ),
    ),
    Mutation(
        "environments",
        "what pip says of secrets is passed on",
        (
            (
                "fleet/machines/builder.py",
                '            line = line.replace(value, "****")\n',
                "            line = line.replace(value, value)\n",
            ),
        ),
        (f"{BUILDER}::test_secrets_are_taken_out_of_what_pip_says",),
    ),
    Mutation(
        "environments",
        "passwords of a package index stand in arguments",
        (("fleet/machines/plans.py", 'if "@" in parts.netloc:', 'if "@" in parts.scheme:'),),
        (f"{UNIT}/machines/test_plans.py::test_what_cannot_work_is_refused",),
    ),
    Mutation(
        "environments",
        "groupwise is installed by its name, which may be somebody else's",
        (
            (
                "fleet/machines/locks.py",
                "{NAME, *without}",
                "{*without}",
            ),
        ),
        (f"{UNIT}/machines/test_locks.py::test_groupwise_in_a_lock_is_left_to_the_wheel",),
    ),
    Mutation(
        "environments",
        "builds are strangers to the dispatcher",
        (
            (
                "fleet/machines/prepare.py",
                "posixpath.join(machine.workdir, ENVIRONMENTS, BUILDS)",
                "posixpath.join(machine.workdir, '')",
            ),
        ),
        (f"{PREPARE}::test_the_fleet_does_not_take_it_for_a_stranger",),
    ),
    Mutation(
        "environments",
        "a build that goes on is begun a second time",
        (
            (
                "fleet/machines/prepare.py",
                "    return alive[-1] if alive else None",
                "    return None",
            ),
        ),
        (f"{PREPARE}::test_two_at_once_make_it_once",),
    ),
    Mutation(
        "environments",
        "a lost connection ends the command",
        (
            (
                "fleet/machines/prepare.py",
                "        if now - self._silent_since > PATIENCE:",
                "        if now - self._silent_since >= 0:",
            ),
        ),
        (f"{PREPARE}::test_a_lost_connection_is_made_again",),
    ),
    Mutation(
        "environments",
        "old ones are removed while a launch may name them",
        (("cli/fleet_prepare.py", "    if epochs:\n", "    if not epochs and epochs:\n"),),
        ("tests/unit/cli/test_fleet_prepare.py::test_nothing_is_removed_while_jobs_begin",),
    ),
    # --- the control plane itself -----------------------------------------------------------------
    Mutation(
        "clearing",
        "the history of GPUs that nobody looks at stays",
        (("fleet/files/clearing.py", "        forget_history(database)\n", ""),),
        (f"{STORE}::test_a_week_of_each_gpu_is_kept_of_machines_that_have_left_too",),
    ),
    Mutation(
        "clearing",
        "the history of GPUs goes altogether",
        (("fleet/files/clearing.py", " & (GPUHistory.minute < first)", ""),),
        (f"{STORE}::test_a_week_of_each_gpu_is_kept_of_machines_that_have_left_too",),
    ),
    Mutation(
        "logs of the control plane",
        "a row that nobody can refuse is told of at every sweep",
        (("fleet/queue/admission.py", "    told.add(job_id)\n", ""),),
        (f"{ADMISSION}::test_rows_that_the_database_lets_nobody_refuse_stand_before_no_other",),
    ),
    Mutation(
        "names of machines",
        "GLOB reads to the first NUL",
        (("fleet/store/triggers.py", " OR instr({value}, char(0)) > 0 ", " "),),
        (f"{TRIGGERS}::test_nor_is_a_name_cut_short_or_no_text",),
    ),
    Mutation(
        "names of machines",
        "a row may have any",
        (("fleet/store/triggers.py", '_no_name(dialect, "NEW.vm_id")', '"1 = 0"'),),
        (f"{TRIGGERS}::test_a_machine_has_a_name_that_commands_can_say",),
    ),
    Mutation(
        "killed processes",
        "a process of another system is judged by its pid",
        (("fleet/processes.py", 'for name in ("boot_id", "pids")', "for name in ()"),),
        (f"{UNIT}/test_processes.py::test_nobody_knows_of_a_process_elsewhere",),
    ),
    Mutation(
        "killed processes",
        "whoever has the pid now is taken for it",
        (("fleet/processes.py", ' or now[1] != then.get("ticks")', ""),),
        (f"{UNIT}/test_processes.py::test_a_pid_that_another_has_now",),
    ),
    Mutation(
        "killed processes",
        "one that hangs is forgotten",
        (("fleet/processes.py", "if alone or is_gone(row.pid, row.facts)]", "]"),),
        (f"{UNIT}/test_processes.py::test_whoever_begins_takes_away_what_is_left",),
    ),
    Mutation(
        "killed processes",
        "doctor warns of those that are gone",
        (("fleet/doctor.py", 'and is_gone(each["pid"], each["facts"])', "and False"),),
        (
            f"{UNIT}/test_doctor.py::test_a_process_that_was_killed_worries_nobody_where_another_plays_its_role",
        ),
    ),
    Mutation(
        "one signal",
        "the group's copy of it ends everything",
        (("fleet/up.py", "elif now - self._asked_at > ONE_WISH:", "else:"),),
        (
            f"{UNIT}/test_up.py::test_the_second_signal_does_not_wait_unless_it_is_the_first_once_more",
        ),
    ),
    Mutation(
        "a fleet that was moved",
        "a role alone does not look",
        (
            (
                "fleet/up.py",
                "if place.settings.database is not None or API in roles:",
                "if place.settings.database is not None or set(roles) != set(ROLES):",
            ),
        ),
        (f"{UNIT}/test_up.py::test_a_role_alone_follows_the_folder_as_all_do",),
    ),
    Mutation(
        "NATS of what runs",
        "its secrets stand in the database",
        (("fleet/up.py", '{"url": access.shown, ', '{"url": access.url, '),),
        (f"{UNIT}/test_doctor.py::test_what_is_secret_in_an_address_is_written_nowhere",),
    ),
    Mutation(
        "NATS of what runs",
        "doctor believes the settings",
        (("fleet/doctor.py", "    if not told:\n", "    if True:\n"),),
        (
            f"{UNIT}/test_doctor.py::test_the_nats_of_what_runs_is_looked_at_whatever_the_settings_say",
        ),
    ),
)
"""Seconds each."""

SLOW = (
    Mutation(
        "tracker",
        "what NATS has not let us publish counts as told",
        (
            (
                "fleet/doorbells/nats.py",
                '            raise NatsRefused(f"NATS at {self._access.shown}: {self._refusals[0]}")\n',
                "",
            ),
        ),
        (
            f"{REAL}/test_tracker.py::test_what_may_not_be_published_is_not_told_and_holds_up_nothing_else",
        ),
    ),
    Mutation(
        "doorbell",
        "a ring that NATS does not allow is tried for ever",
        (
            (
                "fleet/doorbells/nats.py",
                "            except NatsRefused:\n                pass",
                "            except ZeroDivisionError:\n                pass",
            ),
        ),
        (f"{REAL}/test_doorbells.py::TestNats::test_what_may_not_be_rung_is_tried_once",),
    ),
    Mutation(
        "cancelling",
        "files go on to where nobody wants them",
        (("fleet/attempts/drive.py", "        self._provide_no_others(effects)\n", ""),),
        (f"{DISPATCHER}::test_nobody_sends_files_of_what_is_cancelled",),
    ),
    Mutation(
        "fetching",
        "what a machine does not give is asked for without a word",
        (
            (
                "fleet/attempts/drive.py",
                "            await self._not_taken_in(row, member, why, mendable=True)\n",
                "",
            ),
        ),
        (f"{DISPATCHER}::test_a_cancellation_ends_the_fetching_of_what_a_machine_does_not_give",),
    ),
    Mutation(
        "host key pin",
        "a machine without one is asked for more than its key",
        (("fleet/poller.py", "(machine.host_key is None or watched.barred)", "watched.barred"),),
        (f"{POLLER}::test_without_a_pinned_key_nothing_but_the_key_is_asked_for",),
    ),
    Mutation(
        "release: processes",
        "those that carry the attempt's name do not count",
        (("hosts/runner.py", "self._is_child(p) or self._is_marked(pid)", "self._is_child(p)"),),
        (f"{FAULTS}::test_what_a_killed_supervisor_left_is_counted_and_killed",),
    ),
    Mutation(
        "exit record",
        "no room is kept for it",
        (
            (
                "hosts/runner.py",
                '        write_json(attempt.at("exit.json"), record)\n        return True\n    except OSError:\n        pass\n',
                '        write_json(attempt.at("exit.json"), record)\n        return True\n    except OSError:\n        return False\n',
            ),
        ),
        (f"{FAULTS}::test_the_exit_record_has_room_on_a_full_disk",),
    ),
    Mutation(
        "lease",
        "a dispatcher goes on without it",
        (
            (
                "fleet/dispatcher.py",
                "        if left <= 0 and self._drives:\n",
                "        if False:\n",
            ),
        ),
        (f"{DISPATCHER}::test_a_dispatcher_that_cannot_renew_stops_before_others_take_over",),
    ),
    Mutation(
        "verbs lock their machine",
        "they do not",
        (
            (
                "fleet/verbs/find.py",
                "    found = session.get(VM, vm_id, with_for_update=lock or None)\n",
                "    found = session.get(VM, vm_id)\n",
            ),
        ),
        (
            f"{REAL}/test_machine_races.py::test_a_machine_on_which_a_job_was_just_placed_is_not_removed",
        ),
    ),
    Mutation(
        "two who add one machine",
        "the second fails without a word",
        (("fleet/verbs/machines.py", "active=False).on_conflict_do_nothing()", "active=False)"),),
        (f"{REAL}/test_machine_races.py::test_of_two_who_add_a_machine_the_second_is_told",),
    ),
    Mutation(
        "SKIP LOCKED",
        "dispatchers wait for the jobs of each other",
        (
            (
                "fleet/queue/claim.py",
                '.with_for_update(skip_locked=True, key_share=True)\n        .cte("chosen")',
                '.with_for_update(key_share=True)\n        .cte("chosen")',
            ),
        ),
        (f"{RACES}::test_dispatchers_do_not_wait_for_each_others_jobs",),
    ),
    Mutation(
        "SKIP LOCKED",
        "dispatchers take the jobs of each other",
        (
            (
                "fleet/queue/claim.py",
                '.with_for_update(skip_locked=True, key_share=True)\n        .cte("chosen")',
                '.cte("chosen")',
            ),
        ),
        (f"{RACES}::test_dispatchers_do_not_wait_for_each_others_jobs",),
    ),
    Mutation(
        "machines are locked in a claim",
        "two claims book on one at once",
        (
            (
                "fleet/queue/claim.py",
                "        .order_by(VM.vm_id)\n        .with_for_update(key_share=True)\n",
                "        .order_by(VM.vm_id)\n",
            ),
        ),
        (f"{RACES}::test_claims_of_one_machine_see_each_other",),
    ),
    Mutation(
        "quotas are locked in a claim",
        "two claims count on one at once",
        (
            (
                "fleet/queue/capacity.py",
                "locked = query.order_by(Project.name).with_for_update(key_share=True, skip_locked=not waiting)",
                "locked = query.order_by(Project.name)",
            ),
        ),
        (f"{RACES}::test_a_quota_holds_for_claims_at_once",),
    ),
    Mutation(
        "quotas are locked in a claim",
        "who holds one waits for another",
        (
            (
                "fleet/queue/claim.py",
                "lock_quotas(session, added, waiting=False)",
                "lock_quotas(session, added)",
            ),
        ),
        (f"{RACES}::test_who_books_on_one_quota_waits_for_no_other[False]",),
    ),
    Mutation(
        "quotas are locked in a claim",
        "one that is known is taken for one that is locked",
        (
            (
                "fleet/queue/claim.py",
                "added = set(projects) - plan.projects",
                "added = set(projects) - set(found.quotas)",
            ),
        ),
        (f"{RACES}::test_who_books_on_one_quota_waits_for_no_other[True]",),
    ),
    Mutation(
        "missed wake-ups",
        "what is kept for a gang is looked for where there is room now",
        (
            (
                "fleet/queue/waking.py",
                "trial = replace(found, machines=dict(found.machines), quotas=dict(found.quotas))",
                "trial = replace(found, machines={m.vm_id: m for m in found._with_room()}, quotas=dict(found.quotas))",
            ),
        ),
        (f"{CLAIM}::test_who_stands_behind_a_patient_gang_is_not_woken_in_vain",),
    ),
    Mutation(
        "starvation",
        "who came after a job that has ended never waits for room",
        (
            (
                "fleet/queue/claim.py",
                "            or_(~_depends(), Job.job_id == job.job_id),\n",
                "            ~_depends(),\n",
            ),
        ),
        (f"{CLAIM}::test_who_came_after_a_job_that_has_ended_waits_for_room_like_others",),
    ),
    Mutation(
        "missed wake-ups",
        "a job is marked that has left the queue meanwhile",
        (
            (
                "fleet/queue/claim.py",
                "        .where(QUEUED, Job.cancel_requested_at.is_(None), Job.job_id.in_(unmet))\n",
                "        .where(Job.job_id.in_(unmet))\n",
            ),
        ),
        (f"{CLAIM}::test_what_leaves_the_queue_before_it_is_marked_is_left_alone",),
    ),
    Mutation(
        "missed wake-ups",
        "marking does not hold up waking",
        (
            (
                "fleet/queue/waking.py",
                "        session.execute(select(func.pg_advisory_xact_lock_shared(_LOCK)))\n",
                "        pass\n",
            ),
        ),
        (f"{RACES}::test_released_between_the_mark_and_its_commit",),
    ),
    Mutation(
        "missed wake-ups",
        "a job is marked by what was seen before",
        (
            (
                "fleet/queue/claim.py",
                "    waking.lock_marking(session)\n",
                "    found = capacity.view(session, {job.project for job in unplaced.blocked})\n    waking.lock_marking(session)\n",
            ),
            (
                "fleet/queue/claim.py",
                "        found = capacity.view(session, {job.project for job in unplaced.blocked})\n",
                "",
            ),
        ),
        (f"{RACES}::test_released_between_the_look_and_the_mark",),
    ),
    Mutation(
        "horizon of events",
        "who commits late is skipped",
        (
            (
                "fleet/store/events.py",
                "        chosen = chosen.where(Event.event_id <= _settled(session))\n",
                "        pass\n",
            ),
        ),
        (f"{REAL}/test_events.py::test_who_commits_late_is_not_skipped",),
    ),
    Mutation(
        "a server that only reads",
        "connections that lead there are kept",
        (("fleet/store/engine.py", "        context.is_disconnect = True\n", "        pass\n"),),
        (f"{REAL}/test_database.py::test_who_was_led_to_a_server_that_only_reads_asks_anew",),
    ),
    Mutation(
        "a server that only reads",
        "a standby is asked to let a transaction write",
        (("fleet/store/engine.py", "    driver.read_only = None\n", "    pass\n"),),
        (f"{REAL}/test_database.py::test_a_standby_is_waited_for_until_it_takes_writes",),
    ),
    Mutation(
        "a commit without an answer",
        "a transaction that may have happened is repeated",
        (
            (
                "fleet/store/database.py",
                "        if _answer_is_missing(error):\n",
                "        if False:\n",
            ),
        ),
        (f"{REAL}/test_database.py::test_lost_during_commit",),
    ),
    Mutation(
        "events are append-only",
        "all of them may go at once",
        (
            (
                "fleet/store/triggers.py",
                "            yield from _no_truncation(table)\n",
                "            yield from ()\n",
            ),
        ),
        (f"{REAL}/test_triggers.py::test_events_are_only_appended",),
    ),
    Mutation(
        "shares fit into a GPU",
        "two that are taken at once do not see each other",
        (
            (
                "fleet/store/triggers.py",
                'lock="PERFORM 1 FROM gpus WHERE gpu_id = NEW.gpu_id FOR NO KEY UPDATE",',
                'lock="",',
            ),
        ),
        (f"{REAL}/test_triggers.py::test_two_at_once_do_not_get_the_same_gpu",),
    ),
    Mutation(
        "host key pin",
        "any key is right",
        (
            (
                "hosts/ssh.py",
                "                known_hosts=trusting(pinned),\n",
                "                known_hosts=None,\n",
            ),
        ),
        (f"{SSH}::test_another_key_than_the_pinned_one_stops_everything",),
    ),
    Mutation(
        "unknown is not failed",
        "a call that got no answer was never sent",
        (
            (
                "hosts/ssh.py",
                "error = OutcomeUnknown(message) if session.sent else HostUnreachable(message)",
                "error = HostUnreachable(message)",
            ),
        ),
        (
            "tests/contract/test_host_contract.py::test_no_answer_in_time_leaves_it_open_what_happened",
        ),
    ),
)
"""They start a server, or wait for what never comes."""

GUARDS = QUICK + SLOW
