"""Times and sizes, as they are said."""

import pytest

from groupwise.display.quantities import byte_size, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-3, "0 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7200, "2 h"), (90061, "1 d 1 h")],
)
def test_time_spans(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        *((0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1 kB"), (3440, "3.44 kB")),
        *((999_400, "999 kB"), (999_600, "1 MB"), (24e9, "24 GB"), (5e15, "5000 TB")),
    ],
)
def test_sizes(count: float, said: str) -> None:
    assert byte_size(count) == said
