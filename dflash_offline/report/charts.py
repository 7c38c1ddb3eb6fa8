"""Small SVG charts for the report: lines over steps, bars over positions. The page's CSS variables colour them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34


@dataclass(frozen=True)
class Series:
    """One line of a chart: its name and points (x, y); points that are not finite are left out."""

    name: str
    points: Sequence[tuple[float, float]]


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


def _number(value: float) -> str:
    if value == 0:
        return "0"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _frame(title: str, x_label: str, y_ticks: list[float], place_y, x_marks: list[tuple[float, str]]) -> list[str]:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y_ticks:
        y = place_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for x, text in x_marks:
        label_y = HEIGHT - BOTTOM + 16
        parts.append(f'<text class="tick" x="{x:.1f}" y="{label_y}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def line_chart(title: str, x_label: str, series: Sequence[Series], zero: bool = False) -> Markup | None:
    """An SVG line chart, or None where no series has a finite point.

    Args:
        title: Read by screen readers.
        x_label: Under the axis.
        series: The lines; at most six colours are told apart.
        zero: Whether the y axis starts at 0.
    """
    kept = [Series(one.name, [(x, y) for x, y in one.points if y is not None and math.isfinite(y)]) for one in series]
    kept = [one for one in kept if one.points]
    if not kept:
        return None
    xs = [x for one in kept for x, _ in one.points]
    ys = [y for one in kept for _, y in one.points] + ([0.0] if zero else [])
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
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

    marks = [(place_x(tick), _number(tick)) for tick in nice_ticks(x_low, x_high, 6)]
    parts = _frame(title, x_label, nice_ticks(y_low, y_high), place_y, marks)
    for number, one in enumerate(kept):
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in one.points)
        if len(one.points) == 1:
            x, y = one.points[0]
            parts.append(f'<circle class="dot s{number % 6}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="line s{number % 6}" points="{path}"/>')
    parts.append("</svg>")
    legend = "".join(f'<span class="key s{i % 6}">{escape(one.name)}</span>' for i, one in enumerate(kept))
    return Markup("".join(parts) + f'<div class="legend">{legend}</div>')


def bar_chart(title: str, x_label: str, bars: Sequence[tuple[str, float]]) -> Markup | None:
    """An SVG bar chart from zero, one bar a (label, value), or None where there is nothing to draw."""
    bars = [(label, value) for label, value in bars if value is not None and math.isfinite(value)]
    if not bars:
        return None
    high = max(value for _, value in bars) or 1.0
    step = (WIDTH - LEFT - RIGHT) / len(bars)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - y / (high * 1.04) * (HEIGHT - TOP - BOTTOM)

    every = math.ceil(len(bars) / 16)
    marks = [(LEFT + (i + 0.5) * step, label) for i, (label, _) in enumerate(bars) if i % every == 0]
    parts = _frame(title, x_label, nice_ticks(0, high), place_y, marks)
    for i, (label, value) in enumerate(bars):
        y = place_y(value)
        parts.append(
            f'<rect class="bar" x="{LEFT + i * step + step * 0.12:.1f}" y="{y:.1f}" width="{step * 0.76:.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}"><title>{escape(label)}: {value:.4g}</title></rect>'
        )
    parts.append("</svg>")
    return Markup("".join(parts))
