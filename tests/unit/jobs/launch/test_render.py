"""Manifests are valid by Kubernetes' own schema, and arguments arrive in a pod unchanged."""

import io
import re
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml  # noqa: TID251 — as kubectl reads it
from ruamel.yaml import YAML

from groupwise.core.errors import UsageError
from groupwise.jobs.launch.render import (
    RANK,
    RenderOptions,
    Toleration,
    as_yaml,
    command,
    manifests,
)

VERSION = "1.37"
ODD = (
    *("", " ", "-v", "--", "a b", "it's", 'say "hi"', "$(touch x)", "$$(NODE_RANK)", "$NODE_RANK"),
    *("two\nlines\n", "\ttab", "\\", "é→😀", "*", "~", "#no", "yes", "1e5", "0o7", "12:30", "null"),
    *("{a: b}", "[x]", "- x", "&a", "!b", "\x85\u2028\x7f", "$", "$$", "a$"),
)
RENDER_OPTIONS = RenderOptions(
    "sums", ("groupwise", "rl", *ODD), "registry.example/me/groupwise:1@sha256:ab", 1.5
)
SECRET: dict[str, Any] = {"secret": "sums-env", "variables": ("TOKEN", "OTHER")}
ROOM: dict[str, Any] = {"gpus": 8, "cpus": "8", "memory": "64Gi", "disk_gb": 200, "volume": "runs"}
TAINTS = ("nvidia.com/gpu", "dedicated=ml:NoSchedule", "idle:NoExecute", "empty=")
NODES: dict[str, Any] = {
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "pool": ""},
    "toleration": tuple(map(Toleration.parse, TAINTS)),
    "image_pull_secret": ("registry", "other.registry"),
}
WHOLE = replace(RENDER_OPTIONS, nodes=4, namespace="research", **SECRET, **ROOM, **NODES)


def expanded(word: str, variables: dict[str, str]) -> str:
    """As Kubernetes replaces variables in arguments: `$$` is `$`, `$(NAME)` a variable that there is."""

    def of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)", of, word)


def container(document: dict[str, Any]) -> dict[str, Any]:
    [found] = document["spec"]["template"]["spec"]["containers"]
    return found


def test_kubernetes_schema_has_nothing_against_it() -> None:
    for asked in (RENDER_OPTIONS, WHOLE, replace(RENDER_OPTIONS, gpus=0)):
        for document in manifests(asked):
            kubernetes_validate.validate(document, VERSION, strict=True)
    [job] = manifests(RENDER_OPTIONS)
    job["spec"]["podReplacementPolice"] = job["spec"].pop("podReplacementPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_a_job_is_tried_once_and_ended_in_time() -> None:
    [job] = manifests(RENDER_OPTIONS)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["activeDeadlineSeconds"] == 5400
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 90)
    assert container(job)["resources"] == {"limits": {"nvidia.com/gpu": "1"}}


def test_a_cluster_is_told_which_nodes_and_how_the_image_is_pulled() -> None:
    _, job = manifests(WHOLE)
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == NODES["node_selector"]
    exists, equal = {"operator": "Exists"}, {"operator": "Equal"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", **exists},
        {"key": "dedicated", **equal, "value": "ml", "effect": "NoSchedule"},
        {"key": "idle", **exists, "effect": "NoExecute"},
        {"key": "empty", **equal, "value": ""},
    ]
    assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "other.registry"}]
    assert container(job)["resources"]["limits"]["ephemeral-storage"] == "200G"
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container(job)["volumeMounts"]


@pytest.mark.parametrize("asked", [RENDER_OPTIONS, WHOLE])
def test_arguments_arrive_exactly_whoever_reads_the_yaml(asked: RenderOptions) -> None:
    text = as_yaml(manifests(asked))
    old = list(yaml.safe_load_all(text))
    new = list(YAML(typ="safe").load_all(io.StringIO(text)))
    assert old == new == manifests(asked)
    words = [expanded(each, {RANK: "3"}) for each in container(old[-1])["command"]]
    assert tuple(words[-len(asked.command) :]) == asked.command


def test_nodes_meet_at_the_first_of_them_secrets_are_named_and_results_have_a_claim() -> None:
    service, job = manifests(WHOLE)
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 4)
    there = ("clusterIP", "publishNotReadyAddresses", "selector")
    named = {"batch.kubernetes.io/job-name": "sums"}
    assert [service["spec"][each] for each in there] == ["None", True, named]
    assert pod["subdomain"] == service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    assert " ".join(expanded(each, {RANK: "3"}) for each in command(WHOLE)).startswith(
        "torchrun --nnodes=4 --nproc-per-node=8 --node-rank=3 "
        f"--master-addr=sums-0.sums --master-port={port} --no-python "
    )
    names = {each["name"]: each["valueFrom"] for each in container(job)["env"]}
    assert names["TOKEN"] == {"secretKeyRef": {"name": "sums-env", "key": "TOKEN"}}
    assert {"name": "results", "mountPath": "/workspace/runs"} in container(job)["volumeMounts"]
    assert {"claimName": "runs"} in [each.get("persistentVolumeClaim") for each in pod["volumes"]]


@pytest.mark.parametrize(("change", "why"), [
    ({"name": "Sums"}, "name 'Sums'"), ({"image": "a b"}, "image 'a b'"), ({"secret": "s", "variables": ("a-b",)}, "a-b"),
    ({"command": ("groupwise", "a\0b")}, "NUL"), ({"nodes": 100_001}, "100001"),
    ({"node_selector": {"a b": "c"}}, "a b"), ({"node_selector": {"a": "c/d"}}, "c/d"),
    ({"image_pull_secret": ("A",)}, "image_pull_secret"),
    ({"toleration": (Toleration.parse("a=b:Never"),)}, "Never"), ({"gpu_model": "H100"}, "--node-selector"), ({"spot": True}, "--spot"),
])  # fmt: skip
def test_values_that_kubernetes_rejects_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        manifests(replace(RENDER_OPTIONS, **change))
