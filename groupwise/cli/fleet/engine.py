"""Options of `groupwise fleet vm add` and `vm set` for the engine (Slurm, Ray) that begins jobs in a machine's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from groupwise.cli.fleet.words import whole
from groupwise.core.errors import UsageError

EngineOption = Annotated[
    str | None,
    typer.Option(metavar="E", help="What begins jobs there on machines of its own: slurm or ray."),
]
SlotsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Jobs that wait for the engine or run there, together; 8 at first.",
        parser=whole("--slots", 8, most=1024),
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-job",
        metavar="N",
        help="GPUs that one job may ask the engine for; none at first.",
        parser=whole("--gpus-per-job", 4, least=0, most=1024),
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--gpu-model", metavar="M", help="Of these, as the engine calls it."),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--gpu-memory", metavar="SIZE", help="That each of them has, as 80GB."),
]
PartitionOption = Annotated[str | None, typer.Option(metavar="P", help="Of Slurm.")]
SbatchOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="Of sbatch for each job: --sbatch=--account=lab; may be repeated."
    ),
]

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="URL",
        help="Of Ray's dashboard, as that machine reaches it; without it: http://127.0.0.1:8265.",
    ),
]
ResourceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        help="Of Ray for each job: --resource accelerator_type:A100=0.001; may be repeated.",
    ),
]


def engine_words(
    slots: int | None,
    gpus: int | None,
    model: str | None,
    memory: str | None,
    partition: str | None,
    sbatch: Sequence[str] | None,
    address: str | None,
    resource: Sequence[str] | None,
) -> dict[str, Any]:
    """The given settings of an engine. Its options are one setting: those that are given replace all earlier ones."""
    of_slurm = [*([f"--partition={partition}"] if partition else []), *(sbatch or ())]
    if of_slurm and (resource or address):
        raise UsageError(
            "--partition and --sbatch are for Slurm, --address and --resource for Ray."
        )
    options = [*of_slurm, *(resource or ())]
    from groupwise.jobs.fleet.queue.resources import megabytes

    given = {
        "slots": slots,
        "gpus": gpus,
        "gpu_model": model,
        "gpu_memory_mb": None if memory is None else megabytes("--gpu-memory", memory),
        "options": options or None,
        "address": address,
    }
    return {name: value for name, value in given.items() if value is not None}


def new_engine(name: str | None, said: Mapping[str, Any]) -> dict[str, Any] | None:
    """The engine of a machine that is added; None: it begins jobs itself. Raises UsageError."""
    if name is not None:
        return {"name": name, **said}
    if said:
        raise UsageError(
            "--slots, --gpus-per-job, --gpu-model, --gpu-memory, --partition, --sbatch, --address and --resource are for machines behind "
            "which an engine begins jobs: say which, as --engine slurm."
        )
    return None
