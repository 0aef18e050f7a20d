"""Reports: what counts as failure, and what programs read."""

from groupwise.checks.findings import Finding, Findings, Report


def report(*levels) -> Report:
    findings = tuple(Finding(f"n{place}", level, "seen") for place, level in enumerate(levels))
    return Report("it", findings, "check_failed", {"prompts": ["p"]})


def test_only_problems_fail():
    assert report("ok", "warning", "skipped").exit_code == 0
    assert report("ok", "problem").exit_code == 1


def test_a_failed_report_has_an_error_for_programs():
    summary = report("problem", "ok", "problem").summary
    assert summary["error"] == {"code": "check_failed", "message": "problems: n0, n2"}
    assert summary["state"] == "failed"
    assert [each["level"] for each in summary["findings"]] == ["problem", "ok", "problem"]


def test_a_good_report_has_none_and_keeps_its_details():
    summary = report("ok", "warning").summary
    assert "error" not in summary
    assert (summary["state"], summary["warnings"], summary["prompts"]) == ("ok", 1, ["p"])


def test_each_finding_is_told_as_soon_as_it_is_there():
    heard: list[str] = []
    findings = Findings(lambda finding: heard.append(finding.name))

    def later():
        yield Finding("first", "ok", "")
        assert heard == ["first"]
        yield Finding("second", "ok", "")

    findings.extend(later())
    assert heard == ["first", "second"]
