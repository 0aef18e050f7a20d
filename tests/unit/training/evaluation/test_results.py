"""Result files: with names that any disk accepts, never overwritten, and checked when they are read."""

import threading
from pathlib import Path

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.training.evaluation.results import (
    check_writable,
    read_result,
    result_name,
    write_result,
)

ROW = {
    "example": 0, "sample": 0, "prompt": "p", "completion": "c", "reward": 1.0, "parts": {},
    "outcome": "scored", "tokens": 1,
}  # fmt: skip
CONTENT = {"policy": "base", "metrics": {"reward": 1.0}, "rows": [ROW]}


def test_a_name_of_any_policy_is_a_file_name():
    assert result_name("sort", "run@4") == "sort-run@4"
    assert result_name("sort", "./a/b c") == "sort-a_b_c"
    assert len(result_name("sort", "/very" * 200 + "/last")) < 200
    assert "/" not in result_name("sort", "../../etc/x")


def test_many_writers_at_once_overwrite_nothing(tmp_path: Path):
    ready = threading.Barrier(8)
    paths: list[Path] = []

    def write(number: int) -> None:
        ready.wait()
        paths.append(write_result({**CONTENT, "policy": str(number)}, tmp_path, "x", None))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 8
    assert {read_result(path)["policy"] for path in paths} == {str(n) for n in range(8)}
    assert sorted(path.name for path in tmp_path.glob("results/*")) == sorted(p.name for p in paths)


def test_a_file_that_appeared_meanwhile_is_kept_and_so_is_the_work(tmp_path: Path, monkeypatch):
    output = tmp_path / "new" / "x.json"
    check_writable(tmp_path, "x", output)
    first = write_result(CONTENT, tmp_path, "x", output)
    second = write_result({**CONTENT, "policy": "other"}, tmp_path, "x", output)
    assert (first, second) == (output, output.with_name("x-2.json"))
    assert read_result(first)["policy"] == "base"
    with pytest.raises(UsageError, match="never overwritten"):
        check_writable(tmp_path, "x", output)
    with pytest.raises(UsageError, match=r"is a folder; .*x\.json"):
        check_writable(tmp_path, "x", tmp_path)
    assert not list(output.parent.glob(f"{atomic_files.BUILDING}*"))


@pytest.mark.parametrize(("content", "message"), [
    ("no json", "cannot be read as a result"), ("[1]", "holds no JSON object"), ('{"policy": "x"}', "it has no metrics and no rows"),
    ('{"policy": "x", "metrics": {}, "rows": []}', "it has no rows"),
    ('{"policy": "x", "metrics": {}, "rows": [{"prompt": 1}]}', "no `example` in each row"),
    ('{"kind": "rescoring"}', "holds the result of a rescoring"), ('{"format": 99}', r"has format 99.*Upgrade"),
])  # fmt: skip
def test_a_file_that_holds_no_result_is_refused_with_the_reason(
    tmp_path: Path, content: str, message: str
):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_result(path)
