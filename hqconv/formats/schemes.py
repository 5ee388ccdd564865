"""Quantization methods that give modules a scheme each: compressed-tensors, modelopt, quark.

Each function reads a method's words into rules; the first rule that speaks of a module decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.formats.format import PLAIN, SourceFormat
from hqconv.formats.methods import MXFP4, Text, nvfp4_format
from hqconv.formats.words import (
    LARGEST,
    Rule,
    Words,
    always,
    beginning_with,
    globbed_in,
    named_in,
    parents,
    regex,
    when,
)

_STATUSES = ("initialized", "calibration", "frozen", "compressed", "decompressed")
_NOT_STORED = ("dense", "fakequant")
_REFUSED_FORMATS = ("mxfp6-pack-quantized", "marlin-24", "sparse-bitmask", "sparse-24-bitmask")
# Classes that an expert's projection may be of, here and in vLLM.
_EXPERT_CLASSES = ("FusedMoE", "Linear", "RoutedExperts")


def compressed_tensors(words: Words, _text: Text) -> list[Rule]:
    """compressed-tensors: a scheme per target. Exact names go before regexes (sorted), these before classes.

    The format, not the status, says how weights are stored: old checkpoints in a packed format are "frozen".
    Source: `match_targets` of compressed_tensors.utils.match; of groups with one target the last one counts.
    """
    for key in ("sparsity_config", "transform_config"):
        if words.has(key) and not _is_idle(words.table(key)):
            raise words.unsupported(key, "none: weights that are neither sparse nor rotated")
    if words.text("quantization_status", _STATUSES, "compressed") == "decompressed":
        return []
    if not words.has("config_groups"):
        raise words.wrong("config_groups", "an object of schemes")
    schemes: dict[str, SourceFormat] = {}
    for _, group in words.tables("config_groups"):
        found = _scheme_format(group, group if group.has("format") else words)
        if not group.has("targets"):
            raise group.wrong("targets", "a list of module names, patterns or classes")
        schemes.update(dict.fromkeys(group.names("targets"), found))
    ignored = words.names("ignore")
    if set(_EXPERT_CLASSES) & set(ignored):
        return []
    patterns = [
        when(beginning_with(regex(target[3:], words.where("config_groups"))), schemes[target])
        for target in sorted(schemes)
        if target.startswith("re:")
    ]
    classes = [always(schemes[name]) for name in _EXPERT_CLASSES if name in schemes]
    return [when(named_in(ignored, words.where("ignore"))), schemes.get, *patterns, *classes]


def _is_idle(words: Words) -> bool:
    """Whether a sparsity or transform config changes nothing."""
    return words.values.get("format") == "dense" or not any(words.values.values())


def _scheme_format(group: Words, holder: Words) -> SourceFormat:
    """The format of one group; `holder` is the object whose `format` counts."""
    storage = holder.text("format")
    if storage in _NOT_STORED or not group.has("weights"):
        return PLAIN
    if storage in _REFUSED_FORMATS:
        raise holder.unsupported("format", ", ".join(_FORMATS))
    if storage not in _FORMATS:
        raise holder.wrong("format", ", ".join(_FORMATS))
    weights = group.table("weights")
    if weights.values.get("dynamic"):
        raise weights.wrong("dynamic", "false, for weights")
    is_float = weights.text("type", ("int", "float")) == "float"
    if storage == "naive-quantized":
        return (_float_quantized if is_float else _int_quantized)(weights, storage)
    if is_float != (storage not in ("pack-quantized", "int-quantized")):
        raise weights.wrong("type", "int" if is_float else "float")
    return _FORMATS[storage](weights, storage)


def _title(storage: str, what: str) -> str:
    return f"compressed-tensors {storage} {what}"


def _sizes(weights: Words) -> tuple[int, int]:
    """Rows and columns of a scale, by strategy; without one it follows from the group size."""
    size = weights.integer("group_size", -1, default=-1)
    implied = "tensor" if not weights.has("group_size") else "channel" if size < 0 else "group"
    strategy = weights.text("strategy", ("tensor", "channel", "group", "tensor_group", "block"), implied)
    if strategy == "block":
        return weights.pair("block_structure")
    if strategy in ("group", "tensor_group"):
        return 1, weights.integer("group_size", 1)
    return (0, 0) if strategy == "tensor" else (1, 0)


def _pack_quantized(weights: Words, storage: str) -> SourceFormat:
    bits = weights.integer("num_bits", 1, 8)
    rows, columns = _sizes(weights)
    order = weights.values.get("actorder") or None
    if order not in (None, True, "weight", "static", "group", "dynamic"):
        raise weights.wrong("actorder", "weight, static, group, dynamic or nothing")
    return SourceFormat(
        _title(storage, f"int{bits}"),
        "packed_int",
        f"uint{bits}",
        "",
        rows,
        columns,
        has_zero_point=not weights.flag("symmetric", True),
        # Only these orders store a g_idx; "weight" and "static" are undone before storing.
        is_permuted=order in (True, "group", "dynamic"),
    )


def _int_quantized(weights: Words, storage: str) -> SourceFormat:
    """Codes in int8, whatever their number of bits."""
    bits = weights.integer("num_bits", 1, 8)
    rows, columns = _sizes(weights)
    has_zero_point = not weights.flag("symmetric", True)
    return SourceFormat(_title(storage, f"int{bits}"), "int8", "uint8", "", rows, columns, has_zero_point)


def _symmetric(weights: Words, bits: int) -> None:
    weights.integer("num_bits", bits, bits)
    if not weights.flag("symmetric", True):
        raise weights.wrong("symmetric", "true, for a float type")


def _float_quantized(weights: Words, storage: str) -> SourceFormat:
    _symmetric(weights, 8)
    rows, columns = _sizes(weights)
    return SourceFormat(_title(storage, "fp8"), "fp8", "float8e4m3", "", rows, columns)


def _nvfp4(weights: Words, storage: str) -> SourceFormat:
    _symmetric(weights, 4)
    return nvfp4_format(_title(storage, "").strip(), weights.integer("group_size", 16, 16))


def _mx(weights: Words, storage: str) -> SourceFormat:
    """Microscaling: a power-of-two scale per 32 columns."""
    is_fp4 = storage.startswith("mxfp4")
    _symmetric(weights, 4 if is_fp4 else 8)
    size = weights.integer("group_size", 32, 32)
    name = _title(storage, "").strip()
    codes = MXFP4.b_dtype if is_fp4 else "float8e4m3"
    return SourceFormat(name, "mxfp4" if is_fp4 else "mxfp8", codes, MXFP4.scale_dtype, 1, size)


_FORMATS = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _float_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mx,
    "mxfp8-quantized": _mx,
}


def modelopt(words: Words, _text: Text) -> list[Rule]:
    """NVIDIA's Model Optimizer: one algorithm for all modules, or one per module; `quant_algo` null: none.

    Both forms are read: hf_quant_config.json's "quantization" and the flat one of config.json. A shell
    pattern that excludes a module excludes all below it; an algorithm given to a module also goes to these.
    """
    if words.has("quantization"):
        words = words.table("quantization")
    key = words.first("ignore", "exclude_modules")
    excluded = when(globbed_in(words.names(key), words.where(key), with_parents=True))
    if "quant_algo" in words.values and not words.has("quant_algo"):
        return []
    if words.text("quant_algo") != "mixed_precision":
        return [excluded, always(_algorithm_format(words))]
    if not words.has("quantized_layers"):
        raise words.wrong("quantized_layers", "an object of modules")
    layers = {name: _algorithm_format(layer) for name, layer in words.tables("quantized_layers")}

    def by_name(module: str) -> SourceFormat | None:
        return next((layers[name] for name in parents(module) if name in layers), None)

    return [excluded, by_name]


def _algorithm_format(words: Words) -> SourceFormat:
    if words.flag("pre_quant_scale", False):
        raise words.unsupported("pre_quant_scale", "false: activations that are not scaled")
    algorithm = words.text("quant_algo")
    if algorithm in ("nvfp4", "w4a16_nvfp4"):
        return nvfp4_format("modelopt nvfp4", _modelopt_group_size(words, 16, only=16))
    if algorithm == "mxfp8":
        return SourceFormat("modelopt mxfp8", "mxfp8", "float8e4m3", "float8e8m0", 1, 32)
    if algorithm in ("fp8_pb_wo", "fp8_block_scales"):
        size = _modelopt_group_size(words, 128)
        return SourceFormat("modelopt fp8 blocks", "fp8", "float8e4m3", "", size, size)
    if algorithm in ("fp8", "fp8_per_channel_per_token"):
        rows = 0 if algorithm == "fp8" else 1
        return SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", rows, 0)
    names = "NVFP4, W4A16_NVFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MIXED_PRECISION"
    raise words.unsupported("quant_algo", names)


def _modelopt_group_size(words: Words, default: int, only: int | None = None) -> int:
    """The group size, in newer configs given with the weights of a group; with `only` no other than that."""
    least, most = (1, LARGEST) if only is None else (only, only)
    if not words.has("group_size"):
        for _, group in words.tables("config_groups"):
            if group.has("weights") and group.table("weights").has("group_size"):
                return group.table("weights").integer("group_size", least, most)
    return words.integer("group_size", least, most, default=default)


QUARK_FLOATS = {
    "fp4": "float4e2m1",
    "fp6_e2m3": "float6e2m3",
    "fp6_e3m2": "float6e3m2",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
}
_QUARK_INTEGERS = ("int2", "int3", "int4", "uint4", "int8", "uint8")
_QUARK_SCALES = {
    "e8m0": "float8e8m0",
    "e5m3": "float8e5m3",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
    "fp8_e5m3": "float8e5m3",
}


def quark(words: Words, _text: Text) -> list[Rule]:
    """AMD's Quark: excluded names, then a scheme by name or shell pattern, by class, for the rest.

    A pattern speaks of the names it matches, not of modules below them. Source: `setup_config_per_layer` of
    quark.torch.quantization.model_transformation; the "re:" prefix is vLLM's.
    """
    export = words.table("export") if words.has("export") else Words({}, words.where("export"))
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
        named[name] = _quark_format(layer, packing)
        matches = globbed_in([name], words.where("layer_quant_config"), with_parents=False)
        patterns.append(when(matches, named[name]))
    rules += [named.get, *patterns]
    for kind, layer in words.tables("layer_type_quant_config"):
        if kind == "Linear":
            rules.append(always(_quark_format(layer, packing)))
    return [*rules, always(_quark_format(words.table("global_quant_config"), packing))]


def _quark_format(layer: Words, packing: str) -> SourceFormat:
    if not layer.has("weight"):
        return PLAIN
    spec, second, stage = _quark_stages(layer)
    dtype = spec.text("dtype", (*QUARK_FLOATS, *_QUARK_INTEGERS, "mx"))
    element = spec.text("mx_element_dtype", ("fp4", "fp6_e2m3", "fp6_e3m2")) if dtype == "mx" else dtype
    if spec.flag("is_dynamic", False):
        raise spec.unsupported("is_dynamic", "false, for weights")
    qscheme, rows, columns = _quark_sizes(spec, dtype)
    scale_format = _quark_scale_format(spec, dtype)
    scale_dtype = second.text("dtype", ("fp8_e4m3", "fp8_e5m2", "fp8_e5m3")) if second else None
    is_integer = dtype in _QUARK_INTEGERS
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
        "scale_qscheme": _quark_second_scheme(second) if second else None,
        "scale_stage": stage,
    }
    return SourceFormat(
        f"quark mx{element}" if is_mx else f"quark {element}",
        "quark",
        f"uint{dtype[-1]}" if is_integer else QUARK_FLOATS[element],
        _QUARK_SCALES.get(stored or "", ""),
        rows,
        columns,
        has_zero_point=is_integer and (dtype.startswith("uint") or not spec.flag("symmetric", True)),
        scale_2="tensor" if second else "none",
        options=tuple(options.items()),
    )


def _quark_stages(layer: Words) -> tuple[Words, Words | None, int]:
    """The weight's words, those of the quantization of its scales if there is one, and that one's place.

    Source: `parse_quark_tensor_config` of humming.schema.quark.
    """
    value = layer.values["weight"]
    stages = value if isinstance(value, list) else [value]
    specs = [Words(stage, layer.where("weight")) for stage in stages]
    if len(specs) == 1:
        return specs[0], None, 1
    if len(specs) != 2:
        raise layer.wrong("weight", "one or two stages of quantization")
    place = 1 if specs[1].flag("is_scale_quant", False) else 0
    return specs[1 - place], specs[place], place


def _quark_second_scheme(second: Words) -> str:
    """How the scales are quantized: all of a matrix by one number."""
    if second.flag("is_dynamic", False) or not second.flag("symmetric", True):
        raise second.unsupported("is_dynamic", "static, symmetric scales")
    if second.text("qscheme", ("per_tensor", "per_channel")) == "per_channel":
        raise second.unsupported("qscheme", "per_tensor")
    return "per_tensor"


def _quark_sizes(spec: Words, dtype: str) -> tuple[str, int, int]:
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


def _quark_scale_format(spec: Words, dtype: str) -> str | None:
    """How scales are stored; blocks say it in `scale_type` instead."""
    if dtype == "mx" or spec.values.get("scale_type") == "float8_e8m0fnu":
        return "e8m0"
    if not spec.has("scale_format"):
        return None
    return spec.text("scale_format", ("float32", "float16", "bfloat16", "e8m0", "e5m3"))
