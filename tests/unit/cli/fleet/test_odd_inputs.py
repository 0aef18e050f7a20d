"""Typing mistakes at `groupwise fleet vm`, `key` and `project`: the message says what is expected, and is never a traceback."""

import json

from tests.unit.cli.conftest import Command

BIG = "9" * 20
DIGITS = "9" * 5000
NO_UTF8 = "\udcff"
ODD = [
    *(f"vm clear-quarantine local {odd}" for odd in (BIG, DIGITS, "²", NO_UTF8)),
    *(f"vm {verb} {NO_UTF8}" for verb in ("show", "drain", "remove", "mark-lost --yes")),
    f"vm show {'x' * 100_000}",
    *(f"{verb} a/b" for verb in ("show", "logs", "stop", "vm show")),
    *(f"vm set local --{what} {NO_UTF8}" for what in ("python", "workdir")),
    *(f"vm set vm-1 --{what}" for what in ("probe '", f"probe {NO_UTF8}", f"label {NO_UTF8}=1")),
    *(f"vm set vm-1 --{what} {BIG}" for what in ("cpu-slots", "deadman", "idle-memory-mb")),
    f"vm add {NO_UTF8} --host h --user u --key KEY",
    f"vm add odd --host h --user {NO_UTF8} --key KEY",
    *(f"vm add odd --host h --user u --key KEY --deadman {odd}" for odd in (BIG, DIGITS)),
    f"vm trust local SHA256:{NO_UTF8}",
    *(f"key new read --lasts {odd}" for odd in (BIG, f"{DIGITS}d")),
    *(f"key new read --{what} {NO_UTF8}" for what in ("note", "project")),
    *(f"project set p --max-gpus {odd}" for odd in (BIG, DIGITS, "٣x")),
    *(f"project set p --weight {odd}" for odd in ("1e300", "1e-300")),
    *(f"project set {odd} --weight 2" for odd in (NO_UTF8, "x" * 100)),
    *(f"remove --older-than {odd}" for odd in (f"{BIG}d", DIGITS)),
]


def test_a_machine_is_kept_for_projects_and_open_again(seen: Command) -> None:
    code, _, err = seen("vm", "set", "vm-1", "--project", "b", "--project", "a")
    assert (code, err.endswith("CPU slots 1, jobs of a, b\n")) == (0, True)
    assert "jobs of" in seen("vm", "show", "vm-1")[1]
    code, _, err = seen("vm", "set", "vm-1", "--any-project", "--project", "a")
    assert (code, "contradict each other" in err) == (2, True)
    found = json.loads(seen("vm", "set", "vm-1", "--any-project", "--json")[1])
    assert found["projects"] is None


def test_odd_words_are_refused(seen: Command) -> None:
    for words in ODD:
        code, out, err = seen(*words.split())
        assert (code, out) == (2, ""), (words[:80], err)
        assert "bug" not in err
        assert "Traceback" not in err
