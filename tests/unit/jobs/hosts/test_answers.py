from typing import Any

import pytest

from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.answers import ExitReason, MemberState, RunnerState
from groupwise.jobs.hosts.framing import BadAnswer
from groupwise.jobs.hosts.spec import FileEntry

SHA = "ab" * 32
EXIT = {
    "code": 0, "signal": None, "reason": "exited", "message": "", "oom_kill": None, "seconds": 1.5,
    "cpu_seconds": 1, "max_rss_mb": 9.0, "finished_at": 1795289316.8, "tail": "done\n",
}  # fmt: skip
STATE: dict[str, Any] = {
    "job": "job-1", "epoch": 7, "rank": 1, "state": "exited", "boot_id": "b", "same_boot": True,
    "pid": 42, "start_ticks": 4711, "method": "cgroup", "started_at": 1795289315, "log_size": 5,
    "heartbeat_age": 0.5, "checkpoints": 2, "step": 20, "exit": EXIT, "refused": None,
    "survivors": None, "clock": 99.5, "place": "here",
}  # fmt: skip


def test_a_runner_of_another_release_may_say_more_or_less() -> None:
    state = answers.parse_member_state({**STATE, "something_newer": {"a": 1}})
    assert (state.epoch, state.state, state.log_size) == (7, RunnerState.EXITED, 5)
    assert state.exit is not None
    assert (state.exit.reason, state.exit.oom_kill) == (ExitReason.EXITED, 0)
    older = answers.parse_member_state({"job": "j", "epoch": 1, "state": "absent"})
    assert older == MemberState("j", 1, RunnerState.ABSENT)
    long = answers.parse_member_state(
        {**STATE, "refused": {"code": "c", "holder": ["x" * 9999]}}
    ).refused
    assert long is not None and len(long.holder or "") == answers.LONGEST  # noqa: PT018


def test_answers_with_wrong_types_are_rejected() -> None:
    odd: dict[str, list[object]] = {
        "job": [3, None], "epoch": ["7", True], "state": ["dancing", None], "log_size": ["many"],
        "pid": [[1]], "same_boot": [1],
        "exit": [None, "0", {**EXIT, "reason": "boredom"}, {**EXIT, "code": "0"}],
        "refused": [{"message": "no code"}],
    }  # fmt: skip
    told = [{**STATE, field: value} for field, values in odd.items() for value in values]
    for each in (*told, []):
        with pytest.raises(BadAnswer, match="the state of an attempt"):
            answers.parse_member_state(each)
    with pytest.raises(BadAnswer, match=r"same_boot is 1: must be true or false$"):
        answers.parse_member_state({**STATE, "same_boot": 1})
    with pytest.raises(BadAnswer, match=r"the state of an attempt is \[\]: it must be an object"):
        answers.parse_member_state([])
    for odd_hello in (
        None,
        [],
        {"cgroup": "v2"},
        {"protocols": 5},
        {"protocols": [], "cgroup": {}},
    ):
        with pytest.raises(BadAnswer, match="the answer to hello"):
            answers.parse_hello(odd_hello)


OBSERVATION: dict[str, Any] = {
    "boot_id": "b",
    "time": 1.0,
    "load": [0.5, 0.25, 0],
    "cpus": 2,
    "ram_mb": 100,
    "ram_free_mb": 50,
    "disk_free_mb": None,
    "probe": {"status": "ok", "apps": "failed", "lines_not_read": ["?"], "exit": 15, "said": "x"},
    "gpus": [
        {"index": 0, "uuid": "GPU-1", "model": "H100", "memory_mb": 81559, "memory_used_mb": None},
        {
            "index": 1,
            "uuid": "GPU-2",
            "mig": True,
            "problems": ["ERR!"],
        },
    ],
    "apps": [{"uuid": "GPU-1", "pid": 1, "memory_mb": None, "attempt": "job-1.7"}],
    "attempts": [STATE],
    "quarantined": [{"what": "folder", "detail": "attempts/x"}],
}


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        ({"epoch": answers.MAX_EPOCH + 1}, f"job-1.{answers.MAX_EPOCH + 1}"),
        ({"epoch": -1}, "job-1.-1"),
        ({"job": "no name\0"}, "no name\0.7"),
    ],
)
def test_an_invalid_attempt_name_is_reported_as_a_folder(odd: dict[str, Any], name: str) -> None:
    seen = answers.parse_observation(OBSERVATION | {"attempts": [STATE | odd, STATE]})
    assert [each.job for each in seen.attempts] == [STATE["job"]]
    assert [each.detail for each in seen.quarantined] == ["attempts/x", name]


def test_oversized_observations_are_truncated() -> None:
    long = "x" * 5_000_000
    said = answers.parse_observation(
        OBSERVATION
        | {"boot_id": long, "unremoved": [long] * 2_000}
        | {"quarantined": [{"what": long, "detail": long}] * 9_999}
    )
    assert len(said.boot_id) + sum(map(len, said.unremoved)) < 5_000_000
    assert sum(len(each.what) + len(each.detail) for each in said.quarantined) < 1_000_000
    ended = answers.parse_member_state(
        {**STATE, "exit": {**EXIT, "tail": long + "end", "message": long}}
    )
    assert ended.exit is not None
    assert (ended.exit.tail[-3:], len(ended.exit.tail), len(ended.exit.message)) == (
        "end",
        65536,
        4096,
    )
    for many in ({"gpus": OBSERVATION["gpus"] * 200}, {"apps": OBSERVATION["apps"] * 20_000}):
        with pytest.raises(BadAnswer, match="at most"):
            answers.parse_observation(OBSERVATION | many)
    with pytest.raises(BadAnswer) as told:
        answers.parse_member_state({**STATE, "state": long})
    assert len(str(told.value)) < 1_000


def test_paths_that_leave_the_folder_are_refused_whatever_the_machine_says() -> None:
    entry = [SHA, 0o644, 3]
    bad = ["../x", "/etc/passwd", "a//b", "a/../b", "", "a\0"]
    tree = answers.parse_work_tree(
        {"files": {"good/x": entry, **dict.fromkeys(bad, entry)}, "refused": [["l", "link"]]}
    )
    assert tree.files == {"good/x": FileEntry(SHA, 0o644, 3)}
    assert [path for path, _ in tree.refused] == ["l", *bad]
    through = answers.parse_work_tree(
        {"files": dict.fromkeys(("a", "a/b", "a/b/c", "ab/c"), entry)}
    )
    assert list(through.files) == ["a", "ab/c"]
    assert [path for path, _ in through.refused] == ["a/b", "a/b/c"]


def test_a_checkpoint_stays_in_the_folder_and_has_a_step_that_a_database_can_count() -> None:
    for path in ("../c", "/c"):
        for at, files in ((path, {}), ("c", {f"{path}/x": [SHA, 0o644, 1]})):
            checkpoint = {"path": at, "step": 1, "files": files}
            with pytest.raises(BadAnswer):
                answers.parse_work_tree({"files": {}, "checkpoints": [checkpoint]})
    for step, counts in ((3 * 10**9, 1), (2**63 - 1, 1), (2**63, 0), (-1, 0)):
        tree = {"files": {}, "checkpoints": [{"path": "c", "step": step, "files": {}}]}
        assert len(answers.parse_work_tree(tree).checkpoints) == counts, step
