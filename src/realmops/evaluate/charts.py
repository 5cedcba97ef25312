"""Line charts as SVG text: they open without a network and follow the reader's light or dark setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from realmops.journal import Series

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 64, 44
_DOTS_UP_TO = 60
_LINES_UP_TO = 600

STYLE = """
.chart { --ink: #1c2430; --soft: #5c6675; --grid: #e3e7ec; --paper: #ffffff; --mark: #a4adb8;
  --s0: #2166c4; --s1: #c2500a; --s2: #1d7f5a; --s3: #8a4bb8; font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .chart { --ink: #e8ebef; --soft: #a3adba; --grid: #313944;
  --paper: #1b2027; --mark: #6d7885; --s0: #6ba8f5; --s1: #f0965c; --s2: #5cc19b; --s3: #c594ea; } }
.chart .paper { fill: var(--paper); }
.chart text { fill: var(--soft); font-size: 12px; }
.chart .title { fill: var(--ink); font-size: 15px; font-weight: 600; }
.chart .number { font-variant-numeric: tabular-nums; }
.chart .grid { stroke: var(--grid); }
.chart .refresh { stroke: var(--mark); stroke-dasharray: 2 3; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.chart .raw { stroke-width: 1; opacity: 0.3; }
"""


@dataclass(frozen=True)
class _Frame:
    """Data ranges and where they lie in the picture."""

    x_low: float
    x_high: float
    y_ticks: list[float]

    def x(self, step: float) -> float:
        share = (step - self.x_low) / ((self.x_high - self.x_low) or 1)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    refreshes: Sequence[int] = (),
    *,
    smooth: bool = True,
    across: str = "training step",
) -> str:
    """An ``<svg>`` element over training steps, or over what ``across`` names.

    ``refreshes`` are steps marked by dotted vertical lines.

    With ``smooth``, a series of many points is drawn faintly, with its running mean above it.
    """
    steps = [step for line in series for step in line.steps] + list(refreshes)
    values = [value for line in series for value in line.values]
    frame = _Frame(min(steps), max(steps), ticks(min(values), max(values)))
    parts = [
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_axes(frame, unit, across),
        *(_refresh(frame, step) for step in refreshes),
        *(part for colour, line in enumerate(series) for part in _line(frame, line, colour % 4, smooth, across)),
        *_legend([line.name for line in series], bool(refreshes)),
    ]
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">\n' + "\n".join(parts) + "\n</svg>"
    )


def standalone(svg: str) -> str:
    """The same chart with its style inside, for a file of its own."""
    head, body = svg.split(">", 1)
    return f"{head}><style>{STYLE}</style>{body}\n"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten apart) that enclose [low, high]."""
    if low == high:
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [round(index * gap, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """A figure for people: four significant digits, whole numbers whole."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and its neighbours, at most ``window`` of them, fewer at the ends."""
    half = window // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        first, last = max(0, index - half), min(len(values), index + half + 1)
        means.append((sums[last] - sums[first]) / (last - first))
    return means


def _axes(frame: _Frame, unit: str, across: str) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="{HEIGHT - 8}">{escape(across)}</text>']
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="24" text-anchor="end">{escape(unit)}</text>')
    for value in frame.y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="number" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for step in ticks(frame.x_low, frame.x_high):
        if frame.x_low <= step <= frame.x_high:
            parts.append(
                f'<text class="number" x="{frame.x(step):.1f}" y="{HEIGHT - _BOTTOM + 18}" '
                f'text-anchor="middle">{number(step)}</text>'
            )
    return parts


def _refresh(frame: _Frame, step: int) -> str:
    x = f"{frame.x(step):.1f}"
    return (
        f'<line class="refresh" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
        f"<title>new index at step {step}</title></line>"
    )


def _line(frame: _Frame, line: Series, colour: int, smooth: bool, across: str) -> list[str]:
    stroke = f'style="stroke: var(--s{colour})"'
    if len(line.steps) > _DOTS_UP_TO:
        raw = _points(frame, line.steps, line.values)
        if not smooth:
            return [f'<polyline class="line" {stroke} points="{raw}"/>']
        mean = _points(frame, line.steps, running_mean(line.values, len(line.values) // 25))
        return [
            f'<polyline class="line raw" {stroke} points="{raw}"/>',
            f'<polyline class="line" {stroke} points="{mean}"/>',
        ]
    dots = [
        f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3" style="fill: var(--s{colour})">'
        f"<title>{escape(line.name)}, {escape(across)} {number(step)}: {number(value)}</title></circle>"
        for step, value in zip(line.steps, line.values, strict=True)
    ]
    return [f'<polyline class="line" {stroke} points="{_points(frame, line.steps, line.values)}"/>', *dots]


def _points(frame: _Frame, steps: Sequence[float], values: Sequence[float]) -> str:
    every = max(1, len(steps) // _LINES_UP_TO)
    pairs = list(zip(steps, values, strict=True))
    return " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in pairs[::every])


def _legend(names: Sequence[str], refreshes: bool) -> list[str]:
    parts = []
    x = float(_LEFT)
    for colour, name in enumerate(names):
        fill = f"var(--s{colour % 4})"
        parts.append(f'<rect x="{x:.1f}" y="38" width="14" height="4" rx="2" style="fill: {fill}"/>')
        parts.append(f'<text x="{x + 20:.1f}" y="45">{escape(name)}</text>')
        x += 34 + 6.9 * len(name)
    if refreshes:
        x, y = WIDTH - _RIGHT, HEIGHT - 8
        parts.append(f'<line class="refresh" x1="{x - 110}" x2="{x - 110}" y1="{y - 12}" y2="{y + 2}"/>')
        parts.append(f'<text x="{x}" y="{y}" text-anchor="end">new index in use</text>')
    return parts
