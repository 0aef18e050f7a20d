"""The fields of a request, and the messages for wrong ones."""

import pytest

from groupwise.jobs.fleet.queue.request import (
    JobRequest,
    RequestDocument,
    from_document,
    problems,
)


@pytest.mark.parametrize(("document", "said"), [
    ({"secrets": {"A": "hunter2"}}, "`env:NAME` or `file:/path`"), ({"secrets": {"A": "file:relative"}}, "`env:NAME` or `file:/path`"),
    ({"after": ["a:fine"]}, "after 'a:fine'"), ({"files": {"../a": ["0" * 64, 420, 1]}}, "without `..`"),
    ({"files": {"a": ["0", 420, 1]}}, "permission bits"), ({"files": {"a": ["0" * 64, 0o4755, 1]}}, "permission bits"),
    ({"limits": {"artefact_files": 1_000_001}}, "than the 1000000 that are fetched"), ({"webhook": "ftp://x"}, "webhook"),
    ({"webhook": "http://a..b/"}, "not a valid address"), ({"webhook": "http://%00/"}, "not a valid address"),
    ({"webhook": "http://example.org:0/"}, "not a valid address"), ({"webhook": "http://example.org:70000/"}, "webhook"),
    ({"webhook": "https://user:pw@x/"}, "webhook"), ({"resources": {"gpus": 0, "share_mb": 1}}, "resources: "),
    ({"retry": {"once": True, "charged": 1}}, "retry.charged has no effect"),
    ({"retry": {"once": True, "per_class": {"reboot": 1}}}, "retry.per_class.reboot has no effect"),
    ({"retry": {"once": True}, "allow_smaller_batch": True}, "allow_smaller_batch has no"),
    ({"retry": {"charged": 0}, "allow_smaller_batch": True}, "allow_smaller_batch has no"),
    ({"retry": {"per_class": {"gpu_oom": 0}}, "allow_smaller_batch": True}, "allow_smaller_batch has no"),
    ({"retry": {"per_class": {"gpu_oom": 2}}}, "allow a smaller one"),
    ({"retry": {"charged": 1, "per_class": {"crashed": 2}}}, "raise that"),
    ({"resources": {"oversubscribe": True}}, "say vm, and gpus 0"),
])  # fmt: skip
def test_values_that_cannot_be_meant(document: dict[str, object], said: str) -> None:
    found = problems(from_document(document))
    assert any(said in problem for problem in found)
    assert "hunter2" not in "".join(found)


def test_more_retries_after_one_class_raise_the_total_that_would_forbid_them() -> None:
    policy = from_document({"retry": {"per_class": {"crashed": 5, "network": 40}}}).retry_policy()
    assert (policy.charged, policy.per_class) == (5, {"crashed": 5, "network": 40})
    once = {"once": True, "per_class": {"launch_failure": 9, "not_provided": 0, "crashed": 0}}
    assert problems(from_document({"retry": once})) == [], "what has not begun begins elsewhere"
    assert from_document({"retry": {"per_class": {"crashed": 1}}}).retry_policy().charged == 2


def test_requests_above_the_present_limit_can_still_be_read() -> None:
    """An end reads what was asked once more, whatever this version would say of it."""
    stored = {"limits": {"artefact_files": 5_000_000}}
    assert RequestDocument.model_validate(stored).retry_policy() == JobRequest().retry_policy()
