"""Quantization methods that give modules a scheme each: compressed-tensors, modelopt.

Each function reads a method's words into rules; the first rule that speaks of a module decides.
"""

from __future__ import annotations

from dataclasses import replace

from hqconv.formats.config_reader import (
    LARGEST,
    ConfigReader,
    Rule,
    Text,
    always,
    beginning_with,
    globbed_in,
    named_in,
    parents,
    regex,
    when,
)
from hqconv.formats.floats import MXFP4, nvfp4_format
from hqconv.formats.source_format import PLAIN, SourceFormat

_STATUSES = ("initialized", "calibration", "frozen", "compressed", "decompressed")
_NOT_STORED = ("dense", "fakequant")
_REFUSED_FORMATS = ("mxfp6-pack-quantized", "marlin-24", "sparse-bitmask", "sparse-24-bitmask")
# Classes that an expert's projection may be of, here and in vLLM.
_EXPERT_CLASSES = ("FusedMoE", "Linear", "RoutedExperts")


def compressed_tensors(words: ConfigReader, _text: Text) -> list[Rule]:
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
        found = replace(found, static_inputs=_static_inputs(group))
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


def _is_idle(words: ConfigReader) -> bool:
    """Whether a sparsity or transform config changes nothing."""
    return words.values.get("format") == "dense" or not any(words.values.values())


def _scheme_format(group: ConfigReader, holder: ConfigReader) -> SourceFormat:
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


# Activations with one scale that was measured beforehand, by the words of compressed-tensors.
_STATIC_INPUTS = {("float", 8): "float8e4m3", ("int", 8): "int8"}


def _static_inputs(group: ConfigReader) -> str:
    """Humming's dtype of a group's activations; "" where they are none of the above."""
    inputs = group.values.get("input_activations")
    if not isinstance(inputs, dict) or inputs.get("dynamic") or not inputs.get("symmetric", True):
        return ""
    if inputs.get("strategy") not in (None, "tensor"):
        return ""
    return _STATIC_INPUTS.get((str(inputs.get("type", "int")), inputs.get("num_bits", 8)), "")


def _title(storage: str, what: str) -> str:
    return f"compressed-tensors {storage} {what}"


def _sizes(weights: ConfigReader) -> tuple[int, int]:
    """Rows and columns of a scale, by strategy; without one it follows from the group size."""
    size = weights.integer("group_size", -1, default=-1)
    implied = "tensor" if not weights.has("group_size") else "channel" if size < 0 else "group"
    strategy = weights.text("strategy", ("tensor", "channel", "group", "tensor_group", "block"), implied)
    if strategy == "block":
        return weights.pair("block_structure")
    if strategy in ("group", "tensor_group"):
        return 1, weights.integer("group_size", 1)
    return (0, 0) if strategy == "tensor" else (1, 0)


def _pack_quantized(weights: ConfigReader, storage: str) -> SourceFormat:
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


def _int_quantized(weights: ConfigReader, storage: str) -> SourceFormat:
    """Codes in int8, whatever their number of bits."""
    bits = weights.integer("num_bits", 1, 8)
    rows, columns = _sizes(weights)
    has_zero_point = not weights.flag("symmetric", True)
    return SourceFormat(_title(storage, f"int{bits}"), "int8", "uint8", "", rows, columns, has_zero_point)


def _symmetric(weights: ConfigReader, bits: int) -> None:
    weights.integer("num_bits", bits, bits)
    if not weights.flag("symmetric", True):
        raise weights.wrong("symmetric", "true, for a float type")


def _float_quantized(weights: ConfigReader, storage: str) -> SourceFormat:
    _symmetric(weights, 8)
    rows, columns = _sizes(weights)
    return SourceFormat(_title(storage, "fp8"), "fp8", "float8e4m3", "", rows, columns)


def _nvfp4(weights: ConfigReader, storage: str) -> SourceFormat:
    _symmetric(weights, 4)
    return nvfp4_format(_title(storage, "").strip(), weights.integer("group_size", 16, 16))


def _mx(weights: ConfigReader, storage: str) -> SourceFormat:
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


def modelopt(words: ConfigReader, _text: Text) -> list[Rule]:
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


def _algorithm_format(words: ConfigReader) -> SourceFormat:
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
        is_static = algorithm == "fp8"
        inputs = "float8e4m3" if is_static else ""
        rows = 0 if is_static else 1
        return SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", rows, 0, static_inputs=inputs)
    names = "NVFP4, W4A16_NVFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MIXED_PRECISION"
    raise words.unsupported("quant_algo", names)


def _modelopt_group_size(words: ConfigReader, default: int, only: int | None = None) -> int:
    """The group size, in newer configs given with the weights of a group; with `only` no other than that."""
    least, most = (1, LARGEST) if only is None else (only, only)
    if not words.has("group_size"):
        for _, group in words.tables("config_groups"):
            if group.has("weights") and group.table("weights").has("group_size"):
                return group.table("weights").integer("group_size", least, most)
    return words.integer("group_size", least, most, default=default)
