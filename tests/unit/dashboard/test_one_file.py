"""A run's page as one file. That it opens without a server is seen in a browser (`integration/web/test_browser.py`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from groupwise.core.errors import UsageError
from groupwise.dashboard.runs.one_file import write_one_file
from tests.web_runs import HOSTILE, write_run


def test_the_file_has_all_that_it_needs_and_may_load_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "sent", 6, write=lambda *_: HOSTILE)
    page = write_one_file(str(run), tmp_path / "new" / "sent.html").read_text("utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:script|link|img|a)\b[^>]* (?:src|href)=\"(?!#)", page)
    found = re.search(r'id="curves">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    curves = json.loads(found[1])
    assert len(curves["reward\nreward_std"]["runs"]["sent"]["reward"]["mean"]) == 6
    assert curves["rollouts/failed\nrollouts/timed_out"]["totals"]["sent"]["mean"] == [2.0] * 6
    assert str(tmp_path) not in page, "where it was made is nobody's business"


@pytest.mark.parametrize(("run", "file", "says"), [
    ("sent@2", "new.html", "without @2"), ("sent", "there.html", "--force"), ("sent", ".", "is a folder"),
])  # fmt: skip
def test_a_page_that_cannot_be_written_says_why(
    tmp_path: Path, run: str, file: str, says: str
) -> None:
    write_run(tmp_path / "sent", 1)
    (tmp_path / "there.html").write_text("mine")
    with pytest.raises(UsageError, match=re.escape(says)):
        write_one_file(run, tmp_path / file, runs_dir=tmp_path)
    assert (tmp_path / "there.html").read_text() == "mine"
