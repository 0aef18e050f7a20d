"""What Ray is asked for a job, and how people write that."""

import json
from typing import Any

import pytest

from groupwise.clouds.ray import checked_address, ray_options, resources_of
from groupwise.errors import UsageError


def asked(gpus: int = 0, **asks: Any) -> dict[str, Any]:
    [found] = ray_options(asks, gpus)
    return json.loads(found)


def test_all_that_was_asked_in_the_words_of_its_api() -> None:
    assert asked() == {"entrypoint_num_cpus": 1}, "what asks for nothing is counted as one core"
    assert asked(2, cpus=0.5, memory=1 << 30, resources={"a": 1}) == {
        "entrypoint_num_cpus": 0.5,
        "entrypoint_num_gpus": 2,
        "entrypoint_memory": 1 << 30,
        "entrypoint_resources": {"a": 1},
    }
    [of_each] = ray_options({"memory": 1 << 30, "resources": {"a": 1}}, 2, nodes=3)
    bundle = {"CPU": 1, "GPU": 2, "memory": 1 << 30, "a": 1}
    assert json.loads(of_each) == {"gang": {"nodes": 3, "bundle": bundle}}


def test_resources_as_they_are_written() -> None:
    written = ["a=1", "node:10.0.0.1=0.5", "a=b=2"]
    assert resources_of(written) == {"a": 1.0, "node:10.0.0.1": 0.5, "a=b": 2.0}
    for wrong in (["a"], ["a="], ["=1"], ["a=0"], ["a=nan"], ["a=inf"], ["--partition=1"]):
        with pytest.raises(UsageError, match="NAME=N is expected"):
            resources_of(wrong)
    with pytest.raises(UsageError, match="stands there twice"):
        resources_of(["a=1", "a=2"])
    for name in ("CPU", "GPU", "memory"):
        with pytest.raises(UsageError, match=f"--resource {name}=1: this one is asked for by --"):
            resources_of([f"{name}=1"])


def test_an_address_has_one_form_and_no_secrets() -> None:
    assert checked_address("https://head:8265/") == "https://head:8265"
    for wrong in "head:8265 ray://head:10001 http:// http://head:0 http://a,b http://[x".split():
        with pytest.raises(UsageError, match="address of Ray's dashboard is expected"):
            checked_address(wrong)
    with pytest.raises(UsageError) as refusal:
        checked_address("http://me:secret@head:8265")
    assert "secret" not in str(refusal.value)
