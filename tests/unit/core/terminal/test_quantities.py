"""Sizes as people type them, and counts as they read them."""

import pytest

from groupwise.core.terminal.quantities import counted, parse_size

MB = 10**6


@pytest.mark.parametrize(("text", "size"), [
    ("40GB", 40_000 * MB), ("512M", 512 * MB), ("1.5TB", 1_500_000 * MB), ("1GiB", 2**30), ("64Gi", 2**36), ("3 kb", 3000),
    ("512B", 512), ("7", 7 * MB), ("12 apples", None), ("i", None), ("5iB", None), ("", None), ("-1G", None),
])  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text, bare_number=MB) == size


def test_counted_uses_singular_and_plural() -> None:
    assert [counted(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
