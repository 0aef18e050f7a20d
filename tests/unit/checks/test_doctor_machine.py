"""What the doctor says of the machine, and when."""

import pytest

from groupwise.checks import doctor_machine as machine
from groupwise.models.probes import random_start
from groupwise.rollouts.seeds import member_seed
from groupwise.sampler.chance import uniform

MIB = 2**20


def test_a_missing_library_is_a_problem():
    versions = machine.installed_versions()
    assert machine.libraries(versions).level == "ok"
    said = machine.libraries({**versions, "peft": None})
    assert (said.level, said.measured) == ("problem", "not installed: peft")


@pytest.mark.parametrize(
    ("threads", "cores", "load", "level"),
    [(2, 2, 0.1, "ok"), (1, 4, 1.9, "ok"), (3, 2, 0.0, "warning"), (2, 2, 1.5, "warning")],
)
def test_more_threads_than_cores_and_busy_cores_are_warned_of(threads, cores, load, level):
    assert machine.cores(threads, 1, cores, load).level == level


def test_emulated_bfloat16_is_warned_of():
    assert machine.device("cpu", "cpu", "bfloat16", has_bfloat16=False).level == "warning"
    assert machine.device("cpu", "cpu", "bfloat16", has_bfloat16=True).level == "ok"
    said = machine.device("H200", "cuda", "float32", has_bfloat16=True)
    assert "half of the memory" in said.meaning


@pytest.mark.parametrize(
    ("free", "level"), [(1599.0, "problem"), (1700.0, "warning"), (2100.0, "ok"), (None, "skipped")]
)
def test_a_plan_that_does_not_fit_into_memory(free, level):
    assert machine.memory(1600.0, free).level == level


@pytest.mark.parametrize(("free", "level"), [(99, "problem"), (150, "warning"), (200, "ok")])
def test_too_little_disk(free, level, tmp_path):
    said = machine.disk(tmp_path, 100 * MIB, free * MIB)
    assert said.level == level
    assert f"{free} MiB are free" in said.measured


def test_a_run_writes_its_checkpoints_its_weights_and_its_rollouts():
    assert machine.disk_needed(100, 0, kept=2) == 3 * 3 * 100 + 100
    assert machine.disk_needed(0, 10, kept=2) == 81920


def test_random_numbers_are_those_of_every_machine():
    seed = member_seed(0, 0, 0)
    start = random_start(0, 4)
    assert machine.random_numbers(seed, uniform(seed, 0), start).level == "ok"
    assert machine.random_numbers(seed + 1, uniform(seed, 0), start).level == "problem"
    assert machine.random_numbers(seed, uniform(seed, 1), start).level == "problem"
    assert machine.random_numbers(seed, uniform(seed, 0), start[::-1]).level == "warning"
