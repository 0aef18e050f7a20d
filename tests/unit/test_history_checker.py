"""The history checker finds every violation that is planted, and nothing else."""

import json
from typing import Any

import pytest

from tests.history_checker import violations

FIELDS = {
    "accepted": "job", "start": "who", "stop": "who code", "child": "who", "clash": "who",
    "saved": "who step", "supervisor_killed": "who", "wrote": "who data", "mirrored": "who data",
    "made": "who data", "kept": "who data", "reserved": "who gpu", "left": "who",
    "attempt": "who outcome failure", "status": "job status", "cancel_requested": "job",
    "power_off": "vm", "lost": "vm", "passes": "",
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {
    "stop": {"code": 0}, "status": {"generation": 0}, "made": {"path": "result"}, "kept": {"path": "result"},
    "attempt": {"vms": ["vm-1"], "failure": None, "charged": False, "generation": 0},
}  # fmt: skip
"""What a sentence need not say."""


def written(story: str) -> list[dict[str, Any]]:
    """`start d.6 vm=vm-2; stop d.6 1` as a history, in which each record comes after the one before."""
    records: list[dict[str, Any]] = []
    for sentence in story.split(";"):
        what, *words = sentence.split()
        plain = [word for word in words if "=" not in word]
        named = [word.split("=") for word in words if "=" in word]
        said = {k: value(v) for k, v in [*zip(FIELDS[what].split(), plain, strict=False), *named]}
        if "who" in said:
            job, epoch = said.pop("who").split(".")
            said = {"job": job, "epoch": int(epoch), "rank": 0, "vm": "vm-1", "gpus": ["G0"]} | said
        records.append({"at": float(len(records)), "what": what, **FURTHER.get(what, {}), **said})
    return records


def value(word: str) -> Any:
    if len(word.split(".")) == 2 and word[0].isalpha():
        return word
    try:
        return json.loads(word)
    except ValueError:
        return word


GOOD = (
    "accepted a; accepted b; accepted c;"
    "start a.1; wrote a.1 one; stop a.1 1; start a.2; stop a.2; status a completed exit_code=0;"
    "mirrored a.1 one whole=true;"
    "start b.3; cancel_requested b; stop b.3 -15 why=cancelled;"
    "status b running; status b cancelled exit_code=143;"
    "start c.4 vm=vm-2; power_off vm-2; start c.5; stop c.5; status c completed;"
)
"""A job that fails once and then succeeds, one that is cancelled, one whose machine loses its power."""
KILLED_EARLY = (
    "start d.6; stop d.6 1; attempt d.6 failed crashed; cancel_requested d; attempt d.7 cancelled;"
)
"""Its second attempt is cancelled before the trainer can write that it begins."""
NO_LAST_WORD = "start d.6; cancel_requested d; power_off vm-1;"
"""Killed in a cancellation, and then its machine loses its power."""
AT_ITS_LIMIT = "accepted d time_limit=0.5; start d.6; power_off vm-1;"
"""Likewise, at its time limit."""
GIVEN_UP = "start d.6; lost vm-1; start d.7 vm=vm-2;"

KEPT = {
    "all is well": "passes",
    "killed before its first word, it has the code of a signal": f"{KILLED_EARLY} status d cancelled exit_code=143",
    "killed, it has no last word": f"{NO_LAST_WORD} attempt d.6 cancelled; status d cancelled exit_code=137",
    "killed at its limit, it has no last word": f"{AT_ITS_LIMIT} attempt d.6 failed time_limit; status d failed exit_code=137",
    "a gang is ended when one of it fails": "start d.6 gpus=[]; start d.6 rank=1 vm=vm-2; stop d.6 1;"
    "stop d.6 -15 rank=1 vm=vm-2 why=cancelled",
    "what succeeded on a machine that was lost may be run again": "start d.6; stop d.6; lost vm-1;"
    "start d.7 vm=vm-2; stop d.7 vm=vm-2; status d completed",
    "of a machine that was given up nobody knows what runs there": f"{GIVEN_UP} clash d.7 over=job holder=d.6.0;"
    "stop d.6 -9 why=cancelled; stop d.7 vm=vm-2; status d completed",
    "a success of which no record was written may be repeated": "start d.6; stop d.6; supervisor_killed d.6;"
    "start d.7; stop d.7; status d completed",
    "and where the power went": "start d.6; stop d.6; power_off vm-1; start d.7; stop d.7; status d completed",
    "a time limit is a reason to end": "accepted d time_limit=1.0; start d.6; passes;"
    "stop d.6 -15 why=cancelled; status d failed",
}


@pytest.mark.parametrize("name", KEPT)
def test_a_history_in_which_every_promise_was_kept_is_not_objected_to(name: str) -> None:
    assert violations(written(GOOD + KEPT[name])) == []


PLANTED = (
    ("accepted d", "d was accepted and is nowhere"),
    ("accepted d; status d queued", "d was accepted and is queued"),
    ("start d.6; stop d.6 1; start d.6; stop d.6 1", "began twice"),
    ("start d.6; start d.7 vm=vm-2; stop d.7 1; stop d.6 1", "two executions of one job"),
    ("start d.6; start e.7", "both have GPU G0"),
    ("start d.6; lost vm-1; start e.7; stop d.6 -9 why=cancelled; stop e.7 1", "both have GPU G0"),
    ("reserved a.2 G0", "a.2 still holds G0"),
    ("status a failed", "was completed and became failed"),
    ("status a queued generation=1", "was begun again"),
    ("status b queued generation=1; status b cancelled generation=0", "went back"),
    ("start d.6; stop d.6 1; status d completed", "no attempt of it succeeded"),
    ("start d.6 members=2; stop d.6; status d completed", "no attempt of it succeeded"),
    ("start d.6; stop d.6; status d failed", "an attempt of it succeeded"),
    (f"{KILLED_EARLY} status d cancelled exit_code=1", "to have exited with 1"),
    (
        f"{NO_LAST_WORD} attempt d.6 cancelled; status d cancelled exit_code=1",
        "to have exited with 1",
    ),
    (
        f"{AT_ITS_LIMIT} attempt d.6 failed time_limit; status d failed exit_code=1",
        "to have exited with 1",
    ),
    ("start d.6; stop d.6; start d.7; stop d.7", "was run again"),
    ("start d.6; cancel_requested d; status d cancelled", "was alive when d was"),
    (
        "start d.6; cancel_requested d; stop d.6 -15 why=cancelled; status d cancelled; child d.6",
        "was alive when d was said to be cancelled",
    ),
    ("start d.6; stop d.6 -15 why=cancelled", "was healthy and was ended"),
    ("wrote d.6 abc; mirrored d.6 ac", "not what it wrote"),
    ("wrote d.6 abc; mirrored d.6 ab whole=true", "not what it wrote"),
    ("clash d.6 over=gpu holder=a.2.0", "found gpu in the hands of a.2.0"),
    ("made a.2 x; attempt a.2 succeeded", "is not there as it was made"),
    ("saved d.6 4; start d.7 resumed=6", "went on from step 6"),
    ("start d.6; stop d.6 1; attempt d.6 void", "and it ran"),
    ("start d.6; stop d.6 1; attempt d.6 failed user_error", "not what happened to it"),
    ("start d.6; stop d.6; attempt d.6 failed crashed", "and it succeeded"),
    ("start d.6; stop d.6 1; attempt d.6 cancelled", "nobody wanted it cancelled"),
    (
        ";".join(f"attempt a.{n} failed crashed charged=true" for n in (1, 6, 7, 8)),
        "was tried 4 times",
    ),
    ("left a.2", "is alive on vm-1 in the end"),
)


@pytest.mark.parametrize(("story", "words"), PLANTED)
def test_a_planted_violation_is_objected_to(story: str, words: str) -> None:
    found = violations(written(GOOD + story))
    assert any(words in each for each in found), found
