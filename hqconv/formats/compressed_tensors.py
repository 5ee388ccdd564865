"""compressed-tensors: its method, and its encodings of integers: packed_int (pack-quantized) and int8 (int-quantized).

Its floats are stored as `fp8`, `mxfp4`, `mxfp6`, `mxfp8` and `nvfp4`. Legend: N output rows, K input columns, G groups
along K, b bits of a code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig, rotated
from hqconv.formats.encoding import (
    Decoded,
    Encoding,
    Headers,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.mx import mx_format, nvfp4_format
from hqconv.formats.quant_config import (
    Matcher,
    ModuleRule,
    always,
    named_in,
    quant_method,
    regex_matcher,
    when,
)
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.tensors import FLOATS, code_bits

if TYPE_CHECKING:
    import torch


# --- config ------------------------------------------------------------------------------------------------

_NOT_STORED = ("dense", "fakequant")
# Module classes of an expert's projection, here and in vLLM.
_EXPERT_CLASSES = ("FusedMoE", "Linear", "RoutedExperts")


# Where a transform is fused into the weights; elsewhere (input, output, k_cache …) it is applied when the model runs.
# Source: `TransformLocation.is_online` of compressed_tensors.transform.transform_args.
_FUSED_LOCATIONS = ("weight_input", "weight_output")
# Sources: QuantizationArgs, QuantizationScheme and QuantizationConfig of compressed_tensors.quantization,
# CompressedTensorsConfig of transformers.
_WEIGHTS = Keys(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder "
    "scale_dtype zp_dtype observer observer_kwargs"
)
_GROUP = Keys("targets format input_activations output_activations", inside={"weights": _WEIGHTS})
KEYS = Keys(
    "format quantization_status ignore sparsity_config transform_config moe_sparsity_config "
    "kv_cache_scheme global_compression_ratio run_compressed dequantize use_optimized_inference",
    entries={"config_groups": _GROUP},
)


def _stack_module(module: str) -> str:
    """Return the module whose parameter a stack of experts is: `experts` of `experts.gate_up_proj`; else the name."""
    before, _, _ = module.rpartition(".")
    return before if before.rpartition(".")[2] == "experts" else module


def _around_ignored(config: ConfigReader) -> Matcher:
    """Match modules below an entry of `ignore`: vLLM's module of all experts is such an entry, Linears are not."""
    return named_in(config.names("ignore"), config.where("ignore"), with_parents=True)


@quant_method("compressed-tensors", keys=KEYS, undecided=_around_ignored)
def parse_compressed_tensors(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse a scheme per target. Exact names go before regexes (sorted), these before classes.

    The format, not the status, says how weights are stored: old checkpoints in a packed format are "frozen".
    Source: `match_name` and `match_targets` of compressed_tensors.utils.match, which compare a module's own name; of
    groups with one target the last one counts.
    """
    sparsity = config.table("sparsity_config").values if config.has("sparsity_config") else {}
    if any(sparsity.values()) and sparsity.get("format") != "dense":
        raise config.unsupported("sparsity_config", "none: weights that are not sparse")
    if config.has("transform_config") and _is_rotated(config.table("transform_config")):
        raise rotated(
            config, "transform_config", f"transforms at {' and '.join(_FUSED_LOCATIONS)} only"
        )
    if config.get("quantization_status") == "decompressed":
        return []
    if not config.has("config_groups"):
        raise config.wrong("config_groups", "an object of schemes")
    schemes: dict[str, SourceFormat] = {}
    for _, group in config.tables("config_groups"):
        scheme = _scheme_format(group, group if group.has("format") else config)
        scheme = replace(scheme, static_inputs=_static_inputs(group))
        if not group.has("targets"):
            raise group.wrong("targets", "a list of module names, patterns or classes")
        schemes.update(dict.fromkeys(group.names("targets"), scheme))
    ignored = config.names("ignore")
    if set(_EXPERT_CLASSES) & set(ignored):
        return []
    patterns = [
        when(regex_matcher([target[3:]], config.where("config_groups")), schemes[target])
        for target in sorted(schemes)
        if target.startswith("re:")
    ]
    classes = [always(schemes[name]) for name in _EXPERT_CLASSES if name in schemes]
    is_ignored = named_in(ignored, config.where("ignore"))
    skipped = when(lambda module: is_ignored(module) or is_ignored(_stack_module(module)))
    return [skipped, schemes.get, *patterns, *classes]


def _is_rotated(config: ConfigReader) -> bool:
    """Return True if a transform config applies anything when the model runs, or may do so."""
    if not any(config.values.values()):
        return False
    schemes = [scheme for _, scheme in config.tables("config_groups")]
    applied = [transform for scheme in schemes for transform in scheme.get("apply") or [None]]
    return not schemes or any(
        not isinstance(transform, Mapping) or transform.get("location") not in _FUSED_LOCATIONS
        for transform in applied
    )


def _scheme_format(group: ConfigReader, holder: ConfigReader) -> SourceFormat:
    """Return the format of one group; `holder` is the object whose `format` counts.

    Whether type, bits, symmetry and group size of floats are those of the format, the tensors tell.
    """
    if not group.has("weights"):
        return PLAIN
    weights = group.table("weights")
    storage = holder.text("format", (*_NOT_STORED, *_FORMATS))
    if storage in _NOT_STORED:
        return PLAIN
    if weights.get("dynamic"):
        raise weights.wrong("dynamic", "false, for weights")
    if storage == "naive-quantized" and weights.text("type", ("int", "float")) == "int":
        return _int_quantized(weights, storage)
    return _FORMATS[storage](weights, storage)


# Activations with one static scale from calibration: type and bits in the config -> Humming's dtype.
_STATIC_INPUTS = {("float", 8): "float8e4m3", ("int", 8): "int8"}


def _static_inputs(group: ConfigReader) -> str:
    """Return Humming's dtype of a group's activations; "" if their scale is not static."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or not inputs.get("symmetric", True):
        return ""
    # Scales of groups that are found while serving, under a calibrated one.
    if inputs.get("dynamic") == "local":
        found = [inputs.get(key) for key in ("type", "num_bits", "strategy", "group_size")]
        return "float4e2m1" if found == ["float", 4, "tensor_group", 16] else ""
    if inputs.get("dynamic") or inputs.get("strategy") not in (None, "tensor"):
        return ""
    return _STATIC_INPUTS.get((str(inputs.get("type", "int")), inputs.get("num_bits", 8)), "")


def _title(storage: str, codes: str = "") -> str:
    return f"compressed-tensors {storage} {codes}".strip()


def _sizes(weights: ConfigReader) -> tuple[int, int]:
    """Return rows and columns of a scale, by strategy; without one it follows from the group size."""
    size = weights.integer("group_size", -1, default=-1)
    implied = "tensor" if not weights.has("group_size") else "channel" if size < 0 else "group"
    strategies = ("tensor", "channel", "group", "tensor_group", "block")
    strategy = weights.text("strategy", strategies, implied)
    if strategy == "block":
        return weights.pair("block_structure")
    if strategy in ("group", "tensor_group"):
        return 1, weights.integer("group_size", 1)
    return (0, 0) if strategy == "tensor" else (1, 0)


def _pack_quantized(weights: ConfigReader, storage: str) -> SourceFormat:
    bits = weights.integer("num_bits", 1, 8)
    rows, columns = _sizes(weights)
    return SourceFormat(
        _title(storage, f"int{bits}"),
        "packed_int",
        f"uint{bits}",
        "",
        rows,
        columns,
        has_zero_point=not weights.flag("symmetric", True),
        # Only these orders store a g_idx; "weight" and "static" are undone before storing.
        is_permuted=weights.get("actorder") in (True, "group", "dynamic"),
    )


def _int_quantized(weights: ConfigReader, storage: str) -> SourceFormat:
    """Return the format of codes stored in int8, for any number of bits."""
    title = _title(storage, f"int{weights.integer('num_bits', 1, 8)}")
    has_zero_point = not weights.flag("symmetric", True)
    return SourceFormat(title, "int8", "uint8", "", *_sizes(weights), has_zero_point)


def _float_quantized(weights: ConfigReader, storage: str) -> SourceFormat:
    return SourceFormat(_title(storage, "fp8"), "fp8", "float8e4m3", "", *_sizes(weights))


def _nvfp4(_weights: ConfigReader, storage: str) -> SourceFormat:
    return nvfp4_format(_title(storage))


def _mx(_weights: ConfigReader, storage: str) -> SourceFormat:
    return mx_format(_title(storage), storage.partition("-")[0])


_FORMATS: dict[str, Callable[[ConfigReader, str], SourceFormat]] = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _float_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mx,
    "mxfp6-pack-quantized": _mx,
    "mxfp8-quantized": _mx,
}

# --- tensors -----------------------------------------------------------------------------------------------


def _packed_width(size: int, bits: int, is_padded: bool) -> int:
    """Return the int32 words for `size` codes: straddling words, or 32 // bits to a word."""
    return math.ceil(size / (32 // bits)) if is_padded else math.ceil(size * bits / 32)


@register_encoding
class PackedInt(Encoding):
    """int32 words along K of codes offset by 2**(b - 1), as Humming's.

    By their number words are dense (codes straddle them, as in compressed-tensors 0.20) or padded (32 // b codes to a
    word; the same where b divides 32). Zero points are packed the same way along N. Source: compressed_tensors,
    pack_quantized/helpers.py.
    """

    name = "packed_int"
    weight_names = ("weight_packed",)
    part_names = ("weight_scale", "weight_zero_point", "weight_g_idx")

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        bits = code_bits(fmt.b_dtype)
        matrix.require_multiples(math.lcm(8, 32 // math.gcd(bits, 32)))
        dense = _packed_width(k, bits, False)
        padded = _packed_width(k, bits, True)
        weight = matrix.headers.get("weight_packed")
        is_padded = weight is not None and weight.shape != (n, dense)
        shapes = tuple((n, width) for width in sorted({dense, padded}))
        stored = [
            StoredTensor("weight", ("weight_packed",), ("I32",), shapes),
            StoredTensor("scale", ("weight_scale",), FLOATS, matrix.scale_shapes),
            StoredTensor(
                "g_idx", ("weight_g_idx",), ("I32", "I64"), ((k,),), is_required=fmt.is_permuted
            ),
        ]
        if fmt.has_zero_point:
            shape = (_packed_width(n, bits, is_padded), matrix.num_groups)
            stored.append(StoredTensor("zero_point", ("weight_zero_point",), ("I32",), (shape,)))
        return stored

    def complete(self, fmt: SourceFormat, found: Headers) -> SourceFormat:
        """Set the column order by its tensor."""
        return super().complete(replace(fmt, is_permuted="g_idx" in found), found)

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep dense words; pack padded ones anew."""
        from hqconv.quantization import bit_codec

        n, k = matrix.shape
        fmt = matrix.fmt
        bits = code_bits(fmt.b_dtype)
        packed = matrix["weight"].contiguous()
        is_padded = packed.shape[1] != _packed_width(k, bits, False)
        if is_padded:
            packed = bit_codec.pack(_unpack_padded(packed, bits, k), bits)
        zero_point = None
        if fmt.has_zero_point and is_padded:
            stored = matrix["zero_point"].t().contiguous()
            zero_point = _unpack_padded(stored, bits, n).t().contiguous()
        elif fmt.has_zero_point:
            zero_point = bit_codec.unpack_along_rows(matrix["zero_point"], bits, n)
        columns = matrix.group_index(matrix["scale"].size(-1)) if "g_idx" in matrix else None
        return matrix.coded(packed, matrix["scale"], zero_point=zero_point, column_groups=columns)


def _unpack_padded(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Unpack uint8 codes [R, size] of int32 words with 32 // bits codes each and the upper bits unused."""
    import torch

    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32, device=packed.device)
    codes: torch.Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)[:, :size].contiguous()


@register_encoding
class Int8(Encoding):
    """int8 weights [N, K] and zero points, as int-quantized writes them.

    Option has_offset: Ascend writes an offset per row beside its scales, float32 zeros: its W8A8_DYNAMIC kernels take
    none.
    """

    name = "int8"
    part_names = ("weight_scale", "weight_zero_point", "weight_offset")
    b_dtype = "uint8"

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        matrix.require_multiples(4)
        scales = matrix.scale_shapes
        stored = [
            StoredTensor("weight", ("weight",), ("I8",), ((n, k),)),
            StoredTensor("scale", ("weight_scale",), FLOATS, scales),
        ]
        if fmt.has_zero_point:
            stored.append(StoredTensor("zero_point", ("weight_zero_point",), ("I8",), scales))
        if fmt.option("has_offset"):
            stored.append(StoredTensor("offset", ("weight_offset",), FLOATS, scales))
        return stored

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Turn two's complement into offset binary."""
        import torch

        from hqconv.quantization import bit_codec

        if "offset" in matrix:
            matrix.refuse_where(
                matrix["offset"] != 0,
                "offset",
                "A symmetric matrix has an offset that is not zero.",
                "zeros, because W8A8_DYNAMIC has no offsets for weights, and other schemes' add or subtract",
            )
        packed = bit_codec.as_words(matrix["weight"].contiguous().view(torch.uint8) ^ 0x80)
        zero_point = None
        if matrix.fmt.has_zero_point:
            stored = matrix["zero_point"].contiguous().view(torch.uint8) ^ 0x80
            zero_point = matrix.scale_grid(stored).expand(matrix.shape[0], -1).contiguous()
        return matrix.coded(packed, matrix["scale"], zero_point=zero_point)
