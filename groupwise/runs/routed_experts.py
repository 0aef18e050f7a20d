"""The choices of experts of rollouts that may be trained on again: a file for each group, next to the record.

    routed_experts/draw-N.zip                       an entry for each segment: MEMBER-POSITION-FIRST-TOKENS-LAYERS-TOPK, the indices
    checkpoints/step-N/routed_experts/draw-N.zip    the same files, linked, as they were when the checkpoint was written

They would make the record a hundred times as large, and only a replay of completions (`data.replay`) reads them. So a run keeps those of
groups in its replay buffer: it writes a file before the step is committed, and removes it when the buffer has dropped the group. A resume
restores those of its checkpoint. A file that is lost or damaged costs the choices: the learner's routers then choose.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Container
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from groupwise.core import atomic_files
from groupwise.core.types import Group, RoutedExperts

logger = logging.getLogger(__name__)

FOLDER = "routed_experts"
DAMAGE = (BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)
"""What reading a damaged file may raise."""
FASTEST = 1
"""Level of compression; higher ones gain little, because choices look random."""


def write(run: Path, group: Group) -> None:
    """Write the choices of a group, if there are any."""
    segments = {
        (rollout.member, position): segment.routed_experts
        for rollout in group.rollouts
        for position, segment in enumerate(rollout.segments)
    }
    chosen = {place: experts for place, experts in segments.items() if experts is not None}
    if not chosen:
        return
    data = BytesIO()
    with ZipFile(data, "w", ZIP_DEFLATED, compresslevel=FASTEST) as archive:
        for place, experts in chosen.items():
            name = "-".join(map(str, (*place, experts.first, *experts.shape)))
            archive.writestr(name, experts.indices)
    path = _file(run, group.draw)
    with atomic_files.explaining_disk_errors(path):
        path.parent.mkdir(exist_ok=True)
    atomic_files.write_file(path, data.getvalue())


def read(run: Path, group: Group) -> Group:
    """The group with the choices that were written for it."""
    path = _file(run, group.draw)
    found: dict[tuple[int, int], RoutedExperts] = {}
    try:
        with ZipFile(path) as archive:
            for name in archive.namelist():
                member, position, first, tokens, layers, top_k = map(int, name.split("-"))
                shape = (tokens, layers, top_k)
                found[member, position] = RoutedExperts(first, shape, archive.read(name))
    except FileNotFoundError:
        return group
    except DAMAGE as error:
        logger.warning("%s is damaged, and its choices of experts are lost: %s", path, error)
        return group
    rollouts = [
        replace(
            rollout,
            segments=tuple(
                replace(segment, routed_experts=found.get((rollout.member, position)))
                for position, segment in enumerate(rollout.segments)
            ),
        )
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts))


def keep_only(run: Path, draws: Container[int]) -> None:
    """Remove the files of all other draws."""
    for path in (run / FOLDER).glob("draw-*.zip"):
        if int(path.stem.removeprefix("draw-")) not in draws:
            atomic_files.remove_file(path)


def link_all(source: Path, target: Path) -> None:
    """Link the files of a run into a checkpoint, or those of a checkpoint into its run."""
    for path in (source / FOLDER).glob("draw-*.zip"):
        (target / FOLDER).mkdir(exist_ok=True)
        atomic_files.link(path, target / FOLDER / path.name)


def _file(run: Path, draw: int) -> Path:
    return run / FOLDER / f"draw-{draw}.zip"
