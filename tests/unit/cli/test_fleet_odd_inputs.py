"""What people mistype at `groupwise fleet vm`, `key` and `project`: refused in words that say what is wanted, never as our own mistake."""

import json

import pytest

from tests.unit.cli.fleet_folder import Command

BIG = "9" * 20
DIGITS = "9" * 5000
NO_UTF8 = "\udcff"
ODD = [
    f"vm clear-quarantine local {BIG}",
    f"vm clear-quarantine local {DIGITS}",
    "vm clear-quarantine local ²",
    f"vm clear-quarantine local {NO_UTF8}",
    f"vm clear-quarantine {NO_UTF8} 0",
    f"vm show {NO_UTF8}",
    f"vm show {'x' * 100_000}",
    f"vm drain {NO_UTF8}",
    f"vm cordon local --reason {NO_UTF8}",
    f"vm cordon {NO_UTF8} --reason odd",
    f"vm lost {NO_UTF8} --yes",
    f"vm remove {NO_UTF8}",
    f"vm set {NO_UTF8} --python p",
    f"vm set local --python {NO_UTF8}",
    f"vm set local --workdir {NO_UTF8}",
    f"vm set local --cpu-slots {BIG}",
    "vm set vm-1 --probe '",
    f"vm set vm-1 --probe {NO_UTF8}",
    f"vm set vm-1 --label {NO_UTF8}=1",
    f"vm set vm-1 --deadman {BIG}d",
    f"vm set vm-1 --idle-memory-mb {BIG}",
    f"vm add {NO_UTF8} --host h --user u --key KEY",
    f"vm add odd --host h --user {NO_UTF8} --key KEY",
    f"vm add odd --host h --user u --key KEY --deadman {BIG}",
    f"vm add odd --host h --user u --key KEY --deadman {DIGITS}",
    f"vm add odd --host h --user u --key KEY --label {NO_UTF8}=1",
    f"vm trust local SHA256:{NO_UTF8}",
    f"key new read --lasts {BIG}",
    f"key new read --lasts {DIGITS}d",
    f"key new read --note {NO_UTF8}",
    f"key new read --project {NO_UTF8}",
    f"key revoke {NO_UTF8}",
    f"project set p --max-gpus {BIG}",
    f"project set p --max-gpus {DIGITS}",
    "project set p --max-gpus ٣x",
    "project set p --weight 1e300",
    "project set p --weight 1e-300",
    f"project set {NO_UTF8} --weight 2",
    f"project set {'x' * 100} --weight 2",
    f"prune --older-than {BIG}d",
    f"prune --older-than {DIGITS}",
]


def test_what_a_machine_is_known_by_is_set(seen: Command) -> None:
    code, out, err = seen(
        "vm", "set", "vm-1", "--label", "disk=fast", "--probe", "sudo -n nvidia-smi", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert (found["labels"], found["probe"]) == ({"disk": "fast"}, ["sudo", "-n", "nvidia-smi"])
    code, _, err = seen("vm", "set", "vm-1", "--deadman", "10min", "--idle-memory-mb", "40")
    assert code == 0
    assert err.endswith(
        "CPU slots 1 without GPUs, labels disk=fast, deadman 600 s, probe sudo -n nvidia-smi\n"
    )
    found = json.loads(
        seen("vm", "set", "vm-1", "--unlabel", "disk", "--deadman", "off", "--json")[1]
    )
    assert (found["labels"], found["deadman"], found["idle_memory_mb"]) == ({}, None, 40)


def test_a_machine_is_kept_for_projects_and_open_again(seen: Command) -> None:
    code, _, err = seen("vm", "set", "vm-1", "--project", "b", "--project", "a")
    assert (code, err.endswith("CPU slots 1 without GPUs, jobs of a, b\n")) == (0, True)
    assert "jobs of" in seen("vm", "show", "vm-1")[1]
    code, _, err = seen("vm", "set", "vm-1", "--any-project", "--project", "a")
    assert (code, "contradict each other" in err) == (2, True)
    found = json.loads(seen("vm", "set", "vm-1", "--any-project", "--json")[1])
    assert found["projects"] is None


@pytest.mark.parametrize("words", ODD, ids=lambda words: ascii(words)[:60])
def test_odd_words_are_refused(seen: Command, words: str) -> None:
    code, out, err = seen(*words.split())
    assert (code, out) == (2, ""), err
    assert "bug" not in err
    assert "Traceback" not in err
