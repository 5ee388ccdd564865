"""The schemas that there are, in words."""

from __future__ import annotations

from hqconv.inspection.words import Words, schema_words
from hqconv.schemas.target import PRESETS, SHORTHAND


def describe_schemas() -> Words:
    """Every preset, and the integer shorthand."""
    return {
        "kind": "schemas",
        "presets": [schema_words(schema, "bfloat16") for schema in PRESETS.values()],
        "shorthand": {
            "name": SHORTHAND,
            "description": "uintN codes, N = 1..8; a scale per G columns (-gG, 128 if left out; int8: channel) "
            "or per channel (-c); zero points as integers (-zp) or floats (-fpzp)",
            "bits_per_weight": "N + 16/G, + N/G with -zp, + 16/G with -fpzp",
            "stock_vllm": "without zero points, N >= 2",
        },
    }
