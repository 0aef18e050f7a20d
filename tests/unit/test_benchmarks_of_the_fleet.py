"""The entrance to the fleet's figures: what counts as reached, what is kept. The figures themselves are measured by hand."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import fleet, fleet_claims, fleet_dispatch
from benchmarks.fleet import Figure
from groupwise.fleet.queue.request import from_document

FAST = Figure("dispatch", "sqlite", "a second", 120.0, least=100)
SLOW = Figure("claim", "postgresql", "ms", 51.0, most=50)
PLAIN = Figure("admitted", "sqlite", "a second", 3.0)


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def none() -> Iterator[dict[str, fleet.Database]]:
        yield {}

    monkeypatch.setattr(fleet, "databases", none)


def parts(monkeypatch: pytest.MonkeyPatch, **figures: Figure) -> None:
    def suite(figure: Figure) -> fleet.Suite:
        def measure(urls: Mapping[str, fleet.Database]) -> list[Figure]:
            return [figure]

        return measure

    monkeypatch.setattr(fleet, "SUITES", {name: suite(each) for name, each in figures.items()})


def test_a_missed_target_fails_only_where_it_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part alone overwrites no result."""
    parts(monkeypatch, dispatch=FAST, claim=SLOW, submit=PLAIN)
    keep = ["--keep", str(tmp_path / "fleet.json")]
    assert fleet.main([*keep, "--only", "claim", "--check"]) == 1
    assert not (tmp_path / "fleet.json").exists()
    assert (fleet.main(keep), fleet.main([*keep, "--check"])) == (0, 1)
    told = capsys.readouterr().out
    assert re.search(r"claim +postgresql +< 50 +51 ms +MISSED", told)
    assert re.search(r"dispatch +sqlite +≥ 100 +120 a second +ok", told)
    parts(monkeypatch, dispatch=FAST, submit=PLAIN)
    assert fleet.main([*keep, "--check"]) == 0


def test_what_is_kept_names_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts(monkeypatch, dispatch=FAST, claim=SLOW)
    keep = tmp_path / "fleet.json"
    fleet.main(["--keep", str(keep)])
    assert [figure["ok"] for figure in json.loads(keep.read_text())["figures"]] == [True, False]
    for secret in (str(Path.home()), str(tmp_path), socket.gethostname()):
        assert secret not in keep.read_text()


def test_the_queue_of_the_claims_is_a_mixed_one() -> None:
    rows = [fleet_claims.row(n) for n in range(1_500)]
    asked = [from_document(row["request"]) for row in rows]
    assert {each.resources.gpus for each in asked} == {1, 2, 4, 8}
    assert any(each.resources.machines == 2 for each in asked)
    assert any(each.after for each in asked)
    assert {row["priority"] for row in rows} == {0, 1}
    assert len({row["project"] for row in rows}) == 10


@pytest.mark.soak(suite="fleet")
async def test_a_small_burst_is_worked_off(tmp_path: Path) -> None:
    found = await fleet_dispatch.measure(f"sqlite:///{tmp_path}/fleet.db", 2, tmp_path)
    assert found.jobs == 2
    assert 0 < found.ended_per_second <= found.per_second
