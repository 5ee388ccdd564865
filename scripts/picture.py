"""Draw docs/quality.svg from the tables of docs/quality.md: KL divergence against bits per weight, for two models.

python scripts/picture.py
"""

from __future__ import annotations

import math
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"
SCHEMAS = {"int2-g64": 2.25, "int3-g64": 3.25, "int4-g32-e4m3": 4.25, "int4-g32": 4.5}
STYLES = {
    "rounded to nearest": "#888",
    "calibrated": "#06c",
    "calibrated, rotated": "#080",
    "auto-round SignRound": "#d50",
}
MODELS = (
    (50, "A real model", "SmolLM2-135M, all experts active"),
    (480, "A model with a router", "small Qwen3-MoE, routed"),
)
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 360" font-family="sans-serif" font-size="13">
<rect width="860" height="360" fill="white"/>
{}
<text x="430" y="352" text-anchor="middle">KL divergence (nats, lower is better) against bits per weight</text>
</svg>
"""


def points(page: str, title: str) -> dict[str, list[tuple[float, float]]]:
    """Read the series of one section's table: name → bits and KL, by bits."""
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STYLES}
    for name, rounded, calibrated in re.findall(
        r"(?m)^\| `(\S+)` \| [\d.]+ \| (\S+) \| (\S+) \|", section
    ):
        bits = SCHEMAS.get(re.sub(r"-h\d+$", "", name), 0)
        if name in SCHEMAS:
            found["rounded to nearest"].append((bits, float(rounded)))
            found["calibrated"].append((bits, float(calibrated)))
        elif bits:
            found["calibrated, rotated"].append((bits, float(calibrated)))
    if peer := re.search(r"SignRound,.*? \| (\.\d+) \|", section):  # the first is int4-g32
        found["auto-round SignRound"].append((4.5, float(peer[1])))
    return found


def panel(left: int, caption: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """Draw one model: axes, lines and marks."""
    lines = [f'<text x="{left + 20}" y="22" font-weight="bold">{caption}</text>']
    lines += [f'<text x="{left + 120 * step}" y="325">{2 + step}</text>' for step in range(4)]
    for kl in (0.001, 0.01, 0.1, 1, 10):
        y = 110 - 65 * math.log10(kl)
        lines.append(f'<path d="M{left} {y:.0f}h360" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{kl}</text>')
    for number, (name, values) in enumerate(series.items()):
        places = [(left + (bits - 2) * 120, 110 - 65 * math.log10(kl)) for bits, kl in values]
        path = " ".join(f"{x:.0f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{STYLES[name]}"/>')
        if values:
            y = 40 + 18 * number
            places.append((left + 215, y))
            lines.append(f'<text x="{left + 225}" y="{y + 4}" fill="{STYLES[name]}">{name}</text>')
        lines += [
            f'<circle cx="{x:.0f}" cy="{y:.1f}" r="4" fill="{STYLES[name]}"/>' for x, y in places
        ]
    return "\n".join(lines)


def picture(page: str) -> str:
    """Return the SVG of a page's tables."""
    panels = [panel(left, caption, points(page, title)) for left, title, caption in MODELS]
    return FRAME.format("\n".join(panels))


if __name__ == "__main__":
    PAGE.with_suffix(".svg").write_text(picture(PAGE.read_text()))
