from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.display.plot import (
    MOST_POINTS,
    Point,
    Series,
    sparkline,
    svg_curve,
    terminal_curve,
    thinned,
    with_mean,
)

RISING: list[Point] = [(float(step), step / 10) for step in range(11)]
ANY_POINTS = st.lists(
    st.tuples(st.integers(0, 10**6).map(float), st.floats(-1e12, 1e12) | st.just(math.nan)),
    max_size=30,
).map(sorted)


class TestTerminal:
    def test_draws_a_rising_line_from_corner_to_corner(self) -> None:
        lines = terminal_curve([Series("reward", tuple(RISING))], 40, 8, "reward").split("\n")
        assert lines[0].startswith("reward")
        assert lines[0].endswith("⠒⠒ reward")
        body = lines[1:9]
        assert re.match(r"1\.0 ┤", body[0])
        assert re.match(r"0\.0 ┤", body[-1])
        starts = [min(i for i, c in enumerate(line) if 0x2800 < ord(c) < 0x2900) for line in body]
        assert starts == sorted(starts, reverse=True)
        assert starts[-1] == 5
        assert len(body[0]) == 40
        assert lines[9].startswith("    └┬")
        assert re.fullmatch(r"\s+0\s+2\s+4\s+6\s+8\s+10", lines[10])
        assert lines[11].strip() == "step"

    @given(ANY_POINTS, st.integers(1, 120), st.integers(1, 30))
    def test_fits_whatever_the_values(self, points: list[Point], width: int, height: int) -> None:
        drawn = terminal_curve([Series("s", tuple(points))], width, height)
        assert all(len(line) <= max(width, 32) for line in drawn.split("\n"))

    @pytest.mark.parametrize("points", [[], [(0.0, math.nan), (1.0, math.inf)]])
    def test_says_when_there_is_nothing(self, points: list[Point]) -> None:
        assert terminal_curve([Series("s", tuple(points))], title="t") == "t: no values yet"
        assert "no values yet" in svg_curve([Series("s", tuple(points))], title="t")

    def test_colours_only_when_asked_and_names_are_harmless(self) -> None:
        series = [*with_mean("reward", RISING), Series("a\x1b[2J\nb", tuple(RISING))]
        plain = terminal_curve(series, title="t\x07", x_label="x\n")
        assert "\x1b" not in plain
        assert "\x07" not in plain
        coloured = terminal_curve(series, title="t\x07", x_label="x\n", colour=True)
        assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


class TestSvg:
    def test_is_a_picture_with_every_value(self) -> None:
        drawn = svg_curve(with_mean("reward", RISING), title="a run", y_label="mean")
        assert re.findall(r"https?://[^\"']+", drawn) == ["http://www.w3.org/2000/svg"]
        root = ET.fromstring(drawn)
        name = "{http://www.w3.org/2000/svg}"
        assert len(root.findall(f".//{name}g[@class='dots c0']/{name}circle")) == len(RISING)
        texts = [element.text for element in root.iter(f"{name}text")]
        assert {"a run", "mean", "step", "reward", "mean of 3", "0.0", "1.0", "10"} <= set(texts)
        line = root.find(f"{name}path[@class='line c0']")
        assert line is not None
        places = [float(number) for number in re.findall(r"[-\d.]+", line.get("d", ""))]
        assert len(places) == 2 * len(RISING)
        assert places[1::2] == sorted(places[1::2], reverse=True)

    def test_a_band_goes_along_the_highest_places_and_back_along_the_lowest(self) -> None:
        edges: list[Point] = [(1, 1), (1, 3), (1, 2), (2, 2), (2, 4)]
        band = Series("spread", tuple(edges), "band")
        root = ET.fromstring(svg_curve([band, Series("mean", ((1, 2), (2, 3)))]))
        name = "{http://www.w3.org/2000/svg}"
        outline = root.find(f"{name}path[@class='band c0']").get("d", "")
        places = [float(number) for number in re.findall(r"[-\d.]+", outline)]
        assert outline.endswith("Z")
        assert len(places) == 8, "two edges of two places"
        first_high, second_high, second_low, first_low = places[1::2]
        assert first_high - second_high == pytest.approx((second_low - second_high) / 2, abs=0.2)
        assert first_low - first_high == pytest.approx(second_low - second_high, abs=0.2)
        assert [element.text for element in root.iter(f"{name}text")].count("spread") == 0
        assert root.find(f"{name}path[@class='line c0']") is not None

    def test_many_points_are_thinned_after_their_mean_within_the_same_axes(self) -> None:
        noisy = [(float(i), float(i * 7 % 11 + (i == 1717) * 9)) for i in range(5000)]
        series = with_mean("reward", noisy, window=11)
        drawn = svg_curve(series)
        assert MOST_POINTS - 4 <= drawn.count("<circle cx") <= MOST_POINTS
        root = ET.fromstring(drawn)
        name = "{http://www.w3.org/2000/svg}"
        line = root.find(f"{name}path[@class='line c0']").get("d", "")
        assert line.count(" L") < MOST_POINTS
        few = [*noisy[:12], noisy[1717], noisy[-1]]
        texts = [element.text for element in root.iter(f"{name}text")]
        other = ET.fromstring(svg_curve(with_mean("reward", few, window=11)))
        assert texts == [element.text for element in other.iter(f"{name}text")]
        heights = [float(y) for y in re.findall(r"[-\d.]+ ([-\d.]+)", line)[20:]]
        assert max(heights) - min(heights) < 20, "eleven values in a row have one mean"

    def test_a_line_on_another_or_of_a_colour_that_is_there_is_dashed(
        self,
    ) -> None:
        points = tuple(RISING)
        others = [Series(str(n), tuple((x, y + n) for x, y in points)) for n in range(1, 5)]
        drawn = svg_curve([Series("a", points), others[0], Series("b", points), *others[1:]])
        kinds = re.findall(r'class="(line c\d[^"]*)" d="M[\d.]+ [\d.]+ L', drawn)
        dashes = ["0", "1", "2 dashed", "3", "0 dashed", "1 dashed"]
        assert kinds == [f"line c{each}" for each in dashes]

    @given(st.text(st.characters(exclude_categories=())))
    def test_any_text_is_escaped(self, text: str) -> None:
        root = ET.fromstring(svg_curve([Series(text, tuple(RISING))], text, text, text).encode())
        assert not list(root.iter("script"))

    @given(ANY_POINTS)
    def test_any_values_give_finite_places(self, points: list[Point]) -> None:
        drawn = svg_curve(with_mean("s", points))
        assert "nan" not in drawn
        assert not re.search(r"[\"L M]-?inf", drawn)


class TestSmall:
    def test_sparkline(self) -> None:
        assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
        assert sparkline([1.0, 1.0]) == "▄▄"
        assert sparkline([0.0, math.nan, 1.0]) == "▁█"
        assert sparkline([0, 0, 4, 4, 7, 7, 7, 7], width=4) == "▁▅██"
        assert sparkline([]) == ""

    @given(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=90), st.integers(4, 40))
    def test_thinned_points_keep_both_ends_and_the_extremes(
        self, values: list[float], most: int
    ) -> None:
        points = list(zip(map(float, range(len(values))), values, strict=True))
        found = thinned(points, most)
        assert len(found) <= most
        assert list(found) == sorted(set(found))
        assert set(found) <= set(points)
        assert (found[0], found[-1]) == (points[0], points[-1])
        kept = [y for _, y in found]
        assert (min(kept), max(kept)) == (min(values), max(values))
        if len(points) <= most:
            assert list(found) == points
