"""Parts that several documents share: layers of one kind in one entry, errors over layers, schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from hqconv.schemas.weight_schema import PARAM_DTYPES, WeightSchema
from hqconv.serving.engine import ENGINE

Words = dict[str, Any]
SHAPE_KEYS = (
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "top_k",
    "activation",
    "activation_parameters",
    "activation_is_known",
    "gated",
    "source_format",
    "source_dtype",
)


def layer_runs(layers: Mapping[str, Mapping[str, Any]]) -> list[Words]:
    """Layers of the same shape and naming, each set as one entry named like `model.layers.[3-60].mlp.experts`."""
    runs: dict[tuple[str, str, str], list[int]] = {}
    for name, document in layers.items():
        parts = re.split(r"\b(\d+)\b", name, maxsplit=1)
        before, number, after = parts if len(parts) == 3 else (name, "", "")
        key = (before, after, json.dumps({k: document[k] for k in SHAPE_KEYS if k in document}))
        runs.setdefault(key, []).extend([int(number)] if number else [])
    entries = []
    for (before, after, shape), numbers in runs.items():
        count = max(len(numbers), 1)
        middle = str(numbers[0]) if len(numbers) == 1 else f"[{_ranges(numbers)}]" if numbers else ""
        name = f"{before}{middle}{after}"
        entries.append({"name": name, "num_blocks": count, **json.loads(shape)})
    return entries


def _ranges(numbers: list[int]) -> str:
    """`3-60`, `0-3,7`, or `1,3,…,59` for a regular step."""
    numbers = sorted(numbers)
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def quant_method(quantization: Any) -> Any:
    """Method that a quantization config names; hf_quant_config.json, which names none, is ModelOpt's."""
    if not isinstance(quantization, dict):
        return None
    return quantization.get("quant_method", "modelopt" if "quantization" in quantization else None)


def schema_to_dict(schema: WeightSchema, param_dtype: str) -> Words:
    """Document of a schema, with the support of its checkpoint layout by the engine without hqconv's plugin."""
    obstacle = ENGINE.checkpoint_layout_obstacle(schema, param_dtype)
    return {
        "name": schema.name,
        "description": schema.describe(),
        "bits_per_weight": schema.bits_per_weight(),
        "weight_schema": schema.humming_fields(),
        "stock_vllm_serves_checkpoint_layout": obstacle is None,
        "stock_vllm_obstacle": obstacle,
        "stock_vllm_param_dtypes": [
            dtype for dtype in PARAM_DTYPES if not ENGINE.checkpoint_layout_obstacle(schema, dtype)
        ],
    }


def otherwise(named: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Layers (name, schema, input schema) whose schemas differ from the usual ones, grouped by schemas."""
    found: dict[str, list[str]] = {}
    for layer, schema, inputs in named:
        found.setdefault(f"{schema}, {inputs} activations", []).append(layer)
    return found
