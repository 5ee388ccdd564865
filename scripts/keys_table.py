"""Write docs/config-keys.md: every known key of every quantization method, from the lists in hqconv/formats.

python scripts/keys_table.py --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.formats.config_keys import COMMON, Keys
from hqconv.formats.registry import ALIASES, methods

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config-keys.md"
INTRO = """# Keys of quantization configs

`python scripts/keys_table.py --write` makes this page from the lists in `hqconv/formats/`;
tests/formats/test_config_keys.py compares both.

hqconv knows the keys below. A key is *read* if its value decides how weights are decoded, or is compared with what the
other keys and the tensors say. Keys that agree are accepted, keys that contradict one another are refused. A known key
that is not read says nothing about the stored weights.

A key that is in no list:

* changes nothing if its value is null, false or empty;
* is **refused** if its name speaks of how bytes are stored (packing, dtype, bits, zero points, order, groups, blocks,
  scales, layout, low-rank branches …), or of inputs that are rotated or scaled when the model runs (rotation, Hadamard,
  QuaRot, SpinQuant, transform, pre-quant scale …), at any depth;
* is a **warning** otherwise, in the plan and in the manifest: names that speak of activations, caches, calibration,
  training or tools, and names that speak of none of this.

## Rotations

A server multiplies an artifact's experts with the inputs that the model gives them. Where a config declares that these
inputs are rotated or scaled first, the conversion is refused. A rotation that was fused into the weights converts.

| method | refused | converts |
| --- | --- | --- |
| auto-round | `rotation_config` | – |
| auto-round | `spinquant_config` with r4, r3, or r1 that is online | r1 and r2 that are fused |
| compressed-tensors | `transform_config` with other locations | weight_input and weight_output only |
| gptq, awq, fp8 of GPTQModel | `rotation` | – |
| quark | `algo_config` with r4, or with `online_r1_rotation` | r1 and r2 that are fused |
| quark | `algo_config` with svdquant | awq, gptq, smooth |
| modelopt | `pre_quant_scale`, `rotate` | – |
| ascend | `heads_rotation`, `kronecker_rotation` … with layers | `global_rotation` |
| humming | `hadamard_block_size` above 1 | 0 or 1 |
| any, in config.json itself | `spinquant_config`, `rotation_config` | `spinquant_config` whose rotations are fused |

## Every method
"""
HEAD = ["| key | read | meaning |", "| --- | --- | --- |"]


def rows(keys: Keys, above: str = "") -> Iterator[str]:
    """One row for each key; keys of an object follow it, with its name before theirs."""
    for name, key in keys.items():
        yield f"| `{above}{name}` | {'yes' if key.is_read else ''} | {key.meaning} |"
        if key.inside:
            yield from rows(key.inside, f"{above}{name}.")
        if key.entries:
            yield from rows(key.entries, f"{above}{name}.*.")


def page() -> str:
    """Return the whole page."""
    lines = [INTRO, *HEAD, *rows(COMMON)]
    for name, method in methods().items():
        others = sorted(alias for alias, of in ALIASES.items() if of == name)
        lines += ["", f"## {name}", ""]
        if others:
            lines += [f"Also named {', '.join(others)}.", ""]
        lines += [*HEAD, *rows(method.keys)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, or write it."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
