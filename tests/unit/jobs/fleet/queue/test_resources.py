"""What a job needs, in the words of people and as JSON."""

import pytest

from groupwise.jobs.fleet.queue.resources import parse


def test_nothing_said_is_settled_by_the_fleet() -> None:
    assert parse().settled(1).gpu_count == 1
    assert parse().settled(0).gpu_count == 0
    for asked in (parse(gpu_model="a100"), parse(gpu_memory="40GB"), parse(share="10GB")):
        assert asked.settled(0).gpu_count == 1
    assert parse(gpus="vm-1:0,3").settled(0).gpu_count == 2


@pytest.mark.parametrize(("words", "gpus", "named", "vm"), [
    ("2", 2, (), None), ("0", 0, (), None), ("vm-3:0,1", None, (0, 1), "vm-3"), ("vm-3:GPU-ab", None, ("GPU-ab",), "vm-3"),
    ("GPU-ab, MIG-cd", None, ("GPU-ab", "MIG-cd"), None),
])  # fmt: skip
def test_forms_of_gpus(
    words: str, gpus: int | None, named: tuple[int | str, ...], vm: str | None
) -> None:
    found = parse(gpus=words)
    assert (found.gpus, found.named, found.vm) == (gpus, named, vm)


@pytest.mark.parametrize(("words", "megabytes"), [
    ("40GB", 40_000), ("512MB", 512), ("1.5TB", 1_500_000), ("1GiB", 1074),
])  # fmt: skip
def test_sizes(words: str, megabytes: int) -> None:
    assert parse(ram=words).ram_mb == megabytes


def test_the_shape_tells_needs_and_projects_apart_and_nothing_else() -> None:
    one = parse(gpus="1", labels=["a=1", "b=2"])
    same = parse(gpus="1", labels=["b=2", "a=1"])
    assert one.shape("p") == same.shape("p")
    others = {
        parse(gpus="2").shape("p"), parse(gpus="1").shape("p"), one.shape("q"), one.shape("p"),
    }  # fmt: skip
    assert len(others) == 4
