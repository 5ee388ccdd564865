"""Plots as inline SVG that fits any width: marks are drawn by the SVG, all text is the page's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hqconv.reports.html import figure, number, text
from hqconv.reports.style import NUM_LEVELS

_WIDTH, _HEIGHT = 1000.0, 100.0
Values = Sequence[float | None]


def _frame(title: str, inside: str, axis: str, below: str, *, label: str = "", kind: str = "") -> str:
    """A plot with its title, the words of its axes, and what stands below."""
    aria = text(label or title)
    return (
        f'<figure class="plot {kind}"><figcaption>{text(title)}</figcaption><div class="area">'
        f'<div class="axis">{axis}</div><div class="marks"><svg role="img" aria-label="{aria}" '
        f'preserveAspectRatio="none" {inside}</svg></div></div><div class="below">{below}</div></figure>'
    )


def _ends(*words: str) -> str:
    return f'<div class="ends">{"".join(f"<span>{text(word)}</span>" for word in words)}</div>'


def ticks(top: float) -> list[float]:
    """Round numbers from 0 on, the last of which is at least `top`: 2 to 6 of them."""
    if not top > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * part for part in (0.2, 0.5, 1, 2) if power * part * 5 >= top)
    return [index * step for index in range(math.ceil(top / step - 1e-9) + 1)]


def lines_plot(title: str, names: Sequence[str], series: Mapping[str, tuple[str, Values]], unit: str) -> str:
    """One line for each series over `names`, from 0 up. series: its words → CSS class and a value for each name.

    A value that is None or no number leaves a gap.
    """
    good = [v for _, values in series.values() for v in values if v is not None and math.isfinite(v)]
    at = ticks(max(good, default=0.0))
    top, count = at[-1], len(names)

    def x(index: int) -> float:
        return _WIDTH * (index + 0.5) / count

    grid = "".join(f'<path class="grid" d="M0 {_y(one, top)}H{_WIDTH:g}"/>' for one in at)
    drawn, legend = [], []
    for words, (kind, values) in series.items():
        path, is_open = [], False
        for index, value in enumerate(values):
            if value is None or not math.isfinite(value):
                is_open = False
                continue
            place = f"{x(index):.4g} {_y(value, top)}"
            path.append(f"{'L' if is_open else 'M'}{place}")
            is_open = True
            tip = f"{text(names[index])}: {text(words)} {figure(value)}"
            drawn.append(f'<path class="dot {kind}" d="M{place}h0"><title>{tip}</title></path>')
        drawn.insert(0, f'<path class="line {kind}" d="{"".join(path)}"/>')
        legend.append(f'<span class="key {kind}"><i></i>{text(words)}</span>')
    axis = "".join(f'<span style="bottom:{100 * one / top:.4g}%">{number(one)}</span>' for one in at)
    box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}">'
    below = _ends(names[0], names[-1]) if count > 1 else _ends(names[0])
    return _frame(
        title,
        box + grid + "".join(drawn),
        axis,
        f'{below}<div class="legend">{"".join(legend)}</div>',
        label=unit,
    )


def _y(value: float, top: float) -> str:
    return f"{_HEIGHT * (1 - value / top):.4g}"


def bars_plot(title: str, bars: Sequence[tuple[str, int]], words: str, kind: str) -> str:
    """A bar for each (label, count) as its share of all; three labels stand below. kind: CSS class."""
    total = max(sum(count for _, count in bars), 1)
    at = ticks(max((count / total for _, count in bars), default=0.0))
    top, width = at[-1], _WIDTH / max(len(bars), 1)
    drawn = []
    for index, (label, count) in enumerate(bars):
        height = _HEIGHT * count / total / top
        tip = f"<title>{text(label)}: {number(count)} ({count / total:.2%})</title>"
        place = f'x="{width * (index + 0.08):.5g}" y="{_HEIGHT - height:.4g}"'
        drawn.append(f'<rect {place} width="{width * 0.84:.5g}" height="{height:.4g}">{tip}</rect>')
    grid = "".join(f'<path class="grid" d="M0 {_y(one, top)}H{_WIDTH:g}"/>' for one in at)
    axis = "".join(f'<span style="bottom:{100 * one / top:.4g}%">{100 * one:.4g}%</span>' for one in at)
    labels = [bars[index][0] for index in sorted({0, len(bars) // 2, len(bars) - 1})] if bars else []
    box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}"><g class="{kind}">'
    below = f'{_ends(*labels)}<p class="small">{text(words)}</p>'
    return _frame(title, f"{box}{grid}{''.join(drawn)}</g>", axis, below, kind="bars")


def heat_plot(title: str, names: Sequence[str], rows: Sequence[Values]) -> str:
    """A row of cells for each name, the darker the larger; cells without a number are left out."""
    good = [v for row in rows for v in row if v is not None and math.isfinite(v)]
    low, high = min(good, default=0.0), max(good, default=0.0)
    levels: dict[int, list[str]] = {}
    for y, row in enumerate(rows):
        of_row = [_level(value, low, high) for value in row]
        x = 0
        while x < len(of_row):
            end = x + 1
            while end < len(of_row) and of_row[end] == of_row[x]:
                end += 1
            levels.setdefault(of_row[x], []).append(f"M{x} {y}h{end - x}v1h{x - end}z")
            x = end
    num_columns = max((len(row) for row in rows), default=1)
    drawn = "".join(
        f'<path class="h{level}" d="{"".join(d)}"/>' for level, d in sorted(levels.items()) if level >= 0
    )
    bar = "".join(f'<i class="h{level}"></i>' for level in range(NUM_LEVELS))
    missing = '<span class="key none"><i></i>not read</span>' if -1 in levels else ""
    scale = f'<span class="scale">{figure(low)}<span class="ramp">{bar}</span>{figure(high)}</span>'
    below = f'{_ends("expert 0", f"expert {num_columns - 1}")}<div class="legend">{scale}{missing}</div>'
    axis = f'<span style="top:0">{text(names[0])}</span>'
    axis += f'<span style="bottom:0">{text(names[-1])}</span>' if len(names) > 1 else ""
    height = min(max(12 * len(rows), 60), 480)
    box = f'style="height:{height}px" viewBox="0 0 {num_columns} {len(rows)}">'
    return _frame(title, box + drawn, axis, below, kind="heat")


def _level(value: float | None, low: float, high: float) -> int:
    """Which of the colours a value has; -1 for none, the last for what is no number."""
    if value is None:
        return -1
    if not math.isfinite(value):
        return NUM_LEVELS - 1
    return min(int((value - low) / (high - low) * NUM_LEVELS), NUM_LEVELS - 1) if high > low else 0
