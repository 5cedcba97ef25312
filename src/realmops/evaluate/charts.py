"""Line charts as inline SVG, self-contained and with a light and a dark colour scheme."""

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from realmops.journal import Series

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 544, 64, 256  # axes, in user units
_MAX_DOTS = 60  # points; series with more are drawn without markers and smoothed
_MAX_POINTS = 600  # per line; longer series are thinned out


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    refreshes: Sequence[int] = (),
    *,
    smooth: bool = True,
    across: str = "training step",
) -> str:
    """Return an ``<svg>`` with marks at ``refreshes``; ``smooth`` draws long series faintly, with a running mean."""
    steps = [step for line in series for step in line.steps] + list(refreshes)
    values = [value for line in series for value in line.values]
    low, high, heights = min(steps), max(steps), ticks(min(values), max(values))
    x, y = _scale(low, high, _LEFT, _RIGHT), _scale(heights[0], heights[-1], _BOTTOM, _TOP)
    parts = [
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        _text(_LEFT, 24, title, "title"),
        _text(_LEFT, HEIGHT - 8, across),
        _text(_RIGHT, 24, unit, anchor="end"),
    ]
    for value in heights:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(_text(_LEFT - 8, f"{y(value) + 4:.1f}", format_number(value), "number", "end"))
    along = [step for step in ticks(low, high) if low <= step <= high]
    parts += [_text(f"{x(step):.1f}", _BOTTOM + 18, format_number(step), "number", "middle") for step in along]
    for step in refreshes:
        line = f'<line class="refresh" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" y2="{_BOTTOM}">'
        parts.append(f"{line}<title>new index at step {step}</title></line>")
    for index, plotted in enumerate(series):
        parts += _line(plotted, f"var(--s{index % 4})", x, y, smooth, across)
    parts += _legend([line.name for line in series], bool(refreshes))
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">\n' + "\n".join(parts) + "\n</svg>"
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers (1, 2 or 5 times a power of ten apart) that enclose [low, high]."""
    if low == high:
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [round(index * gap, 12) for index in range(first, last + 1)]


def format_number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    sums, at = np.cumsum([0.0, *values]), np.arange(len(values))
    first, last = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    means: list[float] = ((sums[last] - sums[first]) / (last - first)).tolist()
    return means


def _scale(low: float, high: float, start: int, end: int) -> Callable[[float], float]:
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def _text(x: int | str, y: int | str, words: str, css_class: str = "", anchor: str = "") -> str:
    before, after = f'class="{css_class}" ' if css_class else "", f' text-anchor="{anchor}"' if anchor else ""
    return f'<text {before}x="{x}" y="{y}"{after}>{escape(words)}</text>'


def _line(
    line: Series, colour: str, x: Callable[[float], float], y: Callable[[float], float], smooth: bool, across: str
) -> list[str]:
    def drawn(values: Sequence[float], kind: str = "line") -> str:
        pairs = list(zip(line.steps, values, strict=True))[:: max(1, len(values) // _MAX_POINTS)]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in pairs)
        return f'<polyline class="{kind}" style="stroke: {colour}" points="{points}"/>'

    if len(line.steps) > _MAX_DOTS:
        mean = running_mean(line.values, len(line.values) // 25)
        return [drawn(line.values, "line raw"), drawn(mean)] if smooth else [drawn(line.values)]
    dots = [
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" style="fill: {colour}">'
        f"<title>{escape(line.name)}, {escape(across)} {format_number(step)}: {format_number(value)}</title></circle>"
        for step, value in zip(line.steps, line.values, strict=True)
    ]
    return [drawn(line.values), *dots]


def _legend(names: Sequence[str], refreshes: bool) -> list[str]:
    parts = []
    x = float(_LEFT)
    for index, name in enumerate(names):
        parts.append(f'<rect x="{x:.1f}" y="38" width="14" height="4" rx="2" style="fill: var(--s{index % 4})"/>')
        parts.append(_text(f"{x + 20:.1f}", 45, name))
        x += 34 + 6.9 * len(name)
    if refreshes:
        parts.append(f'<line class="refresh" x1="{_RIGHT - 110}" x2="{_RIGHT - 110}" y1="280" y2="294"/>')
        parts.append(_text(_RIGHT, HEIGHT - 8, "new index in use", anchor="end"))
    return parts
