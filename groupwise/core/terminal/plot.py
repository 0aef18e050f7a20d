"""Curves: in a terminal as Unicode, in a file as SVG, in a line as a sparkline.

All take plain numbers and ignore points that are not finite. Raw values are noisy in reinforcement learning, so
`with_mean` shows them as faint points under the bold line of their moving mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from groupwise.core.terminal.text import one_line, shorten

Point = tuple[float, float]

SPARKS = "▁▂▃▄▅▆▇█"

MAX_POINTS = 400
"""Maximum number of points of a line, or dots, in a plot: about one per pixel of a small one, so its size does not grow with a run."""


@dataclass(frozen=True, slots=True)
class Series:
    """One set of points to draw."""

    name: str
    points: tuple[Point, ...]
    """(x, y) in order of x."""
    style: Literal["line", "points", "band"] = "line"
    """A band is the area between the lowest and the highest point at each x; a terminal shows its points instead."""


def with_mean(
    name: str,
    points: Sequence[Point],
    warm_up: Sequence[Point] = (),
) -> list[Series]:
    """The raw points and the line of their moving mean over a tenth of them, at least 3.

    Points of a warm-up become a separate line.
    """
    finite = _finite(points)
    window = max(3, math.ceil(len(finite) / 10))
    means = moving_mean([y for _, y in finite], window)
    line = tuple((x, mean) for (x, _), mean in zip(finite, means, strict=True))
    return [
        Series(name, finite, "points"),
        Series(f"mean of {window}", line, "line"),
        *([Series("warm-up", tuple(warm_up), "line")] if warm_up else []),
    ]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at each position; of fewer at the beginning."""
    return [
        math.fsum(values[max(0, end - window) : end]) / min(window, end)
        for end in range(1, len(values) + 1)
    ]


def thin_out(points: Sequence[Point], max_points: int = MAX_POINTS) -> tuple[Point, ...]:
    """Reduce the points to `max_points` (at least 4): the first, the last, and the lowest and highest of each interval between."""
    if len(points) <= max_points:
        return tuple(points)
    stretches = (max_points - 2) // 2
    edges = [1 + round(i * (len(points) - 2) / stretches) for i in range(stretches + 1)]
    indices = {0, len(points) - 1}
    for start, end in pairwise(edges):
        stretch = range(start, end)
        indices.add(min(stretch, key=lambda i: points[i][1]))
        indices.add(max(stretch, key=lambda i: points[i][1]))
    return tuple(points[i] for i in sorted(indices))


def sparkline(values: Sequence[float], width: int | None = None) -> str:
    """Draw values as a row of small bars; more than `width` of them are averaged into `width` bars."""
    finite = [value for value in values if math.isfinite(value)]
    if width is not None and len(finite) > width:
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if high == low:
        return SPARKS[3] * len(finite)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / (high - low) * top)] for value in finite)


def terminal_curve(
    series: Sequence[Series],
    width: int = 72,
    height: int = 14,
    title: str = "",
    x_label: str = "step",
    colour: bool = False,
) -> str:
    """A curve of `width` × about `height` characters, axes included. `colour` adds ANSI colours."""
    finite_series = [Series(curve.name, _finite(curve.points), curve.style) for curve in series]
    if not any(curve.points for curve in finite_series):
        return f"{one_line(title)}: no values yet" if title else "no values yet"
    frame = _Frame.around(finite_series, y_ticks=max(2, height // 3))
    labels = [_tick_label(tick, frame.y_step) for tick in frame.y_ticks]
    margin = max(len(label) for label in labels)
    canvas = _Canvas(max(8, width - margin - 2), max(3, height), frame)
    for index, curve in enumerate(finite_series):
        canvas.draw(curve, index)
    rows = {canvas.row_of(tick): label for tick, label in zip(frame.y_ticks, labels, strict=True)}
    lines = [
        f"{rows.get(row, ''):>{margin}} {'┤' if row in rows else '│'}{canvas.text(row, colour)}".rstrip()
        for row in range(canvas.rows)
    ]
    lines += _x_axis(canvas, margin, x_label)
    if title:
        legend = "   ".join(
            f"{'⠒⠒' if curve.style == 'line' else '·'} {one_line(curve.name)}"
            for curve in finite_series
        )
        heading = shorten(one_line(title), width)
        room = width - len(heading) - len(legend)
        title_text = f"{_BOLD}{heading}{_PLAIN}" if colour else heading
        lines.insert(0, title_text + " " * room + legend if room >= 3 else title_text)
    return "\n".join(lines)


# Scales

LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class _Frame:
    """The range of values that is shown, and its ticks."""

    left: float
    right: float
    bottom: float
    top: float
    x_ticks: tuple[float, ...]
    x_step: float
    y_ticks: tuple[float, ...]
    y_step: float

    @classmethod
    def around(cls, series: Iterable[Series], y_ticks: int, x_ticks: int = 6) -> _Frame:
        points = [point for curve in series for point in curve.points]
        left, right = _padded_range([x for x, _ in points], at_least=1.0)
        low, high = _padded_range([y for _, y in points], at_least=1e-9)
        y_step = _nice_step(high - low, y_ticks)
        x_step = max(1.0, _nice_step(right - left, x_ticks))
        bottom, top = math.floor(low / y_step) * y_step, math.ceil(high / y_step) * y_step
        return cls(
            left,
            right,
            bottom,
            top,
            _ticks(left, right, x_step),
            x_step,
            _ticks(bottom, top, y_step),
            y_step,
        )

    def place(self, x: float, y: float) -> Point:
        """Relative coordinates, from (0, 0) at the bottom left to (1, 1) at the top right."""
        return (x - self.left) / (self.right - self.left), (y - self.bottom) / (
            self.top - self.bottom
        )


def _finite(points: Iterable[Point]) -> tuple[Point, ...]:
    """Keep the points that can be plotted: the difference of any two must be finite, too."""
    return tuple((x, y) for x, y in points if abs(x) < LARGEST and abs(y) < LARGEST)


def _padded_range(values: Sequence[float], at_least: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low >= at_least * max(1.0, abs(high)):
        return low, high
    half = max(at_least, abs(high) * 0.1, 0.05 if at_least < 1 else 0.5)
    return low - half, high + half


def _nice_step(extent: float, count: int) -> float:
    """The step, 1, 2 or 5 × a power of ten, that divides `extent` into about `count` parts."""
    rough = extent / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1.0, 2.0, 5.0, 10.0) if power * nice >= rough * 0.999)


def _ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def _tick_label(value: float, step: float) -> str:
    """Write a number with as many digits as the step between ticks needs."""
    if not 1e-4 <= abs(step) < 1e6:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value + 0.0:.{digits}f}"


# The terminal

_COLOURS = (36, 33, 35, 32, 34)
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class _Canvas:
    """Character cells; each has 2 × 4 braille dots for lines, or one faint point."""

    def __init__(self, columns: int, rows: int, frame: _Frame) -> None:
        self.columns = columns
        self.rows = rows
        self.frame = frame
        self._dots = [[0] * columns for _ in range(rows)]
        self._points = [[False] * columns for _ in range(rows)]
        self._owner = [[0] * columns for _ in range(rows)]

    def draw(self, series: Series, index: int) -> None:
        if series.style != "line":
            for x, y in series.points:
                column, row = self._cell(x, y)
                self._points[row][column] = True
                self._owner[row][column] = index
            return
        dots = [self._dot(x, y) for x, y in series.points]
        for start, end in zip(dots, dots[1:] or dots, strict=False):
            (x0, y0), (x1, y1) = start, end
            length = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(length + 1):  # the dots between the two
                column, row = round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length)
                self._dots[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
                self._owner[row // 4][column // 2] = index

    def row_of(self, y: float) -> int:
        return self._cell(self.frame.left, y)[1]

    def column_of(self, x: float) -> int:
        return self._cell(x, self.frame.bottom)[0]

    def text(self, row: int, colour: bool) -> str:
        characters: list[str] = []
        for column in range(self.columns):
            if dots := self._dots[row][column]:
                paint = _COLOURS[self._owner[row][column] % len(_COLOURS)]
                braille = chr(0x2800 + dots)
                characters.append(f"\x1b[{paint}m{braille}{_PLAIN}" if colour else braille)
            elif self._points[row][column]:
                characters.append(f"{_DIM}·{_PLAIN}" if colour else "·")
            else:
                characters.append(" ")
        return "".join(characters)

    def _cell(self, x: float, y: float) -> tuple[int, int]:
        column, row = self._dot(x, y)
        return column // 2, row // 4

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        across, up = self.frame.place(x, y)
        return round(across * (2 * self.columns - 1)), round((1 - up) * (4 * self.rows - 1))


def _x_axis(canvas: _Canvas, margin: int, label: str) -> list[str]:
    frame = canvas.frame
    axis = ["─"] * canvas.columns
    label_row = [" "] * (canvas.columns + margin + 2)
    next_free = 0
    for tick in frame.x_ticks:
        column, text = canvas.column_of(tick), _tick_label(tick, frame.x_step)
        start = min(max(column + margin + 2 - len(text) // 2, 0), len(label_row) - len(text))
        if start < next_free:
            continue
        axis[column] = "┬"
        label_row[start : start + len(text)] = text
        next_free = start + len(text) + 1
    name = one_line(label)
    numbers = "".join(label_row).rstrip()
    if len(numbers) + 2 + len(name) > len(label_row):
        numbers = f"{numbers}\n{name:>{len(label_row)}}"
    else:
        numbers += f"{name:>{len(label_row) - len(numbers)}}"
    return [f"{'':>{margin}} └{''.join(axis)}", *numbers.split("\n")]


# SVG

_STYLE = """
    .back { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de }
    .line { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke-linecap: round }
    .c0 { stroke: #0969da; fill: #0969da } .c1 { stroke: #bc4c00; fill: #bc4c00 }
    .c2 { stroke: #8250df; fill: #8250df } .c3 { stroke: #1a7f37; fill: #1a7f37 }
    .line.c0, .line.c1, .line.c2, .line.c3 { fill: none }
    .line.dashed { stroke-dasharray: 6 6; stroke-linecap: butt }
    .dots { stroke: none; opacity: .35 } .band { stroke: none; opacity: .15 }
    text { font: 13px ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif }
    .title { font-size: 16px; font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #8d96a0 } .grid { stroke: #30363d }
      .c0 { stroke: #4493f8; fill: #4493f8 } .c1 { stroke: #f0883e; fill: #f0883e }
      .c2 { stroke: #ab7df8; fill: #ab7df8 } .c3 { stroke: #3fb950; fill: #3fb950 }
    }
"""
COLOURS = 4
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 48


def svg_curve(
    series: Sequence[Series],
    title: str = "",
    x_label: str = "step",
    width: int = 720,
    height: int = 360,
) -> str:
    """A self-contained SVG image: no scripts, no fonts to load, light and dark mode. Many points are thinned."""
    curves: list[Series] = []
    for curve in series:
        finite = _finite(curve.points)
        points = finite if curve.style == "band" else thin_out(finite)
        if points:
            curves.append(Series(curve.name, points, curve.style))
    body: list[str] = []
    legend, offset = _legend(curves, width, title)
    if curves:
        frame = _Frame.around(curves, y_ticks=5, x_ticks=8)
        for tick in frame.y_ticks:
            _, y = _pixel(frame, frame.left, tick, width, height)
            body.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{width - _RIGHT}"/>')
            body.append(
                _svg_text(_LEFT - 8, y + 4, _tick_label(tick, frame.y_step), "faint", "end")
            )
        for tick in frame.x_ticks:
            x, y = _pixel(frame, tick, frame.bottom, width, height)
            body.append(_svg_text(x, y + 20, _tick_label(tick, frame.x_step), "faint", "middle"))
        body += [
            _svg_series(curve, i, curves, frame, width, height) for i, curve in enumerate(curves)
        ]
    else:
        body.append(_svg_text(width / 2, height / 2, "no values yet", "faint", "middle"))
    body.append(_svg_text(width - _RIGHT, height - 12, x_label, "faint", "end"))
    if offset:
        body = [f'<g transform="translate(0 {offset})">', *body, "</g>"]
        height += offset
    head = [
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        _svg_text(_LEFT, 28, title, "ink title"),
    ]
    inner = "\n  ".join([*head, *body, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{_escape_xml(title)}">\n'
        f"  <title>{_escape_xml(title)}</title>\n  <style>{_STYLE}  </style>\n  {inner}\n</svg>\n"
    )


def _svg_series(
    series: Series, index: int, curves: Sequence[Series], frame: _Frame, width: int, height: int
) -> str:
    pixels = [_pixel(frame, x, y, width, height) for x, y in series.points]
    colour = f"c{_colour(index, curves)}"
    if series.style == "points":
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in pixels)
        return f'<g class="dots {colour}">{dots}</g>'
    if series.style == "band":
        # Along the highest point at each x, and back along the lowest (SVG's y axis points down).
        heights: dict[float, list[float]] = {}
        for x, y in pixels:
            heights.setdefault(x, []).append(y)
        lowest = [(x, min(ys)) for x, ys in heights.items()]
        highest = [(x, max(ys)) for x, ys in heights.items()]
        return f'<path class="band {colour}" d="{_svg_path([*lowest, *reversed(highest)])}Z"/>'
    return f'<path class="{_line_classes(index, curves)}" d="{_svg_path(pixels)}"/>'


def _svg_path(points: Sequence[Point]) -> str:
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _colour(index: int, curves: Sequence[Series]) -> int:
    """Points or a band and the line after them share a colour."""
    return len(_line_curves(curves[:index])) % COLOURS


def _line_classes(index: int, curves: Sequence[Series]) -> str:
    """CSS classes of a line. It is dashed if an earlier line has the same points, which then show in the gaps, or if colours repeat."""
    earlier = _line_curves(curves[:index])
    lies_on = any(line.points == curves[index].points for line in earlier)
    dashed = " dashed" if lies_on or len(earlier) >= COLOURS else ""
    return f"line c{_colour(index, curves)}{dashed}"


def _line_curves(curves: Sequence[Series]) -> list[Series]:
    return [curve for curve in curves if curve.style == "line"]


_SIGN, _TITLE_SIGN, _SWATCH, _LINE = 7.5, 9.5, 44, 18
"""Pixels: width of a letter, width of a letter of the title, width of a colour sample with its gaps, height of a legend row."""


def _legend(curves: Sequence[Series], width: int, title: str) -> tuple[list[str], int]:
    """The legend, and by how many pixels the plot moves down for it.

    The names are to the right of the title, or below it if they would overlap, in as many rows as needed.
    """
    rows: list[list[tuple[int, str]]] = [[]]
    for index, curve in enumerate(curves):
        if curve.style == "band":  # the line after it names both
            continue
        entry = (index, shorten(one_line(curve.name), 24))
        if rows[-1] and _legend_width([*rows[-1], entry]) > width - _RIGHT:
            rows.append([])
        rows[-1].append(entry)
    overlaps = width - _RIGHT - _legend_width(rows[0]) < _LEFT + _TITLE_SIGN * len(title)
    first = 46 if overlaps or len(rows) > 1 else 28
    shapes: list[str] = []
    for number, row in enumerate(rows):
        x, y = float(width - _RIGHT), first + number * _LINE
        for index, name in reversed(row):
            colour = f"c{_colour(index, curves)}"
            shapes.append(_svg_text(x, y, name, "faint", "end"))
            x -= _SIGN * len(name) + 8
            if curves[index].style == "points":
                dot = f'<circle class="dots {colour}" cx="{x - 4:.1f}" cy="{y - 4}" r="3"/>'
                shapes.append(dot)
            else:
                line = _line_classes(index, curves)
                shapes.append(f'<path class="{line}" d="M{x - 20:.1f} {y - 4}H{x:.1f}"/>')
            x -= _SWATCH - 8
    return shapes, (len(rows) - 1) * _LINE


def _legend_width(entries: Sequence[tuple[int, str]]) -> float:
    return sum(_SIGN * len(name) + _SWATCH for _, name in entries)


def _pixel(frame: _Frame, x: float, y: float, width: int, height: int) -> Point:
    across, up = frame.place(x, y)
    return (
        _LEFT + across * (width - _LEFT - _RIGHT),
        _TOP + (1 - up) * (height - _TOP - _BOTTOM),
    )


def _svg_text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape_xml(text)}</text>'


def _escape_xml(text: str) -> str:
    return escape(one_line(text))
