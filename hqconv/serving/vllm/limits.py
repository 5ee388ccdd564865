"""How a server is started with an artifact, and which artifacts vLLM 0.33 has no start for."""

from __future__ import annotations

import re
import shlex

from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.grid import LINEAR, Grid
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.weight_schema import WeightSchema

_WEIGHS_INPUTS = ("llama4",)


def why_no_server(kind: KernelSpec) -> str | None:
    """What is known to keep every server from computing with such weights, whatever loads them; None for nothing.

    docs/kernels.md: e5m2 codes of up to 57344 are summed before the scale is applied.
    """
    if kind.schema.b_dtype != "float8e5m2" or kind.a_dtype != "float16":
        return None
    return f"Humming's kernel overflows on '{kind.schema.name}' with float16 and gives NaN; use --dtype bfloat16."


def serve_options(grid: Grid) -> str | None:
    """vLLM's options for a grid, or None where it has none: with expert parallelism its MoE layers have one TP rank."""
    if grid.redundant or (grid.tp > 1 and grid.ep > 1):
        return None
    if grid.ep == 1:
        return f"--tensor-parallel-size {grid.tp}" if grid.tp > 1 else ""
    placement = "" if grid.placement == LINEAR else f" --expert-placement-strategy {grid.placement}"
    return f"--tensor-parallel-size {grid.ep} --enable-expert-parallel{placement}"


def serve_command(out: str, layout: str, grid: Grid) -> str | None:
    """The command line that serves an artifact, or None where vLLM cannot; of the checkpoint layout on any ranks."""
    options = serve_options(grid) if layout == KERNEL else ""
    return None if options is None else f"vllm serve {shlex.quote(out)} {options}".rstrip()


def serving_obstacles(family: str, grid: Grid) -> list[str]:
    """Why vLLM 0.33 will not serve a kernel artifact of this family and grid, each reason a sentence's second half."""
    found = []
    if grid.redundant:
        found.append("it has no redundant experts for Humming")
    if grid.tp > 1 and grid.ep > 1:
        found.append(
            "with expert parallelism its MoE layers are not cut for tensor parallel ranks: use --tp 1"
        )
    if family in _WEIGHS_INPUTS:
        found.append(f"'{family}' weighs the experts' inputs, which its Humming layers do not")
    return found


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


def stock_vllm_obstacle(schema: WeightSchema, param_dtype: str) -> str | None:
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


def _selects_kernel(schema: WeightSchema) -> bool:
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


def stock_vllm_family_obstacle(family: str, block: str, schema: WeightSchema) -> str | None:
    """Why it cannot serve a block of this family from the checkpoint layout; None where nothing is known against it."""
    for name, pattern, scale_dtype, reason in _FAMILIES:
        if family == name and re.search(pattern, block) and scale_dtype in ("", schema.bs_dtype):
            return reason
    return None
