"""Tasks of SkyPilot and dstack: how their packages read them, and what arrives in the job."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any, TypeAlias

import pytest
import yaml  # noqa: TID251 — as both engines read it

from groupwise.core.errors import UsageError
from groupwise.jobs.launch.render import (
    RenderOptions,
    Toleration,
    as_yaml,
    dstack_task,
    skypilot_task,
)
from tests.required_programs import skip_or_fail

ODD = (
    *(
        "",
        " ",
        "-v",
        "--",
        "a b",
        "it's",
        'say "hi"',
        "$(touch x)",
        "$$",
        "$HOME",
        "a$",
        "${{ run.args }}",
        "`id`",
    ),
    *("two\nlines\n", "\\", "é→😀", "*", "~", "#no", "{a: b}", "&", ";", "\x7f"),
)
RENDER_OPTIONS = RenderOptions(
    "sums",
    ("groupwise", "rl", *ODD),
    "me/groupwise:1",
    1.5,
    gpus=8,
    gpu_model="H100",
    setup="echo made > made",
)
ROOM: dict[str, Any] = {"cpus": "7500m", "memory": "64Gi", "disk_gb": 200, "spot": True}
WHOLE = replace(RENDER_OPTIONS, nodes=4, variables=("TOKEN", "OTHER"), **ROOM)
READ_BY_DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
from dstack._internal.utils.interpolator import VariablesInterpolator
task = parse_apply_configuration(yaml.safe_load(sys.stdin))
read = VariablesInterpolator({"run": {"args": ""}}).interpolate_or_error
print(json.dumps({
    "script": " && ".join(read(command) for command in task.commands),
    "gpu": [task.resources.gpu.name, task.resources.gpu.count.min, task.resources.gpu.count.max],
    "memory": task.resources.memory.min, "disk": task.resources.disk.size.min, "cpus": task.resources.cpu.count.min,
    "nodes": task.nodes, "spot": task.spot_policy.value == "spot", "seconds": task.max_duration, "variables": list(task.env),
    "image": task.image,
}))
"""
READ_BY_SKYPILOT = """
import json, sys
import sky
task = sky.Task.from_yaml_str(sys.stdin.read())
[asked] = task.resources
[[model, count]] = asked.accelerators.items()
script = f"set -e; {task.setup}; {task.run}" if task.setup else task.run
print(json.dumps({
    "script": script, "gpu": [[model], count, count], "memory": float((asked.memory or "0").rstrip("+")), "disk": asked.disk_size,
    "cpus": float((asked.cpus or "0").rstrip("+")), "nodes": task.num_nodes, "spot": asked.use_spot,
    "seconds": int(task.run.split()[2]), "variables": [ref.name for ref in task.managed_secret_refs], "image": asked.extract_docker_image(),
}))
"""
Render: TypeAlias = Callable[[RenderOptions], tuple[dict[str, Any], list[str]]]


def arrived(script: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """The arguments of the program that a script of the shell starts; `timeout` is the real one."""
    for name in ("groupwise", "torchrun"):
        program = folder / name
        program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
        program.chmod(0o755)
    environment = {**variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", script], env=environment, cwd=folder, capture_output=True, check=True
    )
    words = json.loads(done.stdout)
    return [Path(words[0]).name, *words[1:]]


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("render", [skypilot_task, dstack_task])
def test_arguments_arrive_exactly_and_nodes_meet_at_the_first_one(
    render: Render, nodes: int, tmp_path: Path
) -> None:
    task, comments = render(replace(RENDER_OPTIONS, nodes=nodes))
    text = as_yaml([task], comments)
    assert yaml.safe_load(text) == task
    if render is skypilot_task:
        script, names = (
            task["run"],
            {"SKYPILOT_NODE_RANK": "3", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        )
        assert task["setup"] == RENDER_OPTIONS.setup
    else:
        script = " && ".join(task["commands"]).replace("$$", "$")
        names = {"DSTACK_NODE_RANK": "3", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
    words = arrived(script, tmp_path, names)
    if nodes > 1:
        assert words[:5] == [
            *("torchrun", "--nnodes=4", "--nproc-per-node=8", "--node-rank=3", "--master-addr=10.0.0.1"),
        ]  # fmt: skip
    assert words[-len(RENDER_OPTIONS.command) :] == [*RENDER_OPTIONS.command]


@pytest.mark.soak(suite="launch")
@pytest.mark.parametrize("options", [RENDER_OPTIONS, WHOLE], ids=["small", "whole"])
@pytest.mark.parametrize(("engine", "render", "program"), [
    ("skypilot", skypilot_task, READ_BY_SKYPILOT), ("dstack", dstack_task, READ_BY_DSTACK),
])  # fmt: skip
def test_their_own_packages_read_what_was_asked(
    engine: str, render: Render, program: str, options: RenderOptions, tmp_path: Path
) -> None:
    environments = run_path(str(Path(__file__).parents[4] / "scripts/real_environment.py"))
    python = environments["where"](engine) / "bin/python"
    if not python.exists():
        skip_or_fail(f"scripts/real_environment.py {engine} makes the environment of this test")
    task, comments = render(options)

    def read(text: str) -> subprocess.CompletedProcess[bytes]:
        home = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        return subprocess.run(
            [python, "-c", program], input=text.encode(), env=home, capture_output=True, check=False
        )

    done = read(as_yaml([task], comments))
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout.splitlines()[-1])
    names = {
        "SKYPILOT_NODE_RANK": "3", "SKYPILOT_NODE_IPS": "10.0.0.1", "DSTACK_NODE_RANK": "3", "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    }  # fmt: skip
    assert arrived(found["script"], tmp_path, names)[-len(options.command) :] == [*options.command]
    assert (tmp_path / "made").exists()
    whole = options is WHOLE
    assert (found["gpu"], found["seconds"], found["spot"]) == ([["H100"], 8, 8], 5400, whole)
    assert (found["variables"], found["image"]) == ([*options.variables], "me/groupwise:1")
    if whole:
        assert (found["nodes"], found["memory"], found["disk"], found["cpus"]) == (4, 64, 200, 8)
    task["resource"] = task.pop("resources")
    assert read(as_yaml([task])).returncode != 0


@pytest.mark.parametrize(("render", "change", "why"), [
    (skypilot_task, {"gpu_model": None}, "--gpu-model"), (skypilot_task, {"volume": "runs"}, "--volume"),
    (skypilot_task, {"workdir": "/x"}, "--workdir"), (skypilot_task, {"name": "-a"}, "--name -a"),
    (dstack_task, {"name": "Sums"}, "--name Sums"), (dstack_task, {"namespace": "n"}, "--namespace"),
    (dstack_task, {"toleration": (Toleration.parse("a"),)}, "--toleration"), (dstack_task, {"image_pull_secret": ("a",)}, "registry_auth"),
    (dstack_task, {"command": ("groupwise", "a\0b")}, "NUL"), (dstack_task, {"command": ("x", "${{ groups[0].y }}")}, "an address"),
    (dstack_task, {"gpu_model": "H 100"}, "H 100"),
])  # fmt: skip
def test_settings_that_an_engine_cannot_express_are_refused(
    render: Render, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        render(replace(RENDER_OPTIONS, **change))
