"""What Ray is asked for a job."""

from typing import Any

import pytest

from groupwise.clouds.port import Order
from groupwise.clouds.ray import entrypoint
from groupwise.errors import UsageError
from groupwise.hosts.spec import JobSpec


def order(gpus: int = 0, **asks: Any) -> Order:
    return Order("j", JobSpec(("true",)), gpus, asks=asks)


def test_all_that_was_asked_in_the_words_of_its_api() -> None:
    asked = order(2, cpus=0.5, memory=1 << 30, resources={"a": 1})
    assert entrypoint(asked) == {
        "entrypoint_num_cpus": 0.5,
        "entrypoint_num_gpus": 2,
        "entrypoint_memory": 1 << 30,
        "entrypoint_resources": {"a": 1},
    }


def test_what_asks_for_nothing_is_counted_as_one_core() -> None:
    assert entrypoint(order()) == {"entrypoint_num_cpus": 1}


@pytest.mark.parametrize("name", ["CPU", "GPU", "memory"])
def test_what_has_an_option_of_its_own_is_no_resource(name: str) -> None:
    with pytest.raises(UsageError, match=f"--resource {name}"):
        entrypoint(order(resources={name: 1}))
