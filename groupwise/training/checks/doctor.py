"""`groupwise doctor`: checks that model, template and engine work on this machine, and estimates the cost of a run.

    machine      libraries, cores, device, memory, disk, random numbers        (doctor_machine)
    tokenizer    template, first and last tokens, effect of further turns      (doctor_template)
    engine       masks, log-probability gap, batch invariance, publication     (doctor_engine)
    cost         peak memory, tokens per second, seconds of a step             (doctor_cost)

It builds the same parts as `groupwise rl` with this config, samples a few short completions, makes one update that is discarded, and
writes only publications, which it removes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.core.findings import Findings, OnFinding, Report
from groupwise.engine.backends.unsloth import library
from groupwise.training.checks import doctor_machine
from groupwise.training.config import RunConfig, load_config

CODE = "doctor_failed"


def doctor(
    config: Path | str | Mapping[str, Any] | RunConfig | None = None,
    task: object = None,
    *,
    overrides: Sequence[str] = (),
    on_finding: OnFinding | None = None,
) -> Report:
    """Examine model, template and engine on this machine: the command `groupwise doctor`.

    Without a config, that of the model `tiny` is used. Prompts come from the task or, without one, are built in. Raises `UsageError` if
    the config, task or model is unusable.
    """
    findings = Findings(on_finding)
    loaded = load_config({"model": {"name": "tiny"}} if config is None else config, overrides)
    libraries = doctor_machine.libraries(doctor_machine.installed_versions())
    findings.add(libraries)
    if libraries.level == "problem":  # all further checks need the libraries
        return Report("this machine", tuple(findings.found), CODE)
    library.import_first(loaded.config.model)
    load = os.getloadavg()[0]  # by other programs: nothing has been computed yet

    from groupwise.training.checks.doctor_examination import examine_all

    subject, details = examine_all(loaded, task, load, findings)
    return Report(subject, tuple(findings.found), CODE, details)
