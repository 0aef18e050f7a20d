"""The scheduler of a machine: read from a row that people may write, and compared with a job's request."""

import json
from typing import Any

import pytest

from groupwise.jobs.fleet.queue import elastic
from groupwise.jobs.fleet.queue.elastic import Elastic, elastic_of
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.hosts.spec import Limits


def slurm(**said: Any) -> Elastic:
    found = elastic_of({"name": "slurm", **said})
    assert found is not None
    return found


@pytest.mark.parametrize(("document", "word"), [
    ({"name": "slum"}, "there is none called 'slum': slurm, ray"), ({}, "name"), ("slurm", "engine"),
    ({"name": "slurm", "slots": 0}, "slots"), ({"name": "slurm", "queue": "gpu"}, "queue"),
    ({"name": "slurm", "options": ["--array=1-9"]}, "--array is set by groupwise"),
    ({"name": "slurm", "options": ["partition"]}, "an option of sbatch is expected"),
    ({"name": "slurm", "address": "http://head:8265"}, "Slurm is found by its programs"),
    ({"name": "ray", "options": ["--partition=gpu"]}, "NAME=N is expected"),
    ({"name": "ray", "options": ["GPU=1"]}, "asked for by --gpus"),
    ({"name": "ray", "address": "ray://head:10001"}, "address of Ray's dashboard"),
])  # fmt: skip
def test_an_invalid_engine_is_kept_with_its_problem(document: Any, word: str) -> None:
    found = elastic_of(document)
    assert found is not None
    assert word in str(found.problem)
    if isinstance(document, dict):
        assert word in "; ".join(elastic.problems(document))


@pytest.mark.parametrize(("asked", "said", "word"), [
    ({"gpus": 0}, {}, None), ({"gpus": 1}, {}, "none, 1 wanted"), ({"gpus": 5}, {"gpus": 4}, "at most 4, 5 wanted"),
    ({"gpus": 1, "named": (0,), "vm": "s"}, {"gpus": 4}, "none can be named"), ({"gpus": 1, "share_mb": 10}, {"gpus": 4}, "no shares"),
    ({"gpus": 1, "machines": 2}, {"gpus": 4}, "several machines"),
    ({"gpus": 1, "gpu_model": "A100"}, {"gpus": 4, "gpu_model": "a100_80gb"}, None),
    ({"gpus": 1, "gpu_model": "h100"}, {"gpus": 4, "gpu_model": "a100"}, "a100, not h100"),
    ({"gpus": 1, "gpu_model": "h100"}, {"gpus": 4}, "of unknown model, not h100"),
    ({"gpus": 1, "gpu_memory_mb": 40_000}, {"gpus": 1, "gpu_memory_mb": 80_000}, None),
    ({"gpus": 1, "gpu_memory_mb": 40_000}, {"gpus": 1, "gpu_memory_mb": 24_000}, "24000 MB"),
    ({"gpus": 1, "gpu_memory_mb": 40_000}, {"gpus": 1}, "unknown memory"),
    ({"gpus": 1}, {"gpus": 1, "gpu_model": "a100_3g.20gb"}, "names their profile"), ({"gpus": 0}, {"gpu_model": "a100_3g.20gb"}, None),
    ({"gpus": 1, "gpu_model": "MIG-3g.20gb"}, {"gpus": 1, "gpu_model": "a100_3g.20gb"}, None),
])  # fmt: skip
def test_reasons_why_a_job_does_not_fit_an_engine(
    asked: dict[str, Any], said: dict[str, Any], word: str
) -> None:
    found = elastic.unfit(Resources(**asked), slurm(**said))
    assert found is None if word is None else word in str(found)


def test_slurm_options_request_the_resources_of_the_job() -> None:
    wanted = Resources(gpus=2, cpus=4, ram_mb=32_000)
    row = slurm(gpus=4, gpu_model="a100", options=["--partition=gpu", "--account=lab"])
    found = row.engine(wanted, Limits(time_seconds=3600.0, grace_seconds=30.0))
    assert found.name == "slurm"
    assert found.options == (
        "--cpus-per-task=4", "--mem=30518M", "--nodes=1", "--gpus-per-node=a100:2", "--time=63",
        "--partition=gpu", "--account=lab",
    )  # fmt: skip
    assert slurm().engine(Resources(gpus=0), Limits()).options == ("--nodes=1",)


def test_ray_options_request_the_resources_of_the_job() -> None:
    row = elastic_of({"name": "ray", "gpus": 4, "gpu_model": "A100", "options": ["apart=1"]})
    assert row is not None
    found = row.engine(Resources(gpus=2, cpus=4, ram_mb=32_000), Limits(time_seconds=60.0))
    assert found.name == "ray"
    assert json.loads(found.options[0]) == {
        "entrypoint_num_cpus": 4,
        "entrypoint_num_gpus": 2,
        "entrypoint_memory": 32 * 10**9,
        "entrypoint_resources": {"apart": 1.0, "accelerator_type:A100": 0.001},
    }
    alone = row.engine(Resources(gpus=0), Limits()).options[0]
    assert json.loads(alone) == {"entrypoint_num_cpus": 1, "entrypoint_resources": {"apart": 1.0}}
