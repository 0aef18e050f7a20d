"""Choices of experts next to the record: read as they were written, kept for some draws, linked into checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from groupwise.core.types import Example, Group, Rollout, RoutedExperts, Segment
from groupwise.runs.routed_experts import FOLDER, keep_only, link_all, read, write


def group(draw: int, *experts: RoutedExperts | None) -> Group:
    """A member for each, whose second segment has them."""
    rollouts = [
        Rollout(
            draw=draw, member=member, attempt=0, prompt_ids=(1,), completion="",
            segments=(Segment("inserted", (2,)), Segment("policy", (3, 4), routed_experts=each)),
        )
        for member, each in enumerate(experts)
    ]  # fmt: skip
    return Group(draw, Example(0, "?"), tuple(rollouts))


def without(group: Group) -> Group:
    """As the record has it."""
    rollouts = [
        replace(each, segments=tuple(replace(s, routed_experts=None) for s in each.segments))
        for each in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{FOLDER}/*"))


SOME = RoutedExperts(0, (2, 3, 1), bytes(range(6)))
WIDE = RoutedExperts(4, (2, 3, 1), bytes(range(12)))


def test_a_group_is_read_as_it_was_written(tmp_path):
    whole, none = group(7, SOME, None, WIDE), group(8, None)
    for each in (whole, none):
        write(tmp_path, each)
        assert read(tmp_path, without(each)) == each
    assert names(tmp_path) == ["draw-7.zip"]


def test_a_damaged_file_costs_the_choices_at_most(tmp_path):
    whole = group(7, SOME)
    write(tmp_path, whole)
    file = tmp_path / FOLDER / "draw-7.zip"
    content = file.read_bytes()
    damaged = [
        content[:-30],
        *(content[:n] + b"\xa5" + content[n + 1 :] for n in range(len(content))),
    ]
    found: list[Group] = []
    for each in damaged:
        file.write_bytes(each)
        found.append(read(tmp_path, without(whole)))
    assert all(each in (whole, without(whole)) for each in found)
    assert found[0] == without(whole)


def test_a_checkpoint_restores_its_routed_experts(tmp_path):
    run, checkpoint = tmp_path / "run", tmp_path / "checkpoint"
    for folder in (run, checkpoint):
        folder.mkdir()
    for draw in (1, 2, 3):
        write(run, group(draw, SOME))
    keep_only(run, {1, 3})
    link_all(run, checkpoint)
    keep_only(run, {3})
    write(run, group(4, SOME))
    assert names(run) == ["draw-3.zip", "draw-4.zip"]
    keep_only(run, ())
    link_all(checkpoint, run)
    assert names(run) == ["draw-1.zip", "draw-3.zip"]
    assert read(run, without(group(1, SOME))) == group(1, SOME)
