from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.terminal.plot import (
    Point,
    Series,
    svg_curve,
    terminal_curve,
    thin_out,
    with_mean,
)

RISING: list[Point] = [(float(step), step / 10) for step in range(11)]
ANY_POINTS = st.lists(
    st.tuples(st.integers(0, 10**6).map(float), st.floats()),
    max_size=30,
).map(sorted)


class TestTerminal:
    @given(ANY_POINTS, st.integers(1, 120), st.integers(1, 30))
    def test_fits_whatever_the_values(self, points: list[Point], width: int, height: int) -> None:
        drawn = terminal_curve([Series("s", tuple(points))], width, height)
        assert all(len(line) <= max(width, 32) for line in drawn.split("\n"))

    def test_colours_only_when_asked_and_names_are_harmless(self) -> None:
        series = [*with_mean("reward", RISING), Series("a\x1b[2J\nb", tuple(RISING))]
        plain = terminal_curve(series, title="t\x07", x_label="x\n")
        assert "\x1b" not in plain
        assert "\x07" not in plain
        coloured = terminal_curve(series, title="t\x07", x_label="x\n", colour=True)
        assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


class TestSvg:
    def test_is_a_picture_with_every_value(self) -> None:
        drawn = svg_curve(with_mean("reward", RISING), title="a run")
        assert re.findall(r"https?://[^\"']+", drawn) == ["http://www.w3.org/2000/svg"]
        root = ET.fromstring(drawn)
        name = "{http://www.w3.org/2000/svg}"
        assert len(root.findall(f".//{name}g[@class='dots c0']/{name}circle")) == len(RISING)
        texts = [element.text for element in root.iter(f"{name}text")]
        assert {"a run", "step", "reward", "mean of 3", "0.0", "1.0", "10"} <= set(texts)
        line = root.find(f"{name}path[@class='line c0']")
        assert line is not None
        places = [float(number) for number in re.findall(r"[-\d.]+", line.get("d", ""))]
        assert len(places) == 2 * len(RISING)
        assert places[1::2] == sorted(places[1::2], reverse=True)

    @given(st.text(st.characters(exclude_categories=())))
    def test_any_text_is_escaped(self, text: str) -> None:
        root = ET.fromstring(svg_curve([Series(text, tuple(RISING))], text, text).encode())
        assert not list(root.iter("script"))

    @given(ANY_POINTS)
    def test_any_values_give_finite_places(self, points: list[Point]) -> None:
        drawn = svg_curve(with_mean("s", points))
        assert "nan" not in drawn
        assert not re.search(r"[\"L M]-?inf", drawn)


class TestSmall:
    @given(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=90), st.integers(4, 40))
    def test_thinned_points_keep_both_ends_and_the_extremes(
        self, values: list[float], most: int
    ) -> None:
        points = list(zip(map(float, range(len(values))), values, strict=True))
        found = thin_out(points, most)
        assert len(found) <= most
        assert list(found) == sorted(set(found))
        assert set(found) <= set(points)
        assert (found[0], found[-1]) == (points[0], points[-1])
        kept = [y for _, y in found]
        assert (min(kept), max(kept)) == (min(values), max(values))
        if len(points) <= most:
            assert list(found) == points
