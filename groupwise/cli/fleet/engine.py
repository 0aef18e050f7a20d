"""Options of `groupwise fleet vm add` and `vm set` for the scheduler (Slurm, Ray) that starts the jobs of a machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from groupwise.cli.options import option
from groupwise.cli.parsing import megabytes
from groupwise.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of a machine's engine."""

    slots: Annotated[
        int | None,
        option(
            "N",
            "Maximum number of jobs that the scheduler has at once, waiting and running. For a new machine: 8.",
            min=1,
            max=1024,
        ),
    ] = None
    gpus_per_job: Annotated[
        int | None,
        option(
            "N",
            "Maximum number of GPUs that one job may ask the scheduler for. For a new machine: 0.",
            min=0,
            max=1024,
        ),
    ] = None
    gpu_model: Annotated[
        str | None, option("M", "Model of these GPUs, as the scheduler names it.")
    ] = None
    gpu_memory: Annotated[
        int | None,
        option(
            "SIZE", "Memory of each of these GPUs, such as 80GB.", parser=megabytes("--gpu-memory")
        ),
    ] = None
    partition: Annotated[str | None, option("P", "Partition of Slurm that gets the jobs.")] = None
    sbatch: Annotated[
        list[str],
        option(
            "OPTION",
            "Option that sbatch gets for each job, such as --sbatch=--account=lab. May be repeated.",
        ),
    ] = field(default_factory=list[str])
    address: Annotated[
        str | None,
        option(
            "URL",
            "Address of Ray's dashboard, seen from that machine; default: http://127.0.0.1:8265.",
        ),
    ] = None
    resource: Annotated[
        list[str],
        option(
            "NAME=N",
            "Resource that each job asks Ray for, such as --resource accelerator_type:A100=0.001. May be repeated.",
        ),
    ] = field(default_factory=list[str])

    def settings(self) -> dict[str, Any]:
        """The given settings. Scheduler options form one setting: if any are given, they replace all earlier ones. Raises UsageError."""
        slurm_options = [
            *([f"--partition={self.partition}"] if self.partition else []),
            *self.sbatch,
        ]
        if slurm_options and (self.resource or self.address):
            raise UsageError(
                "--partition and --sbatch are for Slurm, --address and --resource for Ray."
            )
        options = {
            "slots": self.slots,
            "gpus": self.gpus_per_job,
            "gpu_model": self.gpu_model,
            "gpu_memory_mb": self.gpu_memory,
            "options": [*slurm_options, *self.resource] or None,
            "address": self.address,
        }
        return {name: value for name, value in options.items() if value is not None}

    def of_new_machine(self, name: str | None) -> dict[str, Any] | None:
        """The engine of a machine to add; None: the machine starts jobs itself. Raises UsageError."""
        settings = self.settings()
        if name is not None:
            return {"name": name, **settings}
        if settings:
            raise UsageError(
                "--slots, --gpus-per-job, --gpu-model, --gpu-memory, --partition, --sbatch, --address and --resource need a scheduler that "
                "starts the jobs of the machine: name it, as --engine slurm."
            )
        return None
