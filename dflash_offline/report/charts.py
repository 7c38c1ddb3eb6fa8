"""Small SVG charts for the report: lines over steps, bars over positions and layers.

The page's CSS variables colour them. Every chart carries its points in ``data-chart``, from which a few lines of script
in the page show values under the pointer; without the script the chart is whole.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 20, 36
INKS = 6
MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: In the legend and the readout.
        points: (x, y); points that are not finite are left out.
        ink: Which colour; default: the place in the chart.
        faint: Drawn thin and pale, as the background of another line.
        dots: Mark every point.
    """

    name: str
    points: Sequence[tuple[float, float]]
    ink: int | None = None
    faint: bool = False
    dots: bool = False


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers covering [low, high], about ``count`` of them (steps of 1, 2 or 5 times a power of ten)."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about ``most`` of the points, the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept = {0, len(points) - 1}
    for first in range(0, len(points), size):
        places = range(first, min(first + size, len(points)))
        kept |= {min(places, key=lambda i: points[i][1]), max(places, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def short_number(value: float) -> str:
    """A number for an axis: ``12.5k``, ``3.2M``, ``0.04``."""
    if value == 0:
        return "0"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _frame(title: str, x_label: str, y_label: str, y_ticks: list[float], place_y, marks: list[tuple[float, str]], data):
    attribute = escape(json.dumps(data, separators=(",", ":")))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" data-chart="{attribute}">']
    for tick in y_ticks:
        y = place_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short_number(tick)}</text>')
    for x, text in marks:
        label_y = HEIGHT - BOTTOM + 15
        parts.append(f'<text class="tick" x="{x:.1f}" y="{label_y}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    if y_label:
        parts.append(f'<text class="tick" x="4" y="11">{escape(y_label)}</text>')
    return parts


def _legend(names: list[tuple[str, int, bool]]) -> str:
    keys = "".join(
        f'<span class="key s{ink % INKS}{" faint" if faint else ""}">{escape(name)}</span>'
        for name, ink, faint in names
    )
    return f'<div class="legend">{keys}</div>'


def line_chart(
    title: str, x_label: str, series: Sequence[Series], zero: bool = False, y_label: str = "", cut: bool = False
) -> Markup | None:
    """An SVG line chart, or None where no series has a finite point.

    Args:
        title: Read by screen readers.
        x_label: Under the axis.
        series: The lines; at most six colours are told apart.
        zero: Whether the y axis starts at 0.
        y_label: Unit, above the axis.
        cut: Let the first twentieth of the curves run out of the top where it would flatten all the rest, and say so.
    """
    kept = []
    for place, one in enumerate(series):
        points = [(x, y) for x, y in one.points if y is not None and math.isfinite(y)]
        if points:
            kept.append((one, place if one.ink is None else one.ink, thinned(points)))
    if not kept:
        return None
    xs = [x for _, _, points in kept for x, _ in points]
    ys = [y for _, _, points in kept for _, y in points] + ([0.0] if zero else [])
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    later = [y for _, _, points in kept for x, y in points if x > x_low + 0.05 * (x_high - x_low)]
    if cut and later and y_high > y_low + 2 * (max(later) - y_low) > y_low:
        y_label = f"{y_label}{', ' if y_label else ''}starts at {short_number(y_high)}, above the chart"
        y_high = y_low + 1.2 * (max(later) - y_low)
    if y_low == y_high:
        spread = abs(y_low) * 0.05 or 1.0
        y_low, y_high = y_low - spread, y_high + spread
    margin = (y_high - y_low) * 0.04
    y_high += margin
    y_low -= 0 if zero and y_low == 0 else margin

    def place_x(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    data = {
        "x": [x_low, x_high],
        "label": x_label,
        "series": [{"name": one.name, "points": [[x, float(f"{y:.6g}")] for x, y in p]} for one, _, p in kept],
    }
    marks = [(place_x(tick), short_number(tick)) for tick in nice_ticks(x_low, x_high, 5)]
    parts = _frame(title, x_label, y_label, nice_ticks(y_low, y_high), place_y, marks, data)
    for one, ink, points in kept:
        style = f"s{ink % INKS}{' faint' if one.faint else ''}"
        if len(points) > 1:
            path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in _inside(points, y_high))
            parts.append(f'<polyline class="line {style}" points="{path}"/>')
        if one.dots or len(points) == 1:
            parts.extend(
                f'<circle class="dot {style}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="2.5"/>'
                for x, y in points
                if y <= y_high
            )
    parts.append("</svg>")
    legend = _legend([(one.name, ink, one.faint) for one, ink, _ in kept]) if len(series) > 1 else ""
    return Markup("".join(parts) + legend)


def _inside(points: Sequence[tuple[float, float]], high: float) -> list[tuple[float, float]]:
    """The points up to ``high``, and where the line crosses that height."""
    inside = [point for point in points if point[1] <= high][:1]
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        if min(y, to_y) <= high < max(y, to_y):
            inside.append((x + (high - y) / (to_y - y) * (to_x - x), high))
        if to_y <= high:
            inside.append((to_x, to_y))
    return sorted(set(inside))


def bar_chart(title: str, x_label: str, bars: Sequence[tuple[str, float]], y_label: str = "") -> Markup | None:
    """An SVG bar chart from zero, one bar a (label, value), or None where there is nothing to draw."""
    bars = [(label, value) for label, value in bars if value is not None and math.isfinite(value)]
    return grouped_bars(title, x_label, [label for label, _ in bars], [("", [value for _, value in bars])], y_label)


def grouped_bars(
    title: str, x_label: str, labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], y_label: str = ""
) -> Markup | None:
    """Bars from zero side by side at each label, one colour a (name, values); None where there is nothing to draw."""
    if not labels or not groups:
        return None
    high = max(value for _, values in groups for value in values) or 1.0
    step = (WIDTH - LEFT - RIGHT) / len(labels)
    width = step * 0.8 / len(groups)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - y / (high * 1.04) * (HEIGHT - TOP - BOTTOM)

    every = math.ceil(len(labels) / 8)
    marks = [(LEFT + (i + 0.5) * step, label) for i, label in enumerate(labels) if i % every == 0]
    parts = _frame(title, x_label, y_label, nice_ticks(0, high), place_y, marks, {})
    for place, (name, values) in enumerate(groups):
        for i, (label, value) in enumerate(zip(labels, values, strict=True)):
            y, x = place_y(value), LEFT + i * step + step * 0.1 + place * width
            said = f"{x_label} {label}{f', {name}' if name else ''}: {value:.4g}"
            parts.append(
                f'<rect class="bar s{place % INKS}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}"><title>{escape(said)}</title></rect>'
            )
    parts.append("</svg>")
    legend = _legend([(name, i, False) for i, (name, _) in enumerate(groups)]) if len(groups) > 1 else ""
    return Markup("".join(parts) + legend)
