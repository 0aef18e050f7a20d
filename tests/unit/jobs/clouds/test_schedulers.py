"""What Ray is asked for a job, and where."""

import json
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.schedulers import checked_address, ray_options
from groupwise.jobs.hosts.spec import Limits


def ray_job_options(gpus: int = 0, **asks: Any) -> dict[str, Any]:
    [found] = ray_options(asks, gpus, Limits())
    return json.loads(found)


def test_all_that_was_asked_in_the_words_of_its_api() -> None:
    assert ray_job_options() == {"entrypoint_num_cpus": 1}, (
        "what asks for nothing is counted as one core"
    )
    assert ray_job_options(2, cpus=0.5, memory=1 << 30, resources={"a": 1}) == {
        "entrypoint_num_cpus": 0.5, "entrypoint_num_gpus": 2, "entrypoint_memory": 1 << 30, "entrypoint_resources": {"a": 1},
    }  # fmt: skip
    [of_each] = ray_options({"memory": 1 << 30, "resources": {"a": 1}}, 2, Limits(), nodes=3)
    bundle = {"CPU": 1, "GPU": 2, "memory": 1 << 30, "a": 1}
    assert json.loads(of_each) == {"gang": {"nodes": 3, "bundle": bundle}}


def test_an_address_has_one_form_and_no_secrets() -> None:
    assert checked_address("https://head:8265/") == "https://head:8265"
    for wrong in "head:8265 ray://head:10001 http:// http://head:0 http://a,b http://[x".split():
        with pytest.raises(UsageError, match="Ray's dashboard"):
            checked_address(wrong)
    with pytest.raises(UsageError) as refusal:
        checked_address("http://me:secret@head:8265")
    assert "secret" not in str(refusal.value)
