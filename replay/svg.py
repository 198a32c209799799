"""Plots as self-contained SVG text: lines and grouped bars, on linear or logarithmic axes; and HTML pages of them."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 640, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 620, 34, 260
_LEGEND_COLUMNS = 4
_COLOURS = ("#3b6fb6", "#d1603d", "#3f9b6c", "#8c5fb3", "#b8892b", "#4aa3b5", "#c2557f", "#7a7a7a")
"""Colours that most people can tell apart, including on dark pages."""
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 1340px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: right }
td:first-child { text-align: left }
pre { white-space: pre-wrap } .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)) }
"""


class Axis(NamedTuple):
    """An axis. A logarithmic one omits values that are not above 0; a linear one begins at 0."""

    label: str
    is_log: bool = False


class Series(NamedTuple):
    """One line of a plot, or one bar in each group (`x` is then the number of the group)."""

    name: str
    points: Sequence[tuple[float, float]]


class _Scale(NamedTuple):
    """Maps values to pixels, and lists the values that label the axis."""

    is_log: bool
    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.is_log else x for x in (self.low, self.high, value))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Draws a line through the points of each series, in the given order."""
    kept = [Series(name, [point for point in points if _shows(point, x, y)]) for name, points in series]
    points = [point for one in kept for point in one.points]
    if not points:
        return _svg(title, ['<text x="320" y="150" text-anchor="middle">nothing was measured</text>'])
    across = _scale([point[0] for point in points], x.is_log, _LEFT, _RIGHT)
    up = _scale([point[1] for point in points], y.is_log, _BOTTOM, _TOP)
    drawn = [part for number, one in enumerate(kept) for part in _line(one, across, up, _colour(number))]
    return _svg(title, [*_across(across, x.label), *_up(up, y.label), *drawn, *_legend(series)])


def bar_chart(title: str, groups: Sequence[str], series: Sequence[Series], y: Axis) -> str:
    """Draws one bar of each series for each group."""
    heights = [point[1] for one in series for point in one.points if point[1] > 0 or not y.is_log]
    if not heights:
        return _svg(title, ['<text x="320" y="150" text-anchor="middle">nothing was measured</text>'])
    up = _scale(heights, y.is_log, _BOTTOM, _TOP)
    room = (_RIGHT - _LEFT) / len(groups)
    wide = 0.8 * room / len(series)
    drawn = []
    for number, one in enumerate(series):
        for group, height in one.points:
            if height > 0:
                left = _LEFT + room * (group + 0.1) + wide * number
                name = f"{groups[int(group)]}, {one.name}: {_text(height)}"
                drawn.append(_bar(left, up.at(height), wide, _colour(number), name))
    names = [_label(_LEFT + room * (place + 0.5), _BOTTOM + 16, name, "middle") for place, name in enumerate(groups)]
    return _svg(title, [*_up(up, y.label), *drawn, *names, *_legend(series)])


def document(title: str, parts: Iterable[str]) -> str:
    """Returns a page with that title around parts that are already HTML."""
    name = escape(title)
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return "\n".join([head, f"<h1>{name}</h1>", *parts, "</html>\n"])


def _shows(point: tuple[float, float], x: Axis, y: Axis) -> bool:
    return (point[0] > 0 or not x.is_log) and (point[1] > 0 or not y.is_log)


def _scale(values: Sequence[float], is_log: bool, begin: float, end: float) -> _Scale:
    ticks = _decades(min(values), max(values)) if is_log else _steps(max(values))
    return _Scale(is_log, ticks[0], ticks[-1], begin, end, ticks)


def _steps(high: float) -> tuple[float, ...]:
    """Returns round steps, 4 to 10 of them, from 0 to at least `high`."""
    if high <= 0:
        return (0.0, 1.0)
    size = 10.0 ** math.floor(math.log10(high))
    step = next(size * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if high / (size * part) <= 10)
    return tuple(round(step * number, 12) for number in range(math.ceil(high / step - 1e-9) + 1))


def _decades(low: float, high: float) -> tuple[float, ...]:
    """Returns powers of ten from at most `low` to at least `high`, with their multiples by 2 and 5 if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
    ticks = [part * 10.0**power for power in range(first, last + 1) for part in parts]
    begin = max((tick for tick in ticks if tick <= low), default=ticks[0])
    end = min(tick for tick in (*ticks, 10.0 ** (last + 1)) if tick >= high and tick > begin)
    return (*(tick for tick in ticks if begin <= tick < end), end)


def _line(one: Series, across: _Scale, up: _Scale, colour: str) -> list[str]:
    places = [(across.at(x), up.at(y)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    if len(places) <= 40:  # more dots would hide the line
        for (x, y), value in zip(places, one.points, strict=True):
            name = escape(f"{one.name}: {_text(value[1])} at {_text(value[0])}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{name}</title></circle>')
    return parts


def _bar(left: float, top: float, wide: float, colour: str, name: str) -> str:
    size = f'width="{wide:.1f}" height="{_BOTTOM - top:.1f}"'
    return f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}"><title>{escape(name)}</title></rect>'


def _across(scale: _Scale, label: str) -> list[str]:
    parts = [_label((_LEFT + _RIGHT) / 2, _BOTTOM + 34, label, "middle")]
    for tick in scale.ticks:
        parts.append(_rule(scale.at(tick), _TOP, scale.at(tick), _BOTTOM))
        parts.append(_label(scale.at(tick), _BOTTOM + 16, _text(tick), "middle"))
    return parts


def _up(scale: _Scale, label: str) -> list[str]:
    parts = [_label(_LEFT, _TOP - 8, label, "start")]
    for tick in scale.ticks:
        parts.append(_rule(_LEFT, scale.at(tick), _RIGHT, scale.at(tick)))
        parts.append(_label(_LEFT - 6, scale.at(tick) + 4, _text(tick), "end"))
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    for number, one in enumerate(series):
        x = _LEFT + number % _LEGEND_COLUMNS * 142
        y = _BOTTOM + 52 + number // _LEGEND_COLUMNS * 18
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_colour(number)}"/>')
        parts.append(_label(x + 15, y, one.name, "start"))
    return parts


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
    name = f'<title>{escape(title)}</title><text x="{_WIDTH / 2:g}" y="14" text-anchor="middle">{escape(title)}</text>'
    return "\n".join([head + style, name, *parts, "</svg>"])


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="0.15"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
