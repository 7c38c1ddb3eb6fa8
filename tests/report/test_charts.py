"""Charts of the report: round ticks, well-formed SVG, nothing drawn from nothing."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.report.charts import Series, bar_chart, grouped_bars, line_chart, nice_ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_lie_inside_the_range_and_are_few(low, span, count):
    ticks = nice_ticks(low, low + span, count)
    slack = span * 1e-6 + 1e-9 + abs(low) * 1e-15  # what a double can tell apart
    assert len(ticks) <= 2 * count + 1
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert ticks == sorted(ticks)


def test_ticks_are_round_numbers():
    assert nice_ticks(0, 10, 6) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.13, 0.41, 4) == [0.2, 0.3, 0.4]


def points_of(chart):
    root = ET.fromstring("<div>" + str(chart) + "</div>")
    line = root.find(".//polyline")
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def test_a_line_goes_right_and_up_with_its_values():
    points = points_of(line_chart("t", "step", [Series("a", [(0, 1.0), (10, 2.0), (20, 4.0)])]))
    assert points[0][0] < points[1][0] < points[2][0]
    assert points[0][1] > points[1][1] > points[2][1], "larger values are higher on the page"
    assert points[1][1] - points[2][1] == pytest.approx(2 * (points[0][1] - points[1][1]), abs=0.2)


def test_values_that_are_not_finite_are_left_out_and_nothing_gives_no_chart():
    assert len(points_of(line_chart("t", "x", [Series("a", [(0, 1.0), (1, float("nan")), (2, 3.0)])]))) == 2
    assert line_chart("t", "x", [Series("a", [(0, float("inf"))])]) is None
    assert bar_chart("t", "x", []) is None


def test_names_are_escaped():
    chart = str(line_chart("<t>", "x", [Series("<script>", [(0, 1.0), (1, 2.0)])]))
    assert "<script>" not in chart and "&lt;script&gt;" in chart


def test_bars_are_as_high_as_their_values():
    root = ET.fromstring("<div>" + str(bar_chart("t", "x", [("a", 1.0), ("b", 4.0)])) + "</div>")
    first, second = (float(bar.get("height")) for bar in root.iter("rect"))
    assert second == pytest.approx(4 * first, abs=0.3)


def test_a_first_value_far_above_the_rest_runs_out_of_the_chart_and_is_said():
    steep = [(0, 50.0), *((i, 2.0 - i / 100) for i in range(1, 60))]
    plain, cut = (line_chart("t", "x", [Series("a", steep)], cut=one) for one in (False, True))
    assert "starts at 50, above the chart" in str(cut) and "above the chart" not in str(plain)
    heights = [max(y for _, y in points_of(chart)) - min(y for _, y in points_of(chart)[5:]) for chart in (plain, cut)]
    assert heights[1] > 10 * heights[0], "the rest has room now"
    assert all(0 <= y <= 220 for _, y in points_of(cut)), "nothing is drawn outside"
    gentle = [(i, 3.0 - i / 60) for i in range(60)]
    assert "above the chart" not in str(line_chart("t", "x", [Series("a", gentle)], cut=True))


def test_grouped_bars_stand_side_by_side_and_name_their_value():
    chart = str(grouped_bars("t", "layer", ["3", "7"], [("all", [0.5, 1.0]), ("rest", [0.25, 0.75])]))
    bars = list(ET.fromstring("<div>" + chart + "</div>").iter("rect"))
    assert len(bars) == 4 and len({bar.get("x") for bar in bars}) == 4
    assert "layer 7, rest: 0.75" in chart and chart.count('class="key') == 2
    assert grouped_bars("t", "x", [], [("a", [])]) is None
