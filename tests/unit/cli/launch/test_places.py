"""Places of jobs as text: the text of a place leads to it again."""

import pytest

from groupwise.cli.launch.places import LaunchedJob, ray_cluster
from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.schedulers import SchedulerBackend
from groupwise.jobs.launch.places import JobBackend, reach


@pytest.mark.parametrize(("word", "root"), [
    ("slurm", "groupwise-launch"), ("slurm:/scratch/me", "/scratch/me/groupwise-launch"),
    ("ray", "groupwise-launch"), ("ray:/scratch/me", "/scratch/me/groupwise-launch"),
    ("ray:,http://10.0.0.2:8265", "groupwise-launch"), ("ray:/scratch/me,https://head/ray", "/scratch/me/groupwise-launch"),
])  # fmt: skip
def test_a_place_is_found_by_its_text(word: str, root: str) -> None:
    place = LaunchedJob(name="j", at=word).note().place
    assert str(place) == word
    assert place.is_here
    assert place.root == root
    backend = reach(place)
    assert isinstance(backend, SchedulerBackend)
    assert backend.name == word.partition(":")[0]


def test_a_ray_place_elsewhere_is_written_with_host_folder_and_address() -> None:
    head = JobBackend("ssh", {"host": "h", "user": "u", "port": 2})
    place = ray_cluster(head, "/scratch/", "http://10.0.0.2:8265/")
    assert str(place) == "ray:u@h:2/scratch,http://10.0.0.2:8265"
    assert not place.is_here


@pytest.mark.parametrize(("word", "why"), [
    ("ray:,ray://head:10001", "the address of Ray's dashboard"), ("ray:,http://h:99999", "the address of Ray's dashboard"),
    ("ray:,http://", "the address of Ray's dashboard"), ("ray:,http://a,http://b", "the address of Ray's dashboard"),
    ("slurm:/scratch,http://h:1", "a place is expected"), ("local:here", "a place is expected"),
    ("moon", "ray:USER@HOST:PORT/SHARED,ADDRESS"),
])  # fmt: skip
def test_an_invalid_place_is_refused_with_the_expected_form(word: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LaunchedJob(name="j", at=word).note()


@pytest.mark.parametrize(("word", "profile"), [("aws:eu-west-1", "aws"), ("modal", "modal")])
def test_credentials_of_a_cloud_may_be_those_of_a_profile(word: str, profile: str) -> None:
    assert LaunchedJob(name="j", at=word, profile=profile).note().place.detail["profile"] == profile


@pytest.mark.parametrize("word", ["local", "slurm", "modal:mine", "ssh:u@h:22", None])
def test_a_profile_that_would_have_no_effect_is_refused(word: str | None) -> None:
    with pytest.raises(UsageError, match="profile"):
        LaunchedJob(name="j", at=word, profile="mine").note()
