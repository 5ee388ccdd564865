"""The look of a report: one style sheet for light and dark, narrow and wide."""

from __future__ import annotations

NUM_LEVELS = 16
_LIGHT = (
    (0xE8, 0xEE, 0xF7),
    (0x5B, 0x93, 0xC7),
    (0x0A, 0x28, 0x5C),
)  # from the smallest value to the largest
_DARK = ((0x24, 0x30, 0x3F), (0x3F, 0x8F, 0xC4), (0xFF, 0xE3, 0x9B))


def _ramp(stops: tuple[tuple[int, int, int], ...], prefix: str = "") -> str:
    rules = []
    for level in range(NUM_LEVELS):
        place = level / (NUM_LEVELS - 1) * (len(stops) - 1)
        index = min(int(place), len(stops) - 2)
        mixed = (
            round(a + (b - a) * (place - index)) for a, b in zip(stops[index], stops[index + 1], strict=True)
        )
        colour = "#" + "".join(f"{part:02x}" for part in mixed)
        rules.append(f"{prefix}.h{level}{{fill:{colour};background:{colour}}}")
    return "\n".join(rules)


_BASE = """
:root{color-scheme:light dark;--page:#fff;--panel:#f5f7fa;--ink:#1b2430;--soft:#566173;--line:#d5dbe3;
--w1:#0b62a8;--w3:#c14d00;--w2:#00795c;--good:#0a6b3d;--bad:#b3261e;--none:#fff}
@media (prefers-color-scheme:dark){:root{--page:#12171e;--panel:#1b222b;--ink:#e7ecf2;--soft:#a3aebc;--line:#37424f;
--w1:#63b3ed;--w3:#f6a45c;--w2:#4fd1a5;--good:#58d68d;--bad:#ff8a80;--none:#12171e}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main,header.top{max-width:1180px;margin:0 auto;padding:0 16px}
header.top{padding-top:28px}
main{padding-bottom:48px}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:40px 0 12px;padding-bottom:6px;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:24px 0 8px}
p{margin:8px 0;overflow-wrap:anywhere}
.lead,.note,.small{color:var(--soft)}
.note{font-size:.92rem;max-width:80ch}
.small{font-size:.85rem;margin:2px 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0 0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:1.15rem;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:.85rem}
.pass{color:var(--good)}.fail{color:var(--bad)}
.facts{margin:0}
.facts div{display:grid;grid-template-columns:10.5rem 1fr;gap:2px 14px;padding:5px 0;
border-bottom:1px solid var(--line)}
.facts dt{color:var(--soft)}
.facts dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:14px 0;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.92rem}
.caption{font-weight:600;margin:18px 0 6px}
.caption+.wide{margin-top:0}
th,td{text-align:left;padding:6px 10px;border-top:1px solid var(--line);white-space:nowrap}
thead th{border-top:0;background:var(--panel);font-weight:600}
th.number,td.number{text-align:right;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,310px),1fr));gap:18px 24px}
figure.plot{margin:14px 0;min-width:0}
figcaption{font-weight:600;margin-bottom:8px;overflow-wrap:anywhere}
.area{display:flex}
.axis{position:relative;flex:0 0 3.4rem;font-size:.75rem;color:var(--soft);font-variant-numeric:tabular-nums}
.axis span{position:absolute;right:8px;transform:translateY(50%);line-height:1;white-space:nowrap}
.heat .axis span{transform:none;max-width:calc(100% - 8px);overflow:hidden;text-overflow:ellipsis;line-height:1.2}
.heat .axis{flex-basis:4rem}
.marks{flex:1;min-width:0}
.marks svg{display:block;width:100%;height:220px;overflow:visible}
.bars .marks svg{height:130px}
.heat .marks svg{border:1px solid var(--line);background:var(--none);overflow:hidden;shape-rendering:crispEdges}
.below{margin-left:3.4rem}
.heat .below{margin-left:4rem}
.ends{display:flex;justify-content:space-between;gap:10px;font-size:.75rem;color:var(--soft);margin-top:6px}
.ends span{min-width:0;overflow-wrap:anywhere}
.ends span:last-child:not(:first-child){text-align:right}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.85rem;margin-top:8px}
.key{display:inline-flex;align-items:center;gap:6px}
.key i{width:18px;height:4px;border-radius:2px;background:currentColor}
.key.none i{width:14px;height:14px;border-radius:0;border:1px solid var(--line);background:var(--none)}
.key.worst i{height:0;border-top:2px dashed currentColor;background:none;border-radius:0}
.scale{display:inline-flex;align-items:center;gap:8px;font-variant-numeric:tabular-nums}
.ramp{display:inline-flex;border:1px solid var(--line)}
.ramp i{width:9px;height:12px}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke;fill:none}
.line{fill:none;stroke:currentColor;stroke-width:1.6;vector-effect:non-scaling-stroke}
.dot{fill:none;stroke:currentColor;stroke-width:6;stroke-linecap:round;vector-effect:non-scaling-stroke}
.worst.line{stroke-dasharray:4 4;stroke-width:1.2}
.worst.dot{stroke-width:3.5}
.w1{color:var(--w1)}.w3{color:var(--w3)}.w2{color:var(--w2)}
g.w1 rect,g.w3 rect,g.w2 rect{fill:currentColor}
rect:hover,.dot:hover{opacity:.6}
details{margin:12px 0}
summary{cursor:pointer;font-weight:600}
a{color:var(--w1)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:16px;font-size:.92rem}
@media (max-width:560px){.facts div{grid-template-columns:1fr}h1{font-size:1.3rem}
.tiles{grid-template-columns:repeat(2,1fr)}.marks svg{height:170px}.axis{flex-basis:2.9rem}
.heat .axis{flex-basis:4rem}.below{margin-left:2.9rem}.heat .below{margin-left:4rem}}
@media print{.wide{overflow:visible}nav{display:none}}
"""

STYLE = "\n".join((_BASE.strip(), _ramp(_LIGHT), "@media (prefers-color-scheme:dark){", _ramp(_DARK), "}"))
