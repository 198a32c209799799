"""Plots are well-formed, and draw every value in the right place or leave it out."""

from xml.etree import ElementTree

import pytest

from tokenbus.replay.svg import Axis, Series, bar_chart, line_chart

SVG = "{http://www.w3.org/2000/svg}"
LINEAR, LOG = Axis("v"), Axis("v", is_log=True)


def drawn(svg: str, tag: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(svg).iter(SVG + tag)]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(SVG + "text")]


def corners(svg: str) -> tuple[float, float, float, float]:
    """Returns the edges of the plot: left, right, top, bottom."""
    rules = drawn(svg, "line")
    xs, ys = ([float(rule[name]) for rule in rules] for name in ("x1", "y1"))
    return min(xs), max(float(rule["x2"]) for rule in rules), min(ys), max(ys)


def test_a_linear_axis_starts_at_0_and_ends_at_a_round_number() -> None:
    svg = line_chart("t", [Series("a", [(0, 0), (4, 40)])], LINEAR, LINEAR)
    left, right, top, bottom = corners(svg)
    first, last = [(float(dot["cx"]), float(dot["cy"])) for dot in drawn(svg, "circle")]
    assert (first, last) == ((left, bottom), (right, top))
    assert {"0", "40"} <= set(texts(svg))


def test_a_logarithmic_axis_gives_every_decade_the_same_room() -> None:
    svg = line_chart("t", [Series("a", [(1, 1), (10, 10), (100, 100)])], LOG, LOG)
    xs = [float(dot["cx"]) for dot in drawn(svg, "circle")]
    ys = [float(dot["cy"]) for dot in drawn(svg, "circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


@pytest.mark.parametrize(
    ("low", "high", "first", "last"),
    [
        (1, 1, "1", "2"),
        (3, 7, "2", "10"),
        (0.015, 29, "0.01", "100"),
        (1, 1e6, "1", "1,000,000"),
        (50, 51, "50", "100"),
    ],
)
def test_a_logarithmic_axis_ends_at_round_numbers(low: float, high: float, first: str, last: str) -> None:
    svg = line_chart("t", [Series("a", [(low, 1), (high, 1)])], LOG, LINEAR)
    left, right, _, bottom = corners(svg)
    below = [text for text in ElementTree.fromstring(svg).iter(SVG + "text") if float(text.get("y", 0)) == bottom + 16]
    assert (below[0].text, below[0].get("x")) == (first, f"{left:.1f}")
    assert (below[-1].text, below[-1].get("x")) == (last, f"{right:.1f}")
    xs = [float(dot["cx"]) for dot in drawn(svg, "circle")]
    assert left <= min(xs) <= max(xs) <= right


def test_values_that_a_logarithmic_axis_cannot_show_are_left_out() -> None:
    svg = line_chart("t", [Series("a", [(1, 0), (2, 5), (0, 5)])], LOG, LOG)
    assert len(drawn(svg, "circle")) == 1


@pytest.mark.parametrize("points", [[], [(1.0, 0.0)]])
def test_an_empty_plot_says_that_nothing_was_measured(points: list[tuple[float, float]]) -> None:
    assert "nothing was measured" in line_chart("t", [Series("a", points)], LINEAR, LOG)
    assert "nothing was measured" in bar_chart("t", ["g"], [Series("a", points)], LOG)


def test_the_bars_of_a_group_are_side_by_side_and_as_high_as_their_values() -> None:
    svg = bar_chart("t", ["g", "h"], [Series("a", [(0, 10), (1, 5)]), Series("b", [(0, 0), (1, 10)])], LINEAR)
    _, _, top, bottom = corners(svg)
    bars = [bar for bar in drawn(svg, "rect") if bar["width"] != "10"]
    assert [float(bar["height"]) for bar in bars] == [bottom - top, (bottom - top) / 2, bottom - top]
    assert all(float(bar["y"]) + float(bar["height"]) == pytest.approx(bottom) for bar in bars)
    assert float(bars[1]["x"]) + float(bars[1]["width"]) == pytest.approx(float(bars[2]["x"]), abs=0.2)


def test_names_are_escaped() -> None:
    svg = line_chart("<t> & 'u'", [Series('"a" < b', [(1, 1)])], Axis("<x>"), Axis("&y"))
    assert {"<t> & 'u'", '"a" < b', "<x>", "&y"} <= set(texts(svg))


def test_many_points_are_a_line_without_dots() -> None:
    svg = line_chart("t", [Series("a", [(x, x) for x in range(41)])], LINEAR, LINEAR)
    assert drawn(svg, "circle") == []
    assert len(drawn(svg, "polyline")[0]["points"].split()) == 41
