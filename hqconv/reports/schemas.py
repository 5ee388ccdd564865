"""Description of the weight schemas, input schemas and recipes, as documents."""

from __future__ import annotations

from hqconv.humming_layout.compatibility import why_not
from hqconv.reports.documents import Words, schema_to_dict
from hqconv.schemas.config_files import RECIPES, SCHEMAS, shipped
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, SHORTHAND


def describe_schemas() -> Words:
    """Describe every preset, the integer shorthand, and every input schema."""
    return {
        "kind": "schemas",
        "presets": [schema_to_dict(schema, "bfloat16") for schema in PRESETS.values()],
        "shorthand": {
            "name": SHORTHAND,
            "description": "uintN codes, N = 1..8; a scale per G columns (-gG, 128 if left out; int8: channel) "
            "or per channel (-c); zero points as integers (-zp) or floats (-fpzp)",
            "bits_per_weight": "N + 16/G, + N/G with -zp, + 16/G with -fpzp",
            "stock_vllm": "without zero points, N >= 2",
        },
        "input_schemas": [_input_schema_to_dict(inputs) for inputs in INPUT_PRESETS.values()],
    }


def describe_recipes() -> Words:
    """Describe the recipes and schema files that come with hqconv: option value, purpose, and path."""
    return {
        "kind": "recipes",
        "folder": str(SCHEMAS),
        "recipes": [
            {"option": f"--config {name.removesuffix('.toml')}", "description": text, "path": str(RECIPES / name)}
            for name, text in shipped(RECIPES).items()
        ],
        "schemas": [
            {"option": f"--schema {name}", "description": text, "path": str(SCHEMAS / name)}
            for name, text in shipped(SCHEMAS).items()
        ],
    }


def _input_schema_to_dict(inputs: InputSchema) -> Words:
    """Document of an input schema, with the targets and the presets that it runs with."""
    pairs = [
        (schema.name, target)
        for schema in PRESETS.values()
        for target in map(GpuTarget, TARGETS)
        if any(why_not(KernelSpec(schema, dtype, target, inputs)) is None for dtype in PARAM_DTYPES)
    ]
    return {
        "name": inputs.name,
        "description": inputs.describe(),
        **inputs.humming_fields(),
        "targets": [target.name for target in map(GpuTarget, TARGETS) if target in {t for _, t in pairs}],
        "schemas": [name for name in PRESETS if name in {schema for schema, _ in pairs}],
    }
