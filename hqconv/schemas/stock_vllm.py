"""What vLLM 0.33 with Humming 0.1.19, as they are, cannot serve from the checkpoint layout, and why.

Every answer about a schema was compared with what vLLM's own classes do (tests/serving/test_stock.py); those about
families come from its model classes, loaded with tiny models of each, and from their sources (docs/serving.md).
"""

from __future__ import annotations

import re

from hqconv.schemas.target import TargetSchema

_FLOAT4 = ("float4e2m1", "float4e0m3")
_FLOAT8 = ("float8e4m3", "float8e3m4")  # vLLM does not tell them apart
_MX_GROUP = 32
_BLOCK = (128, 128)

_SILENT = "they stay as they were allocated, and no error says so"

# (family, blocks, scale dtype) → why. Blocks are a pattern of their names, the scale dtype the only one it holds for.
_FAMILIES: tuple[tuple[str, str, str, str], ...] = (
    ("gpt_oss", "", "", f"its GPT-OSS loader does not read Humming's weights: {_SILENT}"),
    ("openai_privacy_filter", "", "", f"its GPT-OSS loader does not read Humming's weights: {_SILENT}"),
    (
        "llama4",
        "",
        "",
        "Llama 4's router weights scale the experts' inputs; its Humming method scales the outputs",
    ),
    (
        "granitemoe",
        "",
        "",
        "its experts are `block_sparse_moe.experts`, here `block_sparse_moe` (ValueError)",
    ),
    ("granitemoe_swa", "", "", f"it knows the projections by other names than w1, w2, w3: {_SILENT}"),
    ("dbrx", "", "", "its experts are `ffn`, here `ffn.experts.mlp` (KeyError)"),
    ("step3", "", "", "its experts are `moe.experts`, here `moe`"),
    ("aria", "", "", f"it takes each gate and up for both, in halves: rows of w13 are wrong, {_SILENT}"),
    ("inkling", "", "", "its loader reads stacks of all experts only (AttributeError)"),
    ("inkling2", "", "", "its loader reads stacks of all experts only (AttributeError)"),
    (
        "deepseek_v4",
        "",
        "float8e8m0",
        "its DeepSeek-V4 loader converts e8m0 scales as if they were integers: they come out wrong, without an error",
    ),
    (
        "deepseek",
        r"\.blocks\.\d+\.",
        "",
        "it knows the layers as `model.layers`, not by the `model.blocks` of transformers 5 (KeyError)",
    ),
)


def stock_vllm_obstacle(schema: TargetSchema, param_dtype: str) -> str | None:
    """Why it cannot serve the checkpoint layout of this schema, of whatever family; None where it can."""
    if schema.has_zero_point:
        return "its weight loader has no scale_type for zero points (ValueError)"
    if schema.is_coupled:
        return "its weight loader cannot place tensor-level scales of w13 (IndexError)"
    if schema.bs_dtype in ("float8e5m2", "float8e5m3"):
        return f"it has no {schema.bs_dtype} scales (KeyError)"
    if schema.bs_dtype == "float8e8m0" and param_dtype == "float16":
        return "it does not widen e8m0 scales for float16: exponents outside [-14, 15] saturate"
    if schema.b_dtype == "uint1":
        return "it has no 1-bit integer type (KeyError)"
    if not schema.is_integer and not _selects_kernel(schema):
        return f"it selects no MoE kernel for {schema.describe()} (AssertionError)"
    return None


def _selects_kernel(schema: TargetSchema) -> bool:
    """Whether a float type is on the list of its experts classes (`_supports_quant_scheme`)."""
    kind = schema.weight_scale_type
    if schema.b_dtype in _FLOAT4:
        return kind in ("group", "channel")
    if schema.b_dtype not in _FLOAT8:
        return False
    return {
        # Channel scales only where their dtype is left out: one that is named makes another key.
        "channel": schema.bs_dtype is None,
        "group": schema.bs_dtype == "float8e8m0" and schema.weight_scale_group_size == _MX_GROUP,
        "block": (schema.weight_scale_group_size_n, schema.weight_scale_group_size) == _BLOCK,
    }[kind]


def stock_vllm_family_obstacle(family: str, block: str, schema: TargetSchema) -> str | None:
    """Why it cannot serve a block of this family from the checkpoint layout; None where nothing is known against it."""
    for name, pattern, scale_dtype, reason in _FAMILIES:
        if family == name and re.search(pattern, block) and scale_dtype in ("", schema.bs_dtype):
            return reason
    return None
