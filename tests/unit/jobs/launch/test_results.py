"""Whether all results of a job are here, and what is set aside for those of another job."""

from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.clouds.backend import Ending, FetchedResults, Handle, Outcome, Phase, Status
from groupwise.jobs.clouds.folder import results_folder
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.launch import results
from groupwise.jobs.launch.results import is_all_of, prepare, result, write

HANDLE = Handle("local", "job", 2)
FAILED = Status(
    Phase.ENDED,
    ending=Ending(Outcome.FAILED, "exit code 3: no", FailureClass.CRASHED, 3, 1.5),
)


@pytest.mark.parametrize(("handle", "status", "left_out", "all_here"), [
    (HANDLE, FAILED, {}, True), (HANDLE, FAILED, {"latest": "link"}, True), (HANDLE, FAILED, {"model": "too_large"}, False),
    (HANDLE, FAILED, {"too_many": "12 more"}, False), (HANDLE, Status(Phase.RUNNING), {}, False),
    (Handle("local", "job", 3), FAILED, {}, False), (Handle("local", "other", 2), FAILED, {}, False),
])  # fmt: skip
def test_whether_all_is_here(
    tmp_path: Path, handle: Handle, status: Status, left_out: dict[str, str], all_here: bool
) -> None:
    assert not is_all_of(tmp_path, handle)
    document: dict[str, Any] = result(
        HANDLE, "local", status, FetchedResults(tmp_path, (), 0, left_out)
    )
    write(tmp_path, document)
    assert is_all_of(tmp_path, handle) is all_here


def test_an_unreadable_summary_is_reported(tmp_path: Path) -> None:
    for said in (b"{", b"\xff", b"[]", b"[" * 200_000, b'{"a":' * 700 + b"1" + b"}" * 700):
        (tmp_path / "summary.json").write_bytes(said)
        document = result(HANDLE, "local", FAILED, FetchedResults(tmp_path, ("run.db",), 0, {}))
        write(tmp_path, document)
        assert "cannot read" in document["runs"][0]["problem"]


def test_results_of_an_earlier_job_with_the_same_name_are_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / results.FOLDER / "job"
    assert results.set_aside(folder) is None
    prepare(folder)
    with results_folder(folder, "job on this machine") as brought:
        brought.accept({}, {}, 1, has_ended=True)
    write(folder, result(HANDLE, "local", FAILED, FetchedResults(folder, (), 0, {})))
    assert is_all_of(folder, HANDLE)
    aside = results.set_aside(folder)
    assert aside == folder / "earlier/job"
    assert (aside / results.RESULT).exists()
    assert not is_all_of(folder, HANDLE)
