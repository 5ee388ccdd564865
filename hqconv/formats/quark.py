"""AMD's Quark: what its config declares, and what its checkpoints store for one projection.

Legend: N output rows, K input columns, b bits of a code. Source: `setup_config_per_layer` of
quark.torch.quantization.model_transformation, torch/utils/pack.py, and humming's schema/quark.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hqconv.formats.config_reader import ConfigReader, Rule, Text, always, globbed_in, when
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.formats.stored_tensors import (
    ONE,
    SCALE_CODES,
    Shapes,
    StoredTensor,
    bias_need,
    grid_shapes,
    require_multiples,
)
from hqconv.schemas.dtypes import FLOATS, code_bits
from hqconv.schemas.tensors import TensorSpec

_FLOATS = {
    "fp4": "float4e2m1",
    "fp6_e2m3": "float6e2m3",
    "fp6_e3m2": "float6e3m2",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
}
# How codes are stored: one element each (int2 in int32), several to an element, or embedded with their scales (mx).
_STORAGE = {
    "int2": "I32",
    "int3": "U8",
    "int4": "I32",
    "uint4": "I32",
    "int8": "I8",
    "uint8": "U8",
    "fp4": "U8",
    "fp6_e2m3": "U8",
    "fp6_e3m2": "U8",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "mx": "U8",
}
_INTEGERS = ("int2", "int3", "int4", "uint4", "int8", "uint8")
_WITHOUT_ZERO_POINTS = ("int2", "int3")
_TRANSPOSED = ("int2", "int4", "uint4", "int8", "uint8")
_SMALL_SCALES = {
    "e8m0": "float8e8m0",
    "e5m3": "float8e5m3",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
    "fp8_e5m3": "float8e5m3",
}

# --- the config --------------------------------------------------------------------------------------------


def quark(words: ConfigReader, _text: Text) -> list[Rule]:
    """Excluded names, then a scheme by name or shell pattern, by class, for the rest.

    A pattern speaks of the names it matches, not of modules below them. The "re:" prefix is vLLM's.
    """
    export = words.table("export") if words.has("export") else ConfigReader({}, words.where("export"))
    if (
        export.text("weight_format", ("real_quantized", "fake_quantized"), "real_quantized")
        != "real_quantized"
    ):
        return []
    packing = export.text("pack_method", ("order", "reorder"), "reorder")
    excluded = globbed_in(words.names("exclude"), words.where("exclude"), with_parents=False)
    rules: list[Rule] = [when(excluded)]
    named: dict[str, SourceFormat] = {}
    patterns: list[Rule] = []
    for name, layer in words.tables("layer_quant_config"):
        named[name] = _format(layer, packing)
        matches = globbed_in([name], words.where("layer_quant_config"), with_parents=False)
        patterns.append(when(matches, named[name]))
    rules += [named.get, *patterns]
    for kind, layer in words.tables("layer_type_quant_config"):
        if kind == "Linear":
            rules.append(always(_format(layer, packing)))
    return [*rules, always(_format(words.table("global_quant_config"), packing))]


def _format(layer: ConfigReader, packing: str) -> SourceFormat:
    if not layer.has("weight"):
        return PLAIN
    spec, second, stage = _stages(layer)
    dtype = spec.text("dtype", tuple(_STORAGE))
    element = spec.text("mx_element_dtype", ("fp4", "fp6_e2m3", "fp6_e3m2")) if dtype == "mx" else dtype
    if spec.flag("is_dynamic", False):
        raise spec.unsupported("is_dynamic", "false, for weights")
    qscheme, rows, columns = _sizes(spec, dtype)
    scale_format = _scale_format(spec, dtype)
    scale_dtype = second.text("dtype", ("fp8_e4m3", "fp8_e5m2", "fp8_e5m3")) if second else None
    is_integer, has_zero_point = dtype in _INTEGERS, _has_zero_point(spec, dtype)
    is_mx = scale_format == "e8m0" and (rows, columns) == (1, 32) and not is_integer
    stored = scale_dtype if scale_dtype and stage == 1 else scale_format
    options: Mapping[str, Any] = {
        "dtype": dtype,
        "qscheme": qscheme,
        "group_size": columns if qscheme == "per_group" else 0,
        "block_size": (rows, columns) if qscheme == "per_block" else None,
        "symmetric": spec.flag("symmetric", True) if spec.has("symmetric") else None,
        "scale_format": scale_format,
        "mx_element_dtype": element if dtype == "mx" else None,
        "pack_method": packing,
        "scale_dtype": scale_dtype,
        "scale_qscheme": _second_scheme(second) if second else None,
        "scale_stage": stage,
        # Which of the two scales is stored for each group, and how the codes lie.
        "scale_name": "weight_scale_2" if second and stage == 0 else "weight_scale",
        "is_transposed": qscheme == "per_group" and dtype in _TRANSPOSED,
    }
    return SourceFormat(
        f"quark mx{element}" if is_mx else f"quark {element}",
        "quark",
        f"uint{dtype[-1]}" if is_integer else _FLOATS[element],
        _SMALL_SCALES.get(stored or "", stored or ""),
        rows,
        columns,
        has_zero_point=has_zero_point,
        scale_2="tensor" if second else "none",
        options=tuple(options.items()),
    )


def _has_zero_point(spec: ConfigReader, dtype: str) -> bool:
    is_asymmetric = dtype in _INTEGERS and (dtype.startswith("uint") or not spec.flag("symmetric", True))
    if is_asymmetric and dtype in _WITHOUT_ZERO_POINTS:
        raise spec.unsupported("symmetric", f"true: zero points of {dtype} are not known")
    return is_asymmetric


def _stages(layer: ConfigReader) -> tuple[ConfigReader, ConfigReader | None, int]:
    """The weight's words, those of the quantization of its scales if there is one, and that one's place.

    Source: `parse_quark_tensor_config` of humming.schema.quark.
    """
    value = layer.values["weight"]
    stages = value if isinstance(value, list) else [value]
    specs = [ConfigReader(stage, layer.where("weight")) for stage in stages]
    if len(specs) == 1:
        return specs[0], None, 1
    if len(specs) != 2:
        raise layer.wrong("weight", "one or two stages of quantization")
    place = 1 if specs[1].flag("is_scale_quant", False) else 0
    return specs[1 - place], specs[place], place


def _second_scheme(second: ConfigReader) -> str:
    """How the scales are quantized: all of a matrix by one number."""
    if second.flag("is_dynamic", False) or not second.flag("symmetric", True):
        raise second.unsupported("is_dynamic", "static, symmetric scales")
    if second.text("qscheme", ("per_tensor", "per_channel")) == "per_channel":
        raise second.unsupported("qscheme", "per_tensor")
    return "per_tensor"


def _sizes(spec: ConfigReader, dtype: str) -> tuple[str, int, int]:
    """The scheme's name, and rows and columns of a scale."""
    if dtype == "mx":
        return "per_group", 1, spec.integer("group_size", 32, 32)
    schemes = ("per_tensor", "per_channel", "per_group", "per_block")
    qscheme = spec.text("qscheme", schemes)
    if qscheme == "per_channel":
        if spec.integer("ch_axis", -2, 1) not in (0, -2):
            raise spec.unsupported("ch_axis", "0: output rows")
        return qscheme, 1, 0
    if qscheme == "per_group":
        if spec.integer("ch_axis", -2, 1) not in (1, -1):
            raise spec.unsupported("ch_axis", "-1: groups of columns")
        return qscheme, 1, spec.integer("group_size", 1)
    if qscheme == "per_block":
        if dtype not in ("fp8_e4m3", "fp8_e5m2"):
            raise spec.unsupported("qscheme", "per_tensor, per_channel or per_group, but for fp8")
        return qscheme, *spec.pair("block_size")
    return qscheme, 0, 0


def _scale_format(spec: ConfigReader, dtype: str) -> str | None:
    """How scales are stored; blocks say it in `scale_type` instead."""
    if dtype == "mx" or spec.values.get("scale_type") == "float8_e8m0fnu":
        return "e8m0"
    if not spec.has("scale_format"):
        return None
    return spec.text("scale_format", ("float32", "float16", "bfloat16", "e8m0", "e5m3"))


# --- the tensors -------------------------------------------------------------------------------------------


def _packed(dtype: str, bits: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stored shape of codes: packed along the last dimension."""
    last = shape[-1]
    if dtype == "mx":
        last = last // 32 * (1 + bits * 4)
    elif dtype in ("int4", "uint4"):
        last = math.ceil(last / 8)
    elif dtype in ("int3", "fp4", "fp6_e2m3", "fp6_e3m2"):
        last = last * bits // 8
    return (*shape[:-1], last)


def quark_needs(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    """Codes [N, K] or, for integers per group, [K, N]; scales likewise; maybe a second scale for all of them."""
    dtype, transposed = fmt.option("dtype"), fmt.option("is_transposed")
    bits = code_bits(fmt.b_dtype)
    require_multiples(parts, [("columns", k, 32), ("rows", n, 8 if transposed else 1)])
    storage = (_STORAGE[dtype],)
    needs = [
        StoredTensor(
            "weight", ("weight",), storage, (_packed(dtype, bits, (k, n) if transposed else (n, k)),)
        ),
        bias_need(n),
    ]
    if dtype == "mx":
        return needs
    scales: Shapes = grid_shapes(n, k, fmt.group_n, fmt.group_k)
    if transposed:
        scales = ((math.ceil(k / fmt.group_k), n),)
    name = fmt.option("scale_name")
    needs.append(StoredTensor("scale", (name,), SCALE_CODES.get(fmt.scale_dtype, FLOATS), scales))
    if fmt.has_zero_point:
        is_scalar = fmt.group_n == 0
        shapes = ONE if is_scalar else (_packed(dtype, bits, scales[-1] if not transposed else scales[0]),)
        needs.append(StoredTensor("zero_point", (name.replace("scale", "zero_point"),), storage, shapes))
    if fmt.scale_2 != "none":
        other = "weight_scale" if name == "weight_scale_2" else "weight_scale_2"
        needs.append(StoredTensor("scale_2", (other,), FLOATS, ONE))
    return needs


def quark_shape(fmt: SourceFormat, part: TensorSpec) -> tuple[int, int]:
    """(N, K) that a Quark weight's header implies."""
    dtype, bits = fmt.option("dtype"), code_bits(fmt.b_dtype)
    first, last = part.shape[0], part.shape[1]
    if dtype == "mx":
        last = last // (1 + bits * 4) * 32
    elif dtype in ("int4", "uint4"):
        last *= 8
    elif dtype in ("int3", "fp4", "fp6_e2m3", "fp6_e3m2"):
        last = last * 8 // bits
    return (last, first) if fmt.option("is_transposed") else (first, last)
