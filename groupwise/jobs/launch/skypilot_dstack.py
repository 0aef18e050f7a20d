"""Renders a job as a task of SkyPilot or dstack, for `groupwise launch render`; users start it by `sky launch` or `dstack apply`.

These programs rent machines of many clouds and queue jobs for them, which Groupwise does not. Both run a shell script in an image, in a
copy of the folder in which they are called, so arguments are quoted for the shell. Options that a format cannot express are refused, or
become a comment at the head of the YAML.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import parse_size
from groupwise.jobs.launch.kubernetes import LEAVING_SECONDS, PORT, RenderOptions, check_options
from groupwise.jobs.launch.packaging import GRACE_SECONDS

NO_RETRIES = (
    "It is tried once. After a preemption or failure begin it again with --resume behind the verb."
)
CLUSTER_OPTIONS = ("namespace", "node_selector", "toleration", "image_pull_secret")
SAVE_SECONDS = int(GRACE_SECONDS) + LEAVING_SECONDS
SHARED_MEMORY_GB = 16
"""Upper limit in GB: containers have 64 MB by default, and worker processes and NCCL need more."""


def skypilot_task(options: RenderOptions) -> tuple[dict[str, Any], list[str]]:
    """The task, and comments for its head. Raises UsageError for values that SkyPilot would reject or cannot express."""
    refused = {
        **dict.fromkeys(CLUSTER_OPTIONS, "; SkyPilot's own config says that for clusters"),
        "volume": "; a bucket for runs goes under file_mounts of the YAML",
        "workdir": "; the project is ~/sky_workdir there",
    }
    check_options("SkyPilot", options, r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", refused)
    if options.gpus and options.gpu_model is None:
        raise UsageError("SkyPilot rents GPUs by their model: --gpu-model H100, or --gpus 0.")
    first_address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    script = _script(options, "$SKYPILOT_NODE_RANK", first_address)
    resources = {
        "accelerators": f"{options.gpu_model}:{options.gpus}" if options.gpus else None,
        "cpus": options.cpus and f"{_cpus(options.cpus)}+",
        "memory": options.memory and f"{_gib(options.memory)}+",
        "disk_size": options.disk_gb,
        "use_spot": options.spot or None,
        "image_id": f"docker:{options.image}",
        # Otherwise a managed job starts again on another machine, without its checkpoints.
        "job_recovery": "none",
        "autostop": {"idle_minutes": 30},
    }
    task = {
        "name": options.name,
        "num_nodes": options.nodes,
        "workdir": ".",
        "resources": {name: value for name, value in resources.items() if value is not None},
        **({"secrets": dict.fromkeys(options.variables)} if options.variables else {}),
        **({"setup": options.setup} if options.setup else {}),
        "run": f"timeout --kill-after={SAVE_SECONDS} {math.ceil(options.hours * 3600)} {script}",
    }
    secrets = "".join(f" --secret {name}" for name in options.variables)
    comments = [
        f"sky launch -c {options.name} THIS_FILE{secrets}",
        *(["The values of its secrets are those of your environment."] if secrets else []),
        "The project is the folder in which you call it, without what .gitignore or .skyignore names.",
        f"SkyPilot has no time limit: `timeout` ends the job after {options.hours:g} h, and lets it save for {SAVE_SECONDS} s.",
        f"Results stay on the machine: rsync -r {options.name}:sky_workdir/runs . After 30 idle minutes it stops; `sky down` ends it.",
        NO_RETRIES,
    ]
    return task, comments


def dstack_task(options: RenderOptions) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a task, and comments for its head. Raises UsageError for values that dstack would reject or cannot express."""
    refused = {
        **dict.fromkeys(CLUSTER_OPTIONS, "; dstack's server has that of its Kubernetes backend"),
        "image_pull_secret": "; registry_auth in the YAML does that",
    }
    check_options("dstack", options, "[a-z][a-z0-9-]{1,40}", refused)
    if replaced := [word for word in options.command if re.search(r"\$\{\{\s*groups\b", word)]:
        raise UsageError(
            f"{replaced[0]}: dstack's server would replace that by an address, or refuse it."
        )
    workdir = options.workdir or "/workspace"
    memory = None if options.memory is None else _gib(options.memory)
    shared = SHARED_MEMORY_GB if memory is None else max(1, min(SHARED_MEMORY_GB, memory // 2))
    model = f"{options.gpu_model}:" if options.gpu_model and options.gpus else ""
    resources = {
        "gpu": f"{model}{options.gpus}",
        "cpu": options.cpus and f"{_cpus(options.cpus)}..",
        "memory": None if memory is None else f"{memory}GB..",
        "shm_size": f"{shared}GB",
        "disk": options.disk_gb and f"{options.disk_gb}GB..",
    }
    script = _script(options, "$DSTACK_NODE_RANK", '"$DSTACK_MASTER_NODE_IP"')
    # With `exec` the job itself, and not only a shell, receives SIGTERM.
    commands = [*([options.setup] if options.setup else []), f"exec {script}"]
    task = {
        "type": "task",
        "name": options.name,
        **({"nodes": options.nodes} if options.nodes > 1 else {}),
        "image": options.image,
        "working_dir": workdir,
        "files": [f".:{workdir}"],
        **({"env": list(options.variables)} if options.variables else {}),
        # dstack replaces `${{ … }}` in commands, and `$$` by `$`.
        "commands": [command.replace("$", "$$") for command in commands],
        "resources": {name: value for name, value in resources.items() if value is not None},
        **({"volumes": [f"{options.volume}:{workdir}/runs"]} if options.volume else {}),
        "spot_policy": "spot" if options.spot else "on-demand",
        "max_duration": math.ceil(options.hours * 3600),
        "stop_duration": SAVE_SECONDS,
    }
    comments = [
        "dstack apply -f THIS_FILE, which lies in the folder of the project; .gitignore and .dstackignore leave files out.",
        *(["Variables of `env` have the values of your environment."] if options.variables else []),
        *(
            []
            if options.volume
            else ["Without a volume for runs the results are gone with the run."]
        ),
        *(["Its nodes need a fleet with `placement: cluster`."] if options.nodes > 1 else []),
        NO_RETRIES,
    ]
    return task, comments


def _script(options: RenderOptions, rank: str, address: str) -> str:
    """The command for a shell. `rank` and `address` are the shell's words for the node's number, and for the first node's address."""
    command = shlex.join(options.command)
    if options.nodes == 1:
        return command
    return (
        f"torchrun --nnodes={options.nodes} --nproc-per-node={max(1, options.gpus)} --node-rank={rank} --master-addr={address} "
        f"--master-port={PORT} --no-python {command}"
    )


def _cpus(text: str) -> int:
    """Whole CPU cores for Kubernetes' `8` or `7500m`."""
    return math.ceil(float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1))


def _gib(text: str) -> int:
    size = parse_size(text)
    assert size is not None, "RenderOptions checks it"
    return math.ceil(size / 2**30)
